"""`python -m dspark_jax`: the same as the `dspark` command."""

import sys

from dspark_jax.pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main())
