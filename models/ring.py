"""Products around the residual stream over `tensor` as rings: a part of the sequence is multiplied while the next one travels.

The stream is cut along the sequence over `tensor` (sharding/rules.py). A product that needs all of it starts with the part it has and
passes parts on; a product whose partial sums are added and cut again adds its own to what it received and passes that on. t - 1 permutes
of a t-th of the stream take the place of one gather or one reduce-scatter, in the same bytes: Wang et al., Overlap communication with
dependent computation via decomposition, ASPLOS 2023. XLA's own rewriting to this form is unsound in jaxlib 0.10.2 (jax issue 39200), so
it is written out here.

Legend: B rows, T sequence, D width, t devices on tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ridgeline.models.params import LAYERS, Recent
from ridgeline.models.projection import Projector
from ridgeline.sharding.manual import on_shards
from ridgeline.sharding.partition import FSDP_AXIS

TENSOR_AXIS = "tensor"
SEQUENCE = 1
"""The dim of the sequence in every activation."""
STREAM = ("batch", "residual_seq", "act_embed")
WHOLE = ("batch", "seq", "act_embed")
ACTIVATION_OF = {"heads": "act_heads", "kv_heads": "act_kv_heads", "mlp": "act_mlp", "head_dim": None}
"""Axis of a parameter -> that of the activation it makes or reads."""

Weights = tuple[jax.Array, ...]
Axes = tuple[tuple[str, ...], ...]


class RingProjector(Projector):
    """A Projector whose products with the stream take it and leave it cut along the sequence over tensor.

    For 16-bit products and the sharding rules as they are: a parameter that tensor does not cut would be counted t times.
    """

    def several(
        self, equations: Sequence[str], x: jax.Array, params: Sequence[nnx.Param], recent: Recent | None = None
    ) -> tuple[jax.Array, ...]:
        """As `Projector.several`; x of products with the width (`embed`) is cut over tensor, and so is a result that has it."""
        assert recent is None and not self.eight_bit and self.blocks is None, "configs/rules.py refuses narrow products"
        axes = tuple(tuple(axis for axis in param.axes if axis != LAYERS) for param in params)
        weights = tuple(param[...] for param in params)
        if axes[0][0] == "embed":
            return _gathered(self, tuple(equations), axes, x, weights)
        return tuple(_scattered(self, *each) for each in zip(equations, axes, [x] * len(axes), weights, strict=True))


def _use(projector: Projector, axes: Axes, weights: Weights) -> Weights:
    gather = projector.partitioner.gather_param
    return tuple(gather(w.astype(projector.compute_dtype), *names) for w, names in zip(weights, axes, strict=True))


def _weight_spec(projector: Projector, axes: tuple[str, ...]) -> PartitionSpec:
    return projector.partitioner.rules.spec(axes, without=(FSDP_AXIS,))


def _wide_spec(projector: Projector, axes: tuple[str, ...]) -> PartitionSpec:
    """Of an activation that has a weight's dims in place of `embed`."""
    return projector.partitioner.spec(("batch", "seq", *(ACTIVATION_OF[name] for name in axes if name != "embed")))


def _next() -> list[tuple[int, int]]:
    size = jax.lax.axis_size(TENSOR_AXIS)
    return [(device, (device - 1) % size) for device in range(size)]


def _ring_gather(projector: Projector, equations: Sequence[str], axes: Axes, x_BTD: jax.Array, used: Weights) -> tuple[Weights, jax.Array]:
    """Return the products, and x with its whole sequence."""
    spec = projector.partitioner.spec

    def local(x: jax.Array, *weights: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        size, me, length = jax.lax.axis_size(TENSOR_AXIS), jax.lax.axis_index(TENSOR_AXIS), x.shape[SEQUENCE]
        outs: list[list[jax.Array]] = []
        parts = [x]
        for step in range(size):
            if step + 1 < size:
                parts.append(jax.lax.ppermute(parts[step], TENSOR_AXIS, _next()))
            outs.append([jnp.einsum(equation, parts[step], w) for equation, w in zip(equations, weights, strict=True)])

        def in_order(pieces: list[jax.Array]) -> jax.Array:
            whole = jnp.zeros((pieces[0].shape[0], size * length, *pieces[0].shape[2:]), pieces[0].dtype)
            for step, piece in enumerate(pieces):
                whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, (me + step) % size * length, SEQUENCE)
            return whole

        return tuple(in_order(list(pieces)) for pieces in zip(*outs, strict=True)), in_order(parts)

    weight_specs = tuple(_weight_spec(projector, names) for names in axes)
    out_specs = (tuple(_wide_spec(projector, names) for names in axes), spec(WHOLE))
    found: tuple[Weights, jax.Array] = on_shards(projector.partitioner, local, (spec(STREAM), *weight_specs), out_specs)(x_BTD, *used)
    return found


