"""The collectives of the modules of multi-token prediction (models/mtp.py): those of a layer each, of the projection and of three norms."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.planner.collectives.layers import in_layer, recomputed_in_layer
from ridgeline.planner.collectives.planned import PlannedCollective, StepSizes


def modules(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of all modules but those of embedding and loss, which run once for all heads."""
    model = step.config.model
    if not model.mtp_layers:
        return []
    blocks = StepSizes(step.config.model_copy(update={"model": model.mtp_blocks}), step.sizes, step.gpu)
    # tensor shards the tokens of the projection, as of the norms
    projection = blocks.parameters("projection", "layer", 2 * model.embed_dim**2, blocks.layers, whole=True)
    norms = blocks.replicated_gradient("further norms", 3 * (2 if model.norm == "layernorm" else 1) * model.embed_dim * 4)
    planned = [*in_layer(blocks), *recomputed_in_layer(blocks), *projection, *norms]
    return [replace(item, what=f"mtp {item.what}") for item in planned]
