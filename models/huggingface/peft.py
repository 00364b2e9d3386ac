"""Adapter directories of Hugging Face's peft: adapter_config.json and adapter_model.safetensors.

The adapter of a matrix is stored beside the matrix's name: lora_A.weight [rank, inputs], lora_B.weight [outputs, rank], and with DoRA
lora_magnitude_vector [outputs].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from pydantic import ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import read_object, shortened
from ridgeline.configs.model_schema import DType, ModelConfig
from ridgeline.configs.tuning_schema import EXPERT, LoraConfig, adapter_targets, expert_targets
from ridgeline.models.huggingface.convert import ReadParameter, cast_weights, parameter_shapes, tensor_rules
from ridgeline.models.huggingface.safetensors_stream import (
    FLOAT_DTYPES,
    PlannedTensor,
    SafetensorsWriter,
    StoredTensor,
    all_finite,
    read_header,
)
from ridgeline.models.huggingface.tensor_map import EXPERT_DIM, Shape, TensorRule
from ridgeline.models.int8 import dequantizing
from ridgeline.models.lora import ADAPTERS

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}
_WITHIN = f".{ADAPTERS}."
_UNSUPPORTED = {
    "modules_to_save": "whole modules",
    "rank_pattern": "ranks that differ by layer",
    "alpha_pattern": "alphas that differ by layer",
    "target_parameters": "adapters of parameters",
    "trainable_token_indices": "trained tokens",
    "lora_bias": "biases of adapters",
    "use_qalora": "QA-LoRA",
    "arrow_config": "Arrow",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Key of adapter_config.json that must be empty -> what it is for."""
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initializations of adapters that do not change the base model. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract the first A B
from it, so that the stored adapter does not fit the stored base model."""


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor of an adapter directory and the parameter it is one layer of."""

    path: str
    """Dotted path of the parameter, such as blocks.attention.adapters.query.a."""
    rule: TensorRule
    """Of the matrix."""

    @property
    def part(self) -> str:
        """a, b or magnitude."""
        return self.path.rpartition(".")[2]

    @property
    def target(self) -> str:
        """Name of the matrix, as in lora.targets."""
        return (EXPERT if self.rule.per_expert else "") + self.path.split(".")[-2]

    def places(self, shape: Shape) -> list[tuple[int, int | None]]:
        """Return the layer and the expert (None: no routed experts) of each tensor; shape: of the whole parameter."""
        experts = range(shape[1 + EXPERT_DIM]) if self.rule.per_expert else (None,)
        return [(layer, expert) for layer in range(shape[0]) for expert in experts]

    def one(self, layer: np.ndarray, expert: int | None) -> np.ndarray:
        """Return the values of one expert in those of a layer."""
        return layer if expert is None else layer.take(expert, EXPERT_DIM)

    def one_shape(self, shape: Shape) -> Shape:
        """Return the shape at one place; shape: of the whole parameter."""
        of_layer = shape[1:]
        return (*of_layer[:EXPERT_DIM], *of_layer[EXPERT_DIM + 1 :]) if self.rule.per_expert else of_layer

    def name(self, layer: int, expert: int | None = None) -> str:
        """Return the tensor's name."""
        return _PREFIX + self.module(layer, expert) + _SUFFIXES[self.part]

    def module(self, layer: int, expert: int | None = None) -> str:
        """Return the name of the matrix's module."""
        return self.rule.name(layer, expert).removesuffix(".weight")

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        """Return the tensor of the parameter at one place."""
        if self.part == "magnitude":
            return np.ascontiguousarray(value.reshape(-1))
        matrix = value.reshape(-1, value.shape[-1]) if self.part == "a" else value.reshape(value.shape[0], -1)
        return np.ascontiguousarray(matrix.T)

    def from_hf(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Undo `to_hf` for this shape."""
        return (tensor if self.part == "magnitude" else tensor.T).reshape(shape)

    def hf_shape(self, shape: Shape) -> Shape:
        """Return the tensor's shape for this shape at one place."""
        return self.to_hf(np.broadcast_to(np.zeros((), np.int8), shape)).shape


def adapter_tensors(model: ModelConfig, lora: LoraConfig) -> list[AdapterTensor]:
    """Return the tensors of a model's adapters, one per parameter.

    Raises UserError for a matrix that is no `Linear` of its own in Hugging Face's model.
    """
    rules = {path: rule for rule in tensor_rules(model) for path in rule.params}
    found = []
    for path in parameter_shapes(model, lora):
        if _WITHIN not in path:
            continue
        rule = rules[kernel_path(path)]
        routed = is_of_experts(path, model)
        if len(rule.params) > 1 or (rule.layout != "out_in" and not routed) or (routed and not rule.per_expert):
            kind = "fused" if len(rule.params) > 1 else "transposed"
            raise UserError(f"adapters of {rule.hf}, which is {kind} in Hugging Face's {model.family}, have no PEFT format; use --merge")
        found.append(AdapterTensor(path, rule))
    return found


def is_of_experts(path: str, model: ModelConfig) -> bool:
    """Return whether a parameter is an adapter of routed experts."""
    return model.moe is not None and path.startswith(f"blocks.mlp{_WITHIN}")


def kernel_path(path: str) -> str:
    """Return the path of the matrix of an adapter's parameter."""
    layer, _, rest = path.partition(_WITHIN)
    return f"{layer}.{rest.partition('.')[0]}"


def export_adapter(model: ModelConfig, lora: LoraConfig, read: ReadParameter, directory: Path, base: str | None, dtype: DType) -> int:
    """Write an adapter directory to an existing directory; return the number of tensors.

    read: of the adapters' parameters; base: path or name of the base model. Raises UserError as `adapter_tensors`.
    """
    tensors, shapes = adapter_tensors(model, lora), parameter_shapes(model, lora)
    of_experts = set(expert_targets(model))
    if named := of_experts & set(lora.targets):
        if named != of_experts:
            raise UserError(
                f"peft loads adapters of all matrices of the routed experts or of none: {', '.join(sorted(of_experts))}; use --merge"
            )
        if len({tensor.module(0, 0).rpartition(".")[2] for tensor in tensors if tensor.rule.per_expert} & _dense_names(tensors)):
            raise UserError("peft cannot tell adapters of routed experts from those of other MLPs; use --merge")
    kind = next(known for known in FLOAT_DTYPES.values() if known.name == dtype)
    placed = [(tensor, *place) for tensor in tensors for place in tensor.places(shapes[tensor.path])]
    planned = [
        PlannedTensor(tensor.name(layer, expert), tensor.hf_shape(tensor.one_shape(shapes[tensor.path])), kind)
        for tensor, layer, expert in placed
    ]
    with SafetensorsWriter(directory, planned, None, ADAPTER_WEIGHTS) as writer:
        for tensor, layer, expert in placed:
            values = tensor.one(read(tensor.path, layer), expert)
            writer.write(tensor.name(layer, expert), tensor.to_hf(cast_weights(values, kind, tensor.path)))
    modules = sorted({tensor.module(layer, expert) for tensor, layer, expert in placed})
    if model.moe is None or named:  # otherwise the last part also names matrices of the routed experts
        modules = sorted({module.rpartition(".")[2] for module in modules})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return len(planned)


def _dense_names(tensors: Sequence[AdapterTensor]) -> set[str]:
    """Return the last parts of the names of modules that are no routed expert's."""
    return {tensor.module(0).rpartition(".")[2] for tensor in tensors if not tensor.rule.per_expert}


@dataclass(frozen=True)
class PeftAdapter:
    """An open adapter directory whose tensors were checked to be exactly those of the adapters of a model."""

    directory: Path
    lora: LoraConfig
    model: ModelConfig
    stored: Mapping[str, StoredTensor]

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Dotted path -> shape of each parameter of the adapters."""
        return {path: shape for path, shape in parameter_shapes(self.model, self.lora).items() if _WITHIN in path}

    @cached_property
    def _tensors(self) -> dict[str, AdapterTensor]:
        return {tensor.path: tensor for tensor in adapter_tensors(self.model, self.lora)}

    @property
    def stored_dtype(self) -> DType:
        """The dtype of all tensors, or float32 when they differ."""
        names = {FLOAT_DTYPES[tensor.dtype].name for tensor in self.stored.values()}
        return cast(DType, names.pop() if len(names) == 1 else "float32")

    def read_layer(self, path: str, layer: int, dtype: np.dtype) -> np.ndarray:
        """Return one layer of a parameter. Raises UserError for values that are not finite."""
        tensor, parts = self._tensors[path], []
        for name in [tensor.name(*place) for place in tensor.places(self.shapes[path]) if place[0] == layer]:
            stored = self.stored[name]
            values = stored.read()
            if not all_finite(values):
                raise UserError(f"{stored.file}: tensor '{name}' has weights that are NaN or infinite")
            parts.append(cast_weights(tensor.from_hf(values, tensor.one_shape(self.shapes[path])), dtype, path))
        return np.stack(parts, EXPERT_DIM) if tensor.rule.per_expert else parts[0]

    def load(self, abstract_adapters: Any) -> Any:
        """Return the adapters as jax.Arrays in the dtypes and shardings of `abstract_adapters` (nested dict of ShapeDtypeStruct)."""

        def one(keys: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            path = jax.tree_util.keystr(keys, simple=True, separator=".")
            whole = np.stack([self.read_layer(path, layer, np.dtype(leaf.dtype)) for layer in range(leaf.shape[0])])
            return cast(jax.Array, jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index]))

        return jax.tree_util.tree_map_with_path(one, abstract_adapters)


def base_of(directory: Path) -> Path:
    """Return the directory of an adapter's base model. Raises UserError where adapter_config.json names none that exists."""
    base = _read_config(directory).get("base_model_name_or_path")
    for place in (Path(base), directory / base) if isinstance(base, str) and base else ():
        if place.is_dir():
            return place
    found = f"its base model '{shortened(base)}' is no directory here" if isinstance(base, str) and base else "it names no base model"
    raise UserError(
        f"{directory}: {found}; write the base's path to base_model_name_or_path in {ADAPTER_CONFIG}, or use `ridge convert from-hf --base`"
    )


def open_adapter(directory: Path, model: ModelConfig) -> PeftAdapter:
    """Open an adapter directory for a base model, and check the name, shape and dtype of every tensor; no weights are read.

    Raises UserError for what is missing or not supported.
    """
    config = _read_config(directory)
    stored = {_without_adapter_name(name): tensor for name, tensor in read_header(directory / ADAPTER_WEIGHTS).items()}
    lora = _lora_of(config, directory / ADAPTER_CONFIG)
    every = [tensor for tensor in _possible(model, lora) if tensor.name(0, 0) in stored]
    targets = [name for name in (*adapter_targets(model), *expert_targets(model)) if name in {tensor.target for tensor in every}]
    if not targets:
        raise UserError(f"{directory / ADAPTER_WEIGHTS} has no adapter of a matrix of this model")
    lora = lora.model_copy(update={"targets": targets})
    shapes = parameter_shapes(model, lora)
    expected = {
        tensor.name(*place): tensor.hf_shape(tensor.one_shape(shapes[tensor.path]))
        for tensor in adapter_tensors(model, lora)
        for place in tensor.places(shapes[tensor.path])
    }
    for names, what in (
        (expected.keys() - stored.keys(), "lacks"),
        (stored.keys() - expected.keys(), "has tensors that cannot be imported:"),
    ):
        if names:
            raise UserError(f"{directory / ADAPTER_WEIGHTS} {what} {shortened(min(names))} ({len(names)} in all)")
    for name, shape in expected.items():
        if stored[name].shape != shape or stored[name].dtype not in FLOAT_DTYPES:
            found = f"{stored[name].dtype}{list(stored[name].shape)}"
            raise UserError(f"{directory / ADAPTER_WEIGHTS}: tensor '{name}' is {found}, not of shape {list(shape)} in floating point")
    return PeftAdapter(directory, lora, model, stored)


_KEYS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "dora": "use_dora", "rslora": "use_rslora"}
"""Our key -> that of adapter_config.json."""


