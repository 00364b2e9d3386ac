"""Matmuls of activations with parameters: the one interface between the model's layers and how matmuls are made fast.

A layer calls `Matmul` with an einsum equation, its input and a parameter. What happens behind the call follows from the config:

1. The parameter is cast to the dtype in which it is communicated (compute dtype, or float8) and all-gathered over fsdp (ZeRO-3). A matrix
   that is stored in 8 bits (`lora.base: int8`) is gathered so, and dequantized after.
2. The operands are quantized as `precision.matmul` requires (fp8.py, block_scaled.py). Matmuls that share their input quantize it once.
3. The platform's fast kernel runs (dense.py, block_scaled.py), with `compute.tensor_overlap: ring` as a collective matmul (collective.py).

The backward pass is written by hand for two reasons. The gathered parameter is not saved for it but gathered again (otherwise every device
would hold the whole model as residuals). And the parameter's gradient leaves the matmul in `precision.gradients`, so that the sum over
devices has that dtype whatever the compute dtype is.

Legend: B batch, T sequence, V rows of a lookup table, D embed width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ridgeline.models.int8 import Int8, Matrix, scale_axes, values_of
from ridgeline.models.matmul import block_scaled, dense, fp8
from ridgeline.models.params import Amax, Path, gathered_of, logical_axes, slot_of
from ridgeline.sharding.manual import look_up, look_up_gradient, on_shards, reduce_gradient, row_major

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner

LogicalAxes = tuple[str, ...]
Adapt = Callable[["Matmul", str, jax.Array, Matrix, jax.Array], jax.Array]
"""(matmul, equation, input, parameter, result) -> the result with an adapter (models/lora.py)."""


@dataclass(frozen=True)
class Matmul:
    """Matmuls with parameters, for one mesh and one precision policy. Hashable: a static attribute of the modules."""

    partitioner: Partitioner
    compute_dtype: jnp.dtype
    gradient_dtype: jnp.dtype
    float8: bool = False
    """Operands are float8 with a scale per tensor."""
    block_format: str | None = None
    """The format of block-scaled operands: mxfp8 or nvfp4."""
    save_gathered: bool = False
    """The all-gathered parameter is a residual of the backward pass. For blocks that are rematerialized: recomputing the matmul gathers
    the parameter, and its gradients use the same copy. Otherwise the copies of all layers would be kept."""
    zeroes_embedding_early: bool = False
    """The embedding's gradient may begin before the layers' backward pass ends (configs/remat.py)."""
    frozen: bool = False
    """Parameters have no gradient."""
    gradients_first: bool = False
    """Nothing reads the gradient of the input before those of the parameters are computed; they may be reduced later."""
    keeps_input: bool = False
    """What `gather_input` returns is kept for the backward pass. XLA gathers the sequences of several rows in another layout than the
    backward pass reads, and would transpose the stacks of all layers: each layer's is transposed instead."""

    def __call__(
        self, equation: str, x: jax.Array, param: Matrix, amax: Amax | None = None, adapters: Sequence[Adapt | None] = (None,)
    ) -> jax.Array:
        """Return einsum(equation, x, param) in the compute dtype; see `shared`."""
        return self.shared((equation,), x, (param,), amax, adapters)[0]

    def shared(
        self,
        equations: Sequence[str],
        x: jax.Array,
        params: Sequence[Matrix],
        amax: Amax | None = None,
        adapters: Sequence[Adapt | None] | None = None,
    ) -> tuple[jax.Array, ...]:
        """Return einsum(equation, x, param) of each pair in the compute dtype; the shared input x is quantized once.

        Every index of a result and of its inputs appears exactly twice. x [B, T, ...] is in the compute dtype, parameters may have any;
        their gradients are accumulated in the gradient dtype. `amax` holds the amax of earlier steps for delayed scaling (None: current
        scaling); its "gradient" is the amax of this pass. `adapters`: of each parameter (models/lora.py).
        """
        axes = tuple(logical_axes(param) for param in params)
        weights = tuple(weight_of(param) for param in params)
        ys = _matmuls(self, tuple(equations), axes, x, weights, None if amax is None else amax[...])
        if adapters is None:
            return ys
        each = zip(adapters, equations, params, ys, strict=True)
        return tuple(y if adapter is None else adapter(self, equation, x, param, y) for adapter, equation, param, y in each)

    def add_bias(self, x: jax.Array, param: nnx.Param | None) -> jax.Array:
        """Return x plus a bias over its last dims, or x when there is none."""
        if param is None:
            return x
        return x + self.partitioner.gather_param(param[...].astype(self.compute_dtype), *logical_axes(param))

    def look_up(self, table_VD: nnx.Param, ids_BT: jax.Array) -> jax.Array:
        """Return the rows of a table (logical axes of its rows, embed) for int32 ids: [B, T, D] in the compute dtype."""
        return _look_up(self, table_VD.axes[0], table_VD[...], ids_BT)

    @property
    def gathers_input(self) -> bool:
        """Whether `gather_input` communicates: the residual stream is sharded along the sequence and the matmuls need all of it."""
        return self.partitioner.axis_size("residual_seq") > self.partitioner.axis_size("seq")

    def gather_input(self, x_BTD: jax.Array) -> jax.Array:
        """All-gather an activation with the residual stream's sharding along the sequence, as the matmuls with it need."""
        # Constrained on both sides: otherwise XLA gathers before the norm's last cast, in float32.
        x_BTD = self.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD = self.partitioner.constrain(x_BTD, "batch", "seq", "act_embed")
        return _row_major(self.partitioner, x_BTD) if self.keeps_input and self.gathers_input else x_BTD

    def amax_of_layers(self, stacked: nnx.State) -> dict[Path, jax.Array]:
        """Return the amax of every stacked matmul parameter by layer, float32 [layers], of experts by layer and expert [layers, E].

        Empty unless parameters are quantized per tensor.

        All layers at once: the step has one small reduction over devices for all parameters, and no matmul waits for it.
        """
        if not self._quantizes_params:
            return {}
        amax = {}
        for path, leaf in nnx.to_flat_state(stacked):
            axes = leaf.get_metadata().get("axes") or ()
            if {"embed", "expert_embed"} & set(axes):
                dims = [dim for dim, axis in enumerate(axes) if dim and axis != "experts"]
                amax[path] = jnp.max(jnp.abs(leaf[...]), dims).astype(jnp.float32)
        return jax.lax.stop_gradient(amax)

    @property
    def _quantizes_params(self) -> bool:
        """Parameters are quantized to float8 with a scale per tensor before the all-gather."""
        return self.float8 or self.block_format == block_scaled.MXFP8.name


