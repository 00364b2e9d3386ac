"""Sizes of the mesh axes for a number of devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config, MeshConfig


def resolve_sizes(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Return axis -> size in mesh order, with -1 replaced by the remaining devices.

    Raises UserError when the product is not `num_devices`, with the keys and the nearest sizes that fit.
    """
    sizes = mesh.sizes
    for axis, size in sizes.items():
        if size == 0:
            raise UserError(f"mesh.{axis}=0: must be at least 1, or -1 for the remaining devices")
    wild = [axis for axis, size in sizes.items() if size == -1]
    if len(wild) > 1:
        raise UserError(f"{' and '.join(f'mesh.{axis}' for axis in wild)} are both -1; only one mesh axis may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if wild and num_devices % fixed == 0:
        return {**sizes, wild[0]: num_devices // fixed}
    if not wild and fixed == num_devices:
        return sizes
    named = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "a mesh of 1"
    works = f" = {fixed}" if " x " in named and not wild else ""
    relation = "does not divide" if wild else "does not match"
    raise UserError(f"{named}{works} {relation} {num_devices} devices; {_suggestion(sizes, num_devices)}")


def with_mesh(config: Config, num_devices: int) -> Config:
    """Return the config with its mesh sizes resolved. Raises UserError as `resolve_sizes`."""
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=resolve_sizes(config.mesh, num_devices))})


def smaller_meshes(mesh: MeshConfig, num_devices: int) -> Iterator[MeshConfig]:
    """Yield the meshes of at most `num_devices` devices whose axes divide those of `mesh` (an axis of -1: any size), the largest first.

    Of two with as many devices, the one with more `tensor` and then more `fsdp` comes first: it holds a smaller part of a parameter.
    """
    choices = [[size for size in range(1, num_devices + 1) if wanted == -1 or wanted % size == 0] for wanted in mesh.sizes.values()]
    fitting = [dict(zip(mesh.sizes, sizes, strict=True)) for sizes in itertools.product(*choices) if math.prod(sizes) <= num_devices]
    for sizes in sorted(fitting, key=lambda sizes: (-math.prod(sizes.values()), -sizes["tensor"], -sizes["fsdp"])):
        yield mesh.model_copy(update=sizes)


def _suggestion(sizes: dict[str, int], num_devices: int) -> str:
    """Return the changes of one axis that make the product fit, nearest to the given size first."""
    # `context` is for long rows, `expert` for a model with experts and `pipeline` for slow networks: proposed only where they are used.
    working = {axis: size for axis, size in sizes.items() if axis not in ("context", "expert", "pipeline") or size != 1}
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
        return "set mesh.fsdp=-1 and every other axis to 1"
    found.sort()
    return "set " + " or ".join(text for _, text in found[:2])
