"""Look-ups in the schema by dotted key: the keys of a section and the type of each."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from ridgeline.configs.errors import nearest
from ridgeline.configs.foreign_names import key_for
from ridgeline.configs.schema import Config
from ridgeline.configs.section import Section
from ridgeline.configs.yaml_tree import Path


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the schema: a section, a list, an open mapping (keys chosen by the user) or a single value."""

    annotation: Any
    env_interpolation: bool = False

    @property
    def section(self) -> type[Section] | None:
        """The class of the section; None for anything else."""
        return self.annotation if isinstance(self.annotation, type) and issubclass(self.annotation, Section) else None

    @property
    def is_list(self) -> bool:
        """Whether this is a list."""
        return get_origin(self.annotation) is list

    @property
    def is_open_mapping(self) -> bool:
        """Whether this is a mapping whose keys the user chooses."""
        return get_origin(self.annotation) is dict

    def step(self, part: str | int) -> Slot | None:
        """Return the slot under one key or index, or None when the schema has none."""
        if self.section is not None:
            info = self.section.model_fields.get(str(part))
            if info is None:
                return None
            extra = info.json_schema_extra
            return Slot(_bare(info.annotation), isinstance(extra, dict) and bool(extra.get("env_interpolation")))
        if self.is_list:
            return Slot(_bare(get_args(self.annotation)[0]), self.env_interpolation)
        if self.is_open_mapping:
            return Slot(_bare(get_args(self.annotation)[1]), self.env_interpolation)
        return None


ROOT = Slot(Config)


def _bare(annotation: Any) -> Any:
    """Strip Annotated and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return _bare(members[0])
    return annotation


def slot_at(path: Path, root: Slot = ROOT) -> Slot | None:
    """Return the slot at a path, or None when the schema has no such key."""
    slot: Slot | None = root
    for part in path:
        if slot is None:
            return None
        slot = slot.step(part)
    return slot


def split_key(key: str) -> Path:
    """Split a dotted key of the schema: list indices become integers, and keys of open mappings may contain dots."""
    path: Path = ()
    slot: Slot | None = ROOT
    parts = key.split(".")
    for position, part in enumerate(parts):
        if slot is not None and slot.is_open_mapping:
            return (*path, ".".join(parts[position:]))
        step = int(part) if slot is not None and slot.is_list else part
        path = (*path, step)
        slot = slot.step(step) if slot is not None else None
    return path


def schema_keys(slot: Slot = ROOT, prefix: str = "") -> Iterator[tuple[str, Slot]]:
    """Yield every key of the schema with its slot; list elements are written `[]`, keys of open mappings `<name>`."""
    if slot.section is not None:
        for name in slot.section.model_fields:
            following = slot.step(name)
            assert following is not None
            key = f"{prefix}.{name}" if prefix else name
            yield key, following
            yield from schema_keys(following, key)
    elif slot.is_list or slot.is_open_mapping:
        following = slot.step(0)
        assert following is not None
        yield from schema_keys(following, prefix + ("[]" if slot.is_list else ".<name>"))


def env_keys() -> list[str]:
    """Return the keys whose values may contain `${env:NAME}`."""
    return [key for key, slot in schema_keys() if slot.env_interpolation]


def _nearest_key(path: Path, allowed: list[str], root: Slot) -> str | None:
    """Return the key that an unknown one probably means: what other trainers call it, or one of its section or elsewhere."""
    name = str(path[-1])
    foreign = key_for(name) if root is ROOT else None
    if foreign is not None:
        section, _, short = foreign.rpartition(".")
        return short if path[:-1] == tuple(section.split(".")) else foreign
    close = nearest(name, allowed)
    if close is not None:
        return close
    return next((key for key, _ in schema_keys(root) if key.rpartition(".")[2] == name), None)


def suggested_key(name: str) -> str | None:
    """Return the key that a name of the command line means, such as `lr`, `learning-rate` or `trainer.steps`; None when none is near."""
    plain = name.replace("-", "_")
    keys = [key for key, slot in schema_keys() if slot.section is None and "[]" not in key]
    if plain in keys:
        return plain
    return key_for(plain) or next((key for key in keys if key.rpartition(".")[2] == plain), None) or nearest(plain, keys)


def unknown_key_hint(path: Path, root: Slot = ROOT) -> str:
    """Return the message for an unknown key, with the nearest key and those that the section allows."""
    parent = slot_at(path[:-1], root)
    assert parent is not None
    assert parent.section is not None
    allowed = list(parent.section.model_fields)
    close = _nearest_key(path, allowed, root)
    hint = f"; did you mean '{close}'?" if close else ""
    return f"unknown key{hint} (allowed: {', '.join(allowed)})"
