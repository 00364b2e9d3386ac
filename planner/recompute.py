"""What the backward pass of a block computes a second time, under each compute.remat policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.remat import POLICIES
from ridgeline.configs.schema import Config, RematConfig
from ridgeline.planner.parameters import DOWN, attention_weights


@dataclass(frozen=True)
class Recomputed:
    """What the backward pass of a block computes a second time."""

    weights: frozenset[str]
    """Matmuls with these parameters: query, key, value, out, gate, up."""
    inputs: bool
    """The normalized inputs of attention and MLP, gathered over tensor."""
    attention: bool
    """Attention scores, softmax and values."""
    attention_update: bool
    """Attention's update of the residual stream, reduce-scattered over tensor."""
    mlp_update: bool = False
    """The MLP's update of the residual stream, which only a norm after it needs."""


def recomputed_by(config: Config) -> Recomputed:
    """As `recomputed`; the results of matrices with a magnitude (lora.dora) are needed, so that whole updates are computed again too."""
    again, policy = recomputed(config.model, config.compute.remat), config.compute.remat.policy
    if not config.lora.dora or policy == "dots" or not POLICIES[policy].recomputes_block:
        return again
    targets = config.lora.targets_of(config.model)
    return replace(
        again,
        weights=again.weights | set(targets),
        attention_update=again.attention_update or "out" in targets,
        mlp_update=again.mlp_update or "down" in targets,
    )


def recomputed(model: ModelConfig, remat: RematConfig) -> Recomputed:
    """Return what a rematerialization policy recomputes (models/remat.py)."""
    matmuls = frozenset((*attention_weights(model), *(("gate", "up") if model.gated_mlp else ("up",))))
    after = model.norm_position != "pre"  # a norm after the MLP needs its result
    if remat.policy == "none":
        return Recomputed(frozenset(), False, False, False)
    if remat.policy == "attention-only":
        return Recomputed(frozenset(), False, True, False)
    if remat.policy == "dots":
        return Recomputed(frozenset(), True, True, False)
    if remat.policy == "full":
        return Recomputed(matmuls | ({"down"} if after else set()), True, True, True, after)
    saved = set(remat.names)
    keeps = {"query": {"query"}, "key": {"key"}, "value": {"value"}, "out": {"attention_out"}, "gate": {"mlp_gate"}, "up": {"mlp_up"}}
    keeps |= {"key_value": {"key", "value"}}  # latents have no name, and the projections from them need them
    again = {matmul for matmul in matmuls if matmul in DOWN or not keeps[matmul] <= saved}
    if model.qk_norm:
        again |= {"query", "key"}  # their norms need the values before the norm
    again |= {"down"} if after and "mlp_out" not in saved else set()
    attention = "attention_lse" not in saved or "attention_context" not in saved
    return Recomputed(frozenset(again), True, attention, "out" in again, "down" in again)
