"""Plug-ins: what installed packages add to Ridgeline through entry points.

A package declares them in its pyproject.toml, for example

    [project.entry-points."ridgeline.schedules"]
    inverse_sqrt = "my_package.schedules:inverse_sqrt"

Names are listed from the metadata of the installed packages, without an import; a plug-in is imported when a config selects it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.configs.errors import UserError, unknown_name

T = TypeVar("T")

GROUPS = {
    "families": "model.family",
    "optimizers": "optimizer.kind",
    "schedules": "schedule.kind",
    "tokenizers": "tokenizer kind",
    "metrics": "metric",
    "writers": "metric writer",
    "sources": "input format",
    "clusters": "cluster",
}
"""Group, an entry point group without the prefix `ridgeline.` -> what its plug-ins are."""


@functools.cache
def _installed() -> Any:
    """Return the entry points of all installed packages, which have `select` (10 ms); the type depends on the version of Python."""
    return importlib.metadata.entry_points()


@functools.cache
def _registered(group: str) -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Return name -> entry points of a group, in order of name. More than one: several packages register the name."""
    assert group in GROUPS
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in sorted(_installed().select(group=f"ridgeline.{group}"), key=lambda entry: (entry.name, _package(entry))):
        found.setdefault(entry.name, []).append(entry)
    return found


def names(group: str) -> list[str]:
    """Return the names that installed packages register in a group. Imports none of them."""
    return list(_registered(group))


def all_names(group: str, built_in: Iterable[str]) -> list[str]:
    """Return the built-in names and then those of the plug-ins. Imports none of them."""
    own = list(built_in)
    return [*own, *(name for name in names(group) if name not in own)]


def find(group: str, name: str, built_in: Iterable[str] = ()) -> importlib.metadata.EntryPoint | None:
    """Return the entry point of a name; None when no package registers it. Imports nothing.

    Raises UserError when two packages register the name, or one registers a built-in name.
    """
    entries = _registered(group).get(name, [])
    if not entries:
        return None
    packages = [_package(entry) for entry in entries]
    if name in built_in:
        raise UserError(f"{GROUPS[group]} '{name}' is built in, and package {packages[0]} registers the same name; uninstall {packages[0]}")
    if len(packages) > 1:
        raise UserError(f"{GROUPS[group]} '{name}' is registered by the packages {' and '.join(packages)}; uninstall one of them")
    return entries[0]


def load(group: str, name: str, kind: type[T], built_in: Iterable[str] = ()) -> T:
    """Import and return a plug-in, which must be an instance of `kind`.

    Raises UserError, with the package's name, when it cannot be imported or is something else; or as `find`; or when the name is unknown.
    """
    built_in = list(built_in)
    entry = find(group, name, built_in)
    if entry is None:
        raise unknown_name(GROUPS[group], name, all_names(group, built_in))
    plugin = _load(entry)
    if not isinstance(plugin, kind):
        raise UserError(f"{_describe(group, entry)} must be a {kind.__name__}, got {type(plugin).__name__}")
    return plugin


def load_callable(group: str, name: str, built_in: Iterable[str] = ()) -> Any:
    """Import and return a plug-in that is a function or class. Raises UserError as `load`."""
    plugin = load(group, name, object, built_in)
    if not callable(plugin):
        entry = find(group, name)
        assert entry is not None
        raise UserError(f"{_describe(group, entry)} must be a function or class, got {type(plugin).__name__}")
    return plugin


def module_directory(group: str, name: str) -> Path | None:
    """Return the directory of the file of a plug-in's module, without importing that module; None when no package registers the name.

    Raises UserError when there is no such module; or as `find`.
    """
    entry = find(group, name)
    if entry is None:
        return None
    try:
        spec = importlib.util.find_spec(entry.module)
    except Exception as error:  # importing the parent package runs its code
        raise _failed(group, entry, error) from error
    if spec is None or spec.origin is None:
        raise UserError(f"{_describe(group, entry)}: there is no module {entry.module}")
    return Path(spec.origin).parent


def loaded_sources() -> list[Path]:
    """Return the Python files of the top-level packages of every plug-in that this process has imported, in order."""
    files: set[Path] = set()
    for group in GROUPS:
        for entries in _registered(group).values():
            for entry in entries:
                top = sys.modules.get(entry.module.partition(".")[0])
                if entry.module in sys.modules and top is not None and getattr(top, "__file__", None):
                    file = Path(str(top.__file__))
                    files.update(file.parent.rglob("*.py") if file.name == "__init__.py" else [file])
    return sorted(files)


def _load(entry: importlib.metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # a plug-in can fail in any way
        raise _failed(entry.group.removeprefix("ridgeline."), entry, error) from error


def _failed(group: str, entry: importlib.metadata.EntryPoint, error: Exception) -> UserError:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{_describe(group, entry)} cannot be imported: {why}")


def _describe(group: str, entry: importlib.metadata.EntryPoint) -> str:
    return f"{GROUPS[group]} '{entry.name}' ({entry.value}) of package {_package(entry)}"


def _package(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"
