"""Iterations of the loops of a compiled module whose count XLA does not state, from what the module computes.

A loop is counted when it runs while a counter is below a bound (or above it, seen from the other side), and a positive constant is added to
the counter in each iteration. Start and bound are integers that the module computes from constants and from the counters of the loops
around it: a count behind an optimization barrier (trainer/step.py), or the blocks of keys that a block of queries attends to
(models/attention/chunked.py). Where they depend on counters of loops around it, its count is the mean over all iterations of those, so
that executions of its body per step are exact. Loops that depend on data have no derived count; the program
can state their mean (`module.trips_scope`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ridgeline.hlo.module import Computation, Instruction

MOST_EVALUATIONS = 1 << 16
"""Loops that start more often than this with different bounds have no derived count."""


@dataclass(frozen=True)
class Affine:
    """An integer: element `element` of the state of a loop, plus `constant`; element None: the constant."""

    constant: int
    element: int | None = None


class _Depends(Exception):
    """A value depends on the iteration of a loop that is not given."""

    def __init__(self, loop: Instruction) -> None:
        super().__init__(loop.name)
        self.loop = loop


@dataclass(frozen=True)
class _Frame:
    """A computation that is evaluated."""

    computation: Computation
    parameter: Callable[[int, int | None], Affine | None]
    """(Parameter number, element of a tuple or None) -> value."""
    given: Mapping[str, int] | None
    """Loop -> its iteration, of loops around the computation; None: the computation is evaluated for any iteration."""


def with_derived_trip_counts(computations: dict[str, Computation]) -> dict[str, Computation]:
    """Add the derived trip counts."""
    uncounted = [
        (computation, i)
        for computation in computations.values()
        for i in computation.instructions
        if i.opcode == "while" and i.exact_trip_count is None
    ]
    reader = _Reader(computations) if uncounted else None
    result = dict(computations)
    for computation in {computation.name: computation for computation, _ in uncounted}.values():
        assert reader is not None
        result[computation.name] = Computation(
            computation.name,
            tuple(
                replace(i, derived_trip_count=reader.mean_trips(i)) if i.opcode == "while" and i.exact_trip_count is None else i
                for i in computation.instructions
            ),
        )
    return result


class _Reader:
    """Evaluates integers of one module."""

    def __init__(self, computations: Mapping[str, Computation]) -> None:
        self.computations = computations
        self.callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        """Computation -> the instructions that call it, each with its computation."""
        self.places: dict[str, Computation] = {}
        """Loop -> its computation."""
        for computation in computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    self.callers.setdefault(name, []).append((computation, instruction))
                if instruction.opcode == "while":
                    self.places[instruction.name] = computation
        self._updates: dict[tuple[str, int], Affine | None] = {}

    def mean_trips(self, loop: Instruction) -> Fraction | None:
        """Return the mean iterations of a loop; None when they cannot be derived."""
        budget = MOST_EVALUATIONS

        def counted(given: Mapping[str, int]) -> tuple[int, int] | None:
            """Return all iterations and all executions of the loop in the given iterations of loops around it."""
            nonlocal budget
            budget -= 1
            try:
                trips = self._trips(loop, given) if budget >= 0 else None
                times = self._executions(loop, given)
                return None if trips is None else (times * trips, times)
            except _Depends as needed:
                around = needed.loop
            while True:
                try:
                    repeats = self._trips(around, given)
                    break
                except _Depends as needed:
                    around = needed.loop
            if repeats is None or repeats > budget:
                return None
            iterations = executions = 0
            for number in range(repeats):
                found = counted({**given, around.name: number})
                if found is None:
                    return None
                iterations, executions = iterations + found[0], executions + found[1]
            return iterations, executions

        found = counted({})
        if found is None:
            return None
        return Fraction(found[0], found[1]) if found[1] else Fraction(0)

    def _executions(self, loop: Instruction, given: Mapping[str, int]) -> int:
        """Return how often a loop runs in the given iterations of loops around it; those of unknown count run once. Raises _Depends."""
        times, place = 1, self.places[loop.name]
        while (caller := self._caller(place)) is not None:
            place, around = caller
            if around.opcode == "while" and around.name not in given:
                trips = self._trips(around, given)
                times *= 1 if trips is None else trips
        return times

    def _caller(self, computation: Computation) -> tuple[Computation, Instruction] | None:
        """Return the only instruction that calls a computation, with its own computation."""
        callers = self.callers.get(computation.name, [])
        return callers[0] if len(callers) == 1 else None

    def _trips(self, loop: Instruction, given: Mapping[str, int]) -> int | None:
        """Return the iterations of one execution of a loop. Raises _Depends."""
        if loop.exact_trip_count is not None:
            return int(loop.exact_trip_count)
        test = self._comparison(loop)
        if test is None:
            return None
        counter, limit = test
        assert counter.element is not None
        step, start = self._update(loop, counter.element), self._at_start(loop, counter.element, given)
        bound: Affine | None = limit
        if limit.element is not None:
            fixed = self._update(loop, limit.element) == Affine(0, limit.element)
            bound = self._at_start(loop, limit.element, given) if fixed else None
            bound = None if bound is None else Affine(bound.constant + limit.constant)
        if start is None or bound is None or step is None or step.element != counter.element or step.constant <= 0:
            return None
        return max(0, -((start.constant + counter.constant - bound.constant) // step.constant))

    def _comparison(self, loop: Instruction) -> tuple[Affine, Affine] | None:
        """Return the counter of a loop and the bound that it stays below; None for any other condition."""
        condition = self._called(loop, "condition")
        if condition is None:
            return None
        frame = _state_frame(condition)
        root = condition.instructions[-1]
        while root.opcode in ("fusion", "call", "copy", "bitcast"):
            inner = self._inner(frame, root)
            frame, root = (inner, inner.computation.instructions[-1]) if inner else (frame, frame.computation.by_name[root.operands[0]])
        if root.opcode != "compare":
            return None
        first, second = (self.value(frame, name) for name in root.operands)
        direction = root.attribute("direction")
        if direction in ("GT", "GE"):
            first, second = second, first
        elif direction not in ("LT", "LE"):
            return None
        if first is None or second is None or first.element is None:
            return None
        return first, replace(second, constant=second.constant + 1) if direction in ("GE", "LE") else second

    def _update(self, loop: Instruction, element: int) -> Affine | None:
        """Return an element of a loop's state after an iteration, from the elements before it."""
        key = loop.name, element
        if key not in self._updates:
            body = self._called(loop, "body")
            self._updates[key] = None if body is None else self.value(_state_frame(body), body.instructions[-1].name, element)
        return self._updates[key]

    def _at_start(self, loop: Instruction, element: int, given: Mapping[str, int]) -> Affine | None:
        """Return an element of the state that a loop starts with. Raises _Depends."""
        return self.value(self._frame(self.places[loop.name], given), loop.operands[0], element)

    def _element(self, loop: Instruction, element: int, given: Mapping[str, int]) -> Affine | None:
        """Return an element of a loop's state in the given iteration. Raises _Depends."""
        update = self._update(loop, element)
        if update == Affine(0, element):
            return self._at_start(loop, element, given)
        if update is None:
            return None
        if loop.name not in given:
            raise _Depends(loop)
        return self._after(loop, element, given[loop.name], given)

    def _after(self, loop: Instruction, element: int, iterations: int, given: Mapping[str, int]) -> Affine | None:
        """Return an element of a loop's state after some iterations of one execution. Raises _Depends."""
        update, left, added = self._update(loop, element), iterations, 0
        while left and update is not None:
            if update.element is None:
                return Affine(added + update.constant)
            repeats = left if update.element == element else 1
            left, added, element = left - repeats, added + repeats * update.constant, update.element
            update = self._update(loop, element)
        start = self._at_start(loop, element, given) if not left else None
        return None if start is None else Affine(start.constant + added)

    def _frame(self, computation: Computation, given: Mapping[str, int]) -> _Frame:
        """Return the frame of a computation that one instruction calls: the body of a loop, a branch, or a call."""

        def parameter(number: int, element: int | None) -> Affine | None:
            found = self._caller(computation)
            if found is None:
                return None
            place, caller = found
            if caller.opcode == "while":
                return None if element is None else self._element(caller, element, given)
            if caller.opcode == "conditional":  # (branch, argument of the first branch, of the second, ...)
                number = 1 + caller.called.index(computation.name)
            if caller.opcode in ("call", "fusion", "conditional"):
                return self.value(self._frame(place, given), caller.operands[number], element)
            return None

        return _Frame(computation, parameter, given)

    def _inner(self, frame: _Frame, instruction: Instruction) -> _Frame | None:
        """Return the frame of the computation that a fusion or a call runs."""
        if instruction.opcode not in ("fusion", "call"):
            return None
        inner = self._called(instruction, "calls" if instruction.opcode == "fusion" else "to_apply")
        if inner is None:
            return None
        return _Frame(inner, lambda number, element: self.value(frame, instruction.operands[number], element), frame.given)

    def _called(self, instruction: Instruction, attribute: str) -> Computation | None:
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", instruction.attributes)
        return self.computations.get(found.group(1)) if found else None

    def value(self, frame: _Frame, name: str, element: int | None = None) -> Affine | None:
        """Return an integer of a computation, or the element of a tuple; None when it depends on data. Raises _Depends."""
        instruction = frame.computation.by_name.get(name)
        if instruction is None:
            return None
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            return None if instruction.constant is None or not _is_integer(instruction) else Affine(instruction.constant)
        if opcode == "parameter":
            return frame.parameter(instruction.parameter_number or 0, element)
        if opcode == "get-tuple-element":
            index = instruction.attribute("index")
            return None if index is None or element is not None else self.value(frame, operands[0], int(index))
        if opcode == "while":  # its result
            if element is None or self._update(instruction, element) == Affine(0, element):
                return self.value(frame, operands[0], element)
            iterations = None if frame.given is None else self._trips(instruction, frame.given)
            return None if iterations is None else self._after(instruction, element, iterations, frame.given or {})
        if opcode == "tuple":
            return None if element is None or element >= len(operands) else self.value(frame, operands[element])
        if opcode in _UNCHANGED and (element is not None or _is_integer(instruction)):
            return self.value(frame, operands[0], element)
        inner = self._inner(frame, instruction)
        if inner is not None:
            return self.value(inner, inner.computation.instructions[-1].name, element)
        if opcode == "select":
            chosen = self.value(frame, operands[0])
            return None if chosen is None else self.value(frame, operands[1 if chosen.constant else 2])
        if (opcode not in _OPERATIONS and opcode != "compare") or not _is_integer(instruction):
            return None
        values = [self.value(frame, operand) for operand in operands]
        return _computed(instruction, [value for value in values if value is not None]) if None not in values else None


