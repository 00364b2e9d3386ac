"""Trained models: the parameters of a run or of a Hugging Face directory, to start a run from or for a command to use."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import read_object, shortened
from ridgeline.configs.load import from_resolved, override_mesh
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.rules import fit_devices, place_on_devices
from ridgeline.configs.schema import CheckpointConfig, Config, PrecisionConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.loaders.hf_files import GENERATION_CONFIG, copy_files, left_behind
from ridgeline.loaders.manifest import check_same_tokenizer
from ridgeline.loaders.tokenizers import Tokenizer, holds_tokenizer, load_tokenizer
from ridgeline.models.decoder import Decoder
from ridgeline.models.huggingface.convert import CONFIG_NAME, ROTARY_KEYS, HfCheckpoint, check_same_model, open_hf
from ridgeline.models.huggingface.peft import ADAPTER_CONFIG, PeftAdapter, base_of, open_adapter
from ridgeline.models.int8 import INT8, Index, is_matrix, quantized_on_load
from ridgeline.models.lora import with_magnitudes
from ridgeline.rundir.bench_results import config_sha256
from ridgeline.rundir.files import discard
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.checkpoint.directories import step_dir
from ridgeline.trainer.checkpoint.identity import check_config, check_tokenizer_files
from ridgeline.trainer.checkpoint.param_slices import PARAMS_ONLY, open_array
from ridgeline.trainer.checkpoint.payload import check_matches, named_leaves
from ridgeline.trainer.checkpoint.reader import CheckpointReader, check_startable
from ridgeline.trainer.state import ModelSpec, TrainState, model_spec

Tree = Any
_log = logging.getLogger("ridgeline")


@dataclass(frozen=True)
class Source:
    """A directory with a model."""

    path: Path
    config: Config
    """Of the run. For a Hugging Face directory: the defaults with its model, and its dtype for parameters and compute."""
    hf: HfCheckpoint | None
    """None for a run directory."""
    adapter: PeftAdapter | None = None
    """Of an adapter directory, whose base model `hf` is."""

    @property
    def tokenizer_dir(self) -> Path | None:
        """Directory of its tokenizer; None if there is none.

        A Hugging Face model has it in the same directory; a run in its own directory, else in its first corpus.
        """
        places = [self.files_dir, *(source.path / "tokenizer" for source in self.config.data.train[:1])]
        return next((place for place in places if holds_tokenizer(place)), None)

    @property
    def files_dir(self) -> Path:
        """Directory of the tokenizer and of generation_config.json; either may be absent."""
        return self.path / "tokenizer" if self.hf is None else self.hf.directory

    @property
    def config_sha256(self) -> str | None:
        """Digest of the run's config; None for a Hugging Face directory."""
        return config_sha256(self.config) if self.hf is None else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer it was trained with; None if there is none."""
        if self.tokenizer_dir is None:
            return None
        tokenizer = load_tokenizer(self.tokenizer_dir)
        if self.config.data.train and not tokenizer.records_add_bos:
            tokenizer.add_bos = True  # trained before the rule was recorded: all documents began with BOS
        return tokenizer

    def tokenizer_rule(self) -> bool | None:
        """Whether documents begin with BOS by the rule of its own tokenizer; None if it has none."""
        return None if self.tokenizer is None or not holds_tokenizer(self.files_dir) else self.tokenizer.add_bos


def open_source(path: Path, base: Path | None = None) -> Source:
    """Open a run directory, a Hugging Face directory or an adapter directory of peft without reading weights.

    base: Hugging Face directory of an adapter's base model; None: the one that the adapter names. Raises UserError when `path` is none.
    """
    if (path / "config.yaml").is_file():
        return Source(path, from_resolved(path / "config.yaml"), None)
    if (path / CONFIG_NAME).is_file():
        hf = open_hf(path)
        dtype = hf.stored_dtype
        return Source(path, Config(model=hf.model, precision=PrecisionConfig(params=dtype, compute=dtype)), hf)
    if (path / ADAPTER_CONFIG).is_file():
        hf = open_hf(base or base_of(path))
        adapter = open_adapter(path, hf.model)
        precision = PrecisionConfig(params=adapter.stored_dtype, compute=hf.stored_dtype)
        return Source(path, Config(model=hf.model, lora=adapter.lora, precision=precision), hf, adapter)
    if not path.exists():
        raise UserError(f"no such run directory or Hugging Face directory: {path}")
    raise UserError(f"{path} contains no model: neither config.yaml (run directory) nor {CONFIG_NAME} (Hugging Face directory)")


def changed_positions(path: Path, start: ModelConfig, model: ModelConfig) -> list[str]:
    """Return a line per setting of rotary positions in which a run's model differs from the one at `path` that it starts from.

    A warning follows where rows are no longer than before: then the change may be a mistake.
    """
    before, after = start.model_dump(), model.model_dump()
    changed = [key for key in ROTARY_KEYS if before[key] != after[key]]
    lines = [f"{path} has model.{key} = {before[key]}, this run {after[key]}" for key in changed]
    if set(changed) - {"max_seq_len"} and after["max_seq_len"] <= before["max_seq_len"]:
        lines.append("WARNING: RoPE settings changed and model.max_seq_len is not larger: copy them from there unless the change is meant")
    return lines


def load_params(source: Source, spec: ModelSpec, step: int | None = None) -> tuple[Tree, int | None]:
    """Return the parameters in the dtypes and shardings of `spec`, and their step (None for a Hugging Face directory).

    Without adapters where the source has none. From a run: its newest good checkpoint, or `step`. Raises UserError when there is none, or
    when it holds another model.
    """
    params, _, found = _load(source, spec, step)
    return params, found


def _load(source: Source, spec: ModelSpec, step: int | None = None, opt_state: Tree | None = None) -> tuple[Tree, Tree | None, int | None]:
    """Return the parameters as `load_params`, the optimizer state like `opt_state` (None: without), and the step."""
    abstract, param_axes = _of_source(source, spec)
    if source.hf is not None:
        if step is not None:
            raise UserError(f"{source.path} is a Hugging Face directory: it has no steps")
        if source.adapter is None:
            return source.hf.load(abstract), None, None
        adapters, others = spec.split(abstract)
        return spec.join(source.adapter.load(adapters), source.hf.load(others)), None, None
    reader = CheckpointReader(source.path / "checkpoints", CheckpointConfig())
    found = reader.latest_step() if step is None else step
    stored = {} if found is None else reader.read_metadata(found)["arrays"]
    rows = source.config.model.vocab_size
    wanted, matrices = _as_stored(abstract, param_axes, stored, rows), _to_quantize(source, spec)
    if matrices and stored:
        check_matches(stored, wanted, partial=True, where=str(source.path))
        wanted = {"params": _without(wanted["params"], matrices)}
    restored, metadata = reader.restore({**wanted, **_optimizer(opt_state)}, step, partial=True)
    if note := check_config(source.config, metadata, source.path):
        _log.warning(note)
    if source.tokenizer_dir is not None:
        check_tokenizer_files(metadata, source.tokenizer_dir)
    others = (_without(tree, matrices) for tree in (abstract, param_axes))
    params = jax.tree.map(lambda have, want, axes: _fit(have, want, axes, rows), restored["params"], *others)
    root = step_dir(source.path / "checkpoints", int(metadata["step"]))
    for path, leaf in matrices.items():
        array = open_array(root.absolute(), f"params.{'.'.join(path)}")
        _put(params, path, quantized_on_load(leaf, partial(_read_block, array)))
    return params, restored.get("opt_state"), int(metadata["step"])


def _read_block(array: Any, index: Index) -> np.ndarray:
    return np.asarray(array[index].read().result(), np.float32)


def _optimizer(opt_state: Tree | None) -> dict[str, Tree]:
    """Return what to restore for an optimizer state, arrays or ShapeDtypeStructs; nothing for None."""
    if opt_state is None:
        return {}
    return {"opt_state": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), opt_state)}


def _of_source(source: Source, spec: ModelSpec) -> tuple[Tree, Tree]:
    """Return the parameters of `spec` that a source has, as ShapeDtypeStructs with shardings, and their logical axes.

    Of a run whose matrices are not in 8 bits, those that are to be quantized are one array.
    """
    abstract, axes = jax.tree.map(_with_sharding, spec.abstract_params, spec.param_shardings), spec.param_axes
    if spec.adapted and source.config.lora.rank is None:
        abstract, axes = spec.split(abstract)[1], spec.split(axes)[1]
    if source.hf is None and source.config.lora.base != INT8:
        abstract, axes = (jax.tree.map(lambda node: node[INT8] if is_matrix(node) else node, t, is_leaf=_is_node) for t in (abstract, axes))
    return abstract, axes


def _is_node(tree: Tree) -> bool:
    return is_matrix(tree) or not isinstance(tree, Mapping)


def _to_quantize(source: Source, spec: ModelSpec) -> dict[tuple[str, ...], dict[str, jax.ShapeDtypeStruct]]:
    """Return path -> the two parameters of each matrix that the run has in 8 bits and the source, a run, has not."""
    if source.config.lora.base == INT8:
        return {}
    abstract = jax.tree.map(_with_sharding, spec.abstract_params, spec.param_shardings)
    leaves = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=is_matrix)[0]
    return {tuple(key.key for key in path): leaf for path, leaf in leaves if is_matrix(leaf)}


def _without(tree: Tree, paths: Collection[tuple[str, ...]], at: tuple[str, ...] = ()) -> Tree:
    """Return a nested dict without the nodes at these paths."""
    kept = {name: node for name, node in tree.items() if (*at, name) not in paths}
    return {name: _without(node, paths, (*at, name)) if isinstance(node, dict) else node for name, node in kept.items()}


def _put(tree: Tree, path: tuple[str, ...], node: Tree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = node


def _as_stored(abstract: Tree, param_axes: Tree, stored: Mapping[str, Any], rows: int) -> Tree:
    """Return what to restore for these parameters. stored: name -> shape and dtype in the checkpoint; rows: of its vocabulary."""
    tree = {"params": abstract}
    axes = named_leaves({"params": jax.tree.map(_Axes, param_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))})
    leaves = [_stored_leaf(leaf, axes[name].names, stored.get(name), rows) for name, leaf in named_leaves(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@dataclass(frozen=True)
class _Axes:
    """The logical axes of a parameter, as a leaf of a tree."""

    names: tuple[str | None, ...]


def _stored_leaf(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...], stored: Any, rows: int) -> jax.ShapeDtypeStruct:
    """Return what to restore for a parameter: in its stored dtype, and in its stored shape where only vocabulary padding differs."""
    if stored is None:
        return leaf
    shape, dtype, sharding = tuple(stored["shape"]), jnp.dtype(stored["dtype"]), leaf.sharding
    padded = [axis == "vocab" and min(have, want) >= rows for axis, have, want in zip(axes, shape, leaf.shape, strict=False)]
    if (
        shape == leaf.shape
        or len(shape) != len(leaf.shape)
        or any(have != want and not free for have, want, free in zip(shape, leaf.shape, padded, strict=True))
    ):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)  # a difference is refused with both shapes
    assert isinstance(sharding, NamedSharding)
    spec = [None if axis == "vocab" else part for axis, part in zip(axes, _padded_spec(sharding, len(shape)), strict=True)]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _padded_spec(sharding: NamedSharding, dims: int) -> list[Any]:
    return [*sharding.spec, *[None] * (dims - len(sharding.spec))]


def _fit(have: jax.Array, want: jax.ShapeDtypeStruct, axes: tuple[str | None, ...], rows: int) -> jax.Array:
    """Return a restored parameter in the dtype of the run, its vocabulary padding replaced by zeros of the run's length."""
    if have.shape == want.shape:
        return have.astype(want.dtype)
    dim = axes.index("vocab")

    def resize(table: jax.Array) -> jax.Array:
        kept = jax.lax.slice_in_dim(table.astype(want.dtype), 0, rows, axis=dim)
        return jnp.pad(kept, [(0, want.shape[at] - rows) if at == dim else (0, 0) for at in range(table.ndim)])

    resized: jax.Array = jax.jit(resize, out_shardings=want.sharding)(have)
    return resized


