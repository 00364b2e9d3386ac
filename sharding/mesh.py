"""The device mesh: the order of devices along the mesh axes.

All six axes always exist; an axis of size 1 has no cost and no special case. The axes are ordered as in `MESH_AXES`, slowest first, and
devices node by node: neighbors along the last axes (`tensor`, `expert`) are in the same node, and `data` crosses nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ridgeline.configs.mesh import resolve_sizes
from ridgeline.configs.schema import MESH_AXES, MeshConfig


class DeviceLike(Protocol):
    """The attributes of a `jax.Device` that determine its order."""

    id: int
    process_index: int


NodeOf = Callable[[DeviceLike], int]


def node_of(device: DeviceLike) -> int:
    """Return the index of the fast-interconnect domain the device belongs to.

    On GPUs `slice_index` is that domain (a node, or a whole NVLink rack); without it, each process counts as a node.
    """
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else int(slice_index)


def order_devices(devices: Sequence[DeviceLike], sizes: dict[str, int], node: NodeOf = node_of) -> np.ndarray:
    """Return the devices as an object array of shape `sizes`, ordered by node, process and id."""
    ordered = sorted(devices, key=lambda device: (node(device), device.process_index, device.id))
    grid = np.empty(len(ordered), dtype=object)
    grid[:] = ordered
    return grid.reshape([sizes[axis] for axis in MESH_AXES])


def build_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None, node: NodeOf = node_of) -> Mesh:
    """Return the mesh over `devices` (default: all of the run). Axis types are always Auto (jax 0.11 changed its default)."""
    devices = jax.devices() if devices is None else devices
    sizes = resolve_sizes(mesh, len(devices))
    return Mesh(order_devices(devices, sizes, node), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(mesh: MeshConfig, num_devices: int) -> AbstractMesh:
    """Return a mesh without devices, for specs and local shapes on a cluster that is not present."""
    sizes = resolve_sizes(mesh, num_devices)
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def straddling_axes(mesh: Mesh, node: NodeOf = node_of) -> list[str]:
    """Return the axes with neighbors on different nodes, whose collectives use the network between nodes."""
    nodes = np.vectorize(node, otypes=[int])(mesh.devices)
    return [axis for dim, axis in enumerate(mesh.axis_names) if (nodes != nodes.take([0], axis=dim)).any()]


def describe_mesh(mesh: Mesh, node: NodeOf = node_of) -> str:
    """Return the mesh and the axes that cross nodes in one line, with a warning when `tensor` does."""
    if mesh.size == 1:
        return "one device"
    used = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    nodes = len({node(device) for device in mesh.devices.flat})
    crossing = straddling_axes(mesh, node)
    text = f"mesh {used} on {mesh.size} devices, {nodes} node{'s' if nodes != 1 else ''}"
    if crossing:
        text += f"; across nodes: {', '.join(crossing)}"
    if "tensor" in crossing:
        text += " (warning: collectives over tensor run in every layer and should stay inside a node)"
    return text
