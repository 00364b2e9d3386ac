"""Collective matmuls over `tensor`: one chunk of the sequence is multiplied while the next one is communicated.

The residual stream is sharded along the sequence over `tensor` (sharding/rules.py). A matmul that needs the whole sequence starts with the
local chunk and passes chunks around a ring; a matmul whose partial sums are reduce-scattered adds its own partial sum to the one received
and passes that on. t - 1 permutes of 1/t of the stream replace one all-gather or one reduce-scatter, with the same bytes: Wang et al.,
Overlap communication with dependent computation via decomposition, ASPLOS 2023. XLA's own rewrite to this form is unsound in jaxlib 0.10.2
(jax issue 39200), so it is written out here.

Legend: B batch, T sequence, D embed width, t devices on tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ridgeline.models.int8 import Matrix
from ridgeline.models.matmul.interface import Adapt, Matmul, input_equation, weight_equation
from ridgeline.models.params import Amax, logical_axes
from ridgeline.sharding.manual import on_shards, row_major
from ridgeline.sharding.partition import FSDP_AXIS

TENSOR_AXIS = "tensor"
SEQUENCE = 1
"""The sequence dim of every activation."""
SHARDED = ("batch", "residual_seq", "act_embed")
WHOLE = ("batch", "seq", "act_embed")
ACTIVATION_OF = {"heads": "act_heads", "kv_heads": "act_kv_heads", "mlp": "act_mlp", "head_dim": None}
"""Logical axis of a parameter -> that of the activation it produces or reads."""

Weights = tuple[jax.Array, ...]
Axes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class CollectiveMatmul(Matmul):
    """A Matmul that reads and writes the residual stream sharded along the sequence over tensor.

    For matmuls in the compute dtype and the default sharding rules: a parameter that tensor does not shard would be counted t times.
    """

    def shared(
        self,
        equations: Sequence[str],
        x: jax.Array,
        params: Sequence[Matrix],
        amax: Amax | None = None,
        adapters: Sequence[Adapt | None] | None = None,
    ) -> tuple[jax.Array, ...]:
        """As `Matmul.shared`; an x with the dim `embed` is sharded along the sequence over tensor, and so is a result with that dim."""
        assert amax is None and not self.float8 and self.block_format is None, "configs/rules.py refuses quantized matmuls"
        assert not any(adapters or ()), "configs/rules.py refuses adapters"
        axes = tuple(logical_axes(param) for param in params)
        weights = tuple(param[...] for param in params if isinstance(param, nnx.Param))  # in 8 bits only with adapters
        if axes[0][0] == "embed":
            return _gathered(self, tuple(equations), axes, x, weights)
        return tuple(_scattered(self, *each) for each in zip(equations, axes, [x] * len(axes), weights, strict=True))

    @property
    def gathers_input(self) -> bool:
        """False: `shared` gathers chunk by chunk."""
        return False

    def gather_input(self, x_BTD: jax.Array) -> jax.Array:
        """Keep the sharding along the sequence."""
        return self.partitioner.constrain(x_BTD, *SHARDED)


def _gather_params(matmul: Matmul, axes: Axes, weights: Weights) -> Weights:
    gather = matmul.partitioner.gather_param
    return tuple(gather(w.astype(matmul.compute_dtype), *names) for w, names in zip(weights, axes, strict=True))


def _weight_spec(matmul: Matmul, axes: tuple[str, ...]) -> PartitionSpec:
    return matmul.partitioner.rules.spec(axes, without=(FSDP_AXIS,))


def _hidden_spec(matmul: Matmul, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of the activation with a parameter's other dims in place of `embed`."""
    return matmul.partitioner.spec(("batch", "seq", *(ACTIVATION_OF[name] for name in axes if name != "embed")))


def _next_device() -> list[tuple[int, int]]:
    size = jax.lax.axis_size(TENSOR_AXIS)
    return [(device, (device - 1) % size) for device in range(size)]


def _all_gather_matmul(
    matmul: CollectiveMatmul, equations: Sequence[str], axes: Axes, x_BTD: jax.Array, gathered: Weights
) -> tuple[Weights, jax.Array]:
    """Return the results over the whole sequence, and x with its whole sequence."""
    spec = matmul.partitioner.spec

    def local(x: jax.Array, *weights: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        size, me, length = jax.lax.axis_size(TENSOR_AXIS), jax.lax.axis_index(TENSOR_AXIS), x.shape[SEQUENCE]
        outs: list[list[jax.Array]] = []
        # Zeros that chunks are written into wait for the input: XLA would fill those of several layers at once.
        x, zero = jax.lax.optimization_barrier((x, jnp.zeros((), x.dtype)))
        chunks = [x]
        for step in range(size):
            if step + 1 < size:
                chunks.append(jax.lax.ppermute(chunks[step], TENSOR_AXIS, _next_device()))
            outs.append([jnp.einsum(equation, chunks[step], w) for equation, w in zip(equations, weights, strict=True)])

        def in_order(pieces: list[jax.Array]) -> jax.Array:
            whole = jnp.full((pieces[0].shape[0], size * length, *pieces[0].shape[2:]), zero.astype(pieces[0].dtype))
            for step, piece in enumerate(pieces):
                whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, (me + step) % size * length, SEQUENCE)
            return whole

        return tuple(in_order(list(pieces)) for pieces in zip(*outs, strict=True)), in_order(chunks)

    weight_specs = tuple(_weight_spec(matmul, names) for names in axes)
    out_specs = (tuple(_hidden_spec(matmul, names) for names in axes), spec(WHOLE))
    found: tuple[Weights, jax.Array] = on_shards(matmul.partitioner, local, (spec(SHARDED), *weight_specs), out_specs)(x_BTD, *gathered)
    return found


