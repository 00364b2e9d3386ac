"""`${env:NAME}` and `${env:NAME,default}` in the fields that declare it; refused everywhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping as Environment

from ridgeline.configs.errors import UserError
from ridgeline.configs.fields import env_keys, slot_at
from ridgeline.configs.tree import Items, Mapping, Node, Path, Scalar, dotted

_PLACE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")


def interpolate(node: Node, environment: Environment[str, str], path: Path = ()) -> Node:
    """Replace every `${env:...}` by its value. Raises UserError for a missing variable or an undeclared field."""
    if isinstance(node, Mapping):
        items = {key: interpolate(value, environment, (*path, key)) for key, value in node.items.items()}
        return Mapping(items, node.source, node.key_sources)
    if isinstance(node, Items):
        return Items(tuple(interpolate(item, environment, (*path, index)) for index, item in enumerate(node.items)), node.source)
    if isinstance(node.value, str) and "${" in node.value:
        return Scalar(_expand(node.value, node, environment, path), node.source)
    return node


def _expand(text: str, node: Scalar, environment: Environment[str, str], path: Path) -> str:
    where = f"{node.source}: {dotted(path)}"
    slot = slot_at(path)
    if slot is None:
        return text  # an unknown key: the validation names it
    if not slot.env_interpolation:
        raise UserError(f"{where}: '${{...}}' is not allowed here (only in: {', '.join(env_keys())})")
    if "${" in _PLACE.sub("", text):
        raise UserError(f"{where}: unknown interpolation in '{text}' (allowed: ${{env:NAME}} and ${{env:NAME,default}})")

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name in environment:
            return environment[name]
        if default is None:
            raise UserError(f"{where}: the environment variable {name} is not set (give a default with ${{env:{name},default}})")
        return str(default)

    return _PLACE.sub(value, text)
