"""The layers below the step, each alone: products, passes over device memory, collectives, on all devices of the mesh at once.

All devices work at the same time, as in a step: they share power, clocks and, on a CPU, cores. Arrays hold random numbers (zeros would
draw less power and run faster); those of one piece of work at a time are there.
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
from ridgeline.measure.calibration import arithmetic
from ridgeline.measure.timing import Timed
from ridgeline.measure.work import Passes, Product
from ridgeline.models import block_scaled, fp8
from ridgeline.planner.collectives import PlannedCollective
from ridgeline.planner.communication import bus_factor
from ridgeline.planner.local import LocalSizes

LARGEST_STREAM_BYTES = 1 << 30
SMALLEST_STREAM_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """One piece of work, timed alone."""

    what: str
    part: str
    """What it belongs to: an attribute of a product, the axes of a collective."""
    count: float
    """Times per step and device."""
    amount: float
    """FLOPs or bytes of one execution."""
    detail: dict[str, Any]
    timed: Timed
    """Equal pieces share it."""

    @property
    def once_s(self) -> list[float]:
        """Seconds of one execution, by round."""
        return self.timed.rounds_s

    def per_step_s(self) -> list[float]:
        """Seconds per step, by round."""
        return [self.count * seconds for seconds in self.once_s]


def time_round(pieces: Sequence[Piece]) -> None:
    """Time every piece once; equal ones together."""
    for timed in dict.fromkeys(piece.timed for piece in pieces):
        timed.round()


def products(found: Sequence[Product], mesh: Mesh) -> list[Piece]:
    """Return the products of a step."""
    timed: dict[tuple[Any, ...], Timed] = {}
    for product in found:
        timed.setdefault((product.dtype, product.batch, product.shape), Timed(_product(product, mesh)))
    return [
        Piece(
            product.name,
            product.part,
            product.count,
            product.flops,
            {"dtype": product.dtype, "batch": product.batch, "shape": list(product.shape), "model": product.model},
            timed[product.dtype, product.batch, product.shape],
        )
        for product in found
    ]


def _product(product: Product, mesh: Mesh) -> Callable[[], Callable[[], jax.Array]]:
    (m, n, k), lead = product.shape, () if product.batch == 1 else (product.batch,)
    if product.dtype in NARROW:  # both lie as their kernels read them, what is summed over last
        platform = mesh.devices.flat[0].platform
        multiply = _on_each_device(functools.partial(NARROW[product.dtype], platform), mesh, 2)
        makers = [maker(mesh, P(), (*lead, *shape), product.dtype, seed) for seed, shape in enumerate(((m, k), (n, k)))]
    else:
        stored, precision = arithmetic(product.dtype)
        multiply = _on_each_device(functools.partial(jnp.matmul, precision=precision), mesh, 2)
        makers = [maker(mesh, P(), (*lead, *shape), stored, seed) for seed, shape in enumerate(((m, k), (k, n)))]
    return lambda: functools.partial(multiply, *(make() for make in makers))


def _eight_bit(platform: str, left: Scaled, right: Scaled) -> jax.Array:
    """[M, K] x [N, K] -> [M, N] of float8 with a scale per tensor: on GPUs XLA makes one kernel of it."""
    a, b = (fp8.dequantise(*each, jnp.dtype("bfloat16")) for each in (left, right))
    return jnp.einsum("mk,nk->mn", a, b)


def _blocks(platform: str, left: block_scaled.Quantised, right: block_scaled.Quantised) -> jax.Array:
    """The same of block-scaled formats."""
    return block_scaled.multiply(platform, left, right, jnp.dtype("bfloat16"))


Scaled = tuple[jax.Array, jax.Array]
NARROW: Mapping[str, Callable[[str, Any, Any], jax.Array]] = {"float8": _eight_bit, **dict.fromkeys(block_scaled.FORMATS, _blocks)}


def passes(config: Config, found: Passes, mesh: Mesh) -> list[Piece]:
    """Return a*x + y on arrays as large as those the passes go through: the residual stream, and the parameters a device keeps."""
    local = LocalSizes.of(config, mesh.shape)
    parts = [
        ("layers", found.layers_bytes, local.cut_stream_bytes),
        ("embedding and loss", found.ends_bytes, local.loss_chunk_tokens * config.model.padded_vocab_size // local.tensor * 4),
        ("sums and optimizer", found.update_bytes, local.parameters * local.parameter_itemsize),
    ]
    timed: dict[int, Timed] = {}
    pieces = []
    for what, total_bytes, natural_bytes in parts:
        array_bytes = max(SMALLEST_STREAM_BYTES, min(LARGEST_STREAM_BYTES, natural_bytes)) // 4 * 4
        timed.setdefault(array_bytes, Timed(_pass(array_bytes, mesh)))
        amount = 3 * array_bytes
        detail = {"array_bytes": array_bytes, "bytes_per_step": total_bytes}
        pieces.append(Piece(what, what, total_bytes / amount, amount, detail, timed[array_bytes]))
    return pieces


def _pass(array_bytes: int, mesh: Mesh) -> Callable[[], Callable[[], jax.Array]]:
    add = _on_each_device(lambda x, y: 2.0 * x + y, mesh, 2)
    makers = [maker(mesh, P(), (array_bytes // 4,), jnp.dtype("float32"), seed) for seed in range(2)]
    return lambda: functools.partial(add, *(make() for make in makers))


def collectives(planned: Sequence[PlannedCollective], mesh: Mesh) -> list[Piece]:
    """Return the collectives of a step over their mesh axes. Nothing else runs beside them."""
    timed: dict[tuple[Any, ...], Timed] = {}
    pieces = []
    for item in planned:
        work = timed.setdefault(
            (item.kind, item.axes, item.bytes), Timed(functools.partial(collective, item.kind, item.axes, item.bytes, mesh))
        )
        detail = {
            "bus_factor": bus_factor(item.kind, math.prod(mesh.shape[axis] for axis in item.axes)),
            "kind": item.kind,
            "axes": list(item.axes),
            "bytes": item.bytes,
            "where": item.where,
            "phase": item.phase,
        }
        pieces.append(Piece(item.what, "+".join(item.axes), item.count * item.parts, item.bytes, detail, work))
    return pieces


def collective(kind: str, axes: tuple[str, ...], full_bytes: int, mesh: Mesh) -> Callable[[], jax.Array]:
    """Return a call of one float32 collective over mesh axes.

    full_bytes: of the unsharded side on one device: what a gather gives out and a reduction takes in (rounded up to what divides).
    """
    group = math.prod(mesh.shape[axis] for axis in axes)
    elements = -(-full_bytes // (4 * group)) * group
    move, before = _moving(kind, axes, mesh)
    return functools.partial(move, maker(mesh, before, (elements,), jnp.dtype("float32"), 0)())


@functools.cache
def _moving(kind: str, axes: tuple[str, ...], mesh: Mesh) -> tuple[Callable[[jax.Array], jax.Array], Any]:
    """Return a compiled collective over some axes, and how its argument is laid out."""
    functions: Mapping[str, tuple[Callable[[jax.Array], jax.Array], Any, Any]] = {
        "all-gather": (lambda x: jax.lax.all_gather(x, axes, tiled=True), P(axes), P()),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, axes, tiled=True), P(), P(axes)),
        "all-reduce": (lambda x: jax.lax.psum(x, axes), P(), P()),
    }
    function, before, after = functions[kind]
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)), before


def _on_each_device(function: Callable[..., jax.Array], mesh: Mesh, arguments: int) -> Callable[..., jax.Array]:
    """Let every device do the whole work on its own copy."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(),) * arguments, out_specs=P(), check_vma=False))


@functools.cache
def maker(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any, seed: int) -> Callable[[], Any]:
    """Return a compiled maker of random arrays; with the scales they are stored with where `dtype` is the name of a narrow format."""

    def make() -> Any:
        if dtype not in NARROW:
            return jax.random.normal(jax.random.key(seed), shape, dtype)
        wide = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return fp8.quantise(wide, fp8.VALUES) if dtype == "float8" else block_scaled.quantise(wide, block_scaled.FORMATS[dtype])

    return jax.jit(make, out_shardings=NamedSharding(mesh, spec))
