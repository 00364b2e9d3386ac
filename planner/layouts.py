"""Layouts of a step on a number of devices: mesh, microbatches and rematerialization, for the configured global batch.

The mesh also determines the sharding of the optimizer state: `fsdp` shards parameters, gradients and moments (ZeRO stage 3), `data`
replicates them or, with mesh.zero_stage=2, shards gradients and moments, and both together are hybrid sharding (HSDP).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import divisors, layout_problems
from ridgeline.configs.schema import MESH_AXES, Config, MeshConfig, RematConfig

MEMORY_LADDER = (
    RematConfig(policy="none"),
    RematConfig(policy="attention-only"),
    RematConfig(policy="dots"),
    RematConfig(policy="names", names=["query", "key", "value", "attention_out"]),
    RematConfig(policy="full"),
    RematConfig(policy="offload", names=["block_input"]),
)
"""Rematerialization policies that the search tries, most memory first. `names` keeps no attention result: cuDNN's backward pass also needs
its softmax statistics, which are not tagged, so attention is recomputed anyway (70B on 512 H100: 52 instead of 63 GB, 7.27 instead of
7.29 s)."""


SHORTEST_PIECE = 8192
"""Least tokens of a row on a device of `context` that the search tries: shorter rows fit without, and a ring of short pieces waits for
its transfers."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, microbatches and rematerialization policy."""

    data: int
    fsdp: int
    tensor: int
    accumulation: int = 1
    remat: RematConfig = MEMORY_LADDER[0]
    context: int = 1
    zero_stage: int = 0
    """As mesh.zero_stage."""

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor * self.context

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices, for all mesh axes."""
        return dict.fromkeys(MESH_AXES, 1) | {"data": self.data, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> devices, for the axes larger than 1."""
        return {axis: size for axis, size in self.sizes.items() if size > 1}

    def text(self) -> str:
        """Return the mesh as text, e.g. `data=4 x fsdp=8`, and the ZeRO stage of `data`."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        return f"{mesh}, zero_stage={self.zero_stage}" if self.zero_stage else mesh

    def apply(self, config: Config) -> Config:
        """Return the config with this layout."""
        mesh = config.mesh.model_copy(update={**self.sizes, "zero_stage": self.zero_stage})
        trainer = config.trainer.model_copy(update={"accumulation": self.accumulation})
        compute = config.compute.model_copy(update={"remat": self.remat})
        return config.model_copy(update={"mesh": mesh, "trainer": trainer, "compute": compute})


@dataclass(frozen=True)
class Mesh:
    """A mesh, and the rule it breaks (None: it is valid)."""

    layout: Layout
    refused: str | None


def meshes(config: Config, devices: int) -> Iterator[Mesh]:
    """Yield every factorization of the devices over data, fsdp, context and tensor, with the rule it breaks, if any; with several devices
    on data also with mesh.zero_stage=2, where it is valid.

    `tensor` is at most the number of query heads, which it shards; `context` leaves each device SHORTEST_PIECE tokens of a row or more.
    """
    for context, tensor in itertools.product(divisors(devices), divisors(devices)):
        if devices % (context * tensor) or tensor > config.model.num_heads or context > max(1, config.data.seq_len // SHORTEST_PIECE):
            continue
        for fsdp in divisors(devices // tensor // context):
            layout = Layout(devices // tensor // context // fsdp, fsdp, tensor, context=context)
            yield Mesh(layout, refusal(config, layout))
            zero = replace(layout, zero_stage=2)
            allowed = layout.data > 1 and config.optimizer.kind != "muon" and config.model.moe is None
            if allowed and refusal(config, zero) is None:
                yield Mesh(zero, None)


def refusal(config: Config, layout: Layout) -> str | None:
    """Return the rule that a layout breaks (configs/rules.py); None when it is valid."""
    for problem in layout_problems(layout.apply(config), layout.sizes):
        return f"{problem.keys[0]}: {problem.message}"
    return None


def remat_choices(config: Config, measured: Sequence[RematConfig] = ()) -> list[RematConfig]:
    """Return the policies to try: MEMORY_LADDER, then the config's own and measured ones that are not in it."""
    found = list(MEMORY_LADDER)
    for remat in (config.compute.remat, *measured):
        found += [] if remat in found else [remat]
    return found


def accumulations(config: Config, layout: Layout) -> list[int]:
    """Return the numbers of microbatches that divide the rows of a shard, fewest first."""
    return divisors(config.data.batch_size // (layout.data * layout.fsdp))


def dividing_nodes(config: Config, devices_per_node: int, most: int) -> set[int]:
    """Return the numbers of nodes up to `most` whose devices divide the batch, with tensor parallelism within a node."""
    shards = divisors(config.data.batch_size)
    wanted = {rows * tensor for rows in shards for tensor in divisors(devices_per_node)}
    return {devices // devices_per_node for devices in wanted if devices % devices_per_node == 0 and devices <= most * devices_per_node}


def check_plannable(config: Config) -> None:
    """Raise UserError for a config with sharding rules that the planner does not model."""
    if config.mesh.rules != MeshConfig().rules:
        raise UserError(
            f"mesh.rules={dict(config.mesh.rules)}: the planner supports only the default sharding rules; plan without them"
            " (ridge compile supports all)"
        )
