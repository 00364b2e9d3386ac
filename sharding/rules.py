"""Sharding rules: the table from logical axes to mesh axes.

Parameters and activations have logical axis names. To change a sharding, change a row here, or set `mesh.rules` in a config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jax.sharding import PartitionSpec

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.schema import MESH_AXES, MeshConfig

TOKENS = "tokens"
"""The logical axis of shards of tokens: `batch` and `seq` together. Not a row of the table: it follows from those two."""
Axes = tuple[str, ...]
LogicalAxes = Sequence[str | None]
"""One logical name (or None: not sharded) per dim of an array."""


@dataclass(frozen=True)
class Rules:
    """The table: logical axis -> mesh axes, the first of several varying slowest. `()`: replicated."""

    # Parameters.
    layers: Axes = ("pipeline",)
    """A pipeline stage has whole layers, so pipelines shard the stacked axis where the layers divide."""
    vocab: Axes = ("tensor",)
    """The two vocabulary tables are the largest matrices; sharding their rows also shards the logits."""
    embed: Axes = ("fsdp",)
    """Every matrix has exactly one `embed` dim, so this row shards all of them (ZeRO stage 3), with one gather each."""
    heads: Axes = ("tensor",)
    """Heads are independent: input projections are sharded by column, the output projection by row, with one reduction (Megatron)."""
    kv_heads: Axes = ("tensor",)
    """As heads; a model with fewer key/value heads than `tensor` needs `kv_heads: []` (replicated) here."""
    head_dim: Axes = ()
    """Not sharded: the softmax needs the whole head."""
    latent: Axes = ()
    """Not sharded: every head reads the whole latent of latent attention, and its norm needs all of it."""
    stream: Axes = ()
    """Not sharded: projections of multi-token prediction are computed on shards of the residual stream, as norms are."""
    rank: Axes = ()
    """Not sharded: the rank of a low-rank adapter is small, and divides by nothing."""
    mlp: Axes = ("tensor",)
    """The hidden activations are elementwise: sharded by column, then by row, with one reduction (Megatron)."""
    experts: Axes = ("expert",)
    """Each device of `expert` has whole experts."""
    expert_embed: Axes = ("fsdp",)
    """As `embed`, of the matrices of experts."""
    router: Axes = ()
    """Not sharded: every token has a score for every expert."""
    norm: Axes = ()
    """Replicated: the vectors are small, and a gather would cost latency."""
    positions: Axes = ()
    """Replicated: learned positions are looked up by index, and their `embed` dim is already sharded."""

    # Activations.
    batch: Axes = ("data", "fsdp")
    """fsdp is data parallelism with sharded parameters, so both axes shard the batch."""
    seq: Axes = ("context",)
    """The sequence inside attention and MLP."""
    residual_seq: Axes = ("context", "tensor")
    """The sequence of the residual stream between blocks: norms and adds are per token, so `tensor` shards tokens there (sequence
    parallelism, arXiv 2205.05198)."""
    act_embed: Axes = ()
    """Replicated: matmuls contract over it, so sharding would add a reduction to each."""
    act_heads: Axes = ("tensor",)
    """As `heads`."""
    act_kv_heads: Axes = ("tensor",)
    """As `kv_heads`."""
    act_mlp: Axes = ("tensor",)
    """As `mlp`."""
    act_vocab: Axes = ("tensor",)
    """As `vocab`: logits stay sharded, and only sums over the vocabulary are reduced."""

    @classmethod
    def from_config(cls, mesh: MeshConfig, *, stored_by_stage: bool = True) -> Rules:
        """Return the table with the changes of `mesh.rules`.

        stored_by_stage: as in configs/pipeline.py. Raises UserError with the nearest name for unknown logical or mesh axes."""
        for logical, axes in mesh.rules.items():
            if logical not in LOGICAL_AXES:
                raise unknown_name("logical axis in mesh.rules", logical, LOGICAL_AXES)
            for axis in axes:
                if axis not in MESH_AXES:
                    raise unknown_name(f"mesh axis in mesh.rules.{logical}", axis, MESH_AXES)
            if logical in PARAMETER_AXES and "fsdp" in axes and len(axes) > 1:
                raise UserError(
                    f"mesh.rules.{logical}={axes}: 'fsdp' must be the only mesh axis of a parameter's dim; remove it or the others"
                )
        rules = {logical: tuple(axes) for logical, axes in mesh.rules.items()}
        table = dataclasses.replace(cls(), **(WITH_EXPERTS if mesh.expert != 1 else {}))
        if mesh.pipeline != 1:
            widths = {name: (*getattr(table, name), PIPELINE_AXIS) for name in WITH_PIPELINE}
            table = dataclasses.replace(table, **widths, layers=(PIPELINE_AXIS,) if stored_by_stage else ())
        return dataclasses.replace(table, **rules)

    def excluding(self, axes: Axes) -> Rules:
        """Return the table without these mesh axes."""
        rows = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Rules(**{name: tuple(axis for axis in row if axis not in axes) for name, row in rows.items()})

    def mesh_axes(self, logical: str | None) -> Axes:
        """Return the mesh axes of one logical axis; None is never sharded."""
        if logical is None:
            return ()
        if logical not in (*LOGICAL_AXES, TOKENS):
            raise unknown_name("logical axis", logical, LOGICAL_AXES)
        axes: Axes = self.token_axes if logical == TOKENS else getattr(self, logical)
        return axes

    @property
    def token_axes(self) -> Axes:
        """The mesh axes over which tokens are sharded in matmuls and loss: those of `batch` and of `seq`."""
        return self.batch + self.seq

    def spec(self, axes: LogicalAxes, without: Axes = ()) -> PartitionSpec:
        """Return the spec of logical axes, one per dim, omitting the mesh axes in `without`.

        Raises UserError when two dims map to the same mesh axis.
        """
        if "layers" in axes and PIPELINE_AXIS in self.layers:  # whole layers, then no other dim
            without = (*without, PIPELINE_AXIS)
        entries = [tuple(axis for axis in self.mesh_axes(logical) if axis not in without or logical == "layers") for logical in axes]
        claimed: dict[str, str | None] = {}
        for logical, entry in zip(axes, entries, strict=True):
            for axis in entry:
                if axis in claimed:
                    raise UserError(
                        f"logical axes {tuple(axes)}: '{claimed[axis]}' and '{logical}' both map to mesh axis '{axis}'; "
                        "change one of them in mesh.rules"
                    )
                claimed[axis] = logical
        return PartitionSpec(*(None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries))


PIPELINE_AXIS = "pipeline"
WITH_PIPELINE = ("embed", "expert_embed")
"""Rows of the table that `mesh.pipeline` changes: for parameters that are not whole layers it is a further fsdp axis, so that no device
stores or updates what another one does."""
WITH_EXPERTS = {"batch": ("data", "fsdp", "expert"), "embed": ("fsdp", "expert")}
"""Rows of the table where `mesh.expert` is used: outside of the experts it is a further fsdp axis, so that no device repeats work."""
HEAD_AXES = frozenset({"heads", "kv_heads", "head_dim"})
"""Logical axes that together form one side of a projection matrix."""


def matrix_sides(axes: LogicalAxes) -> list[tuple[int, ...]]:
    """Group the dims of one layer's parameter into the sides of its matrix: `(layers, embed, heads, head_dim)` -> `[(1,), (2, 3)]`.

    A norm or a bias has one side, for any rank. The stacked dims `layers` and `experts` belong to no side.
    """
    dims = [dim for dim, axis in enumerate(axes) if axis not in ("layers", "experts")]
    return [tuple(group) for _, group in groupby(dims, key=lambda dim: (0, "") if axes[dim] in HEAD_AXES else (dim + 1, axes[dim]))]


PARAMETER_AXES = frozenset(
    {
        "layers",
        "vocab",
        "embed",
        "heads",
        "kv_heads",
        "head_dim",
        "latent",
        "stream",
        "rank",
        "mlp",
        "experts",
        "expert_embed",
        "router",
        "norm",
        "positions",
    }
)
"""Logical axes that only parameters have."""
LOGICAL_AXES = tuple(field.name for field in dataclasses.fields(Rules))