def set_amax(module: nnx.Module, amax: Mapping[Path, jax.Array]) -> None:
    """Attach the result of `amax_of_layers` for one layer to the parameters of its block."""
    for path, value in amax.items():
        param: Any = functools.reduce(getattr, path, module)
        param.set_metadata(_AMAX, value)


_AMAX = "amax"
"""Metadata key of a parameter whose amax is known."""
INPUT_SCALE, GRADIENT_SCALE = 1.0, 2.0**-24
"""Initial scales of delayed scaling, before there is an amax. e4m3 then holds inputs from 0.02 to 448 at full precision; e5m2 holds 4e-12
to 3e-3, the range of gradients of a mean loss over 1e3 to 1e7 tokens."""


class Weight(NamedTuple):
    """A stored (sharded) parameter, and its amax where that is known."""

    w: jax.Array | Int8
    amax: jax.Array | None
    slot: jax.Array | None = None
    """Takes the unreduced gradient (models/deferred_gradients.py); None: it is reduced within its layer."""
    gathered: jax.Array | None = None
    """What was gathered of it before (models/beside_attention.py); None: it is gathered where it is used."""


def weight_of(param: Matrix) -> Weight:
    """Return the stored values of a parameter, its amax if it is known, its slot if it has one, and what was gathered of it before."""
    amax = param.get_metadata().get(_AMAX) if isinstance(param, nnx.Param) else None
    return Weight(values_of(param), amax, slot_of(param), gathered_of(param))


