"""Every way to lay a step over a number of devices: mesh x microbatches x rematerialisation. The global batch stays what the user chose.

Sharding of the optimiser's state follows from the mesh: `fsdp` divides parameters, gradients and moments (ZeRO-3), `data` replicates them
(ZeRO-0 across it), and the product of both is the usual hybrid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_devices, divisors
from ridgeline.configs.schema import MESH_AXES, Config, MeshConfig, RematConfig

MEMORY_LADDER = (
    RematConfig(policy="none"),
    RematConfig(policy="dots"),
    RematConfig(policy="names", names=["query", "key", "value", "attention_out"]),
    RematConfig(policy="full"),
    RematConfig(policy="offload", names=["block_input"]),
)
"""Rematerialisation policies worth trying, most memory first. `names` keeps no attention result: cuDNN's backward pass also needs the
softmax statistics, which have no name there, so attention runs again either way (70B on 512 H100: 52 GB for 63, 7.27 s for 7.29)."""


@dataclass(frozen=True)
class Layout:
    """Mesh sizes, microbatches and rematerialisation."""

    data: int
    fsdp: int
    tensor: int
    accumulation: int = 1
    remat: RematConfig = MEMORY_LADDER[0]

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """All mesh axes."""
        return dict.fromkeys(MESH_AXES, 1) | {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

    @property
    def mesh(self) -> dict[str, int]:
        """The axes larger than 1 (all of size 1: an empty mapping)."""
        return {axis: size for axis, size in self.sizes.items() if size > 1}

    def text(self) -> str:
        """The mesh in words."""
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"

    def apply(self, config: Config) -> Config:
        """Return the config with this layout."""
        mesh = config.mesh.model_copy(update=self.sizes)
        trainer = config.trainer.model_copy(update={"accumulation": self.accumulation})
        compute = config.compute.model_copy(update={"remat": self.remat})
        return config.model_copy(update={"mesh": mesh, "trainer": trainer, "compute": compute})


@dataclass(frozen=True)
class Mesh:
    """A mesh of a device count: legal, or refused with the reason."""

    layout: Layout
    refused: str | None


def meshes(config: Config, devices: int) -> Iterator[Mesh]:
    """Yield every factorisation of the devices over data, fsdp and tensor, with the rule it breaks, if any.

    `tensor` goes up to the number of query heads: beyond it, nothing is left to divide.
    """
    for tensor in divisors(devices):
        if tensor > config.model.num_heads:
            break
        for fsdp in divisors(devices // tensor):
            layout = Layout(devices // tensor // fsdp, fsdp, tensor)
            yield Mesh(layout, refusal(config, layout))


def refusal(config: Config, layout: Layout) -> str | None:
    """Say which rule of the config a layout breaks (configs/rules.py), or None."""
    try:
        check_devices(layout.apply(config), layout.devices)
    except UserError as error:
        return str(error).splitlines()[0].removesuffix(f" (on {layout.devices} devices)")
    return None


def remat_choices(config: Config, measured: Sequence[RematConfig] = ()) -> list[RematConfig]:
    """Return the policies to try, most memory first; the config's own and measured ones come along where they are others."""
    found = list(MEMORY_LADDER)
    for remat in (config.compute.remat, *measured):
        found += [] if remat in found else [remat]
    return found


def accumulations(config: Config, layout: Layout) -> list[int]:
    """Return the numbers of microbatches that divide the rows of a shard, fewest first."""
    return divisors(config.data.batch_size // (layout.data * layout.fsdp))


def check_plannable(config: Config) -> None:
    """Raise UserError for a config whose sharding the planner does not model."""
    if config.mesh.rules != MeshConfig().rules:
        raise UserError(
            f"mesh.rules={dict(config.mesh.rules)}: the planner knows the default sharding rules only; plan without them"
            " (ridge compile takes them as they are)"
        )
