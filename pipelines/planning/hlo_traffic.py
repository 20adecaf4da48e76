"""How many bytes a compiled program reads from and writes to the main memory of a device, by instruction.

`cost_analysis` of XLA counts a prefetch into fast memory and the use of what was fetched as two reads of main memory.
Here an array counts where it is: layouts say which arrays are in fast memory. The body of a loop counts once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dspark_jax.pipelines.planning.hlo_text import Instruction, Module, parse_module

_RUNS_OTHERS = frozenset(("while", "conditional", "call"))
_FREE = _RUNS_OTHERS | {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"),
    *("partition-id", "replica-id"),
}
# Custom calls that name a part of a buffer or reserve one, and move nothing.
_FREE_CALLS = ("ConcatBitcast", "AllocateBuffer", "Bitcast", "GatherScatterIndicesAligned")
_SLICES = ("gather", "dynamic-slice", "slice")
_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}  # the operand that holds the new entries


class Traffic(NamedTuple):
    """Bytes of one instruction."""

    name: str
    opcode: str
    scope: str
    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def hbm_traffic(text: str) -> list[Traffic]:
    """The traffic of every instruction that runs and moves something, from `compiled.as_text()`.

    A slice or a gather reads what it gives. An update in place writes its new entries. A kernel moves what it states in
    its cost estimate.
    """
    module = parse_module(text)
    found = [_traffic(instruction, computation, module) for computation, instruction in _executed(module)]
    return [traffic for traffic in found if traffic.total]


def _executed(module: Module) -> Iterator[tuple[dict[str, Instruction], Instruction]]:
    """The instructions of the entry and of the loops and branches that it runs, not those inside fusions."""
    waiting, seen = [module.entry], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        computation = module.computations[name]
        for instruction in computation.values():
            yield computation, instruction
            if instruction.opcode in _RUNS_OTHERS:
                waiting += instruction.called


def _traffic(instruction: Instruction, computation: dict[str, Instruction], module: Module) -> Traffic:
    read, written = _bytes(instruction, computation, module)
    return Traffic(instruction.name, instruction.opcode, instruction.scope, read, written)


def _bytes(instruction: Instruction, computation: dict[str, Instruction], module: Module) -> tuple[int, int]:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0, 0
    if opcode in ("copy-start", "slice-start"):
        return _started(instruction)
    if opcode == "custom-call":
        if any(f'"{name}' in instruction.attributes for name in _FREE_CALLS):
            return 0, 0
        stated = _stated_bytes(instruction)
        if stated is not None:
            return stated, 0
    reads, update = _inside(instruction, computation, module)
    read = sum(
        min(operand.num_bytes, reads(index))
        for index, name in enumerate(instruction.operands)
        if (operand := computation.get(name)) is not None and all(array.is_in_main_memory for array in operand.arrays)
    )
    results = [array.num_bytes for array in instruction.arrays if array.is_in_main_memory]
    return read, sum(results) if update is None else sum(min(update, size) for size in results)


def _started(instruction: Instruction) -> tuple[int, int]:
    """A copy that another instruction awaits: `(to, from, context)` of a copy, `((from), to, context)` of a slice."""
    first, second = instruction.arrays[:2]
    to, source = (first, second) if instruction.opcode == "copy-start" else (second, first)
    return to.num_bytes * source.is_in_main_memory, to.num_bytes * to.is_in_main_memory


def _stated_bytes(instruction: Instruction) -> int | None:
    """The bytes that a kernel says it moves."""
    found = re.search(r"backend_config=(\{.*\})", instruction.attributes)
    if not found:
        return None
    config, _ = json.JSONDecoder().raw_decode(found[1])
    estimate = config.get("custom_call_config", {}).get("cost_estimate", {})
    return int(estimate["bytes_accessed"]) if "bytes_accessed" in estimate else None


_Reads = Callable[[int], int]
_ALL = 1 << 62


def _inside(instruction: Instruction, computation: dict[str, Instruction], module: Module) -> tuple[_Reads, int | None]:
    """How much of each operand is read at most, and the bytes of an update in place (`None`: the result is new)."""
    opcode = instruction.opcode
    if opcode == "fusion":
        fused = module.computations[instruction.called[0]]
        parameters = {int(one.arguments): one for one in fused.values() if one.opcode == "parameter"}
        root = next(one for one in fused.values() if one.is_root)
        return lambda index: _read_of(parameters[index], fused, module), _update_of(root, fused, module)
    if opcode in _SLICES:
        return lambda index: _ALL if index else instruction.num_bytes, None
    if opcode in _UPDATES:
        return lambda index: _ALL if index else 0, _update_of(instruction, computation, module)
    return lambda index: _ALL, None


def _read_of(value: Instruction, fused: dict[str, Instruction], module: Module) -> int:
    """Bytes of `value` that the instructions of a fusion read."""
    total = 0
    for user in fused.values():
        for index, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode == "bitcast":
                total += _ALL if user.is_root else _read_of(user, fused, module)
            else:
                total += _inside(user, fused, module)[0](index)
    return min(total, _ALL)


def _update_of(root: Instruction, fused: dict[str, Instruction], module: Module) -> int | None:
    """Bytes of the new entries if the result of a fusion is an array with some entries replaced."""
    if root.opcode == "bitcast" and root.operands:
        return _update_of(fused[root.operands[0]], fused, module)
    if root.opcode in _UPDATES:
        entries = fused.get(root.operands[_UPDATES[root.opcode]])
        return None if entries is None else entries.num_bytes
    if root.opcode == "fusion":
        inner = module.computations[root.called[0]]
        return _update_of(next(one for one in inner.values() if one.is_root), inner, module)
    return None
