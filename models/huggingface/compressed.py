"""8-bit weights in the format of compressed-tensors, which transformers and vLLM read: written and read.

Every matrix NAME.weight [O, I] of the layers is symmetric with one scale per output, NAME.weight_scale [O, 1]: weight = stored * scale.
Inputs of the matmuls are not quantized. Format: github.com/vllm-project/compressed-tensors, compressors.
  fp8, "float-quantized": NAME.weight [O, I] is float8_e4m3fn.
  int8, "pack-quantized": NAME.weight_packed [O, I / 4] is int32 with four elements each, the first in the lowest bits, with 128 added;
  NAME.weight_shape has O and I.

Legend: I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import shortened
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.huggingface.safetensors_stream import FLOAT_DTYPES, PlannedTensor, StoredTensor, all_finite
from ridgeline.models.huggingface.tensor_map import Shape, TensorRule
from ridgeline.models.int8 import LIMIT, scaled

Quantization = Literal["fp8", "int8"]
METHOD = "compressed-tensors"
"""quant_method in config.json."""
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_LIMITS: dict[Quantization, float] = {"fp8": float(ml_dtypes.finfo(FP8).max), "int8": LIMIT}
"""Largest stored value."""
_FORMATS: dict[Quantization, tuple[str, str]] = {"fp8": ("float-quantized", "float"), "int8": ("pack-quantized", "int")}
"""format and type in config.json."""
_OFFSET, _PACKED = 128, 4
_SCALE, _PACKED_NAME, _SHAPE = "_scale", "_packed", "_shape"


def is_quantized(rule: TensorRule) -> bool:
    """Return whether a rule's tensors are quantized: the matrices of layers; embedding, output head, norms and biases are not."""
    return rule.per_layer and rule.layout == "out_in" and rule.hf.endswith(".weight")


def quantization_config(model: ModelConfig, rules: Iterable[TensorRule], shapes: Mapping[str, Shape], kind: Quantization) -> dict[str, Any]:
    """Return quantization_config of config.json. Raises UserError for a model whose matrices the format cannot have."""
    rules = list(rules)
    matrices = {rule.hf: rule.hf_shape(rule.one(shapes), model.vocab_size) for rule in rules if is_quantized(rule)}
    if model.moe is not None:
        raise UserError("--quantize is not supported for a model with experts; leave it out")
    if not matrices:
        raise UserError(f"--quantize is not supported for family {model.family}: its matrices are stored [in, out]")
    for name, shape in matrices.items():
        if shape[-1] % _PACKED:
            raise UserError(f"--quantize: {name} has {shape[-1]} inputs, which must be a multiple of {_PACKED}")
    format_, type_ = _FORMATS[kind]
    others = [rule.hf.removesuffix(".weight") for rule in rules if not rule.per_layer and rule.layout == "out_in"]
    weights = {"num_bits": 8, "type": type_, "strategy": "channel", "symmetric": True, "dynamic": False}
    return {
        "quant_method": METHOD,
        "format": format_,
        "quantization_status": "compressed",
        "ignore": sorted({"lm_head", *others}),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}},
    }


