"""Parse the text of a compiled HLO module (`compiled.as_text()`) of the CPU or GPU backend into `hlo.module.Module`."""

from __future__ import annotations

import re

from ridgeline.hlo.module import Computation, Instruction, Module, Shape, Source
from ridgeline.hlo.trip_counts import with_derived_trip_counts

HOST_MEMORY = ":S(5)}"
"""Layout suffix of a shape in host memory, memory space 5 (xla/service/memory_annotations.h, xla/layout.h)."""
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[((?:<?=?\d+,?)*)\]")
_HEAD = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")


def parse(text: str) -> Module:
    """Parse the text of a compiled module. Raises ValueError when it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = ""
    name, body = "", None  # type: tuple[str, list[Instruction] | None]
    for line in text.splitlines():
        if body is None:
            header = _HEADER.match(line)
            if header:
                name, body = header.group("name"), []
                entry = name if header.group("entry") else entry
        elif line.startswith("}"):
            computations[name], body = Computation(name, tuple(body)), None
        else:
            instruction = _instruction(line)
            if instruction:
                body.append(instruction)
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    title = re.match(r"HloModule ([^,\s]+)", text)
    return Module(title.group(1) if title else "", with_derived_trip_counts(computations), entry, _sources(text))


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    shapes = tuple(Shape(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", line[start:end])))
    arguments = line[opcode.end() : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments)) if opcode.group("opcode") not in ("constant", "parameter") else ()
    number = int(arguments) if opcode.group("opcode") == "parameter" and arguments.isdigit() else None
    constant = int(arguments) if opcode.group("opcode") == "constant" and re.fullmatch(r"-?\d+", arguments) else None
    on_host = HOST_MEMORY in line[start:end]
    return Instruction(
        head.group("name"), opcode.group("opcode"), shapes, operands, line[close + 1 :], number, constant, in_host_memory=on_host
    )


def _closing(line: str, opening: int) -> int:
    """Return the index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(line)):
        depth += {"(": 1, ")": -1}.get(line[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in HLO line: {line.strip()[:120]}")


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(dim.strip("<=")) for dim in text.split(",") if dim)


def _sources(text: str) -> dict[int, Source]:
    """Return stack_frame_id -> source line from the tables FileNames, FunctionNames, FileLocations and StackFrames of the module."""
    files = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M)}
    functions = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FunctionNames"), re.M)}
    places = {
        int(n): Source(files.get(int(f), ""), int(line), functions.get(int(fn), ""))
        for n, f, fn, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", _table(text, "FileLocations"), re.M
        )
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M)
    return {int(n): places[int(place)] for n, place in frames if int(place) in places}


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    return found.group(1) if found else ""
