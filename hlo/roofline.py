"""Kernels of a compiled module with their FLOPs and bytes, and the lower bound of their time by the roofline.

A kernel takes at least max(FLOPs / peak, bytes / bandwidth). Bytes are the necessary memory traffic of a fusion: for an operand that it
only slices, the slice; for a buffer that it updates in place, the update. Loops count by their trip count. Collectives are not kernels;
hlo.collectives lists them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.hlo.category import category
from ridgeline.hlo.flops import COUNTED, Matmul, custom_target, flops_of, grouped_matmul, matmul
from ridgeline.hlo.module import UNKNOWN, Computation, Instruction, Module, Shape, Source, passes, scope

_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id", "iota"}
    | {"while", "conditional", "call", "opt-barrier", "optimization-barrier", "async-start", "async-done", "async-update"}
)
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-|send|recv|ragged-all)")


@dataclass(frozen=True)
class Kernel:
    """One kernel of the step."""

    name: str
    opcode: str
    flops: float
    """FLOPs of matmuls, convolutions and attention, per execution."""
    bytes: float
    """Bytes read and written in memory, per execution."""
    count: float
    """Executions per step."""
    dtype: str
    """dtype of the inputs of its matmuls, as HLO writes it; '' without matmuls."""
    component: str
    """Named scope: attention, mlp, loss, ...; outside all of them its category."""
    part: str
    """One of hlo.module.PASSES."""
    op_name: str
    """JAX's path of the operation."""
    source: Source | None
    """Line of Python it came from; None when XLA recorded none."""
    unknown_flops: bool = False
    """A custom kernel without FLOPs in its metadata; they count as 0."""
    host_copy: bool = False
    """An asynchronous copy between device and host memory; `bytes` are those read plus those written."""
    category: str = "other"
    """One of hlo.category.CATEGORIES."""
    matmul: Matmul | None = None
    """The shape of its matmul; None with none or several."""
    grouped: bool = False
    """Whether it multiplies the rows of each expert with its matrix."""
    target: str = ""
    """What a custom call calls; '' of other kernels."""

    def seconds(self, peak_flops: float, bandwidth: float) -> float:
        """Return the lower bound of the time of all executions."""
        return self.count * max(self.flops / peak_flops, self.bytes / bandwidth)

    def bottleneck(self, peak_flops: float, bandwidth: float) -> str:
        """Return what bounds the kernel: `compute` or `memory`."""
        return "compute" if self.flops / peak_flops > self.bytes / bandwidth else "memory"


def kernels(module: Module) -> list[Kernel]:
    """List the kernels of a module in text order; instructions inside a fusion belong to the fusion."""
    parts = passes(module)
    return [
        _kernel(module, computation, instruction, module.runs[computation.name], parts.get(instruction.name, UNKNOWN))
        for computation in _executed(module)
        for instruction in computation.instructions
        if instruction.opcode not in _FREE and not instruction.opcode.endswith("-done") and not _COLLECTIVE.match(instruction.opcode)
    ]


def total_flops(found: list[Kernel]) -> float:
    """Return the FLOPs of a step on one device, recomputation included."""
    return math.fsum(kernel.flops * kernel.count for kernel in found)


def without_flops(found: list[Kernel]) -> dict[str, float]:
    """Return op_name (or name) -> executions per step of the custom kernels without FLOPs in their metadata."""
    counts: dict[str, float] = {}
    for kernel in found:
        if kernel.unknown_flops:
            name = kernel.op_name or kernel.name
            counts[name] = counts.get(name, 0.0) + kernel.count
    return counts


def _executed(module: Module) -> Iterator[Computation]:
    """Yield the computations whose instructions are kernels: the entry, bodies of loops, branches, calls, asynchronous ones."""
    inner: set[str] = set()
    for _, instruction in module.instructions():
        if instruction.opcode not in ("while", "conditional", "call", "async-start"):
            inner.update(instruction.called)
    for computation in module.computations.values():
        if computation.name not in inner and module.runs[computation.name] > 0:
            yield computation


def _multiplied(operands: Sequence[Shape]) -> str:
    """Return the dtype of the first array that is not of indices: custom kernels may take those first."""
    return next((shape.dtype for shape in operands if shape.dtype[:1] in ("f", "b")), operands[0].dtype)


