"""Copies each checkpoint of a run to checkpoint.copy_to, in a thread of process 0. Training never waits for it, and goes on without it.

What is left to do follows from the directory and the store: complete steps whose copy is absent or of another save. A copy that failed, or
that the end of a start interrupted, is therefore tried again: after a minute, after the next save, and by the next start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.rundir.directory import RunDir
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.integrity import ManifestDamage
from ridgeline.trainer.checkpoint.retention import best_steps, steps_to_delete
from ridgeline.trainer.checkpoint.seal import EVALUATION, loss_of
from ridgeline.trainer.checkpoint.store import Store

RETRY_S = 60.0
"""Time between two attempts to reach a store that failed."""


class Copies:
    """Copies the checkpoints of one run in the background.

    Args:
      run: the run directory; its run.json exists.
      run_id: of the run.
      config: with copy_to.
      log: receives failures, one line each.
      emit: receives checkpoint_copied and checkpoint_copy_failed.
      guard: called before each copy (Lease.check).

    Raises UserError when the URL cannot be used: a package is missing, or it is in the run directory.
    """

    def __init__(
        self,
        run: Path,
        run_id: str,
        config: CheckpointConfig,
        *,
        log: Callable[[str], None],
        emit: Callable[..., None],
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        assert config.copy_to is not None
        self._run, self._run_id, self._config = run, run_id, config
        self._log, self._emit, self._guard = log, emit, guard
        self._store = Store(config.copy_to)
        self._store.refuse_within(run)
        self._changed = threading.Condition()
        self._wanted = True
        self._saved: int | None = None
        self._closing = False
        self._ready = False
        self._thread = threading.Thread(target=self._work, name="checkpoint-copies", daemon=True)
        self._thread.start()

    def saved(self, step: int) -> None:
        """Copy what is new, after a save of `step`."""
        with self._changed:
            self._wanted, self._saved = True, step
            self._changed.notify_all()

    def pending(self) -> set[int]:
        """Return the newest step while it is not copied: retention must not delete it."""
        with self._changed:
            return {self._saved} if self._wanted and self._saved is not None else set()

    def close(self, finish: bool) -> None:
        """End the thread. `finish`: copy first what is left, unless the store fails; otherwise the next start does."""
        with self._changed:
            self._closing = True
            if not finish:
                return  # a daemon thread: it ends with the process, and what it wrote has no manifest
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closing)
                if not self._wanted:
                    return
                saved = self._saved
            good = self._attempt(saved)
            with self._changed:
                if good:
                    self._wanted = self._saved != saved
                elif self._closing:
                    return
                else:
                    self._changed.wait_for(lambda: self._closing, RETRY_S)

    def _attempt(self, saved: int | None) -> bool:
        """Copy what is missing; return whether all is there."""
        try:
            self._guard()
            if not self._ready:
                self._store.claim(self._run_id)
                self._ready = True
            self._store.keep_run(self._run)
            self._copy_missing(saved)
        except Exception as error:  # an outage of the store must not end a run
            text = " ".join(str(error).split())[:300] if isinstance(error, UserError | OSError) else f"{type(error).__name__}: {error}"
            self._log(f"WARNING: checkpoints are not copied to {self._store.url}: {text}")
            self._emit("checkpoint_copy_failed", step=saved, error=text)
            return False
        return True

    def _copy_missing(self, saved: int | None) -> None:
        root = RunDir(self._run).checkpoints
        for step in sorted(dirs.complete_steps(root), reverse=True):
            start_s = time.perf_counter()
            try:
                if self._store.manifest(step) == integrity.read_manifest(dirs.step_dir(root, step)):
                    continue
                copied = self._store.copy(root, step)
            except (ManifestDamage, FileNotFoundError, UserError):
                if step in dirs.complete_steps(root) and step == saved:
                    raise
                continue  # deleted by retention, or damaged: `ridge checkpoint verify` names it
            self._emit("checkpoint_copied", step=step, size_bytes=copied.size_bytes, total_s=time.perf_counter() - start_s)
        if saved is not None:
            self._retain(saved)

    def _retain(self, saved: int) -> None:
        """Delete copies that retention does not keep, and those of later steps: the run continued from an earlier one."""
        steps = self._store.steps()
        config, losses = self._config, {}
        if config.keep_best:
            found = {step: loss_of(self._store.metadata(step).get(EVALUATION), config.best_set) for step in steps}
            losses = {step: loss for step, loss in found.items() if loss is not None}
        kept = best_steps(losses, config.keep_best)
        old = steps_to_delete(steps, steps, keep_last=config.keep_last, keep_every=config.keep_every, kept=kept)
        for step in [*old, *(step for step in steps if step > saved)]:
            self._store.delete(step)
