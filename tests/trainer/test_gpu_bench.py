"""The benchmark for real GPUs works before there is one: its rows are planned, and the script runs whole on toy shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.cluster import load_cluster
from planner.calibration import load_calibration
from planner.search import capacity_bytes
from planner.step_time import Machine

BENCH = Path(__file__).parents[1] / "bench"


def test_every_row_has_a_layout_that_fits_one_gpu_and_uses_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from gpu_rows import ROWS, choose

    cluster = load_cluster("dgx-h200").config.model_copy(update={"devices_per_node": 1, "links": []})
    calibration = load_calibration(None)
    capacity = capacity_bytes(Machine(cluster, calibration, 1))
    planned = {}
    for row in ROWS:
        config, best = choose(row, cluster, calibration)
        assert 0.5 * capacity < best.memory.total_bytes <= capacity, row.name
        assert config.data.seq_len == row.seq_len
        planned[row.name] = (config.model, best.step.tokens_per_s)
    model, narrow = planned["8b-4k-fp8"]
    assert model == planned["8b-4k"][0], "the ratio is of two rows of the same shape"
    assert narrow >= 1.3 * planned["8b-4k"][1], "the plan itself must reach the target"


def test_the_script_trains_both_and_reports_what_was_missed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu.py"), "1b-1k", "--tiny", "--steps", "3", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr  # a toy on a CPU misses the target of an H200
    assert "MISSED: tokens_per_s" in done.stdout.splitlines()[-1]
    [row] = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["tokens_per_s"] > 0
    assert row["peer"]["tokens_per_s"] > 0
    assert row["ledger"]["shares"]["compute_s"] > 0.05
    assert row["losses"][-1] < row["losses"][0], "both train on one batch"
    assert row["peer"]["losses"][1] < row["peer"]["losses"][0]


def test_a_row_of_narrow_products_is_held_against_the_row_of_wide_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu.py"), "8b-4k", "8b-4k-fp8", "--tiny", "--steps", "3", "--no-peer", "--no-profile"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    wide, narrow = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert narrow["over"] == pytest.approx(narrow["tokens_per_s"] / wide["tokens_per_s"])
    assert any(word.startswith("8b-4k: ratio") for word in narrow["missed"]) == (narrow["over"] < 1.3)
    assert narrow["losses"][-1] < narrow["losses"][0]
    assert narrow["losses"] != wide["losses"]


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py"), "2b"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no row '2b'" in done.stderr
