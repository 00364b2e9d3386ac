"""The collectives of routed experts: their parameters, the router, biases, and the tokens on their way (models/moe)."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.configs.model_schema import MoEConfig
from ridgeline.planner.collectives.planned import Kind, Phase, PlannedCollective, StepSizes
from ridgeline.planner.experts import exchange_method, peer_slots, peers_per_token
from ridgeline.planner.parameters import expert_parameters


def experts(step: StepSizes, moe: MoEConfig) -> list[PlannedCollective]:
    """Return the collectives of the router and the routed experts, written by hand (models/moe), with their recomputation.

    The backward pass computes the router's choice again, and gathers the tokens again: no policy keeps them in the experts' rows.
    """
    model = step.model
    weights = moe.experts * expert_parameters(model)
    routed = step.parameters("experts", "layer", weights, step.layers, of_experts=True, reduced_by_hand=True)
    router = [
        item if item.kind == "all-gather" else replace(item, bytes=item.bytes * 4 // step.grad)
        for item in step.parameters(
            "router", "layer", model.embed_dim * moe.experts * step.tensor, step.layers, reduced_by_hand=True, gathered=4
        )
    ]
    router = [replace(item, axes=(*item.axes, *step.over("tensor"))) if item.kind == "all-reduce" else item for item in router]
    return [*routed, *router, *_exchange(step, moe), *_expert_biases(step, moe)]


def _exchange(step: StepSizes, moe: MoEConfig) -> list[PlannedCollective]:
    """Return the transfers of tokens to their experts and back (models/moe/exchange.py), over expert and over tensor."""
    settings, tokens = step.config.compute.experts, step.tokens // step.tensor
    width, choice = step.model.embed_dim * step.act, moe.experts_per_token * 4
    method = exchange_method(moe, settings, step.sizes)
    slots = tokens  # of each device on each other
    if method == "all_to_all":
        slots = peer_slots(tokens, moe.experts, moe.experts_per_token, step.expert, settings.capacity_factor)
    sent, ragged = step.expert * slots, method == "all_to_all" and settings.capacity_factor is None
    if ragged and step.gpu:
        sent = tokens * min(moe.experts_per_token, step.expert)
    used = tokens * peers_per_token(moe, step.expert) if ragged else 0.0
    kinds: tuple[Kind, Kind] = ("all-gather", "reduce-scatter")
    if method == "all_to_all":
        kinds = ("ragged-all-to-all", "ragged-all-to-all") if ragged and step.gpu else ("all-to-all", "all-to-all")
    planned = []
    transfers: tuple[tuple[str, Phase, int, bool], ...] = (
        ("choice and weights of experts", "forward", 2 * choice, True),
        ("experts input", "forward", width, True),
        ("experts update", "forward", width, False),
        ("choice and weights of experts (again)", "backward", 2 * choice, True),
        ("experts input (again)", "backward", width, True),
        ("experts update", "backward", width, True),
        ("weights of experts", "backward", choice, False),
        ("experts input", "backward", width, False),
    )
    for what, phase, size, to_experts in transfers:
        # Tokens are sent over expert while sharded along the sequence, then gathered over tensor; back in the opposite order.
        rows = sent if to_experts else step.expert * slots
        over = step.item(what, phase, kinds[0 if to_experts else 1], step.over("expert"), rows * size)
        planned.append(replace(over, by_hand=True, of_tokens=True, used_bytes=round(used * size) if ragged else None))
        within: Kind = "all-gather" if to_experts else "reduce-scatter"
        gathered = step.tensor * step.expert * slots * size
        planned.append(replace(step.item(what, phase, within, step.over("tensor"), gathered), by_hand=True))
    if ragged:
        sizes = step.expert * step.expert * 4
        passes: tuple[Phase, ...] = ("forward", "backward")
        planned += [step.item("rows sent to each device", phase, "all-gather", step.over("expert"), sizes) for phase in passes]
    return planned


def _expert_biases(step: StepSizes, moe: MoEConfig) -> list[PlannedCollective]:
    """Return the reductions of the gradients of the biases of the router and the routed experts (models/moe/biases.py)."""
    model, planned = step.model, []
    if moe.logit_bias:
        planned += step.replicated_gradient("router bias", moe.experts * 4)
    if model.mlp_bias and not step.frozen:
        hidden = (2 if model.gated_mlp else 1) * moe.experts // step.expert * model.expert_width // step.tensor * step.grad
        axes = step.over("data", "fsdp", "context")
        planned.append(replace(step.item("biases of experts", "backward", "all-reduce", axes, hidden), by_hand=True))
        axes, size = step.over("data", "fsdp", "context", "tensor", "expert"), moe.experts * model.embed_dim * 4
        planned.append(replace(step.item("biases of experts' updates", "backward", "all-reduce", axes, size), by_hand=True))
    return planned
