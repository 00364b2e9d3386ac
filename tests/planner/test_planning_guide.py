"""The commands of docs/guides/planning.md print what the guide shows. Run this file to renew it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from ridgeline.cli import main as cli

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"
BLOCK = re.compile(r"```console\n\$ ridge (.*)\n((?:.*\n)*?)```")


def answer(command: str) -> str:
    """What a command prints, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.run(shlex.split(command))
    return out.getvalue()


def renewed(text: str) -> str:
    """The guide with every block as it is printed now."""
    return BLOCK.sub(lambda found: f"```console\n$ ridge {found.group(1)}\n{answer(found.group(1))}```", text)


def test_the_guide_shows_what_the_commands_print():
    text = GUIDE.read_text()
    assert len(BLOCK.findall(text)) >= 4
    assert text == renewed(text), "run: python tests/planner/test_planning_guide.py"


if __name__ == "__main__":
    GUIDE.write_text(renewed(GUIDE.read_text()))
