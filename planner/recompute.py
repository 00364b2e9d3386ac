"""What the backward pass of a block computes a second time, under each compute.remat policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.remat import POLICIES
from ridgeline.configs.schema import ComputeConfig, Config, RematConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.planner.experts import exchange_method
from ridgeline.planner.parameters import DOWN, attention_weights

FUSED_MAX_HEAD_DIM = 128
"""Widest head of queries and keys of fused attention kernels (models/attention); attention of wider ones runs in blocks, by XLA."""
FROM_BLOCK_INPUTS = ("full", "names", "offload")
"""Policies with which the backward pass computes the inputs of MLP down again."""


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


def in_scan(model: ModelConfig, compute: ComputeConfig) -> bool:
    """Return whether all layers run in the compiled loop over layers."""
    looped = compute.scan_layers and max(compute.scan_unroll, model.layer_period) < model.num_layers
    return looped and model.num_layers % model.layer_period == 0  # layers after the last whole period are not in the loop


def in_order(model: ModelConfig, compute: ComputeConfig, *, frozen: bool) -> bool:
    """Return whether the backward passes of the layers of a turn follow each other (models/backward_order.py).

    So it is for layers of several kinds, of those with experts where at least the inputs of MLP down are computed again (Llama 4 Scout,
    fsdp=64 x tensor=4, `full`: 39.5 GB without, 17.5 in order). Where gradients are deferred (`defers_reductions`), that gives the order.

    frozen: only adapters are trained.
    """
    several = model.layer_period > 1 and compute.scan_layers and not frozen
    return several and (model.moe is None or compute.remat.policy in FROM_BLOCK_INPUTS)


def gradients_first(model: ModelConfig, compute: ComputeConfig, sizes: Mapping[str, int], *, frozen: bool) -> bool:
    """Return whether each matmul of dense layers computes its weight gradients before the gradient of its input is used.

    So it is in layers in order: XLA would delay them to the next layer, with all that they are computed from: three hidden activations or
    more (Gemma 2 2B, fsdp=128, values in host memory: 81.0 GB, with their order given 70.7). And over `context` with `full` and values in
    host memory, where it would delay those of the MLP until attention's backward pass is over, with four (Llama 3.1 70B, fsdp=256 x
    context=2, block inputs in host memory: 37.7 and 30.1 GB, the step 1.2 % longer). Not over `tensor`, nor in stages of alike layers, nor
    with policies that keep more, of which most need 0 to 5 % less memory so, and steps up to 5 % longer.

    sizes: of the mesh axes (missing: 1). frozen: only adapters are trained.
    """
    again = compute.remat.policy in ("full", "offload")
    alone = again and sizes.get("context", 1) > 1 and sizes.get("pipeline", 1) == 1 and not frozen
    ordered = in_order(model, compute, frozen=frozen) or alone
    return ordered and model.moe is None and sizes.get("tensor", 1) == 1


def gathers_within_turn(model: ModelConfig, compute: ComputeConfig) -> bool:
    """Return whether a turn of the loop over layers gathers the weights of its layers, and XLA none of them at the end of the turn before.

    So it is in turns of more than two layers (Gemma 3, OLMo 3, Llama 4, and with `compute.scan_unroll`): XLA would gather the weights of
    all of them there, where little compute covers it (Llama 4 Scout, fsdp=512, block inputs in host memory: 23 % less memory, and the step
    4 % shorter). What nothing covers is the first gather of every second turn, as XLA unrolls the loop by two. In turns of two layers that
    is one in four, and the step longer (gpt-oss, fsdp=16 x expert=2: 7 %).
    """
    turns = -(-compute.scan_unroll // model.layer_period)
    return compute.scan_layers and turns * model.layer_period > 2


def defers_reductions(model: ModelConfig, compute: ComputeConfig, sizes: Mapping[str, int], *, frozen: bool) -> bool:
    """Return whether the gradients of a layer are reduced in the next layer of the backward pass (models/deferred_gradients.py).

    So it is of layers with experts, where devices have other tokens; over `expert` alone only gradients of norms are, as there is nothing
    to sum for experts. Not in stages, which change microbatches between two layers. sizes: of the mesh axes (missing: 1).
    """
    copies = math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp", "context", "expert"))
    experts = model.moe is not None and compute.scan_layers
    return experts and copies > 1 and sizes.get("pipeline", 1) == 1 and not frozen


def beside_attention(model: ModelConfig, compute: ComputeConfig, sizes: Mapping[str, int], *, frozen: bool) -> bool:
    """Return whether weights of experts are gathered, and their gradients reduced, while attention runs (models/beside_attention.py).

    So it is where latent attention runs in blocks, and takes longest, in a layer that is computed again from its input, and tokens are
    exchanged over `tensor` or `expert`. Attention over `context` communicates itself. Arguments: as of `defers_reductions`.
    """
    exchanged = sizes.get("tensor", 1) * sizes.get("expert", 1) > 1 and sizes.get("context", 1) == 1
    again = compute.remat.policy == "full" or (compute.remat.policy == "offload" and tuple(compute.remat.names) == ("block_input",))
    blocks = model.latent_attention is not None and model.head_width > FUSED_MAX_HEAD_DIM
    return blocks and exchanged and again and defers_reductions(model, compute, sizes, frozen=frozen)


def saves_first(model: ModelConfig, compute: ComputeConfig, *, tensor: int, pipeline: int) -> bool:
    """Return whether the backward pass of the loop over layers begins when all that it saved is there (models/backward_order.py).

    So it is over `tensor` devices, and for layers with experts that keep gate or up on the device: without it stacks of what they saved are
    copied, of gate and up both at once (Mixtral, fsdp=8 x tensor=4, fp8_delayed, `none`: 63.2 GB without, 52.6 with it; Qwen3 30B over
    tensor=4, names of attention: 64.6 and 58.2). Layers with experts of several kinds that compute inputs of MLP down again follow each
    other instead (`in_order`). Not in stages, which save the values of other microbatches in between; parameters would be saved with them
    (trainer/pipeline.py).
    """
    remat = compute.remat
    kept = remat.policy not in FROM_BLOCK_INPUTS
    named = remat.policy == "names" and not {"mlp_gate", "mlp_up"}.isdisjoint(remat.names)
    copied = tensor > 1 if model.moe is None else kept or ((named or tensor > 1) and model.layer_period == 1)
    return copied and pipeline == 1 and compute.scan_layers


def waiting(config: Config, tensor: int, expert: int) -> str:
    """As `waits_for_gradient`, for a config over mesh axes of these sizes."""
    gathered = gathers_mlp_input(config, tensor, expert)
    return waits_for_gradient(config.model, config.compute, config.lora, tensor=tensor, gathered=gathered)


def waits_for_gradient(model: ModelConfig, compute: ComputeConfig, lora: LoraConfig, *, tensor: int, gathered: bool) -> str:
    """Return what a layer recomputes only when the gradient of its result is there: block, mlp or nothing.

    tensor: devices of that mesh axis. gathered: the input of the MLP is gathered over devices. Where attention's update is recomputed too,
    XLA (collective-pipeliner-backward, xla/service/collective_pipeliner.cc) would move that gather, which depends on no gradient, to the
    iteration before, together with a copy of all that leads to it: attention would be computed there for the gather, and once more for the
    gradients.

    Where the MLP alone waits, the gather of attention's input stays in the iteration before. A policy cannot keep values of what waits
    (jax 0.10.2), so the whole block waits where some of the MLP are kept. Values in host memory would wait with it, and copies of a layer
    would not begin before its gradient is there (Llama 3.1 8B, tensor=2, names=[query,mlp_up]: 11 % slower): there nothing waits.
    Layers in order wait as whole blocks in any case. So do alike layers with experts that are not over `tensor`, whatever is gathered: else
    XLA computes the attention of the layers outside of the loop again beside the loss (Qwen3 30B, fsdp=8 x expert=16, `full`: 21.8 GB, 19.7
    where blocks wait, and the same step).
    """
    frozen = lora.rank is not None
    if in_order(model, compute, frozen=frozen):
        return "block"
    if model.moe is not None and tensor == 1 and compute.remat.policy in ("full", "names") and in_scan(model, compute) and not frozen:
        return "block"
    if not (gathered and in_scan(model, compute) and recomputed_with(model, compute.remat, lora).attention_update):
        return "nothing"
    if not any(name.startswith("mlp_") for name in compute.remat.names):
        return "mlp"
    return "nothing" if compute.remat.policy == "offload" else "block"
