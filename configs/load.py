"""Loading: from a YAML file and overrides to a valid `Config`, with the source of every value.

Precedence, lowest first: schema defaults, family defaults, `base:` files from first to last, the file, overrides. `${env:NAME}` and
`${env:NAME,default}` are replaced in the fields that allow it (`env_allowed`), and are errors elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Environment
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ridgeline.configs import compose, rules
from ridgeline.configs.errors import UserError, first_of, printable
from ridgeline.configs.fields import env_keys, slot_at, split_key
from ridgeline.configs.overrides import apply_overrides
from ridgeline.configs.problem import Problem
from ridgeline.configs.schema import Config
from ridgeline.configs.validation_errors import validation_error
from ridgeline.configs.yaml_tree import DEFAULT, Items, Mapping, Node, Scalar, Source, describe, dotted, find, plain, read_file, source_of
from ridgeline.configs.yaml_tree import Path as KeyPath

_PLACE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A valid config and the source of every value.

    `sources`: dotted key -> source. A list of scalars counts as one value.
    """

    config: Config
    sources: dict[str, Source]

    def source(self, key: str) -> Source:
        """Return the source of a key's value; for a section or list, of the first value in it that is not a default."""
        if key in self.sources:
            return self.sources[key]
        inside = [source for name, source in self.sources.items() if name.startswith(f"{key}.") and source is not DEFAULT]
        return inside[0] if inside else DEFAULT


def load(path: str | Path, overrides: Iterable[str] = (), *, environment: Environment[str, str] | None = None) -> Resolved:
    """Load a config file (or a shipped config by name, as `models/gpt2`) with overrides such as `trainer.steps=200`.

    Raises UserError, with file and line or override, for every error that can be found without knowing the devices.
    """
    tree = compose.read_with_bases(compose.locate_main(str(path)))
    tree = apply_overrides(tree, tuple(overrides))
    tree = compose.with_family_defaults(tree)
    return resolve(tree, os.environ if environment is None else environment)


def from_resolved(path: str | Path) -> Config:
    """Read a resolved config, such as config.yaml of a run directory, without bases, family defaults or interpolation."""
    return _validated(read_file(Path(path)))


def override_mesh(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config with overrides `mesh.KEY=VALUE` of its mesh. Raises UserError for other keys and values that are not valid."""
    tree = apply_overrides(Mapping({}, DEFAULT, {}), tuple(overrides))
    changed = plain(tree)
    if other := [key for key in changed if key != "mesh"]:
        raise UserError(f"{source_of(tree, (other[0],))}: only keys of `mesh` can be changed for a trained model, such as mesh.fsdp=8")
    mesh, keys = _validated(tree).mesh, changed.get("mesh", {})
    update = {key: getattr(mesh, key) for key in keys}
    if "rules" in keys:
        update["rules"] = {**config.mesh.rules, **mesh.rules}
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=update)})


def resolve(tree: Mapping, environment: Environment[str, str]) -> Resolved:
    """Interpolate, validate and check a composed tree."""
    interpolated = _interpolate(tree, environment)
    assert isinstance(interpolated, Mapping)
    config = _validated(interpolated)
    problems = rules.check_config(config)
    if problems:
        first, *others = [(_place(interpolated, problem), problem.message) for problem in problems]
        raise first_of(f"{first[0]}: {first[1]}", [place for place, _ in others])
    sources = {dotted(path): _leaf_source(interpolated, path) for path, _ in leaves(config.model_dump(mode="json"))}
    return Resolved(config, sources)


def _interpolate(node: Node, environment: Environment[str, str], path: KeyPath = ()) -> Node:
    """Replace every `${env:...}` by its value. Raises UserError for a missing variable, or a field that does not allow it."""
    if isinstance(node, Mapping):
        items = {key: _interpolate(value, environment, (*path, key)) for key, value in node.items.items()}
        return Mapping(items, node.source, node.key_sources)
    if isinstance(node, Items):
        return Items(tuple(_interpolate(item, environment, (*path, index)) for index, item in enumerate(node.items)), node.source)
    if isinstance(node.value, str) and "${" in node.value:
        return Scalar(_expand(node.value, node, environment, path), node.source)
    return node


def _expand(text: str, node: Scalar, environment: Environment[str, str], path: KeyPath) -> str:
    where = f"{node.source}: {printable(dotted(path))}"
    slot = slot_at(path)
    if slot is None:
        return text  # an unknown key: the validation reports it
    if not slot.env_interpolation:
        raise UserError(f"{where}: '${{...}}' is not allowed here (only in: {', '.join(env_keys())})")
    if "${" in _PLACE.sub("", text):
        raise UserError(f"{where}: unknown interpolation in {describe(text)} (allowed: ${{env:NAME}} and ${{env:NAME,default}})")

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name in environment:
            return environment[name]
        if default is None:
            raise UserError(f"{where}: the environment variable {name} is not set (give a default with ${{env:{name},default}})")
        return str(default)

    return _PLACE.sub(value, text)


def _validated(tree: Mapping) -> Config:
    try:
        return Config.model_validate(plain(tree))
    except ValidationError as error:
        raise validation_error(error, tree) from None


def _place(tree: Mapping, problem: Problem) -> str:
    """Return source and name of the key to report: one set by an override, else the first set in a file, else the first.

    Where the message is a predicate about the first key and another one is reported, the first is named too.
    """
    written: list[tuple[Source, str]] = []
    for key in problem.keys:
        path = split_key(key)
        if find(tree, path) is not None:
            written.append((source_of(tree, path), key))
    written.sort(key=lambda place: place[0].kind != "override")
    source, key = written[0] if written else (DEFAULT, problem.keys[0])
    if key == problem.keys[0] or not problem.is_predicate:
        return f"{source}: {key}"
    return f"{source}: {problem.keys[0]}" if source.kind == "override" else f"{source} ({key}): {problem.keys[0]}"


def _leaf_source(tree: Mapping, path: KeyPath) -> Source:
    return DEFAULT if find(tree, path) is None else source_of(tree, path)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) of every scalar, empty mapping, and list without mappings."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
