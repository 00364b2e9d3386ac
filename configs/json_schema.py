"""JSON Schema (draft 2020-12) of a config file, from which editors complete and check the YAML."""

from __future__ import annotations

from typing import Any

from ridgeline.configs.compose import family_names
from ridgeline.configs.fields import env_keys
from ridgeline.configs.names import NAMES_BY_KEY, REMAT_NAMES
from ridgeline.configs.schema import Config


def json_schema() -> dict[str, Any]:
    """Return the schema of a config file: the settings, `base`, the closed name sets as enums, docstrings as descriptions."""
    schema = Config.model_json_schema()
    _tidy(schema)
    schema["properties"] = {
        "base": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Files underneath this one: relative to it, or shipped (models/gpt2). Later ones win; this file wins over all.",
        },
        **schema["properties"],
    }
    enums: dict[str, list[str]] = {key: list(names) for key, (_, names) in NAMES_BY_KEY.items()}
    enums["model.family"] = family_names()
    for key, names in enums.items():
        _property(schema, key)["enum"] = names
    _property(schema, "compute.remat.names")["items"]["enum"] = list(REMAT_NAMES)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Ridgeline config",
        **{key: value for key, value in schema.items() if key != "title"},
        "$comment": f"${{env:NAME}} and ${{env:NAME,default}} are replaced in: {', '.join(env_keys())}",
    }


def _tidy(node: Any) -> None:
    """Drop generated titles and our own marker: neither says anything to an editor."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            node.pop("title")
        node.pop("env_interpolation", None)
        for value in node.values():
            _tidy(value)
    elif isinstance(node, list):
        for value in node:
            _tidy(value)


def _property(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the sub-schema of a dotted key, following `$ref`."""
    current = schema
    for part in key.split("."):
        current = current["properties"][part]
        if "$ref" in current:
            current = schema["$defs"][current["$ref"].rpartition("/")[2]]
    return current
