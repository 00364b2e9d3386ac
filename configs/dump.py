"""Configs as YAML text: a resolved config, the same with the source of each value, and settings on top of a base config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

from ridgeline.configs.compose import PACKAGE, locate, locate_main
from ridgeline.configs.load import Resolved
from ridgeline.configs.overrides import apply_overrides
from ridgeline.configs.section import Section
from ridgeline.configs.yaml_tree import Mapping, Path, Source, dotted, plain

Line = tuple[int, str, Path | None]
"""Indentation in levels, text, and the path of the value on the line (None for section headers)."""

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "."}


def to_yaml(config: Section) -> str:
    """Return every setting as YAML. `configs.load.from_resolved`, `load` or, for a cluster, `load_cluster` reads an equal one back."""
    return "".join(f"{'  ' * level}{text}\n" for level, text, _ in yaml_lines(config.model_dump(mode="json")))


def yaml_lines(section: dict[str, Any], level: int = 0, path: Path = ()) -> Iterator[Line]:
    """Yield the YAML lines of a mapping of JSON values."""
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
    """Return a scalar, an empty mapping or a list of scalars in flow style."""
    if isinstance(value, dict):
        assert not value
        return "{}"
    if isinstance(value, list):
        return "[" + ", ".join(scalar_text(item) for item in value) + "]"
    return scalar_text(value)


def scalar_text(value: Any) -> str:
    """Return one scalar as YAML 1.2; a string that would be read as another type is quoted."""
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


def to_commented_yaml(resolved: Resolved, *, only_set: bool = False) -> str:
    """Return the config as YAML with the source of each value as a comment; `only_set` leaves out the defaults."""
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
    """Drop the lines of default values, then the section headers without a remaining value."""
    kept: list[Any] = []
    for level, text, path in reversed(lines):
        if path is None:
            if kept and kept[-1][0] > level:
                kept.append((level, text, path))
        elif resolved.sources[dotted(path)].kind != "default":
            kept.append((level, text, path))
    return kept[::-1]


def layout_yaml(config: str, directory: FilePath, overrides: Iterable[str], settings: dict[str, Any], notes: Sequence[str]) -> str:
    """Return the text of a config file in `directory` with CONFIG as its base.

    The command line's `overrides` are merged over the base, then `settings`. `notes` are comments at the top.
    """
    tree = apply_overrides(Mapping({}, Source("override", "")), tuple(overrides))
    merged = _merge(plain(tree), settings)
    lines = "".join(f"{'  ' * level}{text}\n" for level, text, _ in yaml_lines(merged))
    comments = "".join(f"# {note}\n" for note in notes)
    return f"{comments}base: [{scalar_text(base_name(config, directory))}]\n{lines}"


def base_name(config: str, directory: FilePath) -> str:
    """Return CONFIG as `base:` of a file in `directory` names it: a shipped config by name, any other by relative path."""
    path = locate_main(config).resolve()
    if PACKAGE.resolve() in path.parents:
        name = str(path.relative_to(PACKAGE.resolve()).with_suffix(""))
        if (found := locate(name, directory)) is not None and found.resolve() == path:
            return name
    return os.path.relpath(path, directory.resolve())


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
