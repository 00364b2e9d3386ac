"""The tensors of Hugging Face checkpoints with experts: one per layer, expert and matrix, or one per layer and matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.huggingface.tensor_map import Index, Shape, TensorRule


def without_mlp(dense: Sequence[TensorRule], model: ModelConfig) -> list[TensorRule]:
    """Return the rules of a model with experts, but theirs, from the rules of the same model with an MLP in each layer."""
    rules = [rule for rule in dense if not rule.per_layer]
    of_layers = [rule for rule in dense if rule.per_layer]
    if model.dense_layers:
        layers = tuple(layer for layer in range(model.num_layers) if not model.has_experts(layer))
        rules += [replace(rule, params=tuple(f"dense_{path}" for path in rule.params), layers=layers) for rule in of_layers]
    return rules + with_layers([rule for rule in of_layers if not rule.params[0].startswith("blocks.mlp.")], model)


def with_layers(rules: Sequence[TensorRule], model: ModelConfig) -> list[TensorRule]:
    """Return rules with the numbers of the layers with experts."""
    return [replace(rule, layers=tuple(layer for layer in range(model.num_layers) if model.has_experts(layer))) for rule in rules]


def with_experts(dense: Sequence[TensorRule], model: ModelConfig, router: str, experts: str, names: dict[str, str]) -> list[TensorRule]:
    """Return the rules of a model with experts, from those of the same model with an MLP in each layer.

    Args:
      dense: rules of the family's dense layout; those of its MLP remain for the dense layers.
      model: the model section.
      router: name of the router's tensor, with {layer}.
      experts: name of an expert's tensor, with {layer}, {expert} and {matrix}.
      names: parameter (gate, up, down) -> {matrix}.
    """
    of_experts = [TensorRule(router, ("blocks.mlp.router",), "out_in")]
    layout: Literal["in_out", "out_in"]
    for parameter, matrix in names.items():
        name = experts.replace("{matrix}", matrix)
        # The down matrix is stored as the others, [D, F] per expert: Hugging Face's [out, in].
        layout = "in_out" if parameter == "down" else "out_in"
        of_experts.append(TensorRule(name, (f"blocks.mlp.{parameter}",), layout))
    return without_mlp(dense, model) + with_layers(of_experts, model)


@dataclass(frozen=True)
class AllExperts(TensorRule):
    """One Hugging Face tensor of all experts of a layer, such as [E, D, 2F]; several parameters share its last dim."""

    order: tuple[int, ...] = ()
    """The parameter's dims in the order of the tensor's, of which the first is that of the experts."""
    concatenated: bool = False
    """Several parameters follow each other along the last dim (Llama 4); otherwise they take turns (gpt-oss)."""

    def hf_shape(self, shapes: Mapping[str, Shape], vocab_size: int) -> Shape:
        """See `TensorRule`."""
        *dims, last = (shapes[self.params[0]][dim] for dim in self.order)
        return (*dims, last * len(self.params))

    def export(self, values: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:
        """See `TensorRule`."""
        parts = [values[path].transpose(self.order) for path in self.params]
        if self.concatenated:
            return np.concatenate(parts, axis=-1)
        return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)

    def block(self, path: str, shapes: Mapping[str, Shape], index: Index, vocab_size: int) -> ExpertsBlock:
        """See `TensorRule`."""
        bounds = [slice(*s.indices(dim)[:2]) for s, dim in zip(index, shapes[path], strict=True)]
        parts, part = len(self.params), self.params.index(path)
        *region, last = (bounds[dim] for dim in self.order)
        if self.concatenated:
            before = part * shapes[path][self.order[-1]]
            last, parts, part = slice(before + last.start, before + last.stop), 1, 0
        return ExpertsBlock(
            region=(*region, slice(last.start * parts, last.stop * parts)),
            order=self.order,
            part=part,
            parts=parts,
            shape=tuple(s.stop - s.start for s in bounds),
        )


@dataclass(frozen=True)
class ExpertsBlock:
    """A block of one parameter as a region of a tensor of all experts."""

    region: Index
    """The region to read."""
    order: tuple[int, ...]
    part: int
    parts: int
    shape: Shape
    """Shape of the block."""

    def pieces(self) -> Iterator[tuple[Index, Index]]:
        """Yield the region of each expert and its place in the block: reading these one after another bounds the memory."""
        first, *rest = self.region
        for at, expert in enumerate(range(first.start, first.stop)):
            place = tuple(slice(at, at + 1) if dim == self.order[0] else slice(None) for dim in range(len(self.order)))
            yield (slice(expert, expert + 1), *rest), place

    def arrange(self, tensor: np.ndarray) -> np.ndarray:
        """Return the values of the parameter in the values of a region."""
        return tensor[..., self.part :: self.parts].transpose(np.argsort(self.order))
