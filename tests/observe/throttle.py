"""Take most of its CPU time from a running process: by a quota of its control group, or by signals."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ridgeline.rundir.events import read_events

PERIOD_S, RUNNING, QUOTA_CORES = 0.1, 0.2, 0.2
"""A throttled rank may run for this share of each period, or use so many cores."""


def throttle(process: subprocess.Popen[bytes], events: Path, group: Path | None) -> None:
    """Take most of its time from a process, from the moment it begins to train: what hot silicon does to its clock.

    `events` is the process's own event file: it may still compile when another process of the run has begun to wait for it.

    By a CPU quota of its control group where there is one to be had (root), else by stopping and continuing it.
    """
    while process.poll() is None and not _trains(events):
        time.sleep(0.1)
    if group is not None:
        _set_quota(group, QUOTA_CORES)
        process.wait()
        return
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep((1 - RUNNING) * PERIOD_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(RUNNING * PERIOD_S)


def _trains(events: Path) -> bool:
    """Whether a process has begun its first step."""
    return events.exists() and any(event.kind == "phase_start" and event.fields["phase"] == "train" for event in read_events(events))


@contextlib.contextmanager
def control_group(process: subprocess.Popen[bytes]) -> Iterator[Path | None]:
    """Put a process into a control group of its own, with CPU time that can be limited; None where this user may not make one."""
    top = next((top for top in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")) if (top / "cgroup.procs").exists()), None)
    group = None if top is None else top / f"ridge-test-{process.pid}"
    try:
        if group is not None:
            group.mkdir()
            _set_quota(group, 1000)
            (group / "cgroup.procs").write_text(str(process.pid))
    except OSError:
        if group is not None and group.is_dir():
            group.rmdir()
        group = None
    try:
        yield group
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if group is not None:
            with contextlib.suppress(OSError):
                group.rmdir()


def _set_quota(group: Path, cores: float) -> None:
    """Limit the CPU time of a control group of version 1 or 2."""
    quota, period = (round(1e6 * seconds) for seconds in (cores * PERIOD_S, PERIOD_S))
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {period}")
