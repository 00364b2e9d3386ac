"""`ridge scale` and `ridge bench sweep`: real runs on this machine, interrupted and continued; and every way they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.commands.bench_sweep import chosen_values
from ridgeline.cli.main import run as ridge
from ridgeline.cli.options import parse_counts
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.launch.slurm.state import JobState
from ridgeline.launch.trials.failure import failure_reason
from ridgeline.launch.trials.local import check_devices_here, environment, processes_of
from ridgeline.launch.trials.scales import ScalingRequest, growing_axis, settings_of
from ridgeline.launch.trials.slurm import Site
from ridgeline.launch.trials.slurm import run_all as run_through_slurm
from ridgeline.launch.trials.study import Trials
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.jobs import JobRecord, record_job
from tests.explain.made_runs import made_run
from tests.xla_flags import QUICK_XLA

pytestmark = pytest.mark.xdist_group("scale")  # the study is made once
ROOT = Path(__file__).parents[2]
CONFIG = """\
name: tiny
model: {{vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}}
precision: {{compute: float32}}
data: {{train: [{{path: {corpus}}}], seq_len: 32, batch_size: 8}}
trainer: {{steps: 16, log_every: 16}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
runtime: {{platform: cpu}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scale")
    (place / "text.txt").write_text((ROOT / "cli" / "main.py").read_text())
    prepare(PrepareSettings((place / "text.txt",), place / "corpus", "bytes"), workers=1)
    file = place / "tiny.yaml"
    file.write_text(CONFIG.format(corpus=place / "corpus"))
    return file


@dataclass
class Study:
    """A study that was interrupted once and then finished."""

    output: Path
    interrupted_code: int
    interrupted_words: str
    kept: bytes
    """Event log of the run that was finished before the interruption, then."""
    words: str
    result: dict[str, Any]


def command(config: Path, output: Path) -> list[str]:
    scales = ["--devices", "1,2,3,4", "--per-process", "2", "-o", str(output), "--price", "3", "--json"]
    return [sys.executable, "-m", "ridgeline", "scale", str(config), *scales]


@pytest.fixture(scope="module")
def study(config: Path) -> Study:
    output = config.parent / "study"
    first = subprocess.Popen(command(config, output), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stderr is not None
    logged = []
    for line in first.stderr:
        logged.append(line)
        if "devices-2.1: starting" in line:
            first.send_signal(signal.SIGINT)
            break
    logged.append(first.communicate(timeout=300)[1])
    kept = (output / "runs/devices-1.1/events.jsonl").read_bytes()
    second = subprocess.run(command(config, output), cwd=ROOT, text=True, capture_output=True, timeout=500)
    assert second.returncode == 0, second.stderr
    return Study(output, first.returncode, "".join(logged), kept, second.stderr, json.loads(second.stdout))


def test_an_interrupted_study_keeps_what_is_finished_and_continues(study: Study) -> None:
    assert study.interrupted_code == 130, study.interrupted_words
    assert "interrupted: 1 of 3 runs are finished" in study.interrupted_words
    assert not (study.output / "failures").exists()
    assert "1 of 3 runs are finished" in study.words
    assert (study.output / "runs/devices-1.1/events.jsonl").read_bytes() == study.kept


def test_every_scale_is_a_row_and_one_that_cannot_run_has_its_reason(study: Study) -> None:
    rows = {row["devices"]: row for row in study.result["rows"]}
    assert list(rows) == [1, 2, 3, 4]
    assert rows[3]["failure"] == "--per-process 2 does not divide 3 devices"
    for devices in (1, 2, 4):
        row = rows[devices]
        assert row["tokens_per_s"] > 0
        assert 0 < row["compile_s"] < row["time_s"]
        assert row["usd"] == pytest.approx(devices * row["time_s"] / 3600 * 3)
        assert row["steps"] == 16
        assert row["warmup_steps"] == 2  # enough log lines were asked for
    assert rows[4]["mesh"] == "fsdp=4"
    starts = json.loads((study.output / "runs/devices-4.1/run.json").read_text())["starts"]
    assert [start["processes"] for start in starts] == [2]
    assert study.result["law"] is not None
    assert study.result["next"]["devices"] == 8
    assert set(study.result["stop"]) == {"time", "cost", "efficiency"}
    assert "all devices are virtual and share" in " ".join(study.result["verdict"])


def test_the_files_tell_the_same_and_a_finished_study_runs_nothing(study: Study, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = json.loads((study.output / "study.json").read_text())
    assert stored == study.result
    assert {path.name for path in study.output.glob("*.svg")} == {"throughput.svg", "efficiency.svg", "time.svg", "cost.svg"}
    assert "| 3 |" in (study.output / "study.md").read_text()
    assert ridge(command(config, study.output)[3:]) == 0
    shown = capsys.readouterr()
    assert "3 of 3 runs are finished" in shown.err
    assert "starting" not in shown.err
    assert json.loads(shown.out)["rows"] == study.result["rows"]


def test_a_study_keeps_the_scales_it_has(study: Study, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = (study.output / "study.json").read_bytes()
    some = [argument if argument != "1,2,3,4" else "2" for argument in command(config, study.output)[3:]]
    assert ridge(some) == 0
    assert [row["devices"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 2, 4]
    (study.output / "study.json").write_bytes(stored)


def test_finished_runs_give_the_same_figures(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(study.output / f"runs/devices-{devices}.1") for devices in (4, 1, 2)]
    assert ridge(["scale", "--from", *runs, "--price", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    same = [row for row in study.result["rows"] if row["failure"] is None]
    for one, other in zip(found["rows"], same, strict=True):
        assert {k: v for k, v in one.items() if k not in ("runs",)} == {k: v for k, v in other.items() if k not in ("runs",)}
    assert found["law"] == study.result["law"]


def test_diagnosis_and_report_read_the_directory(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert ridge(["diagnose", str(study.output)]) == 0
    assert "3 runs" in capsys.readouterr().out
    assert ridge(["report", str(study.output)]) == 0
    page = (study.output / "report.html").read_text()
    assert "<h2>Strong scaling</h2>" in page
    assert "does not divide 3 devices" in page


def test_another_config_is_refused_in_a_directory_that_has_one(study: Study, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changed in ("optimizer.learning_rate=1e-2", "data.seq_len=16"):
        assert ridge([*command(config, study.output)[3:], changed]) == 2
        assert f"with another config ({changed.split('=')[0]}): choose another --output" in capsys.readouterr().err
    assert ridge(["scale", str(config), "--devices", "8", "-o", str(study.output), "optimizer.learning_rate=1e-2"]) == 2
    assert "holds devices-1.1 with another config (optimizer.learning_rate)" in capsys.readouterr().err


def test_runs_that_differ_in_more_than_their_scale_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made_run(tmp_path / "a"), made_run(tmp_path / "b", devices=2, overrides=["optimizer.learning_rate=1e-3"])]
    assert ridge(["scale", "--from", *map(str, runs)]) == 2
    assert "differ in more than their scale: optimizer.learning_rate" in capsys.readouterr().err
    weak = made_run(tmp_path / "c", devices=2, overrides=["data.batch_size=32"])
    assert ridge(["scale", "--from", str(runs[0]), str(weak)]) == 2
    assert "data.batch_size (not proportional" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart"], "--devices 1,2,4"),
        (["quickstart", "--nodes", "1,2"], "--nodes needs --cluster"),
        (["quickstart", "--devices", "1,two"], "--devices 1,two: "),
        (["quickstart", "--devices", "2,2"], "--devices 2,2: "),
        (["quickstart", "--devices", "1,3", "-c", "dgx-h100"], "--devices 1: "),
        (["quickstart", "--devices", "1,2", "--axis", "data"], "--axis data: mesh.fsdp=-1"),
        (["--from", "nothing", "--devices", "1"], "--devices cannot be used with --from"),
        (["--from", "nothing"], "nothing is not a run directory"),
        (["quickstart", "--devices", "3,5"], "no scale of this study ran: 3 devices: override 'mesh.fsdp=3'"),
    ],
)
def test_what_cannot_be_a_study_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ridge(["scale", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("ridge: error:") == 1


def test_one_axis_grows_and_in_weak_scaling_the_batch_with_it() -> None:
    strong = settings_of(ScalingRequest("quickstart", ("mesh.tensor=1",), [1, 2, 4]), per_process=lambda devices: devices)
    assert [(s.config.mesh.fsdp, s.config.runtime.cpu_devices, s.config.data.batch_size) for s in strong if s.config] == [
        (1, 1, 8),
        (2, 2, 8),
        (4, 4, 8),
    ]
    weak = settings_of(ScalingRequest("quickstart", ("mesh.fsdp=1", "mesh.data=2"), [2, 4], weak=True))
    assert [(s.config.mesh.data, s.config.data.batch_size) for s in weak if s.config] == [(2, 8), (4, 16)]
    shared = settings_of(ScalingRequest("quickstart", ("mesh.data=2",), [2, 4, 3]))
    assert [s.config.mesh.fsdp for s in shared[:2] if s.config] == [1, 2]
    assert "3 devices" in (shared[2].refusal or "") and "(2 devices)" in (shared[2].refusal or "")
    assert growing_axis(ScalingRequest("quickstart", (), [1]).base, None) == "fsdp"
    assert parse_counts("--nodes", "4, 1,2", distinct=True) == [1, 2, 4]


def test_settings_that_differ_in_more_than_what_is_varied_are_refused(tmp_path: Path) -> None:
    settings = settings_of(ScalingRequest("quickstart", (), [1, 2], weak=True))
    with pytest.raises(UserError, match=r"differ in data\.batch_size.*vary only mesh\."):
        Trials(tmp_path, settings, 1, ("mesh.",))


def test_trials_of_virtual_devices_get_as_many_as_they_ask_for() -> None:
    env = environment({"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2"}, 4, cpu=True)
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    assert env["JAX_PLATFORMS"] == "cpu"
    assert environment({"CUDA_VISIBLE_DEVICES": "3,5,7"}, 2, cpu=False)["CUDA_VISIBLE_DEVICES"] == "3,5"
    with pytest.raises(UserError, match="10000 devices: "):
        check_devices_here(10_000)
    assert [processes_of(4, per) for per in (None, 1, 2, 4, 8)] == [1, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        ("step 1\nXlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nat exit", 1, "out of memory: XlaRuntimeError"),
        ("Traceback\nValueError: one\n0: ridge: stopped: loss is not finite\n", 70, "loss is not finite"),
        ("Traceback\n  File\nValueError: a thing\n", 1, "ValueError: a thing"),
        ("nothing to say\n", 71, "hang: "),
        ("", -9, "killed by signal 9"),
        ("", 3, "exit code 3"),
    ],
)
def test_the_reason_of_a_failure_is_found_at_the_end_of_its_log(tmp_path: Path, log: str, code: int, words: str) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert failure_reason(file, code).startswith(words)
    assert failure_reason(tmp_path / "none", 71).startswith("hang: ")


# --- Slurm, without one: what came of jobs that were submitted before ---------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "log", "reason"),
    [
        ("TIMEOUT", "", "time limit"),
        ("FAILED", "0: ridge: stopped: 9 non-finite steps in a row\n", "9 non-finite steps in a row"),
        ("COMPLETED", "", "is not a run directory"),
        ("CANCELLED", "", None),
    ],
)
def test_jobs_are_waited_for_and_their_end_is_the_reason(tmp_path: Path, ends: str, log: str, reason: str | None) -> None:
    trials = Trials(tmp_path, settings_of(ScalingRequest("quickstart", (), [1]), nodes={1: 1}), 1, ("mesh.",))
    (trial,) = trials.trials
    record = JobRecord("17", "2026-11-21", "train", "local", None, 1)
    record_job(trial.config.directory, record)
    (trial.config.directory / "slurm/job-17.log").write_text(log)
    states = iter(["PENDING", "RUNNING", "RUNNING", ends, ends, ends])
    logged: list[str] = []
    site = Site(load_cluster("local").config, None, preflight=False, at_once=None)
    run_through_slurm(
        trials, site, logged.append, query=lambda job, cluster: [JobState(job, next(states), exit_code=0)], sleep=lambda seconds: None
    )
    assert "1 more" in logged[0]
    assert [trial.name for trial in trials.to_do()] == ([] if reason else [trial.name])
    assert (trials.failure(trial) or "").find(reason or "") >= 0
    assert (reason is None) == (trials.failure(trial) is None)


# --- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_sweep_runs_each_value_and_keeps_a_failure_until_it_is_to_be_tried_again(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary smaller than the tokenizer's fails in the run itself, one that no mesh divides before it."""
    monkeypatch.setitem(os.environ, "XLA_FLAGS", QUICK_XLA)
    output = config.parent / "sweep"
    arguments = ["bench", "sweep", str(config), "--set", "model.vocab_size=100,258,0", "-o", str(output), "--json"]
    assert ridge(arguments) == 0
    shown = capsys.readouterr()
    rows = {row["value"]: row for row in json.loads(shown.out)["rows"]}
    assert "vocabulary" in rows[100]["failure"] or "vocab" in rows[100]["failure"]
    assert "vocab_size" in rows[0]["failure"]
    assert rows[258]["tokens_per_s"] > 0
    assert rows[258]["peak_bytes"] > 0
    assert "vocab_size-100.1: failed after" in shown.err
    assert ridge(arguments) == 0
    assert "2 of 2 runs" in capsys.readouterr().err
    assert ridge([*arguments, "--retry"]) == 0
    again = capsys.readouterr()
    assert "vocab_size-100.1: starting" in again.err and "vocab_size-258.1: starting" not in again.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of --batch, --remat, --set (got none)"),
        (["--batch", "1,2", "--remat", "none"], "(got --batch, --remat)"),
        (["--set", "compute.loss_chunk"], "--set compute.loss_chunk: "),
        (["--batch", "8,8"], "--batch 8,8: "),
        (["--set", "compute.loss_chunks=1,2"], "loss_chunk"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ridge(["bench", "sweep", "quickstart", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_sweep_names_one_key_and_its_values() -> None:
    assert chosen_values("4, 8", None, None) == ("data.batch_size", ["4", "8"])
    assert chosen_values(None, "none,full", None) == ("compute.remat.policy", ["none", "full"])
    assert chosen_values(None, None, "compute.loss_chunk=256,512") == ("compute.loss_chunk", ["256", "512"])
