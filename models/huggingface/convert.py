"""Import and export of Hugging Face checkpoints, one tensor at a time.

Import never has more in memory than the requested block of one parameter: a layer of it, or a device's shard. Export has one tensor.

Legend: L layers (the leading dim of every parameter below `blocks`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import ValidationError

from ridgeline.configs import plugins
from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.foreign import read_object, shortened
from ridgeline.configs.model_schema import DType, ModelConfig
from ridgeline.configs.rules import model_problems
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models import build
from ridgeline.models.family import Family, Wrapper, families, find_family
from ridgeline.models.huggingface import compressed, mxfp4
from ridgeline.models.huggingface.compressed import CompressedTensor, Quantization
from ridgeline.models.huggingface.config import field
from ridgeline.models.huggingface.mxfp4 import Mxfp4Tensor
from ridgeline.models.huggingface.safetensors_stream import (
    FLOAT_DTYPES,
    PlannedTensor,
    SafetensorsWriter,
    StoredTensor,
    all_finite,
    read_directory,
)
from ridgeline.models.huggingface.tensor_map import EXPERT_DIM, Index, Place, Shape, TensorRule
from ridgeline.models.int8 import is_matrix, quantized_on_load
from ridgeline.models.mup import without_multipliers
from ridgeline.sharding.partition import Partitioner

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 << 20
DEFAULT_SHARD_BYTES = 5 * 10**9
_MAX_LISTED = 5
"""Number of tensors in an error message."""
_BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)$")
"""Constants that older checkpoints store among their weights."""

ReadParameter = Callable[[str, int | None], np.ndarray]
"""(dotted path, layer or None) -> the parameter; one layer of it where it is stacked."""


def parameter_shapes(model: ModelConfig, lora: LoraConfig | None = None) -> dict[str, Shape]:
    """Return dotted path -> shape of every parameter of a model, and of its adapters; stacked ones with their leading L."""
    single = Partitioner.single()
    decoder = nnx.eval_shape(lambda: build(model, ComputeConfig(), PrecisionConfig(), single, nnx.Rngs(0), lora=lora))
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}


def tensor_rules(model: ModelConfig) -> list[TensorRule]:
    """Return the family's rules for a model; together they contain every parameter exactly once."""
    kind = find_family(model.family)
    assert kind.tensor_map is not None, f"family {kind.name} has no tensor map"
    rules = list(kind.tensor_map(model))
    mapped = sorted(path for rule in rules for path in rule.params)
    assert mapped == sorted(parameter_shapes(model)), set(mapped) ^ set(parameter_shapes(model))
    return rules


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json of a Hugging Face directory. Raises UserError when there is none or it is not a JSON object."""
    path = directory / CONFIG_NAME
    if not directory.is_dir():
        raise UserError(f"no such Hugging Face directory: {directory}")
    if not path.exists():
        raise UserError(f"{directory} is not a Hugging Face directory: it has no {CONFIG_NAME}")
    return read_object(path, MAX_CONFIG_BYTES)


def model_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model section of a config.json. Raises UserError for an architecture or feature that is not supported."""
    config = text_part(config)[0]
    kind = _family_of(config)
    _refuse_quantized(config, except_for=(*kind.quantizations, *kind.reads_quantized))
    assert kind.config_from_hf is not None
    try:
        model = ModelConfig.model_validate({"family": kind.name, **kind.config_from_hf(dict(config))})
    except ValidationError as error:
        first = error.errors()[0]
        value = shortened(repr(first["input"]))
        raise UserError(f"config.json gives model.{'.'.join(map(str, first['loc']))} = {value}: {first['msg']}") from error
    for problem in model_problems(model):
        raise UserError(f"config.json gives {problem.keys[0]}: {problem.message}")
    return model


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Wrapper | None]:
    """Return the config.json of the text model in that of a multimodal one, and what contains it; the same config.json for a text model."""
    listed = field(config, "architectures", list, [])
    for kind in families().values():
        wrapper = kind.hf_wrapper
        if wrapper is not None and config.get("model_type") == wrapper.model_type and listed[:1] in ([], [wrapper.architecture]):
            outer = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
            return {**outer, **field(config, "text_config", dict), "architectures": [kind.hf_architecture]}, wrapper
    return config, None


