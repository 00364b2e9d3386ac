"""Layouts of a step on a number of devices: mesh, microbatches and rematerialization, for the configured global batch.

The mesh also determines the sharding of the optimizer state: `fsdp` shards parameters, gradients and moments (ZeRO stage 3), `data`
replicates them or, with mesh.zero_stage=2, shards gradients and moments, and both together are hybrid sharding (HSDP).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.configs.errors import UserError
from ridgeline.configs.problem import divisors
from ridgeline.configs.rules import layout_problems
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
    expert: int = 1
    pipeline: int = 1
    pipeline_chunks: int = 1
    """As mesh.pipeline_chunks."""

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices, for all mesh axes."""
        return {axis: getattr(self, axis, 1) for axis in MESH_AXES}

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
        changes = {**self.sizes, "zero_stage": self.zero_stage, "pipeline_chunks": self.pipeline_chunks}
        mesh = config.mesh.model_copy(update=changes)
        trainer = config.trainer.model_copy(update={"accumulation": self.accumulation})
        compute = config.compute.model_copy(update={"remat": self.remat})
        return config.model_copy(update={"mesh": mesh, "trainer": trainer, "compute": compute})


@dataclass(frozen=True)
class Mesh:
    """A mesh, and the rule it breaks (None: it is valid)."""

    layout: Layout
    refused: str | None


def meshes(config: Config, devices: int, on_node: int) -> Iterator[Mesh]:
    """Yield every factorization of the devices over data, fsdp, context, tensor and, for a model with experts, expert, with the rule it
    breaks, if any; with several devices on data also with mesh.zero_stage=2, where it is valid.

    `tensor` is at most the number of query heads, which it shards; `context` leaves each device SHORTEST_PIECE tokens of a row or more;
    `expert` divides the experts. With several nodes (of `on_node` devices) also stages of whole nodes, where each stores its own layers:
    inside a node stages save no communication that costs anything.
    """
    yield from _in_stages(config, devices, on_node)
    experts = divisors(config.model.moe.experts) if config.model.moe is not None else [1]
    for context, tensor, expert in itertools.product(divisors(devices), divisors(devices), experts):
        inner = context * tensor * expert
        if devices % inner or tensor > config.model.num_heads or context > max(1, config.data.seq_len // SHORTEST_PIECE):
            continue
        for fsdp in divisors(devices // inner):
            layout = Layout(devices // inner // fsdp, fsdp, tensor, context=context, expert=expert)
            yield Mesh(layout, refusal(config, layout))
            zero = replace(layout, zero_stage=2)
            allowed = layout.data > 1 and config.optimizer.kind != "muon" and config.model.moe is None
            if allowed and refusal(config, zero) is None:
                yield Mesh(zero, None)


MOST_STAGES = 16
"""Most stages that the search tries."""


def _in_stages(config: Config, devices: int, on_node: int) -> Iterator[Mesh]:
    """Yield the valid meshes with stages of whole nodes, whose parameters are sharded over a stage or over a node of it."""
    chunks = config.mesh.pipeline_chunks
    for stages in divisors(devices):
        inside, chunk = devices // stages, stages * chunks * config.model.layer_period
        if not 1 < stages <= MOST_STAGES or inside % on_node or config.model.num_layers % chunk:
            continue
        for tensor in divisors(on_node):
            for fsdp in sorted({inside // tensor, on_node // tensor}):
                layout = Layout(inside // tensor // fsdp, fsdp, tensor, stages, pipeline=stages, pipeline_chunks=chunks)
                if tensor <= config.model.num_heads and refusal(config, layout) is None:
                    yield Mesh(layout, None)


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
    """Return the numbers of microbatches that divide the rows of a shard, fewest first; with stages most first, which has the smallest
    bubble, and as many as stages at least."""
    counts = divisors(config.data.batch_size // (layout.data * layout.fsdp * layout.expert))
    if layout.pipeline == 1:
        return counts
    even = 1 if layout.pipeline_chunks == 1 else layout.pipeline
    return [count for count in reversed(counts) if count >= layout.pipeline and count % even == 0]


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
