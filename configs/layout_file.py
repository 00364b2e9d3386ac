"""A config file that puts settings on top of another: what `ridge plan --write` leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ridgeline.configs.compose import PACKAGE, locate, locate_main
from ridgeline.configs.dump import scalar_text, yaml_lines
from ridgeline.configs.overrides import apply_overrides
from ridgeline.configs.tree import Mapping, Source, plain


def layout_yaml(config: str, directory: Path, overrides: Iterable[str], settings: dict[str, Any], notes: Sequence[str]) -> str:
    """Return the text of a config that lies in `directory` and has CONFIG as its base.

    `overrides` of the command line come next, then `settings`; `notes` stand on top as comments.
    """
    tree = apply_overrides(Mapping({}, Source("override", "")), tuple(overrides))
    merged = _merge(plain(tree), settings)
    lines = "".join(f"{'  ' * level}{text}\n" for level, text, _ in yaml_lines(merged))
    comments = "".join(f"# {note}\n" for note in notes)
    return f"{comments}base: [{scalar_text(base_name(config, directory))}]\n{lines}"


def base_name(config: str, directory: Path) -> str:
    """Return how a file in `directory` names CONFIG in `base:`: a shipped config by its name, another by its path."""
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
