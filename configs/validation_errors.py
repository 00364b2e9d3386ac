"""Pydantic's validation errors as messages with file, line, key, what is wrong and what is allowed."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ridgeline.configs.errors import UserError, first_of, printable
from ridgeline.configs.fields import ROOT, Slot, unknown_key_hint
from ridgeline.configs.yaml_tree import Mapping, Path, describe, dotted, source_of

_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string (quote it)",
    "path_type": "a path",
    "list_type": "a list",
    "dict_type": "a mapping of names",
    "model_type": "a section (a mapping of keys)",
    "finite_number": "a finite number",
}


def validation_error(error: ValidationError, tree: Mapping, root: Slot = ROOT) -> UserError:
    """Return one line for pydantic's errors: the first in the order of files and lines, overrides last; and where the others are."""
    places: list[tuple[bool, str, int, str, int]] = []
    problems = error.errors(include_url=False)
    for number, found in enumerate(problems):
        path = _path(found)
        source = source_of(tree, path)
        places.append((source.kind == "override", source.text, source.line, f"{source}: {printable(dotted(path))}", number))
    places.sort()
    *_, place, number = places[0]
    first = _message(dict(problems[number]), _path(problems[number]), "[key]" in problems[number]["loc"], root)
    return first_of(f"{place}: {first}", [other for *_, other, _ in places[1:]])


def _path(found: Any) -> Path:
    return tuple(part for part in found["loc"] if part != "[key]")


def _message(found: dict[str, Any], path: Path, is_key: bool, root: Slot) -> str:
    kind, context, given = found["type"], found.get("ctx") or {}, describe(found["input"])
    if kind == "extra_forbidden":
        return unknown_key_hint(path, root)
    if kind == "missing":
        return "required, but missing"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}, got {given}"
    if kind == "literal_error":
        return f"must be {context['expected']}, got {given}"
    bounds = {"greater_than_equal": ("at least", "ge"), "greater_than": ("greater than", "gt")}
    bounds |= {"less_than_equal": ("at most", "le"), "less_than": ("less than", "lt")}
    if kind in bounds:
        words, limit = bounds[kind]
        return f"must be {words} {context[limit]}, got {given}"
    if kind in ("string_pattern_mismatch", "string_too_short"):
        what = "a name" if is_key else "must be a name"
        return f"{what} of letters, digits, '.', '_' and '-', beginning with a letter or digit, got {given}"
    if kind == "value_error":  # raised by a validator of this project
        return found["msg"].removeprefix("Value error, ")
    return f"{found['msg']}, got {given}"
