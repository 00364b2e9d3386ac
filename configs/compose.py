"""Composition of config files: `base:`, the defaults of the model family, and config.json of Hugging Face models."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ridgeline.configs import plugins
from ridgeline.configs.errors import UserError, nearest, unknown_name
from ridgeline.configs.schema import DataConfig
from ridgeline.configs.yaml_tree import (
    Items,
    Mapping,
    Scalar,
    Source,
    describe,
    display_path,
    merge_mappings,
    parse,
    plain,
    read_file,
    source_of,
)

PACKAGE = Path(__file__).parent
"""Directory of the shipped configs, in which `base: [models/gpt2]` is found from any working directory."""
FAMILIES = PACKAGE / "models" / "families"
CLUSTERS = PACKAGE / "clusters"
DEFAULT_FAMILY = "llama"


def family_names() -> list[str]:
    """Return the names of the architecture families, those of plug-ins included."""
    return sorted(plugins.all_names("families", built_in_families()))


def built_in_families() -> list[str]:
    """Return the names of the architecture families of this repository."""
    return sorted(path.stem for path in FAMILIES.glob("*.yaml"))


def family_defaults(name: str) -> Mapping:
    """Return the defaults of a family: its file in models/families, or NAME.yaml beside the module of the plug-in.

    Raises UserError when the plug-in has no such file, or two packages register the name.
    """
    built_in = built_in_families()
    plugins.find("families", name, built_in)  # refuses a name that is registered twice
    directory = FAMILIES if name in built_in else plugins.module_directory("families", name)
    assert directory is not None, "one of family_names()"
    file = directory / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"model family '{name}' has no defaults: its package must install {file}")
    return read_file(file)


def shipped_names() -> list[str]:
    """Return the names of the shipped configs as written in `base`: `models/gpt2`, `examples/...`."""
    files = (path for path in PACKAGE.rglob("*.yaml") if FAMILIES not in path.parents and CLUSTERS not in path.parents)
    return sorted(str(path.relative_to(PACKAGE).with_suffix("")) for path in files)


HUGGING_FACE, HUGGING_FACE_FILE = "hf:", "config.json"
"""`hf:DIR` is the model of a Hugging Face directory: of its config.json."""


def locate(name: str, directory: Path) -> Path | None:
    """Return the file of a config, in `directory` or shipped; the suffix .yaml is optional. None when there is none."""
    if name.startswith(HUGGING_FACE):
        return directory / name.removeprefix(HUGGING_FACE) / HUGGING_FACE_FILE  # `read_hugging_face` reports what is missing
    for root in (directory, PACKAGE):
        for candidate in (root / name, root / f"{name}.yaml"):
            if os.path.isfile(candidate):  # False for a name that no file can have
                return candidate
    return None


def locate_main(name: str) -> Path:
    """Return the file of the config that the command line names. Raises UserError when there is none."""
    path = locate(name, Path())
    if path is None:
        if os.path.isdir(name):
            inside = Path(name) / "config.yaml"
            raise UserError(f"config '{name}' is a directory; use " + (f"'{inside}'" if inside.is_file() else "a YAML file"))
        raise UserError(f"config '{name}' not found{_suggestion(name, Path())}")
    return path


def _suggestion(name: str, directory: Path) -> str:
    beside = (directory / name).parent
    files = {str(path.with_suffix("")): str(path) for path in beside.glob("*.yaml")} if os.path.isdir(beside) else {}
    candidates = {**{shipped: shipped for shipped in shipped_names()}, **files}
    close = nearest(str(directory / name).removesuffix(".yaml"), candidates) or nearest(name.removesuffix(".yaml"), candidates)
    return f"; did you mean '{candidates[close]}'?" if close else ""


MAX_FILES = 50
"""Most files of a config, each counted as often as a `base:` names it."""


def read_hugging_face(path: Path) -> Mapping:
    """Return the config of a Hugging Face config.json: its model, with rows no longer than the model's longest.

    Raises UserError for an unsupported architecture or feature, and where the directory or the file is missing.
    """
    # The readers are those of the families (models/families), above this package, and import JAX: imported here and only for such a file.
    reader = importlib.import_module("ridgeline.models.huggingface.convert")
    model = reader.model_from_hf(reader.read_config(path.parent))
    tree = {"model": model.model_dump(mode="json")}
    if model.max_seq_len < DataConfig().seq_len:
        tree["data"] = {"seq_len": model.max_seq_len}
    node = parse(json.dumps(tree), Source("file", display_path(path), 1))
    assert isinstance(node, Mapping)
    return node


def read_with_bases(path: Path, chain: tuple[Path, ...] = (), count: Iterator[int] | None = None) -> Mapping:
    """Read a file merged over its bases. Later bases override earlier ones, and the file overrides all of them.

    chain: the files that lead to this one; count: numbers the files.
    """
    resolved = path.resolve()
    if path.name == HUGGING_FACE_FILE:
        return read_hugging_face(path)
    tree = read_file(path)
    count = itertools.count() if count is None else count
    base = tree.items.get("base")
    if base is None:
        return tree
    own = Mapping({key: value for key, value in tree.items.items() if key != "base"}, tree.source, tree.key_sources)
    if not isinstance(base, Items):
        raise UserError(f"{source_of(tree, ('base',))}: base: must be a list of files, as in [models/gpt2], got {describe(plain(base))}")
    chain = (*chain, resolved)
    under = Mapping({}, tree.source)
    for entry in base.items:
        if not isinstance(entry, Scalar) or not isinstance(entry.value, str):
            raise UserError(f"{entry.source}: base: must be a list of files, got {describe(plain(entry))}")
        found = locate(entry.value, path.parent)
        if next(count) >= MAX_FILES:
            raise UserError(f"{entry.source}: base: more than {MAX_FILES} files")
        if found is None:
            raise UserError(f"{entry.source}: base: {describe(entry.value)} not found{_suggestion(entry.value, path.parent)}")
        if found.resolve() in chain:
            loop = " -> ".join(display_path(file) for file in (*chain, found.resolve()))
            raise UserError(f"{entry.source}: base: files include each other: {loop}")
        under = merge_mappings(under, read_with_bases(found, chain, count))
    return merge_mappings(under, own)


def with_family_defaults(tree: Mapping) -> Mapping:
    """Merge the config over the defaults of its model family. Raises UserError for an unknown family."""
    model = tree.items.get("model")
    family = model.items.get("family") if isinstance(model, Mapping) else None
    name = family.value if isinstance(family, Scalar) else DEFAULT_FAMILY
    if not isinstance(name, str):
        return tree  # not a name: the validation reports it
    if name not in family_names():
        where: Source = source_of(tree, ("model", "family"))
        raise UserError(f"{where}: model.family: {unknown_name('model family', name, family_names())}")
    defaults = family_defaults(name)
    if isinstance(model, Mapping) and not model.items:
        tree = Mapping({key: value for key, value in tree.items.items() if key != "model"}, tree.source, tree.key_sources)
    return merge_mappings(defaults, tree)
