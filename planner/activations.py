"""Activation memory of one device: what is kept from the forward to the backward pass, and the workspace of attention.

Legend: R rows per device, T sequence, D width, F MLP width, N/K query/key heads, H head width, L layers; t devices on tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs import remat as remat_table
from ridgeline.configs.remat import POLICIES
from ridgeline.planner.local import LocalSizes

KEEPS_RESULTS = ("cudnn", "pallas")
"""Attention backends whose backward pass reads the results of the forward pass in the layout that the model has (chunked: another one)."""
NODE_DEVICES = 8
"""GPUs of a node with NVLink. Clusters with fewer in a node count as if they had these."""
TAGS_STATISTICS = ("chunked", "pallas")
"""Attention backends that tag their softmax statistics: where these are kept, attention is not recomputed (models/attention)."""


@dataclass(frozen=True)
class Component:
    """Bytes of one device, and what they are assumed to consist of."""

    bytes: int
    assumption: str


def saved_activations(local: LocalSizes, backend: str) -> Component:
    """Return the activations of all layers that are kept for the backward pass, by rematerialization policy and attention backend."""
    config, layers = local.config, local.model.num_layers
    policy, names = config.compute.remat.policy, config.compute.remat.names
    kept = sum(number * sum(count * size for count, size in saved_arrays(kind, backend)) for number, kind in local.layer_kinds)
    kept += layers * sum(count * size for count, size in adapter_arrays(local))
    text = f"{policy}: {POLICIES[policy].kept(names)}; {layers} layers, {config.precision.compute}"
    if local.modules is None:
        return Component(kept, text)
    return Component(
        kept + _modules_saved(local, local.modules, backend), f"{text}; {local.model.mtp_layers} modules of multi-token prediction"
    )


def _modules_saved(local: LocalSizes, modules: LocalSizes, backend: str) -> int:
    """Return the bytes that modules of multi-token prediction keep: those of a layer, the embedding and the hidden state that a module
    combines (where the block is recomputed, in place of the input of the block), and the input of the final norm."""
    streams = 2 if POLICIES[local.config.compute.remat.policy].recomputes_block else 3
    of_block = sum(count * size for count, size in saved_arrays(modules, backend))
    return int(local.model.mtp_layers * (of_block + streams * local.cut_stream_bytes))


def adapter_arrays(local: LocalSizes) -> list[tuple[int, int]]:
    """Return (count, bytes) of what the adapters of a layer keep for the backward pass: the narrow vectors; with magnitudes, or where dots
    are kept, also the results."""
    policy, kept = local.config.compute.remat.policy, []
    if policy not in ("none", "attention-only", "dots"):
        return []
    for matrix in local.adapted:
        if matrix.experts:
            continue  # computed again
        share = matrix.layers / local.model.num_layers
        tokens = local.tokens // (local.tensor if matrix.on_shards else 1) * local.compute_itemsize
        result = matrix.outputs // (1 if matrix.on_shards else local.tensor)
        wide = matrix.magnitudes if policy != "dots" else 1
        kept.append((1, int(share * tokens * (matrix.rank + result * wide))))
    return kept


def units_in_flight(local: LocalSizes, backend: str) -> Component:
    """Return the activations that are kept for backward passes: of a microbatch, or of all units in the slots of a pipeline stage."""
    saved, schedule = saved_activations(local, backend), local.schedule
    if local.pipeline == 1:
        return saved
    text = f"{schedule.kept} units in flight (microbatches in {local.model.num_layers // schedule.chunks} layers) and the one of the tick"
    return Component((schedule.kept + 1) * (saved.bytes // schedule.chunks), f"{saved.assumption}; {text}")


def saved_arrays(local: LocalSizes, backend: str) -> list[tuple[int, int]]:
    """Return (count, bytes of one) of the arrays of each shape that a layer keeps for the backward pass in device memory."""
    config = local.config
    policy = config.compute.remat.policy
    stream, cut, q, k, hidden = local.stream_bytes, local.cut_stream_bytes, local.query_bytes, local.key_bytes, local.hidden_bytes
    gates = 2 if local.model.gated_mlp else 1
    normed_after = local.model.norm_position != "pre"  # norms of the results of attention and MLP need them in the backward pass
    # experts: where each assignment goes, both ways, and its weight
    sorted_bytes, each = 0, 3 if local.model.mlp_bias else 2  # biases need the expert of each assignment too
    if local.model.moe is not None:
        sorted_bytes = 4 * (local.expert_rows + each * local.slots * local.model.moe.experts_per_token)
    if policy in ("none", "attention-only"):
        # inputs of attention and MLP, gathered along the sequence; routed experts gather them in their exchange, and keep none
        gathers = 1 if local.model.moe is not None and not local.model.moe.shared_experts else 2
        gathered = gathers if local.tensor > 1 and config.compute.tensor_overlap == "gather" else 0
        normed = 1 if local.model.qk_norm else 0
        # without norms before attention and MLP their inputs are the streams themselves, and are kept gathered alone
        inputs = 2 - gathered if local.model.norm_position == "post" else 2
        kept = [(inputs + 2 * normed_after, cut), (gathered, stream), (2 + normed, q), (2 + normed, k), (gates, hidden), (1, sorted_bytes)]
        if local.latent_bytes:
            kept = [*_latent_attention_saved(local, backend, gathered // 2), (gates, hidden), (1, sorted_bytes)]
        if policy == "attention-only":
            return kept
        # Results as the kernel computes them: in blocks with another layout, or of all tokens of some heads, before they are exchanged over
        # context. Latents have their own term for it.
        exchanged = local.context_method == "all_to_all" and backend in KEEPS_RESULTS and not local.latent_bytes
        own_layout = local.context_bytes if backend == "chunked" or exchanged else 0
        return [*kept, (1, own_layout), (1, local.softmax_bytes), (1, _scores_saved(local, backend))]
    if policy == "dots":
        # a ring's matmul with a scattered result is one matmul per chunk, and each is kept; their sum is no result of a matmul
        scattered = local.tensor - 1 if local.tensor > 1 and config.compute.tensor_overlap == "ring" else 0
        # results of 4-bit matmuls are float32 until they are multiplied by the scales of their tensors
        wide = 4 // local.compute_itemsize if config.precision.matmul == "nvfp4" else 1
        if local.latent_bytes:
            return [(2 + normed_after, cut), (1, local.latent_bytes // local.tensor), (1, q), (1, local.up_bytes), (gates, hidden)]
        results = 1 + normed_after  # of attention; and of the MLP, which a norm of it needs
        return [(1 + results * scattered, cut), (results, wide * cut), (1, wide * q), (2, wide * k), (gates, wide * hidden)]
    names = set(config.compute.remat.names) if policy == "names" else set()
    names -= set() if local.model.gated_mlp else {"mlp_gate"}
    names -= set() if backend in TAGS_STATISTICS else {"attention_lse"}
    named = _named_bytes(local)
    of_attention = ({"query", "attention_context"}, {"key", "value"})
    if local.latent_bytes:
        of_attention = ({"query", "key"}, {"attention_context", "value"})
    alike = ({"attention_out", "mlp_out"}, *of_attention, {"mlp_gate", "mlp_up"}, {"attention_lse"})
    listed = [(len(group & names), max(named[name] for name in group)) for group in alike]
    inputs = 0 if offloads_inputs(local) else 1
    return [(inputs + listed[0][0], cut), *listed[1:]]


def _latent_attention_saved(local: LocalSizes, backend: str, gathered: int) -> list[tuple[int, int]]:
    """Return what attention with latents keeps, with the inputs of the block and the MLP: the latents, before their norms on the shards of
    the sequence and (`gathered`: 1) after them; where queries have none, also the gathered stream.

    Backends that need heads of one width keep padded values and results, and the results without padding.
    """
    latent = local.model.latent_attention
    assert latent is not None
    streams = gathered * (1 if latent.q_rank else 2)
    own = backend in ("reference", "chunked")
    values, results = (local.value_bytes, local.context_bytes) if own else (local.key_bytes, local.query_bytes + local.context_bytes)
    kept = [(2, local.cut_stream_bytes), (streams, local.stream_bytes), (1, local.latent_bytes // local.tensor)]
    return [*kept, (gathered, local.latent_bytes), (1, local.query_bytes), (1, local.key_bytes), (1, values), (1, results)]


def stacked_bytes(local: LocalSizes, backend: str) -> int:
    """Return the bytes that the scan over layers copies and zeroes in a microbatch, forward and backward; 0 without a scan.

    XLA writes what a layer keeps, then copies it into the stack of all layers (read, write). Before that the stacks are zeroed: one of each
    shape is filled with zeros (write), the others are copies of it (read, write); the stacks of the gradients are zeroed too (write).
    Reads from the stacks belong to the kernels that read them. Read from compiled steps (GPU backend, jax 0.10.2); see
    tests/planner/test_step_time.py.
    """
    if not local.config.compute.scan_layers:
        return 0
    kept = sum(
        layers * (2 * count + 2 * count - 1) * size for layers, kind in local.kinds for count, size in saved_arrays(kind, backend) if count
    )
    return kept + (local.trained if local.adapted else local.layer_matrices) * local.gradient_itemsize


def offloaded_bytes(local: LocalSizes) -> int:
    """Return the bytes of one device's microbatch that are kept for the backward pass in host memory."""
    if not local.config.compute.remat.offloads:
        return 0
    return sum(layers * _listed_bytes(kind) for layers, kind in local.kinds)


