"""Sweeps: the file and its mistakes, the points on disk, the table of results, what is submitted again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.launch import exit_codes
from ridgeline.launch.slurm.state import JobState
from ridgeline.launch.trials import sweep as on_disk
from ridgeline.launch.trials import sweep_local
from ridgeline.launch.trials.engine import SWEEP, TrialFiles
from ridgeline.launch.trials.submission import ranges
from ridgeline.launch.trials.sweep import Result, numbered, point_config, read_points, results, to_do, write_points
from ridgeline.launch.trials.sweep_file import Sweep, load_sweep
from ridgeline.rundir.jobs import JobRecord, record_job

BASE = """\
name: tiny
model: {vocab_size: 512, num_layers: 2, embed_dim: 32, num_heads: 4, mlp_dim: 64, max_seq_len: 64}
data: {train: [{path: corpus}], seq_len: 32, batch_size: 8}
trainer: {steps: 20}
"""
GRID = """\
name: lr
config: tiny.yaml
set:
  checkpoint.every: 5
grid:
  optimizer.learning_rate: [1e-3, 3e-3]
  model.num_heads: [2, 4]
"""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(BASE)


def swept(text: str = GRID) -> Sweep:
    Path("sweep.yaml").write_text(text)
    return load_sweep(Path("sweep.yaml"), {})


def test_a_grid_is_every_combination_the_last_key_fastest() -> None:
    sweep = swept()
    assert [tuple(point.overrides.values()) for point in sweep.points] == [(1e-3, 2), (1e-3, 4), (3e-3, 2), (3e-3, 4)]
    last = sweep.points[-1].config
    assert (last.optimizer.learning_rate, last.model.num_heads, last.checkpoint.every, last.trainer.steps) == (3e-3, 4, 5, 20)
    configs = [point_config(sweep, *one) for one in numbered(sweep)]
    assert [config.name for config in configs] == ["lr-000", "lr-001", "lr-002", "lr-003"]
    assert configs[2].run_dir == Path.cwd() / "runs/lr/002"


def test_a_list_holds_one_mapping_per_point() -> None:
    sweep = swept("name: l\nconfig: tiny.yaml\nlist:\n  - {seed: 1}\n  - {optimizer.kind: sgd, seed: 2}\n  - {}\n")
    assert [point.overrides for point in sweep.points] == [{"seed": 1}, {"optimizer.kind": "sgd", "seed": 2}, {}]
    assert sweep.points[1].config.optimizer.kind == "sgd"


def test_the_config_is_found_beside_the_sweep_file_and_among_the_shipped() -> None:
    Path("sub").mkdir()
    Path("sub/own.yaml").write_text(BASE)
    for name in ("own", "quickstart"):
        Path("sub/s.yaml").write_text(f"name: s\nconfig: {name}\nlist: [{{seed: 3}}]\n")
        assert load_sweep(Path("sub/s.yaml"), {}).points[0].config.seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: s\nconfig: tiny.yaml\ngird: {seed: [1]}\n", r"sweep.yaml:3: gird: unknown key; did you mean 'grid'\? .*"),
        ("name: s\ngrid: {seed: [1]}\n", r"sweep.yaml:1: config: required, but missing"),
        (
            "name: s\nconfig: none.yaml\ngrid: {seed: [1]}\n",
            r"sweep.yaml:2: config: 'none.yaml' is neither beside sweep.yaml nor shipped",
        ),
        ("name: s\nconfig: tiny.yaml\n", r"sweep.yaml:1: a sweep needs either grid: or list:, .*"),
        ("name: s\nconfig: tiny.yaml\ngrid: {seed: [1]}\nlist: [{seed: 1}]\n", r"sweep.yaml:4: a sweep needs either grid: or list:, .*"),
        ("name: s\nconfig: tiny.yaml\ngrid:\n  seed: []\n", r"sweep.yaml:4: grid: seed has no values"),
        ("name: s\nconfig: tiny.yaml\ngrid:\n  seed: 3\n", r"sweep.yaml:4: grid.seed: must be a list, got 3"),
        ("name: s\nconfig: tiny.yaml\ngrid:\n  sede: [3]\n", r"sweep.yaml:4: sede: unknown key; did you mean 'seed'\? .*"),
        (
            "name: s\nconfig: tiny.yaml\nset:\n  trainer.stpes: 3\nlist: [{}]\n",
            r"sweep.yaml:4: trainer.stpes: unknown key; did you mean 'steps'\? .*",
        ),
        ("name: s\nconfig: tiny.yaml\ngrid:\n  seed:\n    - 1\n    - -1\n", r"sweep.yaml:6: seed: must be at least 0, got -1"),
        (
            "name: s\nconfig: tiny.yaml\nlist:\n  - seed: 1\n  - model.num_heads: 5\n",
            r'sweep.yaml:5: point \{"model.num_heads": 5\} .*: tiny.yaml:2: model.embed_dim: .*',
        ),
        ("name: s\nconfig: tiny.yaml\nlist:\n  - {seed: 1}\n  - {seed: 1}\n", r'sweep.yaml:5: duplicate point \{"seed": 1\}'),
        ("name: s\nconfig: tiny.yaml\nlist:\n  - {run_dir: here}\n", r"sweep.yaml:4: run_dir: .*`directory`.*"),
        ("name: s\nconfig: tiny.yaml\nlist:\n  - {data: {seq: 4}}\n", r"sweep.yaml:4: data.seq: unknown key.*"),
    ],
)
def test_a_mistake_names_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        swept(text)
    assert re.fullmatch(message, str(caught.value).splitlines()[0]), caught.value


def test_a_point_keeps_its_number_when_the_file_grows_or_is_reordered() -> None:
    write_points(swept())
    write_points(swept(GRID.replace("[1e-3, 3e-3]", "[9e-3, 3e-3, 1e-3]")))
    points = read_points(Path("runs/lr"))
    assert [tuple(point.overrides.values()) for point in points] == [(1e-3, 2), (1e-3, 4), (3e-3, 2), (3e-3, 4), (9e-3, 2), (9e-3, 4)]
    fewer = swept(GRID.replace("[1e-3, 3e-3]", "[3e-3]"))
    assert [number.index for number, _ in numbered(fewer)] == [2, 3]
    write_points(fewer)
    assert len(read_points(Path("runs/lr"))) == 6, "points that left the file keep their results"


@pytest.mark.parametrize(("indices", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([1, 3, 4, 9], "1,3-4,9")])
def test_indices_as_slurm_reads_them(indices: list[int], text: str) -> None:
    assert ranges(indices) == text


def event(kind: str, **fields: object) -> str:
    return json.dumps({"time": 1.0, "mono": 1.0, "run": "r", "process": 0, "restart": 0, "kind": kind, **fields}) + "\n"


def trained(sweep: Sweep, index: int, step: int) -> None:
    """Make the run directory of a point as a run leaves it."""
    number, point = numbered(sweep)[index]
    number.directory.mkdir(parents=True, exist_ok=True)
    (number.directory / "config.yaml").write_text(to_yaml(point_config(sweep, number, point)))
    (number.directory / "events.jsonl").write_text(event("step", step=step, loss=4.0 - index, tokens_per_s=100.0, step_time_mean_s=0.1))
    (number.directory / "metrics.jsonl").write_text(json.dumps({"step": step, "eval/held/loss": 5.0 - index}) + "\n")


@pytest.fixture
def half_done() -> Sweep:
    """A sweep of four points: finished, failed, running, damaged."""
    sweep = swept()
    write_points(sweep)
    trained(sweep, 0, 20)
    trained(sweep, 1, 7)
    trained(sweep, 2, 11)
    trained(sweep, 3, 20)
    (Path("runs/lr/003") / "events.jsonl").write_text("garbage\n")
    record_job(sweep.directory, JobRecord("5", "t", "sweep", "local", None, 1, {"points": [0, 1, 2, 3]}))
    return sweep


def answer(job: str, slurm_cluster: str | None) -> Sequence[JobState]:
    states = ("COMPLETED", "FAILED", "RUNNING", "FAILED")
    return [JobState(f"{job}_{i}", state, i, exit_code=70 if i == 1 else 0) for i, state in enumerate(states)]


def table(sweep: Sweep) -> list[Result]:
    return results(sweep.directory, answer)


def test_the_table_survives_failed_and_damaged_points(half_done: Sweep) -> None:
    found = table(half_done)
    assert [result.state for result in found[:3]] == ["finished", "failed", "running"]
    assert found[3].state.startswith("unreadable: ")
    assert [(result.step, result.loss, result.evaluations) for result in found[:3]] == [
        (20, 4.0, {"held": 5.0}),
        (7, 3.0, {"held": 4.0}),
        (11, 2.0, {"held": 3.0}),
    ]
    assert found[1].exit_code == 70


def test_only_failed_and_missing_points_are_submitted_again(half_done: Sweep) -> None:
    assert [number.index for number, _ in to_do(half_done, table(half_done))] == [1, 3]
    grown = swept(GRID.replace("3e-3]", "3e-3, 9e-3]"))
    assert [number.index for number, _ in to_do(grown, table(half_done))] == [1, 3, 4, 5]


def test_a_finished_point_continues_when_the_file_sets_more_steps(half_done: Sweep) -> None:
    more = swept(GRID.replace("set:\n", "set:\n  trainer.steps: 30\n"))
    assert [number.index for number, _ in to_do(more, table(half_done))] == [0, 1, 3]


def test_a_finished_point_is_not_passed_off_as_another_config(half_done: Sweep) -> None:
    changed = swept(GRID.replace("set:\n", "set:\n  optimizer.b1: 0.8\n"))
    with pytest.raises(UserError, match=r"lr/000 .*optimizer.b1 0.9 -> 0.8"):
        to_do(changed, table(half_done))


def test_jobs_of_a_point_are_found_in_the_sweep_above_it(half_done: Sweep) -> None:
    record_job(half_done.directory, JobRecord("9", "t", "sweep", "local", None, 2, {"points": [1, 3]}))
    assert [record.job for record in on_disk.jobs_of(Path("runs/lr/001"))] == ["5_1", "9_1"]
    assert [record.job for record in on_disk.jobs_of(Path("runs/lr/000"))] == ["5_0"]
    assert [record.job for record in on_disk.jobs_of(Path("runs/lr"))] == ["5", "9"]


def test_the_table_on_the_terminal_and_as_json(
    half_done: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ridgeline.launch.slurm import state

    shutil.rmtree("runs/lr/003")
    monkeypatch.setattr(state, "job_states", answer)
    monkeypatch.setattr(on_disk.results, "__defaults__", (answer,))
    assert cli.run(["sweep", "sweep.yaml", "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "point",
        "optimizer.learning_rate",
        "model.num_heads",
        "state",
        "step",
        "of",
        "loss",
        "held",
        "loss",
        "tokens/s",
        "restarts",
    ]
    assert lines[1].split() == ["000", "0.001", "2", "finished", "20", "20", "4.0000", "5.0000", "100", "0"]
    assert lines[2].split() == ["001", "0.001", "4", "failed", "(70)", "7", "20", "3.0000", "4.0000", "100", "0"]
    assert lines[-1].endswith("runs/lr: 1 finished, 2 failed, 1 running")
    assert cli.run(["status", "runs/lr", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in shown] == ["finished", "failed", "running", "failed"]
    assert shown[0]["overrides"] == {"optimizer.learning_rate": 0.001, "model.num_heads": 2}


def test_a_dry_run_prints_the_array(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.yaml").write_text(GRID + "max_running: 2\n")
    assert cli.run(["sweep", "sweep.yaml", "-c", "local", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --array=0-3%2 " in shown
    assert f"#SBATCH --output={Path.cwd()}/runs/lr/%3a/slurm/job-%A_%a.log " in shown
    assert '-m ridgeline train "$JOB/points/$POINT.yaml"' in shown
    assert not Path("runs").exists()


def test_a_finding_of_one_point_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.yaml").write_text("name: s\nconfig: tiny.yaml\nlist:\n  - {}\n  - {mesh.fsdp: 2}\n")
    assert cli.run(["sweep", "sweep.yaml", "-c", "local", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("ridge: error: point 001: mesh.fsdp=2 does not match 1 devices")


def test_a_sweep_needs_a_cluster_to_be_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.yaml").write_text(GRID)
    assert cli.run(["sweep", "sweep.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ridge: error: --cluster is missing") and "--table" in error and error.count("\n") == 1
    assert cli.run(["sweep", "sweep.yaml", "--table"]) == 2
    assert "sweep.json" in capsys.readouterr().err


def test_a_point_that_was_stopped_did_not_fail(tmp_path: Path) -> None:
    sweep = swept()
    number, point = numbered(sweep)[0]
    trial = sweep_local._trial(sweep, "000", point_config(sweep, number, point))
    files = TrialFiles(sweep.directory, SWEEP)
    assert trial.finish(0) is None
    assert (trial.finish(exit_codes.PREEMPTED) or "").startswith("stopped")
    assert files.failure("000") is None
    assert trial.finish(exit_codes.NUMERICAL_FAILURE) == files.failure("000") == "too many non-finite steps"
    assert "name: lr-000" in trial.prepare().read_text()
    assert files.failure("000") is None, "it runs again"
