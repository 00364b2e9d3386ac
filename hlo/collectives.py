"""The collectives of a compiled module: kind, bytes, mesh axes, executions, and their origin in the model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.hlo.module import Computation, Instruction, Module, Source
from ridgeline.hlo.parse import parse

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Collective:
    """One collective instruction (XLA may have combined several arrays into it)."""

    kind: str
    """One of KINDS."""
    dtype: str
    """dtype of the first communicated array, as HLO writes it."""
    bytes: int
    """Bytes of the unsharded side on one device, all arrays together: operands of a reduction or permute, results of a gather."""
    axes: tuple[str, ...] | None
    """Mesh axes it runs over, in mesh order; None when its groups do not correspond to mesh axes."""
    group_size: int
    """Devices per group."""
    count: float
    """Executions per call of the module."""
    name: str
    """Name of the instruction."""
    computation: str
    """Name of its computation."""
    op_name: str
    """JAX's path of the operation."""
    source: Source | None
    """Line of Python it came from; None when XLA recorded none."""
    operands: tuple[tuple[int, ...], ...]
    """Dims of each operand."""
    asynchronous: bool
    """Whether it is split into start and done instructions."""
    compute_between: int
    """Number of fusions, matmuls and custom calls scheduled between start and done, which can overlap it."""

    @property
    def total_bytes(self) -> float:
        """Bytes of all executions."""
        return self.bytes * self.count


def collectives(module: Module | str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """List the collectives of a compiled module in text order.

    `mesh_shape` is the mesh's axis -> size in mesh order (`mesh.shape`). Raises ValueError for replica groups it cannot read.
    """
    module = parse(module) if isinstance(module, str) else module
    found = []
    for computation, instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            found.append(_collective(module, computation, instruction, kind, mesh_shape))
    return found


def _collective(module: Module, computation: Computation, instruction: Instruction, kind: str, mesh_shape: Mapping[str, int]) -> Collective:
    devices = math.prod(mesh_shape.values())
    operands = computation.operand_shapes(instruction)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # not the array it is written to, and the places and sizes of the slices
    axes: tuple[str, ...] | None
    if kind == "collective-permute":
        axes, group_size = _permute_axes(instruction, mesh_shape), 2
    else:
        groups = replica_groups(instruction.attributes, devices)
        axes, group_size = group_axes(groups, mesh_shape), len(groups[0])
    size = sum(shape.bytes for shape in operands)
    asynchronous = instruction.opcode.endswith("-start")
    return Collective(
        kind=kind,
        dtype=operands[0].dtype,
        bytes=size * group_size if kind == "all-gather" else size,
        axes=axes,
        group_size=group_size,
        count=module.runs[computation.name],
        name=instruction.name,
        computation=computation.name,
        op_name=instruction.op_name,
        source=module.source(instruction),
        operands=tuple(shape.dims for shape in operands),
        asynchronous=asynchronous,
        compute_between=_compute_between(computation, instruction) if asynchronous else 0,
    )


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
    """Parse `replica_groups=` in any of its forms to an int array [groups, members].

    List `{{0,1},{2,3}}` (empty: all devices), iota `[4,2]<=[2,2,2]T(2,1,0)`, mesh `mesh['a'=4,'b'=2] {'b'}`. Raises ValueError otherwise.
    """
    text = attributes.partition("replica_groups=")[2]
    if text.startswith("{}"):
        return np.arange(num_devices)[None]
    if text.startswith("{{"):
        groups = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 2])
        return np.array([[int(member) for member in group.split(",")] for group in groups])
    if text.startswith("["):
        return _iota(text)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise ValueError(f"cannot read replica groups '{text[:80]}'")


def _iota(text: str) -> np.ndarray:
    found = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?", text)
    if not found:
        raise ValueError(f"cannot read replica groups '{text[:80]}'")
    shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
    assert shape is not None
    ids = np.arange(math.prod(shape)).reshape(source or shape)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _mesh_groups(text: str) -> np.ndarray:
    """Parse `mesh['a'=4,'b'=2] {'b'}`: groups along the named axes, or parts of them (`'a':(2)2`: size 2 after a part of size 2)."""
    found = re.match(r"mesh\[([^\]]*)\](?:,? ?device_ids=\(([^)]*(?:\([^)]*\))?)\))? ?\{([^}]*)\}", text)
    if not found:
        raise ValueError(f"cannot read replica groups '{text[:80]}'")
    axes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found.group(1))}
    sizes, names = list(axes.values()), list(axes)
    parts: list[tuple[str, int, int]] = []
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", found.group(3)):
        parts.append((name, int(before or 1), int(size or axes[name])))
    split: list[int] = []
    grouped: list[int] = []
    for name, size in zip(names, sizes, strict=True):
        cuts = sorted((before, length) for part, before, length in parts if part == name)
        done = 1
        for before, length in cuts:
            split += [before // done, length]
            grouped.append(len(split) - 1)
            done = before * length
        split.append(size // done)
    total = math.prod(sizes)
    ids = _device_order(found.group(2)) if found.group(2) else np.arange(total)
    kept = [dim for dim in range(len(split)) if dim not in grouped]
    return ids.reshape(split).transpose(kept + grouped).reshape(-1, math.prod(split[dim] for dim in grouped))


def _device_order(text: str) -> np.ndarray:
    """Parse `[2,4]T(1,0)`, the ids of a [2,4] grid in transposed order, or a list of ids."""
    grid = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not grid:
        return np.array([int(n) for n in text.split(",")])
    dims = [int(n) for n in grid.group(1).split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(n) for n in grid.group(2).split(",")]).ravel() if grid.group(2) else ids.ravel()


def group_axes(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes that the groups run over; None when the groups do not correspond to a set of axes."""
    sizes, names = list(mesh_shape.values()), list(mesh_shape)
    if groups.size != math.prod(sizes):
        return None
    coordinates = np.stack(np.unravel_index(groups, sizes), axis=-1)
    varies = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    if math.prod(size for size, moving in zip(sizes, varies, strict=True) if moving) != groups.shape[1]:
        return None
    return tuple(name for name, moving in zip(names, varies, strict=True) if moving)


def _permute_axes(instruction: Instruction, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes along which some source and target differ; None for devices outside the mesh."""
    text = instruction.attributes.partition("source_target_pairs=")[2].partition("}}")[0] + "}"
    pairs = np.array([[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]).reshape(-1, 2)
    if (pairs >= math.prod(mesh_shape.values())).any():
        return None
    if not len(pairs):  # every device receives zeros
        return ()
    source, target = (np.stack(np.unravel_index(pairs[:, side], list(mesh_shape.values())), axis=-1) for side in (0, 1))
    return tuple(name for name, moving in zip(mesh_shape, (source != target).any(axis=0), strict=True) if moving)


def _compute_between(computation: Computation, start: Instruction) -> int:
    """Count the compute instructions scheduled between `start` and its done."""
    names = [instruction.name for instruction in computation.instructions]
    first = names.index(start.name)
    done = next(i for i, other in enumerate(computation.instructions) if other.opcode.endswith("-done") and start.name in other.operands)
    return sum(i.opcode in ("fusion", "dot", "convolution", "custom-call") for i in computation.instructions[first:done])