def offloads_inputs(local: LocalSizes) -> bool:
    """Return whether the inputs of the blocks are kept in host memory."""
    remat = local.config.compute.remat
    return remat_table.offloads_inputs(remat.policy, remat.names)


def _listed_bytes(local: LocalSizes) -> int:
    """Return the bytes of one layer's values in compute.remat.names."""
    named = _named_bytes(local)
    return sum(named[name] for name in dict.fromkeys(local.config.compute.remat.names))


def _named_bytes(local: LocalSizes) -> dict[str, int]:
    """Return the bytes of each value of one layer that compute.remat.names can list (configs/remat.py)."""
    return {
        "block_input": local.cut_stream_bytes,
        "query": local.query_bytes,
        "key": local.key_bytes,
        "value": local.value_bytes,
        "attention_context": local.context_bytes,
        "attention_lse": local.softmax_bytes,
        "attention_out": local.cut_stream_bytes,
        "mlp_gate": local.hidden_bytes if local.model.gated_mlp else 0,
        "mlp_up": local.hidden_bytes,
        "mlp_out": local.cut_stream_bytes,
    }


def score_bytes(local: LocalSizes, itemsize: int) -> int:
    """Return the bytes of one [R, N/t, T, T] array."""
    return local.tokens * local.config.data.seq_len * local.model.num_heads * itemsize // local.tensor


