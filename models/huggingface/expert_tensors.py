"""The tensors of Hugging Face checkpoints with experts: one per layer, expert and matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ridgeline.configs.schema import ModelConfig
from ridgeline.models.huggingface.tensor_map import TensorRule


def with_experts(dense: Sequence[TensorRule], model: ModelConfig, router: str, experts: str, names: dict[str, str]) -> list[TensorRule]:
    """Return the rules of a model with experts, from those of the same model with an MLP in each layer.

    Args:
      dense: rules of the family's dense layout; those of its MLP remain for the dense layers.
      model: the model section.
      router: name of the router's tensor, with {layer}.
      experts: name of an expert's tensor, with {layer}, {expert} and {matrix}.
      names: parameter (gate, up, down) -> {matrix}.
    """
    first = model.dense_layers
    rules = [rule for rule in dense if not rule.per_layer]
    of_layers = [rule for rule in dense if rule.per_layer]
    if first:
        rules += [replace(rule, params=tuple(f"dense_{path}" for path in rule.params)) for rule in of_layers]
    rules += [replace(rule, first_layer=first) for rule in of_layers if not rule.params[0].startswith("blocks.mlp.")]
    rules.append(TensorRule(router, ("blocks.mlp.router",), "out_in", first_layer=first))
    layout: Literal["in_out", "out_in"]
    for parameter, matrix in names.items():
        name = experts.replace("{matrix}", matrix)
        # The down matrix is stored as the others, [D, F] per expert: Hugging Face's [out, in].
        layout = "in_out" if parameter == "down" else "out_in"
        rules.append(TensorRule(name, (f"blocks.mlp.{parameter}",), layout, first_layer=first))
    return rules
