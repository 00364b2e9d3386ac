"""Pending jobs: which Slurm holds, which never start, which only wait, and what a person is told.

pending_jobs.txt has the lines of `scontrol show job --oneliner` of a real Slurm 22.05 for jobs that were held, blocked and queued.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.commands.status import describe_waits
from ridgeline.configs.errors import UserError
from ridgeline.launch.slurm import logs, pending, state
from ridgeline.launch.slurm.state import JobState, job_states, parse_scontrol
from ridgeline.launch.slurm.submit import refuse_second_job
from ridgeline.launch.trials.engine import SWEEP, TrialFiles
from ridgeline.rundir.jobs import JobRecord, record_job

LINES = Path(__file__).with_name("pending_jobs.txt").read_text().splitlines()
RELEASE = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "launch_failed_requeued_held", "job_requeued_in_held_state")
EXPECTED = dict.fromkeys(RELEASE, "held") | {
    "Resources": "queued",
    "Priority": "queued",
    "Dependency": "queued",
    "BeginTime": "queued",
    "ReqNodeNotAvail,_UnavailableNodes:node02": "queued",
    "None": "queued",
    "DependencyNeverSatisfied": "blocked",
    "PartitionTimeLimit": "blocked",
    "PartitionConfig": "blocked",
}


def test_lines_of_a_real_slurm_are_told_apart() -> None:
    seen = set()
    for line in LINES:
        reason = re.search(r" Reason=(\S+)", line)
        assert reason is not None
        seen.add(reason[1])
        for found in parse_scontrol(line):
            assert found.waiting == EXPECTED[reason[1]], line
            assert found.nodes is None
            assert found.exit_code is None
            if found.waiting == "held":
                assert f"`scontrol release {found.job}`" in str(found.advice)
            assert (found.advice is None) == (found.waiting == "queued" and not reason[1].startswith("ReqNode")), line
    assert seen == set(EXPECTED)


def test_each_task_of_a_held_array_is_held() -> None:
    (line,) = [line for line in LINES if "ArrayTaskId=" in line]
    assert [(task.job, task.waiting) for task in parse_scontrol(line)] == [(f"13_{index}", "held") for index in range(4)]


@pytest.mark.parametrize(
    ("name", "reason", "priority", "kind"),
    [
        ("RUNNING", None, 0, None),
        ("COMPLETED", None, 0, None),
        ("CONFIGURING", None, 1, None),
        ("COMPLETING", "JobHeldUser", 0, None),
        ("REQUEUE_HOLD", "JobHoldMaxRequeue", 0, "held"),
        ("REQUEUE_HOLD", None, 1, "held"),
        ("SPECIAL_EXIT", "JobHeldUser", 0, "held"),
        ("REQUEUED", "BeginTime", 1, "queued"),
        # released, and not yet looked at by the scheduler: the old reason is still there
        ("PENDING", "JobHeldUser", 5, "queued"),
        # the manual's reasons that are not in this Slurm's reach
        ("PENDING", "BadConstraints", 0, "blocked"),
        ("PENDING", "InvalidQOS", 1, "blocked"),
        ("PENDING", "AccountNotAllowed", 1, "blocked"),
        ("PENDING", "PartitionNodeLimit", 1, "blocked"),
        ("PENDING", "QOSMaxWallDurationPerJobLimit", 1, "blocked"),
        ("PENDING", "AssocMaxNodePerJobLimit", 1, "blocked"),
        ("PENDING", "QOSMaxGRESPerJob", 1, "blocked"),
        ("PENDING", "QOSMaxGRESPerNode", 1, "blocked"),
        ("PENDING", "QOSMinGRES", 1, "blocked"),
        ("PENDING", "MaxMemPerLimit", 1, "blocked"),
        ("PENDING", "ReservationDeleted", 0, "held"),
        ("PENDING", "QOSMaxJobsPerUserLimit", 1, "queued"),
        ("PENDING", "QOSMaxNodePerUserLimit", 1, "queued"),
        ("PENDING", "QOSGrpNodeLimit", 1, "queued"),
        ("PENDING", "AssocGrpGRESMinutes", 1, "queued"),
        ("PENDING", "AssocGrpGRESRunMinutes", 1, "queued"),
        ("PENDING", "PartitionDown", 1, "queued"),
        ("PENDING", "JobArrayTaskLimit", 1, "queued"),
        ("PENDING", "A_reason_of_a_later_Slurm", 1, "queued"),
        ("PENDING", None, 1, "queued"),
    ],
)
def test_kinds_of_waits(name: str, reason: str | None, priority: int, kind: str | None) -> None:
    assert pending.waiting(name, reason, priority) == kind


@pytest.mark.parametrize(
    ("kind", "reason", "told"),
    [
        ("held", "JobHeldUser", "held: by its user; `scontrol release 7` releases it"),
        ("held", "JobHeldAdmin", "held: by an administrator, who has to release it; `scontrol release 7` releases it"),
        (
            "held",
            "JobHoldMaxRequeue",
            "held: its batch script was lost with its node too often, and an administrator has to release it; "
            "`scontrol release 7` releases it",
        ),
        (
            "held",
            "launch_failed_requeued_held",
            "held: a node failed to start it: `scontrol show node` names drained ones; `scontrol release 7` releases it",
        ),
        ("held", None, "held: it does not start by itself; `scontrol release 7` releases it"),
        (
            "blocked",
            "DependencyNeverSatisfied",
            "never starts: a job that it depends on failed or was cancelled: `scontrol update JobId=7 Dependency=` drops it",
        ),
        ("queued", "QOSMaxJobsPerUserLimit", "waits for other jobs of its user or account; a job larger than the limit never starts"),
        ("queued", "AssocGrpCPUMinutesLimit", "the budget of device time of its account or QOS is used up"),
        ("queued", "AssocGrpCPURunMinutesLimit", None),
        (
            "queued",
            "ReqNodeNotAvail,_May_be_reserved_for_other_job",
            "a node that it needs is down, drained or reserved: `scontrol show node`",
        ),
        ("queued", "Resources", None),
        (None, "JobHeldUser", None),
    ],
)
def test_what_a_person_is_told(kind: str | None, reason: str | None, told: str | None) -> None:
    assert pending.advice("7", kind, reason) == told
    if told is not None:
        assert pending.advice("7", kind, reason, "site") == told.replace("`scontrol", "`scontrol --clusters=site")


def test_each_blocking_reason_has_advice() -> None:
    for reason in (
        "BadConstraints",
        "PartitionConfig",
        "InvalidAccount",
        "QOSNotAllowed",
        "QOSMinCpuNotSatisfied",
        "AssocMaxWallDurationPerJobLimit",
    ):
        assert pending.waiting("PENDING", reason, 1) == "blocked"
        assert str(pending.advice("7", "blocked", reason)).startswith("never starts: ")


def line_of(reason: str) -> str:
    return next(line for line in LINES if f" Reason={reason} " in line)


def answering(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Have scontrol print these lines, one per query; the last one again and again."""
    left = list(lines)

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert command[0] == "scontrol"
        return subprocess.CompletedProcess(command, 0, f"{left.pop(0) if len(left) > 1 else left[0]}\n", "")

    monkeypatch.setattr(state, "job_states", lambda job, slurm_cluster=None: job_states(job, slurm_cluster, run))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    record_job(tmp_path, JobRecord("2", "t", "data", "local", "site", 1, {}))
    return tmp_path