def _scores_saved(local: LocalSizes, backend: str) -> int:
    """Return the bytes of attention probabilities that a backend without a custom backward pass keeps for it."""
    return {"xla": score_bytes(local, 4 + local.compute_itemsize), "reference": score_bytes(local, 8)}.get(backend, 0)


def relaid_bytes(local: LocalSizes, backend: str, overlap: bool) -> int:
    """Return the bytes of the largest saved value that is copied to another layout, for all layers, at the start of the backward pass.

    Over tensor the backward pass waits for all that was saved, and none is copied there (planner/recompute.py: saves_first). Attention that
    stores scores transposes them.
    """
    policy, layers = local.config.compute.remat.policy, local.model.num_layers
    relaid = 0
    if backend in ("xla", "reference") and policy == "none":
        relaid += layers * score_bytes(local, 4)
    one_row = backend == "pallas" and policy == "none" and local.rows == 1 and local.context == 1 and local.model.moe is None
    if one_row and overlap and not local.config.precision.eight_bit:
        # the kernel writes heads before tokens, and of one row so does the stack of its results; the backward pass reads it as the others
        # (heaps of Llama 3.2 1B and 3B, 3.1 8B, Qwen2.5 1.5B, Qwen3 1.7B and GPT-2 XL; not with two rows, dots, names or XLA's default
        # flags; Qwen2.5 7B with 28 heads has no copy, and it is not known why)
        relaid += layers * local.context_bytes
    return relaid


def mask_bytes(local: LocalSizes, backend: str) -> int:
    """Return the bytes of the mask of packed documents, booleans [R, T, T]: only xla and reference, which store scores too, have one."""
    if not local.config.data.document_masking or backend not in ("xla", "reference"):
        return 0
    return local.tokens * local.config.data.seq_len


def attention_workspace(local: LocalSizes, backend: str) -> Component:
    """Return the memory of one layer's attention in the backward pass, without its inputs and outputs."""
    mask = mask_bytes(local, backend)
    if local.ring:
        queries, keys = (size * 4 // local.compute_itemsize for size in (local.query_bytes, local.key_bytes))
        assumption = "ring: float32 gradients of queries, and of keys and values that travel; keys and values, also those of the next step"
        return Component(3 * queries + 6 * keys + 4 * local.key_bytes, assumption)
    if backend == "cudnn":
        return Component(0, "cuDNN flash attention stores no scores")
    if backend == "pallas":
        return Component(local.softmax_bytes, "Pallas flash attention stores no scores; one sum per row")
    if backend == "chunked":
        accumulators = 2 * local.query_bytes * 4 // local.compute_itemsize
        return Component(accumulators, "chunked: float32 accumulators of the query gradient")
    return Component(mask + 3 * score_bytes(local, 4), f"{backend}: float32 scores [R, N/t, T, T], their gradient and a temporary")
