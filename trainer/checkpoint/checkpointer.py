"""Checkpoints: saved by Orbax in the background, sealed with an integrity manifest, verified before they are restored.

The way of one save:

    training thread     join the save before -> check that the state is finite -> make room -> Orbax copies device to host   (blocking)
    background thread   Orbax writes and commits -> metadata.json -> hash every file -> integrity.json -> delete what retention lets go

We use Orbax's free functions (`save_async`, `load`) on our own step directories rather than its `training.Checkpointer`: that one keeps
its own list of steps, deletes by its own policy and takes an incomplete step for the latest, and naming, completeness and retention are
exactly what the manifest decides here. Every process writes and reads payload; process 0 alone renames, deletes and writes our files;
the directory is shared by all. What processes must agree on goes over JAX's coordination service, one channel per thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.agreement import Agreement, PeerError
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import payload
from ridgeline.trainer.checkpoint.finite import Check, NumericalFailure, all_finite, listed, nonfinite_leaves
from ridgeline.trainer.checkpoint.integrity import Damage
from ridgeline.trainer.checkpoint.retention import Cadence, steps_to_delete
from ridgeline.trainer.checkpoint.seal import JUDGED, METADATA, DamagedError, check_digests, check_names, is_judged, seal

_FORMAT = 1
_POLL_S = 2.0
_MAX_TEXT = 600
_LARGE_BYTES = 1 << 20
LEAVE_S = 5.0
"""A save in flight gets so long when other processes are gone."""
_OWN_KEYS = frozenset({"format", "step", "process_count", "versions", "arrays", JUDGED})

State = Any


class CheckpointError(RuntimeError):
    """Saving failed so often, or at such a point, that going on would lose work. Earlier checkpoints are intact."""


class Events(Protocol):
    """Where checkpoint events go (rundir.events.EventLog)."""

    def emit(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class SaveReport:
    """What one call of `save` did in the training thread."""

    step: int
    blocking_s: float
    """Time training stood still: waiting for the save before, and the copy to the host."""
    waited_s: float
    """The part of it spent waiting for the save before."""
    saved: bool
    """False: this very state is in this step already, or the save failed."""
    error: str | None = None
    """Why the save failed at once; a failure in the background is told by `wait`, `close` and the log."""


class Checkpointer:
    """Saves and restores the state of one run. All processes construct and call it alike.

    Args:
      directory: the run's checkpoint directory, on a filesystem all processes share; made at the first save.
      config: cadence, retention and behaviour.
      clock: monotonic seconds, for the cadence by minutes.
      events: receives checkpoint_saved, checkpoint_refused, checkpoint_failed, checkpoint_deleted and checkpoint_set_aside (process 0).
      log: receives warnings and notes for the user, one line each (process 0).
      read_only: never rename or delete anything (for a reader beside a training run). `save` is not allowed.
      check: `finite.all_finite`, jitted; a run passes one that its compilation cache knows.
    """

    def __init__(
        self,
        directory: Path | str,
        config: CheckpointConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        events: Events | None = None,
        log: Callable[[str], None] | None = None,
        read_only: bool = False,
        check: Check | None = None,
    ) -> None:
        self._check = check or jax.jit(all_finite)
        self.directory, self.config, self.read_only = Path(directory).absolute(), config, read_only
        self.failures = 0
        """Failed saves in a row."""
        self._log, self._events = log or logging.getLogger("ridgeline").warning, events
        self._agreement, self._background = Agreement("checkpoint"), Agreement("checkpoint-background")
        self._cadence = Cadence(config, clock, self._agreement)
        self._pending: _Pending | None = None
        self._last_error: str | None = None
        self._current: int | None = None
        self._saves = 0
        self._last_write_s: float | None = None
        self._mended = False

    # -- saving ---------------------------------------------------------------------------------------------------------------------

    def should_save(self, step: int, last: bool = False) -> bool:
        """Whether to save after `step`. Call it once per step in every process; `last`: no step follows."""
        return self._cadence.due(step, last)

    def save(self, step: int, state: State, metadata: Mapping[str, Any], block: bool = False) -> SaveReport:
        """Save a pytree of jax.Arrays as `step`, in the background unless `block` or the config says otherwise.

        The arrays may be donated as soon as this returns. A failing save is reported through the log and leaves what was saved before
        intact. Saving a step sets later steps aside: they belong to a branch that was left by restoring an earlier one. Never call it
        where the last step made was not finite: a save is taken to prove the one before it.

        Raises CheckpointError when config.max_failures saves in a row have failed, and NumericalFailure, in every process, for a state
        that is not finite: nothing is written or deleted then.
        """
        assert not self.read_only and not _OWN_KEYS & metadata.keys()
        start_s = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - start_s
        if step == self._current:
            return SaveReport(step, waited_s, waited_s, saved=False)
        self._judge(step, state)
        self._cadence.saved()
        self._saves += 1
        pending = _Pending(self._saves, step, self._describe(step, state, metadata), start_s)
        try:
            self._agreement.first(lambda: self._make_room(step))
            self._agreement.each(lambda: self._start(pending, state))
        except Exception as error:
            pending.error = _text(error)
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
        """Wait for the save in flight, if any. Raises CheckpointError when config.max_failures saves in a row have failed."""
        if self._pending is not None:
            pending = self._pending
            assert pending.thread is not None
            pending.thread.join()  # a second Ctrl-C here leaves the save in flight
            self._pending = None
            self._last_error = pending.error
            self.failures = self.failures + 1 if pending.error else 0
            if pending.error is None:
                self._current = pending.step
        if self.failures >= self.config.max_failures:
            raise CheckpointError(f"{self.failures} saves in a row failed, the last with: {self._last_error}")

    def leave(self) -> None:
        """Give the save in flight LEAVE_S to end: processes are gone whose word it may need. Without a seal it is no checkpoint."""
        if self._pending is not None and self._pending.thread is not None:
            self._pending.thread.join(LEAVE_S)

    def last_write_s(self) -> float | None:
        """Return how long the last good save took from its start to its seal, written in the background; None before the first."""
        return self._last_write_s

    def close(self) -> None:
        """Wait for the save in flight. Raises CheckpointError when the last save failed: the state of that step is not on disk."""
        self.wait()
        if self._last_error is not None:
            raise CheckpointError(f"the last save failed: {self._last_error}")

    def _judge(self, step: int, state: State) -> None:
        """Raise NumericalFailure unless every number of the state is finite."""
        names = nonfinite_leaves(state, self._agreement, self._check)
        if not names:
            return
        self._emit("checkpoint_refused", step=step, leaves=names)
        if self._agreement.process == 0:
            self._log(f"WARNING: step {step} is not saved: not finite: {listed(names)}")
        raise NumericalFailure(f"the state of step {step} is not finite ({listed(names)})")

    def _start(self, pending: _Pending, state: State) -> None:
        with jax.transfer_guard("allow"):
            pending.response = payload.save_async(dirs.step_dir(self.directory, pending.step), state)

    def _make_room(self, step: int) -> None:
        """Process 0, before Orbax writes: the directory exists and is ours, and nothing is in the way of the step."""
        dirs.create(self.directory)
        self._mended = False  # a failed save may have left something that could not be removed at once
        self._mend()
        for later in [other for other in dirs.steps(self.directory) if other >= step]:
            self._set_aside(later, "superseded", f"a run resumed from an earlier step is saving step {step}")
        if self.config.keep_last == 1:  # finite steps were made from the newest: the one before it, kept until now, makes room
            self._retain(newest_tried=True)

    def _describe(self, step: int, state: State, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **metadata,
            "format": _FORMAT,
            "step": step,
            "process_count": self._agreement.count,
            "versions": {name: version(name) for name in ("jax", "flax", "orbax-checkpoint", "ridgeline")},
            "arrays": payload.describe(state),
            JUDGED: True,
        }

    def _finish(self, pending: _Pending) -> None:
        """The background thread: from Orbax's commit to retention. Its outcome is the same in every process."""
        try:
            self._background.each(lambda: self._await_payload(pending))
            size_bytes = seal(dirs.step_dir(self.directory, pending.step), pending.metadata, self._background)
            self._background.first(self._retain)
        except Exception as error:
            pending.error = _text(error)
            with contextlib.suppress(Exception):
                self._background.first(lambda: self._report_failure(pending))
        else:
            self._last_write_s = time.perf_counter() - pending.start_s
            self._emit("checkpoint_saved", step=pending.step, size_bytes=size_bytes, total_s=self._last_write_s)

    def _await_payload(self, pending: _Pending) -> None:
        """Wait until Orbax has written and committed in every process, or one has failed (Orbax would wait for it to its time limit)."""
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

    def _retain(self, newest_tried: bool = False) -> None:
        """Process 0: delete what `steps_to_delete` lets go. A deletion that fails costs disk space, not the run."""
        complete, config = dirs.complete_steps(self.directory), self.config
        judged = [step for step in complete if is_judged(dirs.step_dir(self.directory, step))]
        for step in steps_to_delete(complete, judged, keep_last=config.keep_last, keep_every=config.keep_every, newest_tried=newest_tried):
            try:
                dirs.delete(self.directory, step)
            except OSError as error:
                self._log(f"warning: cannot delete the old checkpoint of step {step}: {_text(error)}")
            else:
                self._emit("checkpoint_deleted", step=step)

    def _report_failure(self, pending: _Pending) -> None:
        """Process 0: say it loudly and remove what was written, so that a full disk is not fuller than before."""
        try:
            dirs.discard_unfinished(self.directory, pending.step)
            kept = dirs.complete_steps(self.directory)
            after = f"the last good checkpoint is step {kept[-1]}" if kept else "there is no earlier checkpoint"
        except OSError as error:
            after = f"what it left could not be removed ({_text(error)})"
        count = f"{self.failures + 1} in a row, {self.config.max_failures} stop the run"
        self._log(f"WARNING: saving step {pending.step} FAILED ({count}): {pending.error}; {after}; training goes on")
        self._emit("checkpoint_failed", step=pending.step, error=pending.error)

    # -- restoring ------------------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the complete steps in ascending order. Raises UserError for an unreadable or foreign directory."""
        return self._agreement.first(self._complete_steps)

    def latest_step(self) -> int | None:
        """Return the newest complete step, or None. Raises UserError for an unreadable or foreign directory."""
        steps = self.steps()
        return steps[-1] if steps else None

    def set_later_aside(self, step: int) -> None:
        """Set all steps after `step` aside: a run goes on from there in another way, and no restart may take the former ones."""

        def work() -> None:
            for later in [other for other in dirs.steps(self.directory) if other > step]:
                self._set_aside(later, "superseded", f"the run is restarted from step {step}")

        self._agreement.first(work)

    def has_checkpoints(self) -> bool:
        """Whether there is anything to resume from: a complete step, or one that was complete before it was found damaged.

        A run whose very first save was interrupted has none and starts anew; one with only damaged steps must not, so `restore` refuses.
        """
        return self._agreement.first(lambda: bool(self._complete_steps() or dirs.damaged_steps(self.directory)))

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Return metadata.json of a complete step. Raises UserError when it cannot be read."""

        def read() -> dict[str, Any]:
            path = dirs.step_dir(self.directory, step) / METADATA
            dirs.check_complete(self.directory, step)
            try:
                return json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {_text(error)}") from error

        return self._agreement.first(read)

    def restore(self, abstract_state: State, step: int | None = None, *, partial: bool = False) -> tuple[State, dict[str, Any]]:
        """Restore the newest good step, or exactly `step`, onto the shardings of `abstract_state`; return the state and its metadata.

        `abstract_state`: ShapeDtypeStructs with NamedShardings, on any mesh and process count. `partial`: a subset of what was saved.
        A damaged step is named, set aside (unless read_only) and passed over.

        Raises UserError: nothing good to restore; `step` missing or damaged; the state does not fit (the step is then left in place).
        Raises CheckpointError: Orbax cannot load a step that is as it was written.
        """
        self.wait()
        problems = []
        for candidate in self._candidates(step):
            try:
                restored = self._restore_step(candidate, abstract_state, partial)
            except DamagedError as damaged:
                problems.append(self._pass_over(candidate, damaged.damage))
            else:
                self._current = candidate
                return restored
        others = f"; complete: {', '.join(map(str, self.steps())) or 'none'}" if step is not None else ""
        raise UserError(f"no good checkpoint in {self.directory}: " + "; ".join(problems) + others)

    def _complete_steps(self) -> list[int]:
        """Process 0: the complete steps in ascending order, after mending what a kill left."""
        dirs.check_ours(self.directory)
        self._mend()
        return dirs.complete_steps(self.directory)

    def _candidates(self, wanted: int | None) -> list[int]:
        """Return the complete steps, newest first, or only the wanted one. Raises UserError when there is none."""
        complete = self.steps()
        if wanted is not None:
            self._agreement.first(lambda: dirs.check_complete(self.directory, wanted))
        if not complete:
            damaged = self._agreement.first(lambda: dirs.damaged_steps(self.directory))
            aside = f", only damaged ones set aside earlier: {', '.join(damaged)}" if damaged else ""
            raise UserError(f"no checkpoint in {self.directory}{aside}")
        return [wanted] if wanted is not None else complete[::-1]

    def _restore_step(self, step: int, abstract_state: State, partial: bool) -> tuple[State, dict[str, Any]]:
        """Verify and load one step. Raises DamagedError with what is wrong with it.

        The small files are verified first: metadata.json and Orbax's indices can then be trusted. The large ones, which hold nothing but
        numbers, are verified *while* they are loaded, so that the disk is read once; no number is returned before the verdict. Several
        processes verify first: one that failed to load damaged data would leave the others waiting inside Orbax.
        """
        path = dirs.step_dir(self.directory, step)
        manifest = check_names(path, self._agreement)
        small = [name for name, entry in manifest.items() if entry.size_bytes < _LARGE_BYTES]
        large = [name for name in manifest if name not in set(small)] if self.config.verify else []
        check_digests(path, manifest, small if self.config.verify else [], self._agreement)
        metadata = self.read_metadata(step)
        payload.check_matches(metadata["arrays"], abstract_state, partial=partial, where=str(path))
        if self._agreement.count > 1:
            check_digests(path, manifest, large, self._agreement)
            return self._load(path, abstract_state, partial), metadata
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-verify") as pool:
            verdict = pool.submit(check_digests, path, manifest, large, self._agreement)
            try:
                state = self._load(path, abstract_state, partial)
            finally:
                verdict.result()  # damage explains an error of the load, and outranks it
        return state, metadata

    def _load(self, path: Path, abstract_state: State, partial: bool) -> State:
        try:
            with jax.transfer_guard("allow"):
                return jax.block_until_ready(payload.load(path, abstract_state, partial=partial))
        except Exception as error:
            hint = "" if self.config.verify else "; with checkpoint.verify=true a damaged step is passed over"
            raise CheckpointError(f"{path} cannot be loaded: {_text(error)}{hint}") from error

    def _pass_over(self, step: int, damage: list[Damage]) -> str:
        """Set a damaged step aside, or only warn when read_only; return what is wrong with it."""
        more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
        problem = f"checkpoint of step {step} is damaged: {damage[0]}{more}"
        if not self.read_only:
            name = self._agreement.first(lambda: self._set_aside(step, damage[0].reason, problem))
            return f"{problem} (set aside as {name})"
        if self._agreement.process == 0:
            self._log(f"WARNING: {problem}; passed over")
        return problem

    # -- shared ---------------------------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Process 0 of a writer, before its first look and before each save: see `checkpoint_dirs.mend`."""
        if not self._mended and not self.read_only:
            self._mended = True
            for line in dirs.mend(self.directory):
                self._log(f"warning: {self.directory}: {line}")

    def _set_aside(self, step: int, reason: str, why: str) -> str:
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
    """Counts the saves of this process, failed ones too: a step may be tried twice."""
    step: int
    metadata: dict[str, Any]
    start_s: float
    response: Any = None
    thread: threading.Thread | None = None
    error: str | None = None


def _text(error: BaseException) -> str:
    """Say in one line what went wrong, without the pages of settings that TensorStore adds."""
    text = " ".join(str(error).split("[tensorstore_spec")[0].split())
    name = "" if isinstance(error, PeerError | UserError) else f"{type(error).__name__}: "
    return name + (text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ...")
