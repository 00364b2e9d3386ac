"""The device mesh: which device sits where.

All six axes always exist; an axis of size 1 costs nothing and is never special-cased. The axes are ordered as in `MESH_AXES`, slowest
first, and devices are laid out node by node: neighbours along the last axes (`tensor`, `expert`) share a node, and `data` crosses nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from configs.errors import UserError
from configs.schema import MESH_AXES, MeshConfig

WORKING_AXES = ("data", "fsdp", "tensor")
"""Axes that may be larger than 1; the others are reserved names."""
_RESERVED = f"only 1 is supported (axes that may grow: {', '.join(WORKING_AXES)})"


class DeviceLike(Protocol):
    """What the ordering needs to know of a device (a `jax.Device`, or a stand-in in tests and plans)."""

    id: int
    process_index: int


NodeOf = Callable[[DeviceLike], int]


def node_of(device: DeviceLike) -> int:
    """Return the index of the fast-interconnect domain the device belongs to.

    On GPUs `slice_index` is that domain (a node, or a whole NVLink rack); where there is none, a process stands for its node.
    """
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else int(slice_index)


def resolve_sizes(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return axis -> size with -1 replaced by the devices that are left, in mesh order.

    Raises UserError when the product does not match `num_devices`, naming the keys and the nearest sizes that work.
    """
    sizes = mesh.sizes
    for axis, size in sizes.items():
        if size == 0:
            raise UserError(f"mesh.{axis}=0: a mesh axis has at least 1 device (-1 takes the devices that are left)")
        if size != 1 and axis not in WORKING_AXES and not (size == -1):
            raise UserError(f"mesh.{axis}={size}: {_RESERVED}")
    wild = [axis for axis, size in sizes.items() if size == -1]
    if len(wild) > 1:
        raise UserError(f"{' and '.join(f'mesh.{axis}' for axis in wild)} are both -1: at most one axis can take the devices that are left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if wild and num_devices % fixed == 0:
        if wild[0] not in WORKING_AXES and num_devices != fixed:
            raise UserError(f"mesh.{wild[0]}=-1 would become {num_devices // fixed}: {_RESERVED}")
        return {**sizes, wild[0]: num_devices // fixed}
    if not wild and fixed == num_devices:
        return sizes
    named = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "a mesh of 1"
    works = f" = {fixed}" if " x " in named and not wild else ""
    relation = "does not divide" if wild else "is not"
    raise UserError(f"{named}{works} {relation} the {num_devices} devices there are; {_suggestion(sizes, num_devices)}")


def _suggestion(sizes: dict[str, int], num_devices: int) -> str:
    """Say which change of one axis makes the product work, nearest to what was asked first."""
    working = {axis: size for axis, size in sizes.items() if axis in WORKING_AXES}
    found: list[tuple[float, str]] = []
    for axis, size in working.items():
        others = math.prod(other for name, other in sizes.items() if name != axis and other != -1)
        wild_elsewhere = any(other == -1 for name, other in sizes.items() if name != axis)
        if size == -1 or num_devices % others:
            continue
        room = num_devices // others
        choices = [d for d in range(1, room + 1) if room % d == 0] if wild_elsewhere else [room]
        found += [(abs(math.log(choice / size)), f"mesh.{axis}={choice}") for choice in choices if choice != size]
    if not found:
        return "what works: mesh.fsdp=-1 with every other axis 1"
    found.sort()
    return "what works: " + " or ".join(text for _, text in found[:2])


def order_devices(devices: Sequence[DeviceLike], sizes: dict[str, int], node: NodeOf = node_of) -> np.ndarray:
    """Return the devices as an object array of shape `sizes`, laid out node by node, process by process, id by id."""
    ordered = sorted(devices, key=lambda device: (node(device), device.process_index, device.id))
    grid = np.empty(len(ordered), dtype=object)
    grid[:] = ordered
    return grid.reshape([sizes[axis] for axis in MESH_AXES])


def build_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None, node: NodeOf = node_of) -> Mesh:
    """Build the mesh over `devices` (default: all of the run); axis types are always Auto (jax 0.11 changed its own default)."""
    devices = jax.devices() if devices is None else devices
    sizes = resolve_sizes(mesh, len(devices))
    return Mesh(order_devices(devices, sizes, node), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(mesh: MeshConfig, num_devices: int) -> AbstractMesh:
    """Build a mesh without devices: enough for specs and local shapes, for a cluster this machine does not have."""
    sizes = resolve_sizes(mesh, num_devices)
    return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def straddling_axes(mesh: Mesh, node: NodeOf = node_of) -> list[str]:
    """Return the axes with neighbours on different nodes: their collectives use the network between nodes."""
    nodes = np.vectorize(node, otypes=[int])(mesh.devices)
    return [axis for dim, axis in enumerate(mesh.axis_names) if (nodes != nodes.take([0], axis=dim)).any()]


def describe_mesh(mesh: Mesh, node: NodeOf = node_of) -> str:
    """Say in one line how the mesh lies over the nodes, with a warning when `tensor` leaves a node."""
    if mesh.size == 1:
        return "one device"
    used = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    nodes = len({node(device) for device in mesh.devices.flat})
    crossing = straddling_axes(mesh, node)
    text = f"mesh {used} on {mesh.size} devices, {nodes} node{'s' if nodes != 1 else ''}"
    if crossing:
        text += f"; across nodes: {', '.join(crossing)}"
    if "tensor" in crossing:
        text += " (warning: tensor collectives run in every layer and want the links inside a node)"
    return text
