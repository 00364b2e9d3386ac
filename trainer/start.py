"""Start or continue a run: create or open its run directory and record the start in it (layout: rundir/directory.py).

Only process 0 reads and writes the directory; the other processes receive the run id and the number of the start.
"""

from __future__ import annotations

import os
import platform
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jax

from ridgeline.configs.diff import classify_changes
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.provenance import SOURCE_TREE, packages, source_state, user
from ridgeline.rundir.records import RunRecord, Start
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs

_SOURCE_TREE = SOURCE_TREE


@dataclass(frozen=True)
class StartedRun(RunDir):
    """The run directory of a run that was started."""

    id: str
    """The same over all starts."""
    restart: int
    """0 at the first start, 1 at the second, ..."""


def start_run(
    config: Config, *, command: Sequence[str], log: Callable[[str], None], now: Callable[[], datetime] | None = None
) -> StartedRun:
    """Create the run directory of a config, or open it for another start of the same run, and record this start in it.

    Call it after jax.distributed is initialized.

    Args:
      config: of this start.
      command: as typed.
      log: receives a line per changed setting (process 0).
      now: current time; None: the system's, in UTC.

    Raises:
      UserError: the directory belongs to another run, is not a run directory, or cannot be written; or the changed config does not fit
        the checkpoints in it.
    """
    run = RunDir(config.directory.absolute())
    start_time = (now or (lambda: datetime.now(UTC)))()

    def record_start() -> list[Any]:
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            record = _own_record(run, config.name)
            restart = len(record.starts)
            if not restart:  # written first: a start that is killed below leaves a directory that the next start recognizes
                run.write_record(record)
            _write_config(run, config, restart, log)
            run.write_record(record.with_start(_describe_start(run, restart, command, start_time)))
        except OSError as error:
            raise UserError(f"cannot write the run directory {run.path}: {error.strerror or error}") from error
        return [record.id, restart]

    run_id, restart = Agreement("run-dir").first(record_start)
    return StartedRun(run.path, run_id, restart)


def _own_record(run: RunDir, name: str) -> RunRecord:
    """Return run.json, or a new record for a new run. Raises UserError for a directory that is not this run's."""
    if not run.exists:
        if foreign := run.foreign_entries():
            raise UserError(
                f"{run.path} is not a run directory of ridge and not empty (it holds {', '.join(foreign[:3])}): choose another run_dir"
            )
        return RunRecord(format=1, name=name, id=uuid.uuid4().hex[:12], starts=())
    if not run.record.id:
        raise UserError(f"{run.record_file} is damaged: id is missing")
    if run.record.name != name:
        raise UserError(f"{run.path} belongs to the run '{run.record.name}', not '{name}': choose another run_dir or name")
    return run.record


def _write_config(run: RunDir, config: Config, restart: int, log: Callable[[str], None]) -> None:
    """Write config.yaml and keep the previous one. Raises UserError for a change that does not fit the checkpoints."""
    before = run.config if restart else None
    if before == config:
        return
    if before is not None and checkpoint_dirs.complete_steps(run.checkpoints):
        for line in check_resume(before.model_dump(mode="json"), config.model_dump(mode="json")):
            log(line)
    run.write_config(config, keep_as=None if before is None else restart - 1)


def _describe_start(run: RunDir, restart: int, command: Sequence[str], start_time: datetime) -> Start:
    devices = jax.devices()
    return Start.model_validate(
        {
            "time": start_time.isoformat(timespec="seconds"),
            "command": tuple(_as_text(argument) for argument in command),
            "directory": os.getcwd(),
            "host": socket.gethostname(),
            "user": user(),
            "pid": os.getpid(),
            "processes": jax.process_count(),
            "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
            "python": platform.python_version(),
            "system": platform.platform(),
            "git": _describe_code(run, restart),
            "packages": packages(),
        }
    )


def _as_text(argument: str) -> str:
    """Replace bytes that are not UTF-8."""
    return os.fsencode(argument).decode(errors="replace")


def _describe_code(run: RunDir, restart: int) -> dict[str, Any]:
    """Describe the source tree, and write its uncommitted changes beside run.json."""
    state = source_state(_SOURCE_TREE)
    if state.diff is None:
        return state.facts
    return {**state.facts, "diff": run.write_diff(state.diff, restart) if state.diff else None}


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the config of the previous start with the new one (two `model_dump(mode="json")`); return one line per change.

    Raises UserError that lists every change with which a checkpoint cannot be restored (model, optimizer kind, parameter dtype).
    """
    changes = classify_changes(dict(old), dict(new))
    refused = [f"{c.key}: {c.old!r} -> {c.new!r} ({c.why})" for c in changes if not c.allowed]
    if refused:
        raise UserError(f"cannot resume with the changed config: {'; '.join(refused)}; change it back, or start a new run_dir")
    return [f"resuming with {c.key}: {c.old!r} -> {c.new!r}" + (f" ({c.why})" if c.why else "") for c in changes]
