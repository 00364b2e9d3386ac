"""Output that fits the terminal: help and lines of text are wrapped between words, and no word is broken, not even at a hyphen."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

import click

VERBATIM = frozenset({"config", "generate", "init", "launch", "logs", "submit", "submit-data", "sweep", "train"})
"""Commands whose output is a file, a script, a log or a text, or has its own layout."""
_KEPT_HYPHEN = "\u2011"


def fit_stdout(words: Sequence[str]) -> None:
    """Wrap what a command prints on a terminal; `words` are its arguments. Other output is left as it is."""
    if sys.stdout.isatty() and "--json" not in words and (not words or words[0] not in VERBATIM):
        stream = sys.stdout
        stream.flush()
        sys.stdout = _Fitted(stream.buffer, stream.encoding, stream.errors, line_buffering=True)


def fitted(line: str, width: int) -> str:
    """Return a line in lines of at most `width` where its words allow; a command to copy is continued with backslashes."""
    text = line.lstrip(" ")
    if len(line) <= width or "\x1b" in line or "\r" in line:
        return line
    indent, is_command = line[: len(line) - len(text)], text.startswith(("ridge ", "$ "))
    parts = textwrap.wrap(
        text,
        width - 2 * is_command,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return (" \\\n" if is_command else "\n").join(parts)


class _Fitted(io.TextIOWrapper):
    """A stream that wraps whole lines as they are written."""

    def write(self, text: str) -> int:
        width = shutil.get_terminal_size().columns
        super().write("\n".join(fitted(line, width) for line in text.split("\n")))
        return len(text)


class HelpFormatter(click.HelpFormatter):
    """click's, without line breaks after hyphens: `runs/NAME-KEY` stays whole."""

    def write_text(self, text: str) -> None:
        """Write a paragraph."""
        super().write_text(text.replace("-", _KEPT_HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of terms and their descriptions."""
        super().write_dl([(term, text.replace("-", _KEPT_HYPHEN)) for term, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        """Return the help."""
        return super().getvalue().replace(_KEPT_HYPHEN, "-")


click.Context.formatter_class = HelpFormatter
