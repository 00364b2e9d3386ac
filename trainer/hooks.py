"""What reacts to the steps of a run: profiling, the watchdog, log lines, evaluation, saving. trainer/run.py lists them in their order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ridgeline.configs.format import format_seconds
from ridgeline.configs.schema import Config
from ridgeline.models.distillation import METRICS as DISTILLATION
from ridgeline.models.loss import MODULES
from ridgeline.models.moe.router import METRIC_PREFIX as ROUTER
from ridgeline.models.preference import METRICS as PREFERENCE
from ridgeline.observe.clocks import ClockWatch
from ridgeline.observe.compilation import CompilerWatch
from ridgeline.observe.goodput import LiveGoodput
from ridgeline.observe.profiler import Profiler, annotation
from ridgeline.observe.progress import Progress
from ridgeline.observe.step_timer import StepTimer, memory_metrics
from ridgeline.observe.writers import MetricWriter
from ridgeline.rundir.events import EventLog
from ridgeline.rundir.skipped_batches import NOTHING_SKIPPED, SkippedBatches
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.seal import EVALUATION
from ridgeline.trainer.evaluation import Evaluator, Result
from ridgeline.trainer.failures import NumericalFailure
from ridgeline.trainer.loop import Hook, StepEnd, StepResult
from ridgeline.trainer.stop import GracePeriod, Stop
from ridgeline.trainer.watchdog import Watchdog


@dataclass(frozen=True)
class Recorder:
    """Where hooks record what happens: event log, metric writers, terminal. The timer excludes their time from the step times."""

    events: EventLog
    writer: MetricWriter
    progress: Progress
    timer: StepTimer


@dataclass(eq=False)
class Profiling(Hook):
    """Begins and ends profile captures. Their cost is in no step's time."""

    profiler: Profiler
    recorder: Recorder
    clock: Callable[[], float] = time.monotonic

    def before_step(self, step: int, read_previous: Callable[[], None]) -> None:
        """Begin or end a capture where one is due."""
        recorder, was_active = self.recorder, self.profiler.active
        start_s = self.clock()
        capture = self.profiler.before_step(step, drain=read_previous)
        if capture is not None:
            recorder.progress.note(f"step {step}: profile in {capture}")
        if self.profiler.active != was_active or capture is not None:
            recorder.events.total("profile", self.clock() - start_s, step=step, active=self.profiler.active)
            recorder.timer.begin_step()

    def close(self, step: int) -> None:
        """End a capture in progress."""
        self.profiler.close(step)


@dataclass(eq=False)
class CompilationStep(Hook):
    """Gives recompilations the number of the step that caused them."""

    compiler: CompilerWatch

    def before_step(self, step: int, read_previous: Callable[[], None]) -> None:
        """Set the number of the step to be dispatched."""
        self.compiler.step = step + 1


@dataclass(eq=False)
class Heartbeat(Hook):
    """Reports each step that begins to the watchdog, and each finished one also to the progress bar."""

    watchdog: Watchdog
    progress: Progress

    def before_step(self, step: int, read_previous: Callable[[], None]) -> None:
        """Report the step that is about to be dispatched."""
        self.watchdog.begin(step + 1)

    def on_result(self, result: StepResult) -> None:
        """Report the step."""
        self.watchdog.step(result.usual_step_s, result.step)
        self.progress.advance(result.step)


@dataclass(eq=False)
class NonFiniteSteps(Hook):
    """Counts consecutive steps whose update is skipped: not finite, or above optimizer.skip_norm.

    Raises NumericalFailure after `limit` of them.
    """

    limit: int
    recorder: Recorder
    batches: SkippedBatches = NOTHING_SKIPPED
    """Of the run: the events name the batches of skipped updates."""
    count: int = 0
    """Consecutive non-finite steps up to the last one that was read. After one above optimizer.skip_norm the state is sound: it is 0."""

    def on_result(self, result: StepResult) -> None:
        """Record a step whose update was skipped."""
        skipped = int(result.metrics["bad_in_a_row"])
        step, loss, grad_norm = result.step, result.metrics["loss"], result.metrics["grad_norm"]
        self.count = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else min(self.count + 1, skipped)
        if not skipped:
            return
        batch = self.batches.batch_of(step - 1)
        self.recorder.events.emit("skipped_step", step=step, batch=batch, loss=loss, grad_norm=grad_norm, in_a_row=skipped)
        self.recorder.progress.note(
            f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}: "
            f"update skipped, batch {batch} ({skipped} in a row, {self.limit} stop the run)"
        )
        if self.count >= self.limit:
            raise NumericalFailure(f"{self.count} non-finite steps in a row ({self.steps(step)})")
        if skipped >= self.limit:
            raise NumericalFailure(
                f"the updates of {skipped} steps in a row were skipped (up to step {step}): "
                "is optimizer.skip_norm too low, or loss_spikes.policy=skip too strict?"
            )

    def steps(self, step: int) -> str:
        """Return the consecutive non-finite steps up to `step` as text."""
        first = step - self.count + 1
        return f"steps {first} to {step}" if first < step else f"step {step}"


