"""What a rule says, and the thresholds rules compare with.

Lenses and patterns: J. Torres, Supercomputing for Artificial Intelligence, chapter 16. The ceiling of a gain is that of removing a share
R of the time T altogether: T / (T - R) - 1 (Amdahl's law with an infinite speedup of that part).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Lens = Literal["amortisation", "co-design", "balanced pipelines", "purpose"]
Confidence = Literal["high", "medium", "low"]

PATTERNS = {
    "bottlenecks move": "bottlenecks move, they do not vanish",
    "amortisation": "amortisation decides scalability",
    "metrics differ": "throughput, efficiency, time-to-solution differ",
    "bigger costs more": "bigger workloads scale better and cost more",
    "complexity": "optimisation costs more than performance",
    "cost": "cost is a first-class constraint",
}

THRESHOLDS: dict[str, tuple[float, str]] = {
    "data_wait": (0.05, "share of the step time waiting for the loader"),
    "cold_start": (0.15, "share of the wall time before the first step that counts"),
    "cold_start_s": (60.0, "seconds of it below which nobody waits for long"),
    "cold_compile_s": (4.0, "seconds of compilation per start, of programs no cache had, that are too many, whatever the rest takes"),
    "recompilations": (1, "compilations of one program during the loop beyond its first"),
    "recompilation_share": (0.01, "share of the wall time compiling programs again"),
    "host_bound": (0.15, "share of the step with idle devices while the host launches or does other things"),
    "host_syncs": (0.15, "share of the step that devices idle because the host waited for them"),
    "straggler": (0.10, "own time of the slowest device beyond the median one that is not compute, over the step"),
    "exposed_communication": (0.15, "share of the step in communication that no compute hides, waiting for others left out"),
    "exposed_unsplit": (0.40, "the same, where waiting for others cannot be told from it"),
    "unplanned": (0.05, "bytes of collectives beyond the planned ones of their kind and axes, over all planned ones"),
    "padding": (0.10, "share of positions without a target"),
    "recompute": (0.10, "share of compute time spent computing again in the backward pass"),
    "recompute_memory": (0.75, "memory in use below which recomputation is needless"),
    "checkpoint": (0.05, "share of the wall time held up by saves"),
    "checkpoint_s": (1.0, "seconds of it below which nobody waits for long"),
    "lost": (0.05, "share of the wall time done again after failures"),
    "memory": (0.90, "memory in use over the limit"),
    "throttled": (0.90, "clock over that of the others, or over its own base or highest one where something holds it down"),
    "stopped": (0.10, "share of the time for which a control group had used up its CPU time"),
    "unequal_compute": (0.70, "compute time of the median device over that of the slowest, for equal work"),
    "slow_link": (0.70, "bus bandwidth over the planned one"),
    "slow_link_share": (0.02, "share of the step that links slower than planned take beyond the plan"),
    "flat_batch": (0.05, "gain in throughput of a doubled batch"),
    "small_batch": (0.30, "gain in throughput of a larger batch that is still to be had"),
    "efficiency": (0.80, "parallel efficiency"),
    "throughput_up": (0.30, "gain in throughput of the last step up in scale"),
    "worthwhile": (0.10, "gain in time worth another step up"),
    "dear": (0.50, "cost of the fastest scale beyond that of the cheapest"),
    "hang": (0.01, "share of the wall time hanging"),
    "size_gap": (0.10, "parallel efficiency of the largest model above that of the smallest, at one scale"),
    "fragile_knobs": (2, "performance settings away from their defaults beyond those of the simpler run"),
    "fragile_gain": (0.10, "gain in speed over the simpler run that pays for as many settings"),
}
"""Name -> (value, what it is compared with)."""


@dataclass(frozen=True)
class Finding:
    """One constraint, with its evidence and what to do."""

    rule: str
    confidence: Confidence
    gain: float
    """Ceiling of the relative gain in throughput or time; 0 where the gain is in money or clarity."""
    lens: Lens
    pattern: str
    evidence: tuple[str, ...]
    measure_next: str
    action: str
    next_bottleneck: str
    overrides: tuple[str, ...] = ()
    """The action as `key=value` for the config."""
    command: str | None = None
    """The action, or its first step, as a command line, where no key helps."""

    @property
    def gain_text(self) -> str:
        """The ceiling in words."""
        return gain_text(self.gain)


def ceiling(share: float) -> float:
    """Return T / (T - R) - 1 for a removable share R / T."""
    return share / (1 - share) if share < 1 else math.inf


def gain_text(gain: float) -> str:
    """Put a ceiling into words: a factor from twice as fast (or cheap) on."""
    if gain <= 0:
        return "no gain in speed"
    return f"gain at most {gain:.0%}" if gain < 1 else f"gain up to {1 + gain:.2g}x"


def over(name: str, value: float | None) -> bool:
    """Whether a figure is known and above its threshold."""
    return value is not None and value > THRESHOLDS[name][0]
