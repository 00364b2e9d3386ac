"""Saving checkpoints: written by Orbax in the background, sealed with an integrity manifest. Restoring: reader.py.

The steps of one save:

    training thread     join the previous save -> check that the state is finite -> make room -> Orbax copies device to host   (blocking)
    background thread   Orbax writes and commits -> metadata.json -> hash every file -> integrity.json -> retention deletes old steps

We use Orbax's free functions (`save_async`, `load`) on our own step directories, not its `training.Checkpointer`: that one keeps its own
list of steps, deletes by its own policy, and takes an incomplete step for the latest. Here the manifest decides what is complete.
Every process writes payload; process 0 alone renames, deletes and writes our files; the directory is shared by all processes. What
processes must agree on goes over JAX's coordination service, one channel per thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.rundir.provenance import own_version
from ridgeline.trainer.agreement import Agreement, PeerError
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import payload
from ridgeline.trainer.checkpoint.copies import Copies
from ridgeline.trainer.checkpoint.finite import Check, all_finite, nonfinite_leaves, short_list
from ridgeline.trainer.checkpoint.integrity import Damage
from ridgeline.trainer.checkpoint.local_tier import Candidate, LocalTier
from ridgeline.trainer.checkpoint.reader import CheckpointReader, State, error_text
from ridgeline.trainer.checkpoint.retention import Cadence, retention
from ridgeline.trainer.checkpoint.seal import FINITE, is_finite_verified, seal
from ridgeline.trainer.failures import CheckpointError, NumericalFailure

_FORMAT = 1
_POLL_S = 2.0
ABANDON_S = 5.0
"""Time for a save in flight to end when other processes are lost."""
_OWN_KEYS = frozenset({"format", "step", "process_count", "versions", "arrays", FINITE})


class Events(Protocol):
    """Receives checkpoint events (rundir.events.EventLog)."""

    def emit(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class SaveReport:
    """The part of a save that ran in the training thread."""

    step: int
    blocking_s: float
    """How long training was paused: the wait for the previous save, the finite check, and the copy to the host."""
    waited_s: float
    """The part of it spent waiting for the previous save."""
    saved: bool
    """False: this state is saved already, or the save failed immediately."""
    error: str | None = None
    """Why the save failed immediately. `wait`, `close` and the log report failures in the background."""


class Checkpointer(CheckpointReader):
    """Saves and restores the state of one run. All processes construct and call it in the same order.

    Args:
      directory: the run's checkpoint directory, on a filesystem shared by all processes; created at the first save.
      config: cadence, retention and behavior.
      clock: monotonic seconds, for the cadence by minutes.
      events: receives checkpoint_saved, checkpoint_refused, checkpoint_failed, checkpoint_deleted, checkpoint_set_aside and
        checkpoint_expired (process 0).
      log: receives warnings and notes for the user, one line each (process 0).
      check: `finite.all_finite`, jitted; a run passes one from its compilation cache.
      guard: called before each change of the directory (Lease.check).
      copies: copies each checkpoint elsewhere (process 0).
      local: more frequent checkpoints on each node.
    """

    def __init__(
        self,
        directory: Path | str,
        config: CheckpointConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        events: Events | None = None,
        log: Callable[[str], None] | None = None,
        check: Check | None = None,
        guard: Callable[[], None] = lambda: None,
        copies: Copies | None = None,
        local: LocalTier | None = None,
    ) -> None:
        super().__init__(directory, config, log=log)
        self._copies, self._local = copies, local
        self.restored_from: str | None = None
        """shared, local or neighbor: where the state of the last restore was."""
        self._check, self._guard = check or jax.jit(all_finite), guard
        self.failures = 0
        """Consecutive failed saves."""
        self._events = events
        self._background = Agreement("checkpoint-background")
        self._cadence = Cadence(config, clock, self._agreement)
        self._pending: _Pending | None = None
        self._last_error: str | None = None
        self._current: int | None = None
        self._saves = 0
        self._last_write_s: float | None = None
        self._repaired = False

    def should_save(self, step: int, last: bool = False) -> bool:
        """Return whether to save after `step`. Call it once per step in every process; `last`: no step follows."""
        return self._cadence.due(step, last)

    def save(self, step: int, state: State, metadata: Mapping[str, Any], block: bool = False) -> SaveReport:
        """Save a pytree of jax.Arrays as `step`, in the background unless `block` is set or config.asynchronous is false.

        The arrays may be donated as soon as this returns. A failed save is logged, and earlier checkpoints stay intact. Saving a step
        sets later steps aside: a run that was resumed from an earlier step replaces them. Do not call it when the last step was not
        finite: a later save counts as proof that training can continue from the one before it (retention.py).

        Raises:
          CheckpointError: config.max_failures consecutive saves have failed.
          NumericalFailure: the state is not finite; raised in every process, before anything is written or deleted.
        """
        assert not _OWN_KEYS & metadata.keys()
        start_s = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - start_s
        if step == self._current:
            return SaveReport(step, waited_s, waited_s, saved=False)
        self._check_finite(step, state)
        self._cadence.saved()
        self._saves += 1
        pending = _Pending(self._saves, step, self._describe(step, state, metadata), start_s)
        try:
            self._agreement.first(lambda: self._make_room(step))
            self._agreement.each(lambda: self._start(pending, state))
        except Exception as error:
            pending.error = error_text(error)
        pending.thread = threading.Thread(target=self._finish, args=(pending,), name=f"checkpoint-{step}", daemon=True)
        pending.thread.start()
        self._pending = pending
        blocking_s = time.perf_counter() - start_s
        if block or not self.config.asynchronous or pending.error is not None:
            self.wait()
            blocking_s = time.perf_counter() - start_s
        failed = self._pending is None and self._last_error is not None
        return SaveReport(step, blocking_s, waited_s, saved=not failed, error=self._last_error if failed else None)

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises CheckpointError when config.max_failures consecutive saves have failed."""
        if self._pending is not None:
            pending = self._pending
            assert pending.thread is not None
            pending.thread.join()  # a second Ctrl-C interrupts here; the save stays in flight
            self._pending = None
            self._last_error = pending.error
            self.failures = self.failures + 1 if pending.error else 0
            if pending.error is None:
                self._current = pending.step
        if self.failures >= self.config.max_failures:
            raise CheckpointError(f"{self.failures} consecutive saves failed, the last with: {self._last_error}")

    def abandon(self) -> None:
        """Wait at most ABANDON_S for the save in flight: it may need a process that is lost. Without a seal it is no checkpoint."""
        if self._pending is not None and self._pending.thread is not None:
            self._pending.thread.join(ABANDON_S)

    def last_write_s(self) -> float | None:
        """Return how long the last good save took from its start to its seal; None before the first."""
        return self._last_write_s

    def close(self, finish_copies: bool = True, finished: bool = False) -> None:
        """Wait for the save in flight, and for its copy, unless the next start is to finish it. `finished`: the run is complete.

        Raises CheckpointError when the last save failed: the state of that step is not on disk.
        """
        self.wait()
        if self._copies is not None:
            self._copies.close(finish_copies)
        if self._local is not None:
            self._local.close(finished=finished and self._last_error is None)
        if self._last_error is not None:
            raise CheckpointError(f"the last save failed: {self._last_error}")

    def restore(self, abstract_state: State, step: int | None = None, *, partial: bool = False) -> tuple[State, dict[str, Any]]:
        """Wait for the save in flight, and restore as CheckpointReader does; damaged steps are set aside.

        Without `step`, the newest complete step of both tiers is restored.
        """
        self.wait()
        if step is None and (found := self._restore_local()) is not None:
            return found
        self.restored_from = "shared"
        return super().restore(abstract_state, step, partial=partial)

    def has_local(self) -> bool:
        """Return whether the newest complete step is a local one."""
        return bool(self._newer_local())

    def begin(self, step: int) -> None:
        """Training begins at `step`, before its first step or after a return to an earlier one: later local steps no longer count."""
        if self._local is not None:
            self._local.begin(step)

    def local_due(self, step: int) -> bool:
        """Return whether to save locally after `step`."""
        return self._local is not None and self._local.due(step)

    def save_local(self, step: int, state: State, metadata: Mapping[str, Any]) -> bool:
        """Save on the nodes, in the background; return false when it was skipped, since the previous one is still being written.

        Raises NumericalFailure as `save`. Other failures are logged.
        """
        assert self._local is not None
        self._check_finite(step, state)
        return self._local.save(step, state, self._describe(step, state, metadata))

    def _newer_local(self) -> list[Candidate]:
        """Return the local steps that are newer than those in the run directory, newest first."""
        if self._local is None:
            return []
        shared = self.latest_step()
        return [candidate for candidate in self._local.candidates() if shared is None or candidate.step > shared]

    def _restore_local(self) -> tuple[State, dict[str, Any]] | None:
        """Restore the newest local step that can be read; None when the run directory's is newer, or the only one."""
        for candidate in self._newer_local():
            assert self._local is not None
            try:
                state, metadata, self.restored_from = self._local.restore(candidate)
            except (PeerError, RuntimeError) as error:
                if self._agreement.process == 0:
                    self._log(f"WARNING: the local checkpoint of step {candidate.step} cannot be read: {error}")
            else:
                return state, metadata
        return None

    def set_later_aside(self, step: int) -> None:
        """Set all steps after `step` aside: the run continues from `step`, and no restart may use them."""

        def work() -> None:
            for later in [other for other in dirs.steps(self.directory) if other > step]:
                self._set_aside(later, "superseded", f"the run is restarted from step {step}")

        self._agreement.first(work)
        self.begin(step)

    def _check_finite(self, step: int, state: State) -> None:
        """Raise NumericalFailure unless every number of the state is finite."""
        names = nonfinite_leaves(state, self._agreement, self._check)
        if not names:
            return
        self._emit("checkpoint_refused", step=step, leaves=names)
        if self._agreement.process == 0:
            self._log(f"WARNING: step {step} is not saved: not finite: {short_list(names)}")
        raise NumericalFailure(f"the state of step {step} is not finite ({short_list(names)})")

    def _start(self, pending: _Pending, state: State) -> None:
        self._guard()
        with jax.transfer_guard("allow"):
            pending.response = payload.save_async(dirs.step_dir(self.directory, pending.step), state)

    def _make_room(self, step: int) -> None:
        """Process 0, before Orbax writes: create the directory, and set aside steps that are not earlier than `step`."""
        self._guard()
        dirs.create(self.directory)
        self._repaired = False  # a failed save may have left something that could not be removed at once
        self._repair()
        for later in [other for other in dirs.steps(self.directory) if other >= step]:
            self._set_aside(later, "superseded", f"a run resumed from an earlier step is saving step {step}")
        if self.config.keep_last == 1:  # finite steps followed the newest checkpoint: the one before it can be deleted now
            self._retain(newest_proven=True)

    def _describe(self, step: int, state: State, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **metadata,
            "format": _FORMAT,
            "step": step,
            "process_count": self._agreement.count,
            "versions": {name: version(name) for name in ("jax", "flax", "orbax-checkpoint")} | {"ridgeline": own_version()},
            "arrays": payload.describe(state),
            FINITE: True,
        }

    def _finish(self, pending: _Pending) -> None:
        """The background thread: from Orbax's commit to retention. Its outcome is the same in every process."""
        try:
            self._background.each(lambda: self._await_payload(pending))
            self._guard()
            size_bytes = seal(dirs.step_dir(self.directory, pending.step), pending.metadata, self._background)
            self._background.first(self._retain)
        except Exception as error:
            pending.error = error_text(error)
            with contextlib.suppress(Exception):
                self._background.first(lambda: self._report_failure(pending))
        else:
            self._last_write_s = time.perf_counter() - pending.start_s
            if self._copies is not None:
                self._copies.saved(pending.step)
            self._emit("checkpoint_saved", step=pending.step, size_bytes=size_bytes, total_s=self._last_write_s)

    def _await_payload(self, pending: _Pending) -> None:
        """Wait until Orbax has committed in every process, or one has failed (Orbax itself would wait for it until its timeout)."""
        alarm = str(pending.number)
        try:
            if pending.error is not None:
                raise RuntimeError(pending.error)
            assert pending.response is not None
            pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-orbax")
            done = pool.submit(pending.response.result)
            pool.shutdown(wait=False)
            while not done.done():
                with contextlib.suppress(TimeoutError):
                    done.exception(timeout=_POLL_S)
                if not done.done() and self._background.alarmed(alarm):
                    return
            done.result()
        except Exception:
            self._background.raise_alarm(alarm)
            raise

    def _retain(self, newest_proven: bool = False) -> None:
        """Process 0: delete what `retention` returns. A failed deletion costs disk space and does not end the run."""
        self._guard()
        verified = [step for step in dirs.complete_steps(self.directory) if is_finite_verified(dirs.step_dir(self.directory, step))]
        old = retention(self.directory, self.config, verified, newest_proven=newest_proven)
        waiting = set() if self._copies is None else self._copies.pending()
        for step in [step for step in old.steps if step not in waiting]:
            try:
                dirs.delete(self.directory, step)
            except OSError as error:
                self._log(f"warning: cannot delete the old checkpoint of step {step}: {error_text(error)}")
            else:
                self._emit("checkpoint_deleted", step=step)
        for name in old.expired:
            try:
                dirs.remove(self.directory / name)
            except OSError as error:
                self._log(f"warning: cannot delete {name}: {error_text(error)}")
            else:
                self._emit("checkpoint_expired", name=name)

    def _report_failure(self, pending: _Pending) -> None:
        """Process 0: log the failure, and remove what was written so that a full disk has room for the next save."""
        self._guard()
        try:
            dirs.discard_unfinished(self.directory, pending.step)
            kept = dirs.complete_steps(self.directory)
            after = f"the last good checkpoint is step {kept[-1]}" if kept else "there is no earlier checkpoint"
        except OSError as error:
            after = f"its files could not be removed ({error_text(error)})"
        stops = self.failures + 1 >= self.config.max_failures
        count = f"{self.failures + 1} in a row" + ("" if stops else f", {self.config.max_failures} stop the run")
        ending = "training stops" if stops else "training continues"
        self._log(f"WARNING: saving step {pending.step} FAILED ({count}): {pending.error}; {after}; {ending}")
        self._emit("checkpoint_failed", step=pending.step, error=pending.error)

    def _complete_steps(self) -> list[int]:
        """Process 0: return the complete steps in ascending order, after repairing what a killed run left."""
        dirs.check_ours(self.directory)
        self._repair()
        return dirs.complete_steps(self.directory)

    def _skip_damaged(self, step: int, damage: Damage, problem: str) -> str:
        """Set a damaged step aside, where that is possible."""

        def work() -> str:
            try:
                return f"set aside as {self._set_aside(step, damage.reason, problem)}"
            except OSError as error:
                self._log(f"WARNING: {problem}; skipped, and cannot be set aside: {error.strerror}")
                return f"cannot be set aside: {error.strerror}"

        return f"{problem} ({self._agreement.first(work)})"

    def _restored(self, step: int) -> None:
        """The restored step does not need to be saved again."""
        self._current = step

    def _repair(self) -> None:
        """Process 0, before the first listing and before each save: see `directories.repair`."""
        if not self._repaired:
            self._guard()
            self._repaired = True
            for line in dirs.repair(self.directory):
                self._log(f"warning: {self.directory}: {line}")

    def _set_aside(self, step: int, reason: str, why: str) -> str:
        self._guard()
        name = dirs.set_aside(self.directory, step, reason).name
        self._log(f"WARNING: {why}; set aside {dirs.step_dir(self.directory, step)} as {name}")
        self._emit("checkpoint_set_aside", step=step, reason=reason)
        return name

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._events is not None and self._agreement.process == 0:
            self._events.emit(kind, **fields)


@dataclass
class _Pending:
    """A save in flight."""

    number: int
    """Counts the saves of this process, failed ones included: a step may be tried twice."""
    step: int
    metadata: dict[str, Any]
    start_s: float
    response: Any = None
    thread: threading.Thread | None = None
    error: str | None = None
