"""Time of what one device computes, by part of the step: products with parameters, attention, and passes over device memory.

A product takes its FLOPs over the calibrated rate of its shape. Elementwise work (norms, rotation, activations, residual adds, casts, the
softmax of the loss, the optimiser) is counted in bytes read and written once per fused kernel, over the reached memory bandwidth.

Legend: R rows per device, T sequence, D width, F MLP width, N/K query/key heads, H head width, V vocabulary rows, C tokens of a loss chunk;
f, t devices on fsdp and tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.planner.activations import NAMES_STATISTICS, stacked_bytes
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.collectives import NEWTON_SCHULZ_STEPS, Recomputed, product_weights, recomputed
from ridgeline.planner.flops import mean_keys_per_query
from ridgeline.planner.hardware import Hardware, matmul_dtype
from ridgeline.planner.local import LocalSizes, attention_backend
from ridgeline.planner.update import update_bytes

IN_STEP_SHARE = 0.89
"""Rate of products and attention inside a training step over their rate alone: clocks fall under sustained load, kernels wait for each
other, the slowest device sets the pace. The one number set by whole runs: the two MaxText figures of planner/published.yaml, whose software
(JAX, XLA, scanned layers) is nearest to ours; every other published run is predicted with it."""
ATTENTION_FORWARD_SHARE = 0.25
"""Of the time of fused attention forward and backward: the backward kernel does 2.5 forwards of work at 0.85 of its rate."""
PALLAS_SHARE = 0.57
"""Rate of flash attention in Triton over that of cuDNN: FlashAttention-3, near cuDNN, is 1.5 to 2 times FlashAttention-2 on an H100
(arXiv 2407.08608, abstract and section 4.1). Unmeasured here; documents shorter than the row make it cheaper than this counts."""
SCORE_PASSES = 14
"""Times the float32 scores of an attention without fused kernels go through device memory, forward and backward (XLA's fusions)."""
MASK_PASSES = 3
"""Times every head of cuDNN's attention reads the visible part of the mask of packed documents: once forward, twice backward."""
LOGIT_PASSES_BYTES = 18
"""Per logit: written once and read three times in float32 (maximum, sum, probability), its gradient written in 16 bits."""


@dataclass(frozen=True)
class Work:
    """Seconds on one device."""

    compute_s: float = 0.0
    """Products and attention."""
    memory_s: float = 0.0
    """Passes over device memory beside them."""

    @property
    def seconds(self) -> float:
        """One after the other."""
        return self.compute_s + self.memory_s

    def __add__(self, other: Work) -> Work:
        """Add part by part."""
        return Work(self.compute_s + other.compute_s, self.memory_s + other.memory_s)

    def __mul__(self, times: float) -> Work:
        """Repeat."""
        return Work(self.compute_s * times, self.memory_s * times)


@dataclass(frozen=True)
class Kernels:
    """The device's rates applied to local sizes."""

    local: LocalSizes
    device: Hardware
    calibration: Calibration
    elementwise_passes: float = 1.0
    """Bytes of a layer's elementwise work over those of fused kernels."""
    turned: bool = True
    """Whether gradients that are cut along their last dim are transposed for it, as our step does with fsdp."""

    @property
    def dtype(self) -> str:
        """Arithmetic of the products."""
        return matmul_dtype(self.local.config.precision.compute, self.local.config.compute.matmul_precision)

    @property
    def layer_dtype(self) -> str:
        """Arithmetic of the layers' products with parameters; embedding, attention and unembedding stay in `dtype`."""
        return "float8" if self.local.config.precision.matmul != "compute" else self.dtype

    @property
    def forward_dtype(self) -> str:
        """The same in the forward pass: only that reads 4 bits."""
        return "float4" if self.local.config.precision.matmul == "nvfp4" else self.layer_dtype

    def product_s(self, m: int, n: int, k: int, dtype: str | None = None) -> float:
        """Time of an [M, K] x [K, N] product."""
        return 2.0 * m * n * k / self.calibration.matmul_flops_per_s(self.device, dtype or self.dtype, m, n, k) / IN_STEP_SHARE

    def memory_s(self, size: float) -> float:
        """Time to read or write this many bytes of device memory."""
        return size / self.calibration.memory_bytes_per_s(self.device)

    def products(self) -> dict[str, tuple[int, int, int]]:
        """(M, N, K) of each forward product of a layer on one device."""
        width, tokens = self.local.model.embed_dim, self.local.tokens
        shapes = {}
        for name, weights in product_weights(self.local.model).items():
            other = weights // width // self.local.tensor
            shapes[name] = (tokens, width, other) if name in ("out", "down") else (tokens, other, width)
        return shapes

    def layer_forward(self) -> Work:
        """One layer."""
        compute = sum(self.product_s(*shape, self.forward_dtype) for shape in self.products().values())
        attention = self.attention()
        return (
            Work(compute)
            + attention * ATTENTION_FORWARD_SHARE
            + Work(0.0, self.memory_s(self.elementwise_passes * self._elementwise_forward()))
        )

    def layer_backward(self) -> Work:
        """One layer: gradients of inputs and weights, and what the rematerialisation policy computes again."""
        again = recomputed(self.local.model, self.local.config.compute.remat)
        compute = 0.0
        for name, (m, n, k) in self.products().items():
            compute += self.product_s(m, k, n, self.layer_dtype) + self.product_s(k, n, m, self.layer_dtype)
            compute += self.product_s(m, n, k, self.forward_dtype) if name in again.weights else 0.0
        attention = self.attention() * (1 - ATTENTION_FORWARD_SHARE + (ATTENTION_FORWARD_SHARE if self._attention_again(again) else 0.0))
        return Work(compute) + attention + Work(0.0, self.memory_s(self.elementwise_passes * self._elementwise_backward(again)))

    def _attention_again(self, again: Recomputed) -> bool:
        """Whether attention runs again in the backward pass: with named values also where the backend does not name its statistics."""
        named = self.local.config.compute.remat.policy in ("names", "offload")
        backend = attention_backend(self.local.config, gpu=self.device.tensor_cores)
        return again.attention or (named and backend not in NAMES_STATISTICS)

    def attention(self) -> Work:
        """Scores, softmax and values of one layer, forward and backward together."""
        local, model = self.local, self.local.model
        length, backend = local.config.data.seq_len, attention_backend(local.config, gpu=self.device.tensor_cores)
        keys = mean_keys_per_query(length, model.sliding_window)
        flops = 12.0 * keys * model.num_heads * model.head_width * local.tokens / local.tensor
        if backend in ("cudnn", "pallas"):
            rate = self.calibration.attention_flops_per_s(self.device, self.dtype, length, model.head_width)
            rate *= PALLAS_SHARE if backend == "pallas" else 1.0
            mask = MASK_PASSES * local.tokens * keys * local.compute_itemsize * model.num_heads / local.tensor
            masked = backend == "cudnn" and local.config.data.document_masking
            return Work(flops / rate / IN_STEP_SHARE, self.memory_s(mask) if masked else 0.0)
        seen = keys if backend == "chunked" else length
        scores = local.tokens * seen * model.num_heads / local.tensor * 4
        rate = self.calibration.matmul_flops_per_s(self.device, self.dtype, length, length, model.head_width)
        return Work(flops * seen / keys / rate / IN_STEP_SHARE, self.memory_s(SCORE_PASSES * scores))

    def embedding(self) -> Work:
        """Lookup, and the scatter of its gradient into a zeroed table."""
        local = self.local
        return Work(0.0, self.memory_s(2 * local.stream_bytes + 3 * 4 * local.tokens * local.model.embed_dim + 8 * local.table))

    def loss(self) -> Work:
        """Logits, cross-entropy and both gradients of a microbatch, chunk by chunk."""
        local = self.local
        width, vocab, chunk = local.model.embed_dim, local.model.padded_vocab_size // local.tensor, local.loss_chunk_tokens
        chunks = math.ceil(local.tokens / chunk)
        # The weight gradient is a float32 sum over chunks: the whole table is read and written by every chunk.
        weight = max(self.product_s(width, vocab, chunk), self.memory_s(8 * width * vocab))
        compute = self.product_s(chunk, vocab, width) + self.product_s(chunk, width, vocab) + weight
        memory = chunks * LOGIT_PASSES_BYTES * chunk * vocab + 12 * local.table + 8 * local.stream_bytes
        return Work(chunks * compute, self.memory_s(memory))

    def optimizer(self) -> Work:
        """Gradient norm and update of the parameters a device keeps."""
        local, kind = self.local, self.local.config.optimizer.kind
        work = Work(0.0, self.memory_s(update_bytes(local, turned=self.turned and local.fsdp > 1)))
        if kind != "muon":
            return work
        seconds = 0.0
        for weights in product_weights(local.model).values():
            small = min(local.model.embed_dim, weights // local.model.embed_dim)
            large = weights // small
            flops = NEWTON_SCHULZ_STEPS * (4.0 * small * small * large + 2.0 * small**3)
            dtype = "tfloat32" if "tfloat32" in self.device.peak_flops else "float32"
            seconds += flops / self.calibration.matmul_flops_per_s(self.device, dtype, small, large, small)
        return work + Work(seconds * local.model.num_layers / (local.fsdp * local.tensor))

    def accumulate(self) -> Work:
        """Add one microbatch's gradients to the sum."""
        local = self.local
        many = local.config.trainer.accumulation > 1
        return Work(0.0, self.memory_s(3 * local.parameters * local.gradient_itemsize) if many else 0.0)

    def stacks(self) -> Work:
        """What the scan over layers copies and zeroes in a microbatch."""
        backend = attention_backend(self.local.config, gpu=self.device.tensor_cores)
        return Work(0.0, self.memory_s(stacked_bytes(self.local, backend)))

    def _elementwise_forward(self) -> float:
        """Bytes: two norms (read, write), two residual adds (read 2, write), rotation, activation, casts of the weights."""
        local = self.local
        gates = 2 if local.model.gated_mlp else 1
        return (
            10 * local.cut_stream_bytes
            + 2 * (local.query_bytes + local.key_bytes)
            + (gates + 1) * local.hidden_bytes
            + self._casts()
            + self._quantise()
        )

    def _elementwise_backward(self, again: Recomputed) -> float:
        """Bytes: gradients of the same, float32 weight gradients written, read and added to their stack, and what is recomputed.

        With fsdp the float32 gradients of MLP down and attention out are transposed on their way into a reduction.
        """
        local = self.local
        gates = 2 if local.model.gated_mlp else 1
        size: float = 12 * local.cut_stream_bytes + 2 * (local.query_bytes + local.key_bytes) + (2 * gates + 2) * local.hidden_bytes
        size += 8 * local.gathered_layer_weights + 3 * local.layer_matrices // local.model.num_layers * local.gradient_itemsize
        size += self._casts() + 2 * self._quantise()
        if self.turned and local.fsdp > 1:
            size += 8 * (local.mlp_matrix + local.query_matrix)
        if again.inputs:
            size += 10 * local.cut_stream_bytes + (gates + 1) * local.hidden_bytes
        return size

    def _casts(self) -> float:
        local = self.local
        shard = local.layer_matrices // local.model.num_layers
        return shard * (local.parameter_itemsize + local.compute_itemsize)

    def _quantise(self) -> float:
        """Inputs of 8-bit products: read for their largest magnitude, unless that is an earlier step's, read again, written in 8 bits.

        Weights count as casts.
        """
        local = self.local
        if self.layer_dtype != "float8":
            return 0.0
        inputs = 2 * local.stream_bytes + local.query_bytes + local.hidden_bytes
        return inputs * ((1 if local.config.precision.delayed else 2) + 1 / local.compute_itemsize)
