"""Trials on this machine, one after the other, on virtual CPU devices or the first GPUs; one process, or several by `ridge launch`.

Ctrl-C and SIGTERM end the running trial; those that are finished stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.launch.cluster.devices import VISIBLE, gpus_present
from ridgeline.launch.slurm.progress import run_progress
from ridgeline.launch.trials.engine import Trial, Trials
from ridgeline.launch.trials.failure import failure_words

POLL_S = 0.2
TELL_EVERY_S = 5.0
GRACE_S = 20.0
"""Between asking an interrupted trial to end and killing it."""
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


def on_cpu(config: Config, env: Mapping[str, str]) -> bool:
    """Whether a run of this config on this machine uses CPU devices."""
    if config.runtime.platform != "auto":
        return config.runtime.platform == "cpu"
    return env.get("JAX_PLATFORMS", "").split(",")[0] == "cpu" or gpus_present() is None


def check_devices_here(devices: int) -> None:
    """Refuse more GPUs than there are. Raises UserError."""
    present = gpus_present() or 0
    if devices > present:
        raise UserError(f"{devices} devices: this machine shows {present} GPU(s)")


def environment(env: Mapping[str, str], devices: int, cpu: bool) -> dict[str, str]:
    """Return the variables of a trial on this many devices."""
    own = {**env, "PYTHONUNBUFFERED": "1"}
    if cpu:
        flags = _DEVICE_COUNT.sub("", own.get("XLA_FLAGS", "")).strip()  # runtime.cpu_devices says how many there are
        return {**own, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    visible = [entry for entry in own.get(VISIBLE, "").split(",") if entry] or [str(i) for i in range(gpus_present() or 0)]
    return {**own, VISIBLE: ",".join(visible[:devices])}


def command(config_file: Path, processes: int) -> list[str]:
    """Return the command line of a trial."""
    if processes == 1:
        return [sys.executable, "-m", "ridgeline", "train", str(config_file)]
    return [sys.executable, "-m", "ridgeline", "launch", "--processes", str(processes), str(config_file)]


def run_all(trials: Trials, *, processes: Callable[[Trial], int], cpu: bool, say: Callable[[str], None]) -> None:
    """Make every trial that is missing. Raises KeyboardInterrupt after ending the running one when asked to stop."""
    todo = trials.to_do()
    if len(todo) < len(trials.trials):
        say(f"{len(trials.trials) - len(todo)} of {len(trials.trials)} runs are there already")
    with _asked_to_stop():
        for number, trial in enumerate(todo, 1):
            _run(trials, trial, processes(trial), cpu, say, f"[{number}/{len(todo)}] {trial.name}")


def _run(trials: Trials, trial: Trial, processes: int, cpu: bool, say: Callable[[str], None], label: str) -> None:
    file, log = trials.prepare(trial), trials.log(trial)
    say(f"{label}: starting")
    begin_s = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(file, processes),
            env=environment(os.environ, trial.setting.devices, cpu),
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = _wait(process, lambda: _progress(trial), lambda words: say(f"{label}: {words}"))
        except BaseException:
            _end(process)
            raise
    took_s = time.monotonic() - begin_s
    if code == 0 and trials.measured(trial) is not None:
        say(f"{label}: finished in {took_s:.1f} s")
        return
    reason = failure_words(log, code) if code else trials.why_unmeasured(trial)
    trials.record_failure(trial, reason, exit_code=code, log=str(log))
    say(f"{label}: failed after {took_s:.1f} s: {reason}")


def _wait(process: subprocess.Popen[bytes], progress: Callable[[], str | None], tell: Callable[[str], None]) -> int:
    """Wait for a process; tell its progress now and then, when there is news."""
    asked_s, told = time.monotonic(), None
    while (code := process.poll()) is None:
        time.sleep(POLL_S)
        if time.monotonic() - asked_s >= TELL_EVERY_S:
            asked_s = time.monotonic()
            news = progress()
            if news is not None and news != told:
                told = news
                tell(news)
    return code


def _progress(trial: Trial) -> str | None:
    now = run_progress(trial.config.directory)
    return None if now.step is None else f"step {now.step} of {trial.config.trainer.steps}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a trial and what it started; its run is made anew by the next call, so nothing of it is worth waiting for."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            return


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[None]:
    """Turn SIGTERM into what Ctrl-C is, while the trials run."""

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
