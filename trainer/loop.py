"""The training loop: one visible order of operations.

    dispatch step s -> read the metrics of step s-1 while s runs -> put batch s+1 -> log, evaluate, save where they are due

The host never waits for the step it has just dispatched, except where something is due that needs its result (an evaluation, a save,
the end). A transfer guard makes any hidden copy between host and device an error.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from ridgeline.configs.format import format_seconds
from ridgeline.configs.schema import Config
from ridgeline.observe.clock_watch import ClockWatch
from ridgeline.observe.goodput import LiveGoodput
from ridgeline.observe.profiler import Profiler, annotation, step_annotation
from ridgeline.observe.progress import Progress
from ridgeline.observe.recompile import CompilerWatch
from ridgeline.observe.step_timer import StepTimer, memory_metrics
from ridgeline.observe.writers import MetricWriter
from ridgeline.rundir.events import EventLog
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.finite import NumericalFailure
from ridgeline.trainer.evaluation import Evaluator, SetResult
from ridgeline.trainer.grace import Grace
from ridgeline.trainer.state import TrainState
from ridgeline.trainer.step import Batch, Metrics
from ridgeline.trainer.stop import Stop, StopAsked
from ridgeline.trainer.watchdog import Watchdog


class Loader(Protocol):
    """Yields this process's rows of one step after another."""

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]: ...


@dataclass(frozen=True)
class Outcome:
    """How the loop ended."""

    state: TrainState
    steps: int
    """Steps taken in all, earlier runs included."""
    stopped_by: signal.Signals | None
    """The signal it stopped for; None when it reached its last step or its time."""
    finished: bool
    """The last step was reached."""
    evaluation: dict[str, SetResult]
    """The last evaluation, if any."""


