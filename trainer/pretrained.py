"""Parameters to start from: those of a run, or of a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import CheckpointConfig, Config, ModelConfig, PrecisionConfig
from ridgeline.loaders.tokenizers import load_tokenizer
from ridgeline.models.convert import CONFIG_NAME, HfCheckpoint, check_same_model, open_hf
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.param_slices import PARAMS_ONLY
from ridgeline.trainer.checkpoint.payload import named_leaves
from ridgeline.trainer.config_guard import check_tokenizer
from ridgeline.trainer.state import ModelSpec, TrainState

Tree = Any


@dataclass(frozen=True)
class Source:
    """A directory that holds a model."""

    path: Path
    config: Config
    """Of the run; for a Hugging Face directory the defaults, with its model, and its dtype for parameters and compute."""
    hf: HfCheckpoint | None
    """None for a run."""

    @property
    def tokenizer_dir(self) -> Path | None:
        """Where its tokenizer is: beside a Hugging Face model; in the run directory, else in the run's first corpus; None if nowhere."""
        if self.hf is not None:
            return self.path
        places = [self.path / "tokenizer", *(source.path / "tokenizer" for source in self.config.data.train[:1])]
        return next((place for place in places if place.is_dir()), None)


def open_source(path: Path) -> Source:
    """Open a run directory or a Hugging Face directory, by what it holds; no weights are read. Raises UserError when it is neither."""
    if (path / "config.yaml").is_file():
        return Source(path, from_resolved(path / "config.yaml"), None)
    if (path / CONFIG_NAME).is_file():
        hf = open_hf(path)
        dtype = hf.stored_dtype
        return Source(path, Config(model=hf.model, precision=PrecisionConfig(params=dtype, compute=dtype)), hf)
    if not path.exists():
        raise UserError(f"no such run directory or Hugging Face directory: {path}")
    raise UserError(f"{path} is no model: it has neither config.yaml (a run directory) nor {CONFIG_NAME} (a Hugging Face directory)")


def load_params(source: Source, spec: ModelSpec, step: int | None = None) -> tuple[Tree, int | None]:
    """Return the parameters in the dtypes and shardings of `spec`, and the step they are from (None for a Hugging Face directory).

    A run gives its newest good checkpoint, or `step`; it is only read. Raises UserError when there is none or it is another model's.
    """
    abstract = jax.tree.map(_with_sharding, spec.abstract_params, spec.param_shardings)
    if source.hf is not None:
        if step is not None:
            raise UserError(f"{source.path} is a Hugging Face directory: it has no steps to choose from")
        return source.hf.load(abstract), None
    checkpointer = Checkpointer(source.path / "checkpoints", CheckpointConfig(), read_only=True)
    found = checkpointer.latest_step() if step is None else step
    stored = {} if found is None else checkpointer.read_metadata(found)["arrays"]
    as_stored = {"params": abstract}
    dtypes = {name: stored[name]["dtype"] for name in named_leaves(as_stored) if name in stored}
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtypes.get(name, leaf.dtype)), sharding=leaf.sharding)
        for name, leaf in named_leaves(as_stored).items()
    ]
    restored, metadata = checkpointer.restore(jax.tree.unflatten(jax.tree.structure(as_stored), leaves), step, partial=True)
    params = jax.tree.map(lambda have, want: have.astype(want.dtype), restored["params"], abstract)
    return params, int(metadata["step"])


def start_from(path: Path, model: ModelConfig, tokenizer_sha256: str, spec: ModelSpec, state: TrainState) -> TrainState:
    """Return a new run's state with the parameters of another model in place of the random ones (`init_from`).

    Raises UserError when `path` holds no model, one that differs from the run's, or one with another tokenizer than the data's.
    """
    source = open_source(path)
    if source.tokenizer_dir is not None:
        check_tokenizer(load_tokenizer(source.tokenizer_dir).sha256, tokenizer_sha256, str(path))
    if source.hf is not None:
        source = replace(source, hf=open_hf(path, model))
    else:
        check_same_model(path, source.config.model, model)
    return replace(state, params=load_params(source, spec)[0])


def holds_only_params(checkpointer: Checkpointer) -> bool:
    """Whether the newest checkpoint is an import: parameters to start from, without optimiser state."""
    step = checkpointer.latest_step()
    return step is not None and checkpointer.read_metadata(step).get("kind") == PARAMS_ONLY


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