class Gathered(NamedTuple):
    """A parameter all-gathered over fsdp, in the dtype that was communicated, and its scale where that is 8 bits: of float8 a scalar."""

    w: jax.Array
    scale: jax.Array | None


AmaxValues = jax.Array | None
"""As in models.params.Amax: of the input, then of the gradient of each result. None: current scaling."""
Residuals = tuple[jax.Array | None, tuple[Weight, ...], AmaxValues, list[Gathered] | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_major(partitioner: Partitioner, x_BTD: jax.Array) -> jax.Array:
    """Return x, on each device in memory in the order of its dims; its gradient may have any order."""
    spec = partitioner.spec(("batch", "seq", "act_embed"))
    found: jax.Array = on_shards(partitioner, row_major, (spec,), spec)(x_BTD)
    return found


_row_major.defvjp(lambda partitioner, x_BTD: (_row_major(partitioner, x_BTD), None), lambda partitioner, _, gradient: (gradient,))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmuls(
    matmul: Matmul,
    equations: tuple[str, ...],
    axes: tuple[LogicalAxes, ...],
    x: jax.Array,
    weights: tuple[Weight, ...],
    amax: AmaxValues = None,
) -> tuple[jax.Array, ...]:
    return _multiply(matmul, equations, x, [_gather(matmul, *each) for each in zip(axes, weights, strict=True)], amax)


def _matmuls_forward(
    matmul: Matmul,
    equations: tuple[str, ...],
    axes: tuple[LogicalAxes, ...],
    x: jax.Array,
    weights: tuple[Weight, ...],
    amax: AmaxValues = None,
) -> tuple[tuple[jax.Array, ...], Residuals]:
    # Does not call _matmuls: a rematerialization policy has to see the dot and cannot look into a nested custom_vjp.
    gathered = [_gather(matmul, *each) for each in zip(axes, weights, strict=True)]
    read = None if matmul.frozen else x
    return _multiply(matmul, equations, x, gathered, amax), (read, weights, amax, gathered if matmul.save_gathered else None)


def _matmuls_backward(
    matmul: Matmul, equations: tuple[str, ...], axes: tuple[LogicalAxes, ...], residuals: Residuals, dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Weight, ...] | None, AmaxValues]:
    x, weights, amax, saved = residuals
    gathered = saved or [_gather(matmul, *each) for each in zip(axes, weights, strict=True)]
    if x is None:  # frozen; configs/rules.py refuses quantized matmuls
        pairs = zip(equations, gathered, dys, strict=True)
        return functools.reduce(jnp.add, [_input_gradient(matmul, eq, dy, _operand(matmul, w)) for eq, w, dy in pairs]), None, None
    stored = []
    for weight in weights:
        assert not isinstance(weight.w, Int8), "only frozen matrices are stored in 8 bits"
        stored.append(weight.w)
    new_amax = None
    if amax is not None:
        new_amax = jnp.stack([fp8.amax_of_row_shards(matmul.partitioner, operand) for operand in (x, *dys)])
    x = _quantized_input(matmul, x, amax)
    dys = tuple(_quantized_gradient(matmul, dy, amax, index) for index, dy in enumerate(dys))
    each = list(zip(equations, axes, dys, strict=True))
    dx = functools.reduce(
        jnp.add, [_input_gradient(matmul, eq, dy, _operand(matmul, w)) for (eq, _, dy), w in zip(each, gathered, strict=True)]
    )
    if matmul.gradients_first:
        dx, dws = _weight_gradients_first(matmul, dx, x, each, [w.shape for w in stored])
    else:
        dws = [_weight_gradient(matmul, equation, names, x, dy) for equation, names, dy in each]
    return dx, tuple(Weight(dw.astype(w.dtype), None) for dw, w in zip(dws, stored, strict=True)), new_amax


_matmuls.defvjp(_matmuls_forward, _matmuls_backward)


