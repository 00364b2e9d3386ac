"""Low-rank adapters of the routed experts' matrices: one A and B per expert, on the rows that are sorted by expert (models/moe/experts.py).

x W + scale * x A B for the gate and up matrices, A [D, E, Z] and B [Z, E, F]; the same for the down matrix with A [F, E, Z] and
B [Z, E, D]. Axes are in the order of the grouped matmuls, inputs first, so that the kernels of the experts multiply them too. Functions on
the shards of a device, in both directions: the narrow vectors are computed again in the backward pass, not kept.

Legend: D embed width, E experts, F hidden width, Z rank, R rows of the buffer, I inputs, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.tuning_schema import EXPERT
from ridgeline.models.lora import ADAPTERS, AdapterParam, Adapters
from ridgeline.models.moe.grouped_matmul import GroupedMatmul
from ridgeline.models.params import ParamFactory

EMBED, HIDDEN = "expert_embed", "mlp"
A_AXES = {False: (EMBED, "experts", "rank"), True: (HIDDEN, "experts", "rank")}
B_AXES = {False: ("rank", "experts", HIDDEN), True: ("rank", "experts", EMBED)}
"""Logical axes of A and B; key: whether the matrix is the down matrix."""


class Pair(NamedTuple):
    """A [I, E, Z] and B [Z, E, O] of one matrix."""

    a: jax.Array
    b: jax.Array


class ExpertAdapter(nnx.Module):
    """The adapters of one matrix of all experts."""

    def __init__(self, make: ParamFactory, inputs: int, experts: int, outputs: int, *, down: bool) -> None:
        assert make.lora is not None and make.lora.rank is not None
        rank = make.lora.rank
        self.a = make.uniform((inputs, experts, rank), A_AXES[down], 1 / math.sqrt(inputs))  # as peft
        self.b = make.constant((rank, experts, outputs), B_AXES[down], 0.0)

    @property
    def pair(self) -> Pair:
        """The values."""
        return Pair(self.a[...], self.b[...])


def make_expert_adapters(make: ParamFactory, width: int, experts: int, hidden: int, *, gated: bool) -> Adapters | None:
    """Return the adapters of the matrices gate, up and down that lora.targets names; None if it names none."""
    if make.lora is None:
        return None
    targets = make.lora.targets
    make = replace(make, dtype=make.adapter_dtype or make.dtype, kind=AdapterParam, stream=ADAPTERS)
    sides = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    names = [name for name in sides if f"{EXPERT}{name}" in targets and (gated or name != "gate")]
    found = {name: ExpertAdapter(make, sides[name][0], experts, sides[name][1], down=name == "down") for name in names}
    return Adapters(found) if found else None


def added(kernel: GroupedMatmul, scale: float, x_RI: jax.Array, pair: Pair, load_E: jax.Array) -> jax.Array:
    """Return scale * x A B, [R, O] in x's dtype."""
    low_RZ = kernel.matmul(x_RI, pair.a, load_E)
    return (scale * kernel.matmul(low_RZ, pair.b, load_E)).astype(x_RI.dtype)


def input_gradient(kernel: GroupedMatmul, scale: float, dy_RO: jax.Array, pair: Pair, load_E: jax.Array) -> jax.Array:
    """Return the gradient of x, [R, I]: scale * dy B^T A^T."""
    dlow_RZ = (scale * kernel.matmul(dy_RO, pair.b, load_E, transposed=True)).astype(dy_RO.dtype)
    return kernel.matmul(dlow_RZ, pair.a, load_E, transposed=True)


def gradients(
    kernel: GroupedMatmul, scale: float, x_RI: jax.Array, dy_RO: jax.Array, pair: Pair, load_E: jax.Array, dtype: jnp.dtype
) -> Pair:
    """Return the gradients of A and B in `dtype`."""
    low_RZ = kernel.matmul(x_RI, pair.a, load_E)
    dlow_RZ = (scale * kernel.matmul(dy_RO, pair.b, load_E, transposed=True)).astype(dy_RO.dtype)
    return Pair(kernel.outer(x_RI, dlow_RZ, load_E, dtype), scale * kernel.outer(low_RZ, dy_RO, load_E, dtype))
