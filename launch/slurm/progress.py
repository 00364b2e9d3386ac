"""How far a run is, read from the end of its event log, while it runs or long after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.rundir.events import event_file

TAIL_BYTES = 1 << 20
ATTEMPTS_FILE = "attempts.jsonl"
"""One line per start of a job, written by its script: job, restart, begin, end, exit_code, checkpoint."""


@dataclass(frozen=True)
class RunProgress:
    """What the last log line of a run says."""

    step: int | None
    """Last logged step; None before the first."""
    steps: int | None
    """Of the whole run; None when its config is not there yet."""
    loss: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    starts: int
    """Starts so far: 1 without a restart, 0 before the first."""
    logged_at_s: float | None
    """Wall clock of the last event, s since 1970."""

    @property
    def finished(self) -> bool:
        """Whether the last step was reached."""
        return self.step is not None and self.steps is not None and self.step >= self.steps

    @property
    def eta_s(self) -> float | None:
        """Seconds of training that are left at the pace of the last log line."""
        if self.step is None or self.steps is None or self.step_time_s is None:
            return None
        return (self.steps - self.step) * self.step_time_s


def run_progress(run_dir: Path) -> RunProgress:
    """Return how far the run of a directory is; works on a run that never started, runs, or was killed. Raises UserError when damaged."""
    config = run_dir / "config.yaml"
    events = last_records(event_file(run_dir, 0))
    steps = [event for event in events if event.get("kind") == "step"]
    last = steps[-1] if steps else {}
    return RunProgress(
        step=last.get("step"),
        steps=from_resolved(config).trainer.steps if config.exists() else None,
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        step_time_s=last.get("step_time_mean_s"),
        starts=int(events[-1]["restart"]) + 1 if events else 0,
        logged_at_s=events[-1]["time"] if events else None,
    )


def job_exit_code(run_dir: Path, job: str) -> int | None:
    """Return how the last start of a job ended, by the job's own record; None when it ended without a word."""
    mine = [record for record in last_records(run_dir / ATTEMPTS_FILE) if str(record.get("job")) == job]
    return mine[-1]["exit_code"] if mine else None


def last_records(path: Path) -> list[dict[str, Any]]:
    """Return the records at the end of a file of JSON lines; whole lines only. No file is no records. Raises UserError when damaged."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL_BYTES))
            data = stream.read()
    except FileNotFoundError:
        return []
    if size > TAIL_BYTES:
        data = data[data.find(b"\n") + 1 :]
    try:
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise UserError(f"{path}: unreadable line in an append-only log ({error})") from error
