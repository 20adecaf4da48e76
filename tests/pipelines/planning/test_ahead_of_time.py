"""A round compiled for TPUs, where their compiler is installed (the extra `tpu`)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax.pipelines.planning.ahead_of_time import COMPILER_ENVIRONMENT

_HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
_NEEDS_COMPILER = pytest.mark.skipif(not _HAS_COMPILER, reason="no compiler for TPUs: libtpu is not installed")

# In a process of its own, because jax must not have been used before the compiler is loaded.
_PROGRAM = """
import sys
from benchmarks.ahead_of_time import pair
from dspark_jax.pipelines.planning.ahead_of_time import compile_round
from dspark_jax.pipelines.speculative.sizes import EngineOptions
target, draft = pair(2, 1)
found = compile_round(target, draft, EngineOptions(batch_size=16, max_seq_len=4096), topology=sys.argv[1])
print("moved / bound", found.moved / found.bound)
print("temporaries / weights", found.temporaries / found.weights)
print("aliased / pages", found.aliased / found.pages)
print("kernels", sum("context_attention" in one.scope and one.opcode == "custom-call" for one in found.traffic))
print("narrow maxima", found.text.count("(bf16[128]"), "wide maxima", found.text.count("(f32[128]"))
"""


@_NEEDS_COMPILER
@pytest.mark.thorough
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_round_moves_what_it_must_and_little_more(topology: str) -> None:
    """Shapes of Qwen3-4B with 2 target layers and 1 draft layer. W2 of the Markov head is read in each of 7 slots."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, **COMPILER_ENVIRONMENT, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, topology], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    figures = {name: float(value) for name, value in re.findall(r"([a-z][a-z /]*) ([\d.]+)", run.stdout)}
    assert figures["moved / bound"] < 1.25
    assert figures["temporaries / weights"] < 0.05
    assert figures["aliased / pages"] >= 1
    assert figures["kernels"] == 3
    # The argmax of the target's logits, fused with the product that makes them: its maximum is float32.
    assert (figures["narrow maxima"], figures["wide maxima"] > 0) == (0, True)
