"""The benchmark for real GPUs works before there is one: its rows are planned, and the script runs whole on toy shapes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.search import capacity_bytes
from ridgeline.planner.step_time import Machine

BENCH = Path(__file__).parents[2] / "benchmarks"
PACKAGES = [entry for entry in sys.path if entry.endswith("-packages")]


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
    [line] = [line for line in done.stdout.splitlines() if line.startswith("1b-1k ")]
    assert "MISSED: tokens_per_s" in line
    [row] = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["tokens_per_s"] > 0
    assert row["peer"]["tokens_per_s"] > 0
    assert row["ledger"]["shares"]["compute_s"] > 0.05
    assert row["losses"][-1] < row["losses"][0], "both train on one batch"
    assert row["peer"]["losses"][-1] < row["peer"]["losses"][0]
    absent = importlib.util.find_spec("maxtext") is None
    assert ("MaxText: not measured, not installed (Python 3.12 or newer: pip install maxtext;" in done.stdout) == absent


def test_a_row_of_narrow_products_is_held_against_the_row_of_wide_ones(tmp_path: Path) -> None:
    # From a bare checkout, on a machine that has the packages but not this project: -S leaves an editable installation out.
    elsewhere = tmp_path / "empty"
    elsewhere.mkdir()
    command = [sys.executable, "-S", str(BENCH / "gpu.py"), "8b-4k", "8b-4k-fp8", "--tiny", "--steps", "3", "--no-peer", "--no-profile"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGES)}
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False, cwd=elsewhere, env=env
    )
    assert done.returncode == 1, done.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    wide, narrow = record["rows"]
    work = {name: 1 / row["ceiling"] * row["tokens_per_s"] for name, row in (("wide", wide), ("narrow", narrow))}
    rates = record["ceiling"]
    between = sorted([1.0, rates["float8_flops_per_s"] / rates["matmul_flops_per_s"]])
    assert between[0] <= work["narrow"] / work["wide"] <= between[1], "its products are held against the ceiling of their arithmetic"
    assert narrow["eight_bit_kernels"] == 0 and wide.get("eight_bit_kernels") is None, "a CPU has none, and the row says so"
    assert narrow["over"] == pytest.approx(narrow["tokens_per_s"] / wide["tokens_per_s"])
    assert any(word.startswith("8b-4k: ratio") for word in narrow["missed"]) == (narrow["over"] < 1.3)
    assert narrow["losses"][-1] < narrow["losses"][0]
    assert narrow["losses"] != wide["losses"]


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the script that plans its time."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_budget")


def test_the_rows_with_a_target_come_before_those_held_against_them_and_leading_peers_before_other_rows(budget: ModuleType) -> None:
    from gpu_rows import ROWS

    parts = budget.in_order(ROWS, peers=budget.PEERS, explicit=False)
    names = [part.name for part in parts]
    assert names[:3] == ["1b-1k, ours", "8b-4k, ours", "8b-4k-fp8, ours"]
    assert names[3:6] == ["1b-1k, PyTorch autocast", "8b-4k, PyTorch autocast", "8b-4k-fp8, PyTorch fp8"]
    with_target = {row.name for row in ROWS if row.peer and (row.tokens_per_s or row.mfu or row.fp8)}
    assert with_target == {part.row.name for part in parts if part.side in (budget.TORCH, budget.TORCH_FP8)}, "each has a peer"
    for row in ROWS:
        assert row.over is None or names.index(f"{row.over[0]}, ours") < names.index(f"{row.name}, ours")
    assert sorted(names) == sorted(part.name for part in budget.in_order(ROWS, peers=budget.PEERS, explicit=True))


def test_what_does_not_fit_is_refused_by_what_finished_parts_took(budget: ModuleType) -> None:
    now = [0.0]
    time_left = budget.Budget(100.0, lambda: now[0])
    assert time_left.refusal("ours", 60.0) is None
    now[0] = 55.0
    time_left.finished("ours", 30.0, 45.0)  # half as long again as expected
    assert time_left.refusal("ours", 20.0) is None  # 30 s of 40
    assert time_left.refusal("ours", 30.0) == "needs about 45 s, 40 s are left of 100"
    assert time_left.refusal("PyTorch autocast", 30.0) is None, "nothing is known of the other side"


def test_all_rows_and_their_peers_are_more_than_ten_minutes_and_the_leading_ones_fit(budget: ModuleType) -> None:
    from gpu_rows import ROWS

    spent = {"leading": 0.0, "all": 0.0}
    for part in budget.in_order(ROWS, peers=budget.PEERS, explicit=False):
        seconds = budget.expected_s(part, layers=18, step_s=1.7, profile=part.row.leading)
        spent["all"] += seconds
        spent["leading"] += seconds if part.row.leading and part.side in (budget.OURS, budget.TORCH) else 0.0
    assert spent["leading"] < 500 < 600 < spent["all"]


def test_a_row_that_does_not_fit_is_named_and_one_of_an_earlier_call_is_taken_up(tmp_path: Path) -> None:
    earlier = {"row": "8b-8k", "target": "much", "tokens_per_s": 5.0, "seq_len": 8192, "rows": 2, "missed": []}
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": [earlier, {"row": "1b-8k-packed", "target": "more"}]}))
    rows = ("8b-8k", "1b-8k-packed")
    command = [sys.executable, str(BENCH / "gpu.py"), *rows, "--tiny", "--no-peer", "--limit-s", "1", "--output", str(tmp_path)]
    done = subprocess.run([*command, "--continue"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 3, done.stderr
    assert "skipped: 1b-8k-packed, ours: needs about 1 s, 0 s are left of 1" in done.stdout, "for time alone: it was asked for"
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["rows"][0] == earlier and [part for part, _ in record["left_out"]] == ["1b-8k-packed, ours"]


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    program = "import runpy, sys; sys.modules['pydantic'] = None; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[1] + '/gpu.py')"
    done = subprocess.run([sys.executable, "-c", program, str(BENCH)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu.py: not installed: pydantic (pip install pydantic;") and done.stderr.count("\n") == 1


def test_pytorch_begins_with_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from gpu_torch import rows_to_try

    model = {"embed_dim": 2048, "num_layers": 16, "vocab_size": 128256, "mlp_dim": 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
    fitting = {mode: rows_to_try({**model, "tie_embeddings": True}, 1024, 128, mode, 141e9, False) for mode in ("autocast", "bf16")}
    assert 48 <= fitting["autocast"] < fitting["bf16"] <= 128, "the activations of 128 rows are 103 GB"
    deep = {**model, "embed_dim": 4096, "num_layers": 18, "mlp_dim": 14336, "head_dim": 128, "tie_embeddings": False}
    assert 4 <= rows_to_try(deep, 4096, 8, "autocast", 150.75e9, False) < 8, "93 GB with 2 rows on an H200"
    assert rows_to_try({**model, "tie_embeddings": True}, 1024, 2, "bf16", 141e9, False) == 2
    assert rows_to_try({**model, "tie_embeddings": True}, 1024, 128, "bf16", 1e9, False) == 1


def test_an_unknown_row_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py"), "2b"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no row '2b'" in done.stderr


def test_the_numerics_check_passes_right_kernels_and_fails_wrong_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    numerics = importlib.import_module("gpu_numerics")
    from ridgeline.models.moe.grouped_matmul import Blocks

    arguments = ["experts", "--tiny", "--seed", "5", "--output", str(tmp_path / "numerics.json")]
    assert numerics.main(arguments) == 0
    found = json.loads((tmp_path / "numerics.json").read_text())["checks"]
    assert len(found) == 11 and all(check["error"] <= check["limit"] for check in found)
    right = Blocks.outer
    monkeypatch.setattr(Blocks, "outer", lambda *arguments: right(*arguments) * 1.01)
    assert numerics.main(arguments) == 1