def test_status_of_a_held_job(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answering(monkeypatch, line_of("JobHeldUser"))
    assert cli.run(["status", str(run_dir)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "job 2: pending (JobHeldUser): held: by its user; `scontrol --clusters=site release 2` releases it"
    assert cli.run(["status", str(run_dir), "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["state"], job["reason"], job["waiting"], job["nodes"]) == ("PENDING", "JobHeldUser", "held", None)
    assert job["advice"] == "held: by its user; `scontrol --clusters=site release 2` releases it"


def test_status_of_a_job_that_waits_its_turn(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answering(monkeypatch, line_of("Priority"))
    assert cli.run(["status", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "job 7: pending (Priority): it starts by itself"
    assert cli.run(["status", str(run_dir), "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["waiting"], job["advice"]) == ("queued", None)


def test_tasks_of_an_array_share_a_line() -> None:
    tasks = [JobState(f"5_{index}", "PENDING", index, "JobHeldUser", waiting="held") for index in range(3)]
    other = JobState("5_3", "PENDING", 3, "JobArrayTaskLimit", waiting="queued")
    assert describe_waits([*tasks, other, JobState("5_4", "RUNNING", 4)]) == [
        "job 5, 3 tasks: pending (JobHeldUser): held: by its user; `scontrol release 5` releases it",
        "job 5_3: pending (JobArrayTaskLimit): it starts by itself",
    ]


def test_logs_of_a_held_job_say_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answering(monkeypatch, line_of("JobHeldUser"))
    assert cli.run(["logs", str(run_dir)]) == 2
    assert "job 2 has no log yet (PENDING (JobHeldUser)): held: by its user; `scontrol --clu" in capsys.readouterr().err


def test_following_a_held_job_says_so_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    held, now_s, follow = line_of("JobHeldUser"), [0.0], logs.follow
    answering(monkeypatch, held, held, held, held.replace("JobState=PENDING", "JobState=CANCELLED"))

    def sleep(_: float) -> None:
        now_s[0] += logs.QUERY_EVERY_S
        assert now_s[0] < 100 * logs.QUERY_EVERY_S

    monkeypatch.setattr(logs, "follow", lambda path, ended: follow(path, ended, clock=lambda: now_s[0], sleep=sleep))
    assert cli.run(["logs", str(run_dir), "--follow"]) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("ridge: job 2 is PENDING (JobHeldUser): held: by its user; ")


def test_points_of_a_held_array_are_held_in_the_table(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path, SWEEP)
    held = JobState("5_0", "PENDING", 0, "JobHeldUser", waiting="held")
    found = files.status("000", held)
    assert (found.state, found.busy) == ("held", True)
    assert found.problem == "PENDING (JobHeldUser): held: by its user; `scontrol release 5_0` releases it"
    queued = files.status("000", JobState("5_0", "PENDING", 0, "Resources", waiting="queued"))
    assert (queued.state, queued.busy, queued.problem) == ("pending", True, None)


def test_a_second_job_is_refused_with_the_reason_of_the_first(run_dir: Path) -> None:
    (held,) = parse_scontrol(line_of("JobHeldUser"))
    with pytest.raises(UserError, match=r"^job 2 of .* is PENDING \(JobHeldUser\): `ridge cancel` it first"):
        refuse_second_job(run_dir, lambda job, slurm_cluster: [held])
