"""Low-rank adapters of a layer's matrices (LoRA, arXiv 2106.09685), with magnitudes where `lora.dora` is set (DoRA, arXiv 2402.09353).

The layers pass the adapter of a matrix to `Matmul` beside the matrix; there is one adapter per target and layer, stacked as the matrices
are. Where a model has adapters, they are the only parameters with gradients and optimizer state.

Legend: B batch, T sequence, Z rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models.int8 import INT8, SCALE, Int8, Matrix, is_matrix, whole_values
from ridgeline.models.params import LAYERS, ParamFactory, input_dims, logical_axes, use_param
from ridgeline.models.remat import ADAPTER

if TYPE_CHECKING:
    from ridgeline.models.matmul import Matmul

ADAPTERS = "adapters"
"""Attribute of a layer with its adapters: the paths of adapters have it, and no other parameter's path does."""
Tree = Any


class AdapterParam(nnx.Param):
    """A parameter of an adapter."""


class Adapter(nnx.Module):
    """The adapter of one matrix W: x W becomes x W + scale * dropout(x) A B.

    With a magnitude m: m / |W + scale * A B| * (x W + scale * dropout(x) A B), with the norms of the columns, through which no gradient
    flows (DoRA, section 4.3).
    """

    def __init__(self, lora: LoraConfig, make: ParamFactory, kernel: Matrix) -> None:
        assert lora.rank is not None
        axes, stacked = logical_axes(kernel), int(LAYERS in kernel.axes)
        whole, inputs = whole_values(kernel), input_dims(axes)
        shape = whole.shape[stacked:]
        bound = 1 / math.sqrt(math.prod(shape[:inputs]))  # as peft, and torch's Linear
        self.a = make.uniform((*shape[:inputs], lora.rank), (*axes[:inputs], "rank"), bound)
        self.b = make.constant((lora.rank, *shape[inputs:]), ("rank", *axes[inputs:]), 0.0)
        norm_axes = (*(LAYERS,) * stacked, *("norm" if axis == "embed" else axis for axis in axes[inputs:]))
        norm = column_norms(whole, range(stacked, stacked + inputs)).astype(make.dtype)
        self.magnitude = AdapterParam(norm, axes=norm_axes) if lora.dora else None
        self.scale, self.dropout = lora.scale, lora.dropout
        self.key: jax.Array | None = nnx.data(None)
        """Key of dropout in this layer and step; None: no dropout."""

    def __call__(self, matmul: Matmul, equation: str, x: jax.Array, kernel: Matrix, y: jax.Array) -> jax.Array:
        """Return y = einsum(equation, x, kernel) with the adapter. Arguments and result as in `Matmul`."""
        inputs, y_dims = equation.split("->")
        x_dims, _ = inputs.split(",")
        axes, partitioner, matmul = logical_axes(kernel), matmul.partitioner, replace(matmul, frozen=False)
        # Projections to the residual stream or to a latent: their results are sharded along the sequence over tensor, and so is this one.
        # The gradient of an update is then not gathered a second time for the adapter, only that of the narrow vectors is.
        on_shards = axes[0] != "embed" or "latent" in axes
        if self.key is not None:
            x = _drop(self.key, self.dropout, x)
        low_BTZ = matmul(f"{x_dims},{x_dims[2:]}z->btz", x, self.a)
        if on_shards and axes[0] != "embed":
            low_BTZ = partitioner.constrain(low_BTZ, "batch", "seq", None)
        low_BTZ = partitioner.constrain(low_BTZ, "batch", "residual_seq" if on_shards else "seq", None)
        y += self.scale * matmul(f"btz,z{y_dims[2:]}->{y_dims}", checkpoint_name(low_BTZ, ADAPTER), self.b)
        if self.magnitude is None:
            return y
        delta = jnp.tensordot(self.a[...].astype(jnp.float32), self.b[...].astype(jnp.float32), 1)
        merged = whole_values(kernel).astype(jnp.float32) + self.scale * partitioner.constrain(delta, *axes)
        norm = jax.lax.stop_gradient(column_norms(merged, range(input_dims(axes))))
        magnitude = use_param(self.magnitude, partitioner, jnp.dtype(jnp.float32))
        factor = magnitude / checkpoint_name(partitioner.constrain(norm, *logical_axes(self.magnitude)), ADAPTER)
        return (checkpoint_name(y, ADAPTER).astype(jnp.float32) * factor).astype(y.dtype)