def _gather(matmul: Matmul, axes: LogicalAxes, weight: Weight) -> Gathered:
    """Cast or quantize, then all-gather over fsdp, so that the narrow dtype is communicated."""
    gather = matmul.partitioner.gather_param
    if isinstance(weight.w, Int8):
        # Where the scale is also used on the shards (DoRA's norms), XLA would shard it, and the product with it, and gather the product.
        scale = matmul.partitioner.constrain(weight.w.scale, *scale_axes(weight.w, axes))
        return Gathered(gather(weight.w.stored, *axes), scale)
    if not matmul._quantizes_params:
        return Gathered(gather(weight.w.astype(matmul.compute_dtype), *axes), None)
    q, scale = fp8.quantize(weight.w, fp8.VALUES, weight.amax)
    return Gathered(gather(q, *axes), scale)


def _operand(matmul: Matmul, gathered: Gathered) -> Any:
    """Return a gathered parameter as the kernel reads it."""
    w, scale = gathered
    if scale is not None and w.dtype == jnp.int8:
        return Int8(w, scale).dequantized(matmul.compute_dtype)
    if scale is not None and matmul.block_format is not None:
        return block_scaled.TensorScaled(w, scale)
    return w if scale is None else fp8.dequantize(w, scale, matmul.compute_dtype)


def _quantized_input(matmul: Matmul, x: jax.Array, amax: AmaxValues) -> jax.Array:
    if not matmul.float8:
        return x
    return fp8.quantize_dequantize(matmul.partitioner, x, fp8.VALUES, None if amax is None else amax[0], INPUT_SCALE)


def _quantized_gradient(matmul: Matmul, dy: jax.Array, amax: AmaxValues, index: int) -> jax.Array:
    if not matmul.float8:
        return dy
    return fp8.quantize_dequantize(matmul.partitioner, dy, fp8.GRADIENTS, None if amax is None else amax[1 + index], GRADIENT_SCALE)


def _multiply(
    matmul: Matmul, equations: tuple[str, ...], x: jax.Array, gathered: Sequence[Gathered], amax: AmaxValues
) -> tuple[jax.Array, ...]:
    pairs = list(zip(equations, (_operand(matmul, each) for each in gathered), strict=True))
    if matmul.block_format is not None:
        format = block_scaled.FORMATS[matmul.block_format]
        return tuple(block_scaled.matmul(matmul.partitioner, format, equation, x, w) for equation, w in pairs)
    x = _quantized_input(matmul, x, amax)
    return tuple(dense.matmul(matmul.partitioner, equation, x, w) for equation, w in pairs)


def input_equation(equation: str) -> str:
    """Return the einsum equation of the input's gradient: x,w->y becomes y,w->x."""
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    return f"{y_dims},{w_dims}->{x_dims}"


def weight_equation(equation: str) -> str:
    """Return the einsum equation of the parameter's gradient: x,w->y becomes x,y->w."""
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    return f"{x_dims},{y_dims}->{w_dims}"


def _input_gradient(matmul: Matmul, equation: str, dy: jax.Array, w: Any) -> jax.Array:
    if matmul.block_format is not None:
        return block_scaled.matmul(matmul.partitioner, block_scaled.GRADIENTS, input_equation(equation), dy, w)
    return dense.matmul(matmul.partitioner, input_equation(equation), dy, w)


def _weight_gradient(matmul: Matmul, equation: str, axes: LogicalAxes, x: jax.Array, dy: jax.Array) -> jax.Array:
    equation, dtype = weight_equation(equation), matmul.gradient_dtype
    if matmul.block_format is not None:
        dw = block_scaled.weight_gradient(matmul.partitioner, block_scaled.GRADIENTS, equation, axes, x, dy, dtype)
        return matmul.partitioner.constrain_gradient(dw, *axes)
    # a latent is computed where the residual stream is, and so are some of the narrow vectors of adapters
    tokens = "residual_seq" if {"latent", "stream", "rank"} & set(axes) else "seq"
    dw = dense.weight_gradient(matmul.partitioner, equation, x, dy, dtype, tokens)
    if "rank" in axes:
        # Replicated over tensor: XLA would compute a part on each of its devices, and permute the parts to the shards of fsdp.
        dw = matmul.partitioner.constrain(dw, *(None if axis == "embed" else axis for axis in axes))
    return matmul.partitioner.constrain_gradient(dw, *axes)


