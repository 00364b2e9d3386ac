"""Runs and sweeps without Slurm: whether they run, `ridge runs`, `status`, `logs`, `cancel` and `sweep --local`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ridgeline.cli import main as cli
from ridgeline.launch.slurm.state import JobState
from ridgeline.launch.trials.engine import SWEEP as SWEEP_LAYOUT
from ridgeline.launch.trials.engine import TrialFiles
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir import lease
from ridgeline.rundir.files import write_record
from ridgeline.rundir.lease import Holder, live_holder, this_process
from ridgeline.rundir.liveness import runs_below
from ridgeline.rundir.progress import run_progress
from tests.launch.test_job_state import STEP, event, run_with

HERE = socket.gethostname()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def holder(pid: int, **fields: Any) -> Holder:
    return this_process(30.0).model_copy(update={"pid": pid, "started": lease._process_started(pid), **fields})


def claim(directory: Path, by: Holder, beat: str = "7") -> None:
    held = directory / "lease/00000002"
    held.mkdir(parents=True)
    write_record(held / "holder.json", by)
    (held / "beat").write_text(beat)


def test_a_run_lives_while_its_process_does_or_elsewhere_while_it_beats(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    me = holder(sleeper.pid)
    for name, by, beat in (
        ("here", me, "7"),
        ("released", me, lease.RELEASED),
        ("reused", holder(sleeper.pid, started="1"), "7"),
        ("elsewhere", holder(1, machine="other"), "7"),
        ("silent", holder(1, machine="other"), "7"),
    ):
        claim(tmp_path / name, by, beat)
    os.utime(tmp_path / "silent/lease/00000002/beat", (0, time.time() - 61))
    assert live_holder(tmp_path / "here") == me
    assert live_holder(tmp_path / "elsewhere") is not None
    assert [live_holder(tmp_path / name) for name in ("released", "reused", "silent", "none")] == [None] * 4
    sleeper.kill()
    sleeper.wait()
    assert live_holder(tmp_path / "here") is None


def made_run(directory: Path, step: int, by: Holder | None = None, loss: float = 2.5) -> None:
    run_with(directory, event(0, "step", time.time(), step=step, **{**STEP, "loss": loss}))
    start = {"devices": {"count": 1}, "host": HERE, "pid": 1, "time": "2026-11-22T10:00:00+00:00"}
    (directory / "run.json").write_text(json.dumps({"format": 1, "name": "q", "id": "i", "starts": [start]}))
    if by is not None:
        claim(directory, by)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]) -> Path:
    """Runs of all kinds: alone, in a sweep, in a study, damaged; and what is no run."""
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs/live", 40, holder(sleeper.pid), loss=1.0)
    made_run(tmp_path / "runs/done", 100, loss=3.0)
    made_run(tmp_path / "runs/lr/001", 30, holder(sleeper.pid, started="1"))
    made_run(tmp_path / "runs/study/runs/devices-2.1", 50, holder(1, machine="other", host="elsewhere"))
    (tmp_path / "runs/live/checkpoints/step_1").mkdir(parents=True)
    made_run(tmp_path / "runs/broken", 1)
    (tmp_path / "runs/broken/run.json").write_text("{")
    (tmp_path / "runs/notes").mkdir()
    return tmp_path


def test_runs_lists_every_run_with_its_state(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["runs", "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "runs/broken": "damaged",
        "runs/done": "finished",
        "runs/live": "running",
        "runs/lr/001": "stopped",
        "runs/study/runs/devices-2.1": "running",
    }
    live = rows["runs/live"]
    assert (live["step"], live["steps"], live["loss"], live["tokens_per_s"]) == (40, 100, 1.0, 1000.0)
    assert 0 <= live["age_s"] < 60
    assert "run.json is damaged" in rows["runs/broken"]["problem"]
    assert cli.run(["runs", "runs", "--sort", "loss", "--reverse"]) == 0
    shown = capsys.readouterr()
    order = [line.split()[0] for line in shown.out.splitlines()]
    assert order[:2] == ["run", "runs/done"]
    assert order[-2:] == ["runs/live", "runs/broken"], "no loss comes last"
    assert "runs/broken/run.json is damaged" in shown.err


def test_runs_of_an_empty_and_a_missing_directory(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["runs", "runs/notes"]) == 0
    assert capsys.readouterr().out == "no runs below runs/notes\n"
    assert cli.run(["runs", "none"]) == 2
    assert capsys.readouterr().err == "ridge: error: none is not a directory\n"
    assert [listed.path for listed in runs_below(Path("runs/done"))] == [Path("runs/done")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["logs", "runs/done"], "runs/done has no train.log"),
        (["logs", "runs/done", "--rank", "1"], "--rank 1: runs/done/train.log has the lines of process 0"),
        (["logs", "runs/done", "--job", "3"], "--job 3: no job was submitted from runs/done"),
        (
            ["cancel", "runs/study/runs/devices-2.1"],
            "runs/study/runs/devices-2.1 is in use by process 1 on elsewhere: run `ridge",
        ),
        (["status", "runs/notes"], "no job was submitted from runs/notes"),
    ],
)
def test_what_a_local_run_cannot_do_is_one_line(many: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err.startswith(f"ridge: error: {error}")


def test_cancelling_what_does_not_run_and_killing_what_does(many: Path, sleeper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cancel", "runs/done"]) == 0
    assert capsys.readouterr().out.startswith("runs/done has no running process")
    assert cli.run(["cancel", "runs/live", "--now", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["processes"] == [sleeper.pid]
    assert sleeper.wait() == -9


SWEEP = """\
name: seeds
config: tiny.yaml
list:
  - {seed: 1}
  - {optimizer.learning_rate: 1.0e+12, optimizer.weight_decay: 1.0e+12, optimizer.clip_norm: null}
