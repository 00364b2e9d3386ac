"""Node-seconds of elastic runs from the lines of the job script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli.commands.goodput import describe
from ridgeline.cli.commands.status import describe_nodes
from ridgeline.rundir.allocations import read_allocations, usage
from ridgeline.rundir.goodput import CATEGORIES, Ledger, Stretch


def write(path: Path, *lines: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_reduced_time_missing_nodes_and_idle_spares(tmp_path: Path) -> None:
    """4 nodes and a spare for 100 s; 3 of 4 for 50 s, whose script was lost; none good; 2 of 4 until now."""
    write(
        tmp_path / "nodes.jsonl",
        {"job": 7, "begin": 1000, "nodes": 4, "of": 4, "spares": 1, "names": "a,b,c,d", "spare_names": "e"},
        {"job": 7, "begin": 1110, "nodes": 3, "of": 4, "spares": 0, "names": "a,b,c", "spare_names": ""},
        {"job": 7, "begin": 1150, "nodes": 0, "of": 4, "spares": 1, "names": "", "spare_names": "a"},
        {"job": 7, "begin": 1160, "nodes": 2, "of": 4, "spares": 1, "names": "a,b", "spare_names": "c"},
    )
    write(tmp_path / "attempts.jsonl", {"job": 7, "begin": 1001, "end": 1100, "exit_code": 72})
    found = usage(tmp_path, 1200)
    assert found is not None
    assert (found.reduced_s, found.missing_node_s, found.spare_node_s) == (50 + 40, 50 * 1 + 40 * 2, 100 * 1 + 40 * 1)
    assert describe_nodes(read_allocations(tmp_path)) == "2 of 4 nodes: a,b, spare: c; starts on 4 -> 3 -> 2 nodes"


def test_other_runs_have_none(tmp_path: Path) -> None:
    assert usage(tmp_path, 0.0) is None


def test_device_hours_are_those_of_the_devices_of_each_start() -> None:
    stretches = (Stretch(0, 3600, "productive", 0, True), Stretch(3600, 5400, "queue", 1), Stretch(5400, 9000, "productive", 1, True))
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {"productive": 7200.0, "queue": 1800.0}
    ledger = Ledger(seconds, 9000.0, 2, 10, 0, None, stretches)
    found = describe(ledger, 2, 3.0, [8, 2])
    assert found["device_hours"] == pytest.approx(8 + 1 + 2) and found["usd"] == pytest.approx(33)
    assert found["usd_by_category"]["productive"] == pytest.approx(30) and found["usd_by_category"]["queue"] == pytest.approx(3)
    assert describe(ledger, 2, None)["device_hours"] == pytest.approx(5)