def planned(name: str, shape: Shape, dtype: np.dtype, kind: Quantization) -> list[PlannedTensor]:
    """Return the tensors of a quantized matrix, in the order of `quantized`. dtype: of the scales."""
    outputs, inputs = shape
    scale = PlannedTensor(name + _SCALE, (outputs, 1), dtype)
    if kind == "fp8":
        return [PlannedTensor(name, shape, FP8), scale]
    packed = PlannedTensor(name + _PACKED_NAME, (outputs, inputs // _PACKED), np.dtype(np.int32))
    return [packed, scale, PlannedTensor(name + _SHAPE, (2,), np.dtype(np.int64))]


def quantized(name: str, weight: np.ndarray, dtype: np.dtype, kind: Quantization) -> Iterator[np.ndarray]:
    """Yield the tensors of a matrix [O, I] of floats. dtype: of the scales, which are rounded to it before the weights are divided.

    Raises UserError for weights that are NaN or infinite.
    """
    if not all_finite(weight):
        raise UserError(f"'{name}' has weights that are NaN or infinite")
    stored, scale = scaled(weight.astype(np.float32), (1,), _LIMITS[kind], dtype)
    if kind == "fp8":
        yield stored.astype(FP8)
        yield scale
        return
    yield np.ascontiguousarray(np.rint(stored) + _OFFSET).astype(np.uint8).view("<i4")
    yield scale
    yield np.array(weight.shape, np.int64)


@dataclass(frozen=True)
class CompressedTensor:
    """A matrix [O, I] in a file: as `StoredTensor`, dequantized where it is read."""

    values: StoredTensor
    scale: StoredTensor
    kind: Quantization

    @property
    def dtype(self) -> str:
        """Safetensors name of the dtype of the scales, to which the products are rounded."""
        return self.scale.dtype

    @property
    def file(self) -> Path:
        """The file of the elements."""
        return self.values.file

    @property
    def shape(self) -> Shape:
        """O, I."""
        outputs, inputs = self.values.shape
        return (outputs, inputs * (_PACKED if self.kind == "int8" else 1))

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the block that `index` (one unit-step slice per dim) selects, in the dtype of the scales."""
        rows, columns = (slice(*s.indices(dim)[:2]) for s, dim in zip(index or (slice(None),) * 2, self.shape, strict=True))
        scale = self.scale.read((rows, slice(None))).astype(np.float32)
        if self.kind == "fp8":
            stored = self.values.read((rows, columns)).astype(np.float32)
        else:
            first = columns.start // _PACKED
            words = self.values.read((rows, slice(first, -(-columns.stop // _PACKED))))
            elements = np.ascontiguousarray(words).view(np.uint8)[:, columns.start - first * _PACKED : columns.stop - first * _PACKED]
            stored = elements.astype(np.float32) - _OFFSET
        return (stored * scale).astype(FLOAT_DTYPES[self.dtype])


def kind_of(quantization: Mapping[str, Any]) -> Quantization:
    """Return how the weights of a quantization_config are stored. Raises UserError for others than those that are written here."""
    groups = quantization.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    for kind, (format_, type_) in _FORMATS.items():
        wanted = {"num_bits": 8, "type": type_, "strategy": "channel", "symmetric": True}
        if isinstance(weights, dict) and quantization.get("format") == format_ and wanted == {key: weights.get(key) for key in wanted}:
            return kind
    format_ = shortened(str(quantization.get("format")))
    raise UserError(
        f"config.json: quantized weights ({METHOD}, {format_}) are not supported "
        "(allowed: 8 bits, symmetric, one scale per channel, float-quantized or pack-quantized)"
    )


def with_dequantized(tensors: Mapping[str, StoredTensor], kind: Quantization) -> dict[str, StoredTensor | CompressedTensor]:
    """Return the tensors with those of each quantized matrix as one. Raises UserError for some that do not fit each other."""
    found: dict[str, StoredTensor | CompressedTensor] = {}
    suffix, dtype = (_PACKED_NAME, "I32") if kind == "int8" else ("", "F8_E4M3")
    for name, tensor in tensors.items():
        matrix = name.removesuffix(suffix)
        if tensor.dtype != dtype or not name.endswith(".weight" + suffix):
            of_matrix = next((name.removesuffix(end) for end in (_SCALE, _SHAPE) if name.endswith(".weight" + end)), None)
            if of_matrix is None or of_matrix + suffix not in tensors:
                found[name] = tensor
            continue
        scale = tensors.get(matrix + _SCALE)
        if scale is None:
            raise UserError(f"{tensor.file}: tensor '{name}' has no '{matrix}{_SCALE}'")
        if len(tensor.shape) != 2 or scale.shape != (tensor.shape[0], 1) or scale.dtype not in FLOAT_DTYPES:
            raise UserError(f"{tensor.file}: '{matrix}{_SCALE}' {list(scale.shape)} ({scale.dtype}) must be floats, [outputs, 1]")
        found[matrix] = CompressedTensor(tensor, scale, kind)
    return found
