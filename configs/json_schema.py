"""JSON Schema (draft 2020-12) of config files, for completion and validation in editors."""

from __future__ import annotations

from typing import Any

from ridgeline.configs.choices import CHOICES, allowed_names
from ridgeline.configs.compose import family_names
from ridgeline.configs.fields import env_keys
from ridgeline.configs.remat import NAMES as REMAT_NAMES
from ridgeline.configs.schema import Config


def json_schema() -> dict[str, Any]:
    """Return the schema of config files: all settings and `base`, closed sets of names as enums, docstrings as descriptions."""
    schema = Config.model_json_schema()
    _tidy(schema)
    schema["properties"] = {
        "base": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Config files that this one is merged over: paths, or shipped names (models/gpt2). Later ones take precedence.",
        },
        **schema["properties"],
    }
    enums: dict[str, list[str]] = {key: list(allowed_names(key)) for key in CHOICES}
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
    """Remove pydantic's titles and the `env_interpolation` marker, which editors do not use."""
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
