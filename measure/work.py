"""What one optimiser step of a config does on one device: its products, and its passes over device memory.

The products sum to the model FLOPs of `planner.flops` (what the mask leaves of attention, padding of the vocabulary and of loss chunks
aside); products that are computed again and those of Muon's orthogonalisation are listed beside them and marked.

Legend: R rows of a microbatch per device, T sequence, H head width, V vocabulary rows, C tokens of a loss chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.collectives import NEWTON_SCHULZ_STEPS, product_weights, recomputed
from ridgeline.planner.flops import mean_keys_per_query
from ridgeline.planner.hardware import hardware, matmul_dtype
from ridgeline.planner.kernels import ATTENTION_FORWARD_SHARE, Kernels
from ridgeline.planner.local import LocalSizes, attention_backend

Shape = tuple[int, int, int]
MAX_RESULT_ELEMENTS = 1 << 27
"""A batched product with a larger result is measured with fewer of its matrices, and counted more often."""


@dataclass(frozen=True)
class Product:
    """A matrix product of the step, [batch, M, K] x [batch, K, N], and how often a step computes it."""

    part: str
    """attention projections, attention, mlp, unembedding or optimizer."""
    name: str
    """Of what, e.g. `gate forward`."""
    dtype: str
    """Arithmetic: float32, tfloat32, bfloat16, float16, float8 (a scale per tensor), mxfp8 or nvfp4 (a scale per block)."""
    shape: Shape
    """(M, N, K)."""
    batch: int
    count: float
    """Per step and device; a fraction where a mask leaves a part of the product, or devices share it."""
    model: bool = True
    """Counted in the model's FLOPs; false for what is computed again and for the optimiser's own."""

    @property
    def flops(self) -> float:
        """Of one execution, a multiply-add as 2."""
        m, n, k = self.shape
        return 2.0 * self.batch * m * n * k


@dataclass(frozen=True)
class Passes:
    """Bytes that one device reads and writes per step beside its products, kernels fused as well as they can be."""

    layers_bytes: float
    """Norms, residual adds, rotation, activations, casts and weight gradients of all layers. The scores of attention stay on the chip."""
    ends_bytes: float
    """Embedding, logits and cross-entropy."""
    update_bytes: float
    """Sum over microbatches, and the optimiser."""

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.layers_bytes + self.ends_bytes + self.update_bytes


def step_products(config: Config, sizes: Mapping[str, int], *, gpu: bool) -> list[Product]:
    """List the products of one optimiser step on one device of a mesh of these axis sizes (all axes; everything divides).

    Narrow operands are in the format the kernel reads; rounding them belongs to the passes.
    """
    local = LocalSizes.of(config, sizes)
    dtype = matmul_dtype(config.precision.compute, config.compute.matmul_precision)
    dtype = dtype if gpu or dtype != "tfloat32" else "float32"
    return [*_projections(local, dtype), *_attention(local, dtype, gpu), *_unembedding(local, dtype), *_muon(local, gpu)]


def step_passes(config: Config, sizes: Mapping[str, int]) -> Passes:
    """Count the passes over device memory of one optimiser step (the bytes of `planner.kernels`)."""
    local, calibration = LocalSizes.of(config, sizes), load_calibration()
    device = hardware("cpu")  # bytes do not depend on it: its rate is multiplied out again
    kernels = Kernels(local, device, calibration)
    rate, repeats = calibration.memory_bytes_per_s(device), config.trainer.accumulation
    again = recomputed(config.model, config.compute.remat).attention
    attention = kernels.attention().memory_s * (1 + (ATTENTION_FORWARD_SHARE if again else 0))
    layer_s = kernels.layer_forward().memory_s + kernels.layer_backward().memory_s - attention
    return Passes(
        layers_bytes=layer_s * rate * config.model.num_layers * repeats,
        ends_bytes=(kernels.embedding().memory_s + kernels.loss().memory_s) * rate * repeats,
        update_bytes=(kernels.accumulate().memory_s * repeats + kernels.optimizer().memory_s) * rate,
    )


def _projections(local: LocalSizes, dtype: str) -> Iterator[Product]:
    """Products with the parameters of the layers: forward, gradient of the input, gradient of the weight, and forward again."""
    kernels = Kernels(local, hardware("cpu"), load_calibration())
    again = recomputed(local.model, local.config.compute.remat).weights
    count = float(local.model.num_layers * local.config.trainer.accumulation)
    forward, backward = _layer_dtypes(local.config, dtype)
    for name, (m, n, k) in kernels.products().items():
        part = "mlp" if name in ("gate", "up", "down") else "attention projections"
        yield Product(part, f"{name} forward", forward, (m, n, k), 1, count)
        yield Product(part, f"{name} input gradient", backward, (m, k, n), 1, count)
        yield Product(part, f"{name} weight gradient", backward, (k, n, m), 1, count)
        if name in again:
            yield Product(part, f"{name} recomputed", forward, (m, n, k), 1, count, model=False)


def _layer_dtypes(config: Config, dtype: str) -> tuple[str, str]:
    """Of the layers' products with parameters, forward and backward (models/projection.py)."""
    precision = config.precision
    if precision.block_scaled is not None:
        return precision.block_scaled, "mxfp8"
    return ("float8", "float8") if precision.eight_bit else (dtype, dtype)


