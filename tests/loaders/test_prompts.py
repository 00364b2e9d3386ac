"""Prompts read from files."""

import json
from pathlib import Path

from ridgeline.loaders.prompts import read_prompts


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """JSON strings may have the line separators of Unicode as they are; editors on Windows write CR LF."""
    texts = ["one\u2028two\x85three", "four"]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(text, ensure_ascii=False) for text in texts) + "\n", encoding="utf-8")
    (tmp_path / "p.txt").write_bytes(b"one\x0ctwo\r\n\r\nthree\n")
    assert read_prompts(tmp_path / "p.jsonl") == texts
    assert read_prompts(tmp_path / "p.txt") == ["one\x0ctwo", "three"]