def _refuse_quantized(config: Mapping[str, Any], except_for: tuple[str, ...] = ()) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    if method == compressed.METHOD:
        compressed.kind_of(quantization)
    elif method not in except_for:
        raise UserError(
            f"config.json: quantized weights (quantization_config, {shortened(method)}) are not supported; use the unquantized checkpoint"
        )


def _with_dequantized(tensors: dict[str, StoredTensor], quantization: Any) -> dict[str, StoredTensor | Mxfp4Tensor | CompressedTensor]:
    """Return the tensors with those of each quantized matrix as one; quantization: the checked quantization_config."""
    if not quantization:
        return {**tensors}
    if quantization["quant_method"] == compressed.METHOD:
        return {**compressed.with_dequantized(tensors, compressed.kind_of(quantization))}
    return {**mxfp4.with_dequantized(tensors)}


def _family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json by its architecture and its model_type, which must agree.

    Raises UserError for any other; another architecture is proposed only where model_type belongs to it.
    """
    known = [kind for kind in families().values() if kind.config_from_hf]
    listed = field(config, "architectures", list, [])
    architecture, model_type = shortened(listed[0]) if listed else None, field(config, "model_type", str, None)
    model_type = None if model_type is None else shortened(model_type)
    if not any(kind.hf_architecture == architecture or kind.model_type == model_type for kind in known):
        known += [kind for kind in map(find_family, plugins.names("families")) if kind.config_from_hf]
    by_type = next((kind for kind in known if kind.model_type == model_type), None)
    by_architecture = next((kind for kind in known if kind.hf_architecture == architecture), None)
    kind = by_type if architecture is None else by_architecture
    if kind is not None and (model_type is None or kind.model_type == model_type):
        return kind
    described = " with ".join(
        f"{key} '{value}'" for key, value in (("architecture", architecture), ("model_type", model_type)) if value is not None
    )
    if not described:
        raise UserError("config.json has neither architectures nor model_type")
    hint = ""
    if by_type is not None and architecture is not None and nearest(architecture, [by_type.hf_architecture]):
        hint = f"; did you mean '{by_type.hf_architecture}'?"
    names = ", ".join(sorted(f"{kind.hf_architecture} ({kind.model_type})" for kind in known))
    raise UserError(f"config.json: {described} is not supported{hint} (allowed: {names})")


def hf_config(model: ModelConfig, dtype: DType, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json. Raises UserError naming a key that the architecture cannot represent.

    special_ids: bos_token_id and eos_token_id, written as null when unknown, because transformers would otherwise use Llama's; further ids.
    """
    kind = find_family(model.family)
    if kind.config_to_hf is None:
        raise UserError(f"model family {kind.name} has no Hugging Face format")
    standard = model.model_copy(update={"mup": None})  # export_weights folds its multipliers
    ids = {"bos_token_id": None, "eos_token_id": None, **special_ids}
    return {
        "architectures": [kind.hf_architecture],
        "model_type": kind.model_type,
        "torch_dtype": dtype,
        **kind.config_to_hf(standard),
        **ids,
    }


