"""The collectives of the modules of multi-token prediction (models/mtp.py): those of a layer each, of the projection and of three norms."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.collectives.layers import in_layer, recomputed_in_layer
from ridgeline.planner.collectives.planned import PlannedCollective, StepSizes
from ridgeline.planner.parameters import attention_weights


def modules(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of all modules but those of embedding and loss, which run once for all heads.

    Modules run outside of a loop over layers, so each forward pass gathers parameters that are the same for every microbatch. A backward
    pass gathers them behind jax.checkpoint's barrier, which depends on the microbatch; only attention's output matrix is read without one,
    in a block that is not recomputed as a whole (models/remat.py).
    """
    model = step.config.model
    if not model.mtp_layers:
        return []
    blocks = StepSizes(step.config.model_copy(update={"model": model.mtp_blocks}), step.sizes, step.gpu, scanned=False)
    # tensor shards the tokens of the projection, as of the norms
    projection = blocks.parameters("projection", "layer", 2 * model.embed_dim**2, blocks.layers, whole=True)
    norms = blocks.replicated_gradient("further norms", 3 * (2 if model.norm == "layernorm" else 1) * model.embed_dim * 4)
    planned = [*_with_output_apart(blocks, in_layer(blocks)), *recomputed_in_layer(blocks), *projection, *norms]
    return [replace(item, what=f"mtp {item.what}") for item in planned]


def _with_output_apart(blocks: StepSizes, planned: list[PlannedCollective]) -> list[PlannedCollective]:
    """Return the collectives with the backward gather of attention's output matrix as one of its own."""
    if POLICIES[blocks.config.compute.remat.policy].recomputes_block:
        return planned
    inputs, outputs = attention_weights(blocks.model)["out"]
    result = []
    for item in planned:
        if (item.what, item.phase, item.kind) == ("attention parameters", "backward", "all-gather"):
            size = inputs * outputs // blocks.tensor * blocks.gathered
            result.append(replace(item, what="attention output parameters", bytes=size, invariant_count=blocks.model.num_layers))
            item = replace(item, bytes=item.bytes - size)
        result.append(item)
    return result