def _matmul_reduce_scatter(matmul: Matmul, equations: Sequence[str], axes: Axes, xs: Sequence[jax.Array], gathered: Weights) -> jax.Array:
    """Return the sum of the matmuls, also over tensor, sharded along the sequence."""

    def local(*arrays: jax.Array) -> jax.Array:
        xs, weights = arrays[: len(equations)], arrays[len(equations) :]
        size, me = jax.lax.axis_size(TENSOR_AXIS), jax.lax.axis_index(TENSOR_AXIS)
        length = xs[0].shape[SEQUENCE] // size
        total = None
        for step in range(size):
            start = (me + 1 + step) % size * length  # the chunk whose sum reaches its owner in the last step
            chunks = [jax.lax.dynamic_slice_in_dim(x, start, length, SEQUENCE) for x in xs]
            results = [jnp.einsum(equation, chunk, w) for equation, chunk, w in zip(equations, chunks, weights, strict=True)]
            terms = [p.astype(jnp.float32) for p in ([] if total is None else [total]) + results]
            total = sum(terms[1:], terms[0]).astype(results[0].dtype)
            if step + 1 < size:
                total = jax.lax.ppermute(total, TENSOR_AXIS, _next_device())
        assert total is not None
        return row_major(total)  # else a stack of several rows' updates, where they are kept, is transposed

    specs = (*(_hidden_spec(matmul, names) for names in axes), *(_weight_spec(matmul, names) for names in axes))
    out: jax.Array = on_shards(matmul.partitioner, local, specs, matmul.partitioner.spec(SHARDED))(*xs, *gathered)
    return out


def _weight_gradient(matmul: Matmul, equation: str, axes: tuple[str, ...], x: jax.Array, dy: jax.Array, w: jax.Array) -> jax.Array:
    dw = jnp.einsum(weight_equation(equation), x, dy, preferred_element_type=matmul.gradient_dtype)
    return matmul.partitioner.constrain_gradient(dw, *axes).astype(w.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(matmul: CollectiveMatmul, equations: tuple[str, ...], axes: Axes, x: jax.Array, weights: Weights) -> tuple[jax.Array, ...]:
    return _gathered_forward(matmul, equations, axes, x, weights)[0]


def _gathered_forward(
    matmul: CollectiveMatmul, equations: tuple[str, ...], axes: Axes, x: jax.Array, weights: Weights
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, Weights, Weights | None]]:
    gathered = _gather_params(matmul, axes, weights)
    ys, whole = _all_gather_matmul(matmul, equations, axes, x, gathered)
    return ys, (whole, weights, gathered if matmul.save_gathered else None)


def _gathered_backward(
    matmul: CollectiveMatmul, equations: tuple[str, ...], axes: Axes, residuals: tuple[jax.Array, Weights, Weights | None], dys: Weights
) -> tuple[jax.Array, Weights]:
    whole, weights, gathered = residuals
    gathered = _gather_params(matmul, axes, weights) if gathered is None else gathered
    dx = _matmul_reduce_scatter(matmul, [input_equation(equation) for equation in equations], axes, dys, gathered)
    gradients = zip(equations, axes, dys, weights, strict=True)
    return dx, tuple(_weight_gradient(matmul, equation, names, whole, dy, w) for equation, names, dy, w in gradients)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scattered(matmul: CollectiveMatmul, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array) -> jax.Array:
    return _scattered_forward(matmul, equation, axes, x, w)[0]


def _scattered_forward(
    matmul: CollectiveMatmul, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Weights | None]]:
    gathered = _gather_params(matmul, (axes,), (w,))
    return _matmul_reduce_scatter(matmul, [equation], (axes,), [x], gathered), (x, w, gathered if matmul.save_gathered else None)


def _scattered_backward(
    matmul: CollectiveMatmul, equation: str, axes: tuple[str, ...], residuals: tuple[jax.Array, jax.Array, Weights | None], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w, gathered = residuals
    gathered = _gather_params(matmul, (axes,), (w,)) if gathered is None else gathered
    (dx,), whole = _all_gather_matmul(matmul, [input_equation(equation)], (axes,), dy, gathered)
    return dx, _weight_gradient(matmul, equation, axes, x, whole, w)


_scattered.defvjp(_scattered_forward, _scattered_backward)
