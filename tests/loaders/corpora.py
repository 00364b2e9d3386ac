"""Inputs and outputs shared by the tests of preparation."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from ridgeline.loaders.manifest import Manifest
from ridgeline.loaders.token_record import decode_record


def write_records(path: Path, count: int, seed: int = 0, words: int = 40) -> Path:
    """Write JSON lines of random words, the same for the same seed."""
    source = random.Random(seed)
    vocabulary = ["def", "return", "größe", "x", "世界", "\n    ", "if", "(", ")", "🙂", "print", "value"]
    lines = []
    for index in range(count):
        text = f"{index} " + " ".join(source.choices(vocabulary, k=source.randint(1, words)))
        lines.append(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def texts_of(path: Path) -> list[str]:
    """Texts of a JSON lines file."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def tree_digests(root: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file of an output, without the state, which depends on place and time."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and ".prepare" not in path.parts]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def manifest(corpus: Path) -> dict[str, Any]:
    """The manifest as plain JSON."""
    return json.loads((corpus / "manifest.json").read_text())


def read_documents(corpus: Path) -> list[tuple[list[int], list[bool] | None]]:
    """Documents of a corpus in order: ids, and which of them the loss counts (None when no record has a mask)."""
    documents: list[tuple[list[int], list[bool]]] = []
    has_mask = False
    for shard in Manifest.read(corpus).shards:
        for blob in ArrayRecordReader(str(corpus / shard.name)).read_all():
            record = decode_record(blob)
            ids = record.tokens.tolist()
            mask = [True] * len(ids) if record.loss_mask is None else record.loss_mask.tolist()
            has_mask |= record.loss_mask is not None
            starts = record.doc_starts.tolist()
            for start, stop in itertools.pairwise(sorted({0, *starts, len(ids)})):
                if start in starts:
                    documents.append(([], []))
                documents[-1][0].extend(ids[start:stop])
                documents[-1][1].extend(mask[start:stop])
    return [(ids, mask if has_mask else None) for ids, mask in documents]
