"""Activation functions of MLPs and experts, and the kernel that computes those of experts backward.

Legend: R rows of the experts' buffers, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}
ROWS, COLUMNS = 8, 256
"""Tile of the kernel: 16 elements of each array for each of 128 threads."""


def activated(activation: str, clamp: float | None, up_F: jax.Array, *gate_F: jax.Array) -> jax.Array:
    """Return the hidden values of an MLP or an expert: the activation of `up`, or that of `gate` times `up` (clamp: model.mlp_clamp)."""
    act = ACTIVATIONS[activation]
    if not gate_F:
        return act(up_F)
    if clamp is None:
        return act(gate_F[0]) * up_F
    return act(jnp.minimum(gate_F[0], clamp)) * (jnp.clip(up_F, -clamp, clamp) + 1)


class HiddenGradients(NamedTuple):
    """What the backward pass of the experts' activation computes."""

    wide_RF: tuple[jax.Array, ...]
    """Gradients of the rows times the up and gate matrices."""
    hidden_RF: jax.Array
    """Hidden values."""
    weight_R: jax.Array
    """Gradients of the weights of the rows, float32."""


@dataclass(frozen=True)
class ExpertActivation:
    """Hidden values of experts as a function of the rows times the up and gate matrices. Hashable."""

    name: str
    """model.activation."""
    clamp: float | None = None
    """model.mlp_clamp."""
    scale_input: bool = False
    """model.moe.scale_input: the rows are multiplied by their weights before the activation, and not after it.

    The gate and up projections have no nonlinearity before them, so that their results are multiplied: (w x) W = w (x W). The transfers are
    those of weighted results: no row of tokens is stored twice, and the gradients of the weights go back once.
    """
    in_place: bool = False
    """Gradients are computed by a kernel that writes them in the place of what it reads.

    XLA makes one or two kernels of the backward pass, and gives their results memory of their own in some steps: up to seven arrays of the
    rows and the hidden width are live then, not three.
    """
    interpret: bool = False
    """Use Pallas's interpreter on any platform, for tests."""

    def __call__(self, wide_RF: Sequence[jax.Array], weight_R1: jax.Array) -> jax.Array:
        """Return the hidden values, which are weighted if the input is, in the dtype of `wide_RF`; weight: of each row, float32."""
        if self.scale_input:
            wide_RF = [(h_RF * weight_R1).astype(h_RF.dtype) for h_RF in wide_RF]
        return activated(self.name, self.clamp, *wide_RF)

    def gradients(self, wide_RF: tuple[jax.Array, ...], dresult_RF: jax.Array, weight_R: jax.Array, *, weighted: bool) -> HiddenGradients:
        """Return what the backward pass goes on with.

        Args:
          wide_RF: the rows times the up and gate matrices, in the compute dtype.
          dresult_RF: gradient of the weighted hidden values, in the same dtype.
          weight_R: the weights of the rows, float32.
          weighted: whether to return weighted hidden values. They are, if the input is.
        """
        if self.in_place:
            return _gradients_in_place(self, wide_RF, dresult_RF, weight_R, weighted=weighted)
        return HiddenGradients(*self._gradients(wide_RF, dresult_RF, weight_R[:, None], weighted=weighted))

    def _gradients(
        self, wide_RF: Sequence[jax.Array], dresult_RF: jax.Array, weight_R1: jax.Array, *, weighted: bool
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        """Return what `gradients` does; weights [R, 1]. For some rows and columns, the gradients of weights are those of these columns."""
        dtype, activate = dresult_RF.dtype, partial(activated, self.name, self.clamp)
        if self.scale_input:
            hidden_RF, of_wide = jax.vjp(activate, *((h_RF * weight_R1).astype(dtype) for h_RF in wide_RF))
            dscaled_RF = of_wide(dresult_RF)
            parts_R = [jnp.sum(d_RF.astype(jnp.float32) * h_RF, -1) for d_RF, h_RF in zip(dscaled_RF, wide_RF, strict=True)]
            dwide_RF = tuple((d_RF * weight_R1).astype(dtype) for d_RF in dscaled_RF)
            return dwide_RF, hidden_RF, sum(parts_R[1:], parts_R[0])
        hidden_RF, of_wide = jax.vjp(activate, *wide_RF)
        dwide_RF = of_wide((dresult_RF * weight_R1).astype(dtype))
        result_RF = (hidden_RF * weight_R1).astype(dtype) if weighted else hidden_RF
        return dwide_RF, result_RF, jnp.sum(dresult_RF.astype(jnp.float32) * hidden_RF, -1)


def _gradients_in_place(
    activation: ExpertActivation, wide_RF: tuple[jax.Array, ...], dresult_RF: jax.Array, weight_R: jax.Array, *, weighted: bool
) -> HiddenGradients:
    """Return the same, computed in float32 by a Pallas kernel (Triton), in the memory of up, gate and dresult."""
    rows, columns = dresult_RF.shape
    inputs = (*wide_RF, dresult_RF)

    def kernel(weight_ref: Any, *refs: Any) -> None:
        input_refs, (*output_refs, dweight_ref) = refs[: len(inputs)], refs[len(inputs) :]
        first = pl.program_id(0) * ROWS
        own, within_R = pl.ds(first, ROWS), first + jnp.arange(ROWS) < rows
        weight_R1 = triton.load(weight_ref.at[own], mask=within_R, other=0.0)[:, None]

        def step(index: jax.Array, dweight_R: jax.Array) -> jax.Array:
            tile = own, pl.ds(index * COLUMNS, COLUMNS)
            mask = within_R[:, None] & (index * COLUMNS + jnp.arange(COLUMNS) < columns)[None, :]
            *wide, dresult = (triton.load(ref.at[tile], mask=mask, other=0.0).astype(jnp.float32) for ref in input_refs)
            dwide, result, part_R = activation._gradients(wide, dresult, weight_R1, weighted=weighted)
            for ref, output in zip(output_refs, (*dwide, result), strict=True):
                triton.store(ref.at[tile], output.astype(ref.dtype), mask=mask)
            return dweight_R + part_R

        dweight_R = jax.lax.fori_loop(0, pl.cdiv(columns, COLUMNS), step, jnp.zeros(ROWS, jnp.float32))
        triton.store(dweight_ref.at[own], dweight_R, mask=within_R)

    *dwide_RF, result_RF, dweight_R = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, ROWS),),
        out_shape=(*(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in inputs), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        input_output_aliases={1 + index: index for index in range(len(inputs))},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=activation.interpret,
        name="expert_activation_gradient",
    )(weight_R, *inputs)
    return HiddenGradients(tuple(dwide_RF), result_RF, dweight_R)
