"""The ladder: how much time each layer of the stack (a rung) adds to a training step.

    matmul -> memory -> collectives -> step -> loop -> checkpoint

The first three are timed alone and summed. The step and the loop are timed as a whole: each adds its time minus that of the rung below,
which is negative where the step overlaps the pieces. The time of a save is divided by the steps between two saves. The additions of all
rungs sum to the time of the last rung. Samples are per round; round r of every rung was measured within the same minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.rundir.noise import compare, spread

ALONE = ("matmul", "memory", "collectives")
"""Rungs of pieces timed alone: their samples are their additions."""
WHOLE = ("step", "loop")
"""Rungs timed as a whole: their samples are times of a step and include all rungs below."""
AMORTIZED = ("checkpoint",)
"""Rungs whose samples are divided over steps: their samples are their additions."""
RUNGS = ALONE + WHOLE + AMORTIZED

MEANING = {
    "matmul": "the matmuls of the model alone",
    "memory": "device memory traffic outside matmuls",
    "collectives": "the collectives alone, not overlapped",
    "step": "the compiled step on synthetic data",
    "loop": "the training loop on real data",
    "checkpoint": "time that saves block training, per step",
}
SUBJECT = {
    "matmul": "matmuls take",
    "memory": "memory traffic takes",
    "collectives": "collectives take",
    "step": "the compiled step adds to matmuls, memory traffic and collectives",
    "loop": "the loop adds to the step",
    "checkpoint": "saves take",
}


@dataclass(frozen=True)
class Rung:
    """One layer of the stack."""

    name: str
    meaning: str
    time_s: float
    """Time per step up to and including this rung (medians)."""
    adds_s: float
    """Time added to the rung below; negative where the layers below overlap."""
    share: float
    """`adds_s` over the last rung's time."""
    spread: float
    """Half the range of the rung's own samples over their median."""
    clear: bool
    """Whether the addition is larger than the noise."""


@dataclass(frozen=True)
class Verdict:
    """The layer that costs most."""

    rung: str
    adds_s: float
    share: float
    gain: float | None
    """Largest possible speed-up of a step, if the layer took no time: T/(T-R) - 1. None when the layer alone took longer than the step."""
    next_rung: str | None
    """The next largest layer."""
    sentence: str


@dataclass(frozen=True)
class Ladder:
    """All rungs, from the lowest."""

    rungs: tuple[Rung, ...]
    verdict: Verdict

    @property
    def time_s(self) -> float:
        """Time per step of the last rung."""
        return self.rungs[-1].time_s


def build_ladder(samples: Mapping[str, Sequence[float]], why: Mapping[str, str] | None = None) -> Ladder:
    """Build the ladder from samples.

    Args:
      samples: rung name -> seconds per step, one entry per round (see ALONE, WHOLE, AMORTIZED). `step` is required; others are optional.
      why: rung name -> cause of its time, a clause for the verdict.
    """
    assert "step" in samples and samples.keys() <= set(RUNGS), sorted(samples)
    names = [name for name in RUNGS if name in samples]
    below_s, stacked = 0.0, list[tuple[str, float, float]]()
    for name in names:
        own_s = statistics.median(samples[name])
        time_s = own_s if name in WHOLE else below_s + own_s
        stacked.append((name, time_s, time_s - below_s))
        below_s = time_s
    rungs = tuple(
        Rung(name, MEANING[name], time_s, adds_s, adds_s / below_s, spread(samples[name]), _clear(name, samples))
        for name, time_s, adds_s in stacked
    )
    return Ladder(rungs, _verdict(rungs, why or {}))


def _clear(name: str, samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether a rung's addition is larger than the noise. A rung in WHOLE must differ from the rung below; for others any time counts."""
    alone = [samples[rung] for rung in ALONE if rung in samples]
    if name not in WHOLE or (name == "step" and not alone):
        return statistics.median(samples[name]) > 0
    below = samples["step"] if name == "loop" else [sum(rounds) for rounds in zip(*alone, strict=False)]
    own = samples[name]
    if min(len(below), len(own)) < 3:
        return False
    if len(below) == len(own):  # compare per round: load that slows a round slows both
        below, own = [1.0] * len(own), [b / a for a, b in zip(below, own, strict=True)]
    return compare(below, own).verdict != "cannot tell"


def _verdict(rungs: Sequence[Rung], why: Mapping[str, str]) -> Verdict:
    ranked = sorted((rung for rung in rungs if rung.clear and rung.adds_s > 0), key=lambda rung: -rung.adds_s)
    top, after = ranked[0], ranked[1] if len(ranked) > 1 else None
    whole_s = rungs[-1].time_s
    left_s = whole_s - top.adds_s
    gain = whole_s / left_s - 1 if left_s > 0 else None
    below_s = top.time_s - top.adds_s
    ceiling = f", above {ms(below_s)} for the layers below" if below_s > 0 else ""
    reason = f": {why[top.name]}" if why.get(top.name) else ""
    text = f"Look at {top.name}: {SUBJECT[top.name]} {ms(top.adds_s)} ({top.share:.0%} of the time){ceiling}{reason}. "
    if gain is None:
        text += "Timed alone it took longer than the whole step that contains it: measure again on an idle machine"
    else:
        text += f"Without it a step would take at least {ms(left_s)} (at most {gain:.1%} faster)"
    if after is not None:
        text += f"; the next largest is {after.name} with {ms(after.adds_s)}"
    return Verdict(top.name, top.adds_s, top.share, gain, None if after is None else after.name, text + ".")


def ms(seconds: float) -> str:
    """Format a time in milliseconds with three digits."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


@dataclass(frozen=True)
class Cadence:
    """How often a run saves, in steps."""

    steps: float | None
    """Steps between two saves; None: no saves."""
    reason: str = field(default="")


def save_cadence(*, every: int, every_minutes: float, final: bool, steps: int, step_s: float) -> Cadence:
    """Return the steps between two saves of a run with steps of `step_s` seconds."""
    found = []
    if every:
        found.append((float(every), f"checkpoint.every={every}"))
    if every_minutes:
        found.append((max(1.0, every_minutes * 60 / step_s), f"checkpoint.every_minutes={every_minutes:g}"))
    if final:
        found.append((float(steps), "only the final save"))
    return Cadence(*min(found)) if found else Cadence(None, "no saves")


def amortized_s(blocking_s: Sequence[float], write_s: Sequence[float], cadence: Cadence, step_s: float) -> list[float]:
    """Return the cost of each save per step: the time it blocks, plus the time the next save waits for its write to end."""
    if cadence.steps is None:
        return [0.0 for _ in blocking_s]
    interval_s = cadence.steps * step_s
    return [(b + max(0.0, w - b - interval_s)) / cadence.steps for b, w in zip(blocking_s, write_s, strict=True)]
