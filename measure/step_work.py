"""The work of one optimizer step on one device: its matmuls, and the bytes it moves through device memory.

The matmuls sum to the model FLOPs of `planner.flops`, apart from the exact number of unmasked attention pairs and from padding of the
vocabulary and of loss chunks. Recomputed matmuls and those of Muon's orthogonalization are listed too, with `model=False`.

Legend: R rows of a microbatch per device, T sequence, H head width, V vocabulary rows, C tokens of a loss chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.flops import mean_keys_per_layer
from ridgeline.planner.hardware import hardware, matmul_dtype
from ridgeline.planner.kernels import NEWTON_SCHULZ_STEPS, Kernels
from ridgeline.planner.local import LocalSizes, muon_layers
from ridgeline.planner.parameters import matmul_weights
from ridgeline.planner.recompute import recomputed

Shape = tuple[int, int, int]
MAX_RESULT_ELEMENTS = 1 << 27
"""A batched matmul with a larger result is measured with fewer matrices, and its count is raised."""


@dataclass(frozen=True)
class Matmul:
    """A matmul of the step, [batch, M, K] x [batch, K, N], and how often a step computes it."""

    part: str
    """attention projections, attention, mlp, unembedding or optimizer."""
    name: str
    """Operand and pass, e.g. `gate forward`."""
    dtype: str
    """Arithmetic: float32, tfloat32, bfloat16, float16, float8 (a scale per tensor), mxfp8 or nvfp4 (a scale per block)."""
    shape: Shape
    """(M, N, K)."""
    batch: int
    count: float
    """Per step and device; a fraction where a mask skips part of the matmul, or devices share it."""
    model: bool = True
    """Counted in the model FLOPs; False for recomputation and for the optimizer."""

    @property
    def flops(self) -> float:
        """FLOPs of one execution; a multiply-add counts as 2."""
        m, n, k = self.shape
        return 2.0 * self.batch * m * n * k


@dataclass(frozen=True)
class MemoryTraffic:
    """Bytes that one device reads and writes per step outside matmuls, with perfectly fused kernels."""

    layers_bytes: float
    """Norms, residual adds, rotation, activations, casts and weight gradients of all layers. Attention scores stay on the chip."""
    ends_bytes: float
    """Embedding, logits and cross-entropy."""
    update_bytes: float
    """Gradient accumulation and the optimizer."""

    @property
    def total_bytes(self) -> float:
        """Sum of all three."""
        return self.layers_bytes + self.ends_bytes + self.update_bytes


def step_matmuls(config: Config, sizes: Mapping[str, int], *, gpu: bool) -> list[Matmul]:
    """List the matmuls of one optimizer step on one device.

    Args:
      sizes: devices per mesh axis, all axes; the config's dims must divide by them.

    Low-precision operands are in the format the kernel reads; quantizing them counts as memory traffic.
    """
    local = LocalSizes.of(config, sizes)
    dtype = matmul_dtype(config.precision.compute, config.compute.matmul_precision)
    dtype = dtype if gpu or dtype != "tfloat32" else "float32"
    return [*_projections(local, dtype), *_attention(local, dtype, gpu), *_unembedding(local, dtype), *_muon(local, gpu)]


def step_memory_traffic(config: Config, sizes: Mapping[str, int]) -> MemoryTraffic:
    """Count the memory traffic of one optimizer step, from the bytes in `planner.kernels`."""
    local, calibration = LocalSizes.of(config, sizes), load_calibration()
    device = hardware("cpu")  # the bytes do not depend on the device: its rate cancels out
    kernels = Kernels(local, device, calibration)
    rate, repeats = calibration.memory_bytes_per_s(device), config.trainer.accumulation
    again = recomputed(config.model, config.compute.remat).attention
    times = kernels.attention()
    attention = times.forward.memory_s * (2 if again else 1) + times.backward.memory_s
    layer_s = kernels.layer_forward().memory_s + kernels.layer_backward().memory_s - attention
    return MemoryTraffic(
        layers_bytes=layer_s * rate * config.model.num_layers * repeats,
        ends_bytes=(kernels.embedding().memory_s + kernels.loss().memory_s) * rate * repeats,
        update_bytes=(kernels.accumulate().memory_s * repeats + kernels.optimizer().memory_s) * rate,
    )


def _projections(local: LocalSizes, dtype: str) -> Iterator[Matmul]:
    """Matmuls with the layers' parameters: forward, input gradient, weight gradient, and recomputed forward."""
    kernels = Kernels(local, hardware("cpu"), load_calibration())
    again = recomputed(local.model, local.config.compute.remat).weights
    count = float(local.model.num_layers * local.config.trainer.accumulation)
    forward, backward = _layer_dtypes(local.config, dtype)
    for name, (m, n, k) in kernels.matmuls().items():
        part = "mlp" if name in ("gate", "up", "down") else "attention projections"
        yield Matmul(part, f"{name} forward", forward, (m, n, k), 1, count)
        yield Matmul(part, f"{name} input gradient", backward, (m, k, n), 1, count)
        yield Matmul(part, f"{name} weight gradient", backward, (k, n, m), 1, count)
        if name in again:
            yield Matmul(part, f"{name} recomputed", forward, (m, n, k), 1, count, model=False)


