"""Time saves and restores of the whole training state, and the scratch directory they and the loop benchmark write to."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig, Config
from ridgeline.measure.step import Session
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class CheckpointTimes:
    """Saves and restores of the whole state."""

    blocking_s: list[float]
    """Time each save blocks training."""
    write_s: list[float]
    """From the start of each save until the checkpoint is complete."""
    restore_s: list[float]
    """Time to read and verify, from the page cache where the file system has one."""
    size_bytes: int


def measure_checkpoint(session: Session, directory: Path) -> CheckpointTimes:
    """Save and restore the state `repeats` times each, with the config's checkpoint settings, keeping only the last checkpoint."""
    config = session.config.checkpoint.model_copy(update={"keep_last": 1, "keep_every": 0})
    checkpointer = Checkpointer(directory / "checkpoints", config)
    state, tokenizer = session.take_state(), {"kind": "bench", "config": session.config.name}
    checkpointer.save(1, state, tokenizer, block=True)  # not timed: the first save also allocates host memory
    blocking_s, write_s = [], []
    for step in range(2, session.repeats + 2):
        blocking_s.append(checkpointer.save(step, state, tokenizer).blocking_s)
        checkpointer.wait()
        write_s.append(checkpointer.last_write_s() or 0.0)
    checkpointer.close()
    newest = directories.step_dir(checkpointer.directory, session.repeats + 1)
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    del state
    restore_s = []
    for _ in range(session.repeats):
        restored, seconds = _restore(directory, config, session)
        restore_s.append(seconds)
        session.keep_state(restored)
        del restored
    return CheckpointTimes(blocking_s, write_s, restore_s, size)


def _restore(directory: Path, config: CheckpointConfig, session: Session) -> tuple[Any, float]:
    session.keep_state(None)
    reader = CheckpointReader(directory / "checkpoints", config)
    begun = time.perf_counter()
    state, _ = reader.restore(session.parts.abstract)
    return state, time.perf_counter() - begun


@contextlib.contextmanager
def scratch(config: Config) -> Iterator[Path]:
    """Create a temporary directory on the file system of the run directory, shared by all processes, and remove it afterwards.

    Raises UserError when it cannot be created. The run directory itself is not touched.
    """
    parent = config.directory.absolute().parent
    while not parent.is_dir():
        parent = parent.parent

    def make() -> str:
        try:
            return tempfile.mkdtemp(prefix=".ridge-bench-", dir=parent)
        except OSError as error:
            raise UserError(f"cannot write to {parent}, the parent of the run directory {config.directory}: {error.strerror}") from None

    agreement = Agreement("bench-scratch")
    directory = Path(agreement.first(make))
    with _sigterm_as_ctrl_c():
        try:
            yield directory
        finally:
            agreement.first(lambda: shutil.rmtree(directory, ignore_errors=True))


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a canceled job removes its scratch directory."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