def _ring_scatter(projector: Projector, equations: Sequence[str], axes: Axes, xs: Sequence[jax.Array], used: Weights) -> jax.Array:
    """Return the sum of the products, over tensor too, cut along the sequence."""

    def local(*arrays: jax.Array) -> jax.Array:
        xs, weights = arrays[: len(equations)], arrays[len(equations) :]
        size, me = jax.lax.axis_size(TENSOR_AXIS), jax.lax.axis_index(TENSOR_AXIS)
        length = xs[0].shape[SEQUENCE] // size
        total = None
        for step in range(size):
            start = (me + 1 + step) % size * length  # whose sum arrives at its owner with the last step
            parts = [jax.lax.dynamic_slice_in_dim(x, start, length, SEQUENCE) for x in xs]
            products = [jnp.einsum(equation, part, w) for equation, part, w in zip(equations, parts, weights, strict=True)]
            terms = [p.astype(jnp.float32) for p in ([] if total is None else [total]) + products]
            total = sum(terms[1:], terms[0]).astype(products[0].dtype)
            if step + 1 < size:
                total = jax.lax.ppermute(total, TENSOR_AXIS, _next())
        assert total is not None
        return total

    specs = (*(_wide_spec(projector, names) for names in axes), *(_weight_spec(projector, names) for names in axes))
    out: jax.Array = on_shards(projector.partitioner, local, specs, projector.partitioner.spec(STREAM))(*xs, *used)
    return out


def _of_input(equation: str) -> str:
    """Return the equation of the input's gradient, from those of the result."""
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    return f"{y_dims},{w_dims}->{x_dims}"


def _weight_gradient(projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    dw = jnp.einsum(f"{x_dims},{y_dims}->{w_dims}", x, dy, preferred_element_type=projector.gradient_dtype)
    return projector.partitioner.constrain(dw, *axes).astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(projector: Projector, equations: tuple[str, ...], axes: Axes, x: jax.Array, weights: Weights) -> tuple[jax.Array, ...]:
    return _gathered_forward(projector, equations, axes, x, weights)[0]


def _gathered_forward(
    projector: Projector, equations: tuple[str, ...], axes: Axes, x: jax.Array, weights: Weights
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, Weights, Weights | None]]:
    used = _use(projector, axes, weights)
    ys, whole = _ring_gather(projector, equations, axes, x, used)
    return ys, (whole, weights, used if projector.gather_once else None)


def _gathered_backward(
    projector: Projector, equations: tuple[str, ...], axes: Axes, residuals: tuple[jax.Array, Weights, Weights | None], dys: Weights
) -> tuple[jax.Array, Weights]:
    whole, weights, used = residuals
    used = _use(projector, axes, weights) if used is None else used
    dx = _ring_scatter(projector, [_of_input(equation) for equation in equations], axes, dys, used)
    gradients = zip(equations, axes, dys, weights, strict=True)
    return dx, tuple(_weight_gradient(projector, equation, names, whole, dy, w) for equation, names, dy, w in gradients)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scattered(projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array) -> jax.Array:
    return _scattered_forward(projector, equation, axes, x, w)[0]


def _scattered_forward(
    projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Weights | None]]:
    used = _use(projector, (axes,), (w,))
    return _ring_scatter(projector, [equation], (axes,), [x], used), (x, w, used if projector.gather_once else None)


def _scattered_backward(
    projector: Projector, equation: str, axes: tuple[str, ...], residuals: tuple[jax.Array, jax.Array, Weights | None], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w, used = residuals
    used = _use(projector, (axes,), (w,)) if used is None else used
    (dx,), whole = _ring_gather(projector, [_of_input(equation)], (axes,), dy, used)
    return dx, _weight_gradient(projector, equation, axes, x, whole, w)


_scattered.defvjp(_scattered_forward, _scattered_backward)