@dataclass(eq=False)
class MetricLog(Hook):
    """Writes the metrics of every log step: values of that step, speeds of the window since the log step before.

    Args:
      goodput: kept by process 0.
      startup: returns the metrics of this start, written once, at the first log step after the first step. Process 0 only.
      clocks: reads the clocks of the devices.
    """

    config: Config
    recorder: Recorder
    goodput: LiveGoodput | None = None
    startup: Callable[[], Mapping[str, float]] | None = None
    clocks: ClockWatch | None = None
    count_spikes: Callable[[], int] | None = None
    """Returns the loss spikes of the run so far."""
    _batches_logged: int = field(default=0, init=False)

    def on_result(self, result: StepResult) -> None:
        """Write one record where the result belongs to a log step."""
        if result.param_norm is None:
            return
        step, recorder, waits = result.step, self.recorder, result.batches_read - self._batches_logged
        recorder.events.total("data_wait", recorder.timer.window_data_wait_s, count=waits, step=step)
        self._batches_logged = result.batches_read
        metrics = self._metrics(result, result.param_norm)
        recorder.events.emit("step", step=step, **{name.split("/")[1]: value for name, value in metrics.items()})
        totals = {} if self.goodput is None else self.goodput.metrics()
        if self.startup is not None and not result.first:
            totals |= self.startup()
            self.startup = None
        recorder.writer.write(step, metrics | totals)
        recorder.progress.update(step, metrics)

    def _metrics(self, result: StepResult, param_norm: float) -> dict[str, float]:
        values, tokens_per_step = result.metrics, self.config.data.batch_size * self.config.data.seq_len
        return {
            "train/loss": values["loss"],
            **({"train/accuracy": values["accuracy"]} if "accuracy" in values else {}),
            "train/grad_norm": values["grad_norm"],
            "train/param_norm": param_norm,
            "train/learning_rate": values["learning_rate"],
            "train/tokens": float(result.step * tokens_per_step),
            "train/target_tokens": values["weight"],
            "train/skipped_steps": values["skipped"],
            **({} if self.count_spikes is None else {"train/loss_spikes": float(self.count_spikes())}),
            **({"train/z_loss": values["z_loss"]} if self.config.loss.z_loss else {}),
            **{f"train/{name}": value for name, value in values.items() if name.startswith(MODULES)},
            **{f"train_router/{name.removeprefix(ROUTER)}": value for name, value in values.items() if name.startswith(ROUTER)},
            **{f"train_{name}": value for name, value in values.items() if name.startswith((PREFERENCE, DISTILLATION))},
            **self.recorder.timer.report(),
            **memory_metrics([device.memory_stats() for device in jax.local_devices()]),
            **({} if self.clocks is None else self.clocks.tick(result.step)),
        }


@dataclass(eq=False)
class Evaluation(Hook):
    """Evaluates every config.evaluation.every steps, and all batches after the last step. Polls for a stop before each batch."""

    config: Config
    evaluator: Evaluator
    recorder: Recorder
    stop: Stop
    watchdog: Watchdog

    def due(self, end: StepEnd) -> bool:
        """Return whether to evaluate after this step; never at a stop."""
        every = self.config.evaluation.every
        at_step = end.step == self.config.trainer.steps or (every > 0 and end.step % every == 0)
        return bool(self.config.evaluation.sets) and at_step and end.stopped_by is None

    def on_state(self, end: StepEnd) -> None:
        """Evaluate, and set the results of `end`; or its signal, when all processes stopped during the evaluation."""
        if end.stopped_by is not None:
            return
        step, recorder = end.step, self.recorder
        limit = None if step == self.config.trainer.steps else self.config.evaluation.max_batches

        def stopping() -> bool:
            self.watchdog.evaluation_batch()
            end.stopped_by = self.stop.agreed()
            return end.stopped_by is not None

        watched, recording = self.watchdog.evaluation(), recorder.events.phase("evaluation", step=step)
        with watched, annotation("ridge.evaluation"), recorder.timer.paused(), recording as record:
            results = self.evaluator.evaluate(end.state.params, max_batches=limit, stopping=stopping)
            if results is None:
                recorder.progress.note(f"step {step}: evaluation interrupted")
                end.evaluation = {}
                return
            record["results"] = {name: result.loss for name, result in results.items()}
        end.evaluation = results
        self._report(step, results)

    def _report(self, step: int, results: Mapping[str, Result]) -> None:
        for name, result in results.items():
            self.recorder.writer.write(step, result.metrics(name))
            self.recorder.progress.note(f"step {step}: {name} {result.describe()}")
        self.recorder.writer.flush()


