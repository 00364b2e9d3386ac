"""The files of tokenizers: finding, reading, checking and writing them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.foreign import MAX_BYTES, check_inside, parse_object, read_inside, shortened

CONFIG_NAME = "tokenizer_config.json"
BOS_NAMES = ("<|bos|>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]")
"""Special tokens used as BOS when the tokenizer's files do not define one."""
EOS_NAMES = ("<|eos|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]")
"""Special tokens used as EOS when the tokenizer's files do not define one."""


def one_file(path: Path, matches: Any) -> Path | None:
    """Return `path` if its name matches, or the one matching file of the directory `path`."""
    if path.is_file():
        return path if matches(path.name) else None
    found = sorted(child for child in path.iterdir() if matches(child.name) and not child.is_dir())
    for child in found:
        check_inside(path, child)
    if len(found) > 1:
        raise UserError(f"{path}: several tokenizer files ({', '.join(child.name for child in found)}); choose one of them")
    return found[0] if found else None


def special_token(role: str, path: Path, vocabulary: dict[str, int], configured: str | None, usual: Sequence[str]) -> str | None:
    """Return the configured special token, else the first usual name in the vocabulary. Raises UserError for one outside the vocabulary."""
    if configured is not None and configured not in vocabulary:
        raise UserError(f"{path}: the {role} token '{shortened(configured)}' of tokenizer_config.json is not in the vocabulary")
    return configured or next((name for name in usual if name in vocabulary), None)


def own_record(path: Path) -> dict[str, Any]:
    """Return what `save_copy` or `write_rule` recorded beside a tokenizer.json."""
    beside = path.with_name(CONFIG_NAME)
    record = json_object(beside).get("ridgeline") if beside.exists() else None
    return record if isinstance(record, dict) else {}


def recorded_rule(content: Mapping[str, Any], key: str, path: Path) -> bool | None:
    """Return a recorded rule; None where there is none. Raises UserError when it is not true or false."""
    value = content.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path}: '{key}' must be true or false, got {str(value)[:40]!r}")
    return value


def with_prefix(post_processor: dict[str, Any] | None, tokenizer: Any, prefix: list[int]) -> dict[str, Any] | None:
    """Return a post-processor (as in tokenizer.json) whose templates are replaced by one that puts `prefix` before a text."""
    parts = [] if post_processor is None else post_processor.get("processors", [post_processor])
    parts = [part for part in parts if part["type"] not in ("TemplateProcessing", "BertProcessing", "RobertaProcessing")]
    if prefix:
        names = {tokenizer.id_to_token(i): i for i in prefix}
        pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
        single = [*pieces, {"Sequence": {"id": "A", "type_id": 0}}]
        tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        parts.append({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "processors": parts} if parts else None


def configured_special_tokens(path: Path) -> dict[str, str]:
    """Read bos_token and eos_token from the Hugging Face files in the directory of tokenizer.json."""
    names: dict[str, str] = {}
    for file_name in ("special_tokens_map.json", CONFIG_NAME):
        beside = path.with_name(file_name)
        if not beside.exists():
            continue
        content = json_object(beside)
        for role in ("bos_token", "eos_token"):
            value = content.get(role)
            value = value.get("content") if isinstance(value, dict) else value  # older files have an AddedToken object
            if isinstance(value, str):
                names[role] = value
    return names


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a .tiktoken file. Raises UserError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a tiktoken rank line ('BASE64 RANK')") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{path}: {len(missing)} of the 256 single bytes have no rank (first: {missing[0]:#04x})")
    return ranks


def openai_definition(name: str, ranks: dict[bytes, int]) -> dict[str, Any]:
    """Return pattern and special tokens of the installed tiktoken; its loader, which would use the network, returns `ranks`."""
    from tiktoken_ext import openai_public

    constructor = openai_public.ENCODING_CONSTRUCTORS[name]
    offline = {**constructor.__globals__, "load_tiktoken_bpe": lambda *args, **kwargs: ranks}
    definition = FunctionType(constructor.__code__, offline)()
    return {"pattern": definition["pat_str"], "special_tokens": dict(definition["special_tokens"])}


def digest(content: Any) -> str:
    """Return the sha256 of a JSON value, independent of formatting."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_json(path: Path, content: Any) -> Path:
    """Write a JSON file, its directory created; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path


def json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file beside a tokenizer. Raises UserError when it is no JSON object, or a link out of the directory."""
    return parse_object(read_inside(path.parent, path), path)


def read_bytes(path: Path) -> bytes:
    """Read a file of limited size."""
    return read_limited(path, MAX_BYTES)


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises UserError."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from error
