"""The files of a Hugging Face directory besides weights and config.json: tokenizer and generation settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
    """Copy those of FILES that `source` has; return their names. Raises OSError."""
    found = [name for name in FILES if (source / name).is_file()]
    if found:
        target.mkdir(parents=True, exist_ok=True)
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return bos_token_id and eos_token_id for config.json (None where there is no such token)."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    return {"bos_token_id": None if tokenizer.bos_id == tokenizer.eos_id else tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def write_tokenizer(tokenizer: Tokenizer, source: Path, target: Path) -> list[str]:
    """Write a tokenizer's Hugging Face files and a generation_config.json; return the names of the files.

    For a kind without Hugging Face files (bytes, tiktoken) only generation_config.json is written. Raises OSError.
    """
    names = copy_files(source, target) if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer) else []
    if GENERATION_CONFIG not in names:
        (target / GENERATION_CONFIG).write_text(json.dumps(special_ids(tokenizer), indent=2) + "\n")
        names.append(GENERATION_CONFIG)
    return names
