"""Loss spikes: detected during training from the losses of earlier steps, recorded in the event log, and read from it.

A spike is CONSECUTIVE or more steps whose loss exceeds the median of the last losses (`window`) by more than `sigmas` standard deviations
and by more than `min_rise`, of the section loss_spikes of the config. The standard deviation is 1.4826 times the median absolute deviation
(MAD). Losses above the limit are not part of the window, so a spike does not hide the next. It ends with the first loss below the limit;
after as many steps above it as the window has, the loss has not recovered, and the window begins anew. Losses that are not finite are
skipped steps, not spikes.

Single steps far above the limit are batches of unusual text: on 27 public loss curves of GPT-2 models of 124 M to 1.5 B parameters (215,677
steps, github.com/KellerJordan/modded-nanogpt) they reach 27 standard deviations, two in a row 6.2, three in a row 2.7. CONSECUTIVE and five
standard deviations were chosen on these curves, which therefore give no false alarm; five small runs of batches of 128 to 2,048 tokens
(9,382 steps), taken after the choice, gave none either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ridgeline.configs.fault_schema import LossSpikesConfig
from ridgeline.rundir.events import Event
from ridgeline.rundir.noise import median

EVENT, END_EVENT = "loss_spike", "loss_spike_end"
"""Kinds of the events of a spike that was detected, and of its end."""
FEWEST = 32
"""Losses from which on steps are judged."""
CONSECUTIVE = 3
"""Steps above the limit from which on they are a spike."""


@dataclass(frozen=True)
class Spike:
    """A loss spike."""

    step: int
    """Its first step."""
    loss: float
    """The highest so far."""
    usual: float
    """Median of the losses before it."""
    sigma: float
    """Their standard deviation, from the MAD."""
    steps: int = CONSECUTIVE
    """Steps above the limit so far."""
    ended: bool = False
    recovered: bool = False
    """At its end."""

    @property
    def sigmas(self) -> float:
        """Its rise over the median in standard deviations."""
        return (self.loss - self.usual) / self.sigma if self.sigma > 0 else math.inf

    def describe(self) -> str:
        """Return the spike in one line."""
        usual = f"the median of the steps before is {self.usual:.4g}, sigma {self.sigma:.2g}"
        if not self.ended:
            return f"loss spike since step {self.step}: up to {self.loss:.4g}; {usual}"
        ended = "recovered" if self.recovered else "not recovered"
        return f"loss spike of {self.steps} steps from step {self.step} on: up to {self.loss:.4g}, {ended}; {usual}"


@dataclass
class SpikeDetector:
    """Finds spikes in losses that are given one step after another."""

    config: LossSpikesConfig = field(default_factory=LossSpikesConfig)
    losses: list[float] = field(default_factory=list)
    """The last losses below the limit, at most config.window."""
    high: Spike | None = None
    """Steps above the limit, not ended: a spike from CONSECUTIVE steps on."""
    earlier_limit: float = math.inf
    """`limit` before the last loss was known."""
    limit: float = field(default=math.inf, init=False)
    """Loss above which the next step counts as high; infinite while there are too few to judge."""

    def __post_init__(self) -> None:
        self.limit = self._next_limit()

    @classmethod
    def restored(cls, config: LossSpikesConfig, state: Mapping[str, Any]) -> SpikeDetector:
        """Return a detector with what `state` returned, to go on as that one. Raises KeyError, TypeError."""
        high = None if state["high"] is None else Spike(**state["high"])
        earlier = math.inf if state["earlier_limit"] is None else float(state["earlier_limit"])
        return cls(config, [float(loss) for loss in state["losses"]][-config.window :], high, earlier)

    def state(self) -> dict[str, Any]:
        """Return all but the config, as JSON values."""
        earlier = None if math.isinf(self.earlier_limit) else self.earlier_limit
        return {"losses": self.losses, "high": self.high and asdict(self.high), "earlier_limit": earlier}

    def update(self, step: int, loss: float) -> Spike | None:
        """Return the spike that is detected or ends with this step; None at other steps."""
        found = self._judge(step, loss) if math.isfinite(loss) else None
        self.earlier_limit, self.limit = self.limit, self._next_limit()
        return found

    def _judge(self, step: int, loss: float) -> Spike | None:
        if (high := self._above(step, loss)) is None:
            return self._end(loss, recovered=True)
        self.high = high
        if high.steps >= self.config.window:
            self.losses.clear()
            return self._end(loss, recovered=False)
        return high if high.steps == CONSECUTIVE else None

    def _above(self, step: int, loss: float) -> Spike | None:
        """Return the steps above the limit with this one; None for a step below it, or too few losses to judge."""
        if self.high is not None:
            high = self.high
            return replace(high, loss=max(high.loss, loss), steps=high.steps + 1) if loss > self.limit else None
        return Spike(step, loss, *self._usual(), steps=1) if loss > self.limit else None

    def _usual(self) -> tuple[float, float]:
        """Return median and standard deviation of the window."""
        usual = median(self.losses)
        return usual, 1.4826 * median([abs(each - usual) for each in self.losses])

    def _next_limit(self) -> float:
        if self.high is None and len(self.losses) < FEWEST:
            return math.inf
        usual, sigma = self._usual() if self.high is None else (self.high.usual, self.high.sigma)
        return usual + max(self.config.sigmas * sigma, self.config.min_rise)

    def _end(self, loss: float, recovered: bool) -> Spike | None:
        high, self.high = self.high, None
        self.losses = [*self.losses, loss][-self.config.window :]
        return replace(high, ended=True, recovered=recovered) if high is not None and high.steps >= CONSECUTIVE else None


def loss_spikes(events: Iterable[Event], process: int = 0) -> list[Spike]:
    """Return the spikes in the log of one process, those that ended with their highest loss. Damaged ones are left out."""
    found: dict[tuple[int, int], Spike] = {}
    for event in events:
        if event.kind in (EVENT, END_EVENT) and event.process == process and (spike := _read(event)) is not None:
            found[event.restart, spike.step] = spike
    return list(found.values())


def _read(event: Event) -> Spike | None:
    values = [event.fields.get(name) for name in ("step", "loss", "usual", "sigma")]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return None
    step, loss, usual, sigma = (float(value) for value in values if value is not None)
    counted = event.fields.get("steps")
    ended, recovered = event.kind == END_EVENT, event.fields.get("recovered") is True
    return Spike(int(step), loss, usual, sigma, counted if isinstance(counted, int) else CONSECUTIVE, ended, recovered)


def recent_losses(events: Sequence[Event], step: int, window: int, process: int = 0) -> list[float]:
    """Return the losses of the last log lines up to a step, outside of spikes, as the start of a detector after a restart."""
    lines = {int(e.fields["step"]): e.fields.get("loss") for e in events if e.kind == "step" and e.process == process}
    spikes = [(spike.step, spike.step + (spike.steps if spike.ended else window)) for spike in loss_spikes(events, process)]
    found = [
        float(loss)
        for at, loss in sorted(lines.items())
        if at <= step and isinstance(loss, int | float) and not any(first <= at < end for first, end in spikes)
    ]
    return found[-window:]
