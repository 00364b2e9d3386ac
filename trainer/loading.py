"""A model ready for use by a command: from a run directory or a Hugging Face directory, with its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config, ModelConfig
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer
from ridgeline.models.decoder import Decoder
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.pretrained import Source, load_params, open_source
from ridgeline.trainer.state import ModelSpec, model_spec


@dataclass(frozen=True)
class LoadedModel:
    """Parameters on their devices, and what belongs to them."""

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
        """The tokenizer it was trained with. Raises UserError when there is none beside the model."""
        place = self.source.tokenizer_dir
        if place is None:
            raise UserError(f"{self.source.path} has no tokenizer (looked for {self.source.path / 'tokenizer'})")
        return load_tokenizer(place)

    @property
    def eos_ids(self) -> list[int]:
        """All ids that end a text: the tokenizer's, and those a Hugging Face generation_config.json or config.json adds."""
        place = self.source.tokenizer_dir
        files = [] if place is None else [place / "generation_config.json", place / "config.json"]
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

    partition: how to divide the parameters, from the source's config; default: one device.
    Raises UserError: no model at `path`, no good checkpoint, damaged or foreign weights.
    """
    source = open_source(path)
    config = source.config
    partitioner = Partitioner.single() if partition is None else partition(config)
    spec = model_spec(config, partitioner)
    params, found = load_params(source, spec, step)
    return LoadedModel(source, config, partitioner, spec, params, found)
