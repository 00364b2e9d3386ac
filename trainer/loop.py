"""The training loop: one visible order of operations.

    dispatch step s -> read the metrics of step s-1 while s runs -> put batch s+1 on the devices -> evaluate and save where due

The host waits for the step it has just dispatched only where a hook needs its result (an evaluation, a save) and at the end. A transfer
guard turns every implicit copy between host and device into an error. What reacts to steps is a `Hook` (trainer/hooks.py); trainer/run.py
lists the hooks in the order in which they are called.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from ridgeline.configs.schema import TrainerConfig
from ridgeline.observe.profiler import annotation, step_annotation
from ridgeline.observe.step_timer import StepTimer
from ridgeline.rundir.events import EventLog
from ridgeline.trainer.evaluation import Result
from ridgeline.trainer.state import TrainState
from ridgeline.trainer.step import Batch, Metrics
from ridgeline.trainer.stop import Stop, StopRequested


class Loader(Protocol):
    """Yields this process's rows of one step after another."""

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]: ...


@dataclass(frozen=True)
class StepResult:
    """A finished step, read on the host while the next one runs."""

    step: int
    """Number of steps taken, this one included."""
    first: bool
    """The first step of this start; it includes loading the program."""
    metrics: Mapping[str, float]
    param_norm: float | None
    """Global L2 norm of the parameters; only at log steps."""
    duration_s: float
    usual_step_s: float | None
    """Median of the recent steps before this one; None when there are none."""
    batches_read: int
    """Batches taken from the loader in this start."""


@dataclass
class StepEnd:
    """The state after a step, for the hooks that are due."""

    step: int
    """Number of steps taken."""
    state: TrainState
    last: bool
    """No step follows in this start."""
    stopped_by: signal.Signals | None
    """The signal on which all processes stop after this step. A hook that polls for a stop sets it."""
    evaluation: dict[str, Result] | None = None
    """Results of the evaluation after this step; empty for an interrupted one, None for none."""


class Hook:
    """Reacts to steps. Each method does nothing unless a hook overrides it; the loop calls the hooks in the order of their list."""

    def before_step(self, step: int, read_previous: Callable[[], None]) -> None:
        """Run before a step is dispatched, after `step` steps. `read_previous` waits for the step that is running."""

    def on_result(self, result: StepResult) -> None:
        """Run when the metrics of a step have been read. Must not wait for a device: the next step is running."""

    def due(self, end: StepEnd) -> bool:
        """Return whether `on_state` should run after this step. Called once per step, in every process in the same order."""
        return False

    def on_state(self, end: StepEnd) -> None:
        """Use the state after a step, where due, and at every stop. The next step is not dispatched before this returns."""

    def close(self, step: int) -> None:
        """Run after the last step."""


@dataclass(frozen=True)
class Outcome:
    """How the loop ended."""

    state: TrainState
    steps: int
    """Steps taken in total, earlier starts included."""
    stopped_by: signal.Signals | None
    """The signal that stopped it; None when it reached its last step or its time limit."""
    finished: bool
    """The last step was reached."""
    evaluation: dict[str, Result]
    """Results of the last evaluation, if any."""

    def describe(self) -> str:
        """Return in one line how the loop ended."""
        if self.finished:
            return f"finished at step {self.steps}"
        return f"stopped at step {self.steps}" + ("" if self.stopped_by is None else f" by {self.stopped_by.name}")


