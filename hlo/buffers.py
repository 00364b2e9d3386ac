"""Buffers that are live at the memory peak of a compiled step, from XLA's live ranges, with their origin in the program.

With `--xla_dump_to` XLA writes `*buffer-assignment.txt` and `*live-range.txt` next to the module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ridgeline.hlo.module import Computation, Instruction, Module, Shape, Source, part_of, scope


@dataclass(frozen=True)
class Buffer:
    """One value that is live at the peak."""

    name: str
    """Name of the instruction, with the index of the tuple element in braces."""
    bytes: int
    """Size; after `grouped`, of all copies together."""
    dtype: str
    dims: tuple[int, ...]
    what: str
    """What it is: parameter, optimizer state, batch, or the component and pass it belongs to."""
    op_name: str
    source: Source | None
    copies: int = 1
    """Number of merged buffers (after `grouped`)."""


def live_at_peak(module: Module, live_ranges: str) -> list[Buffer]:
    """List the values that are live at the memory peak, largest first; [] when the text has no peak.

    Args:
      module: the compiled module.
      live_ranges: text of XLA's live-range dump.
    """
    section = live_ranges.partition("(peak):\n")[2].partition("\n  Stack trace")[0]
    values = [(name, index, int(size)) for name, index, size in re.findall(r"^\s+(\S+?)\{([\d,]*)\}: (\d+) bytes", section, re.M)]
    return sorted(described(module, values), key=lambda buffer: -buffer.bytes)


def described(module: Module, values: Sequence[tuple[str, str, int]]) -> list[Buffer]:
    """Return values (name of the instruction, index of the tuple element or '', bytes) with their shapes and origins."""
    origin = _Origins(module)
    found = []
    for name, index, size in values:
        instruction = origin.of(name, index)
        if instruction is None:
            found.append(Buffer(f"{name}{{{index}}}" if index else name, size, "", (), "other", "", None))
            continue
        shape = _shape(instruction, index if instruction.name == name else "", size)
        found.append(
            Buffer(
                name=f"{name}{{{index}}}" if index else name,
                bytes=size,
                dtype=shape.dtype if shape else "",
                dims=shape.dims if shape else (),
                what=describe(instruction.op_name),
                op_name=instruction.op_name,
                source=module.source(instruction),
            )
        )
    return found


def grouped(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Merge buffers of the same origin and shape (double buffers, ...): sizes are summed, `copies` counts them. Largest first."""
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.what, buffer.op_name, buffer.dtype, buffer.dims), []).append(buffer)
    merged = [
        Buffer(g[0].name, sum(b.bytes for b in g), g[0].dtype, g[0].dims, g[0].what, g[0].op_name, g[0].source, len(g))
        for g in groups.values()
    ]
    return sorted(merged, key=lambda buffer: -buffer.bytes)


def describe(op_name: str) -> str:
    """Return what a buffer is, in words, from the op_name of the instruction that computes it."""
    if op_name.startswith("state.params"):
        return f"parameter {_leaf(op_name)}"
    if op_name.startswith("state.opt_state"):
        return f"optimizer state {_leaf(op_name)}"
    if op_name.startswith("batch"):
        return f"batch {_leaf(op_name)}"
    if op_name.startswith("state"):
        return f"state {op_name.partition('.')[2]}"
    part = part_of(op_name)
    stacked = ", stacked over layers" if part == "forward" and "dynamic_update_slice" in op_name else ""
    return f"{scope(op_name) or 'activations'}, {part}{stacked}" if op_name else "other"


def _leaf(op_name: str) -> str:
    return ".".join(part for part in re.findall(r"\['?\"?([\w-]+)'?\"?\]", op_name.replace("\\'", "'")) if not part.isdigit()) or op_name


def _shape(instruction: Instruction, index: str, size: int) -> Shape | None:
    """Return the shape of a value in the result of an instruction, by its index, else by its size."""
    if index.isdigit() and int(index) < len(instruction.shapes):
        return instruction.shapes[int(index)]
    fitting = [shape for shape in instruction.shapes if shape.bytes == size]
    return fitting[0] if fitting else instruction.shapes[0] if instruction.shapes else None


class _Origins:
    """Finds the instruction that computed a value; parameters of loops are followed to the loop's operand."""

    def __init__(self, module: Module) -> None:
        self.module = module

    @cached_property
    def places(self) -> dict[str, tuple[Instruction, Computation]]:
        """Instruction name -> instruction and computation; names are unique within a module."""
        return {i.name: (i, c) for c, i in self.module.instructions()}

    @cached_property
    def loops(self) -> dict[str, tuple[Instruction, Computation]]:
        """Name of a loop's body -> its while instruction and the computation of that."""
        found = {}
        for computation, instruction in self.module.instructions():
            if instruction.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", instruction.attributes)
                if body:
                    found[body.group(1)] = (instruction, computation)
        return found

    def of(self, name: str, index: str) -> Instruction | None:
        """Follow loop parameters, tuple elements, copies and bitcasts back to an instruction with an op_name, or as far as possible."""
        instruction, computation = self.places.get(name, (None, None))
        for _ in range(40):
            if instruction is None or computation is None:
                return None
            step = self._before(instruction, computation, index)
            if step is None:
                return instruction
            instruction, computation, index = step
        return instruction

    def _before(self, instruction: Instruction, computation: Computation, index: str) -> tuple[Instruction, Computation, str] | None:
        opcode = instruction.opcode
        if opcode == "parameter" and computation.name in self.loops and index:
            loop, outside = self.loops[computation.name]
            return self._operand(outside, loop, 0, index)
        if opcode == "while" and index:
            return self._operand(computation, instruction, 0, index)
        if opcode == "tuple" and index:
            first, _, rest = index.partition(",")
            return self._operand(computation, instruction, int(first), rest)
        if opcode == "get-tuple-element":
            part = instruction.attribute("index") or ""
            return self._operand(computation, instruction, 0, f"{part},{index}".rstrip(","))
        if opcode in ("copy", "bitcast", "copy-done", "optimization-barrier") and not instruction.op_name:
            return self._operand(computation, instruction, 0, index)
        return None

    def _operand(
        self, computation: Computation, instruction: Instruction, number: int, index: str
    ) -> tuple[Instruction, Computation, str] | None:
        if number >= len(instruction.operands):
            return None
        operand = computation.by_name.get(instruction.operands[number])
        return None if operand is None else (operand, computation, index)
