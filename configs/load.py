"""From a YAML file and overrides to a checked `Config` in which every value knows where it came from.

The order of precedence, lowest first: schema defaults, family defaults, `base:` files from first to last, the file, overrides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Environment
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ridgeline.configs import compose, rules
from ridgeline.configs.fields import split_key
from ridgeline.configs.interpolation import interpolate
from ridgeline.configs.overrides import apply_overrides
from ridgeline.configs.problems import joined, validation_error
from ridgeline.configs.schema import Config
from ridgeline.configs.tree import DEFAULT, Mapping, Source, dotted, find, plain, read_file, source_of


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked config with the source of every leaf (dotted key -> source; a list of plain values is one leaf)."""

    config: Config
    sources: dict[str, Source]

    def source(self, key: str) -> Source:
        """Return where a key's value comes from; for a section or list, its first written part."""
        if key in self.sources:
            return self.sources[key]
        inside = [source for name, source in self.sources.items() if name.startswith(f"{key}.") and source is not DEFAULT]
        return inside[0] if inside else DEFAULT


def load(path: str | Path, overrides: Iterable[str] = (), *, environment: Environment[str, str] | None = None) -> Resolved:
    """Load a config file (or a shipped one by name, as `models/gpt2`) with overrides such as `trainer.steps=200`.

    Raises UserError, naming file and line or override, for everything that can be known without devices.
    """
    tree = compose.read_with_bases(compose.locate_main(str(path)))
    tree = apply_overrides(tree, tuple(overrides))
    tree = compose.with_family_defaults(tree)
    return resolve(tree, os.environ if environment is None else environment)


def from_resolved(path: str | Path) -> Config:
    """Read a fully resolved config, such as a run directory's config.yaml: no bases, no family defaults, no interpolation."""
    return _validated(read_file(Path(path)))


def resolve(tree: Mapping, environment: Environment[str, str]) -> Resolved:
    """Interpolate, validate and check a composed tree."""
    interpolated = interpolate(tree, environment)
    assert isinstance(interpolated, Mapping)
    config = _validated(interpolated)
    problems = rules.check_config(config)
    if problems:
        raise joined([f"{_place(interpolated, problem.keys)}: {problem.message}" for problem in problems])
    sources = {dotted(path): _leaf_source(interpolated, path) for path, _ in leaves(config.model_dump(mode="json"))}
    return Resolved(config, sources)


def _validated(tree: Mapping) -> Config:
    try:
        return Config.model_validate(plain(tree))
    except ValidationError as error:
        raise validation_error(error, tree) from None


def _place(tree: Mapping, keys: tuple[str, ...]) -> str:
    """Return source and name of the key to blame: one set by an override, else the first that somebody wrote; all may be defaults."""
    written: list[tuple[Source, str]] = []
    for key in keys:
        path = split_key(key)
        if find(tree, path) is not None:
            written.append((source_of(tree, path), key))
    written.sort(key=lambda place: place[0].kind != "override")
    source, key = written[0] if written else (DEFAULT, keys[0])
    return f"{source}: {key}"


def _leaf_source(tree: Mapping, path: tuple[str | int, ...]) -> Source:
    return DEFAULT if find(tree, path) is None else source_of(tree, path)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, value) of every leaf: scalars, empty mappings, and lists that hold no mapping."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
