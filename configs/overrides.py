"""Command-line overrides `section.key=value`, where the value is YAML."""

from __future__ import annotations

import re

from ridgeline.configs.errors import UserError, printable
from ridgeline.configs.fields import ROOT, Slot, unknown_key_hint
from ridgeline.configs.yaml_tree import MAX_CONFIG_BYTES, Items, Mapping, Node, Path, Scalar, Source, child, dotted, merge, parse

_INDEX = re.compile(r"[0-9]{1,9}")


def apply_overrides(tree: Mapping, overrides: tuple[str, ...], root: Slot = ROOT) -> Mapping:
    """Apply overrides from left to right. Mappings are merged, lists are replaced; `data.train.0.path=x` changes one element."""
    for text in overrides:
        changed = _apply_one(tree, text, root)
        assert isinstance(changed, Mapping)
        tree = changed
    return tree


def set_key(tree: Mapping, key: str, value: Node, source: Source, root: Slot = ROOT) -> Mapping:
    """Set a dotted key to a parsed value, for overrides that are written in a file. Errors name `source`."""
    changed = _set(tree, _path_of(key, source, root), value, source, ())
    assert isinstance(changed, Mapping)
    return changed


def _apply_one(tree: Mapping, text: str, root: Slot) -> Node:
    source = Source("override", text)
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"{source}: an override has the form section.key=value")
    if len(text) > MAX_CONFIG_BYTES:
        raise UserError(f"{source}: an override of {len(text):,} characters; at most {MAX_CONFIG_BYTES:,} are read")
    value = parse(value_text, source) or Scalar(None, source)
    return _set(tree, _path_of(key, source, root), value, source, ())


def _path_of(key: str, source: Source, root: Slot) -> Path:
    """Split a dotted key by the schema. In an open mapping the rest is one key, dots included."""
    if key == "base" or key.startswith("base."):
        raise UserError(f"{source}: 'base' can only be set in a file")
    path: Path = ()
    slot = root
    parts = key.split(".")
    for position, part in enumerate(parts):
        if slot.is_open_mapping:
            return (*path, ".".join(parts[position:]))
        if slot.is_list:
            if not _INDEX.fullmatch(part):
                raise UserError(f"{source}: {printable(dotted(path))} is a list; use an index, as in {printable(dotted(path))}.0")
            path = (*path, int(part))
        else:
            path = (*path, part)
        if slot.section is None and not slot.is_list:
            raise UserError(f"{source}: {dotted(path[:-1])} is a single value and has no key '{printable(part)}'")
        following = slot.step(part)
        if following is None:
            raise UserError(f"{source}: {printable(dotted(path))}: {unknown_key_hint(path, root)}")
        slot = following
    return path


def _set(node: Node | None, path: Path, value: Node, source: Source, done: Path) -> Node:
    if not path:
        return merge(node, value) if node is not None else value
    part = path[0]
    if isinstance(part, int):
        length = len(node.items) if isinstance(node, Items) else 0
        if not isinstance(node, Items) or part >= length:
            raise UserError(f"{source}: {printable(dotted(done))} has {length} elements; {part} is out of range")
        items = list(node.items)
        items[part] = _set(items[part], path[1:], value, source, (*done, part))
        return Items(tuple(items), node.source)
    following = child(node, part) if isinstance(node, Mapping) else None
    new = _set(following, path[1:], value, source, (*done, part))
    if not isinstance(node, Mapping):
        return Mapping({part: new}, source, {part: source})
    return Mapping({**node.items, part: new}, node.source, {**node.key_sources, part: source})
