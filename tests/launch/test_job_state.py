"""State of a job: Slurm's output parsed, files of the run read, logs followed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.commands.status import describe_progress
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch.slurm import logs, state
from ridgeline.launch.slurm.state import FORGOTTEN, JobState, expand_indices, job_states, parse_scontrol
from ridgeline.rundir import jobs as places
from ridgeline.rundir.jobs import JobRecord, record_job
from ridgeline.rundir.progress import run_progress

RUNNING = (
    "JobId=7 JobName=a b UserId=me(1) Priority=1 JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 ExitCode=0:0 "
    "RunTime=1-02:03:04 TimeLimit=2-00:00:00 TimeMin=N/A ReqNodeList=(null) ExcNodeList=node02 NodeList=node[01,03] NumNodes=2 "
)


def replaced(**fields: str) -> str:
    line = RUNNING
    for name, value in fields.items():
        before = next(word for word in RUNNING.split() if word.startswith(f"{name}="))
        line = line.replace(f" {before} ", f" {name}={value} ")
    return line


def test_a_running_job_is_described() -> None:
    (found,) = parse_scontrol(RUNNING)
    assert (found.job, found.state, found.reason, found.nodes, found.restarts) == ("7", "RUNNING", None, "node[01,03]", 2)
    assert (found.elapsed_s, found.limit_s, found.exit_code, found.ended) == (93784, 172800, None, False)


@pytest.mark.parametrize(
    ("fields", "state", "code", "ended"),
    [
        ({"JobState": "COMPLETED"}, "COMPLETED", 0, True),
        ({"JobState": "FAILED", "ExitCode": "70:0", "Reason": "NonZeroExitCode"}, "FAILED", 70, True),
        ({"JobState": "CANCELLED", "ExitCode": "0:15"}, "CANCELLED", 143, True),
        (
            {"JobState": "PENDING", "Reason": "Resources", "RunTime": "00:00:00", "TimeLimit": "UNLIMITED", "NodeList": "(null)"},
            "PENDING",
            None,
            False,
        ),
        ({"JobState": "COMPLETING"}, "COMPLETING", None, False),
        ({"JobState": "NODE_FAIL"}, "NODE_FAIL", 0, True),
    ],
)
def test_states_and_exit_codes(fields: dict[str, str], state: str, code: int | None, ended: bool) -> None:
    (found,) = parse_scontrol(replaced(**fields))
    assert (found.state, found.exit_code, found.ended) == (state, code, ended)


def test_array_tasks_that_wait_together_are_separate_states() -> None:
    line = RUNNING.replace("JobId=7 ", "JobId=7 ArrayJobId=5 ArrayTaskId=2-4,8%3 ")
    states = parse_scontrol(line)
    assert [(state.job, state.task) for state in states] == [("5_2", 2), ("5_3", 3), ("5_4", 4), ("5_8", 8)]


@pytest.mark.parametrize(("text", "indices"), [("3", [3]), ("0-3", [0, 1, 2, 3]), ("1,5-9:2", [1, 5, 7, 9]), ("0-2%1", [0, 1, 2])])
def test_array_indices(text: str, indices: list[int]) -> None:
    assert expand_indices(text) == indices


def slurm(scontrol: tuple[int, str, str], sacct: tuple[int, str] = (1, "")) -> tuple[list[list[str]], object]:
    """Answer as these programs would; note the commands."""
    commands: list[list[str]] = []

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        if command[0] == "scontrol":
            return subprocess.CompletedProcess(command, *scontrol)
        return subprocess.CompletedProcess(command, sacct[0], sacct[1], "")

    return commands, run


def test_a_job_the_controller_no_longer_lists_is_read_from_the_accounting() -> None:
    commands, run = slurm((1, "", "slurm_load_jobs error: Invalid job id specified"), (0, "7|CANCELLED by 0|0:15|node[01-02]|01:00:00\n"))
    (state,) = job_states("7", "site", run)  # type: ignore[arg-type]
    assert (state.state, state.exit_code, state.nodes, state.elapsed_s) == ("CANCELLED", 143, "node[01-02]", 3600)
    assert commands[0] == ["scontrol", "--clusters=site", "show", "job", "--oneliner", "7"]
    assert commands[1][:2] == ["sacct", "--clusters=site"]


def test_without_accounting_a_forgotten_job_is_called_so() -> None:
    _, run = slurm((1, "", "slurm_load_jobs error: Invalid job id specified"), (1, ""))
    (state,) = job_states("7", None, run)  # type: ignore[arg-type]
    assert state.state == FORGOTTEN
    assert state.ended


def test_a_controller_that_does_not_answer_is_no_forgotten_job() -> None:
    _, run = slurm((1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"))
    with pytest.raises(UserError, match=r"^scontrol .*job 7.*: slurm_load_jobs error: Unable to contact"):
        job_states("7", None, run)  # type: ignore[arg-type]


def test_status_of_a_job_slurm_no_longer_lists_comes_from_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path, event(1, "step", 3.0, step=100, **STEP))
    record_job(tmp_path, record("7"))
    ends = [(7, 0, 75), (7, 1, 0), (8, 0, 70)]
    attempts = [{"job": job, "restart": n, "begin": i, "end": i, "exit_code": code} for i, (job, n, code) in enumerate(ends)]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    monkeypatch.setattr(state, "job_states", lambda job, slurm_cluster: [JobState(job, FORGOTTEN)])
    assert cli.run(["status", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(job["job"], job["state"], job["exit_code"]) for job in shown["jobs"]] == [("7", FORGOTTEN, 0)]
    assert (shown["progress"]["step"], shown["progress"]["starts"]) == (100, 2)
    assert cli.run(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("step 100/100, loss 2.5000, 1k tokens/s, start 2: finished\n")


def event(restart: int, kind: str, time_s: float, **fields: object) -> str:
    return json.dumps({"time": time_s, "mono": time_s, "run": "r", "process": 0, "restart": restart, "kind": kind, **fields}) + "\n"


def run_with(directory: Path, *lines: str, steps: int = 100) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(to_yaml(load("quickstart", [f"trainer.steps={steps}"]).config))
    (directory / "events.jsonl").write_text("".join(lines))
    return directory


STEP = {"loss": 2.5, "tokens_per_s": 1000.0, "step_time_mean_s": 2.0}


def test_progress_of_a_run_that_was_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    lines = [event(0, "step", 1.0, step=10, **STEP), event(1, "open", 2.0), event(1, "step", 3.0, step=40, **STEP), '{"time": 4.0, "mo']
    progress = run_progress(run_with(tmp_path, *lines))
    assert (progress.step, progress.steps, progress.starts, progress.finished) == (40, 100, 2, False)
    assert progress.eta_s == 120.0
    assert describe_progress(progress, 13.0) == "step 40/100, loss 2.5000, 1k tokens/s, eta 2m00s, start 2 (last log line 10s ago)"


def test_progress_before_the_first_step_and_before_the_first_start(tmp_path: Path) -> None:
    assert describe_progress(run_progress(tmp_path), 0.0) == "training has not started"
    progress = run_progress(run_with(tmp_path, event(0, "open", 5.0)))
    assert describe_progress(progress, 6.0) == "no step yet (last log line 1s ago)"


def test_progress_of_a_finished_run_and_of_a_long_log(tmp_path: Path) -> None:
    many = [event(0, "step", float(step), step=step, **STEP) for step in range(1, 10001)]
    progress = run_progress(run_with(tmp_path, *many, steps=10000))
    assert progress.finished
    assert describe_progress(progress, 1e9).endswith(": finished")


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    run = run_with(tmp_path, "not json\n")
    with pytest.raises(UserError, match=r"events.jsonl: unreadable line in an append-only log"):
        run_progress(run)


def record(job: str, **details: object) -> JobRecord:
    return JobRecord(job, "2026-11-21T07:00:00+00:00", "train", "local", None, 1, details)


def test_jobs_are_recorded_in_order_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    for job in ("1", "2"):
        record_job(tmp_path, record(job, nodes=2))
    with (tmp_path / "slurm/jobs.jsonl").open("a") as stream:
        stream.write('{"job": "3", ')
    assert [(r.job, r.details) for r in places.read_jobs(tmp_path)] == [("1", {"nodes": 2}), ("2", {"nodes": 2})]
    record_job(tmp_path, record("4"))
    assert [r.job for r in places.read_jobs(tmp_path)] == ["1", "2", "4"]
    (tmp_path / "slurm/jobs.jsonl").write_text('{"jbo": "1"}\n')
    with pytest.raises(UserError, match=r"jobs.jsonl:1: job is missing"):
        places.read_jobs(tmp_path)


LOG = "job 2 restart 0\n 0: step 1\n11: lost a peer\n 1: ready\n 0: step 2: loss 3\nno label\n"


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    for job in ("1", "2"):
        record_job(tmp_path, record(job))
    (tmp_path / "slurm/job-1.log").write_text("first\n")
    (tmp_path / "slurm/job-2.log").write_text(LOG)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], LOG),
        (["--job", "1"], "first\n"),
        (["--rank", "0"], "step 1\nstep 2: loss 3\n"),
        (["--rank", "11"], "lost a peer\n"),
        (["--rank", "0", "-n", "1"], "step 2: loss 3\n"),
        (["-n", "2"], " 0: step 2: loss 3\nno label\n"),
    ],
)
def test_logs_of_a_job_and_of_a_rank(logged: Path, options: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["logs", str(logged), *options]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--job", "9"], "job 9 was not submitted from "), (["-f", "-n", "3"], "--lines and --follow")],
)
def test_logs_that_cannot_be_shown(logged: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["logs", str(logged), *options]) == 2
    assert capsys.readouterr().err.startswith(f"ridge: error: {message}")


def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    """The job appears, writes half lines, ends; each of its moments is one look at the clock, and nothing sleeps."""
    path = tmp_path / "job.log"
    writes = iter(["", "one\ntw", "o\n", "three", "\nlast without newline"])
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 3.0
        if (text := next(writes, None)) is not None:
            with path.open("a") as stream:
                stream.write(text)

    ended = lambda: now >= 21.0  # noqa: E731
    assert list(logs.follow(path, ended, clock=lambda: now, sleep=sleep)) == ["one\n", "two\n", "three\n", "last without newline"]
