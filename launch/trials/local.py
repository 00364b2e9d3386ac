"""Run the trials of a study or the points of a sweep on this machine, one after another, on virtual CPU devices or the first GPUs.

A trial is one process, or several through `ridge launch`. Ctrl-C and SIGTERM end the running trial; finished trials are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural
from ridgeline.configs.schema import Config
from ridgeline.launch.cluster.devices import VISIBLE, gpus_present
from ridgeline.launch.local import held_signals
from ridgeline.launch.trials.failure import failure_reason
from ridgeline.launch.trials.study import Trial, Trials
from ridgeline.rundir.progress import run_progress

POLL_S = 0.2
REPORT_EVERY_S = 5.0
GRACE_S = 20.0
"""Between SIGTERM and SIGKILL for an interrupted trial of a study: it starts from the beginning, so it need not save."""
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


def on_cpu(config: Config, env: Mapping[str, str]) -> bool:
    """Return whether a run of this config on this machine uses CPU devices."""
    if config.runtime.platform != "auto":
        return config.runtime.platform == "cpu"
    return env.get("JAX_PLATFORMS", "").split(",")[0] == "cpu" or gpus_present() is None


def check_devices_here(devices: int) -> None:
    """Raise UserError if this machine has fewer GPUs."""
    present = gpus_present() or 0
    if devices > present:
        raise UserError(f"{devices} devices: this machine has {plural(present, 'GPU')}")


def environment(env: Mapping[str, str], devices: int, cpu: bool) -> dict[str, str]:
    """Return the variables of a trial on this many devices."""
    own = {**env, "PYTHONUNBUFFERED": "1"}
    if cpu:
        flags = _DEVICE_COUNT.sub("", own.get("XLA_FLAGS", "")).strip()  # runtime.cpu_devices sets their number
        return {**own, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    visible = [entry for entry in own.get(VISIBLE, "").split(",") if entry] or [str(i) for i in range(gpus_present() or 0)]
    return {**own, VISIBLE: ",".join(visible[:devices])}


def command(config_file: Path, processes: int) -> list[str]:
    """Return the command line of a trial."""
    if processes == 1:
        return [sys.executable, "-m", "ridgeline", "train", str(config_file)]
    return [sys.executable, "-m", "ridgeline", "launch", "--processes", str(processes), str(config_file)]


@dataclass(frozen=True)
class LocalTrial:
    """One trial to run."""

    name: str
    config: Config
    """With its run directory."""
    devices: int
    processes: int
    cpu: bool
    output: Path
    """File for what it prints."""
    prepare: Callable[[], Path]
    """Prepares its files and returns its config file."""
    finish: Callable[[int], str | None]
    """Records its end, given the exit code; returns why it failed, or None."""


def run_all(trials: Trials, *, processes: Callable[[Trial], int], cpu: bool, log: Callable[[str], None]) -> None:
    """Run every missing trial of a study. On Ctrl-C or SIGTERM: end the running trial and raise KeyboardInterrupt."""
    todo = trials.to_do()
    if len(todo) < len(trials.trials):
        log(f"{len(trials.trials) - len(todo)} of {len(trials.trials)} runs are finished")
    run_each([_of_study(trials, trial, processes(trial), cpu) for trial in todo], log)


def _of_study(trials: Trials, trial: Trial, processes: int, cpu: bool) -> LocalTrial:
    output = trials.files.log_file(trial.name)

    def finish(code: int) -> str | None:
        if code == 0 and trials.measured(trial) is not None:
            return None
        return trials.record_failure(trial, failure_reason(output, code) if code else None, exit_code=code, log=str(output))

    return LocalTrial(trial.name, trial.config, trial.setting.devices, processes, cpu, output, partial(trials.prepare, trial), finish)


def run_each(trials: Sequence[LocalTrial], log: Callable[[str], None], *, grace_s: float = GRACE_S) -> list[str]:
    """Run trials; return the names of those that failed. On Ctrl-C or SIGTERM: end the running one and raise KeyboardInterrupt.

    grace_s: between SIGTERM and SIGKILL for the running trial.
    """
    with _sigterm_as_interrupt():
        return [
            trial.name for number, trial in enumerate(trials, 1) if not _run(trial, log, f"[{number}/{len(trials)}] {trial.name}", grace_s)
        ]


def _run(trial: LocalTrial, log: Callable[[str], None], label: str, grace_s: float) -> bool:
    file = trial.prepare()
    log(f"{label}: starting")
    begin_s = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    with trial.output.open("wb") as stream:
        try:
            with held_signals((signal.SIGINT, signal.SIGTERM)):
                process = subprocess.Popen(
                    command(file, trial.processes),
                    env=environment(os.environ, trial.devices, trial.cpu),
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            code = _wait(process, lambda: _progress(trial), lambda text: log(f"{label}: {text}"))
        except BaseException:
            if process is not None:
                _end(process, grace_s)
            raise
    took_s = time.monotonic() - begin_s
    reason = trial.finish(code)
    log(f"{label}: finished in {took_s:.1f} s" if reason is None else f"{label}: failed after {took_s:.1f} s: {reason}")
    return reason is None


def _wait(process: subprocess.Popen[bytes], progress: Callable[[], str | None], report: Callable[[str], None]) -> int:
    """Wait for a process; report changes of its progress every REPORT_EVERY_S."""
    checked_s, reported = time.monotonic(), None
    while (code := process.poll()) is None:
        time.sleep(POLL_S)
        if time.monotonic() - checked_s >= REPORT_EVERY_S:
            checked_s = time.monotonic()
            now = progress()
            if now is not None and now != reported:
                reported = now
                report(now)
    return code


def _progress(trial: LocalTrial) -> str | None:
    now = run_progress(trial.config.directory)
    return None if now.step is None else f"step {now.step} of {trial.config.trainer.steps}"


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a trial and its child processes: SIGTERM, and SIGKILL after `grace_s` or at another Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(grace_s)
            return


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C while the trials run."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def processes_of(devices: int, per_process: int | None) -> int:
    """Return the processes of a trial. Raises UserError when the devices do not divide."""
    if per_process is None or per_process >= devices:
        return 1
    if devices % per_process:
        raise UserError(f"--per-process {per_process} does not divide {devices} devices")
    return devices // per_process
