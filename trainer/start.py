"""Start or continue a run: create or open its run directory and record the start in it (layout: rundir/directory.py).

Only process 0 reads and writes the directory; the other processes receive the run id and the number of the start.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from ridgeline.configs.diff import classify_changes
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.manifest import TokenizerInfo, check_same_tokenizer
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import event_files, read_events
from ridgeline.rundir.files import discard, make_directory, sync_directory
from ridgeline.rundir.lease import JobEnded, Lease, acquire, this_process
from ridgeline.rundir.provenance import SOURCE_TREE, packages, source_state, user
from ridgeline.rundir.records import RunRecord, Start
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import identity, integrity
from ridgeline.trainer.checkpoint.directories import step_dir
from ridgeline.trainer.checkpoint.param_slices import PARAMS_ONLY
from ridgeline.trainer.checkpoint.payload import check_matches
from ridgeline.trainer.checkpoint.reader import check_startable, newest_step
from ridgeline.trainer.prepare import Prepared
from ridgeline.trainer.pretrained import check_optimizer, check_source

_SOURCE_TREE = SOURCE_TREE


@dataclass(frozen=True)
class StartedRun(RunDir):
    """The run directory of a run that was started."""

    id: str
    """The same over all starts."""
    restart: int
    """0 at the first start, 1 at the second, ..."""
    lease: Lease
    """Release it after the last write."""


def start_run(
    config: Config,
    *,
    command: Sequence[str],
    log: Callable[[str], None],
    now: Callable[[], datetime] | None = None,
    job_ended: JobEnded | None = None,
    end: Callable[[int], None] = os._exit,
) -> StartedRun:
    """Create the run directory of a config, or open it for another start of the same run, and record this start in it.

    Call it after jax.distributed is initialized. The start holds the lease of the directory until the caller releases it.

    Args:
      config: of this start.
      command: as typed.
      log: receives a line per changed setting (process 0).
      now: current time; None: the system's, in UTC.
      job_ended, end: as in rundir.lease.acquire.

    Raises:
      UserError: the directory belongs to another run, is not a run directory, cannot be written, or another start is writing it; or the
        changed config does not fit the checkpoints in it.
    """
    path = config.directory.absolute()
    start_time = (now or (lambda: datetime.now(UTC)))()
    timeout_s = config.runtime.lease_timeout_s
    held: list[Lease] = []

    def record_start() -> list[Any]:
        try:
            make_directory(path)
            _changes(RunDir(path), config)  # a refused start writes nothing
            held.append(acquire(path, this_process(timeout_s), log=log, job_ended=job_ended, end=end))
            run = RunDir(path)
            run.remove_temporaries()
            record = _own_record(run, config.name)
            restart = len(record.starts)
            if not restart:  # written first: a start that is killed below leaves a directory that the next start recognizes
                run.write_record(record)
            before = run.config if restart else None
            for line in _changes(run, config):
                log(line)
            if before != config:
                run.write_config(config, keep_as=None if before is None else restart - 1)
            run.write_record(record.with_start(_describe_start(run, restart, command, start_time)))
        except OSError as error:
            raise UserError(f"cannot write the run directory {path}: {error.strerror or error}") from error
        return [record.id, restart, held[0].epoch]

    try:
        run_id, restart, epoch = Agreement("run-dir").first(record_start)
    except BaseException:
        for lease in held:
            lease.release()
        raise
    return StartedRun(path, run_id, restart, held[0] if held else Lease(path, epoch, timeout_s, end=end))


def complete_step(config: Config, from_step: int | None = None) -> int | None:
    """Return the checkpointed step at which the run of a config is complete; None when there is something to train. Writes nothing.

    Process 0. `from_step`: the step to resume from; None: the newest one. Raises UserError as `start_run` where the run is complete.
    """
    run = RunDir(config.directory.absolute())
    reached = from_step if from_step is not None else newest_step(run.checkpoints)
    if not run.exists or reached is None or reached < config.trainer.steps:
        return None
    _changes(run, config)
    return reached


def check_start(config: Config, parts: Prepared, tokenizer: TokenizerInfo, from_step: int | None) -> None:
    """Raise UserError for a start that cannot restore or create its state, before the start writes anything. Process 0.

    Not compared: the payload of checkpoints and the weights of `init_from`, which are verified while they are loaded.
    """
    run = RunDir(config.directory.absolute())
    if run.path.exists():
        try:
            _changes(run, config)
        except OSError as error:
            raise UserError(f"cannot read the run directory {run.path}: {error.strerror}") from error
    metadata = check_startable(run.checkpoints, from_step)
    if metadata is None and config.checkpoint.local.directory is None:
        _check_none_lost(run)
    if metadata is not None and metadata.get("kind") != PARAMS_ONLY:
        check_matches(metadata["arrays"], parts.abstract, partial=False, where=str(step_dir(run.checkpoints, metadata["step"])))
        check_same_tokenizer(metadata.get("tokenizer"), tokenizer.sha256, str(run.checkpoints))
        check_restored(metadata, config, {}, lambda line: None)
    elif source := config.init_from if metadata is None else run.path:
        if config.init_optimizer and metadata is None:
            check_optimizer(source, config)
        optimizer = parts.abstract.opt_state if config.init_optimizer and metadata is None else None
        check_source(source, config.model, tokenizer.sha256, parts.spec, config.lora, optimizer)


def _check_none_lost(run: RunDir) -> None:
    """Raise UserError where an earlier start saved checkpoints and their directory is gone or empty: the run would begin again."""
    if run.checkpoints.is_dir() and any(run.checkpoints.iterdir()):
        return  # set aside: the run is to begin again
    try:
        saved = [event.fields["step"] for event in read_events(event_files(run.path)) if event.kind == "checkpoint_saved"]
    except (UserError, OSError):
        return
    if saved:
        raise UserError(
            f"{run.checkpoints} has no checkpoint, but one of step {saved[-1]} was saved there: bring the directory back "
            "(is its file system mounted?), or choose another run_dir to begin again"
        )


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


def _changes(run: RunDir, config: Config) -> list[str]:
    """Return a line per setting that differs from the previous start's, if there are checkpoints.

    Raises UserError for a directory that is not this run's, and for a change that does not fit the checkpoints.
    """
    started = _own_record(run, config.name).starts
    before = run.config if started else None
    if before is None or before == config or not checkpoint_dirs.complete_steps(run.checkpoints):
        return []
    return check_resume(before.model_dump(mode="json"), config.model_dump(mode="json"))


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


def check_restored(metadata: Mapping[str, Any], config: Config, corpora: Mapping[str, str], log: Callable[[str], None]) -> None:
    """Compare a restored checkpoint with the config and the corpora of this start; log what changed beside the config.

    Raises UserError as `check_resume`: config.yaml, with which the start was compared before, may have been edited.
    """
    if identity.RUN not in metadata:
        log(f"the checkpoint of step {metadata['step']} is of an earlier version: its run, config and corpora are not compared")
    if (sealed := identity.sealed_config(metadata)) is not None:
        check_resume(sealed.model_dump(mode="json"), config.model_dump(mode="json"))
    teachers = {str(source.teacher) for source in config.data.train}
    for path in identity.replaced_corpora(metadata, corpora):
        trained = f"that step {metadata['step']} was trained on: it was replaced"
        log(
            f"WARNING: {path} is not the teacher's predictions {trained}"
            if path in teachers
            else f"WARNING: {path} is not the corpus {trained}; the data order does not continue"
        )


def keep_tokenizer(source: Path, run: RunDir, metadata: Mapping[str, Any] | None, log: Callable[[str], None]) -> None:
    """Copy the corpus's tokenizer into the run directory, atomically, if the run has none, or none that a checkpoint depends on. Process 0.

    Args:
      source: directory of the corpus's copy.
      run: the run.
      metadata: of the checkpoint that the start continues from; None: none. The files that it was saved with are kept, and replaced only if
        they are damaged and the corpus has them.
      log: receives one line about a damaged tokenizer.

    Raises OSError.
    """
    target = run.tokenizer
    scratch, old = target.with_name(".tokenizer.new"), target.with_name(".tokenizer.old")
    for left in (scratch, old):
        discard(left)  # of a start that was killed
    if not source.is_dir():
        return
    if target.is_dir() and identity.files_of(source) == identity.files_of(target):
        return
    if metadata is not None and target.is_dir():
        damaged = identity.damaged_tokenizer(metadata, target)
        if not damaged:
            return
        if identity.damaged_tokenizer(metadata, source):
            log(f"WARNING: {target / damaged[0]} is missing or damaged, and {source} has another one: the tokenizer is left as it is")
            return
        log(f"WARNING: {target / damaged[0]} is missing or damaged: the tokenizer is copied again from {source}")
    shutil.copytree(source, scratch)
    integrity.digest_files(scratch, integrity.list_files(scratch), threads=1, sync=True)
    integrity.sync_directories(scratch)
    if target.is_dir():
        os.rename(target, old)
    os.rename(scratch, target)
    sync_directory(run.path)
    discard(old)


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the config of the previous start with the new one (two `model_dump(mode="json")`); return one line per change.

    Raises UserError that lists every change with which a checkpoint cannot be restored (model, optimizer kind, parameter dtype).
    """
    changes = classify_changes(dict(old), dict(new))
    refused = [f"{c.key}: {c.old!r} -> {c.new!r} ({c.why})" for c in changes if not c.allowed]
    if refused:
        raise UserError(f"cannot resume with the changed config: {'; '.join(refused)}; change it back, or start a new run_dir")
    return [f"resuming with {c.key}: {c.old!r} -> {c.new!r}" + (f" ({c.why})" if c.why else "") for c in changes]
