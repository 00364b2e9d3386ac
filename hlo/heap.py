"""The heap of temporaries of a compiled step at any instruction of its schedule, from XLA's buffer assignment and live ranges.

The buffer assignment (`*buffer-assignment.txt`) gives each value its place in the heap, the live ranges (`*live-range.txt`) the
instructions between which it is needed. Both are written with `--xla_dump_to`. Values that XLA gave the same place (an update in place, the
result of a loop) count once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ridgeline.hlo.buffers import Buffer, described, grouped
from ridgeline.hlo.module import Module, scope

POINTS = (
    "forward pass",
    "loss",
    "start of the backward pass",
    "backward pass",
    "last layer of the backward pass",
    "embedding gradient",
    "optimizer",
)
"""Stretches of a schedule, in this order, with the names that the plan has for its points (planner/peak_memory.py)."""

LAYER = re.compile(r"transpose\(jvp\([^/]*\)\)/while/body")
"""Within the op_name of what belongs to the backward pass of a layer, in the loop over layers or taken out of it. Where the loop has a
gradient of its own (models/backward_order.py: after_forward), these are nested: transpose(jvp(transpose(jvp())))."""


@dataclass(frozen=True)
class Value:
    """A value in the heap."""

    name: str
    """Name of the instruction that computes it."""
    index: str
    """Index of the tuple element, '' without."""
    offset: int
    """Bytes from the start of the heap."""
    bytes: int
    begin: int
    """Position in the schedule of the first instruction at which it is live."""
    end: int
    """Position of the last one."""


@dataclass(frozen=True)
class Heap:
    """The values of the temporaries of one device, and the instructions in scheduled order; bodies of loops are in it once."""

    bytes: int
    """Size of the allocation, gaps included."""
    schedule: tuple[str, ...]
    values: tuple[Value, ...]

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes that are live at each instruction of the schedule."""
        begins: list[list[slice]] = [[] for _ in self.schedule]
        ends: list[list[slice]] = [[] for _ in self.schedule]
        edges = np.unique([edge for value in self.values for edge in (value.offset, value.offset + value.bytes)])
        # sizes of the places between two edges, and the number of values that are live in each
        widths, users = np.diff(edges), np.zeros(max(len(edges) - 1, 0), np.int32)
        for value in self.values:
            place = slice(*np.searchsorted(edges, (value.offset, value.offset + value.bytes)).tolist())
            begins[value.begin].append(place)
            ends[value.end].append(place)
        covered, sizes = 0, []
        for beginning, ending in zip(begins, ends, strict=True):
            for place in beginning:
                covered += int(widths[place][users[place] == 0].sum())
                users[place] += 1
            sizes.append(covered)
            for place in ending:
                users[place] -= 1
                covered -= int(widths[place][users[place] == 0].sum())
        return tuple(sizes)

    @property
    def gap_bytes(self) -> int:
        """Bytes that no value has when most are live: XLA gives each value one place for its whole life, and places leave gaps."""
        return self.bytes - max(self.live)

    def at(self, position: int) -> list[Value]:
        """Return the values that are live at a position of the schedule, largest first; of values in one place the first."""
        found: dict[tuple[int, int], Value] = {}
        for value in sorted(self.values, key=lambda each: (each.begin, each.name)):
            if value.begin <= position <= value.end:
                found.setdefault((value.offset, value.bytes), value)
        return sorted(found.values(), key=lambda each: (-each.bytes, each.offset))

    def buffers(self, module: Module, position: int) -> list[Buffer]:
        """Return what is live at a position of the schedule with its origin in the program, equal ones together, largest first."""
        return grouped(described(module, [(value.name, value.index, value.bytes) for value in self.at(position)]))

    def peaks(self, module: Module) -> dict[str, int]:
        """Return the position of the most live bytes in each stretch of POINTS that the schedule has."""
        stretches = stretches_of(module, self.schedule)
        return {name: max(positions, key=lambda now: self.live[now]) for name, positions in stretches.items() if positions}


def read_heap(buffer_assignment: str, live_ranges: str) -> Heap:
    """Read the heap of temporaries in device memory.

    Raises ValueError where the texts have none.
    """
    sections = re.findall(r"^allocation \d+: size (\d+), (?:color \d+, )?preallocated-temp.*\n((?: value:.*\n?)*)", buffer_assignment, re.M)
    schedule = re.findall(r"^    \d+:(\S+)$", live_ranges.partition("  BufferLiveRange:")[0], re.M)
    if not sections or not schedule:
        raise ValueError("no heap of temporaries, or no schedule, in XLA's buffer assignment")
    size, text = max(sections, key=lambda section: len(section[1]))
    ranges = {
        (name, index): (int(first), int(last))
        for name, index, first, last in re.findall(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", live_ranges, re.M)
    }
    values = []
    for name, index, length, offset in re.findall(r"<\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", text):
        if (name, index) in ranges:
            values.append(Value(name, index, int(offset), int(length), *ranges[name, index]))
    return Heap(int(size), tuple(schedule), tuple(values))


def stretches_of(module: Module, schedule: Sequence[str]) -> dict[str, range]:
    """Return the positions of each stretch of POINTS in a schedule of a train step.

    The loss is its loop over chunks, or its operations; the backward pass is the loop over layers, before and after which XLA takes the
    first and the last layers out of the loop; what follows the last operation of a layer is the gradient of the embedding, and the
    optimizer begins with its first operation.
    """
    places = {instruction.name: (instruction, computation.name) for computation, instruction in module.instructions()}
    names = [(position, *places[name]) for position, name in enumerate(schedule) if name in places]
    loops = {body for _, i in module.instructions() if i.opcode == "while" for body in i.called}
    inside = _inside(module)
    layers = _innermost(inside, {c for _, i, c in names if c in loops and LAYER.search(i.op_name) and scope(i.op_name) == "mlp"})
    # not the loop over microbatches, which has the loss of one chunk in it
    chunks = _innermost(inside, {c for _, i, c in names if c in loops and scope(i.op_name) == "loss" and not inside[c] & layers})
    backward = [position for position, _, computation in names if computation in layers]
    loss = [position for position, _, computation in names if computation in chunks]
    if not loss:
        loss = [p for p, i, _ in names if scope(i.op_name) == "loss" and not i.opcode.startswith(("all-gather", "async", "get-tuple"))]
        loss = [p for p in loss if not backward or p < backward[0]]
    if not loss or not backward:
        return {}
    in_layer = [p for p, i, _ in names if LAYER.search(i.op_name) and p > backward[-1]]
    last = max(in_layer, default=backward[-1])
    update = min((p for p, i, _ in names if scope(i.op_name) == "optimizer" and p > last), default=len(schedule))
    bounds = [0, loss[0], loss[-1] + 1, backward[0], backward[-1] + 1, last + 1, update, len(schedule)]
    found = dict(zip(("forward pass", "loss", *POINTS[2:]), (range(*pair) for pair in pairwise(bounds)), strict=True))
    return {name: positions for name, positions in found.items() if positions}


def _innermost(inside: dict[str, set[str]], computations: set[str]) -> set[str]:
    """Return those that call no other of them, with all that they call."""
    innermost = {name for name in computations if not (inside[name] - {name}) & computations}
    return set().union(*(inside[name] for name in innermost))


def _inside(module: Module) -> dict[str, set[str]]:
    """Return computation -> itself and all that it calls."""
    found: dict[str, set[str]] = {}
    for name in reversed(module.callers_first):
        calls = {callee for instruction in module.computations[name].instructions for callee in instruction.called}
        found[name] = {name}.union(*(found[callee] for callee in calls))
    return found
