"""A resolved config (or cluster) as YAML text that loads back to an equal config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ridgeline.configs.schema import Section
from ridgeline.configs.tree import Path

Line = tuple[int, str, Path | None]
"""Indentation in levels, text, and the path of the leaf that stands on the line (None for section headers)."""

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "."}


def to_yaml(config: Section) -> str:
    """Return every setting as YAML: read it back with `configs.load.from_resolved` (or `load`; a cluster with `load_cluster`)."""
    return "".join(f"{'  ' * level}{text}\n" for level, text, _ in yaml_lines(config.model_dump(mode="json")))


def yaml_lines(section: dict[str, Any], level: int = 0, path: Path = ()) -> Iterator[Line]:
    """Yield the lines of a mapping of plain JSON-like values."""
    for key, value in section.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield level, f"{scalar_text(key)}:", None
            yield from yaml_lines(value, level + 1, here)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield level, f"{scalar_text(key)}:", None
            for index, item in enumerate(value):
                lines = list(yaml_lines(item, level + 2, (*here, index)))
                first_text, first_path = lines[0][1:]
                yield level + 1, f"- {first_text}", first_path
                yield from lines[1:]
        else:
            yield level, f"{scalar_text(key)}: {value_text(value)}", here


def value_text(value: Any) -> str:
    """Return a scalar, an empty mapping or a list of scalars in YAML's flow style."""
    if isinstance(value, dict):
        assert not value
        return "{}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar_text(item) for item in value) + "]"
    return scalar_text(value)


def scalar_text(value: Any) -> str:
    """Return one scalar as YAML 1.2; a string that could be read as something else is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.startswith((".", "+", "-")):
        return str(value)
    return '"' + "".join(_escape(character) for character in value) + '"'


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
