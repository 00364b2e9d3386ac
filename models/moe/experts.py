"""The routed experts: tokens are sorted by expert, multiplied with the matrices of their experts, and added up again.

Each device sorts tokens by expert (`plan`), multiplies them with the gate and up matrices (`widen`) and, after the activation,
with the down matrix (`narrow`). Both directions of both are written by hand on the shards of a device: permutations are then gathers in
both passes, never scatters, parameters are gathered over fsdp again in the backward pass, and their gradients are reduced once.

With `mesh.expert` each device has E / expert whole experts. The devices of that axis all-gather their tokens, each processes those that
chose its experts, and the results are reduce-scattered. No token is dropped whatever the loads, with buffers of static size: a device
receives each token of its group once, as the padded buffers of an all-to-all would have to provide for, and its experts' buffer has
tokens of the group * min(K, E / expert) rows.

Legend: B rows, T tokens of a row, D embed width, E experts, K experts per token, F hidden width of an expert, S tokens of a
group of devices along `expert`, A = S*K assignments of tokens to experts, R rows of the buffer of a device's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ridgeline.models.matmul import Matmul
from ridgeline.models.moe.grouped_matmul import Capacity, GroupedMatmul
from ridgeline.sharding.manual import active, on_shards, reduce_gradient

if TYPE_CHECKING:
    from ridgeline.sharding.rules import Axes

MATRIX_AXES = ("expert_embed", "experts", "mlp")
"""Logical axes of the gate, up and down matrices, all [D, E, F]: XLA gathers and scatters leading dims without a copy."""
_STREAM = ("batch", "residual_seq", "act_embed")


class Plan(NamedTuple):
    """Where the tokens of each device go, int32; the devices' parts follow each other."""

    assignment_R: jax.Array
    """Assignment in each row of the buffer; A for an empty row."""
    row_A: jax.Array
    """Row of each assignment; R for a dropped one."""
    load_E: jax.Array
    """Assignments of each expert that are not dropped."""


