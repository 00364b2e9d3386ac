"""What a model family is: its block, and how it maps to and from Hugging Face checkpoints. One file per family beside this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.configs.schema import ModelConfig
from ridgeline.models.block import Block

if TYPE_CHECKING:
    from ridgeline.models.tensor_map import TensorRule


@dataclass(frozen=True)
class Family:
    """One architecture family."""

    name: str
    """As in model.family."""
    residual_std: Callable[[ModelConfig], float]
    """Initial standard deviation of the projections that write to the residual stream (attention out, MLP down)."""
    block: type[Block] = Block
    """Block composition; a subclass where a family is not pre-norm attention + MLP."""
    hf_architecture: str = ""
    """`architectures[0]` in config.json."""
    config_from_hf: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """config.json -> fields of ModelConfig. Raises UserError for what we cannot represent."""
    config_to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None
    """ModelConfig -> config.json."""
    tensor_map: Callable[[ModelConfig], Sequence[TensorRule]] | None = None
    """Every tensor of a Hugging Face checkpoint with the parameters it holds, exactly once."""
