"""SWEEP.yaml: a base config and the overrides of each point, with the source line of every value.

name: lr-and-width
config: quickstart.yaml          # beside this file, or a shipped config by name
set:                             # for all points
  trainer.steps: 200
grid:                            # every combination, the last key varies fastest; or `list:` of mappings, one per point
  model.embed_dim: [128, 256]
  optimizer.learning_rate: [2e-3, 4e-3, 8e-3]
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping as Environment
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ridgeline.configs import compose
from ridgeline.configs.errors import UserError
from ridgeline.configs.fields import Slot
from ridgeline.configs.load import resolve
from ridgeline.configs.overrides import set_key
from ridgeline.configs.schema import Config
from ridgeline.configs.section import LocalPath, Name, PositiveInt, Section
from ridgeline.configs.validation_errors import validation_error
from ridgeline.configs.yaml_tree import Items, Mapping, Node, Source, plain, read_file, source_of

# Defined outside the class, in which `list` and `set` are fields.
Settings = dict[str, Any]
ManySettings = list[dict[str, Any]]
Grid = dict[str, list[Any]]
MAX_POINTS = 1000
"""Slurm's default limit of an array (MaxArraySize)."""


class SweepConfig(Section):
    """A sweep."""

    name: Name
    """Name of the sweep; its runs are named NAME-000, NAME-001, ..."""
    config: str
    """Config of all points: a file beside this one, or a shipped config."""
    directory: LocalPath | None = None
    """Directory of all points' run directories; null: runs/NAME."""
    max_running: PositiveInt | None = None
    """Most points that run at the same time; null: no limit."""
    set: Settings = {}
    """Overrides of all points."""
    grid: Grid = {}
    """Key to its values: every combination is a point."""
    list: ManySettings = []
    """One mapping of overrides per point."""


@dataclass(frozen=True)
class Point:
    """One config of a sweep."""

    overrides: dict[str, Any]
    """Overrides of this point only: dotted key -> plain value."""
    config: Config
    """Config without the point's name and run directory."""

    @property
    def key(self) -> str:
        """Identity: equal overrides are the same point, wherever they are in the file."""
        return json.dumps(self.overrides, sort_keys=True)


@dataclass(frozen=True)
class Sweep:
    """A checked sweep."""

    path: Path
    config: SweepConfig
    points: tuple[Point, ...]

    @property
    def directory(self) -> Path:
        """The sweep directory, absolute."""
        return (self.config.directory or Path("runs") / self.config.name).absolute()


_ROOT = Slot(SweepConfig)
_Override = tuple[str, Node, Source]


def load_sweep(path: Path, environment: Environment[str, str]) -> Sweep:
    """Read a sweep and check the config of every point. Raises UserError naming file and line."""
    tree = read_file(path)
    try:
        config = SweepConfig.model_validate(plain(tree))
    except ValidationError as error:
        raise validation_error(error, tree, _ROOT) from None
    base = compose.locate(config.config, path.parent)
    if base is None:
        raise UserError(f"{source_of(tree, ('config',))}: config: '{config.config}' is neither beside {path.name} nor shipped")
    base_tree = compose.read_with_bases(base)
    common = _overrides(tree.items.get("set"))
    points: dict[str, Point] = {}
    for chosen in _choices(tree, config):
        point = _point(base_tree, common, chosen, environment)
        if point.key in points:
            raise UserError(f"{chosen[0][2] if chosen else tree.source}: duplicate point {point.key}")
        points[point.key] = point
    return Sweep(path, config, tuple(points.values()))


def _choices(tree: Mapping, config: SweepConfig) -> list[list[_Override]]:
    """Return the overrides of every point."""
    if bool(config.grid) == bool(config.list):
        where = source_of(tree, ("list" if config.list else "grid",))
        raise UserError(f"{where}: a sweep needs either grid: or list:, with at least one point")
    if config.list:
        items = tree.items["list"]
        assert isinstance(items, Items)
        _check_count(len(items.items), items.source)
        return [_overrides(item) for item in items.items]
    grid = tree.items["grid"]
    assert isinstance(grid, Mapping)
    axes = []
    for key, values in grid.items.items():
        assert isinstance(values, Items)
        if not values.items:
            raise UserError(f"{grid.key_sources[key]}: grid: {key} has no values")
        axes.append([(key, value, value.source) for value in values.items])
    _check_count(math.prod(map(len, axes)), source_of(tree, ("grid",)))
    return [list(choice) for choice in itertools.product(*axes)]


def _check_count(count: int, where: object) -> None:
    if count > MAX_POINTS:
        raise UserError(f"{where}: {count:,} points; at most {MAX_POINTS:,} are allowed")


def _overrides(node: Node | None) -> list[_Override]:
    if node is None:
        return []
    assert isinstance(node, Mapping)
    return [(key, value, node.key_sources[key]) for key, value in node.items.items()]


def _point(base: Mapping, common: list[_Override], chosen: list[_Override], environment: Environment[str, str]) -> Point:
    tree = base
    for key, value, source in (*common, *chosen):
        if key in ("name", "run_dir"):
            raise UserError(f"{source}: {key}: set by the sweep's `name` and `directory`, not by a point")
        tree = set_key(tree, key, value, source)
    overrides = {key: plain(value) for key, value, _ in chosen}
    try:
        return Point(overrides, resolve(compose.with_family_defaults(tree), environment).config)
    except UserError as error:
        lines = {str(source) for _, _, source in (*common, *chosen)}
        if str(error).partition(": ")[0] in lines or not lines:
            raise
        place = chosen[0][2] if chosen else common[0][2]  # a rule about several keys may name the one in the base config
        raise UserError(f"{place}: point {json.dumps(overrides)} is invalid: {error}") from None
