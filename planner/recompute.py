"""What the backward pass of a block computes a second time, under each compute.remat policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.remat import POLICIES
from ridgeline.configs.schema import ComputeConfig, Config, RematConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.planner.experts import exchange_method
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
    """Return what the backward pass of a config recomputes."""
    return recomputed_with(config.model, config.compute.remat, config.lora)


def recomputed_with(model: ModelConfig, remat: RematConfig, lora: LoraConfig) -> Recomputed:
    """As `recomputed`; the results of matrices with a magnitude (lora.dora) are needed, so that whole updates are computed again too."""
    again = recomputed(model, remat)
    if not lora.dora or remat.policy == "dots" or not POLICIES[remat.policy].recomputes_block:
        return again
    targets = lora.targets_of(model)
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


def gathers_mlp_input(config: Config, tensor: int, expert: int) -> bool:
    """Return whether the input of an MLP is gathered over the mesh axes tensor or expert, which have these sizes."""
    compute = config.compute
    over_tensor = tensor > 1 and compute.tensor_overlap != "ring"
    return over_tensor or exchange_method(config.model.moe, compute.experts, {"expert": expert}) == "gather"


def in_order(model: ModelConfig, compute: ComputeConfig, *, frozen: bool) -> bool:
    """Return whether the backward passes of the layers of a turn follow each other: of dense layers of several kinds, in the loop.

    Then a whole block is recomputed when the gradient of its result is there (models/backward_order.py). frozen: only adapters are trained.
    """
    return model.layer_period > 1 and model.moe is None and compute.scan_layers and not frozen


def waiting(config: Config, tensor: int, expert: int) -> str:
    """Return what a block of a config recomputes only when the gradient of its result is there, over mesh axes of these sizes."""
    compute = config.compute
    if in_order(config.model, compute, frozen=config.lora.rank is not None):
        return "block"
    if compute.scan_layers and recomputed_by(config).attention_update and gathers_mlp_input(config, tensor, expert):
        return waits_for_gradient(compute.remat)
    return "nothing"


def waits_for_gradient(remat: RematConfig) -> str:
    """Return what a block in the loop over layers recomputes only when the gradient of its result is there: block, mlp or nothing.

    For blocks that recompute attention's update and gather the input of their MLP over devices. XLA (collective-pipeliner-backward,
    xla/service/collective_pipeliner.cc) moves a gather that depends on no gradient to the iteration before, together with a copy of all
    that leads to it: attention would be computed there for the gather, and once more for the gradients.

    Where the MLP alone waits, the gather of attention's input stays in the iteration before. A policy cannot keep values of what waits
    (jax 0.10.2), so the whole block waits where some of the MLP are kept. Values in host memory would wait with it, and copies of a layer
    would not begin before its gradient is there (Llama 3.1 8B, tensor=2, names=[query,mlp_up]: 11 % slower): there nothing waits.
    """
    if not any(name.startswith("mlp_") for name in remat.names):
        return "mlp"
    return "nothing" if remat.policy == "offload" else "block"