def _lora_of(config: Mapping[str, Any], where: Path) -> LoraConfig:
    """Return the section `lora` without targets. Raises UserError naming a key that is missing or has no valid value."""
    for key in ("r", "lora_alpha"):
        if config.get(key) is None:
            raise UserError(f"{where} lacks '{key}'")
    try:
        return LoraConfig.model_validate({ours: config[theirs] for ours, theirs in _KEYS.items() if config.get(theirs) is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: '{_KEYS[str(first['loc'][0])]}' is {shortened(repr(first['input']))}: {first['msg']}") from error


def _possible(model: ModelConfig, lora: LoraConfig) -> Iterator[AdapterTensor]:
    """Yield the tensors of every target that has a PEFT format."""
    for name in (*adapter_targets(model), *expert_targets(model)):
        try:
            yield from adapter_tensors(model, lora.model_copy(update={"targets": [name]}))
        except UserError:
            continue


def _without_adapter_name(name: str) -> str:
    """Return the name of a magnitude as recent versions of peft write it."""
    return name.removesuffix(".weight") if name.endswith(_SUFFIXES["magnitude"] + ".weight") else name


def _read_config(directory: Path) -> dict[str, Any]:
    """Return adapter_config.json. Raises UserError for what is not supported."""
    config, where = read_object(directory / ADAPTER_CONFIG), directory / ADAPTER_CONFIG
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type {shortened(str(config.get('peft_type')))} is not supported (allowed: LORA)")
    if config.get("bias", "none") != "none":
        raise UserError(f"{where}: bias={shortened(str(config['bias']))}: trained biases are not supported (allowed: none)")
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise UserError(f"{where}: {key}: {what} are not supported")
    if (init := config.get("init_lora_weights")) not in _INITS:
        raise UserError(
            f"{where}: init_lora_weights={shortened(str(init))} changed the base model; save the adapter with peft's "
            "path_initial_model_for_weight_conversion, which converts it to plain LoRA"
        )
    return config


def merged(read: ReadParameter, model: ModelConfig, lora: LoraConfig) -> ReadParameter:
    """Return the reader of the model's parameters with the adapters added to their matrices, dequantized ones, computed in float32.

    read: of the parameters of model and adapters.
    """
    shapes = parameter_shapes(model, lora)
    read = dequantizing(read, shapes)
    adapted = {kernel_path(path): path.rpartition(".")[0] for path in shapes if _WITHIN in path}

    def read_merged(path: str, layer: int | None) -> np.ndarray:
        w = read(path, layer)
        if path not in adapted:
            return w
        a, b = (read(f"{adapted[path]}.{part}", layer).astype(np.float32) for part in ("a", "b"))
        of_experts = is_of_experts(f"{adapted[path]}.a", model)
        product = np.einsum("iez,zeo->ieo", a, b) if of_experts else np.tensordot(a, b, 1)
        if of_experts and path.endswith(".down"):  # stored as the other two: outputs first
            product = product.swapaxes(0, 2)
        whole = w.astype(np.float32) + np.float32(lora.scale) * product
        if lora.dora:
            norms = np.sqrt(np.sum(np.square(whole), tuple(range(a.ndim - 1))))
            whole *= read(f"{adapted[path]}.magnitude", layer).astype(np.float32) / norms
        return whole

    return read_merged
