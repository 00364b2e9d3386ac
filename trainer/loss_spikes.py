"""The hook that acts on loss spikes: it reports them, limits the loss of a step's update, or takes the run back to before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ridgeline.configs.fault_schema import LossSpikesConfig
from ridgeline.rundir.events import read_events
from ridgeline.rundir.loss_spikes import END_EVENT, EVENT, Spike, SpikeDetector, loss_spikes, recent_losses
from ridgeline.rundir.skipped_batches import SkippedBatches, SkippedRange, write_skipped_batches
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.reader import error_text
from ridgeline.trainer.failures import NumericalFailure, WentBack
from ridgeline.trainer.hooks import Recorder
from ridgeline.trainer.loop import Hook, StepResult
from ridgeline.trainer.start import StartedRun

METADATA = "loss_spikes"
"""Key of the state of the detector in the metadata of a checkpoint."""
ROLLBACK = "rollback"
"""Kind of the event when the run goes back."""


@dataclass(eq=False)
class LossSpikes(Hook):
    """Reports loss spikes, and does what loss_spikes.policy says.

    All processes read the same losses and so decide alike. The limit of a step comes from the losses up to the second step before it: a
    batch is put on the devices while the step before it runs.

    Raises WentBack in every process when the run has been taken back, NumericalFailure after loss_spikes.max_rollbacks of them.
    """

    recorder: Recorder
    detector: SpikeDetector
    run: StartedRun
    checkpointer: Checkpointer
    skipped: SkippedBatches
    count: int = 0
    """Spikes of the run so far."""
    check: Callable[[], None] | None = None
    """Called before the run goes back, in every process: wrong bits are a cause of spikes too."""
    _first: bool = field(default=True, init=False)
    _agreement: Agreement = field(default_factory=lambda: Agreement("loss-spikes"), init=False)

    @property
    def config(self) -> LossSpikesConfig:
        """The section of the config."""
        return self.detector.config

    def next_limit(self) -> float:
        """Return the limit of the loss for the batch that is put on the devices next. Call it once per batch."""
        first, self._first = self._first, False
        return self.detector.earlier_limit if first else self.detector.limit

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run judges its steps as an uninterrupted one."""
        return {METADATA: {**self.detector.state(), "count": self.count}}

    def on_result(self, result: StepResult) -> None:
        """Record a spike when it is detected, and when it ends."""
        spike = self.detector.update(result.step, result.metrics["loss"])
        if spike is None:
            return
        self.count += not spike.ended
        fields = {key: value for key, value in asdict(spike).items() if key != "ended"}
        self.recorder.events.emit(END_EVENT if spike.ended else EVENT, **fields, grad_norm=result.metrics["grad_norm"])
        self.recorder.progress.note(spike.describe())
        if self.config.policy == "rollback" and not spike.ended:
            self._go_back(spike, result.step)

    def _go_back(self, spike: Spike, step: int) -> None:
        """Set the checkpoints since the first left-out batch aside, and keep the batches up to the one of `step` out of later starts."""
        if self.check is not None:
            self.check()
        ranges = self.skipped.ranges
        if len(ranges) >= self.config.max_rollbacks:
            raise NumericalFailure(f"a loss spike from step {spike.step} on, after {len(ranges)} rollbacks (loss_spikes.max_rollbacks)")
        before = max(0, spike.step - 1 - self.config.skip_before)  # steps of which nothing is left out
        first, end = self.skipped.batch_of(before), self.skipped.batch_of(step - 1) + 1
        skipped = SkippedBatches(ranges=[*ranges, SkippedRange(first=first, end=end, spike_step=spike.step)])
        self.checkpointer.wait()
        self.checkpointer.set_later_aside(before)  # first: a checkpoint of the spike does not fit the data without it
        self._agreement.first(lambda: write_skipped_batches(self.run.path, skipped))
        self.recorder.events.emit(ROLLBACK, step=step, spike_step=spike.step, first_batch=first, end_batch=end)
        raise WentBack(f"going back to step {before} at most, before the loss spike; batches {first} to {end - 1} are left out")


def watch_loss_spikes(
    config: LossSpikesConfig,
    recorder: Recorder,
    run: StartedRun,
    checkpointer: Checkpointer,
    skipped: SkippedBatches,
    start_step: int,
    restored: Mapping[str, Any] | None,
    log: Callable[[str], None],
) -> LossSpikes:
    """Return the hook with what the checkpoint knows of earlier losses.

    Args:
      start_step: steps taken so far.
      restored: metadata of the checkpoint; None at the first start. Where it lacks the losses (older versions), they come from the event
        log, only to warn: the logs of the processes may differ.
    """
    detector: SpikeDetector | None = None
    try:
        state = (restored or {})[METADATA]
        detector = SpikeDetector.restored(config, state)
        return LossSpikes(recorder, detector, run, checkpointer, skipped, int(state["count"]))
    except (KeyError, TypeError, ValueError):  # no checkpoint, or one of an older version, which may have the losses alone
        events = recorder.events
    try:
        entries = read_events(events.path) if events.restart else []
    except Exception as error:  # whatever a damaged log contains: it ends no run
        log(f"loss spikes are counted without those of earlier starts: {error_text(error)}")
        entries = []
    count = sum(spike.step <= start_step for spike in loss_spikes(entries, events.process))
    if detector is None:
        warned = config.policy == "warn"
        detector = SpikeDetector(config, recent_losses(entries, start_step, config.window, events.process) if warned else [])
    return LossSpikes(recorder, detector, run, checkpointer, skipped, count)