def _layer_dtypes(config: Config, dtype: str) -> tuple[str, str]:
    """Return the dtypes of matmuls with the layers' parameters, forward and backward (models/matmul/interface.py)."""
    precision = config.precision
    if precision.block_scaled is not None:
        return precision.block_scaled, "mxfp8"
    return ("float8", "float8") if precision.eight_bit else (dtype, dtype)


def _attention(local: LocalSizes, dtype: str, gpu: bool) -> Iterator[Matmul]:
    """Scores and values: 2 matmuls forward, 4 backward, and the scores again where a fused kernel does not store them."""
    config, model, length = local.config, local.model, local.config.data.seq_len
    fused = local.attention_backend(gpu=gpu) in ("cudnn", "chunked", "pallas")
    seen = mean_keys_per_layer(model, length) / length if fused else 1.0
    whole = local.rows * model.num_heads // local.tensor
    batch = max(1, min(whole, MAX_RESULT_ELEMENTS // (length * max(length, model.head_width))))
    count = model.num_layers * config.trainer.accumulation * seen * whole / batch / local.context
    scores, values = (length, length, model.head_width), (length, model.value_width, length)

    def matmul(name: str, shape: Shape, times: int, *, counted: bool = True) -> Matmul:
        return Matmul("attention", name, dtype, shape, batch, count * times, counted)

    yield matmul("scores forward and gradient", scores, 2)
    yield matmul("values forward and gradients", values, 4)
    again = recomputed(model, config.compute.remat).attention
    if fused or again:
        yield matmul("scores recomputed", scores, int(fused) + int(again), counted=False)
    if again:
        yield matmul("values recomputed", values, 1, counted=False)


def _unembedding(local: LocalSizes, dtype: str) -> Iterator[Matmul]:
    """Logits of a loss chunk and both gradients."""
    chunk, width, rows = local.loss_chunk_tokens, local.model.embed_dim, local.model.padded_vocab_size // local.tensor
    count = float(math.ceil(local.tokens / chunk) * local.config.trainer.accumulation)
    yield Matmul("unembedding", "logits forward", dtype, (chunk, rows, width), 1, count)
    yield Matmul("unembedding", "logits input gradient", dtype, (chunk, width, rows), 1, count)
    yield Matmul("unembedding", "logits weight gradient", dtype, (width, rows, chunk), 1, count)


def _muon(local: LocalSizes, gpu: bool) -> Iterator[Matmul]:
    """Newton-Schulz iterations for every matrix of the layers of one device: X X', its square, and their matmul with X."""
    if local.config.optimizer.kind != "muon":
        return
    dtype = "tfloat32" if gpu and local.config.compute.matmul_precision != "highest" else "float32"
    count = NEWTON_SCHULZ_STEPS * muon_layers(local.model.num_layers, local.fsdp * local.tensor)
    for name, weights in matmul_weights(local.model).items():
        small = min(local.model.embed_dim, weights // local.model.embed_dim)
        large = weights // small
        yield Matmul("optimizer", f"{name} Gram matrix", dtype, (small, small, large), 1, count, model=False)
        yield Matmul("optimizer", f"{name} Gram matrix squared", dtype, (small, small, small), 1, count, model=False)
        yield Matmul("optimizer", f"{name} orthogonalized", dtype, (small, large, small), 1, count, model=False)
