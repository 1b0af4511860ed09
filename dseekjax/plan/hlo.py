"""Reads XLA's HLO text: computations and their instructions in schedule order.

The text is what `compiled.as_text()` gives; nothing here needs JAX.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_BITS = {"pred": 8, "token": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_BRACKETS = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Array:
    """An array type."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def num_bytes(self) -> float:
        """Bytes, without padding."""
        return self.size * bits_of(self.dtype) / 8


def bits_of(dtype: str) -> int:
    """Width of an element as XLA names its type: f32, bf16, s8, f8e4m3fn, pred …"""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if digits is None:
        raise ValueError(f"unknown element type {dtype} in HLO")
    return int(digits.group(1))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    argument: str
    """What stands between the parentheses: operands, or the number of a parameter."""
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the result; tuples are flattened."""
        return _arrays(self.type)

    def attribute(self, name: str) -> str | None:
        """The text of an attribute, as in `dimensions={0}`; None where there is none."""
        # Strings of metadata come later on the line and may hold anything.
        found = re.search(rf"(?:^|, ){re.escape(name)}=", self.attributes)
        return None if found is None else self.attributes[found.end() : _end(self.attributes, found.end())]

    @cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """What a backend noted, empty where it is no JSON object."""
        text = self.attribute("backend_config") or ""
        if text.startswith('"'):
            text = text[1:-1].encode().decode("unicode_escape")
        try:
            config = json.loads(text)
        except json.JSONDecodeError:
            return {}
        return config if isinstance(config, dict) else {}


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are scheduled, if the module is."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """All instructions, and the elements of tuples that others name as `%tuple#1` without one to take them."""
        named = {instruction.name: instruction for instruction in self.instructions}
        for name in {operand for instruction in self.instructions for operand in instruction.operands} - named.keys():
            _add_element(named, name)
        return named

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """The instruction that gives an operand."""
        return self.by_name[instruction.operands[index]]

    def operand_arrays(self, instruction: Instruction) -> tuple[Array, ...]:
        """The arrays of all operands."""
        return tuple(array for name in instruction.operands for array in self.by_name[name].arrays)


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str
    num_partitions: int
    is_scheduled: bool

    def called(self, instruction: Instruction, attribute: str) -> Computation:
        """The computation that an attribute names."""
        name = instruction.attribute(attribute)
        if name is None:
            raise ValueError(f"{instruction.name} has no {attribute}")
        return self.computations[name.lstrip("%")]


def parse_hlo(text: str) -> Module:
    """Parses the text of a module.

    Raises:
        ValueError: it is not the text of one.
    """
    computations: dict[str, Computation] = {}
    header, entry, name = "", "", ""
    lines: list[Instruction] = []
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif not name and (start := _COMPUTATION.match(line)):
            name, lines = start.group(2), []
            entry = name if start.group(1) else entry
        elif line.startswith("}"):
            if name:
                computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name and line.strip():
            lines.append(_instruction(line))
    if not header or not entry:
        raise ValueError("this is no HLO text: it has no HloModule line or no ENTRY computation")
    partitions = re.search(r"num_partitions=(\d+)", header)
    return Module(
        computations=computations,
        entry=entry,
        num_partitions=int(partitions.group(1)) if partitions else 1,
        is_scheduled="is_scheduled=true" in header,
    )


def _instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    if start is None:
        raise ValueError(f"cannot read this line of HLO: {line[:200]}")
    type_end = _type_end(line, start.end())
    opcode = _OPCODE.match(line, type_end)
    if opcode is None:
        raise ValueError(f"cannot read the operation in this line of HLO: {line[:200]}")
    closing = _closing(line, opcode.end() - 1)
    argument = line[opcode.end() : closing]
    literal = opcode.group(1) in ("constant", "parameter")
    return Instruction(
        name=start.group(2),
        opcode=opcode.group(1),
        type=line[start.end() : type_end],
        operands=() if literal else tuple(_NAME.findall(argument)),
        attributes=line[closing + 1 :].removeprefix(", "),
        argument=argument,
        is_root=bool(start.group(1)),
    )


def _add_element(named: dict[str, Instruction], name: str) -> None:
    whole, _, index = name.rpartition("#")
    if not whole:
        raise ValueError(f"this HLO uses %{name} and does not define it")
    if whole not in named:
        _add_element(named, whole)
    parts = _elements(named[whole].type)
    named[name] = Instruction(
        name=name,
        opcode="get-tuple-element",
        type=parts[int(index)],
        operands=(whole,),
        attributes=f"index={index}",
        argument=f"%{whole}",
        is_root=False,
    )


def _elements(type_: str) -> list[str]:
    """The types in a tuple's."""
    inside = re.sub(r"/\*.*?\*/", "", type_)[1:-1]
    parts, start = [], 0
    while start < len(inside):
        end = _end(inside, start)
        parts.append(inside[start:end].strip())
        start = end + 1
    return parts


def _type_end(line: str, start: int) -> int:
    if line[start] == "(":
        return _closing(line, start) + 1
    return line.index(" ", start)


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes; brackets in strings do not count."""
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == '"':
            position = _string_end(text, position)
        elif character in _BRACKETS:
            depth += 1
        elif character in _BRACKETS.values():
            depth -= 1
            if depth == 0:
                return position
        position += 1
    raise ValueError(f"a bracket is not closed in this line of HLO: {text[:200]}")


def _string_end(text: str, start: int) -> int:
    position = start + 1
    while position < len(text) and text[position] != '"':
        position += 2 if text[position] == "\\" else 1
    return position


def _end(text: str, start: int) -> int:
    """Where the item that begins at `start` ends: at the next comma outside of brackets and strings."""
    position = start
    while position < len(text) and text[position] != ",":
        if text[position] == '"':
            position = _string_end(text, position)
        elif text[position] in _BRACKETS:
            position = _closing(text, position)
        position += 1
    return position


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(size.strip(" <=")) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(text)
    )


def trip_count(loop: Instruction) -> int | None:
    """How often a while loop runs, None if the compiler did not know."""
    known = loop.backend_config.get("known_trip_count")
    return int(known["n"]) if known else None


def branches_of(module: Module, conditional: Instruction) -> list[Computation]:
    """All branches of a conditional."""
    listed = conditional.attribute("branch_computations")
    names = _NAME.findall(listed) if listed else []
    names = names or [(conditional.attribute(f"{which}_computation") or "").lstrip("%") for which in ("true", "false")]
    return [module.computations[name] for name in names]
