"""The routed experts: tokens are sorted by expert, multiplied with the matrices of their experts, and added up again.

Each device brings its tokens to the devices of their experts (models/moe/exchange.py) and sorts them by expert (`plan`), multiplies them
with the gate and up matrices (`widen`) and, after the activation, with the down matrix (`narrow`). Both directions of both are written by
hand on the shards of a device: permutations are then gathers in both passes, never scatters, parameters are gathered over fsdp again in the
backward pass, and their gradients are reduced once.

With `mesh.expert` each device has E / expert whole experts. No token is dropped whatever the loads, with buffers of static size: a device
has a slot for each token of its group, and its experts' buffer has tokens of the group * min(K, E / expert) rows. With a capacity, each
device drops what its own tokens choose beyond it, so that the drops do not depend on the exchange.

Legend: B rows, T tokens of a row, D embed width, E experts, K experts per token, F hidden width of an expert, S tokens of a device
(with sequence parallelism: of its part of the sequence), G slots for the tokens of a group of devices, A = G*K assignments of tokens to
experts, R rows of the buffer of a device's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.models.activation import ExpertActivation
from ridgeline.models.int8 import Int8, Matrix
from ridgeline.models.matmul import Matmul, Weight, fp8, weight_of
from ridgeline.models.moe.adapters import A_AXES, B_AXES, ExpertAdapter, Pair, added, gradients, input_gradient
from ridgeline.models.moe.exchange import Exchange, Route
from ridgeline.models.moe.float8 import Operand, Quantized, matmul, outer, quantize, quantize_experts
from ridgeline.models.moe.grouped_matmul import GroupedMatmul
from ridgeline.planner.experts import capacity
from ridgeline.sharding.manual import on_shards, reduce_gradient, summed_over, unreduced_spec

if TYPE_CHECKING:
    from ridgeline.sharding.rules import Axes

MATRIX_AXES = ("expert_embed", "experts", "mlp")
"""Logical axes of the gate, up and down matrices, all [D, E, F]: XLA gathers and scatters leading dims without a copy."""
GRADIENT_INPUTS = ("batch", "seq")
"""Logical axes of the dims of tokens that the gradients of these matrices are summed over."""
_STREAM = ("batch", "residual_seq", "act_embed")
Gathered = jax.Array | Int8 | Quantized
"""A parameter as it is communicated."""


class Plan(NamedTuple):
    """Where the tokens of each device go; the devices' parts follow each other."""

    route: Route
    """To which devices, and back."""
    weights_GK: jax.Array
    """Weights of the assignments of each slot, float32; without a gradient."""
    assignment_R: jax.Array
    """Assignment in each row of the buffer; A for an empty row. int32, as the others."""
    row_A: jax.Array
    """Row of each assignment; R for one to an expert of another device, and a dropped one."""
    load_E: jax.Array
    """Assignments of each expert that are not dropped."""

    @property
    def row_weights(self) -> jax.Array:
        """Weight of the assignment in each row of a device's buffer; 0 in empty rows."""
        return self.weights_GK.reshape(-1).at[self.assignment_R].get(mode="fill", fill_value=0)


