"""The examples run as they are documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_model_of_one_s_own_embeds_the_draft_and_says_the_same() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_target.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # the values count, not the speed
    )
    assert done.returncode == 0, done.stderr
    tau = re.search(r"tau ([\d.]+), equal to plain decoding: True", done.stdout)
    assert tau is not None, done.stdout
    assert float(tau[1]) > 2, "the draft proposes what the model says, or its wiring is off"