def _kernel(module: Module, computation: Computation, instruction: Instruction, count: float, part: str) -> Kernel:
    fused = next((module.computations[name] for name in instruction.called if name in module.computations), None)
    if instruction.opcode in ("fusion", "fusion-start") and fused is not None:  # jaxlib 0.12 splits slices and updates of scans
        products = list(_inside(module, fused))
        size = _fusion_bytes(computation, instruction, fused)
    else:
        products = [(computation, instruction)]
        size = float(sum(s.bytes for s in computation.operand_shapes(instruction)) + instruction.bytes)
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            size = 2.0 * instruction.bytes
        elif instruction.opcode == "dynamic-update-slice":
            size = 2.0 * computation.operand_shapes(instruction)[1].bytes
    grouped = grouped_matmul(computation, instruction)
    if grouped is not None:  # rows of the buffers that no expert has are not read
        size -= (1 - grouped[1]) * sum(s.bytes for s in computation.operand_shapes(instruction) if len(s.dims) == 2)
    counted = [(where, product, flops_of(where, product)) for where, product in products]
    dtype = next((_multiplied(where.operand_shapes(product)) for where, product, flops in counted if flops), "")
    shapes = [shape for where, product in products if (shape := matmul(where, product)) is not None]
    kind = category(module, instruction)
    return Kernel(
        instruction.name,
        instruction.opcode,
        math.fsum(flops or 0.0 for _, _, flops in counted),
        size,
        count,
        dtype,
        scope(instruction.op_name) or kind,
        part,
        instruction.op_name,
        module.source(instruction),
        any(flops is None for _, _, flops in counted),
        instruction.in_host_memory and instruction.opcode.endswith("-start"),
        kind,
        shapes[0] if len(shapes) == 1 else None,
        grouped is not None,
        custom_target(instruction),
    )


def _inside(module: Module, fused: Computation) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the matmuls of a fusion; those of Triton are fusions of fusions."""
    for instruction in fused.instructions:
        if instruction.opcode in COUNTED:
            yield fused, instruction
        elif instruction.opcode == "fusion":
            for name in instruction.called:
                yield from _inside(module, module.computations[name])


def _fusion_bytes(computation: Computation, instruction: Instruction, fused: Computation) -> float:
    """Return the necessary memory traffic of a fusion (see the module docstring)."""
    parameters = {i.parameter_number: i for i in fused.instructions if i.opcode == "parameter"}
    users: dict[str, list[Instruction]] = {}
    for inner in fused.instructions:
        for operand in inner.operands:
            users.setdefault(operand, []).append(inner)
    total = 0.0
    updated: set[str] = set()
    cut = ("dynamic-slice", "slice", "gather")
    root = fused.instructions[-1]
    roots = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for item in roots:
        origin = _through(fused, item)
        if origin.opcode == "dynamic-update-slice":
            total += fused.by_name[origin.operands[1]].bytes
            updated.add(_through(fused, fused.by_name[origin.operands[0]]).name)
        else:
            total += item.bytes
    for number, name in enumerate(instruction.operands):
        inner_parameter = parameters.get(number)
        if inner_parameter is None:
            total += _bytes(computation.by_name[name].shapes)
            continue
        uses = _real_users(users, inner_parameter.name)
        if inner_parameter.name in updated:  # a sum is read before it is written
            total += sum(use.bytes for use, taken in uses if use.opcode in cut and use.operands[0] == taken)
        elif uses and all(use.opcode in cut and use.operands[0] == taken for use, taken in uses):
            total += sum(use.bytes for use, _ in uses)
        else:
            total += inner_parameter.bytes
    return total


def _real_users(users: dict[str, list[Instruction]], name: str) -> list[tuple[Instruction, str]]:
    """Return the users of a value, through bitcasts, each with the name of its operand."""
    found: list[tuple[Instruction, str]] = []
    for user in users.get(name, []):
        found += _real_users(users, user.name) if user.opcode == "bitcast" else [(user, name)]
    return found


def _through(fused: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("bitcast", "copy", "convert") and instruction.operands and instruction.operands[0] in fused.by_name:
        instruction = fused.by_name[instruction.operands[0]]
    return instruction


def _bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.bytes for shape in shapes)
