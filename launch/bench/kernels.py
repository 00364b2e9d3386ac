"""The layers below the step, each alone: products, passes over device memory, collectives, on all devices of the mesh at once.

All devices work at the same time, as in a step: they share power, clocks and, on a CPU, cores. Arrays hold random numbers (zeros would
draw less power and run faster).
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

from configs.schema import Config
from launch.bench.timing import rounds_s
from launch.calibration import arithmetic
from perf.bench.work import Passes, Product
from planner.collectives import PlannedCollective
from planner.communication import bus_factor
from planner.local import LocalSizes

LARGEST_STREAM_BYTES = 1 << 30
SMALLEST_STREAM_BYTES = 1 << 16


@dataclass(frozen=True)
class Measured:
    """One piece of work, timed alone."""

    what: str
    part: str
    """What it belongs to: an attribute of a product, the axes of a collective."""
    count: float
    """Times per step and device."""
    once_s: tuple[float, ...]
    """Seconds of one execution, by round."""
    amount: float
    """FLOPs or bytes of one execution."""
    detail: dict[str, Any]

    def per_step_s(self) -> list[float]:
        """Seconds per step, by round."""
        return [self.count * seconds for seconds in self.once_s]


def measure_products(products: Sequence[Product], mesh: Mesh, repeats: int) -> list[Measured]:
    """Time the products of a step; equal ones are timed once."""
    timed: dict[tuple[Any, ...], list[float]] = {}
    for product in products:
        key = (product.dtype, product.batch, product.shape)
        if key not in timed:
            timed[key] = rounds_s(_product(product, mesh), rounds=repeats)
    return [
        Measured(
            product.name,
            product.part,
            product.count,
            tuple(timed[product.dtype, product.batch, product.shape]),
            product.flops,
            {"dtype": product.dtype, "batch": product.batch, "shape": list(product.shape), "model": product.model},
        )
        for product in products
    ]


def _product(product: Product, mesh: Mesh) -> Callable[[], jax.Array]:
    (m, n, k), (stored, precision) = product.shape, arithmetic(product.dtype)
    lead = () if product.batch == 1 else (product.batch,)
    left, right = (_everywhere(mesh, (*lead, *shape), stored, seed) for seed, shape in enumerate(((m, k), (k, n))))
    return functools.partial(_on_each_device(functools.partial(jnp.matmul, precision=precision), mesh, 2), left, right)


def measure_passes(config: Config, passes: Passes, mesh: Mesh, repeats: int) -> list[Measured]:
    """Time a*x + y on arrays as large as those the passes go through: the residual stream, and the parameters a device keeps."""
    local = LocalSizes.of(config, mesh.shape)
    parts = [
        ("layers", passes.layers_bytes, local.cut_stream_bytes),
        ("embedding and loss", passes.ends_bytes, local.loss_chunk_tokens * config.model.padded_vocab_size // local.tensor * 4),
        ("sums and optimizer", passes.update_bytes, local.parameters * local.parameter_itemsize),
    ]
    timed: dict[int, list[float]] = {}
    found = []
    for what, total_bytes, natural_bytes in parts:
        array_bytes = max(SMALLEST_STREAM_BYTES, min(LARGEST_STREAM_BYTES, natural_bytes)) // 4 * 4
        if array_bytes not in timed:
            x, y = (_everywhere(mesh, (array_bytes // 4,), jnp.dtype("float32"), seed) for seed in range(2))
            timed[array_bytes] = rounds_s(functools.partial(_on_each_device(lambda x, y: 2.0 * x + y, mesh, 2), x, y), rounds=repeats)
        amount = 3 * array_bytes
        detail = {"array_bytes": array_bytes, "bytes_per_step": total_bytes}
        found.append(Measured(what, what, total_bytes / amount, tuple(timed[array_bytes]), amount, detail))
    return found


def measure_collectives(planned: Sequence[PlannedCollective], mesh: Mesh, repeats: int) -> list[Measured]:
    """Time the collectives of a step over their mesh axes; equal ones are timed once. Nothing else runs beside them."""
    timed: dict[tuple[Any, ...], list[float]] = {}
    found = []
    for item in planned:
        key = (item.kind, item.axes, item.bytes)
        if key not in timed:
            timed[key] = rounds_s(collective(item.kind, item.axes, item.bytes, mesh), rounds=repeats)
        group = math.prod(mesh.shape[axis] for axis in item.axes)
        detail = {
            "bus_factor": bus_factor(item.kind, group),
            "kind": item.kind,
            "axes": list(item.axes),
            "bytes": item.bytes,
            "where": item.where,
            "phase": item.phase,
        }
        times = item.count * item.parts
        found.append(Measured(item.what, "+".join(item.axes), times, tuple(timed[key]), item.bytes, detail))
    return found


def collective(kind: str, axes: tuple[str, ...], full_bytes: int, mesh: Mesh) -> Callable[[], jax.Array]:
    """Return a call of one float32 collective over mesh axes.

    full_bytes: of the unsharded side on one device: what a gather gives out and a reduction takes in (rounded up to what divides).
    """
    group = math.prod(mesh.shape[axis] for axis in axes)
    elements = -(-full_bytes // (4 * group)) * group
    functions: Mapping[str, tuple[Callable[[jax.Array], jax.Array], Any, Any]] = {
        "all-gather": (lambda x: jax.lax.all_gather(x, axes, tiled=True), P(axes), P()),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, axes, tiled=True), P(), P(axes)),
        "all-reduce": (lambda x: jax.lax.psum(x, axes), P(), P()),
    }
    function, before, after = functions[kind]
    argument = _made(mesh, before, (elements,), jnp.dtype("float32"), 0)
    return functools.partial(jax.jit(jax.shard_map(function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)), argument)


def _on_each_device(function: Callable[..., jax.Array], mesh: Mesh, arguments: int) -> Callable[..., jax.Array]:
    """Let every device do the whole work on its own copy."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(),) * arguments, out_specs=P(), check_vma=False))


def _everywhere(mesh: Mesh, shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    return _made(mesh, P(), shape, dtype, seed)


def _made(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    make = jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, dtype), out_shardings=NamedSharding(mesh, spec))
    return make()