def start_from(
    path: Path,
    model: ModelConfig,
    tokenizer_sha256: str,
    spec: ModelSpec,
    state: TrainState,
    lora: LoraConfig | None = None,
    *,
    with_optimizer: bool = False,
) -> TrainState:
    """Return the state of a new run with its random parameters replaced by those of the model at `path` (`init_from`).

    The adapters of `lora` are those of the model, or new ones where it has none. with_optimizer: so with the optimizer state, moments and
    their counts (`init_optimizer`). Raises UserError: no model at `path`, another architecture or other adapters than the run's, another
    tokenizer than the data's.
    """
    source = _fitting_source(path, model, tokenizer_sha256, lora)
    if spec.adapted:  # random ones, replaced now: with them the devices would hold the model twice
        for leaf in jax.tree.leaves(spec.split(state.params)[1]):
            leaf.delete()
    params, opt_state, _ = _load(source, spec, opt_state=state.opt_state if with_optimizer else None)
    if with_optimizer:
        assert opt_state is not None  # check_optimizer
        state = replace(state, opt_state=opt_state)
    if not spec.adapted or source.config.lora.rank is not None:
        return replace(state, params=params)
    whole = spec.join(spec.split(state.params)[0], params)
    fit = jax.jit(lambda params: spec.split(with_magnitudes(params, spec.param_axes))[0], out_shardings=spec.split(spec.param_shardings)[0])
    return replace(state, params=spec.join(fit(whole), params))