def _attention(local: LocalSizes, dtype: str, gpu: bool) -> Iterator[Product]:
    """Scores and values, forward (2 products) and backward (4, and the scores again where a fused kernel keeps none)."""
    config, model, length = local.config, local.model, local.config.data.seq_len
    fused = attention_backend(config, gpu=gpu) in ("cudnn", "chunked", "pallas")
    seen = mean_keys_per_query(length, model.sliding_window) / length if fused else 1.0
    whole = local.rows * model.num_heads // local.tensor
    batch = max(1, min(whole, MAX_RESULT_ELEMENTS // (length * max(length, model.head_width))))
    count = model.num_layers * config.trainer.accumulation * seen * whole / batch
    scores, values = (length, length, model.head_width), (length, model.head_width, length)

    def product(name: str, shape: Shape, times: int, *, counted: bool = True) -> Product:
        return Product("attention", name, dtype, shape, batch, count * times, counted)

    yield product("scores forward and gradient", scores, 2)
    yield product("values forward and gradients", values, 4)
    again = recomputed(model, config.compute.remat).attention
    if fused or again:
        yield product("scores recomputed", scores, int(fused) + int(again), counted=False)
    if again:
        yield product("values recomputed", values, 1, counted=False)


def _unembedding(local: LocalSizes, dtype: str) -> Iterator[Product]:
    """Logits of a chunk and both gradients."""
    chunk, width, rows = local.loss_chunk_tokens, local.model.embed_dim, local.model.padded_vocab_size // local.tensor
    count = float(math.ceil(local.tokens / chunk) * local.config.trainer.accumulation)
    yield Product("unembedding", "logits forward", dtype, (chunk, rows, width), 1, count)
    yield Product("unembedding", "logits input gradient", dtype, (chunk, width, rows), 1, count)
    yield Product("unembedding", "logits weight gradient", dtype, (width, rows, chunk), 1, count)


def _muon(local: LocalSizes, gpu: bool) -> Iterator[Product]:
    """Newton-Schulz iterations of every matrix of a layer, shared by its devices: X X', its square, their product with X."""
    if local.config.optimizer.kind != "muon":
        return
    dtype = "tfloat32" if gpu and local.config.compute.matmul_precision != "highest" else "float32"
    count = NEWTON_SCHULZ_STEPS * local.model.num_layers / (local.fsdp * local.tensor)
    for name, weights in product_weights(local.model).items():
        small = min(local.model.embed_dim, weights // local.model.embed_dim)
        large = weights // small
        yield Product("optimizer", f"{name} Gram matrix", dtype, (small, small, large), 1, count, model=False)
        yield Product("optimizer", f"{name} Gram matrix squared", dtype, (small, small, small), 1, count, model=False)
        yield Product("optimizer", f"{name} orthogonalised", dtype, (small, large, small), 1, count, model=False)
