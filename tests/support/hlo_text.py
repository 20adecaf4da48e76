"""Reading compiled HLO text: which operations produce whole arrays of given shapes, and what leaves the device."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\(", re.MULTILINE
)
_ARRAY = re.compile(r"\b[a-z]+\d*\[(?P<sizes>[\d,]*)\]")
_LEAVES_THE_DEVICE = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")

Shape = tuple[int, ...]


def instructions(text: str) -> Iterator[tuple[str, str, list[Shape]]]:
    """(opcode, full line head, shapes of the results) of every instruction, those inside fusions and loops included."""
    for match in _INSTRUCTION.finditer(text):
        shapes = [
            tuple(int(size) for size in array["sizes"].split(",") if size) for array in _ARRAY.finditer(match["type"])
        ]
        yield match["opcode"], match[0].strip(), shapes


def whole_array_moves(text: str, shapes: Collection[Shape]) -> list[str]:
    """Copies, conversions and transpositions whose result is as large as one of `shapes`, in any order of its axes."""
    wanted = {tuple(sorted(shape)) for shape in shapes}
    moves = ("copy", "copy-start", "convert", "transpose")
    return [
        line
        for opcode, line, found in instructions(text)
        if opcode in moves and any(tuple(sorted(shape)) in wanted for shape in found)
    ]


def host_calls(text: str) -> list[str]:
    """Instructions that talk to the host: feeds, and custom calls that name a callback."""
    calls = [line for opcode, line, _ in instructions(text) if opcode in _LEAVES_THE_DEVICE]
    return calls + re.findall(r'custom_call_target="[^"]*(?:callback|host)[^"]*"', text)
