"""Time collectives alone: over mesh axes, between the devices of this machine, and between pairs of nodes.

`collective` is the one call that all users time: `ridge bench collectives` (the collectives of a step), `ridge calibrate` (the links inside
a node) and the preflight probe (each mesh axis and each pair of neighboring nodes). In a run of several processes every process must make
the same calls in the same order; each process measures its own time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ridgeline.configs.schema import MeshConfig
from ridgeline.measure.device_rates import device_memory_bytes
from ridgeline.measure.timer import median_s
from ridgeline.planner.communication import bus_factor
from ridgeline.sharding.mesh import build_mesh

Axes = tuple[str, ...]
PROBED = ("all-reduce", "all-gather")
"""The kinds that the preflight measures over each mesh axis."""


def collective(kind: str, axes: Axes, full_bytes: int, mesh: Mesh) -> functools.partial[jax.Array]:
    """Return a call that runs one float32 collective over mesh axes, in all groups of these axes at once. The input is all ones.

    Args:
      kind: all-gather, reduce-scatter or all-reduce.
      full_bytes: size of the unsharded tensor on one device, rounded up to a multiple of the group: the output of an all-gather, the input
        of a reduction.
    """
    run, spec = _compiled(kind, axes, mesh)
    return functools.partial(run, _ones(mesh, spec, _elements(axes, full_bytes, mesh))())


def bus_bandwidth(kind: str, axes: Axes, full_bytes: int, mesh: Mesh, seconds: float) -> float:
    """Return the bytes/s that a link carries in one direction: n/t * 2(p-1)/p for all-reduce, else n/t * (p-1)/p.

    Source: NCCL tests, doc/PERFORMANCE.md.
    """
    return 4 * _elements(axes, full_bytes, mesh) * bus_factor(kind, _group(axes, mesh)) / seconds


@functools.cache
def _compiled(kind: str, axes: Axes, mesh: Mesh) -> tuple[Callable[[jax.Array], jax.Array], P]:
    """Return the jitted collective and the partition spec of its input."""
    functions: Mapping[str, tuple[Callable[[jax.Array], jax.Array], P, P]] = {
        "all-gather": (lambda x: jax.lax.all_gather(x, axes, tiled=True), P(axes), P()),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, axes, tiled=True), P(), P(axes)),
        "all-reduce": (lambda x: jax.lax.psum(x, axes), P(), P()),
    }
    function, before, after = functions[kind]
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)), before


@functools.cache
def _ones(mesh: Mesh, spec: P, elements: int) -> Callable[[], jax.Array]:
    """Return a compiled function that creates the input on the devices."""
    return jax.jit(lambda: jnp.ones(elements, jnp.float32), out_shardings=NamedSharding(mesh, spec))


def _group(axes: Axes, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _elements(axes: Axes, full_bytes: int, mesh: Mesh) -> int:
    group = _group(axes, mesh)
    return max(1, -(-full_bytes // (4 * group))) * group


# What the preflight measures, with all processes of the job together.


def measurements(mesh_config: Mapping[str, Any] | None, nodes: Sequence[str], quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the measurements between devices by name, in the order in which they must run.

    Args:
      mesh_config: a config's mesh section; None: `data` over nodes and `fsdp` inside them.
      nodes: name of each process's node.

    Results: `mesh` gives the axis sizes; `link I` the bytes/s per device between this process's node and its partner in round I (None when
    this node has no partner in the round); `KIND AXIS` a list of [bytes, seconds, bus bandwidth in bytes/s], one entry per size.
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
            for kind in PROBED:
                steps[f"{kind} {axis}"] = functools.partial(_all_sizes, made, axis, kind, quick)
    return steps


def default_mesh(by_node: Sequence[Sequence[jax.Device]]) -> MeshConfig:
    """Return `data` over the nodes and `fsdp` over the devices of a node. If nodes differ in size, put all devices on `data`."""
    widths = {len(devices) for devices in by_node}
    return MeshConfig(data=len(by_node), fsdp=widths.pop()) if len(widths) == 1 else MeshConfig(data=-1, fsdp=1)


def devices_by_node(devices: Sequence[jax.Device], nodes: Sequence[str]) -> list[list[jax.Device]]:
    """Group devices by the node of their process, in mesh order (by process, then id)."""
    groups: dict[str, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        groups.setdefault(nodes[device.process_index], []).append(device)
    return list(groups.values())


def _all_sizes(made: Mapping[str, Mesh], axis: str, kind: str, quick: bool) -> list[list[float]]:
    mesh = made["mesh"]
    if mesh.shape[axis] == 1:
        return []
    return [[size, *axis_collective(mesh, axis, kind, size, quick)] for size in collective_sizes(quick)]


def collective_sizes(quick: bool) -> list[int]:
    """Return the measured sizes in bytes per device, in ascending order: one for the latency, one for the bandwidth."""
    limit = device_memory_bytes(jax.local_devices()[0])
    if limit is None:
        return [64 << 10, (1 if quick else 4) << 20]
    return [1 << 20, min((64 if quick else 512) << 20, limit // 32)]


def axis_collective(mesh: Mesh, axis: str, kind: str, size_bytes: int, quick: bool) -> tuple[float, float]:
    """Time one collective over one mesh axis; return (seconds, bus bandwidth in bytes/s).

    Raises ArithmeticError when the result is wrong.
    """
    run = collective(kind, (axis,), size_bytes, mesh)
    first = np.asarray(jax.block_until_ready(run()).addressable_shards[0].data[:1024])
    right = 1 if kind == "all-gather" else mesh.shape[axis]
    if (first != right).any():
        raise ArithmeticError(f"{kind} over {axis} returned {first[first != right][0]}; {right} is correct")
    seconds = median_s(run, rounds=5 if quick else 9, most=1)
    return seconds, bus_bandwidth(kind, (axis,), size_bytes, mesh, seconds)


def node_pairs(nodes: int, shift: int) -> dict[int, int]:
    """Pair neighboring nodes; return node -> partner.

    Round 0 pairs (0,1), (2,3), ...; round 1 pairs (1,2), (3,4), ... and the last node with the first. With an odd number of nodes one node
    has no partner in each round, and it is a different node in each.
    """
    order = [(index + shift) % nodes for index in range(nodes)]
    if shift and nodes % 2:
        order = list(range(1, nodes))
    pairs = [(order[k], order[k + 1]) for k in range(0, len(order) - 1, 2)]
    return {a: b for pair in pairs for a, b in (pair, pair[::-1])}


def pair_rate(devices_by_node: Sequence[Sequence[jax.Device]], shift: int, quick: bool) -> float | None:
    """Exchange data between neighboring nodes, all pairs at once and in both directions; return bytes/s per device and direction.

    Each process times its own pair, so a slow node affects only its own pair. None: this process's node has no partner in this round.
    Nodes must have equally many devices.
    """
    width = len(devices_by_node[0])
    assert all(len(devices) == width for devices in devices_by_node)
    partner = node_pairs(len(devices_by_node), shift)
    flat = [device for devices in devices_by_node for device in devices]
    permutation = [(node * width + k, other * width + k) for node, other in partner.items() for k in range(width)]
    mesh = Mesh(np.array(flat), ("devices",), axis_types=(AxisType.Auto,))
    elements = collective_sizes(quick)[-1] // 4
    x = _ones(mesh, P("devices"), elements * len(flat))()

    def exchange(block: jax.Array) -> jax.Array:
        return jax.lax.ppermute(block, "devices", permutation)

    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=False))
    seconds = median_s(functools.partial(run, x), rounds=3 if quick else 7, most=1)
    here = jax.process_index()
    mine = [node for node, devices in enumerate(devices_by_node) if any(device.process_index == here for device in devices)]
    return elements * 4 / seconds if any(node in partner for node in mine) else None
