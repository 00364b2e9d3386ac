"""Logical axis -> mesh axes: the one table that decides what is sharded over what.

Parameters and activations carry logical axis names; changing a layout is changing a row here, or `mesh.rules` in a config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jax.sharding import PartitionSpec

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.schema import MESH_AXES, MeshConfig

Axes = tuple[str, ...]
LogicalAxes = Sequence[str | None]
"""One logical name (or None: not sharded) per dim of an array."""


@dataclass(frozen=True)
class Rules:
    """The rows: logical axis to mesh axes, the first of several varying slowest. `()` means replicated."""

    # Parameters.
    layers: Axes = ("pipeline",)
    """A stage owns whole layers, so the stacked axis is what a pipeline cuts."""
    vocab: Axes = ("tensor",)
    """The two vocabulary tables are the largest matrices; cutting their rows also cuts the logits."""
    embed: Axes = ("fsdp",)
    """Every matrix has exactly one `embed` dim, so this one row shards them all (ZeRO-3) with one gather each."""
    heads: Axes = ("tensor",)
    """Heads are independent: projections in are cut by column, the projection out by row, one reduction per block (Megatron)."""
    kv_heads: Axes = ("tensor",)
    """As heads; a model with fewer key/value heads than `tensor` needs `kv_heads: []` (replicated) here."""
    head_dim: Axes = ()
    """Inside a head nothing is independent: the softmax needs all of it."""
    mlp: Axes = ("tensor",)
    """The hidden width is elementwise: column then row, one reduction per block (Megatron)."""
    norm: Axes = ()
    """A few thousand numbers: a gather would cost more latency than the copy costs memory."""
    positions: Axes = ()
    """Learned positions are looked up by index; their `embed` dim is sharded already."""

    # Activations.
    batch: Axes = ("data", "fsdp")
    """fsdp is data parallelism with sharded parameters, so both axes cut the batch."""
    seq: Axes = ("context",)
    """The sequence inside attention and MLP."""
    residual_seq: Axes = ("context", "tensor")
    """The residual stream between blocks: norms and adds are per token, so `tensor` cuts tokens there (sequence parallelism,
    arXiv 2205.05198)."""
    act_embed: Axes = ()
    """Matmuls contract over it; a cut would add a reduction to each."""
    act_heads: Axes = ("tensor",)
    """Follows `heads`."""
    act_kv_heads: Axes = ("tensor",)
    """Follows `kv_heads`."""
    act_mlp: Axes = ("tensor",)
    """Follows `mlp`."""
    act_vocab: Axes = ("tensor",)
    """Follows `vocab`: logits stay cut; only sums over the vocabulary are reduced."""

    @classmethod
    def from_config(cls, mesh: MeshConfig) -> Rules:
        """Return the table with the overrides of `mesh.rules`; unknown logical or mesh axes are refused with the nearest name."""
        for logical, axes in mesh.rules.items():
            if logical not in LOGICAL_AXES:
                raise unknown_name("logical axis in mesh.rules", logical, LOGICAL_AXES)
            for axis in axes:
                if axis not in MESH_AXES:
                    raise unknown_name(f"mesh axis in mesh.rules.{logical}", axis, MESH_AXES)
            if logical in PARAMETER_AXES and "fsdp" in axes and len(axes) > 1:
                raise UserError(
                    f"mesh.rules.{logical}={axes}: 'fsdp' must be alone on a parameter's dim, which is gathered over it for use"
                )
        return dataclasses.replace(cls(), **{logical: tuple(axes) for logical, axes in mesh.rules.items()})

    def mesh_axes(self, logical: str | None) -> Axes:
        """Return the mesh axes of one logical axis; None is never sharded."""
        if logical is None:
            return ()
        if logical not in LOGICAL_AXES:
            raise unknown_name("logical axis", logical, LOGICAL_AXES)
        axes: Axes = getattr(self, logical)
        return axes

    def spec(self, axes: LogicalAxes, without: Axes = ()) -> PartitionSpec:
        """Translate logical axes, one per dim, leaving out the mesh axes in `without`.

        Raises UserError when two dims claim the same mesh axis.
        """
        entries = [tuple(axis for axis in self.mesh_axes(logical) if axis not in without) for logical in axes]
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


HEAD_AXES = frozenset({"heads", "kv_heads", "head_dim"})
"""Logical axes that together are one side of a projection."""


def matrix_sides(axes: LogicalAxes) -> list[tuple[int, ...]]:
    """Group the dims of one layer's parameter into the sides of its matrix: `(layers, embed, heads, head_dim)` -> `[(1,), (2, 3)]`.

    A norm or a bias has one side, whatever its rank; the stacked `layers` dim belongs to none.
    """
    dims = [dim for dim, axis in enumerate(axes) if axis != "layers"]
    return [tuple(group) for _, group in groupby(dims, key=lambda dim: (0, "") if axes[dim] in HEAD_AXES else (dim + 1, axes[dim]))]


PARAMETER_AXES = frozenset({"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "norm", "positions"})
"""Logical axes that only parameters have."""
LOGICAL_AXES = tuple(field.name for field in dataclasses.fields(Rules))
