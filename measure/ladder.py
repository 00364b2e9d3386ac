"""The ladder: what each layer of the stack adds to the time of a step, against the ceiling of the layers below it.

    matmul -> memory -> collectives -> step -> loop -> checkpoint

The first three are measured alone and stand one after the other; where the step overlaps them it takes less, and what it adds is negative.
The step and the loop are whole measurements: each adds its time minus that of the rung below. A save is spread over the steps to the next.
What all rungs add sums to the time of the last one. Samples are by round: round r of every rung was measured within the same minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.rundir.noise import compare

ALONE = ("matmul", "memory", "collectives")
"""Rungs of pieces measured alone: their samples are what they add."""
WHOLE = ("step", "loop")
"""Rungs measured as a whole: their samples are times of a step, everything below included."""
AMORTISED = ("checkpoint",)
"""Rungs whose samples are spread over steps: they are what they add."""
RUNGS = ALONE + WHOLE + AMORTISED

MEANING = {
    "matmul": "the matrix products of the model alone",
    "memory": "passes over device memory beside them",
    "collectives": "the collectives alone, hidden by nothing",
    "step": "the compiled step on synthetic data",
    "loop": "the training loop on real data",
    "checkpoint": "the time saves hold training up, per step",
}
WHAT_IT_IS = {
    "matmul": "the products",
    "memory": "the passes over device memory",
    "collectives": "the collectives",
    "step": "what the compiled step does beyond products, passes and collectives",
    "loop": "what the loop adds to the step",
    "checkpoint": "the saves",
}


@dataclass(frozen=True)
class Rung:
    """One layer."""

    name: str
    meaning: str
    time_s: float
    """Time per step of everything up to this rung (medians)."""
    adds_s: float
    """Over the rung below; negative where the layers below overlap."""
    share: float
    """Of the last rung's time."""
    spread: float
    """Interquartile range of the rung's own samples over their median."""
    clear: bool
    """Whether what it adds can be told from noise."""


@dataclass(frozen=True)
class Verdict:
    """Which layer to look at."""

    rung: str
    adds_s: float
    share: float
    gain: float | None
    """How much faster a step could become at most if the layer took no time: T/(T-R) - 1; None where it alone took longer."""
    next_rung: str | None
    """What binds after it."""
    sentence: str


@dataclass(frozen=True)
class Ladder:
    """All rungs, lowest first."""

    rungs: tuple[Rung, ...]
    verdict: Verdict

    @property
    def time_s(self) -> float:
        """Time per step of the last rung."""
        return self.rungs[-1].time_s


def build_ladder(samples: Mapping[str, Sequence[float]], why: Mapping[str, str] | None = None) -> Ladder:
    """Stack the rungs.

    Args:
      samples: rung name -> seconds per step, by round (see ALONE, WHOLE, AMORTISED); `step` must be there, absent ones are left out.
      why: rung name -> what the measurement says about its cause, a half sentence for the verdict.
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


def spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 for fewer than two samples or a median of 0."""
    middle = statistics.median(samples)
    if len(samples) < 2 or middle == 0:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def _clear(name: str, samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether a rung's addition is more than noise. One measured alone is what it is; a whole one must differ from what is below it."""
    alone = [samples[rung] for rung in ALONE if rung in samples]
    if name not in WHOLE or (name == "step" and not alone):
        return statistics.median(samples[name]) > 0
    below = samples["step"] if name == "loop" else [sum(rounds) for rounds in zip(*alone, strict=False)]
    own = samples[name]
    if min(len(below), len(own)) < 3:
        return False
    if len(below) == len(own):  # round by round: what slows a whole round down slows both
        below, own = [1.0] * len(own), [b / a for a, b in zip(below, own, strict=True)]
    return compare(below, own).verdict != "cannot tell"


def _verdict(rungs: Sequence[Rung], why: Mapping[str, str]) -> Verdict:
    ranked = sorted((rung for rung in rungs if rung.clear and rung.adds_s > 0), key=lambda rung: -rung.adds_s)
    top, after = ranked[0], ranked[1] if len(ranked) > 1 else None
    whole_s = rungs[-1].time_s
    left_s = whole_s - top.adds_s
    gain = whole_s / left_s - 1 if left_s > 0 else None
    below_s = top.time_s - top.adds_s
    ceiling = f" on top of a ceiling of {ms(below_s)}" if below_s > 0 else ""
    reason = f": {why[top.name]}" if why.get(top.name) else ""
    text = (
        f"Look at {top.name}: {WHAT_IT_IS[top.name]} take{_s(top.name)} {ms(top.adds_s)} ({top.share:.0%} of the time){ceiling}{reason}. "
    )
    if gain is None:
        text += "Alone that took longer than the whole step, of which it is a part: measure again on a machine that is quiet"
    else:
        text += f"Without that a step would take {ms(left_s)} at best (at most {gain:.1%} faster)"
    if after is not None:
        text += f", and {after.name} would be next with {ms(after.adds_s)}"
    return Verdict(top.name, top.adds_s, top.share, gain, None if after is None else after.name, text + ".")


def _s(name: str) -> str:
    return "s" if name in WHOLE else ""


def ms(seconds: float) -> str:
    """Write a time in milliseconds with three figures."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


@dataclass(frozen=True)
class Cadence:
    """How often a run saves, in steps."""

    steps: float | None
    """Steps between two saves; None: it never saves."""
    reason: str = field(default="")


def save_cadence(*, every: int, every_minutes: float, final: bool, steps: int, step_s: float) -> Cadence:
    """Return the steps between two saves of a run whose steps take `step_s`."""
    found = []
    if every:
        found.append((float(every), f"checkpoint.every={every}"))
    if every_minutes:
        found.append((max(1.0, every_minutes * 60 / step_s), f"checkpoint.every_minutes={every_minutes:g}"))
    if final:
        found.append((float(steps), "only the final save"))
    return Cadence(*min(found)) if found else Cadence(None, "the run never saves")


def amortised_s(blocking_s: Sequence[float], write_s: Sequence[float], cadence: Cadence, step_s: float) -> list[float]:
    """Spread each save over the steps to the next: what it blocks, and what the next one waits for its writing."""
    if cadence.steps is None:
        return [0.0 for _ in blocking_s]
    interval_s = cadence.steps * step_s
    return [(b + max(0.0, w - b - interval_s)) / cadence.steps for b, w in zip(blocking_s, write_s, strict=True)]