def _weight_gradients_first(
    matmul: Matmul, dx: jax.Array, x: jax.Array, each: Sequence[tuple[str, LogicalAxes, jax.Array]], shapes: Sequence[tuple[int, ...]]
) -> tuple[jax.Array, list[jax.Array]]:
    """Return the gradient of a matmul's input, and those of its parameters, which are computed before anything reads the first.

    What reads it does not wait for their reductions over devices. So the weight gradients are computed in `on_shards`, where those of a
    device's own tokens are values. For parameters that are sharded over fsdp alone.

    dx: the gradient of x. each: of each parameter its equation, its logical axes and the gradient of its result. shapes: of the parameters.
    """
    partitioner = matmul.partitioner
    tokens = partitioner.rules.token_axes
    stream = PartitionSpec(partitioner.rules.mesh_axes("batch"), partitioner.rules.mesh_axes("seq"))

    def local(dx: jax.Array, x: jax.Array, dys: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        grads = [_local_weight_gradient(matmul, equation, x, dy) for (equation, _, _), dy in zip(each, dys, strict=True)]
        dx, grads = jax.lax.optimization_barrier((dx, grads))
        return dx, [reduce_gradient(partitioner, dw, axes, tokens) for (_, axes, _), dw in zip(each, grads, strict=True)]

    dys = [dy for _, _, dy in each]
    if partitioner.mesh.size == 1:
        return local(dx, x, dys)
    specs = [partitioner.spec(axes, shape, "gradient") for (_, axes, _), shape in zip(each, shapes, strict=True)]
    run = on_shards(partitioner, local, in_specs=(stream, stream, [stream] * len(dys)), out_specs=(stream, specs))
    dx, dws = run(dx, x, dys)
    return dx, [partitioner.constrain_gradient(dw, *axes) for (_, axes, _), dw in zip(each, dws, strict=True)]


def _local_weight_gradient(matmul: Matmul, equation: str, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Return the gradient of a parameter by the tokens of a device (inside `on_shards`)."""
    equation, dtype = weight_equation(equation), matmul.gradient_dtype
    if matmul.block_format is not None:
        return block_scaled.local_weight_gradient(matmul.partitioner, block_scaled.GRADIENTS, equation, x, dy, dtype)
    return dense.weight_gradient(matmul.partitioner, equation, x, dy, dtype)


# The lookup and its reductions are written by hand (sharding/manual.py): XLA would communicate the whole table when its rows are sharded.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(matmul: Matmul, rows_axis: str, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    return look_up(matmul.partitioner, table_VD.astype(matmul.compute_dtype), ids_BT, rows_axis)


def _look_up_forward(
    matmul: Matmul, rows_axis: str, table_VD: jax.Array, ids_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The empty array carries the table's dtype and number of rows; its values are not needed again.
    return _look_up(matmul, rows_axis, table_VD, ids_BT), (ids_BT, jnp.empty((table_VD.shape[0], 0), table_VD.dtype))


def _look_up_backward(matmul: Matmul, rows_axis: str, residuals: tuple[jax.Array, jax.Array], dx_BTD: jax.Array) -> tuple[jax.Array, None]:
    # Summed in the gradient dtype: in bfloat16 the gradient of a frequent token would stop growing after 256 additions.
    ids_BT, table_like = residuals
    rows, dtype, early = table_like.shape[0], matmul.gradient_dtype, matmul.zeroes_embedding_early
    grad_VD = look_up_gradient(matmul.partitioner, rows, ids_BT, dx_BTD, dtype, rows_axis, early=early)
    return grad_VD.astype(table_like.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
