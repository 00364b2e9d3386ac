"""A resolved config as a person reads it: YAML in which every value is followed by where it came from."""

from __future__ import annotations

from typing import Any

from ridgeline.configs.dump import yaml_lines
from ridgeline.configs.load import Resolved
from ridgeline.configs.tree import dotted


def to_commented_yaml(resolved: Resolved, *, only_set: bool = False) -> str:
    """Return the config as YAML with a trailing comment of each value's source; `only_set` leaves out the defaults."""
    lines = list(yaml_lines(resolved.config.model_dump(mode="json")))
    if only_set:
        lines = _without_defaults(resolved, lines)
    width = max((2 * level + len(text) for level, text, path in lines if path is not None), default=0)
    shown = []
    for level, text, path in lines:
        line = "  " * level + text
        shown.append(line if path is None else f"{line:<{min(width, 56)}}  # {resolved.sources[dotted(path)]}")
    return "\n".join(shown) + "\n"


def to_json(resolved: Resolved) -> dict[str, Any]:
    """Return `{"config": nested values, "sources": {dotted key: source}}`."""
    return {
        "config": resolved.config.model_dump(mode="json"),
        "sources": {key: str(source) for key, source in resolved.sources.items()},
    }


def _without_defaults(resolved: Resolved, lines: list[Any]) -> list[Any]:
    """Drop the default leaves, then every section header left without a leaf."""
    kept: list[Any] = []
    for level, text, path in reversed(lines):
        if path is None:
            if kept and kept[-1][0] > level:
                kept.append((level, text, path))
        elif resolved.sources[dotted(path)].kind != "default":
            kept.append((level, text, path))
    return kept[::-1]