@dataclass(eq=False)
class Saving(Hook):
    """Saves at the checkpoint cadence, and at a stop.

    Never after a non-finite step: that state must not displace a checkpoint that training can continue from. The save is deferred to the
    next finite step. Raises NumericalFailure where the run would end without one, and for a state that is not finite; before a save, what
    `check` raises.
    """

    config: Config
    checkpointer: Checkpointer
    metadata: Callable[[int], dict[str, Any]]
    nonfinite: NonFiniteSteps
    recorder: Recorder
    watchdog: Watchdog
    grace: GracePeriod
    check: Callable[[], None] | None = None
    """Called before a state is saved, in every process."""
    _deferred: bool = field(default=False, init=False)
    """A save was due after a non-finite step: it follows the next finite one."""
    _shared_due: bool = field(default=False, init=False)
    """A save in the run directory is due after the last step; otherwise a local one."""

    def on_result(self, result: StepResult) -> None:
        """Pass the step time to the comparison with the grace period."""
        self.grace.step_s = result.duration_s

    def due(self, end: StepEnd) -> bool:
        """Return whether to save after this step."""
        self._shared_due = self.checkpointer.should_save(end.step, last=end.last) or self._deferred
        return self._shared_due or self.checkpointer.local_due(end.step)

    def on_state(self, end: StepEnd) -> None:
        """Save the state, unless the last step was not finite."""
        ending = end.last or end.stopped_by is not None
        if not self._shared_due and not ending:
            if not self.nonfinite.count:
                self._save_locally(end.step, end.state)
            return
        if self.nonfinite.count:
            if ending or not self._deferred:
                self._skip(end.step, ending)
            self._deferred = True
            return
        self._deferred = False
        self._save(end.step, end.state, {name: result.loss for name, result in (end.evaluation or {}).items()})

    def _save(self, step: int, state: Any, losses: Mapping[str, float]) -> None:
        if self.check is not None:
            self.check()
        recorder, watched = self.recorder, self.watchdog.phase("save", self.watchdog.deadlines.save_s)
        recording = recorder.events.phase("save", step=step)
        with watched, annotation("ridge.save"), recorder.timer.paused(), recording, jax.transfer_guard("allow"):
            metadata = self.metadata(step) | ({EVALUATION: dict(losses)} if losses else {})
            report = self.checkpointer.save(step, state, metadata)
        self.grace.saved(report.blocking_s)
        values = {"train_save/blocking_s": report.blocking_s, "train_save/failures": float(self.checkpointer.failures)}
        recorder.writer.write(step, values)
        recorder.writer.flush()
        if report.saved:
            recorder.progress.note(f"step {step}: checkpoint (training paused for {format_seconds(report.blocking_s)})")

    def _save_locally(self, step: int, state: Any) -> None:
        """Save on the nodes. The next steps run while it is written."""
        if self.check is not None:
            self.check()
        recorder, watched = self.recorder, self.watchdog.phase("save", self.watchdog.deadlines.save_s)
        recording = recorder.events.phase("save", step=step, tier="local")
        with watched, annotation("ridge.save"), recorder.timer.paused(), recording, jax.transfer_guard("allow"):
            self.checkpointer.save_local(step, state, self.metadata(step))

    def _skip(self, step: int, ending: bool) -> None:
        """Report that nothing is saved. `ending`: no step follows in this start."""
        steps = self.nonfinite.steps(step)
        if ending and step == self.config.trainer.steps:
            raise NumericalFailure(f"the run ends in non-finite steps ({steps})")
        self.recorder.events.emit("checkpoint_skipped", step=step, in_a_row=self.nonfinite.count)
        if not ending:
            self.recorder.progress.note(f"step {step}: not saved, not finite: {steps}; the save follows the next finite step")
            return
        self.checkpointer.wait()
        newest = self.checkpointer.latest_step()
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is step {newest}"
        self.recorder.progress.note(f"step {step}: not saved, not finite: {steps}; {kept}")
