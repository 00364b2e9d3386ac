"""How far a run is, read from the end of its event log, during the run or after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import event_file, read_last_events
from ridgeline.rundir.speed import log_lines, run_speed, windows


@dataclass(frozen=True)
class RunProgress:
    """The last log line of a run, and its speed."""

    step: int | None
    """Last logged step; None before the first."""
    steps: int | None
    """Of the whole run; None before its config is written."""
    loss: float | None
    tokens_per_s: float | None
    """Speed of the run (rundir.speed), over the end of its log."""
    step_time_s: float | None
    """Mean step time of the last log window."""
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
        """Seconds of training left at the step time of the last log line."""
        if self.step is None or self.steps is None or self.step_time_s is None:
            return None
        return (self.steps - self.step) * self.step_time_s


def run_progress(run_dir: Path) -> RunProgress:
    """Return how far the run of a directory is: one that has not started, is running, or has ended. Raises UserError when damaged."""
    config = RunDir(run_dir).config
    events = read_last_events(event_file(run_dir, 0))
    lines = log_lines(events)
    last, speed = lines[-1] if lines else {}, run_speed(windows(lines))
    return RunProgress(
        step=int(last["step"]) if last else None,
        steps=None if config is None else config.trainer.steps,
        loss=last.get("loss"),
        tokens_per_s=None if speed is None else speed.tokens_per_s,
        step_time_s=last.get("step_time_mean_s"),
        starts=events[-1].restart + 1 if events else 0,
        logged_at_s=events[-1].time_s if events else None,
    )


def job_exit_code(run_dir: Path, job: str) -> int | None:
    """Return the exit code of the last attempt of a job; None when its script recorded none."""
    codes = [attempt.exit_code for attempt in RunDir(run_dir).attempts if str(attempt.job) == job]
    return codes[-1] if codes else None
