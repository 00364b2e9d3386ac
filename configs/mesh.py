"""How many devices each mesh axis has, once the number of devices is known."""

from __future__ import annotations

import math

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MeshConfig

WORKING_AXES = ("data", "fsdp", "tensor")
"""Axes that may be larger than 1; the others are reserved names."""
_RESERVED = f"only 1 is supported (axes that may grow: {', '.join(WORKING_AXES)})"


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
