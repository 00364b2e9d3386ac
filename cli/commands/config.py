"""`ridge config show|schema|diff`: print, describe and compare configs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import config_arguments, json_option
from ridgeline.cli.tables import Column, print_json, print_table, write_text
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config


@click.command()
@config_arguments
@click.option("--set", "only_set", is_flag=True, help="Omit values that are schema defaults.")
@json_option
def show(config: str, overrides: tuple[str, ...], only_set: bool, as_json: bool) -> None:
    """Print the resolved CONFIG as YAML, with the origin of each value.

    CONFIG is a YAML file, or the name of a shipped config, such as models/llama-3.2-1b.
    """
    from ridgeline.configs.dump import to_commented_yaml, to_json
    from ridgeline.configs.load import load

    resolved = load(config, overrides)
    if as_json:
        print_json(to_json(resolved))
    else:
        sys.stdout.write(to_commented_yaml(resolved, only_set=only_set))


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file instead of stdout.")
def schema(output: Path | None) -> None:
    """Print the JSON Schema of a config file, for completion and validation in editors.

    To use it, put `# yaml-language-server: $schema=PATH` on the first line of a YAML file.
    """
    import json

    from ridgeline.configs.json_schema import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    write_text(output, text)


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@json_option
def diff(a: str, b: str, as_json: bool) -> None:
    """Print the differences between the resolved configs A and B.

    A and B are YAML files, names of shipped configs, or run directories (their config.yaml).
    """
    from ridgeline.configs.diff import MISSING
    from ridgeline.configs.diff import diff as differences
    from ridgeline.configs.dump import value_text

    found = differences(_read(a), _read(b))
    if as_json:
        print_json([{"key": key, "a": old, "b": new} for key, old, new in found])
    elif not found:
        click.echo("no difference")
    else:
        shown = [{"key": key, "a": old, "b": new} for key, old, new in found]
        texts = [{name: value if name == "key" or value == MISSING else value_text(value) for name, value in row.items()} for row in shown]
        print_table([Column("key"), Column("a", a), Column("b", b)], texts)


def _read(name: str) -> Config:
    """Read a config file, or the resolved config of a run directory."""
    from ridgeline.configs.load import from_resolved, load

    directory = Path(name)
    if directory.is_dir():
        if not (directory / "config.yaml").is_file():
            raise UserError(f"{name}: not a run directory: it has no config.yaml")
        return from_resolved(directory / "config.yaml")
    return load(name).config
