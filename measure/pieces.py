"""The pieces of a step, each timed alone: matmuls, memory traffic and collectives, on all devices of the mesh at once.

All devices work at the same time, as in a step, because they share power, clocks and, on a CPU, cores. Inputs of matmuls are random numbers
(zeros draw less power and run faster). Only the arrays of one piece are allocated at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ridgeline.configs.schema import Config
from ridgeline.measure.calibration import dtype_and_precision
from ridgeline.measure.collectives import collective
from ridgeline.measure.step_work import Matmul, MemoryTraffic
from ridgeline.measure.timer import DeviceTimer
from ridgeline.models.matmul import block_scaled, fp8
from ridgeline.planner.collectives import PlannedCollective
from ridgeline.planner.communication import bus_factor
from ridgeline.planner.local import LocalSizes

LARGEST_STREAM_BYTES = 1 << 30
SMALLEST_STREAM_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """One piece of work and its timer."""

    what: str
    part: str
    """Its group: part of the model for a matmul, mesh axes for a collective."""
    count: float
    """Executions per step and device."""
    amount: float
    """FLOPs or bytes of one execution."""
    detail: dict[str, Any]
    timer: DeviceTimer
    """Equal pieces share one."""

    @property
    def once_s(self) -> list[float]:
        """Seconds per execution, one entry per round."""
        return self.timer.rounds_s

    def per_step_s(self) -> list[float]:
        """Seconds per step, one entry per round."""
        return [self.count * seconds for seconds in self.once_s]


def time_round(pieces: Sequence[Piece]) -> None:
    """Time one round of every piece."""
    for timer in dict.fromkeys(piece.timer for piece in pieces):
        timer.round()


def matmuls(found: Sequence[Matmul], mesh: Mesh) -> list[Piece]:
    """Return the matmuls of a step."""
    timers: dict[tuple[Any, ...], DeviceTimer] = {}
    for matmul in found:
        timers.setdefault((matmul.dtype, matmul.batch, matmul.shape), DeviceTimer(_matmul(matmul, mesh)))
    return [
        Piece(
            matmul.name,
            matmul.part,
            matmul.count,
            matmul.flops,
            {"dtype": matmul.dtype, "batch": matmul.batch, "shape": list(matmul.shape), "model": matmul.model},
            timers[matmul.dtype, matmul.batch, matmul.shape],
        )
        for matmul in found
    ]


def _matmul(matmul: Matmul, mesh: Mesh) -> Callable[[], Callable[[], jax.Array]]:
    (m, n, k), lead = matmul.shape, () if matmul.batch == 1 else (matmul.batch,)
    if matmul.dtype in NARROW:  # both operands have the layout their kernel reads: the contracted dim last
        platform = mesh.devices.flat[0].platform
        multiply = _on_each_device(functools.partial(NARROW[matmul.dtype], platform), mesh, 2)
        makers = [maker(mesh, P(), (*lead, *shape), matmul.dtype, seed) for seed, shape in enumerate(((m, k), (n, k)))]
    else:
        stored, precision = dtype_and_precision(matmul.dtype)
        multiply = _on_each_device(functools.partial(jnp.matmul, precision=precision), mesh, 2)
        makers = [maker(mesh, P(), (*lead, *shape), stored, seed) for seed, shape in enumerate(((m, k), (k, n)))]
    return lambda: functools.partial(multiply, *(make() for make in makers))


def _eight_bit(platform: str, left: Scaled, right: Scaled) -> jax.Array:
    """[M, K] x [N, K] -> [M, N] in float8 with one scale per tensor. XLA compiles this to one GPU kernel."""
    a, b = (fp8.dequantize(*each, jnp.dtype("bfloat16")) for each in (left, right))
    return jnp.einsum("mk,nk->mn", a, b)


def _blocks(platform: str, left: block_scaled.BlockScaled, right: block_scaled.BlockScaled) -> jax.Array:
    """[M, K] x [N, K] -> [M, N] in a block-scaled format."""
    return block_scaled.multiply(platform, left, right, jnp.dtype("bfloat16"))


Scaled = tuple[jax.Array, jax.Array]
NARROW: Mapping[str, Callable[[str, Any, Any], jax.Array]] = {"float8": _eight_bit, **dict.fromkeys(block_scaled.FORMATS, _blocks)}


def memory_traffic(config: Config, found: MemoryTraffic, mesh: Mesh) -> list[Piece]:
    """Return a*x + y on arrays as large as those of the step: the residual stream, the logits of a chunk, a device's parameters."""
    local = LocalSizes.of(config, mesh.shape)
    parts = [
        ("layers", found.layers_bytes, local.cut_stream_bytes),
        ("embedding and loss", found.ends_bytes, local.loss_chunk_tokens * config.model.padded_vocab_size // local.tensor * 4),
        ("sums and optimizer", found.update_bytes, local.parameters * local.parameter_itemsize),
    ]
    timers: dict[int, DeviceTimer] = {}
    pieces = []
    for what, total_bytes, natural_bytes in parts:
        array_bytes = max(SMALLEST_STREAM_BYTES, min(LARGEST_STREAM_BYTES, natural_bytes)) // 4 * 4
        timers.setdefault(array_bytes, DeviceTimer(_scale_and_add(array_bytes, mesh)))
        amount = 3 * array_bytes
        detail = {"array_bytes": array_bytes, "bytes_per_step": total_bytes}
        pieces.append(Piece(what, what, total_bytes / amount, amount, detail, timers[array_bytes]))
    return pieces


def _scale_and_add(array_bytes: int, mesh: Mesh) -> Callable[[], Callable[[], jax.Array]]:
    add = _on_each_device(lambda x, y: 2.0 * x + y, mesh, 2)
    makers = [maker(mesh, P(), (array_bytes // 4,), jnp.dtype("float32"), seed) for seed in range(2)]
    return lambda: functools.partial(add, *(make() for make in makers))


def collectives(planned: Sequence[PlannedCollective], mesh: Mesh) -> list[Piece]:
    """Return the collectives of a step over their mesh axes, without compute beside them."""
    timers: dict[tuple[Any, ...], DeviceTimer] = {}
    pieces = []
    for item in planned:
        make = functools.partial(collective, item.kind, item.axes, item.bytes, mesh)
        timer = timers.setdefault((item.kind, item.axes, item.bytes), DeviceTimer(make))
        detail = {
            "bus_factor": bus_factor(item.kind, math.prod(mesh.shape[axis] for axis in item.axes)),
            "kind": item.kind,
            "axes": list(item.axes),
            "bytes": item.bytes,
            "where": item.where,
            "phase": item.phase,
        }
        pieces.append(Piece(item.what, "+".join(item.axes), item.count * item.parts, item.bytes, detail, timer))
    return pieces


def _on_each_device(function: Callable[..., jax.Array], mesh: Mesh, arguments: int) -> Callable[..., jax.Array]:
    """Make every device run the whole function on its own copy of the arguments."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(),) * arguments, out_specs=P(), check_vma=False))


@functools.cache
def maker(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any, seed: int) -> Callable[[], Any]:
    """Return a compiled function that creates a random array; for a low-precision format, the quantized array and its scales."""

    def make() -> Any:
        if dtype not in NARROW:
            return jax.random.normal(jax.random.key(seed), shape, dtype)
        wide = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return fp8.quantize(wide, fp8.VALUES) if dtype == "float8" else block_scaled.quantize(wide, block_scaled.FORMATS[dtype])

    return jax.jit(make, out_shardings=NamedSharding(mesh, spec))
