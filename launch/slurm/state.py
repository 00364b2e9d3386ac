"""State of a job: from Slurm's controller (scontrol), else from its accounting (sacct)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.configs.errors import UserError
from ridgeline.launch.slurm import pending
from ridgeline.launch.slurm.units import parse_time_s

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
        "FORGOTTEN",
    }
)
FORGOTTEN = "FORGOTTEN"
"""Neither controller nor accounting has a record of the job: it ended some time ago."""
TIMEOUT_S = 60

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array."""

    job: str
    """Job id; for a task of an array such as 17_3."""
    state: str
    task: int | None = None
    """Index in a job array."""
    reason: str | None = None
    """Why it is pending, or why it ended."""
    nodes: str | None = None
    restarts: int | None = None
    elapsed_s: int | None = None
    limit_s: int | None = None
    exit_code: int | None = None
    waiting: str | None = None
    """What kind of wait a pending job is in: `queued`, `held` or `blocked` (launch/slurm/pending.py)."""
    slurm_cluster: str | None = None
    """Where it is, if not on the default cluster of Slurm."""

    @property
    def ended(self) -> bool:
        """Whether it has ended and Slurm will not restart it."""
        return self.state in ENDED

    @property
    def described(self) -> str:
        """The state, and the reason of a wait as Slurm gives it: `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.waiting and self.reason else self.state

    @property
    def advice(self) -> str | None:
        """What a person can do for a pending job, in one line; None if it only has to wait its turn."""
        return pending.advice(self.job, self.waiting, self.reason, self.slurm_cluster)


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises UserError if it does not exist or times out."""
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not on PATH: run this on a login node of the cluster")
    try:
        return subprocess.run(list(command), capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not return within {TIMEOUT_S} s") from None


def job_states(job: str, slurm_cluster: str | None = None, run: Run = run_command) -> list[JobState]:
    """Return the state of a job; for an array one per task, pending tasks included."""
    clusters = [f"--clusters={slurm_cluster}"] if slurm_cluster else []
    shown = run(["scontrol", *clusters, "show", "job", "--oneliner", job])
    if shown.returncode == 0:
        states = [
            replace(state, slurm_cluster=slurm_cluster) for line in shown.stdout.splitlines() if line for state in parse_scontrol(line)
        ]
        return sorted(states, key=lambda state: state.task or 0)
    if "Invalid job id" not in shown.stderr:
        raise UserError(f"scontrol show job {job} failed: {' '.join(shown.stderr.split())}")
    return _from_accounting(job, clusters, run) or [JobState(job, FORGOTTEN)]


def job_has_ended(job: str) -> bool:
    """Return whether Slurm reports that a job of this cluster has ended; False when it does not respond or has no record of the job."""
    try:
        states = job_states(job)
    except UserError:
        return False
    return bool(states) and all(state.ended and state.state != FORGOTTEN for state in states)


def parse_scontrol(line: str) -> list[JobState]:
    """Parse a line of `scontrol show job --oneliner`; a line of pending array tasks returns several states."""
    fields = dict(re.findall(r"(?:^| )([A-Za-z/:]+)=(\S*)", line))
    code = fields["ExitCode"].split(":")
    reason = None if fields["Reason"] == "None" else fields["Reason"]
    state = JobState(
        job=fields["JobId"],
        state=fields["JobState"],
        reason=reason,
        nodes=None if fields.get("NodeList", "(null)") in ("", "(null)") else fields["NodeList"],
        restarts=int(fields["Restarts"]),
        elapsed_s=_seconds(fields["RunTime"]),
        limit_s=_seconds(fields["TimeLimit"]),
        exit_code=int(code[0]) or 128 * (code[1] != "0") + int(code[1]) if fields["JobState"] in ENDED else None,
        waiting=pending.waiting(fields["JobState"], reason, int(fields["Priority"])),
    )
    if "ArrayJobId" not in fields:
        return [state]
    return [_task(state, fields["ArrayJobId"], index) for index in expand_indices(fields["ArrayTaskId"])]


def _task(state: JobState, array: str, index: int) -> JobState:
    return replace(state, job=f"{array}_{index}", task=index)


def expand_indices(text: str) -> list[int]:
    """Expand array indices in Slurm's notation: `3`, `0-4`, `1,5-7:2%2`."""
    indices: list[int] = []
    for part in text.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices


def _seconds(text: str) -> int | None:
    """Parse a time that Slurm prints; unlike a limit it may be 00:00:00."""
    if text in ("UNLIMITED", "INVALID", "N/A", "Partition_Limit"):
        return None
    return 0 if not text.strip("0:") else parse_time_s(text, "time")


def _from_accounting(job: str, clusters: Sequence[str], run: Run) -> list[JobState]:
    """Query sacct; empty if the site has no accounting."""
    if run is run_command and shutil.which("sacct") is None:
        return []
    shown = run(
        [
            "sacct",
            *clusters,
            "--allocations",
            "--noheader",
            "--parsable2",
            "--format=JobID,State,ExitCode,NodeList,Elapsed",
            f"--jobs={job}",
        ]
    )
    if shown.returncode:
        return []  # no accounting at this site
    states = []
    for line in shown.stdout.splitlines():
        name, state, code, nodes, elapsed = line.split("|")
        task = name.partition("_")[2]
        status, _, number = code.partition(":")
        states.append(
            JobState(
                job=name,
                state=state.split()[0],
                task=int(task) if task.isdecimal() else None,
                nodes=nodes if nodes not in ("", "None assigned") else None,
                elapsed_s=_seconds(elapsed),
                exit_code=int(status) or 128 * (number != "0") + int(number or 0),
            )
        )
    return states