"""
TINY = """\
name: tiny
model: {vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}
data: {train: [{path: corpus}], seq_len: 32, batch_size: 8}
trainer: {steps: STEPS, log_every: 1, max_bad_steps: 2}
schedule: {kind: constant}
checkpoint: {every: 1000}
logging: {tensorboard: false}
"""


def test_a_sweep_trains_here_and_its_runs_are_shown_followed_and_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real points, of which one fails; then more steps for the first, cancelled while it trains."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for source in (ROOT / "cli").glob("*.py"):
        Path("texts", f"{source.stem}.txt").write_text(source.read_text()[:1500])
    prepare(PrepareSettings((Path("texts"),), Path("corpus"), "bytes", shards=2), workers=1)
    Path("sweep.yaml").write_text(SWEEP)
    Path("tiny.yaml").write_text(TINY.replace("STEPS", "6"))

    assert cli.run(["sweep", "sweep.yaml", "--local", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("000: seed=1\n001: ")
    assert not Path("runs").exists()
    assert cli.run(["sweep", "sweep.yaml", "--local", "--json"]) == 1, "one point failed"
    shown = capsys.readouterr()
    first, second = json.loads(shown.out)
    assert (first["state"], first["step"], second["state"]) == ("finished", 6, "failed"), shown.err
    assert "2 non-finite steps in a row" in second["problem"]
    assert "[2/2] 001: failed after" in shown.err
    assert cli.run(["status", "runs/seeds"]) == 0
    assert "001: 2 non-finite steps in a row" in capsys.readouterr().out

    Path("tiny.yaml").write_text(TINY.replace("STEPS", "1000000"))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sweep = subprocess.Popen([sys.executable, "-m", "ridgeline", "sweep", "sweep.yaml", "--local"], env=env, stderr=subprocess.PIPE)
    point = Path("runs/seeds/000")
    deadline_s = time.monotonic() + 120
    while (run_progress(point).step or 0) <= 6:
        assert sweep.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.1)
    assert cli.run(["runs", "--json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["running", "stopped"]
    assert cli.run(["status", str(point)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"running  {HERE}  ")
    assert cli.run(["sweep", "sweep.yaml", "--local"]) == 2
    assert "runs/seeds is in use" in capsys.readouterr().err
    follower = subprocess.Popen([sys.executable, "-m", "ridgeline", "logs", "-f", str(point)], env=env, stdout=subprocess.PIPE, text=True)

    assert cli.run(["cancel", "runs/seeds"]) == 0
    assert "waiting for it to save" in capsys.readouterr().out
    assert sweep.wait(30) != 0
    followed = follower.communicate(timeout=60)[0].splitlines()
    assert followed[-1].endswith("by SIGTERM")
    saved = [int(path.name.partition("_")[2]) for path in (point / "checkpoints").glob("step_*")]
    assert followed[-1].split()[-3] == str(max(saved))
    assert cli.run(["status", str(point), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["jobs"], status["process"]["state"], status["progress"]["step"]) == ([], "stopped", max(saved))
    assert cli.run(["logs", str(point), "--lines", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == followed[-1:]


def test_a_point_that_trains_here_is_running_although_its_job_failed(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    files = TrialFiles(tmp_path, SWEEP_LAYOUT)
    made_run(tmp_path / "000", 40, holder(sleeper.pid))
    made_run(tmp_path / "001", 40)
    files.record_failure("001", "out of memory")
    failed, pending = JobState("5_0", "FAILED", exit_code=70), JobState("5_0", "PENDING")
    cases = [("000", failed), ("000", None), ("001", failed), ("001", None), ("001", pending), ("002", None)]
    states = [(status.state, status.busy, status.problem) for status in (files.status(name, job) for name, job in cases)]
    assert states == [
        ("running", True, None),
        ("running", True, None),
        ("failed", False, None),
        ("failed", False, "out of memory"),
        ("pending", True, None),
        ("not submitted", False, None),
    ]


def test_a_run_reads_no_event_log_at_its_end_that_would_hold_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ridgeline.cli.commands import train
    from ridgeline.rundir.events import EventLog, event_file
    from ridgeline.trainer.loop import Outcome

    for process in range(2):
        log = EventLog(event_file(tmp_path, process), process, run="run")
        with log.phase("train"):
            log.emit("step", step=1, loss=2.0)
        log.close()
    outcome = cast(Outcome, SimpleNamespace(finished=True))
    size = event_file(tmp_path, 0).stat().st_size
    for limit, summary, diagnosis in ((2 * size + 99, True, True), (size, True, False), (size - 1, False, False)):
        monkeypatch.setattr(train, "SUMMARY_LOG_BYTES", limit)
        train.report_end(tmp_path, outcome)
        said = capsys.readouterr().out
        assert ("where the time went" in said, "diagnosis: " in said) == (summary, diagnosis)
        assert ("MB of event logs are not read while the run holds its nodes: ridge goodput" in said) == (not diagnosis)