def check_source(
    path: Path, model: ModelConfig, tokenizer_sha256: str, spec: ModelSpec, lora: LoraConfig | None = None, opt_state: Tree | None = None
) -> None:
    """Raise UserError where `start_from` would, by all but the weights. `opt_state`: to be carried over. Process 0."""
    source = _fitting_source(path, model, tokenizer_sha256, lora)
    if source.hf is not None:
        return
    metadata = _startable(path)
    wanted = _as_stored(*_of_source(source, spec), metadata["arrays"], source.config.model.vocab_size)
    wanted = {**wanted, **_optimizer(opt_state)}
    check_matches(metadata["arrays"], wanted, partial=True, where=str(step_dir(path / "checkpoints", metadata["step"])))


def _startable(path: Path) -> dict[str, Any]:
    """Return the metadata of a run's newest good checkpoint. Raises UserError where there is none."""
    metadata = check_startable(path / "checkpoints")
    if metadata is None:
        raise UserError(f"no checkpoint in {path / 'checkpoints'}")
    return metadata


def check_optimizer(path: Path, config: Config) -> None:
    """Raise UserError where the optimizer state of the model at `path` is not one for this config (`init_optimizer`). Process 0."""
    source = open_source(path)
    metadata = None if source.hf is not None else _startable(path)
    if metadata is None or metadata.get("kind") == PARAMS_ONLY:
        raise UserError(f"init_optimizer: {path} has no optimizer state; set init_optimizer=false, or init_from to a training run")
    found, wanted = source.config, config
    for key, theirs, ours in (
        ("optimizer.kind", found.optimizer.kind, wanted.optimizer.kind),
        ("precision.moments", found.precision.moments, wanted.precision.moments),
        ("lora.rank", found.lora.rank, wanted.lora.rank),
    ):
        if ours != theirs:
            raise UserError(f"init_optimizer: {path} has {key}={theirs}, this config {ours}; set {key}={theirs}, or init_optimizer=false")


