"""A pseudo terminal of a given width, and the screen with its scrollback that a program leaves on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import dataclass

ROWS = 40
_PIECES = re.compile(r"\x1b\[(?P<number>[\d;?]*)(?P<code>[A-Za-z])|(?P<text>[^\x1b\r\n]+)|(?P<newline>\r?\n)|(?P<return>\r)")


@dataclass(frozen=True)
class Shown:
    """What a program did to a terminal."""

    code: int
    lines: list[str]
    """The screen and its scrollback at the end."""
    frames: list[str]
    """Every line that was on the screen at some time, live lines included."""
    wrapped: bool
    """Whether a line was longer than the terminal is wide."""


def on_terminal(arguments: Sequence[str], columns: int, **variables: str) -> Shown:
    """Run `python ARGUMENTS` with its output on a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, *arguments], stdin=slave, stdout=slave, stderr=slave, env={**env, "TERM": "xterm-256color", **variables}
    )
    os.close(slave)
    chunks = []
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(master, 4096):
            chunks.append(chunk)
    os.close(master)
    return played(b"".join(chunks).decode(), child.wait(60), columns)


def played(text: str, code: int, columns: int) -> Shown:
    """Return what a terminal of this width shows: carriage returns, erased lines and cursor movements applied."""
    lines, frames, row, column, wrapped = [""], [], 0, 0, False
    for piece in _PIECES.finditer(text):
        if piece["text"]:
            for character in piece["text"]:
                if column == columns:
                    wrapped, row, column = True, row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
                column += 1
            frames.append(lines[row].rstrip())
        elif piece["newline"]:
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece["return"]:
            column = 0
        elif piece["code"] == "K":
            lines[row] = "" if piece["number"] == "2" else lines[row][:column]
        elif piece["code"] == "A":
            row = max(0, row - int(piece["number"] or 1))
    return Shown(code, [line.rstrip() for line in lines], frames, wrapped)