@dataclass(frozen=True)
class Experts:
    """The computation of the routed experts on one mesh. Hashable: a static attribute of the module."""

    matmul: Matmul
    """Dtypes, and whether gathered parameters are saved (models/matmul)."""
    kernel: GroupedMatmul
    experts: int
    per_token: int

    def plan(self, experts_BTK: jax.Array) -> tuple[Plan, jax.Array]:
        """Sort the assignments of each device by expert; return the plan and the number of dropped assignments of each device."""

        def local(experts_BTK: jax.Array) -> tuple[Plan, jax.Array]:
            expert_A = self._gather_tokens(experts_BTK).reshape(-1)
            if self._groups > 1:
                first = jax.lax.axis_index("expert") * self._local
                expert_A = jnp.where((expert_A >= first) & (expert_A < first + self._local), expert_A - first, self._local)
            most = expert_A.shape[0] // self.per_token * min(self.per_token, self._local)
            most = expert_A.shape[0] // self._groups if isinstance(self.kernel, Capacity) else most  # relative to the mean
            plan = _plan(self.kernel, expert_A, self._local, most)
            return plan, (jnp.sum(expert_A < self._local) - jnp.sum(plan.load_E)).astype(jnp.float32)[None]

        run = on_shards(self.matmul.partitioner, local, self._choice_spec, (self._plan_spec, PartitionSpec(self._token_axes)))
        planned: tuple[Plan, jax.Array] = run(experts_BTK)
        return planned

    def widen(self, x_BTD: jax.Array, plan: Plan, params: tuple[nnx.Param, ...]) -> list[jax.Array]:
        """Return the rows of each expert times its matrices [D, E, F]: [R of all devices, F] in the compute dtype.

        x: the normalized residual stream, sharded along the sequence as between blocks.
        """
        return list(_widen(self, x_BTD, plan, tuple(param[...] for param in params)))

    def narrow(self, hidden_RF: jax.Array, weights_BTK: jax.Array, plan: Plan, param: nnx.Param) -> jax.Array:
        """Return the weighted sum of each token's experts [B, T, D]: hidden rows times the matrix [D, E, F] of their expert."""
        y_BTD: jax.Array = _narrow(self, hidden_RF, weights_BTK, plan, param[...])
        return y_BTD

    # What the local functions share.

    @property
    def _groups(self) -> int:
        """Devices over which the experts are divided."""
        return self.matmul.partitioner.axis_size("experts")

    @property
    def _local(self) -> int:
        """Experts of one device."""
        return self.experts // self._groups

    @property
    def _token_axes(self) -> Axes:
        """Mesh axes over which tokens are sharded while experts process them."""
        rules = self.matmul.partitioner.rules
        return (*rules.mesh_axes("batch"), *rules.mesh_axes("seq"))

    @property
    def _scattered(self) -> Axes:
        """Mesh axes that shard the sequence between blocks and not inside of them."""
        partitioner = self.matmul.partitioner
        seq = partitioner.rules.mesh_axes("seq")
        return active(partitioner, tuple(axis for axis in partitioner.rules.mesh_axes("residual_seq") if axis not in seq))

    @property
    def _stream_spec(self) -> PartitionSpec:
        return self.matmul.partitioner.rules.spec(_STREAM)

    @property
    def _choice_spec(self) -> PartitionSpec:
        return self.matmul.partitioner.rules.spec(("batch", "residual_seq", None))

    @property
    def _plan_spec(self) -> Any:
        return PartitionSpec(self._token_axes)  # of each array of a plan

    @property
    def _rows_spec(self) -> PartitionSpec:
        hidden = self.matmul.partitioner.rules.mesh_axes("mlp")
        return PartitionSpec(self._token_axes, hidden or None)

    @property
    def _used_spec(self) -> PartitionSpec:
        return self.matmul.partitioner.rules.spec(MATRIX_AXES, without=("fsdp",))

    def _used(self, param: jax.Array) -> jax.Array:
        """Cast and gather a stored parameter."""
        return self.matmul.partitioner.gather_param(param.astype(self.matmul.compute_dtype), *MATRIX_AXES)

    def _gather_tokens(self, x_BTx: jax.Array) -> jax.Array:
        """All-gather over the shards of the experts, which are further rows, and over those of the sequence."""
        x_BTx = jax.lax.all_gather(x_BTx, "expert", axis=0, tiled=True) if self._groups > 1 else x_BTx
        return jax.lax.all_gather(x_BTx, self._scattered, axis=1, tiled=True) if self._scattered else x_BTx

    def _scatter_tokens(self, x_BTx: jax.Array) -> jax.Array:
        """Add up over the shards of the hidden width and of the experts, and keep the device's part of the sequence and its rows."""
        axes = active(self.matmul.partitioner, self.matmul.partitioner.rules.mesh_axes("mlp"))
        whole = tuple(axis for axis in axes if axis not in self._scattered)
        x_BTx = jax.lax.psum(x_BTx, whole) if whole else x_BTx
        x_BTx = jax.lax.psum_scatter(x_BTx, self._scattered, scatter_dimension=1, tiled=True) if self._scattered else x_BTx
        return jax.lax.psum_scatter(x_BTx, "expert", scatter_dimension=0, tiled=True) if self._groups > 1 else x_BTx

    def _rows(self, x_BTD: jax.Array, plan: Plan) -> jax.Array:
        """Return the token in each row of the buffer; 0 in empty rows."""
        x_SD = x_BTD.reshape(-1, x_BTD.shape[-1])
        return x_SD.at[plan.assignment_R // self.per_token].get(mode="fill", fill_value=0)

    def _assigned(self, rows_Rx: jax.Array, plan: Plan, like_BTx: jax.Array) -> jax.Array:
        """Return the row of each assignment, [B, T, K, ...]; 0 for dropped ones."""
        assigned = rows_Rx.at[plan.row_A].get(mode="fill", fill_value=0)
        return assigned.reshape(*like_BTx.shape[:2], self.per_token, *rows_Rx.shape[1:])

    def _reduced(self, grad: jax.Array) -> jax.Array:
        rows = tuple(axis for axis in self._token_axes if axis != "expert")  # its own experts saw the tokens of all of that axis
        return reduce_gradient(self.matmul.partitioner, grad, MATRIX_AXES, rows)


def _plan(kernel: GroupedMatmul, expert_A: jax.Array, experts: int, most: int) -> Plan:
    """Sort assignments by expert; equal ones keep their order, so that the last tokens are dropped.

    `expert_A` is `experts` for assignments to experts of other devices; at most `most` are not.
    """
    count = expert_A.shape[0]
    rows, limit = kernel.rows(most, experts), kernel.limit(most, experts)
    order_A = jnp.argsort(expert_A, stable=True).astype(jnp.int32)
    sorted_A = expert_A[order_A]
    ends_E = jnp.searchsorted(sorted_A, jnp.arange(experts), side="right", method="scan_unrolled").astype(jnp.int32)
    load_E = jnp.diff(ends_E, prepend=0)
    of_A = jnp.minimum(sorted_A, experts - 1)
    rank_A = jnp.arange(count, dtype=jnp.int32) - (ends_E - load_E)[of_A]
    row_A = kernel.starts(load_E, most).astype(jnp.int32)[of_A] + rank_A
    row_A = jnp.where((rank_A < limit) & (sorted_A < experts), row_A, rows)
    return Plan(
        assignment_R=jnp.full(rows, count, jnp.int32).at[row_A].set(order_A, mode="drop"),
        row_A=jnp.zeros(count, jnp.int32).at[order_A].set(row_A, unique_indices=True),
        load_E=jnp.minimum(load_E, limit),
    )


def _on_shards(experts: Experts, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return on_shards(experts.matmul.partitioner, local, in_specs, out_specs)


Matrices = tuple[jax.Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widen(experts: Experts, x_BTD: jax.Array, plan: Plan, params: Matrices) -> Matrices:
    return _widen_forward(experts, x_BTD, plan, params)[0]


def _widen_forward(experts: Experts, x_BTD: jax.Array, plan: Plan, params: Matrices) -> tuple[Matrices, Any]:
    used = tuple(experts._used(param) for param in params)

    def local(x_BTD: jax.Array, plan: Plan, used: Matrices) -> Matrices:
        x_RD = experts._rows(experts._gather_tokens(x_BTD), plan)
        return tuple(experts.kernel.matmul(x_RD, w_DEF, plan.load_E) for w_DEF in used)

    in_specs = (experts._stream_spec, experts._plan_spec, (experts._used_spec,) * len(params))
    hidden: Matrices = _on_shards(experts, local, in_specs, (experts._rows_spec,) * len(params))(x_BTD, plan, used)
    return hidden, (x_BTD, plan, params, used if experts.matmul.save_gathered else None)


def _widen_backward(experts: Experts, residuals: Any, dhidden: Matrices) -> tuple[jax.Array, None, Matrices]:
    x_BTD, plan, params, saved = residuals
    used = saved or tuple(experts._used(param) for param in params)
    kernel, dtype = experts.kernel, experts.matmul.gradient_dtype

    def local(x_BTD: jax.Array, plan: Plan, used: Matrices, dhidden: Matrices) -> tuple[jax.Array, Matrices]:
        x_BTD = experts._gather_tokens(x_BTD)
        x_RD = experts._rows(x_BTD, plan)
        dws = tuple(experts._reduced(kernel.outer(x_RD, dh_RF, plan.load_E, dtype)) for dh_RF in dhidden)
        parts = [kernel.matmul(dh_RF, w_DEF, plan.load_E, transposed=True) for dh_RF, w_DEF in zip(dhidden, used, strict=True)]
        dx_RD = sum(parts[1:], parts[0])
        dx_BTD = jnp.sum(experts._assigned(dx_RD, plan, x_BTD), 2, dtype=jnp.float32).astype(x_BTD.dtype)
        return experts._scatter_tokens(dx_BTD), dws

    count = len(params)
    in_specs = (experts._stream_spec, experts._plan_spec, (experts._used_spec,) * count, (experts._rows_spec,) * count)
    out_specs = (experts._stream_spec, (experts.matmul.partitioner.rules.spec(MATRIX_AXES),) * count)
    dx_BTD, dws = _on_shards(experts, local, in_specs, out_specs)(x_BTD, plan, used, dhidden)
    return dx_BTD, None, tuple(dw.astype(param.dtype) for dw, param in zip(dws, params, strict=True))


_widen.defvjp(_widen_forward, _widen_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(experts: Experts, hidden_RF: jax.Array, weights_BTK: jax.Array, plan: Plan, param: jax.Array) -> jax.Array:
    return _narrow_forward(experts, hidden_RF, weights_BTK, plan, param)[0]


def _narrow_forward(experts: Experts, hidden_RF: jax.Array, weights_BTK: jax.Array, plan: Plan, param: jax.Array) -> tuple[jax.Array, Any]:
    used = experts._used(param)

    def local(hidden_RF: jax.Array, weights_BTK: jax.Array, plan: Plan, w_DEF: jax.Array) -> jax.Array:
        weights_BTK = experts._gather_tokens(weights_BTK)
        y_RD = experts.kernel.matmul(hidden_RF, w_DEF, plan.load_E, transposed=True)
        y_BTD = jnp.sum(experts._assigned(y_RD, plan, weights_BTK) * weights_BTK[..., None], 2)
        return experts._scatter_tokens(y_BTD.astype(hidden_RF.dtype))

    in_specs = (experts._rows_spec, experts._choice_spec, experts._plan_spec, experts._used_spec)
    y_BTD: jax.Array = _on_shards(experts, local, in_specs, experts._stream_spec)(hidden_RF, weights_BTK, plan, used)
    return y_BTD, (hidden_RF, weights_BTK, plan, param, used if experts.matmul.save_gathered else None)


def _narrow_backward(experts: Experts, residuals: Any, dy_BTD: jax.Array) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    hidden_RF, weights_BTK, plan, param, saved = residuals
    used = experts._used(param) if saved is None else saved
    kernel, dtype = experts.kernel, experts.matmul.gradient_dtype

    def local(
        hidden_RF: jax.Array, weights_BTK: jax.Array, plan: Plan, w_DEF: jax.Array, dy_BTD: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        weights_BTK = experts._gather_tokens(weights_BTK)
        weight_R = weights_BTK.reshape(-1).at[plan.assignment_R].get(mode="fill", fill_value=0)[:, None]
        dy_RD = experts._rows(experts._gather_tokens(dy_BTD), plan)
        # The weight's gradient needs the expert's result times dy: hidden W dy, which is hidden times the gradient of hidden.
        unweighted_RF = kernel.matmul(dy_RD, w_DEF, plan.load_E)
        dweight_R = jnp.sum(unweighted_RF.astype(jnp.float32) * hidden_RF, -1)
        dweights_BTK = experts._scatter_tokens(experts._assigned(dweight_R, plan, weights_BTK))
        dw_DEF = kernel.outer((dy_RD * weight_R).astype(dy_RD.dtype), hidden_RF, plan.load_E, dtype)
        return (unweighted_RF * weight_R).astype(hidden_RF.dtype), dweights_BTK, experts._reduced(dw_DEF)

    in_specs = (experts._rows_spec, experts._choice_spec, experts._plan_spec, experts._used_spec, experts._stream_spec)
    out_specs = (experts._rows_spec, experts._choice_spec, experts.matmul.partitioner.rules.spec(MATRIX_AXES))
    run = _on_shards(experts, local, in_specs, out_specs)
    dhidden_RF, dweights_BTK, dw_DEF = run(hidden_RF, weights_BTK, plan, used, dy_BTD)
    return dhidden_RF, dweights_BTK, None, dw_DEF.astype(param.dtype)


_narrow.defvjp(_narrow_forward, _narrow_backward)