def _fitting_source(path: Path, model: ModelConfig, tokenizer_sha256: str, lora: LoraConfig | None) -> Source:
    """Open the model at `path` and compare its architecture, adapters and tokenizer with those of a run. Raises UserError."""
    source = open_source(path)
    _check_adapters(source, model, lora or LoraConfig())
    if source.tokenizer is not None:
        check_same_tokenizer(source.tokenizer.sha256, tokenizer_sha256, str(path))
    if source.hf is not None:
        source = replace(source, hf=open_hf(source.hf.directory, model))
    else:
        check_same_model(path, source.config.model, model)
    return source


def _check_adapters(source: Source, model: ModelConfig, wanted: LoraConfig) -> None:
    """Raise UserError where a source has adapters that the run would not have."""
    found = source.config.lora
    if found.rank is None:
        return
    if wanted.rank is None:
        settings = f"lora.rank={found.rank} lora.alpha={found.alpha:g}"
        raise UserError(
            f"{source.path} has adapters: train them on with {settings}, or write the merged model with `ridge convert to-hf --merge`"
        )
    ours, theirs = ({**lora.model_dump(), "targets": list(lora.targets_of(model))} for lora in (wanted, found))
    differ = [key for key in ours if key not in ("dropout", "base") and ours[key] != theirs[key]]
    if differ:
        listed = ", ".join(f"lora.{key} = {ours[key]} (there: {theirs[key]})" for key in differ)
        raise UserError(f"the config differs from the adapters in {source.path}: {listed}")
    if found.base == INT8 != wanted.base:
        raise UserError(f"{source.path} has its frozen matrices in 8 bits: set lora.base=int8, or start from what it was started from")