@dataclass(frozen=True)
class HfCheckpoint:
    """An open Hugging Face directory whose tensors were checked to be exactly those of the model."""

    directory: Path
    config: dict[str, Any]
    model: ModelConfig
    tensors: dict[str, StoredTensor | Mxfp4Tensor | CompressedTensor]
    rules: list[TensorRule]
    shapes: dict[str, Shape]

    @cached_property
    def _rule_of(self) -> dict[str, TensorRule]:
        return {path: rule for rule in self.rules for path in rule.params}

    @property
    def stored_dtype(self) -> DType:
        """The dtype of all weights, or float32 when they differ. Raises UserError for float64, which needs an explicit --dtype."""
        stored = {self.tensors[name].dtype for rule in self.rules for name in _names(rule, self.shapes)}
        if "F64" in stored:
            raise UserError(f"{self.directory} has float64 weights: set --dtype to float32, bfloat16 or float16")
        return cast(DType, FLOAT_DTYPES[stored.pop()].name if len(stored) == 1 else "float32")

    def read(self, path: str, dtype: np.dtype, index: Index | None = None) -> np.ndarray:
        """Return parameter `path`, or the block of it that `index` (one slice per dim) selects; only that block is read."""
        shape, rule = self.shapes[path], self._rule_of[path]
        index = index or tuple(slice(None) for _ in shape)
        stacked = ([0] if rule.per_layer else []) + ([1 + EXPERT_DIM] if rule.per_expert else [])
        ranges = [range(*index[dim].indices(shape[dim])) for dim in stacked]
        out: np.ndarray | None = None
        for at in np.ndindex(*map(len, ranges)):
            layer, expert = (*(range_[i] for range_, i in zip(ranges, at, strict=True)), None, None)[:2]
            block = self._read_one(path, rule, (layer, expert), rule.one_block(index), dtype)
            if not stacked:
                return block
            if out is None:
                dims = iter(block.shape)
                out = np.empty([len(ranges[stacked.index(dim)]) if dim in stacked else next(dims) for dim in range(len(shape))], dtype)
            out[(at[0], *[slice(None)] * EXPERT_DIM, at[1]) if rule.per_expert else at] = block
        assert out is not None
        return out

    def read_layer(self, path: str, layer: int | None, dtype: np.dtype) -> np.ndarray:
        """Return one layer of a stacked parameter (without the leading dim), or a whole unstacked one (layer None)."""
        if layer is None:
            return self.read(path, dtype)
        rest = tuple(slice(None) for _ in self.shapes[path][1:])
        return self.read(path, dtype, (slice(layer, layer + 1), *rest))[0]

    def load(self, abstract_params: Any) -> Any:
        """Return the parameters as jax.Arrays in the dtypes and shardings of `abstract_params` (nested dict of ShapeDtypeStruct).

        Matrices that are in 8 bits there are quantized. Each process reads only the blocks of its devices.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_params, is_leaf=is_matrix)
        return jax.tree.unflatten(structure, [self._load_leaf(path, leaf) for path, leaf in leaves])

    def _load_leaf(self, keys: Any, leaf: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if is_matrix(leaf):
            return quantized_on_load(leaf, partial(self.read, path, np.dtype(np.float32)))
        assert tuple(leaf.shape) == self.shapes[path], (path, leaf.shape, self.shapes[path])
        blocks: dict[str, np.ndarray] = {}  # replicas share a block

        def block(index: Index | None) -> np.ndarray:
            assert index is not None
            key = str(index)
            if key not in blocks:
                blocks[key] = self.read(path, np.dtype(leaf.dtype), index)
            return blocks[key]

        array: jax.Array = jax.make_array_from_callback(leaf.shape, leaf.sharding, block)
        return array.block_until_ready()

    def _read_one(self, path: str, rule: TensorRule, place: Place, index: Index, dtype: np.dtype) -> np.ndarray:
        block, name = rule.block(path, rule.one(self.shapes), index, self.model.vocab_size), rule.name(*place)
        out: np.ndarray | None = None
        for region, at in block.pieces():
            stored = self.tensors[name].read(region)
            if not all_finite(stored):
                raise UserError(f"{self.tensors[name].file}: tensor '{name}' has weights that are NaN or infinite")
            piece = cast_weights(block.arrange(stored), dtype, name)
            if piece.shape == block.shape:
                return piece
            out = np.empty(block.shape, dtype) if out is None else out
            out[at] = piece
        assert out is not None
        return out


def open_hf(directory: Path, model: ModelConfig | None = None) -> HfCheckpoint:
    """Open a Hugging Face directory and check every tensor's name, shape and dtype; no weights are read.

    `model`: the model section to read into, which may pad the vocabulary (default: that of config.json).
    Raises UserError for a missing or unsupported config.json, missing or truncated weights, and names missing, unexpected or wrongly
    shaped tensors.
    """
    config, wrapper = text_part(read_config(directory))
    described = model_from_hf(config)
    _refuse_quantized(config, except_for=_family_of(config).reads_quantized)
    if model is not None:
        if model.mtp_layers and find_family(described.family).stores_mtp:
            described = described.model_copy(update={"mtp_layers": _stored_modules(config, model.mtp_layers)})
        check_same_model(directory, described, model)
    model = model or described
    stored = read_directory(directory)
    tensors = _with_dequantized(stored, config.get("quantization_config"))
    _check_layers(directory, described, tensors)
    rules, shapes = _with_stored_prefix(tensor_rules(model), tensors, wrapper), parameter_shapes(model)
    expected = {name: rule.hf_shape(rule.one(shapes), model.vocab_size) for rule in rules for name in _names(rule, shapes)}
    ignored = find_family(model.family).ignored_tensors
    skipped = (*(() if ignored is None else ignored(dict(config))), *(() if wrapper is None else wrapper.ignored))
    _check_tensors(directory, tensors, expected, skipped)
    _check_tied(directory, model, tensors, rules)
    return HfCheckpoint(directory, dict(config), model, tensors, rules, shapes)


def _stored_modules(config: Mapping[str, Any], wanted: int) -> int:
    """Return the number of modules of multi-token prediction to read: at most those of a checkpoint."""
    return min(wanted, field(config, "num_nextn_predict_layers", int, 0))


def quantization_config(model: ModelConfig, kind: Quantization) -> dict[str, Any]:
    """Return quantization_config of config.json for `export_weights`. Raises UserError for a model that cannot be quantized."""
    return compressed.quantization_config(model, tensor_rules(model), parameter_shapes(model), kind)


def export_weights(
    model: ModelConfig,
    read: ReadParameter,
    directory: Path,
    dtype: DType,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    quantize: Quantization | None = None,
) -> int:
    """Write a model's weights as safetensors to an existing directory, tensor by tensor; return the number of tensors.

    The multipliers of muP are folded into the weights, and `hf_config` describes the model without them. quantize: the matrices of the
    layers, from the values that `read` returns; `dtype` is that of the scales and of all other weights.
    """
    model, read = without_multipliers(model, read)
    shapes, rules, kind = parameter_shapes(model), tensor_rules(model), np.dtype(jnp.dtype(dtype))
    quantized = {rule for rule in rules if compressed.is_quantized(rule)} if quantize else set()

    # Layer by layer, and the experts of a layer one after another: a parameter of a layer is read once.
    placed = [(rule, place) for rule in rules for place in rule.places(shapes)]
    placed.sort(key=lambda each: -1 if each[1][0] is None else each[0].number(each[1][0]))
    planned: list[PlannedTensor] = []
    for rule, place in placed:
        name, shape = rule.name(*place), rule.hf_shape(rule.one(shapes), model.vocab_size)
        if quantize and rule in quantized:
            planned += compressed.planned(name, shape, kind, quantize)
        else:
            planned.append(PlannedTensor(name, shape, kind))
    names = (each.name for each in planned)
    with SafetensorsWriter(directory, planned, max_shard_bytes) as writer:
        for (rule, layer), group in itertools.groupby(placed, key=lambda each: (each[0], each[1][0])):
            values = {path: read(path, layer) for path in rule.params}
            if rule not in quantized:
                values = {path: cast_weights(value, kind, path) for path, value in values.items()}
            for _, (_, expert) in group:
                of_expert = values if expert is None else {path: value.take(expert, EXPERT_DIM) for path, value in values.items()}
                tensor = rule.export(of_expert, model.vocab_size)
                parts = compressed.quantized(rule.hf, tensor, kind, quantize) if quantize and rule in quantized else (tensor,)
                for part in parts:
                    writer.write(next(names), part)
    return len(planned)


def cast_weights(weights: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Return the weights in another float dtype. Raises UserError when finite weights would overflow to infinity."""
    if weights.dtype == dtype:
        return weights
    with np.errstate(over="ignore"):
        cast = weights.astype(dtype)
    if dtype == np.float16 and not np.isfinite(cast).all() and np.isfinite(weights.astype(np.float32)).all():
        raise UserError(f"'{name}' has weights too large for float16; use bfloat16 or float32")
    return cast


