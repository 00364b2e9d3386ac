"""Findings of the diagnosis, and the thresholds that rules compare with.

Lenses and patterns: J. Torres, Supercomputing for Artificial Intelligence, chapter 16. The gain of a finding is a ceiling: the speedup of
removing a share R of the time T completely is T / (T - R) - 1 (Amdahl's law).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ridgeline.configs.fault_schema import LossSpikesConfig
from ridgeline.planner.policy import STRAGGLER_SHARE

Lens = Literal["amortization", "co-design", "balanced pipelines", "purpose"]
Confidence = Literal["high", "medium", "low"]

PATTERNS = {
    "bottlenecks move": "removing a bottleneck exposes the next one",
    "amortization": "amortization of fixed costs decides scalability",
    "metrics differ": "throughput, efficiency and time to solution differ",
    "bigger costs more": "larger workloads scale better and cost more",
    "complexity": "optimizations cost maintenance as well as time",
    "cost": "cost is a constraint like time",
}

THRESHOLDS: dict[str, tuple[float, str]] = {
    "data_wait": (0.05, "share of the step time spent waiting for the loader"),
    "cold_start": (0.15, "share of the wall time in start-up, compilation and restore"),
    "cold_start_s": (60.0, "seconds of it that matter whatever they consist of"),
    "cold_compile_s": (4.0, "seconds of compilation per start without a cache that matter"),
    "recompilations": (1, "compilations of one program during training, in one start"),
    "recompilation_share": (0.01, "share of the wall time in repeated compilation"),
    "host_bound": (0.15, "share of the step in which devices are idle while the host launches or runs other code"),
    "host_syncs": (0.15, "share of the step in which devices are idle after the host waited for them"),
    "straggler": (STRAGGLER_SHARE, "own time of the slowest device beyond the median one, over the step"),
    "exposed_communication": (0.15, "share of the step in exposed communication, waiting for other devices excluded"),
    "exposed_unsplit": (0.40, "the same where waiting for other devices cannot be separated"),
    "unplanned": (0.05, "bytes of collectives beyond the plan, over all planned bytes"),
    "padding": (0.10, "share of positions without a target"),
    "recompute": (0.10, "share of compute time in rematerialization"),
    "recompute_memory": (0.75, "memory in use over the limit, below which rematerialization is not needed"),
    "checkpoint": (0.05, "share of the wall time in which training waits for saves"),
    "checkpoint_s": (1.0, "seconds of it that matter"),
    "lost": (0.05, "share of the wall time in repeated steps"),
    "memory": (0.90, "memory in use over the limit"),
    "throttled": (0.90, "clock over that of the other devices, or over its base or highest clock where it is throttled"),
    "stopped": (0.10, "share of the time in which the CPU quota of the control group was used up"),
    "unequal_compute": (0.70, "compute time of the median device over that of the slowest one, for equal work"),
    "slow_link": (0.70, "measured over planned bus bandwidth"),
    "slow_link_share": (0.02, "share of the step that slow links take beyond the plan"),
    "flat_batch": (0.05, "gain in throughput of a doubled batch"),
    "small_batch": (0.30, "gain in throughput of a larger batch"),
    "efficiency": (0.80, "parallel efficiency"),
    "throughput_up": (0.30, "gain in throughput of the last increase in scale"),
    "worthwhile": (0.10, "gain in time that makes a larger scale worthwhile"),
    "dear": (0.50, "cost of the fastest scale over that of the cheapest, less one"),
    "hang": (0.01, "share of the wall time in hangs"),
    "size_gap": (0.10, "parallel efficiency of the largest model less that of the smallest, at one scale"),
    "loss_spike": (LossSpikesConfig().sigmas, "rise of the loss in standard deviations of the steps before, in three steps in a row"),
    "fragile_knobs": (2, "performance settings more than in the simpler run"),
    "fragile_gain": (0.10, "gain in speed over the simpler run that justifies the settings"),
}
"""Name -> (value, what it is compared with)."""

TITLES = {
    "input pipeline": "waiting for input data",
    "start-up and compilation not amortised": "start-up and compilation",
    "recompilation in steady state": "recompilation during training",
    "host synchronisation in the step": "host synchronization in the step",
    "accidental resharding": "unplanned resharding",
    "padding waste": "padding",
    "needless rematerialisation": "unnecessary rematerialization",
    "checkpoint stalls": "waiting for saves",
    "steps lost to failures": "steps repeated after failures",
    "clocks throttled": "throttled device",
    "throughput flat as the batch grows": "throughput does not grow with the batch",
    "fixed overheads at scale": "fixed costs at scale",
    "parallel efficiency falls": "low parallel efficiency",
    "large models scale better than small": "the small model scales worse",
    "faster but fragile": "performance settings without gain",
    "best configuration is also the dearest": "the fastest configuration costs the most",
    "the verdict depends on the metric": "the best scale depends on the objective",
}
"""Rule -> title for people, where it is not the name of the rule."""


@dataclass(frozen=True)
class Finding:
    """One bottleneck, with its evidence and what to do about it."""

    rule: str
    """Identifier of the rule: a stable name for scripts."""
    confidence: Confidence
    gain: float
    """Upper limit of the relative gain in speed (or cost, in comparisons of runs); 0 where nothing becomes faster."""
    lens: Lens
    pattern: str
    evidence: tuple[str, ...]
    measure_next: str
    action: str
    next_bottleneck: str = ""
    """What remains; where a rule does not fill it, `diagnose` predicts it from the facts (explain.diagnosis.costs)."""
    overrides: tuple[str, ...] = ()
    """The action as `key=value` for the config."""
    command: str | None = None
    """The action, or its first step, as a command line, where no config key does it."""

    @property
    def title(self) -> str:
        """The rule in words."""
        return TITLES.get(self.rule, self.rule)

    @property
    def gain_text(self) -> str:
        """The gain in words."""
        return gain_text(self.gain)


def ceiling(share: float) -> float:
    """Return T / (T - R) - 1: the speedup of removing a share R / T of the time."""
    return share / (1 - share) if share < 1 else math.inf


def gain_text(gain: float) -> str:
    """Format a gain: a percentage, or a factor from 2x on."""
    if gain <= 0:
        return "no gain in speed"
    return f"gain at most {gain:.0%}" if gain < 1 else f"gain up to {1 + gain:.2g}x"


def over(name: str, value: float | None) -> bool:
    """Whether a figure is known and above its threshold."""
    return value is not None and value > THRESHOLDS[name][0]