class Adapters(nnx.Module):
    """The adapters of a layer, as attributes with the names of its matrices."""

    def __init__(self, adapters: Mapping[str, nnx.Module]) -> None:
        for name, adapter in adapters.items():
            setattr(self, name, adapter)


def make_adapters(make: ParamFactory, **kernels: Matrix | None) -> Adapters | None:
    """Return the adapters of those of a layer's matrices that are targets; None if none is."""
    lora = make.lora
    if lora is None:
        return None
    make = replace(make, dtype=make.adapter_dtype or make.dtype, kind=AdapterParam, stream=ADAPTERS)
    found = {name: kernel for name, kernel in kernels.items() if kernel is not None and (not lora.targets or name in lora.targets)}
    return Adapters({name: Adapter(lora, make, kernel) for name, kernel in found.items()}) if found else None


def adapters_of(adapters: Adapters | None, *names: str) -> tuple[Any, ...]:
    """Return the adapters of these matrices; None for one without."""
    return tuple(getattr(adapters, name, None) for name in names)


def set_dropout(block: nnx.Module, key: jax.Array | None) -> None:
    """Give each adapter of a block its key for dropout."""
    if key is None:
        return
    adapters = [module for _, module in nnx.iter_modules(block) if isinstance(module, Adapter)]
    for index, adapter in enumerate(adapters):
        adapter.key = jax.random.fold_in(key, index)


def _drop(key: jax.Array, share: float, x: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - share, x.shape)
    return jnp.where(kept, x / (1 - share), 0).astype(x.dtype)


def column_norms(w: jax.Array, inputs: range) -> jax.Array:
    """Return the norm of W over its input dims, float32."""
    return jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), tuple(inputs)))


def with_magnitudes(params: Tree, axes: Tree) -> Tree:
    """Return the parameters with the magnitudes of their adapters as at the start: the norms of the columns. axes: logical ones."""
    found = {name: with_magnitudes(value, axes[name]) if isinstance(value, dict) else value for name, value in params.items()}
    for name, adapter in params.get(ADAPTERS, {}).items():
        if "magnitude" in adapter:
            matrix, of_matrix = params[name], axes[name]
            if is_matrix(matrix):
                matrix, of_matrix = Int8(matrix[INT8], matrix[SCALE]).dequantized(jnp.dtype(jnp.float32)), of_matrix[INT8]
            stacked = int(of_matrix[0] == LAYERS)
            norms = column_norms(matrix, range(stacked, stacked + input_dims(of_matrix[stacked:])))
            found[ADAPTERS][name]["magnitude"] = norms.astype(adapter["magnitude"].dtype)
    return found


def split_adapters(tree: Tree) -> tuple[Tree, Tree]:
    """Split a nested dict of a model's parameters into that of its adapters and that of the others."""
    ours: Tree = {}
    others: Tree = {}
    for name, value in tree.items():
        if name == ADAPTERS:
            ours[name] = value
        elif isinstance(value, dict):
            within, without = split_adapters(value)
            ours |= {name: within} if within else {}
            others |= {name: without} if without else {}
        else:
            others[name] = value
    return ours, others


def join_adapters(adapters: Tree, others: Tree) -> Tree:
    """Undo `split_adapters`."""
    both = {name: join_adapters(adapters[name], others[name]) for name in adapters if name in others}
    return {**others, **adapters, **both}