def _names(rule: TensorRule, shapes: Mapping[str, Shape]) -> list[str]:
    return [rule.name(*place) for place in rule.places(shapes)]


def _with_stored_prefix(
    rules: list[TensorRule], tensors: Mapping[str, StoredTensor | Mxfp4Tensor | CompressedTensor], wrapper: Wrapper | None = None
) -> list[TensorRule]:
    """Drop the prefix `model.` or `transformer.` for a checkpoint of the base model, saved without its head; add that of a wrapper."""
    if wrapper is not None:
        return [rule.with_prefix("", wrapper.prefix) for rule in rules]
    prefix = rules[0].hf.split(".")[0] + "."
    return rules if any(name.startswith(prefix) for name in tensors) else [rule.with_prefix(prefix, "") for rule in rules]


ROTARY_KEYS = ("rope_theta", "rope_scaling", "max_seq_len")
"""Keys of a model section that no weight depends on, where positions are rotary."""


def check_same_model(directory: Path, described: ModelConfig, wanted: ModelConfig) -> None:
    """Raise UserError when two model sections differ in more than initialization, padding and (of rotary positions) ROTARY_KEYS."""
    free = {"init_std", "pad_vocab_to", "num_kv_heads", "head_dim"}
    ours = {**wanted.model_dump(exclude=free), "num_kv_heads": wanted.kv_heads, "head_dim": wanted.head_width}
    theirs = {**described.model_dump(exclude=free), "num_kv_heads": described.kv_heads, "head_dim": described.head_width}
    rotary = ROTARY_KEYS if wanted.position == described.position == "rope" else ()
    differ = [key for key in ours if ours[key] != theirs[key] and key not in rotary]
    if differ:
        listed = ", ".join(f"model.{key} = {ours[key]} (checkpoint: {theirs[key]})" for key in differ[:_MAX_LISTED])
        leave_out = differ == ["mtp_layers"] and not wanted.mtp_layers
        way = f"; `ridge convert to-hf {directory} DIR --without-mtp` leaves the modules out, then init_from=DIR" if leave_out else ""
        raise UserError(f"the config differs from the model in {directory}: {listed}{way}")