def _state_frame(computation: Computation) -> _Frame:
    """Return the frame of a loop's body or condition, in which elements of the state are unknown."""
    return _Frame(computation, lambda _, element: None if element is None else Affine(0, element), None)


def _is_integer(instruction: Instruction) -> bool:
    """Whether the result is a single integer or truth value."""
    (shape, *others) = instruction.shapes
    return not others and math.prod(shape.dims) == 1 and (shape.dtype == "pred" or bool(re.fullmatch(r"[su]\d+", shape.dtype)))


def _computed(instruction: Instruction, values: Sequence[Affine]) -> Affine | None:
    """Return the result of an operation; None where it is not an element plus a constant."""
    opcode = instruction.opcode
    unknown = [value.element for value in values if value.element is not None]
    if unknown:
        if opcode == "add" and len(unknown) == 1:
            return Affine(values[0].constant + values[1].constant, unknown[0])
        if opcode == "subtract" and values[1].element is None:
            return Affine(values[0].constant - values[1].constant, unknown[0])
        return None
    numbers = [value.constant for value in values]
    if opcode == "compare":
        return Affine(int(_COMPARED[instruction.attribute("direction") or "EQ"](*numbers)))
    if opcode == "not" and instruction.shapes[0].dtype == "pred":
        return Affine(1 - numbers[0])
    if opcode in ("divide", "remainder") and not numbers[1]:
        return None
    if opcode.startswith("shift") and (numbers[0] < 0 or not 0 <= numbers[1] < 64):
        return None
    return Affine(_OPERATIONS[opcode](*numbers))


def _quotient(a: int, b: int) -> int:
    """Return the quotient, rounded towards zero as in HLO."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_UNCHANGED = frozenset({"copy", "bitcast", "convert", "reshape", "opt-barrier", "optimization-barrier"})
"""Operations that leave a single integer as it is."""
_OPERATIONS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": _quotient,
    "remainder": lambda a, b: a - b * _quotient(a, b),
    "maximum": max,
    "minimum": min,
    "negate": lambda a: -a,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "clamp": lambda low, x, high: min(max(low, x), high),
    "shift-left": lambda a, b: a << b,
    "shift-right-logical": lambda a, b: a >> b,
    "shift-right-arithmetic": lambda a, b: a >> b,
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}
