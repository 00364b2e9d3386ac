"""The mapping between Hugging Face tensors and parameters.

A family lists one `TensorRule` per Hugging Face tensor. Shapes, import (of any block of a parameter, so that a device reads only its shard)
and export follow from the rules; layouts are defined nowhere else.

Legend: D embed width, N heads, H head width. Parameters have separate head dims, Hugging Face flattens them: [D, N, H] <-> [N*H, D].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, Protocol

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]
EXPERT_DIM = 1
"""Dim of the experts in a parameter of a layer that is stacked over experts (models/moe/experts.py)."""
Place = tuple[int | None, int | None]
"""Layer (None: the parameter is not stacked) and expert (None: not stacked over experts)."""


@dataclass(frozen=True)
class TensorRule:
    """One Hugging Face tensor and the parameter it contains, or several concatenated parameters."""

    hf: str
    """Name; `{layer}` stands for the layer number of a tensor that exists per layer, `{expert}` for the expert's."""
    params: tuple[str, ...]
    """Dotted paths of the parameters. Several: concatenated along the tensor's output dim (a fused query, key, value)."""
    layout: Literal["out_in", "in_out", "flat"]
    """out_in: torch Linear, transposed. in_out: as the parameter (embeddings, GPT-2's Conv1D). flat: a vector."""
    in_dims: int = 1
    """Leading dims of the parameter that are inputs (2 for the attention output projection [N, H, D])."""
    vocab_dim: int | None = None
    """The parameter's vocabulary dim; Hugging Face has only its first vocab_size entries: padding is dropped on export, zero on import."""
    layers: tuple[int, ...] | None = None
    """Number of each layer of the parameter; None: the layers 0, 1, ..."""

    @property
    def per_layer(self) -> bool:
        """Whether the parameters are stacked over layers."""
        return "{layer}" in self.hf

    @property
    def per_expert(self) -> bool:
        """Whether the parameters of a layer are stacked over experts."""
        return "{expert}" in self.hf

    def places(self, shapes: Mapping[str, Shape]) -> list[Place]:
        """Return the place of each Hugging Face tensor in the stacked parameters; `shapes` are those of whole parameters."""
        shape = shapes[self.params[0]]
        layers = range(shape[0]) if self.per_layer else (None,)
        experts = range(shape[1 + EXPERT_DIM]) if self.per_expert else (None,)
        return [(layer, expert) for layer in layers for expert in experts]

    def one(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of the parameters at one place; `shapes` are those of whole parameters."""
        return {path: self._without_stacks(shapes[path]) for path in self.params}

    def one_block(self, index: Index) -> Index:
        """Return the part of a block of a whole parameter that is within one place."""
        return self._without_stacks(index)

    def _without_stacks(self, dims: tuple[Any, ...]) -> tuple[Any, ...]:
        of_layer = dims[self.per_layer :]
        return (*of_layer[:EXPERT_DIM], *of_layer[EXPERT_DIM + 1 :]) if self.per_expert else of_layer

    def name(self, layer: int | None, expert: int | None = None) -> str:
        """Return the Hugging Face name at one place."""
        return self.hf.format(layer=None if layer is None else self.number(layer), expert=expert) if self.per_layer else self.hf

    def number(self, layer: int) -> int:
        """Return the number of a layer of the parameter."""
        return layer if self.layers is None else self.layers[layer]

    def with_prefix(self, old: str, new: str) -> TensorRule:
        """Return the rule with a leading `old` of the name replaced by `new`."""
        return replace(self, hf=new + self.hf.removeprefix(old)) if self.hf.startswith(old) else self

    def hf_shape(self, shapes: Mapping[str, Shape], vocab_size: int) -> Shape:
        """Return the Hugging Face shape; `shapes` are those of the parameters at one place."""
        parts = [self._flat_shape(self._without_padding(shapes[path], vocab_size)) for path in self.params]
        joined = sum(part[self._output_dim] for part in parts)
        return (joined, *parts[0][1:]) if self._output_dim == 0 else (*parts[0][:-1], joined)

    def export(self, values: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:
        """Return the Hugging Face tensor of the parameters at one place."""
        parts = []
        for path in self.params:
            value = values[path]
            value = value[tuple(slice(0, dim) for dim in self._without_padding(value.shape, vocab_size))]
            flat = value.reshape(self._matrix_shape(value.shape))
            parts.append(flat.T if self.layout == "out_in" else flat)
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=self._output_dim)

    def block(self, path: str, shapes: Mapping[str, Shape], index: Index, vocab_size: int) -> Region:
        """Return the location of block `index` of parameter `path` (at one place) in the Hugging Face tensor."""
        shape = shapes[path]
        index = tuple(slice(*s.indices(dim)[:2]) for s, dim in zip(index, shape, strict=True))
        stored = list(index)
        if self.vocab_dim is not None:
            rows = index[self.vocab_dim]
            stored[self.vocab_dim] = slice(min(rows.start, vocab_size), min(rows.stop, vocab_size))
        groups = [slice(0, len(shape))] if self.layout == "flat" else [slice(0, self.in_dims), slice(self.in_dims, len(shape))]
        flat = [_flatten(shape[group], stored[group]) for group in groups]
        before = sum(self._flat_shape(shapes[other])[self._output_dim] for other in self.params[: self.params.index(path)])
        region = [piece.region for piece in flat]
        region[-1] = slice(region[-1].start + before, region[-1].stop + before)
        transposed = self.layout == "out_in"
        return Block(
            region=tuple(reversed(region)) if transposed else tuple(region),
            transposed=transposed,
            read_shape=sum((piece.shape for piece in flat), ()),
            keep=sum((piece.keep for piece in flat), ()),
            shape=tuple(s.stop - s.start for s in index),
        )

    @property
    def _output_dim(self) -> int:
        """The dim of the tensor along which parameters are concatenated."""
        return 0 if self.layout == "out_in" else -1

    def _without_padding(self, shape: Shape, vocab_size: int) -> Shape:
        return tuple(min(vocab_size, n) if dim == self.vocab_dim else n for dim, n in enumerate(shape))

    def _matrix_shape(self, shape: Shape) -> Shape:
        return (prod(shape),) if self.layout == "flat" else (prod(shape[: self.in_dims]), prod(shape[self.in_dims :]))

    def _flat_shape(self, shape: Shape) -> Shape:
        matrix = self._matrix_shape(shape)
        return matrix[::-1] if self.layout == "out_in" else matrix


class Region(Protocol):
    """A block of one parameter in a Hugging Face tensor."""

    @property
    def shape(self) -> Shape:
        """Shape of the block."""

    def pieces(self) -> Iterator[tuple[Index, Index]]:
        """Yield the regions to read one after another, and their places in the block."""

    def arrange(self, tensor: np.ndarray) -> np.ndarray:
        """Return the part of the block from the values of a region."""


@dataclass(frozen=True)
class Block:
    """A block of one parameter as a region of a Hugging Face tensor."""

    region: Index
    """The region to read."""
    transposed: bool
    """The region is [out, in]."""
    read_shape: Shape
    """Shape of the region in the parameter's order of dims."""
    keep: Index
    """The requested part of the region."""
    shape: Shape
    """Shape of the block; larger than the requested part where it includes vocabulary padding, which is zero."""

    def pieces(self) -> Iterator[tuple[Index, Index]]:
        """Yield the regions to read one after another, and their places in the block."""
        yield self.region, (slice(None),) * len(self.shape)

    def arrange(self, tensor: np.ndarray) -> np.ndarray:
        """Return the block from the values of `region`."""
        value = (tensor.T if self.transposed else tensor).reshape(self.read_shape)[self.keep]
        if value.shape == self.shape:
            return value
        return np.pad(value, [(0, want - have) for have, want in zip(value.shape, self.shape, strict=True)])


@dataclass(frozen=True)
class _Flat:
    """A block of some dims as a range of their flattened index."""

    region: slice
    shape: Shape
    keep: Index


def _flatten(shape: Shape, index: list[slice]) -> _Flat:
    """Cover a block of `shape` by one range of the flattened index: exact in the first dim, whole in the others."""
    inner = prod(shape[1:])
    first = index[0]
    return _Flat(
        slice(first.start * inner, first.stop * inner),
        (first.stop - first.start, *shape[1:]),
        (slice(0, first.stop - first.start), *index[1:]),
    )
