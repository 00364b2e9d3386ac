"""The run directory: where a run keeps what it is, what it was started from, and what it makes.

    config.yaml      the resolved config of the newest start (config.<n>.yaml: that of start n, where a later start changed it)
    run.json         name, id, and one entry per start: time, command, host, devices, package versions, git commit
    git.diff         uncommitted changes of the source tree at the first start (git.<n>.diff at restart n), when there were any
    plan.json        what was planned beside what was compiled, at the newest start (trainer/reconcile.py)
    compile.json     the compiled step's own report: memory, FLOPs, every collective, at the newest start (trainer/aot/record.py)
    checkpoints/ events.jsonl metrics.jsonl tensorboard/     written by others

Only process 0 reads and writes here; the others are told what it found.
"""

from __future__ import annotations

import io
import json
import os
import platform
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from ruamel.yaml import YAML

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.rundir.provenance import SOURCE_TREE, packages, source_state, user
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint.integrity import write_atomically
from ridgeline.trainer.config_guard import check_resume

_FORMAT = 1
_BEFORE_THE_FIRST_START = ("slurm", "attempts.jsonl", "doctor.jsonl", "bad_nodes")
"""What `ridge submit` and the preflight of a job leave in a run directory before the run opens it."""
_SOURCE_TREE = SOURCE_TREE


@dataclass(frozen=True)
class RunDir:
    """An open run directory."""

    path: Path
    id: str
    """Stays the same over all restarts."""
    restart: int
    """0 at the first start, 1 at the second, ..."""

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"


def open_run_dir(
    config: Config, *, command: Sequence[str], log: Callable[[str], None], now: Callable[[], datetime] | None = None
) -> RunDir:
    """Create the run directory of a config, or open it for another start of the same run, and record this start in it.

    Call it after jax.distributed is initialised. A changed config is told through `log` (process 0). Raises UserError: the directory
    belongs to another run or is not a run directory; it cannot be written; it has checkpoints that the changed config would make wrong.
    """
    path = config.directory.absolute()
    start_time = (now or (lambda: datetime.now(UTC)))()

    def record() -> list[Any]:
        try:
            run = _read_run(path, config.name)
            restart = len(run["starts"])
            if not restart:  # first of all: a directory that a killed start leaves half made must be known again as this run's
                _write_run(path, run)
            previous = _read_config(path) if restart else None
            _write_config(path, config, previous, restart, log)
            run["starts"].append(_start(path, restart, command, start_time))
            _write_run(path, run)
        except OSError as error:
            raise UserError(f"cannot write the run directory {path}: {error.strerror or error}") from error
        return [run["id"], restart]

    run_id, restart = Agreement("run-dir").first(record)
    return RunDir(path, run_id, restart)


def _read_run(path: Path, name: str) -> dict[str, Any]:
    """Return run.json, or a new one for a new run; refuse a directory that is not this run's."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / "run.json"
    if not file.exists():
        held = sorted(entry for entry in os.listdir(path) if not entry.startswith(".") and entry not in _BEFORE_THE_FIRST_START)
        if held:
            raise UserError(
                f"{path} is not a run directory of ridge and not empty (it holds {', '.join(held[:3])}): choose another run_dir"
            )
        return {"format": _FORMAT, "name": name, "id": uuid.uuid4().hex[:12], "starts": []}
    try:
        run: dict[str, Any] = json.loads(file.read_bytes())
        owner, _, _ = run["name"], run["id"], len(run["starts"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} is damaged: choose another run_dir, or restore the file") from None
    if owner != name:
        raise UserError(f"{path} belongs to the run '{owner}', not '{name}': choose another run_dir or name")
    return run


def _write_run(path: Path, run: dict[str, Any]) -> None:
    write_atomically(path / "run.json", (json.dumps(run, indent=1) + "\n").encode())


def _read_config(path: Path) -> dict[str, Any] | None:
    """Return the stored resolved config, completed by today's defaults; None when a kill left none."""
    file = path / "config.yaml"
    return from_resolved(file).model_dump(mode="json") if file.exists() else None


def _write_config(path: Path, config: Config, previous: dict[str, Any] | None, restart: int, log: Callable[[str], None]) -> None:
    """Write config.yaml, keeping the one before under the number of its start; refuse a change the checkpoints do not survive."""
    current = config.model_dump(mode="json")
    if previous == current:
        return
    if previous is not None:
        if checkpoint_dirs.complete_steps(path / "checkpoints"):
            for line in check_resume(previous, current):
                log(line)
        write_atomically(path / f"config.{restart - 1}.yaml", (path / "config.yaml").read_bytes())
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(current, text)
    write_atomically(path / "config.yaml", text.getvalue().encode())


def _start(path: Path, restart: int, command: Sequence[str], start_time: datetime) -> dict[str, Any]:
    devices = jax.devices()
    return {
        "time": start_time.isoformat(timespec="seconds"),
        "command": list(command),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "user": user(),
        "pid": os.getpid(),
        "processes": jax.process_count(),
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "python": platform.python_version(),
        "system": platform.platform(),
        "git": _git_state(path, restart),
        "packages": packages(),
    }


def _git_state(path: Path, restart: int) -> dict[str, Any]:
    """Describe the source tree, writing its uncommitted changes beside run.json."""
    state = source_state(_SOURCE_TREE)
    if state.diff is None:
        return state.facts
    name = None
    if state.diff:
        name = "git.diff" if restart == 0 else f"git.{restart}.diff"
        write_atomically(path / name, state.diff.encode(errors="surrogateescape"))
    return {**state.facts, "diff": name}
