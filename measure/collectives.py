"""Collectives over each mesh axis, and links between pairs of nodes, as all processes of a job measure them together.

All processes run the same list in the same order; each times itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ridgeline.configs.schema import MeshConfig
from ridgeline.measure.node import device_memory_bytes, median_time_s
from ridgeline.sharding.mesh import build_mesh

OPS = ("all-reduce", "all-gather")


def measurements(mesh_config: Mapping[str, Any] | None, nodes: Sequence[str], quick: bool) -> dict[str, Callable[[], Any]]:
    """Return what to measure between devices, by name.

    Args:
      mesh_config: a config's mesh section; None: `data` over nodes and `fsdp` inside them.
      nodes: name of each process's node.

    `mesh` gives the axis sizes; `link I` the bytes/s per device of this process's node with its neighbour in round I (null: it rests);
    `OP AXIS` a list of [bytes, seconds, bus bandwidth in bytes/s], one per size.
    """
    by_node = devices_by_node(jax.devices(), nodes)
    steps: dict[str, Callable[[], Any]] = {}
    config = MeshConfig(**mesh_config) if mesh_config is not None else default_mesh(by_node)
    made: dict[str, Mesh] = {}

    def make() -> dict[str, int]:
        made["mesh"] = build_mesh(config)
        return dict(made["mesh"].shape)

    steps["mesh"] = make
    if len(by_node) > 1 and len({len(devices) for devices in by_node}) == 1:
        for shift in range(2 if len(by_node) > 2 else 1):
            steps[f"link {shift}"] = functools.partial(pair_rate, by_node, shift, quick)
    for axis, size in config.sizes.items():
        if size != 1:
            for op in OPS:
                steps[f"{op} {axis}"] = functools.partial(_all_sizes, made, axis, op, quick)
    return steps


def default_mesh(by_node: Sequence[Sequence[jax.Device]]) -> MeshConfig:
    """Return `data` over the nodes and `fsdp` over the devices of one; where nodes differ, all devices on `data`."""
    widths = {len(devices) for devices in by_node}
    return MeshConfig(data=len(by_node), fsdp=widths.pop()) if len(widths) == 1 else MeshConfig(data=-1, fsdp=1)


def devices_by_node(devices: Sequence[jax.Device], nodes: Sequence[str]) -> list[list[jax.Device]]:
    """Group devices by the node of their process, in the order of the mesh (by process, then id)."""
    groups: dict[str, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        groups.setdefault(nodes[device.process_index], []).append(device)
    return list(groups.values())


def _all_sizes(made: Mapping[str, Mesh], axis: str, op: str, quick: bool) -> list[list[float]]:
    mesh = made["mesh"]
    if mesh.shape[axis] == 1:
        return []
    return [[size, *axis_collective(mesh, axis, op, size, quick)] for size in collective_sizes(quick)]


def collective_sizes(quick: bool) -> list[int]:
    """Return the bytes per device of the collectives measured, smallest first: one for the latency, one for the bandwidth."""
    device = jax.local_devices()[0]
    limit = device_memory_bytes(device)
    if limit is None:
        return [64 << 10, (1 if quick else 4) << 20]
    return [1 << 20, min((64 if quick else 512) << 20, limit // 32)]


def axis_collective(mesh: Mesh, axis: str, op: str, size_bytes: int, quick: bool) -> tuple[float, float]:
    """Time one collective over one mesh axis, all groups of the axis at work at once; return (seconds, bus bandwidth in bytes/s).

    Args:
      op: all-reduce (each device holds size_bytes) or all-gather (size_bytes is the gathered tensor).

    The bus bandwidth is what a link carries in one direction: n/t * 2(p-1)/p for all-reduce, n/t * (p-1)/p for all-gather (NCCL tests,
    PERFORMANCE.md). Wrong sums raise ArithmeticError.
    """
    group = mesh.shape[axis]
    elements = max(group, size_bytes // 4 // group * group)
    local = elements if op == "all-reduce" else elements // group
    everything = P(mesh.axis_names)
    sharding = NamedSharding(mesh, everything)
    x = jax.make_array_from_callback((local * mesh.size,), sharding, lambda index: np.ones(local, np.float32))

    def per_device(block: jax.Array) -> jax.Array:
        return jax.lax.psum(block, axis) if op == "all-reduce" else jax.lax.all_gather(block, axis, tiled=True)

    run = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=everything, out_specs=everything, check_vma=False))
    result = jax.block_until_ready(run(x))
    first = np.asarray(result.addressable_shards[0].data[:1024])
    if (first != (group if op == "all-reduce" else 1)).any():
        raise ArithmeticError(f"{op} over {axis} gave {first[0]} where {group if op == 'all-reduce' else 1} is right")
    seconds = median_time_s(lambda: run(x), 5 if quick else 9)
    moved = elements * 4 * (group - 1) / group * (2 if op == "all-reduce" else 1)
    return seconds, moved / seconds


def node_pairs(nodes: int, shift: int) -> dict[int, int]:
    """Pair neighbours; return node -> partner.

    Round 0 joins (0,1), (2,3), ..., round 1 joins (1,2), (3,4), ... and the last with the first. With an odd number one node rests in
    each round, but no node rests twice.
    """
    order = [(index + shift) % nodes for index in range(nodes)]
    if shift and nodes % 2:
        order = list(range(1, nodes))
    pairs = [(order[k], order[k + 1]) for k in range(0, len(order) - 1, 2)]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}


def pair_rate(devices_by_node: Sequence[Sequence[jax.Device]], shift: int, quick: bool) -> float | None:
    """Exchange data between neighbouring nodes, all pairs at once, both directions; return bytes/s per device and direction.

    Each process times its own pair, so one bad node slows only its own pair and is found. None: this process's node rests in this round.
    Nodes must hold equally many devices.
    """
    width = len(devices_by_node[0])
    assert all(len(devices) == width for devices in devices_by_node)
    partner = node_pairs(len(devices_by_node), shift)
    flat = [device for devices in devices_by_node for device in devices]
    permutation = [(node * width + k, other * width + k) for node, other in partner.items() for k in range(width)]
    mesh = Mesh(np.array(flat), ("devices",), axis_types=(AxisType.Auto,))
    elements = collective_sizes(quick)[-1] // 4
    sharding = NamedSharding(mesh, P("devices"))
    x = jax.make_array_from_callback((elements * len(flat),), sharding, lambda index: np.ones(elements, np.float32))

    def per_device(block: jax.Array) -> jax.Array:
        return jax.lax.ppermute(block, "devices", permutation)

    run = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=False))
    jax.block_until_ready(run(x))
    seconds = median_time_s(lambda: run(x), 3 if quick else 7)
    here = jax.process_index()
    mine = [node for node, devices in enumerate(devices_by_node) if any(device.process_index == here for device in devices)]
    return elements * 4 / seconds if any(node in partner for node in mine) else None
