"""Tables: aligned text, fitted to a terminal, JSON on request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli.fitted import fitted
from ridgeline.cli.main import ridge
from ridgeline.cli.tables import Column, print_table, text_table
from tests.terminal import on_terminal

ROWS = [{"name": "query", "bytes": 1024, "share": 0.5}, {"name": "out", "bytes": 8, "share": None}]
COLUMNS = [Column("name", "parameter"), Column("bytes"), Column("share", format=lambda value: f"{value:.1%}")]


def test_piped_output_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS, ROWS, title="Model")
    assert capsys.readouterr().out.splitlines() == [
        "Model",
        "parameter  bytes  share",
        "query       1024  50.0%",
        "out            8    n/a",
    ]


def test_json_keeps_raw_values_and_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name"], ROWS, as_json=True)
    assert json.loads(capsys.readouterr().out) == ROWS


def test_a_table_without_rows_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [])
    assert capsys.readouterr().out == "a  b\n"


HEADINGS = st.lists(st.text("ab -[]", min_size=1, max_size=12).map(str.strip), min_size=1, max_size=9)


@given(HEADINGS, st.integers(0, 3), st.randoms(use_true_random=False), st.integers(10, 120))
@settings(max_examples=60, deadline=None)
def test_a_table_fits_the_width_without_breaking_a_word_or_losing_a_cell(headings, rows, random, width) -> None:
    def text() -> str:
        return " ".join("x" * random.randint(1, 9) for _ in range(random.randint(1, 6)))

    cells = [[text() for _ in headings] for _ in range(rows)]
    right = [random.random() < 0.5 for _ in headings]
    shown = text_table(headings, cells, right, width=width)
    words = [word for row in (headings, *cells) for cell in row for word in cell.split()]
    longest = max(map(len, words), default=0)
    assert all(len(line) <= width for line in shown.splitlines()) or 2 * longest + 2 > width
    first = [word for row in (headings, *cells) for word in row[0].split()]
    extra = sorted(shown.split())
    for word in words:
        extra.remove(word)  # every word is there, whole
    assert set(extra) <= set(first)  # the first column is repeated
    whole = text_table(headings, cells, right)
    if all(len(line) <= width for line in whole.splitlines()):
        assert " ".join(shown.split()) == " ".join(whole.split())


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_tables_of_a_command_fit_a_real_terminal(columns: int) -> None:
    """`ridge plan` has the widest table."""
    shown = on_terminal(["-m", "ridgeline", "plan", "models/llama-3.2-1b", "-c", "dgx-h100", "-N", "1,2", "--top", "3"], columns)
    assert shown.code == 0, shown.lines
    words = " ".join(shown.lines).split()
    for word in ("microbatches", "tokens/s/device", "device-hours", "fsdp=2"):
        assert word in words
    table = [line for line in shown.lines if "microbatches" in line or "tokens/s/device" in line]
    assert (len(table) == 1) == (columns == 200)
    assert all(len(line) <= columns for line in table)
    assert not shown.wrapped  # lines of text are wrapped between words


def words(shown: str) -> set[str]:
    return set(shown.replace("\\\n", " ").split())


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    for each in group.list_commands(click.Context(group, info_name=name)):
        command = group.get_command(click.Context(group), each)
        assert command is not None
        yield f"{name} {each}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {each}")


def test_help_breaks_no_word_at_80_columns() -> None:
    for name, command in commands(ridge, "ridge"):
        contexts = [click.Context(command, info_name=name, terminal_width=width, max_content_width=width) for width in (80, 9999)]
        narrow, wide = (command.get_help(context) for context in contexts)
        assert words(narrow) == words(wide), name
        assert max(map(len, narrow.splitlines())) <= 80, name


@given(
    st.lists(st.text("ab-/", min_size=1, max_size=30), min_size=1, max_size=30), st.integers(0, 8), st.sampled_from(["", "ridge ", "$ "])
)
@settings(max_examples=60, deadline=None)
def test_lines_of_text_are_wrapped_between_words_and_commands_can_be_copied(parts: list[str], indent: int, start: str) -> None:
    line = " " * indent + start + " ".join(parts)
    lines = fitted(line, 80).split("\n")
    assert all(len(each) <= 80 for each in lines)
    assert all(each.startswith(" " * indent) for each in lines)
    if start:
        assert all(each.endswith(" \\") for each in lines[:-1])
        lines = [each.removesuffix(" \\") for each in lines]
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())


def test_an_error_breaks_no_word_on_a_real_terminal() -> None:
    shown = on_terminal(["-m", "ridgeline", "estimate", "memory", "quickstart"], 80)
    assert shown.code == 2 and not shown.wrapped
    assert "devices" in words("\n".join(shown.lines))


EVALUATING = """
import time
from ridgeline.cli.progress import evaluation_progress
with evaluation_progress() as show:
    time.sleep(0.3)
    show("validation", 3, 20)
    time.sleep(0.3)
"""


def test_progress_of_an_evaluation_shows_the_time_before_the_first_batch() -> None:
    shown = on_terminal(["-c", EVALUATING], 80)
    assert shown.code == 0, shown.lines
    assert any(re.search(r"loading and compiling .* 0:00:00", line) for line in shown.frames), shown.frames
    assert any(re.search(r"validation .* 3/20 0:00:00", line) for line in shown.frames), shown.frames
    assert not shown.wrapped


PREPARING = """
import time
from types import SimpleNamespace
from ridgeline.cli.progress import prepare_progress
with prepare_progress() as show:
    show(SimpleNamespace(total_bytes=11_646_372_000, input_bytes=8_231_860_000, tokens=16_446_110_000, bad=12))
    time.sleep(0.3)
"""


def test_progress_of_a_preparation_is_one_line_at_80_columns() -> None:
    shown = on_terminal(["-c", PREPARING], 80)
    assert shown.code == 0, shown.lines
    assert not shown.wrapped
    assert any(re.search(r"━━━━━━ 8\.2/11\.6 GB .*16\.4B tokens, 12 bad", line) for line in shown.frames), shown.frames