@dataclass(frozen=True)
class Experts:
    """The computation of the routed experts on one mesh. Hashable: a static attribute of the module."""

    matmul: Matmul
    """Dtypes, and whether gathered parameters are saved (models/matmul)."""
    kernel: GroupedMatmul
    experts: int
    per_token: int
    exchange: Exchange
    activation: ExpertActivation
    capacity_factor: float | None = None
    adapter_scale: float = 1.0
    """Factor of the adapters' products (lora)."""
    defers: bool = False
    """Gradients of matrices are returned unreduced, for their slots (models/deferred_gradients.py)."""

    def plan(self, experts_BTK: jax.Array, weights_BTK: jax.Array) -> tuple[Plan, jax.Array]:
        """Sort the assignments of each device by expert; return the plan and the number of dropped assignments of each device."""

        def local(experts_BTK: jax.Array, weights_BTK: jax.Array) -> tuple[Plan, jax.Array]:
            expert_SK = experts_BTK.reshape(-1, self.per_token)
            most = self.exchange.sources * expert_SK.shape[0] * min(self.per_token, self._local)
            if self.capacity_factor is not None:
                limit = capacity(expert_SK.shape[0], self.experts, self.per_token, self.capacity_factor)
                expert_SK = _within(expert_SK, self.experts, limit)
                most = self.exchange.sources * limit * self._local
            route = self.exchange.route(expert_SK)
            # One transfer for both: 0 in an empty slot, as in all transfers, is an expert before the first.
            bits_SK = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(weights_BTK), jnp.int32).reshape(expert_SK.shape)
            both_GK = self.exchange.dispatch(jnp.concatenate([expert_SK + 1, bits_SK], -1), route)
            expert_GK, bits_GK = jnp.split(both_GK, 2, -1)
            own_A = expert_GK.reshape(-1) - 1
            if self.exchange.groups > 1:
                own_A -= jax.lax.axis_index("expert") * self._local
            own_A = jnp.where((own_A >= 0) & (own_A < self._local), own_A, self._local)
            placed = _place(self.kernel, own_A, self._local, most)
            dropped = jnp.sum(expert_SK == self.experts).astype(jnp.float32)[None]
            return Plan(route, jax.lax.bitcast_convert_type(bits_GK, jnp.float32), *placed), dropped

        out_specs = (self._plan_spec, PartitionSpec(self._source_axes))
        run = on_shards(self.matmul.partitioner, local, (self._choice_spec, self._choice_spec), out_specs)
        planned: tuple[Plan, jax.Array] = run(experts_BTK, weights_BTK)
        return planned

    def widen(
        self, x_BTD: jax.Array, plan: Plan, params: tuple[Matrix, ...], adapters: Sequence[ExpertAdapter | None] = ()
    ) -> list[jax.Array]:
        """Return the rows of each expert times its matrices [D, E, F]: [R of all devices, F] in the compute dtype.

        x: the normalized residual stream, sharded along the sequence as between blocks; adapters: of each matrix.
        """
        pairs = tuple(None if adapter is None else adapter.pair for adapter in adapters or (None,) * len(params))
        weights = tuple(weight_of(param) for param in params)
        return list(_widen(self._for(weights[0]), x_BTD, plan, weights, pairs))

    def narrow(
        self, wide_RF: Sequence[jax.Array], weights_BTK: jax.Array, plan: Plan, param: Matrix, adapter: ExpertAdapter | None = None
    ) -> jax.Array:
        """Return the weighted sum of each token's experts [B, T, D]: hidden rows times the matrix [D, E, F] of their expert.

        wide: the rows times the up and gate matrices. Only they are saved for the backward pass, as in the MLP.
        """
        weight = weight_of(param)
        y_BTD: jax.Array = _narrow(self._for(weight), tuple(wide_RF), weights_BTK, plan, weight, None if adapter is None else adapter.pair)
        return y_BTD

    def gather(self, params: Sequence[Matrix], after: jax.Array) -> tuple[jax.Array, list[Gathered]]:
        """Return an array as it is, and matrices gathered over fsdp, without a gradient; the gather begins when that array is there."""
        after, sent = together(after, [self._sent(weight_of(param)) for param in params])
        return after, [self._over_fsdp(each) for each in sent]

    # What the local functions share.

    def _for(self, weight: Weight) -> Experts:
        return replace(self, defers=weight.slot is not None)

    @property
    def _local(self) -> int:
        """Experts of one device."""
        return self.experts // self.exchange.groups

    @property
    def _token_axes(self) -> Axes:
        """Mesh axes over which tokens are sharded while experts process them."""
        rules = self.matmul.partitioner.rules
        return (*rules.mesh_axes("batch"), *rules.mesh_axes("seq"))

    @property
    def _source_axes(self) -> Axes:
        """Mesh axes over which tokens are sharded between blocks."""
        rules = self.matmul.partitioner.rules
        return (*rules.mesh_axes("batch"), *rules.mesh_axes("residual_seq"))

    @property
    def _stream_spec(self) -> PartitionSpec:
        return self.matmul.partitioner.rules.spec(_STREAM)

    @property
    def _choice_spec(self) -> PartitionSpec:
        return self.matmul.partitioner.rules.spec(("batch", "residual_seq", None))

    @property
    def _plan_spec(self) -> Any:
        return Plan(PartitionSpec(self._source_axes), *[PartitionSpec(self._token_axes)] * 4)  # type: ignore[arg-type]

    @property
    def _rows_spec(self) -> PartitionSpec:
        hidden = self.matmul.partitioner.rules.mesh_axes("mlp")
        return PartitionSpec(self._token_axes, hidden or None)

    @property
    def _used_spec(self) -> Any:
        rules = self.matmul.partitioner.rules
        spec = rules.spec(MATRIX_AXES, without=("fsdp",))
        return Quantized(spec, rules.spec(("experts",))) if self.matmul.float8 else spec  # type: ignore[arg-type]

    def _gathered(self, param: Weight) -> Gathered:
        """Return a stored parameter, cast or quantized (one in 8 bits as it is), gathered over fsdp."""
        return self._over_fsdp(self._sent(param)) if param.gathered is None else param.gathered

    def _sent(self, param: Weight) -> Gathered:
        """Return the device's part of what is gathered of a parameter."""
        if isinstance(param.w, Int8):
            return param.w
        return quantize_experts(param.w, param.amax) if self.matmul.float8 else param.w.astype(self.matmul.compute_dtype)

    def _over_fsdp(self, sent: Gathered) -> Gathered:
        gather = self.matmul.partitioner.gather_param
        if isinstance(sent, Int8):
            return Int8(gather(sent.stored, *MATRIX_AXES), sent.scale)
        if isinstance(sent, Quantized):
            return Quantized(gather(sent.values, *MATRIX_AXES), sent.scale)
        return gather(sent, *MATRIX_AXES)

    def _operand(self, x: jax.Array, dtype: jnp.dtype) -> Operand:
        """Return what the kernel multiplies: x, or in float8 with one scale for this device."""
        return quantize(x, dtype) if self.matmul.float8 else x

    def _used(self, gathered: Gathered) -> Operand:
        """Return a gathered parameter in the compute dtype, or quantized."""
        return gathered.dequantized(self.matmul.compute_dtype) if isinstance(gathered, Int8) else gathered

    def _used_pair(self, pair: Pair | None, *, down: bool) -> Pair | None:
        """Cast and gather the stored adapters of a matrix."""
        if pair is None:
            return None
        gather, dtype = self.matmul.partitioner.gather_param, self.matmul.compute_dtype
        return Pair(gather(pair.a.astype(dtype), *A_AXES[down]), gather(pair.b.astype(dtype), *B_AXES[down]))

    def _pair_spec(self, pair: Pair | None, *, down: bool, stored: bool = False) -> Pair | None:
        if pair is None:
            return None
        spec = partial(self.matmul.partitioner.rules.spec, without=() if stored else ("fsdp",))
        return Pair(spec(A_AXES[down]), spec(B_AXES[down]))  # type: ignore[arg-type]

    def _reduced_pair(self, pair: Pair, *, down: bool) -> Pair:
        """Sum the gradients over the devices; the side of the residual stream is a partial sum over those that share the hidden dim."""
        partitioner = self.matmul.partitioner
        both = (*self._row_axes, *partitioner.rules.mesh_axes("mlp"))
        over_a, over_b = (self._row_axes, both) if down else (both, self._row_axes)
        return Pair(reduce_gradient(partitioner, pair.a, A_AXES[down], over_a), reduce_gradient(partitioner, pair.b, B_AXES[down], over_b))

    def _rows(self, x_BTD: jax.Array, plan: Plan) -> jax.Array:
        """Return the token in each row of the buffer; 0 in empty rows."""
        return self._in_rows(self._received(x_BTD, plan), plan)

    def _received(self, x_BTD: jax.Array, plan: Plan) -> jax.Array:
        """Return the tokens in the slots of the group, [G, D]."""
        return self.exchange.dispatch(x_BTD.reshape(-1, x_BTD.shape[-1]), plan.route)

    def _in_rows(self, x_GD: jax.Array, plan: Plan) -> jax.Array:
        return x_GD.at[plan.assignment_R // self.per_token].get(mode="fill", fill_value=0)

    def _operand_rows(self, x_BTD: jax.Array, plan: Plan, dtype: jnp.dtype) -> Operand:
        """Return the operand of the token in each row of the buffer, quantized once per token; 0 in empty rows."""
        if not self.matmul.float8:
            return self._rows(x_BTD, plan)
        x_GD = quantize(self._received(x_BTD, plan), dtype)
        return x_GD._replace(values=self._in_rows(x_GD.values, plan))

    def _assigned(self, rows_Rx: jax.Array, plan: Plan) -> jax.Array:
        """Return the row of each assignment, [G, K, ...]; 0 for those that have none here."""
        assigned = rows_Rx.at[plan.row_A].get(mode="fill", fill_value=0)
        return assigned.reshape(-1, self.per_token, *rows_Rx.shape[1:])

    def _back(self, y_Gx: jax.Array, plan: Plan, like_BTx: jax.Array) -> jax.Array:
        """Return the sum of each token's slots, of all devices, [B, T, ...]."""
        return self.exchange.combine(y_Gx, plan.route).reshape(*like_BTx.shape[:2], *y_Gx.shape[1:])

    @property
    def _row_axes(self) -> Axes:
        """Mesh axes whose devices have a part of the gradients of the same experts, which saw the tokens of all devices of `expert`."""
        return summed_over(self.matmul.partitioner, MATRIX_AXES, GRADIENT_INPUTS)

    @property
    def _gradient_spec(self) -> PartitionSpec:
        partitioner = self.matmul.partitioner
        return unreduced_spec(partitioner, MATRIX_AXES, self._row_axes) if self.defers else partitioner.rules.spec(MATRIX_AXES)

    def _reduced(self, grad: jax.Array) -> jax.Array:
        """Return the gradient of a matrix as it leaves the shards: summed, or for its slot."""
        return grad[None] if self.defers else reduce_gradient(self.matmul.partitioner, grad, MATRIX_AXES, self._row_axes)


def _within(expert_SK: jax.Array, experts: int, limit: int) -> jax.Array:
    """Replace all but the first `limit` assignments to each expert by `experts`: the last tokens are dropped."""
    expert_A = expert_SK.reshape(-1)
    order_A = jnp.argsort(expert_A, stable=True)
    sorted_A = expert_A[order_A]
    rank_A = jnp.arange(expert_A.size) - jnp.searchsorted(sorted_A, sorted_A, side="left", method="sort")
    kept_A = jnp.zeros(expert_A.size, bool).at[order_A].set(rank_A < limit, unique_indices=True)
    return jnp.where(kept_A, expert_A, experts).reshape(expert_SK.shape)


def _place(kernel: GroupedMatmul, expert_A: jax.Array, experts: int, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort assignments by expert; return the plan's assignment_R, row_A and load_E.

    `expert_A` is `experts` for assignments that have no row; at most `most` have one, and of an expert at most the kernel's limit.
    """
    count, rows = expert_A.shape[0], kernel.rows(most, experts)
    order_A = jnp.argsort(expert_A, stable=True).astype(jnp.int32)
    sorted_A = expert_A[order_A]
    ends_E = jnp.searchsorted(sorted_A, jnp.arange(experts), side="right", method="scan_unrolled").astype(jnp.int32)
    load_E = jnp.diff(ends_E, prepend=0)
    of_A = jnp.minimum(sorted_A, experts - 1)
    rank_A = jnp.arange(count, dtype=jnp.int32) - (ends_E - load_E)[of_A]
    row_A = kernel.starts(load_E, most).astype(jnp.int32)[of_A] + rank_A
    row_A = jnp.where(sorted_A < experts, row_A, rows)
    return (
        jnp.full(rows, count, jnp.int32).at[row_A].set(order_A, mode="drop"),
        jnp.zeros(count, jnp.int32).at[order_A].set(row_A, unique_indices=True),
        load_E,
    )


def _on_shards(experts: Experts, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return on_shards(experts.matmul.partitioner, local, in_specs, out_specs)


Matrices = tuple[jax.Array, ...]
Weights = tuple[Weight, ...]
Operands = tuple[Operand, ...]
Pairs = tuple[Pair | None, ...]
"""Adapters of matrices."""
Tree = TypeVar("Tree")


def _exact(x: Operand) -> jax.Array:
    """Return an operand as an array: float8 values in bfloat16 times their scale."""
    return fp8.dequantize(x.values, x.scale, jnp.dtype(jnp.bfloat16)) if isinstance(x, Quantized) else x


@jax.custom_vjp
def together(x: jax.Array, others: Tree) -> tuple[jax.Array, Tree]:
    """Return both arguments; nothing reads one of them before all are there. Only x has a gradient, which waits for nothing."""
    both: tuple[jax.Array, Tree] = jax.lax.optimization_barrier((x, others))
    return both


together.defvjp(lambda x, others: (together(x, others), None), lambda _, gradients: (gradients[0], None))


def _gradient_of(experts: Experts, param: Weight, grad: jax.Array) -> Weight:
    assert not isinstance(param.w, Int8), "only frozen matrices are stored in 8 bits"
    return Weight(None, None, grad) if experts.defers else Weight(grad.astype(param.w.dtype), None)  # type: ignore[arg-type]


def _without_slot(param: Weight) -> Weight:
    """Return what the backward pass reads: slots of all layers would be saved."""
    return param._replace(slot=None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widen(experts: Experts, x_BTD: jax.Array, plan: Plan, params: Weights, pairs: Pairs) -> Matrices:
    return _widen_forward(experts, x_BTD, plan, params, pairs)[0]


def _widen_forward(experts: Experts, x_BTD: jax.Array, plan: Plan, params: Weights, pairs: Pairs) -> tuple[Matrices, Any]:
    gathered = tuple(experts._gathered(param) for param in params)
    used = tuple(map(experts._used, gathered))
    used_pairs = tuple(experts._used_pair(pair, down=False) for pair in pairs)
    kernel, scale = experts.kernel, experts.adapter_scale

    def local(x_BTD: jax.Array, plan: Plan, used: Operands, pairs: Pairs) -> Matrices:
        x_RD = experts._operand_rows(x_BTD, plan, fp8.VALUES)
        wide = [matmul(kernel, x_RD, w_DEF, plan.load_E) for w_DEF in used]
        return tuple(
            h_RF if pair is None else h_RF + added(kernel, scale, _exact(x_RD), pair, plan.load_E)
            for h_RF, pair in zip(wide, pairs, strict=True)
        )

    pair_specs = tuple(experts._pair_spec(pair, down=False) for pair in pairs)
    in_specs = (experts._stream_spec, experts._plan_spec, (experts._used_spec,) * len(params), pair_specs)
    hidden: Matrices = _on_shards(experts, local, in_specs, (experts._rows_spec,) * len(params))(x_BTD, plan, used, used_pairs)
    return hidden, (x_BTD, plan, tuple(map(_without_slot, params)), pairs, gathered if experts.matmul.save_gathered else None)


def _widen_backward(experts: Experts, residuals: Any, dhidden: Matrices) -> tuple[jax.Array, None, Weights | None, Pairs]:
    x_BTD, plan, params, pairs, saved = residuals
    used = tuple(map(experts._used, saved or tuple(experts._gathered(param) for param in params)))
    used_pairs = tuple(experts._used_pair(pair, down=False) for pair in pairs)
    kernel, dtype, scale = experts.kernel, experts.matmul.gradient_dtype, experts.adapter_scale

    def local(x_BTD: jax.Array, plan: Plan, used: Operands, pairs: Pairs, dhidden: Matrices) -> tuple[jax.Array, Matrices, Pairs]:
        x_RD = experts._operand_rows(x_BTD, plan, fp8.VALUES)
        exact_RD, operands = _exact(x_RD), tuple(experts._operand(dh_RF, fp8.GRADIENTS) for dh_RF in dhidden)
        unreduced = tuple(outer(kernel, x_RD, dh_RF, plan.load_E, dtype) for dh_RF in operands if not experts.matmul.frozen)
        # Where rows are wider than hidden activations, before the gradients of the rows: their inputs are free then (Qwen3 30B, context=4 x
        # expert=8, block inputs in host memory: 55.4 GB without, 42.7 with it, and the same step). In 8 bits only where no exchange of
        # gradients would hide them (tensor=4 x expert=2, fp8_delayed, attention-only: 1 % less memory, the step 3 % slower).
        first = x_BTD.shape[-1] > dhidden[0].shape[-1] and not (experts.matmul.float8 and experts.exchange.moves_tokens)
        if first:
            operands, unreduced = tie_weight_gradients(operands, unreduced, (x_RD, operands[0]))
        dpairs = tuple(
            None if pair is None else experts._reduced_pair(gradients(kernel, scale, exact_RD, dh_RF, pair, plan.load_E, dtype), down=False)
            for pair, dh_RF in zip(pairs, dhidden, strict=True)
        )
        # Each matrix's part of the gradient is added up in the slots, so that no sum of rows is stored.
        parts_RD = [matmul(kernel, dh_RF, w_DEF, plan.load_E, transposed=True) for dh_RF, w_DEF in zip(operands, used, strict=True)]
        parts_RD += [
            input_gradient(kernel, scale, dh_RF, pair, plan.load_E) for dh_RF, pair in zip(dhidden, pairs, strict=True) if pair is not None
        ]
        parts_GD = [jnp.sum(experts._assigned(dx_RD, plan), 1, dtype=jnp.float32) for dx_RD in parts_RD]
        dx_BTD = experts._back(sum(parts_GD[1:], parts_GD[0]).astype(x_BTD.dtype), plan, x_BTD)
        if not first:
            dx_BTD, unreduced = tie_weight_gradients(dx_BTD, unreduced, (x_RD, operands[0]))
        return dx_BTD, tuple(map(experts._reduced, unreduced)), dpairs

    count = len(params)
    pair_specs, stored = (tuple(experts._pair_spec(pair, down=False, stored=s) for pair in pairs) for s in (False, True))
    in_specs = (experts._stream_spec, experts._plan_spec, (experts._used_spec,) * count, pair_specs, (experts._rows_spec,) * count)
    of_matrices = () if experts.matmul.frozen else (experts._gradient_spec,) * count
    run = _on_shards(experts, local, in_specs, (experts._stream_spec, of_matrices, stored))
    dx_BTD, dws, dpairs = run(x_BTD, plan, used, used_pairs, dhidden)
    dparams = None if experts.matmul.frozen else tuple(map(partial(_gradient_of, experts), params, dws))
    return dx_BTD, None, dparams, jax.tree.map(lambda grad, stored: grad.astype(stored.dtype), dpairs, pairs)


_widen.defvjp(_widen_forward, _widen_backward)


def tie_weight_gradients(gradient: Tree, unreduced: Matrices, operands: Any) -> tuple[Tree, Matrices]:
    """Return the first two arguments, such that nothing reads the first before both are computed. All are of one device.

    gradient: arrays that the backward pass goes on with. unreduced: weight gradients of a layer before their reduction, of equal sizes.
    operands: what one of them is computed from. XLA's scheduler has no times for grouped matmuls: without this it computes the weight
    gradients of several layers together, and keeps their operands until then (up to half of a step's memory). Not done where operands have
    fewer elements than the gradient has bytes: 16-bit ones are then less than twice as large, and little or nothing would be saved.
    Reductions may still come later.
    """
    if unreduced and sum(each.size for each in jax.tree.leaves(operands)) > unreduced[0].size * unreduced[0].dtype.itemsize:
        gradient, unreduced = jax.lax.optimization_barrier((gradient, unreduced))
    return gradient, unreduced


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(experts: Experts, wide_RF: Matrices, weights_BTK: jax.Array, plan: Plan, param: Weight, pair: Pair | None) -> jax.Array:
    return _narrow_forward(experts, wide_RF, weights_BTK, plan, param, pair)[0]


def _narrow_forward(
    experts: Experts, wide_RF: Matrices, weights_BTK: jax.Array, plan: Plan, param: Weight, pair: Pair | None
) -> tuple[jax.Array, Any]:
    gathered, used_pair = experts._gathered(param), experts._used_pair(pair, down=True)
    used = experts._used(gathered)

    def local(wide_RF: Matrices, weights_BTK: jax.Array, plan: Plan, w_DEF: Operand, pair: Pair | None) -> jax.Array:
        hidden_RF = experts.activation(wide_RF, plan.row_weights[:, None])
        y_RD = matmul(experts.kernel, experts._operand(hidden_RF, fp8.VALUES), w_DEF, plan.load_E, transposed=True)
        if pair is not None:
            y_RD += added(experts.kernel, experts.adapter_scale, hidden_RF, pair, plan.load_E)
        y_GKD = experts._assigned(y_RD, plan)
        y_GKD = y_GKD if experts.activation.scale_input else y_GKD * plan.weights_GK[..., None]
        y_GD = jnp.sum(y_GKD, 1, dtype=jnp.float32)
        return experts._back(y_GD.astype(hidden_RF.dtype), plan, weights_BTK)

    pair_spec = experts._pair_spec(pair, down=True)
    wide_specs = (experts._rows_spec,) * len(wide_RF)
    in_specs = (wide_specs, experts._choice_spec, experts._plan_spec, experts._used_spec, pair_spec)
    y_BTD: jax.Array = _on_shards(experts, local, in_specs, experts._stream_spec)(wide_RF, weights_BTK, plan, used, used_pair)
    return y_BTD, (wide_RF, plan, _without_slot(param), pair, gathered if experts.matmul.save_gathered else None)


def _narrow_backward(experts: Experts, residuals: Any, dy_BTD: jax.Array) -> tuple[Matrices, jax.Array, None, Weight | None, Pair | None]:
    wide_RF, plan, param, pair, saved = residuals
    used, used_pair = experts._used(experts._gathered(param) if saved is None else saved), experts._used_pair(pair, down=True)
    kernel, dtype, scale = experts.kernel, experts.matmul.gradient_dtype, experts.adapter_scale

    def local(
        wide_RF: Matrices, plan: Plan, w_DEF: Operand, pair: Pair | None, dy_BTD: jax.Array
    ) -> tuple[Matrices, jax.Array, jax.Array | None, Pair | None]:
        dy_operand_RD = experts._operand_rows(dy_BTD, plan, fp8.GRADIENTS)
        # The weight's gradient needs the expert's result times dy: hidden W dy, which is hidden times the gradient of hidden.
        dresult_RF = matmul(kernel, dy_operand_RD, w_DEF, plan.load_E)
        dy_RD = _exact(dy_operand_RD)
        if pair is not None:
            dresult_RF += input_gradient(kernel, scale, dy_RD, pair, plan.load_E)
        # The weights are multiplied into the smaller array, or into the one that is not quantized yet.
        weighted = experts.activation.scale_input or experts.matmul.float8 or dy_RD.shape[-1] > dresult_RF.shape[-1]
        dwide_RF, right_RF, dweight_R = experts.activation.gradients(wide_RF, dresult_RF, plan.row_weights, weighted=weighted)
        left_RD = dy_RD if weighted else (dy_RD * plan.row_weights[:, None]).astype(dy_RD.dtype)
        dweights_BTK = experts._back(experts._assigned(dweight_R, plan), plan, dy_BTD)
        left = dy_operand_RD if experts.matmul.float8 else left_RD
        right = experts._operand(right_RF, fp8.VALUES)
        dw_DEF = None
        if not experts.matmul.frozen:
            unreduced: Matrices = (outer(kernel, left, right, plan.load_E, dtype),)
            dweights_BTK, unreduced = tie_weight_gradients(dweights_BTK, unreduced, (left, right))
            dw_DEF = experts._reduced(unreduced[0])
        dpair = None
        if pair is not None:
            dpair = experts._reduced_pair(gradients(kernel, scale, right_RF, left_RD, pair, plan.load_E, dtype), down=True)
        return dwide_RF, dweights_BTK, dw_DEF, dpair

    pair_spec, stored = (experts._pair_spec(pair, down=True, stored=s) for s in (False, True))
    wide_specs = (experts._rows_spec,) * len(wide_RF)
    in_specs = (wide_specs, experts._plan_spec, experts._used_spec, pair_spec, experts._stream_spec)
    of_matrix = None if experts.matmul.frozen else experts._gradient_spec
    run = _on_shards(experts, local, in_specs, (wide_specs, experts._choice_spec, of_matrix, stored))
    dwide_RF, dweights_BTK, dw_DEF, dpair = run(wide_RF, plan, used, used_pair, dy_BTD)
    dparam = None if dw_DEF is None else _gradient_of(experts, param, dw_DEF)
    return dwide_RF, dweights_BTK, None, dparam, jax.tree.map(lambda grad, stored: grad.astype(stored.dtype), dpair, pair)


_narrow.defvjp(_narrow_forward, _narrow_backward)
