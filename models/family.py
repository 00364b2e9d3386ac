"""Model families: what a family is, and how one is found by name.

A family is one module in models/families, named as `model.family`, with a `Family` called FAMILY. Its defaults are in
configs/models/families/<name>.yaml. An installed package adds one as an entry point of the group `ridgeline.families` (configs/plugins.py).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ridgeline.configs import plugins
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.block import Block
from ridgeline.models.huggingface.tensor_map import TensorRule


@dataclass(frozen=True)
class Wrapper:
    """A multimodal architecture whose text part is a family's: its config.json has that of the text model as `text_config`."""

    architecture: str
    """`architectures[0]` in config.json."""
    model_type: str
    """`model_type` in config.json."""
    prefix: str
    """Beginning of the names of the text model's tensors."""
    ignored: tuple[str, ...]
    """Beginnings of the names of other tensors, which are not read."""


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
    hf_model_type: str = ""
    """`model_type` in config.json, where it is not the family's name."""
    hf_wrapper: Wrapper | None = None
    """The multimodal architecture that contains the family's; its text part can be read."""
    config_from_hf: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """config.json -> fields of ModelConfig. Raises UserError for what cannot be represented."""
    config_to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None
    """ModelConfig -> config.json."""
    reads_quantized: tuple[str, ...] = ()
    """quant_method of quantized checkpoints whose weights are dequantized when they are read (models/huggingface/mxfp4.py)."""
    tensor_map: Callable[[ModelConfig], Sequence[TensorRule]] | None = None
    """Every tensor of a Hugging Face checkpoint with the parameters it contains, each exactly once."""
    ignored_tensors: Callable[[dict[str, Any]], tuple[str, ...]] | None = None
    """config.json -> beginnings of the names of tensors that are not read."""
    stores_mtp: bool = False
    """Checkpoints can have modules of multi-token prediction: `num_nextn_predict_layers` of config.json, which model.mtp_layers chooses."""
    quantizations: tuple[str, ...] = ()
    """`quantization_config.quant_method` of published checkpoints whose config.json can be planned; their weights are refused."""

    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        return self.hf_model_type or self.name


@cache
def families() -> dict[str, Family]:
    """Return name -> family of every module in models/families."""
    package = import_module("ridgeline.models.families")
    modules = [import_module(f"{package.__name__}.{module.name}") for module in pkgutil.iter_modules(package.__path__)]
    return {module.FAMILY.name: module.FAMILY for module in modules}


def find_family(name: str) -> Family:
    """Return the family called `name`. Raises UserError with the nearest name for an unknown one."""
    if name in families():
        return families()[name]
    return plugins.load("families", name, Family, families())
