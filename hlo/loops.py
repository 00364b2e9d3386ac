"""How often a loop runs that XLA no longer says it of: passes that peel an iteration or unroll drop the trip count they knew.

A counted loop starts its counter at a constant, adds a constant, and goes on while it is below a bound: a constant, or a part of the
loop's state that starts as a constant and is handed on as it is (a count that was behind a barrier while XLA optimised: trainer/step.py).
Anything else is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.hlo.parse import Computation, Instruction

Affine = tuple[int | None, int]
"""A part of what a computation is called with, by its index (None: no part), plus a constant."""


def derived_trip_count(computations: Mapping[str, Computation], outside: Computation, loop: Instruction) -> int | None:
    """Return the iterations of a counted `while`; None when it is not one. `outside`: the computation that holds it."""
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

    def at_start(part: int) -> int | None:
        value = _affine(computations, outside, initial.operands[part])
        return value[1] if value is not None and value[0] is None else None

    def after_a_run(part: int) -> Affine | None:
        return _affine(computations, body, update.operands[part])

    bound: int | None = limit[1]
    if limit[0] is not None:
        given = at_start(limit[0]) if after_a_run(limit[0]) == (limit[0], 0) else None
        bound = None if given is None else given + limit[1]
    start, after = at_start(counter), after_a_run(counter)
    if start is None or bound is None or after is None or after[0] != counter or after[1] <= 0:
        return None
    return max(0, -((start - bound) // after[1]))


def _argument(
    computations: Mapping[str, Computation], called: Computation, parameter: Instruction
) -> tuple[Computation, Instruction | None]:
    """Return what the only `call` of a computation passes as a parameter, and where: XLA on CPUs (0.12) moves small loops into calls."""
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
    """Return the part of the loop's state that counts, and the bound it stays below."""
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
    """Write an integer as a part of the computation's parameter plus a constant; None when it is no such thing.

    arguments: what the parameters of a fused computation are; without, the parameter is a tuple and its parts are what is looked for.
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
