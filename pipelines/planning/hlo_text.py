"""The text of an optimised HLO module as data: computations, their instructions, and the sizes of arrays."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

# What the text calls a dtype, where numpy has another name for it.
_BITS = {"pred": 8, "bf16": 16, "s4": 4, "u4": 4}
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[suf]\d+|f8\w+|c\d+)\[(?P<sizes>[\d,]*)\](?P<layout>\{[^{}]*\})?")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_NAMES = re.compile(r"[^{}, ]+")
_NAME = re.compile(r"%([\w.-]+)")
_OTHER_MEMORY = re.compile(r"S\([1-9]")


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """One array of a type."""

    num_bytes: int
    is_in_main_memory: bool  # false: in a fast memory of the chip


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    arguments: str  # the text between the parentheses
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays of the result, in order; those of nested tuples too."""
        return tuple(_arrays(self.type))

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls or applies."""
        lists = re.findall(
            r"(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.-]+)", self.attributes
        )
        return tuple(name.lstrip("%") for text in lists for name in re.split(r"[{}, ]+", text) if name)

    @property
    def scope(self) -> str:
        """The named scopes of the program that the instruction comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module: the instructions of every computation by name, in order."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


def parse_module(text: str) -> Module:
    """The module of `compiled.as_text()`. Raises `ValueError` if the text has no entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and "->" in line:
            current = computations[header["name"]] = {}
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found["name"], found["rest"], is_root=bool(found["root"]))
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("HLO text without an ENTRY computation")
    return Module(computations, entry)


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(f"HLO instruction {name}: found {rest[:60]!r}, allowed TYPE OPCODE(OPERANDS)")
    closing = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : closing]
    return Instruction(
        name=name,
        opcode=opcode["opcode"],
        type=rest[:end],
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=rest[closing + 1 :],
        is_root=is_root,
    )


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"HLO text: parenthesis not closed in {text[:60]!r}")


def _arrays(text: str) -> Iterator[ArrayType]:
    for found in _ARRAY.finditer(text):
        size = 1
        for axis in filter(None, found["sizes"].split(",")):
            size *= int(axis)
        is_elsewhere = found["layout"] is not None and _OTHER_MEMORY.search(found["layout"])
        yield ArrayType(-(-size * _bits(found["dtype"]) // 8), not is_elsewhere)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if dtype.startswith("f8"):
        return 8
    return int(dtype[1:])