@dataclass
class Loop:
    """The order of operations of a run."""

    config: TrainerConfig
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    param_norm: Callable[[Any], jax.Array]
    put: Callable[[Mapping[str, np.ndarray]], Batch]
    loader: Loader
    stop: Stop
    events: EventLog
    timer: StepTimer
    hooks: Sequence[Hook]
    clock: Callable[[], float] = time.monotonic
    began: bool = field(default=False, init=False)
    """The first step is done."""
    _pending: _Pending | None = field(default=None, init=False)
    _batches_read: int = field(default=0, init=False)
    _started_s: float = field(default=0.0, init=False)

    def run(self, state: TrainState, start_step: int) -> Outcome:
        """Train from `start_step` to config.steps, or until a stop is requested or config.stop_after_s has passed.

        Raises what its hooks raise, in particular NumericalFailure (hooks.NonFiniteSteps, hooks.Saving).
        """
        deadline_s = self.clock() + (self.config.stop_after_s or math.inf)
        step, results, stopped_by = start_step, dict[str, Result](), None
        with self.events.phase("train", start_step=start_step), jax.transfer_guard("disallow"):
            batches = iter(self.loader)
            batch = self._next_batch(batches)
            self._begin()
            while step < self.config.steps and batch is not None:
                self._before_step(step)
                with step_annotation(step):
                    state, metrics = self.train_step(state, batch)
                step += 1
                norm = self.param_norm(state.params) if self._log_due(step) else None
                self._read_pending()  # the previous step, while this one runs
                self._pending = _Pending(step, metrics, norm)
                if step < self.config.steps:
                    batch = self._next_batch(batches)

                stopped_by = self.stop.agreed()
                last = step == self.config.steps or stopped_by is not None or self._past(deadline_s)
                end = StepEnd(step, state, last, stopped_by)
                due = [hook for hook in self.hooks if hook.due(end)]
                if last or due or not self.began:
                    self._read_pending()
                if not self.began:
                    self._end_first_step()
                for hook in self.hooks:
                    if hook in due or end.stopped_by is not None:
                        hook.on_state(end)
                stopped_by, results = end.stopped_by, results if end.evaluation is None else end.evaluation
                if last or stopped_by is not None:
                    break
            for hook in self.hooks:
                hook.close(step)
        if batch is None and step == start_step:
            stopped_by = self.stop.requested  # no step was made: nothing to save
        return Outcome(state, step, stopped_by, step >= self.config.steps, results)

    def _begin(self) -> None:
        self._started_s = self.clock()
        self.timer.start()

    def _before_step(self, step: int) -> None:
        for hook in self.hooks:
            hook.before_step(step, self._read_pending)

    def _end_first_step(self) -> None:
        """The first step includes loading the program and first memory touches: record it apart, and exclude it from the step times."""
        self.events.total("first_step", self.clock() - self._started_s)
        self.began = True
        self.timer.start()

    def _log_due(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.config.steps

    def _past(self, deadline_s: float) -> bool:
        """Return whether the time limit has passed; process 0's clock decides for all."""
        if self.config.stop_after_s is None:
            return False
        past = self.clock() >= deadline_s
        if jax.process_count() == 1:
            return past
        from jax.experimental import multihost_utils

        with jax.transfer_guard("allow"):
            return bool(multihost_utils.broadcast_one_to_all(np.asarray(past)))

    def _next_batch(self, batches: Iterator[Mapping[str, np.ndarray]]) -> Batch | None:
        """Take the next rows from the loader, measuring the wait, and start their copy to the devices.

        Returns None when a single process is asked to stop while it waits. With several processes the wait goes on: the others have
        dispatched a step that needs these rows.
        """
        start_s = self.clock()
        try:
            with annotation("ridge.data_wait"), self.stop.raising() if jax.process_count() == 1 else contextlib.nullcontext():
                rows = next(batches)
        except StopRequested:
            return None
        self.timer.waited(self.clock() - start_s)
        self._batches_read += 1
        return self.put(rows)

    def _read_pending(self) -> None:
        """Wait for the previous step and pass its result to the hooks."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with annotation("ridge.read_metrics"):
            metrics = {name: float(x) for name, x in jax.device_get(pending.metrics).items()}
        usual_s = self.timer.usual_step_s()
        duration_s = self.timer.step()
        norm = None if pending.param_norm is None else float(jax.device_get(pending.param_norm))
        result = StepResult(pending.step, not self.began, metrics, norm, duration_s, usual_s, self._batches_read)
        for hook in self.hooks:
            hook.on_result(result)


@dataclass(frozen=True)
class _Pending:
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: Metrics
    param_norm: jax.Array | None
