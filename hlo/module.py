"""A compiled HLO module as data: computations, each a list of instructions in scheduled order (read by hlo/parse.py).

`Module.runs` counts how often each computation runs: the body of a `while` with a known trip count (a scan over layers) runs once per
iteration, so work inside it is counted once per layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "f4e2m1fn": 4, "bf16": 16, "c64": 64, "c128": 128}
"""Bits per element of the dtypes whose name does not start with letters and then that number (as `f32`, `s8`, `f8e4m3fn` do)."""


_STATED_TRIPS = re.compile(r"\btrips_(\d+(?:\.\d+)?)/while$")


def trips_scope(mean: float) -> str:
    """Return the `jax.named_scope` of a loop whose count depends on data: readers of the compiled program count its mean iterations."""
    return f"trips_{mean:.6f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Shape:
    """One array: dtype as HLO writes it (`f32`, `bf16`, `s32`, `pred`) and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        return math.prod(self.dims) * _bits(self.dtype) // 8


@dataclass(frozen=True)
class Source:
    """A line of Python source: the innermost stack frame that XLA recorded for an instruction."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Instruction:
    """One instruction. `shapes` are the arrays of the result, with tuples flattened."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    """The text after the operand list, unparsed."""
    parameter_number: int | None = None
    """Position of a `parameter`; None for other instructions."""
    constant: int | None = None
    """Value of a `constant` that is a single integer; None otherwise."""
    derived_trip_count: Fraction | None = None
    """Mean iterations of a `while` without a recorded trip count, derived from its counter (hlo/trip_counts.py)."""
    in_host_memory: bool = False
    """Whether part of the result is in host memory."""

    @property
    def bytes(self) -> int:
        """Bytes of the result, all tuple elements together."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """JAX's path of transformations, named scopes and primitive; '' when XLA recorded none."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def deduplicated_name(self) -> str:
        """Name of an equal instruction, whose kernel XLA may use for both; '' when XLA recorded none."""
        found = re.search(r'deduplicated_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations this instruction calls (condition and body of a while, the body of a fusion, branches, ...)."""
        lists = re.findall(r"(?:calls|branch_computations|called_computations)=\{([^}]*)\}", self.attributes)
        single = re.findall(
            r"(?:to_apply|calls|condition|body|true_computation|false_computation|async_execution)=%?([\w.\-]+)", self.attributes
        )
        return tuple(single) + tuple(name.strip().lstrip("%") for names in lists for name in names.split(",") if name.strip())

    @property
    def exact_trip_count(self) -> int | Fraction | None:
        """Iterations of a while, on average per execution: recorded by XLA, else derived from its counter; None when unknown."""
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else self.derived_trip_count

    @property
    def trip_count(self) -> int | Fraction | None:
        """As `exact_trip_count`; of a loop whose count depends on data, the mean that the program states (`trips_scope`)."""
        stated = _STATED_TRIPS.search(self.op_name) if self.exact_trip_count is None else None
        return Fraction(stated.group(1)) if stated else self.exact_trip_count

    @property
    def repeats(self) -> int | Fraction:
        """How often the instruction runs what it calls: the trip count of a while, 1 where that is unknown or for other instructions."""
        count = self.trip_count if self.opcode == "while" else None
        return 1 if count is None else count

    def attribute(self, name: str) -> str | None:
        """Return the text of a simple attribute such as `channel_id` or `kind`; None when absent."""
        found = re.search(rf"(?:^|, ){name}=([^,\s]+)", self.attributes)
        return found.group(1) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Shapes of an instruction's operands, tuples flattened."""
        return tuple(shape for name in instruction.operands for shape in self.by_name[name].shapes)


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    name: str
    computations: dict[str, Computation]
    entry: str
    sources: dict[int, Source] = field(default_factory=dict)
    """stack_frame_id to source line."""

    @cached_property
    def runs(self) -> dict[str, float]:
        """Computation name to how often it runs per call of the module.

        A loop whose count varies (over the blocks of keys of a block of queries) has the sum over its executions. A while with an unknown
        trip count counts once and is listed in `unknown_loops`. Every branch of a conditional counts once.
        """
        runs = dict.fromkeys(self.computations, Fraction(0))
        for name in self.callers_first:
            times = Fraction(1) if name == self.entry else runs[name]
            runs[name] = times
            for instruction in self.computations[name].instructions:
                for callee in instruction.called:
                    runs[callee] += times * instruction.repeats
        return {name: float(times) for name, times in runs.items()}

    @cached_property
    def certain(self) -> frozenset[str]:
        """Computations that run and whose `runs` are certain: in no branch of a conditional and in no while whose count depends on data."""
        uncertain: set[str] = set()
        for name in self.callers_first:
            for instruction in self.computations[name].instructions:
                unknown = instruction.opcode == "conditional" or (instruction.opcode == "while" and instruction.exact_trip_count is None)
                if unknown or name in uncertain:
                    uncertain.update(instruction.called)
        return frozenset(name for name, runs in self.runs.items() if runs > 0 and name not in uncertain)

    @property
    def unknown_loops(self) -> list[str]:
        """Names of the while instructions with an unknown trip count."""
        return [i.name for _, i in self.instructions() if i.opcode == "while" and i.trip_count is None]

    @property
    def estimated_loops(self) -> list[str]:
        """Names of the while instructions that count by the mean that the program states."""
        loops = (i for _, i in self.instructions() if i.opcode == "while")
        return [i.name for i in loops if i.trip_count is not None and i.exact_trip_count is None]

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction with its computation."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction

    def source(self, instruction: Instruction) -> Source | None:
        """Return the line of Python an instruction came from; None when XLA recorded none."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if direct:
            return Source(direct.group(1), int(direct.group(2)), "")
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.sources.get(int(frame.group(1))) if frame else None

    def largest(self, count: int = 10) -> list[Instruction]:
        """Return the `count` instructions with the largest single array in their result, outside fusions."""
        fused = {callee for _, i in self.instructions() if i.opcode in ("fusion", "reduce", "all-reduce") for callee in i.called}
        outside = [i for c, i in self.instructions() if c.name not in fused and i.shapes]
        return sorted(outside, key=lambda i: max(shape.bytes for shape in i.shapes), reverse=True)[:count]

    @cached_property
    def callers_first(self) -> list[str]:
        """Names of the computations that run, each before those it calls."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name in seen:
                return
            seen.add(name)
            for instruction in self.computations[name].instructions:
                for callee in instruction.called:
                    visit(callee)
            order.append(name)

        visit(self.entry)
        return order[::-1]


def scope(op_name: str, known: tuple[str, ...] = ("embed", "attention", "mlp", "norm", "unembed", "loss", "optimizer")) -> str | None:
    """Return the innermost known `jax.named_scope` of an op_name; names of jitted functions do not count. None: no known scope."""
    parts = re.split(r"[/()]", re.sub(r"\bjit\([^()]*\)", "", op_name))
    return next((part for part in reversed(parts) if part in known), None)


def is_backward(op_name: str) -> bool:
    """Whether an op_name belongs to the backward pass (the transposed part of a differentiated function)."""
    return "transpose(" in op_name


UNKNOWN = "unknown"
PASSES = ("forward", "backward", "recompute", "update", UNKNOWN)
"""The passes of a training step."""


def part_of(op_name: str) -> str:
    """Return the pass that an op_name shows: one of PASSES. Outside a differentiated function only our optimizer's scope shows one."""
    if "rematted_computation" in op_name:
        return "recompute"
    if is_backward(op_name):
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "update" if scope(op_name) == "optimizer" else UNKNOWN


def passes(module: Module) -> dict[str, str]:
    """Return instruction -> pass. What is outside differentiated functions and uses results of the backward pass is the update."""
    found = {i.name: part_of(i.op_name) for _, i in module.instructions()}
    order = [module.computations[name] for name in module.callers_first]
    backward: set[str] = set()
    """Computations with work of the backward pass inside."""
    for computation in reversed(order):
        if any(found[i.name] in ("backward", "recompute") or backward.intersection(i.called) for i in computation.instructions):
            backward.add(computation.name)
    given: set[str] = set()
    """Computations that are called with results of the backward pass."""
    for computation in order:
        after: set[str] = set()
        for instruction in computation.instructions:
            if instruction.opcode == "parameter" and computation.name in given:
                after.add(instruction.name)
            elif after.intersection(instruction.operands):
                after.add(instruction.name)
                given.update(callee for callee in instruction.called if callee not in backward)
                if found[instruction.name] == UNKNOWN and instruction.op_name:
                    found[instruction.name] = "update"
            elif found[instruction.name] in ("backward", "recompute") or backward.intersection(instruction.called):
                after.add(instruction.name)
    return found


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if not digits:
        raise ValueError(f"unknown HLO dtype '{dtype}'")
    return int(digits.group(1))
