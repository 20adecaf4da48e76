"""The examples run as they are documented."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_seed_gives_the_text_of_plain_decoding(
    quick_compilation: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where programs compile quickly."""
    monkeypatch.setattr(sys, "argv", ["sampling.py"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / "sampling.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "equal to plain decoding: True" in said
    assert len(re.findall(r"seed \d+, continuation \d: ", said)) == 3
    assert "then cancelled; rows in use: 0" in said
