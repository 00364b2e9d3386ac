"""Run the points of a sweep on this machine, one after another. An interrupted point saves, and its next run continues it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.launch import exit_codes
from ridgeline.launch.cluster.devices import gpus_present
from ridgeline.launch.trials import local
from ridgeline.launch.trials.engine import SWEEP, TrialFiles
from ridgeline.launch.trials.failure import failure_reason
from ridgeline.launch.trials.sweep import Chosen, point_config, point_name, write_points
from ridgeline.launch.trials.sweep_file import Sweep
from ridgeline.rundir.files import write_atomically
from ridgeline.rundir.lease import acquire, this_process

SAVE_S = 600.0
"""Time for an interrupted point to save, before SIGKILL."""
LEASE_TIMEOUT_S = 30.0


def run_sweep(sweep: Sweep, chosen: Chosen, log: Callable[[str], None]) -> list[str]:
    """Run the chosen points; return the names of those that failed.

    Raises UserError for a point that does not fit this machine, before any runs, and while another process runs the sweep;
    KeyboardInterrupt on Ctrl-C and SIGTERM.
    """
    trials = [_trial(sweep, point_name(number.index), point_config(sweep, number, point)) for number, point in chosen]
    try:
        sweep.directory.mkdir(parents=True, exist_ok=True)
        lease = acquire(sweep.directory, this_process(LEASE_TIMEOUT_S), log=log)
        try:
            write_points(sweep)
            return local.run_each(trials, log, grace_s=SAVE_S)
        finally:
            lease.release()
    except OSError as error:
        raise UserError(f"cannot write the sweep into {sweep.directory}: {error.strerror or error}") from error


def _trial(sweep: Sweep, name: str, config: Config) -> local.LocalTrial:
    files, cpu = TrialFiles(sweep.directory, SWEEP), local.on_cpu(config, os.environ)
    devices = config.runtime.cpu_devices if cpu else gpus_present() or 1
    try:
        check_devices(config, devices)
    except UserError as error:
        raise UserError(f"point {name}: {error}") from None
    output = files.log_file(name)

    def finish(code: int) -> str | None:
        if code == 0:
            return None
        if code in (exit_codes.PREEMPTED, exit_codes.INTERRUPTED):  # `ridge cancel POINT`: it saved
            return "stopped; the same command continues it"
        reason = failure_reason(output, code)
        files.record_failure(name, reason, exit_code=code, log=str(output))
        return reason

    return local.LocalTrial(name, config, devices, 1, cpu, output, partial(_prepare, files, name, config), finish)


def _prepare(files: TrialFiles, name: str, config: Config) -> Path:
    files.forget_failure(name)
    path = files.root / "configs" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_yaml(config).encode())
    return path
