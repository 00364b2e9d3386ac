"""Trained models: the parameters of a run or of a Hugging Face directory, to start a run from or for a command to use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import CheckpointConfig, Config, ModelConfig, PrecisionConfig
from ridgeline.loaders.manifest import check_same_tokenizer
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer
from ridgeline.models.decoder import Decoder
from ridgeline.models.huggingface.convert import CONFIG_NAME, HfCheckpoint, check_same_model, open_hf
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.checkpoint.param_slices import PARAMS_ONLY
from ridgeline.trainer.checkpoint.payload import named_leaves
from ridgeline.trainer.checkpoint.reader import CheckpointReader
from ridgeline.trainer.state import ModelSpec, TrainState, model_spec

Tree = Any


@dataclass(frozen=True)
class Source:
    """A directory with a model."""

    path: Path
    config: Config
    """Of the run. For a Hugging Face directory: the defaults with its model, and its dtype for parameters and compute."""
    hf: HfCheckpoint | None
    """None for a run directory."""

    @property
    def tokenizer_dir(self) -> Path | None:
        """Directory of its tokenizer; None if there is none.

        A Hugging Face model has it in the same directory; a run in its own directory, else in its first corpus.
        """
        if self.hf is not None:
            return self.path
        places = [self.path / "tokenizer", *(source.path / "tokenizer" for source in self.config.data.train[:1])]
        return next((place for place in places if place.is_dir()), None)


def open_source(path: Path) -> Source:
    """Open a run directory or a Hugging Face directory without reading weights. Raises UserError when `path` is neither."""
    if (path / "config.yaml").is_file():
        return Source(path, from_resolved(path / "config.yaml"), None)
    if (path / CONFIG_NAME).is_file():
        hf = open_hf(path)
        dtype = hf.stored_dtype
        return Source(path, Config(model=hf.model, precision=PrecisionConfig(params=dtype, compute=dtype)), hf)
    if not path.exists():
        raise UserError(f"no such run directory or Hugging Face directory: {path}")
    raise UserError(f"{path} contains no model: neither config.yaml (run directory) nor {CONFIG_NAME} (Hugging Face directory)")


def load_params(source: Source, spec: ModelSpec, step: int | None = None) -> tuple[Tree, int | None]:
    """Return the parameters in the dtypes and shardings of `spec`, and their step (None for a Hugging Face directory).

    From a run: its newest good checkpoint, or `step`. Raises UserError when there is none, or when it holds another model.
    """
    abstract = jax.tree.map(_with_sharding, spec.abstract_params, spec.param_shardings)
    if source.hf is not None:
        if step is not None:
            raise UserError(f"{source.path} is a Hugging Face directory: it has no steps")
        return source.hf.load(abstract), None
    reader = CheckpointReader(source.path / "checkpoints", CheckpointConfig())
    found = reader.latest_step() if step is None else step
    stored = {} if found is None else reader.read_metadata(found)["arrays"]
    as_stored = {"params": abstract}
    dtypes = {name: stored[name]["dtype"] for name in named_leaves(as_stored) if name in stored}
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtypes.get(name, leaf.dtype)), sharding=leaf.sharding)
        for name, leaf in named_leaves(as_stored).items()
    ]
    restored, metadata = reader.restore(jax.tree.unflatten(jax.tree.structure(as_stored), leaves), step, partial=True)
    params = jax.tree.map(lambda have, want: have.astype(want.dtype), restored["params"], abstract)
    return params, int(metadata["step"])


def start_from(path: Path, model: ModelConfig, tokenizer_sha256: str, spec: ModelSpec, state: TrainState) -> TrainState:
    """Return the state of a new run with its random parameters replaced by those of the model at `path` (`init_from`).

    Raises UserError: no model at `path`, another architecture than the run's, or another tokenizer than the data's.
    """
    source = open_source(path)
    if source.tokenizer_dir is not None:
        check_same_tokenizer(load_tokenizer(source.tokenizer_dir).sha256, tokenizer_sha256, str(path))
    if source.hf is not None:
        source = replace(source, hf=open_hf(path, model))
    else:
        check_same_model(path, source.config.model, model)
    return replace(state, params=load_params(source, spec)[0])


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

    @cached_property
    def decoder(self) -> Decoder:
        """The module with its parameters."""
        decoder: Decoder = self.spec.merge(self.params)
        return decoder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was trained with. Raises UserError when the source has none."""
        directory = self.source.tokenizer_dir
        if directory is None:
            raise UserError(f"{self.source.path} has no tokenizer (looked for {self.source.path / 'tokenizer'})")
        return load_tokenizer(directory)

    @property
    def eos_ids(self) -> list[int]:
        """All ids that end a text: of the tokenizer, generation_config.json and config.json."""
        directory = self.source.tokenizer_dir
        files = [] if directory is None else [directory / "generation_config.json", directory / "config.json"]
        ids: set[int] = {self.tokenizer.eos_id}
        for file in files:
            if file.is_file():
                try:
                    declared = json.loads(file.read_text()).get("eos_token_id")
                except (OSError, ValueError, AttributeError) as error:
                    raise UserError(f"{file} cannot be read: {error}") from error
                ids |= set(declared if isinstance(declared, list) else [] if declared is None else [declared])
        return sorted(i for i in ids if i < self.model.vocab_size)


def load_model(path: Path, *, step: int | None = None, partition: Callable[[Config], Partitioner] | None = None) -> LoadedModel:
    """Load the newest good checkpoint of a run (or `step`), or a Hugging Face directory.

    partition: returns the partitioner for a config; None: one device.
    Raises UserError: no model at `path`, no good checkpoint, or damaged or unknown weights.
    """
    source = open_source(path)
    config = source.config
    partitioner = Partitioner.single() if partition is None else partition(config)
    spec = model_spec(config, partitioner)
    params, found = load_params(source, spec, step)
    return LoadedModel(source, config, partitioner, spec, params, found)