def merged_tokenizer(run: Path, corpus: Path, add_bos: bool, source: Path) -> tuple[Path, list[str]]:
    """Make the tokenizer of a run that starts from the model at `source`; return its temporary directory in the run, and notes.

    It has the files of that model (chat template, pad token, further special tokens, generation settings), whose tokenizer was compared
    with the corpus's (`start_from`), and the rule for BOS of the documents. `corpus`: directory of the corpus's copy, used where the source
    has no tokenizer, or one of a kind without Hugging Face files.
    Raises UserError for files that cannot be read; OSError.
    """
    notes, opened, merged = [], open_source(source), run / ".tokenizer.merged"
    if opened.tokenizer is not None and opened.tokenizer.add_bos != add_bos:
        begin = {True: "begin with BOS", False: "do not begin with BOS"}
        notes.append(f"note: the documents {begin[add_bos]}, those of {source} {begin[not add_bos]}; the run uses the former")
    if lost := left_behind(opened.tokenizer_dir or opened.files_dir):
        notes.append(f"note: not copied from {source}: {', '.join(lost)} (tokenizers with their own Python code are not supported)")
    discard(merged)
    for place in (run / "tokenizer", opened.files_dir, opened.tokenizer_dir):  # an import that is trained itself has its own
        if place is not None and place.is_dir():
            copy_files(place, merged)
    if not holds_tokenizer(merged):
        shutil.copytree(corpus, merged, dirs_exist_ok=True)
    tokenizer = load_tokenizer(merged)
    tokenizer.add_bos = add_bos
    tokenizer.write_rule(merged)
    return merged, notes


