"""The collectives outside of the layers: token lookup, loss and optimizer."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.planner.adapters import adapted_matrices
from ridgeline.planner.collectives.planned import Kind, PlannedCollective, StepSizes
from ridgeline.planner.local import LocalSizes, muon_layers
from ridgeline.planner.parameters import matmul_weights


def embedding(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of the token lookup."""
    table = step.model.padded_vocab_size * step.model.embed_dim
    planned = step.parameters("embedding", "embed", table, step.lookups, by_hand=True, backward_gather=False)
    looked_up = step.heads * step.stream
    alone = not step.model.tie_embeddings  # with tied embeddings the gradient is first added to that of the unembedding
    planned = [replace(item, summed=alone) if item.kind == "all-reduce" else item for item in planned]
    planned += [
        PlannedCollective("embedded tokens", "embed", "forward", "reduce-scatter", step.over("tensor"), looked_up, step.lookups, 1, True),
        PlannedCollective("embedded tokens", "embed", "backward", "all-gather", step.over("tensor"), looked_up, step.lookups, 1, True),
    ]
    if step.frozen:  # the gradient of the first layer's input is not needed
        planned = [item for item in planned if item.phase == "forward"]
    return [*planned, *_positions(step)]


def _positions(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of learned positions: tensor shards their tokens, not their table.

    With mesh.zero_stage=2 their gradient is scattered over data only where nothing is summed over tensor.
    """
    if step.model.position != "learned":
        return []
    whole = step.model.max_seq_len * step.model.embed_dim
    zero = step.config.mesh.zero_stage == 2 and step.schedule.stages == 1
    scattered = zero and step.tensor == 1
    rest = step.over("context") if scattered else step.over("data", "context", "tensor")
    planned = step.parameters("positions", "embed", whole * step.tensor, step.lookups, by_hand=True, backward_gather=False)
    if step.frozen:
        return planned
    gathered = [item for item in planned if item.kind != "all-reduce" and (scattered or item.axes != step.over("data"))]
    summed = PlannedCollective("positions", "embed", "backward", "all-reduce", rest, whole // step.fsdp * step.grad, step.lookups, 1, True)
    return [*gathered, replace(summed, summed=not zero)]


def loss(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of final norm, unembedding and cross-entropy, whose gradients are computed in the forward pass."""
    model, tensor = step.model, step.over("tensor")
    parts = step.schedule.stages  # each stage has a part of the tokens
    tokens, stream = step.heads * step.tokens // parts, step.heads * step.stream // parts
    table = model.padded_vocab_size * model.embed_dim
    planned = step.parameters("unembedding", "loss", table, step.micro, by_hand=True, backward_gather=False, grad=4)
    planned = [replace(item, phase="forward") for item in planned]
    pairs = step.config.preference.loss is not None
    twice = pairs or step.config.policy.loss is not None  # log-probabilities come first, in a pass of their own
    passes = 2 if twice else 1
    if twice:
        planned += [replace(item, what="unembedding for log-probabilities") for item in planned if item.kind == "all-gather"]

    def item(what: str, kind: Kind, size: int) -> PlannedCollective:
        return PlannedCollective(what, "loss", "forward", kind, tensor, size, step.micro)

    planned += [
        item("final hidden states", "all-gather", stream),
        item("largest logits", "all-reduce", passes * tokens * 4),
        item("partition function and target logits", "all-reduce", passes * 2 * tokens * 4),
        item("gradient of the final hidden states", "all-reduce", stream),
    ]
    if pairs:
        rows = tokens * step.sizes["context"] // step.config.data.seq_len
        of_rows = PlannedCollective("sums of rows", "loss", "forward", "all-reduce", step.over("context"), 2 * rows * 4, step.micro)
        planned.append(of_rows)
    teacher = step.config.distillation
    if teacher.weight is not None:
        sums = 0 if teacher.rest == "renormalize" else 1 if teacher.temperature == 1 else 2  # of other tokens; at the temperature
        planned += [
            item("logits of the teacher's tokens", "all-reduce", tokens * teacher.top_k * 4),
            item("partition functions of the divergence", "all-reduce", 2 * sums * tokens * 4),
        ]
    if step.schedule.stages > 1:  # cut out where the tokens are sharded over tensor
        planned.append(item("targets and weights of a stage", "all-gather", 2 * tokens * 4))
    norms = 2 if model.norm == "layernorm" else 1
    final = step.replicated_gradient("final norm", norms * model.embed_dim * 4)
    return planned + [replace(item, where="loss", count=step.micro, summed=True) for item in final]


def optimizer(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of the optimizer: none but for Muon, and of mesh.zero_stage=2.

    Muon, in float32: an all-to-all per mesh axis shards each stack of matrices over its layers, and another one back.
    """
    model, weights = step.model, matmul_weights(step.model)
    if step.config.mesh.zero_stage:
        local = LocalSizes.of(step.config, step.sizes)
        if step.frozen:
            matrices = adapted_matrices(step.config)
            size = sum(matrix.layers * matrix.embed_side for matrix in matrices) // step.fsdp * step.master
            return [PlannedCollective("updated adapters", "optimizer", "backward", "all-gather", step.over_mesh("data"), size, 1, 1, True)]
        positions = model.max_seq_len * model.embed_dim // step.fsdp if model.position == "learned" else 0
        size = (local.layer_matrices + local.mtp_matrices + local.tables + positions) * step.master
        return [PlannedCollective("updated parameters", "optimizer", "backward", "all-gather", step.over_mesh("data"), size, 1, 1, True)]
    if step.config.optimizer.kind != "muon":
        return []
    stack = 4 * muon_layers(step.model.num_layers, step.fsdp * step.tensor)
    return [
        PlannedCollective(f"{name} to orthogonalize", "optimizer", "backward", "all-to-all", step.over(axis), stack * matrix, 2, 1, True)
        for name, matrix in weights.items()
        for axis in ("fsdp", "tensor")
    ]
