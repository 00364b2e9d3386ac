"""YAML as a tree in which every value has its source (file and line), and the merge of such trees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from ridgeline.configs.errors import UserError, printable
from ridgeline.configs.files import read_limited

MAX_CONFIG_BYTES = 256 << 10
"""Largest config file that is read: the parser takes seconds for it."""
MAX_DEPTH = 100
"""Deepest nesting of brackets."""
MAX_VALUES = 50_000
"""Most values of a config file, with aliases expanded."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a value. `text`: the path of the file as displayed, or the override as typed; `line` counts from 1."""

    kind: Literal["file", "override", "default"]
    text: str = ""
    line: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.text}:{self.line}"
        return f"override '{printable(self.text)}'" if self.kind == "override" else "default"


DEFAULT = Source("default")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf: string, integer, float, boolean or null."""

    value: str | int | float | bool | None
    source: Source


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    source: Source


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping. `key_sources`: source of each key (its value may be on a later line)."""

    items: dict[str, Node]
    source: Source
    key_sources: dict[str, Source] = field(default_factory=dict)


Node = Scalar | Items | Mapping
Path = tuple[str | int, ...]
"""Keys and list indices from the top of the config to a value."""


def display_path(path: FilePath) -> str:
    """Return the path for display: relative to the working directory when inside it, else absolute."""
    absolute = path.absolute()
    here = FilePath.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def read_file(path: FilePath) -> Mapping:
    """Read one YAML file, without following its `base`. An empty file is an empty mapping."""
    shown = display_path(path)
    try:
        text = read_limited(path, MAX_CONFIG_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: not a text file (byte {error.start} is not UTF-8)") from None
    node = parse(text, Source("file", shown, 1))
    if node is None:
        return Mapping({}, Source("file", shown, 1))
    if not isinstance(node, Mapping):
        raise UserError(f"{node.source}: a config must be a mapping of sections, got {describe(plain(node))}")
    return node


def parse(text: str, where: Source) -> Node | None:
    """Parse YAML 1.2 text; None when it is empty. Lines count from `where.line`; an override has no lines.

    Raises UserError: not YAML, nested too deeply, or aliases that expand to more than MAX_VALUES values.
    """
    if _flow_depth(text) > MAX_DEPTH:
        raise UserError(f"{where}: nested too deeply")
    yaml = YAML(typ="safe", pure=True)
    try:
        node = _compose(yaml, text, where)
        return None if node is None else _Converter(yaml, where).convert(node)
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None


def _flow_depth(text: str) -> int:
    """Return the depth of brackets, of those in strings and comments too: the parser's time grows with its square."""
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _compose(yaml: YAML, text: str, where: Source) -> Any:
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{_at(where, mark.line if mark else 0)}: not valid YAML: {printable(problem)}") from None
    except (YAMLError, ValueError) as error:  # ValueError: an escape beyond Unicode
        raise UserError(f"{where}: not valid YAML: {printable(' '.join(str(error).split()))}") from None


def _at(where: Source, line: int) -> Source:
    return Source("file", where.text, where.line + line) if where.kind == "file" else where


class _Converter:
    """Converts the nodes of one YAML text. An alias is converted where it stands, so the number of values is limited."""

    def __init__(self, yaml: YAML, where: Source) -> None:
        self._yaml, self._where, self._left = yaml, where, MAX_VALUES

    def convert(self, node: Any, parents: tuple[int, ...] = ()) -> Node:
        source = _at(self._where, node.start_mark.line)
        self._left -= 1
        if self._left < 0:
            raise UserError(f"{source}: more than {MAX_VALUES:,} values (aliases expanded)")
        if id(node) in parents:
            raise UserError(f"{source}: an alias contains itself")
        parents = (*parents, id(node))
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if isinstance(node, MappingNode) and kind == "map":
            return self._mapping(node, parents)
        if isinstance(node, SequenceNode) and kind == "seq":
            return Items(tuple(self.convert(item, parents) for item in node.value), source)
        if isinstance(node, ScalarNode) and kind in ("null", "bool", "int", "float"):
            try:
                return Scalar(self._yaml.constructor.construct_object(node), source)
            except (ValueError, LookupError):  # the library raises IndexError or KeyError for `!!float ''` and `!!bool x`
                raise UserError(f"{source}: {describe(node.value)} is not {'a' if kind != 'int' else 'an'} {kind}") from None
        if isinstance(node, ScalarNode) and kind in ("str", "timestamp"):
            return Scalar(_text(node.value, source), source)
        raise UserError(f"{source}: the YAML tag {describe(str(node.tag))} is not supported")

    def _mapping(self, node: MappingNode, parents: tuple[int, ...]) -> Mapping:
        items: dict[str, Node] = {}
        key_sources: dict[str, Source] = {}
        for key_node, value_node in node.value:
            source = _at(self._where, key_node.start_mark.line)
            if not isinstance(key_node, ScalarNode):
                raise UserError(f"{source}: a key must be a scalar")
            key = _text(key_node.value, source)
            if key in items:
                raise UserError(f"{source}: {printable(key)}: duplicate key (first at {key_sources[key]})")
            items[key] = self.convert(value_node, parents)
            key_sources[key] = source
        return Mapping(items, _at(self._where, node.start_mark.line), key_sources)


def _text(value: str, source: Source) -> str:
    """Return a string that has a UTF-8 form; YAML escapes can write half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{source}: {describe(value)} is not valid Unicode text") from None
    return value


def merge(under: Node, over: Node) -> Node:
    """Merge `over` over `under`: mappings key by key; anything else, also a list and an explicit `{}`, replaces the value."""
    if isinstance(under, Mapping) and isinstance(over, Mapping) and over.items:
        return merge_mappings(under, over)
    return over


def merge_mappings(under: Mapping, over: Mapping) -> Mapping:
    """Merge key by key; an empty `over` changes nothing."""
    items = dict(under.items)
    for key, value in over.items.items():
        items[key] = merge(items[key], value) if key in items else value
    return Mapping(items, over.source, {**under.key_sources, **over.key_sources})


def plain(node: Node) -> Any:
    """Return the tree as plain Python values."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.items.items()}


def child(node: Node, part: str | int) -> Node | None:
    """Return the value under one key or index, or None."""
    if isinstance(node, Mapping):
        return node.items.get(str(part))
    if isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
        return node.items[part]
    return None


def find(node: Node, path: Path) -> Node | None:
    """Return the value at a path, or None."""
    current: Node | None = node
    for part in path:
        if current is None:
            return None
        current = child(current, part)
    return current


def source_of(node: Node, path: Path) -> Source:
    """Return the source of the key at a path; for a missing path, that of its closest parent."""
    best = node.source
    current: Node | None = node
    for part in path:
        if current is None:
            break
        following = child(current, part)
        if following is not None:
            best = following.source
            if isinstance(current, Mapping) and str(part) in current.key_sources:
                best = current.key_sources[str(part)]
        current = following
    return best


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Scalar]]:
    """Yield every scalar with its path."""
    if isinstance(node, Scalar):
        yield path, node
    elif isinstance(node, Items):
        for index, item in enumerate(node.items):
            yield from walk(item, (*path, index))
    else:
        for key, value in node.items.items():
            yield from walk(value, (*path, key))


def dotted(path: Path) -> str:
    """Return a path as a dotted key: `data.train.0.path`."""
    return ".".join(str(part) for part in path)


def describe(value: object) -> str:
    """Return a value for an error message, short and on one line."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
