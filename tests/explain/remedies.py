"""What a finding tells to do must be accepted: overrides by the config, commands by the command line."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.main import ridge
from ridgeline.configs.load import load


def check_remedies(finding: Mapping[str, Any], config: Path | str) -> None:
    """Assert that a finding has at least one override or a command, and that the config (file or preset) and the parser take them.

    Nothing is run.
    """
    assert finding["overrides"] or finding["command"], finding
    if finding["overrides"]:
        load(config, finding["overrides"])
        assert all(override in finding["action"] for override in finding["overrides"] if not override.startswith("mesh.")), finding
    if finding["command"]:
        words = shlex.split(finding["command"])
        words = words[words.index("ridge") + 1 :]
        group = click.Context(ridge, info_name="ridge")
        name, command, rest = ridge.resolve_command(group, words)
        assert command is not None
        command.make_context(name, rest, parent=group)
