"""Parse the text of a compiled HLO module (`compiled.as_text()`) of the CPU or GPU backend into `hlo.module.Module`.

Some XLA passes (peeling, unrolling) drop the trip count of a loop. It is then derived from the loop's counter: the counter starts at a
constant, a constant is added in each iteration, and the loop runs while the counter is below a bound. The bound is a constant, or an
element of the loop's state that starts as a constant and never changes (a count kept behind an optimization barrier: trainer/step.py).
Other loops have no derived trip count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.hlo.module import Computation, Instruction, Module, Shape, Source

HOST_MEMORY = ":S(5)}"
"""Layout suffix of a shape in host memory, memory space 5 (xla/service/memory_annotations.h, xla/layout.h)."""
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[((?:<?=?\d+,?)*)\]")
_HEAD = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
Affine = tuple[int | None, int]
"""An integer as (index, constant): element `index` of the computation's tuple parameter plus the constant; index None: the constant."""


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


def with_derived_trip_counts(computations: dict[str, Computation]) -> dict[str, Computation]:
    """Add the trip counts that are derived from loop counters."""
    result = dict(computations)
    for computation in computations.values():
        if any(i.opcode == "while" and i.trip_count is None for i in computation.instructions):
            result[computation.name] = Computation(
                computation.name,
                tuple(
                    replace(i, derived_trip_count=_derived_trip_count(computations, computation, i))
                    if i.opcode == "while" and i.trip_count is None
                    else i
                    for i in computation.instructions
                ),
            )
    return result


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


def _derived_trip_count(computations: Mapping[str, Computation], outside: Computation, loop: Instruction) -> int | None:
    """Return the iterations of a counted `while` inside the computation `outside`; None when it is not a counted loop."""
    condition, body = (_called(computations, loop, attribute) for attribute in ("condition", "body"))
    if condition is None or body is None or not loop.operands:
        return None
    test = _comparison(computations, condition)
    initial = outside.by_name.get(loop.operands[0])
    if initial is not None and initial.opcode == "parameter":
        outside, initial = _argument(computations, outside, initial)
    update = body.instructions[-1]
    if test is None or initial is None or initial.opcode != "tuple" or update.opcode != "tuple":
        return None
    counter, limit = test

    def at_start(index: int) -> int | None:
        value = _affine(computations, outside, initial.operands[index])
        return value[1] if value is not None and value[0] is None else None

    def after_iteration(index: int) -> Affine | None:
        return _affine(computations, body, update.operands[index])

    bound: int | None = limit[1]
    if limit[0] is not None:
        given = at_start(limit[0]) if after_iteration(limit[0]) == (limit[0], 0) else None
        bound = None if given is None else given + limit[1]
    start, after = at_start(counter), after_iteration(counter)
    if start is None or bound is None or after is None or after[0] != counter or after[1] <= 0:
        return None
    return max(0, -((start - bound) // after[1]))


def _argument(
    computations: Mapping[str, Computation], called: Computation, parameter: Instruction
) -> tuple[Computation, Instruction | None]:
    """Return the argument that the only `call` of a computation passes for a parameter, and the calling computation.

    XLA's CPU backend (jaxlib 0.12) moves small loops into calls.
    """
    calls = [
        (place, each)
        for place in computations.values()
        for each in place.instructions
        if each.opcode == "call" and _called(computations, each, "to_apply") is called
    ]
    if len(calls) != 1:
        return called, None
    place, call = calls[0]
    return place, place.by_name.get(call.operands[parameter.parameter_number or 0])


def _comparison(computations: Mapping[str, Computation], condition: Computation) -> tuple[int, Affine] | None:
    """Return the index of the counter in the loop's state and the bound it stays below; None for any other condition."""
    root, place = condition.instructions[-1], condition
    arguments: dict[int, Affine | None] = {}
    fused = _called(computations, root, "calls") if root.opcode == "fusion" else None
    if fused is not None:
        arguments = {number: _affine(computations, condition, name) for number, name in enumerate(root.operands)}
        root, place = fused.instructions[-1], fused
    if root.opcode != "compare" or len(root.operands) != 2:
        return None
    first, second = (_affine(computations, place, name, arguments) for name in root.operands)
    if root.attribute("direction") == "GT":
        first, second = second, first
    elif root.attribute("direction") != "LT":
        return None
    if first is None or second is None or first[0] is None:
        return None
    return first[0], (second[0], second[1] - first[1])


def _affine(
    computations: Mapping[str, Computation], place: Computation, name: str, arguments: Mapping[int, Affine | None] | None = None
) -> Affine | None:
    """Return an integer value as `Affine`; None when it is not of that form.

    arguments: values of the parameters of a fused computation. None: the computation has one tuple parameter, and its elements are indexed.
    """
    instruction = place.by_name.get(name)
    if instruction is None:
        return None
    opcode = instruction.opcode
    if opcode == "constant":
        return None if instruction.constant is None else (None, instruction.constant)
    if opcode == "parameter":
        return arguments.get(instruction.parameter_number or 0) if arguments is not None else None
    if opcode == "get-tuple-element":
        source = place.by_name.get(instruction.operands[0])
        index = instruction.attribute("index")
        return (int(index), 0) if source is not None and source.opcode == "parameter" and index is not None else None
    if opcode in ("copy", "bitcast"):
        return _affine(computations, place, instruction.operands[0], arguments)
    if opcode == "fusion":
        fused = _called(computations, instruction, "calls")
        given = {number: _affine(computations, place, operand, arguments) for number, operand in enumerate(instruction.operands)}
        return None if fused is None else _affine(computations, fused, fused.instructions[-1].name, given)
    if opcode == "add":
        first, second = (_affine(computations, place, operand, arguments) for operand in instruction.operands)
        if first is None or second is None or (first[0] is not None and second[0] is not None):
            return None
        return (first[0] if first[0] is not None else second[0], first[1] + second[1])
    return None


def _called(computations: Mapping[str, Computation], instruction: Instruction, attribute: str) -> Computation | None:
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", instruction.attributes)
    return computations.get(found.group(1)) if found else None