def _check_layers(directory: Path, model: ModelConfig, tensors: Mapping[str, StoredTensor | Mxfp4Tensor | CompressedTensor]) -> None:
    """Raise UserError when config.json describes more layers than there are tensors, before names are made for each of them."""
    if model.num_layers > len(tensors):
        raise UserError(
            f"{directory} lacks weights: its config.json describes {model.num_layers:,} layers, and it has {len(tensors):,} tensors"
        )


def _check_tensors(
    directory: Path,
    tensors: Mapping[str, StoredTensor | Mxfp4Tensor | CompressedTensor],
    expected: Mapping[str, Shape],
    ignored: tuple[str, ...],
) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise UserError(f"{directory} lacks {len(missing)} of {len(expected)} tensors: {_some(missing)}")
    wrong_shape = [
        f"{name} is {_shape(tensors[name].shape)}, not {_shape(shape)}" for name, shape in expected.items() if tensors[name].shape != shape
    ]
    if wrong_shape:
        raise UserError(f"{directory} has tensors whose shape differs from its config.json: {_some(wrong_shape)}")
    known = lambda name: _BUFFERS.search(name) or name == "lm_head.weight" or name.startswith(ignored)  # noqa: E731
    unexpected = [name for name in tensors if name not in expected and not known(name)]
    if unexpected:
        raise UserError(f"{directory} has {len(unexpected)} tensors that the model does not have: {_some(unexpected)}")
    unsupported = [f"{name} ({tensors[name].dtype})" for name in expected if tensors[name].dtype not in FLOAT_DTYPES]
    if unsupported:
        raise UserError(f"{directory} has weights of an unsupported dtype: {_some(unsupported)} (supported: {', '.join(FLOAT_DTYPES)})")


def _check_tied(
    directory: Path, model: ModelConfig, tensors: Mapping[str, StoredTensor | Mxfp4Tensor | CompressedTensor], rules: list[TensorRule]
) -> None:
    """Raise UserError when a tied checkpoint has an lm_head that differs from its embedding: it would be silently dropped."""
    if not model.tie_embeddings or "lm_head.weight" not in tensors:
        return
    head = tensors["lm_head.weight"]
    table = tensors[next(rule.hf for rule in rules if rule.params == ("embedding",))]
    rows = max(1, 2**24 // (max(model.embed_dim, 1) * 4))
    same = head.shape == table.shape and head.dtype == table.dtype
    starts = range(0, table.shape[0], rows) if same else ()
    blocks = ((slice(at, at + rows), slice(None)) for at in starts)
    if not same or not all(head.read(block).tobytes() == table.read(block).tobytes() for block in blocks):
        raise UserError(f"{directory}: config.json has tie_word_embeddings=true, but lm_head.weight differs from the embedding table")


def _some(items: list[str]) -> str:
    return ", ".join(items[:_MAX_LISTED]) + (f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else "")


def _shape(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
