"""The files of a Hugging Face directory besides weights and config.json: tokenizer and generation settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.configs.foreign import read_inside, read_object
from ridgeline.loaders.chat_template import TEMPLATES
from ridgeline.loaders.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

GENERATION_CONFIG = "generation_config.json"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_CONFIG,
)
"""Copied unchanged, on import and on export."""


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy those of FILES and of the directory TEMPLATES that `source` has; return their names.

    Raises UserError for a link that leaves the directory, a file that is not regular, or one that is too large; OSError.
    """
    names = [name for name in FILES if (source / name).exists() or (source / name).is_symlink()]
    names += sorted(f"{TEMPLATES}/{path.name}" for path in (source / TEMPLATES).glob("*.jinja"))
    for name in names:
        content = read_inside(source, source / name)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return names


def copy_tokenizer(source: Path, target: Path, config: Mapping[str, Any]) -> list[str]:
    """Copy the files of a Hugging Face directory besides the weights into a run directory; return their names.

    Without a generation_config.json the ids of special tokens in `config` (its config.json) are written as one: they would be lost.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = copy_files(source, target)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    if GENERATION_CONFIG not in names and ids:
        (target / GENERATION_CONFIG).write_text(json.dumps(ids, indent=2) + "\n")
        names.append(GENERATION_CONFIG)
    return names


def left_behind(source: Path) -> list[str]:
    """Return the files of a Hugging Face directory that change its tokenizer and are not copied: its own Python code."""
    return sorted(path.name for path in source.glob("*token*.py"))


def special_ids(tokenizer: Tokenizer | None, directory: Path | None) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and (where there is one) pad_token_id for config.json; null where there is no such token.

    directory: with the files of the model; without a tokenizer the ids of its generation_config.json count.
    """
    declared = {}
    if directory is not None and (directory / GENERATION_CONFIG).is_file():
        declared = read_object(directory / GENERATION_CONFIG)
    pad = {"pad_token_id": declared["pad_token_id"]} if isinstance(declared.get("pad_token_id"), int) else {}
    if tokenizer is None:
        return {"bos_token_id": declared.get("bos_token_id"), "eos_token_id": declared.get("eos_token_id"), **pad}
    bos_id = None if tokenizer.bos_id == tokenizer.eos_id else tokenizer.bos_id
    return {"bos_token_id": bos_id, "eos_token_id": tokenizer.eos_id, **pad}


def write_tokenizer(tokenizer: Tokenizer | None, source: Path, target: Path) -> list[str]:
    """Write a model's tokenizer and generation settings as Hugging Face files; return their names.

    The tokenizer's rule for BOS goes into its post-processor. A kind without Hugging Face files (bytes, tiktoken) is left out.
    Raises OSError, and UserError as `copy_files`.
    """
    names = copy_files(source, target) if tokenizer is None or isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer) else []
    if tokenizer is not None and names:
        tokenizer.write_rule(target)
    if tokenizer is not None and GENERATION_CONFIG not in names:
        (target / GENERATION_CONFIG).write_text(json.dumps(special_ids(tokenizer, None), indent=2) + "\n")
        names.append(GENERATION_CONFIG)
    return names
