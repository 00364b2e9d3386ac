"""Tables: aligned text when piped, rich on a terminal, JSON on request."""

from __future__ import annotations

import json
import sys

import pytest

from ridgeline.cli.tables import Column, print_table

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


def test_a_terminal_gets_a_drawn_table_with_markup_left_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_table(["name", "bytes"], [{"name": "[bold]x[/bold]", "bytes": 3}])
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]" in shown
    assert "bytes" in shown
