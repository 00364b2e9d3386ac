"""Small corpora written from token arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.loaders.manifest import Manifest, TokenizerInfo
from ridgeline.loaders.token_record import token_dtype
from ridgeline.loaders.token_writer import TokenWriter

BOS, EOS = 0, 1


@dataclass(frozen=True)
class Doc:
    """A document with its BOS and EOS, and which tokens count as targets (None: all)."""

    tokens: np.ndarray
    mask: np.ndarray | None = None


def random_docs(seed: int, count: int, *, vocab_size: int = 50, longest: int = 60, masked_share: float = 0.0) -> list[Doc]:
    """Random documents of 2 to `longest` tokens."""
    source = np.random.default_rng(seed)
    docs = []
    for _ in range(count):
        tokens = source.integers(2, vocab_size, int(source.integers(2, longest + 1)))
        tokens[0], tokens[-1] = BOS, EOS
        docs.append(Doc(tokens, source.random(len(tokens)) < 0.5 if source.random() < masked_share else None))
    return docs


def tokenizer_info(vocab_size: int = 50, sha256: str = "a" * 64) -> TokenizerInfo:
    """A tokenizer that is not loaded."""
    return TokenizerInfo("bytes", "tokenizer", sha256, vocab_size, BOS, EOS)


def write_corpus(
    directory: Path,
    shards: Sequence[Sequence[Doc]],
    *,
    vocab_size: int = 50,
    record_tokens: int = 64,
    pack_length: int | None = None,
    sha256: str = "a" * 64,
) -> Manifest:
    """Write a corpus and return its manifest."""
    infos = []
    for index, docs in enumerate(shards):
        name = f"tokens-{index:05d}-of-{len(shards):05d}.arrayrecord"
        with TokenWriter(directory, name, vocab_size=vocab_size, record_tokens=record_tokens, pack_length=pack_length) as writer:
            for doc in docs:
                writer.add(doc.tokens, doc.mask, text_bytes=len(doc.tokens) - 2)
            infos.append(writer.close())
    manifest = Manifest(
        tokenizer=tokenizer_info(vocab_size, sha256),
        dtype=token_dtype(vocab_size).name,
        record_tokens=pack_length or record_tokens,
        pack_length=pack_length,
        shards=tuple(infos),
    )
    manifest.write(directory)
    return manifest
