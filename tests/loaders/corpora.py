"""Inputs and outputs that several tests of preparation share."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any


def write_records(path: Path, count: int, seed: int = 0, words: int = 60) -> Path:
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
    """Relative path to sha256 of every file of an output, but for the state, which knows where and when it was made."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and ".prepare" not in path.parts]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def manifest(corpus: Path) -> dict[str, Any]:
    """The manifest as plain JSON."""
    return json.loads((corpus / "manifest.json").read_text())
