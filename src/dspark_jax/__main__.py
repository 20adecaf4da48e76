"""`python -m dspark_jax`, and the `dspark` command."""

import sys


def main() -> int:
    """Run the command line of this process; returns the exit status."""
    # Before anything that takes time to import: Ctrl-C ends the command at every moment.
    from dspark_jax.pipelines.process import leave_at_signals, open_missing_streams

    open_missing_streams()
    leave_at_signals()
    from dspark_jax.pipelines.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
