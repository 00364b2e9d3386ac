"""Command-line options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., object])


def config_arguments(function: Function) -> Function:
    """Take `CONFIG [section.key=value]...` as the parameters `config` and `overrides`."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("config", metavar="CONFIG")(function)


def json_option(function: Function) -> Function:
    """Take `--json` as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)