@dataclass
class Loop:
    """The parts of a run, and the order in which they work."""

    config: Config
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    param_norm: Callable[[Any], jax.Array]
    put: Callable[[Mapping[str, np.ndarray]], Batch]
    loader: Loader
    evaluator: Evaluator
    checkpointer: Checkpointer
    save_metadata: Callable[[int], dict[str, Any]]
    timer: StepTimer
    writer: MetricWriter
    progress: Progress
    profiler: Profiler
    events: EventLog
    stop: Stop
    watchdog: Watchdog
    grace: Grace
    goodput: LiveGoodput | None = None
    """Kept by process 0."""
    startup: Callable[[], Mapping[str, float]] | None = None
    """Metrics of this start: asked for once, at the first log line after the first step. Only process 0 has them."""
    compiler: CompilerWatch | None = None
    """Told which step is under way."""
    clocks: ClockWatch | None = None
    """Asked for the devices' clocks at each log line."""
    clock: Callable[[], float] = time.monotonic
    _pending: _Pending | None = field(default=None, init=False)
    _window_waits: int = field(default=0, init=False)
    _bad_in_a_row: int = field(default=0, init=False)
    """Non-finite steps up to the last one whose metrics were read."""
    _owed: bool = field(default=False, init=False)
    """A save was due within a streak of non-finite steps: it follows the next finite step."""
    _started_s: float = field(default=0.0, init=False)
    began: bool = field(default=False, init=False)
    """Whether the first step is done."""

    def run(self, state: TrainState, start_step: int) -> Outcome:
        """Train from `start_step` to config.trainer.steps, or until asked to stop; save where due; return how it ended.

        Raises NumericalFailure after config.trainer.max_bad_steps non-finite steps in a row, for a state that is not finite where a save
        is due, and where the last save of the whole run would fall within a streak of non-finite steps.
        """
        steps = self.config.trainer.steps
        deadline_s = self.clock() + (self.config.trainer.stop_after_s or math.inf)
        step, results, stopped_by = start_step, dict[str, SetResult](), None
        self.watchdog.step(None)
        with self.events.phase("train", start_step=start_step), jax.transfer_guard("disallow"):
            batches = iter(self.loader)
            batch = self._next_batch(batches)
            self._begin(step)
            while step < steps and batch is not None:
                self._capture(step)
                if self.compiler is not None:
                    self.compiler.step = step + 1
                with step_annotation(step):
                    state, metrics = self.train_step(state, batch)
                step += 1
                norm = self.param_norm(state.params) if self._log_due(step) else None
                self._read_pending()  # the step before, while this one runs
                self._pending = _Pending(step, metrics, norm)
                if step < steps:
                    batch = self._next_batch(batches)

                stopped_by = self.stop.agreed()
                last = step == steps or stopped_by is not None or self._past(deadline_s)
                evaluate = self._evaluation_due(step)
                save = self.checkpointer.should_save(step, last=last) or stopped_by is not None or self._owed
                if last or evaluate or save or step == start_step + 1:
                    self._read_pending()
                if step == start_step + 1:
                    self._end_first_step()
                if evaluate and stopped_by is None:
                    results, stopped_by = self._evaluate(state, step)
                if save or stopped_by is not None:
                    self._save(state, step, ending=last or stopped_by is not None)
                if last or stopped_by is not None:
                    break
            self.profiler.close(step)
        if batch is None and step == start_step:
            stopped_by = self.stop.asked  # not a step was made: nothing to save
        return Outcome(state, step, stopped_by, step >= steps, results)

    def _begin(self, step: int) -> None:
        self._started_s = self.clock()
        self.progress.start(step)
        self.timer.start()

    def _capture(self, step: int) -> None:
        """Begin or end a profile capture where one is due; its cost is no step's time."""
        active = self.profiler.active
        start_s = self.clock()
        finished = self.profiler.before_step(step, drain=self._read_pending)
        if finished is not None:
            self.progress.note(f"step {step}: profile in {finished}")
        if self.profiler.active != active or finished is not None:
            self.events.total("profile", self.clock() - start_s, step=step, active=self.profiler.active)
            self.timer.begin_step()

    def _end_first_step(self) -> None:
        """The first step pays for loading the program and first touches: it is recorded apart and kept out of the step times."""
        self.events.total("first_step", self.clock() - self._started_s)
        self.began = True
        self.timer.start()

    def _log_due(self, step: int) -> bool:
        return step % self.config.trainer.log_every == 0 or step == self.config.trainer.steps

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.evaluation.every
        return bool(self.config.evaluation.sets) and (step == self.config.trainer.steps or (every > 0 and step % every == 0))

    def _past(self, deadline_s: float) -> bool:
        """Whether the time is up; process 0's clock decides for all."""
        if self.config.trainer.stop_after_s is None:
            return False
        past = self.clock() >= deadline_s
        if jax.process_count() == 1:
            return past
        from jax.experimental import multihost_utils

        with jax.transfer_guard("allow"):
            return bool(multihost_utils.broadcast_one_to_all(np.asarray(past)))

    def _next_batch(self, batches: Iterator[Mapping[str, np.ndarray]]) -> Batch | None:
        """Take the next rows from the loader (the wait is measured) and start their copy to the devices.

        A single process that is asked to stop while it waits gives up waiting: None. One of several may not: the others have gone on to a
        step that needs its rows.
        """
        start_s = self.clock()
        try:
            with annotation("ridge.data_wait"), self.stop.raising() if jax.process_count() == 1 else contextlib.nullcontext():
                rows = next(batches)
        except StopAsked:
            return None
        self.timer.waited(self.clock() - start_s)
        self._window_waits += 1
        return self.put(rows)

    def _read_pending(self) -> None:
        """Wait for the step before, count it, and log it where a log line is due."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with annotation("ridge.read_metrics"):
            values = {name: float(x) for name, x in jax.device_get(pending.metrics).items()}
        self.watchdog.step(self.timer.usual_step_s())
        self.grace.step_s = self.timer.step()
        self.progress.advance(pending.step)
        self._bad_in_a_row = int(values["bad_in_a_row"])
        if self._bad_in_a_row:
            self._bad_step(pending.step, values)
        if pending.param_norm is not None:
            self._log(pending.step, values, float(jax.device_get(pending.param_norm)))

    def _bad_step(self, step: int, values: Mapping[str, float]) -> None:
        in_a_row, limit = self._bad_in_a_row, self.config.trainer.max_bad_steps
        figures = f"loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        self.events.emit("skipped_step", step=step, loss=values["loss"], grad_norm=values["grad_norm"], in_a_row=in_a_row)
        self.progress.note(f"step {step}: {figures}: update skipped ({in_a_row} in a row, {limit} stop the run)")
        if in_a_row >= limit:
            raise NumericalFailure(f"{in_a_row} non-finite steps in a row ({self._streak(step)})")

    def _streak(self, step: int) -> str:
        """The non-finite steps up to `step`."""
        first = step - self._bad_in_a_row + 1
        return f"steps {first} to {step}" if first < step else f"step {step}"

    def _log(self, step: int, values: Mapping[str, float], param_norm: float) -> None:
        """Write one record; `values` are those of exactly this step, speeds those of the window since the last record."""
        tokens_per_step = self.config.data.batch_size * self.config.data.seq_len
        self.events.total("data_wait", self.timer.window_data_wait_s, count=self._window_waits, step=step)
        self._window_waits = 0
        metrics = {
            "train/loss": values["loss"],
            "train/accuracy": values["accuracy"],
            "train/grad_norm": values["grad_norm"],
            "train/param_norm": param_norm,
            "train/learning_rate": values["learning_rate"],
            "train/tokens": float(step * tokens_per_step),
            "train/target_tokens": values["weight"],
            "train/skipped_steps": values["skipped"],
            **({"train/z_loss": values["z_loss"]} if self.config.loss.z_loss else {}),
            **self.timer.report(),
            **memory_metrics([device.memory_stats() for device in jax.local_devices()]),
            **({} if self.clocks is None else self.clocks.tick(step)),
        }
        self.events.emit("step", step=step, **{name.split("/")[1]: value for name, value in metrics.items()})
        so_far = {} if self.goodput is None else self.goodput.metrics()
        if self.began and self.startup is not None:
            so_far |= self.startup()
            self.startup = None
        self.writer.write(step, metrics | so_far)
        self.progress.update(step, metrics)

    def _evaluate(self, state: TrainState, step: int) -> tuple[dict[str, SetResult], signal.Signals | None]:
        """Evaluate; return the results, or none and the signal for which all processes gave it up."""
        whole = step == self.config.trainer.steps
        limit = None if whole else self.config.evaluation.max_batches
        asked: list[signal.Signals | None] = [None]

        def stopping() -> bool:
            self.watchdog.step(None)
            asked[0] = self.stop.agreed()
            return asked[0] is not None

        with annotation("ridge.evaluation"), self.timer.paused(), self.events.phase("evaluation", step=step) as record:
            results = self.evaluator.evaluate(state.params, max_batches=limit, stopping=stopping)
            if results is None:
                self.progress.note(f"step {step}: evaluation given up")
                return {}, asked[0]
            record["results"] = {name: result.loss for name, result in results.items()}
        for name, result in results.items():
            self.writer.write(step, result.metrics(name))
            self.progress.note(f"step {step}: {name} {result.describe()}")
        self.writer.flush()
        return results, None

    def _save(self, state: TrainState, step: int, ending: bool) -> None:
        """Save what is not within a streak of non-finite steps; `ending`: no step follows in this start."""
        if self._bad_in_a_row:
            if ending or not self._owed:
                self._skip_save(step, ending)
            self._owed = True
            return
        self._owed = False
        watched = self.watchdog.phase("save")
        with watched, annotation("ridge.save"), self.timer.paused(), self.events.phase("save", step=step), jax.transfer_guard("allow"):
            report = self.checkpointer.save(step, state, self.save_metadata(step))
        self.grace.saved(report.blocking_s)
        self.writer.write(step, {"train_save/blocking_s": report.blocking_s, "train_save/failures": float(self.checkpointer.failures)})
        self.writer.flush()
        if report.saved:
            self.progress.note(f"step {step}: checkpoint (training stood still for {format_seconds(report.blocking_s)})")

    def _skip_save(self, step: int, ending: bool) -> None:
        """Report that nothing is saved: the state gives no finite step, and must not displace one that did."""
        if ending and step == self.config.trainer.steps:
            raise NumericalFailure(f"the run ends in non-finite steps ({self._streak(step)})")
        self.events.emit("checkpoint_skipped", step=step, in_a_row=self._bad_in_a_row)
        why = f"step {step}: not saved: not finite: {self._streak(step)}"
        if not ending:
            self.progress.note(f"{why}; the save follows the next finite step")
            return
        self.checkpointer.wait()
        newest = self.checkpointer.latest_step()
        self.progress.note(f"{why}; " + ("there is no checkpoint" if newest is None else f"the newest checkpoint is step {newest}"))


@dataclass(frozen=True)
class _Pending:
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: Metrics
    param_norm: jax.Array | None