def holds_only_params(checkpointer: CheckpointReader) -> bool:
    """Return whether the newest checkpoint is an import: parameters without optimizer state."""
    step = checkpointer.latest_step()
    return step is not None and checkpointer.read_metadata(step).get("kind") == PARAMS_ONLY


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters on devices."""

    source: Source
    config: Config
    partitioner: Partitioner
    spec: ModelSpec
    params: Any
    step: int | None
    """Of the checkpoint; None for a Hugging Face directory."""

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.config.model

    @property
    def devices(self) -> str:
        """The devices in words, and how many the config's mesh names, or are present, where that is more."""
        mesh = self.partitioner.mesh
        device, size = mesh.devices.flat[0], mesh.size
        used = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        wanted = math.prod(self.source.config.mesh.sizes.values())
        kind = device.device_kind if device.platform != "cpu" else "CPU"
        text = f"{size} {kind} device{'s' if size > 1 else ''}" + (f" (mesh {used})" if used else "")
        if wanted > size:
            return text + f" of the {wanted} that the config's mesh names"
        present = len(jax.local_devices())
        return text + (f" of {present}" if present > size else "")

    @cached_property
    def decoder(self) -> Decoder:
        """The module with its parameters."""
        decoder: Decoder = self.spec.merge(self.params)
        return decoder

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was trained with. Raises UserError when the source has none."""
        if self.source.tokenizer is None:
            raise UserError(f"{self.source.path} has no tokenizer (looked in {self.source.files_dir})")
        return self.source.tokenizer

    @property
    def eos_ids(self) -> list[int]:
        """All ids that end a text: of the tokenizer, generation_config.json and config.json. Raises UserError for one that is no id."""
        return ending_ids(self.tokenizer, self.source.tokenizer_dir, self.model.vocab_size)


def ending_ids(tokenizer: Tokenizer, directory: Path | None, vocab_size: int) -> list[int]:
    """Return the ids that end a text: of the tokenizer, and of generation_config.json and config.json in its directory.

    Raises UserError for one that is no id.
    """
    files = [] if directory is None else [directory / GENERATION_CONFIG, directory / CONFIG_NAME]
    ids: set[int] = {tokenizer.eos_id}
    for file in files:
        declared = read_object(file).get("eos_token_id") if file.is_file() else None
        listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if not all(isinstance(one, int) for one in listed):
            raise UserError(f"{file}: 'eos_token_id' must be an id or a list of ids, got {shortened(declared)}")
        ids |= set(listed)
    return sorted(i for i in ids if 0 <= i < vocab_size)


def _with_even_vocabulary(config: Config) -> Config:
    """Return the config with its vocabulary padded to a multiple of mesh.tensor, which shards it."""
    rows, tensor = config.model.padded_vocab_size, max(1, config.mesh.tensor)
    padded = -(-rows // tensor) * tensor
    return config if padded == rows else config.model_copy(update={"model": config.model.model_copy(update={"pad_vocab_to": padded})})


def load_model(
    path: Path,
    *,
    step: int | None = None,
    adapt: Callable[[Config], Config] = lambda config: config,
    mesh: Sequence[str] = (),
) -> LoadedModel:
    """Load the newest good checkpoint of a run (or `step`), or a Hugging Face directory, without a whole copy on any device.

    It is sharded over all devices that the config's mesh names, or over the largest smaller mesh that this process has.
    adapt: changes the config before that, such as its batch; mesh: overrides `mesh.KEY=VALUE`, which must fit the devices.
    Raises UserError: no model at `path`, no good checkpoint, damaged or unknown weights, or a mesh that does not fit.
    """
    source = open_source(path)
    config = adapt(override_mesh(source.config, mesh))  # which may create virtual devices
    devices = jax.local_devices()
    config = (place_on_devices if mesh else fit_devices)(_with_even_vocabulary(config), len(devices))
    if source.hf is not None:
        source = replace(source, hf=open_hf(source.hf.directory, config.model))
    partitioner = Partitioner.of(build_mesh(config.mesh, devices[: math.prod(config.mesh.sizes.values())]), config)
    spec = model_spec(config, partitioner)
    params, found = load_params(source, spec, step)
    return LoadedModel(source, config, partitioner, spec, params, found)
