"""What fills a device's memory at the fullest moment of a compiled step: XLA's buffer assignment and live ranges, mapped to the program.

XLA writes both beside the module when it is asked to dump it (`--xla_dump_to`): `*buffer-assignment.txt`, `*live-range.txt`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ridgeline.hlo.parse import Computation, Instruction, Module, Shape, Source, part_of, scope


@dataclass(frozen=True)
class Buffer:
    """One value that is live at the peak."""

    name: str
    """Instruction, with the index of a tuple's part in braces."""
    bytes: int
    dtype: str
    dims: tuple[int, ...]
    what: str
    """parameter, optimizer state, batch, or the component and pass it belongs to."""
    op_name: str
    source: Source | None
    copies: int = 1
    """How many of the same kind there are (after `grouped`)."""


def live_at_peak(module: Module, live_ranges: str) -> list[Buffer]:
    """List the values that are live at the fullest moment, the largest first; [] when the text does not tell.

    Args:
      module: the compiled module.
      live_ranges: text of XLA's live-range dump.
    """
    section = live_ranges.partition("(peak):\n")[2].partition("\n  Stack trace")[0]
    origin = _Origins(module)
    found = []
    for name, index, size in re.findall(r"^\s+(\S+?)\{([\d,]*)\}: (\d+) bytes", section, re.M):
        instruction = origin.of(name, index)
        if instruction is None:
            found.append(Buffer(f"{name}{{{index}}}" if index else name, int(size), "", (), "other", "", None))
            continue
        shape = _shape(instruction, index if instruction.name == name else "", int(size))
        found.append(
            Buffer(
                name=f"{name}{{{index}}}" if index else name,
                bytes=int(size),
                dtype=shape.dtype if shape else "",
                dims=shape.dims if shape else (),
                what=describe(instruction.op_name),
                op_name=instruction.op_name,
                source=module.source(instruction),
            )
        )
    return sorted(found, key=lambda buffer: -buffer.bytes)


def grouped(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Merge buffers of the same origin and shape (one per layer half, double buffers, ...): sizes add up, `copies` counts them."""
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.what, buffer.op_name, buffer.dtype, buffer.dims), []).append(buffer)
    merged = [
        Buffer(g[0].name, sum(b.bytes for b in g), g[0].dtype, g[0].dims, g[0].what, g[0].op_name, g[0].source, len(g))
        for g in groups.values()
    ]
    return sorted(merged, key=lambda buffer: -buffer.bytes)


def describe(op_name: str) -> str:
    """Say in words what a buffer is, from the path JAX gave the operation that makes it."""
    if op_name.startswith("state.params"):
        return f"parameter {_leaf(op_name)}"
    if op_name.startswith("state.opt_state"):
        return f"optimizer state {_leaf(op_name)}"
    if op_name.startswith("batch"):
        return f"batch {_leaf(op_name)}"
    if op_name.startswith("state"):
        return f"state {op_name.partition('.')[2]}"
    part = part_of(op_name)
    stacked = ", kept for all layers" if part == "forward" and "dynamic_update_slice" in op_name else ""
    return f"{scope(op_name) or 'activations'}, {part}{stacked}" if op_name else "other"


def _leaf(op_name: str) -> str:
    return ".".join(part for part in re.findall(r"\['?\"?([\w-]+)'?\"?\]", op_name.replace("\\'", "'")) if not part.isdigit()) or op_name


def _shape(instruction: Instruction, index: str, size: int) -> Shape | None:
    """The array of an instruction that a value is, by its index, else by its size."""
    if index.isdigit() and int(index) < len(instruction.shapes):
        return instruction.shapes[int(index)]
    fitting = [shape for shape in instruction.shapes if shape.bytes == size]
    return fitting[0] if fitting else instruction.shapes[0] if instruction.shapes else None


class _Origins:
    """Finds the instruction that made a value: loop parameters lead back to what entered the loop."""

    def __init__(self, module: Module) -> None:
        self.module = module

    @cached_property
    def places(self) -> dict[str, tuple[Instruction, Computation]]:
        """Instruction by name; names are unique within a module."""
        return {i.name: (i, c) for c, i in self.module.instructions()}

    @cached_property
    def loops(self) -> dict[str, tuple[Instruction, Computation]]:
        """Body computation to the while that runs it."""
        found = {}
        for computation, instruction in self.module.instructions():
            if instruction.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", instruction.attributes)
                if body:
                    found[body.group(1)] = (instruction, computation)
        return found

    def of(self, name: str, index: str) -> Instruction | None:
        """Follow loop parameters, tuple parts, copies and bitcasts back to an instruction with a path; the last one found otherwise."""
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
