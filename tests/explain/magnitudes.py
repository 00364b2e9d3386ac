"""How large a fault must be to be named: what was recorded of real healthy runs, with a fault of a chosen size laid over it.

The rest of the run stays as it was measured, noise included. Sizes are shares of the step or of the wall time, or factors; thresholds were
not tuned on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.rules import diagnose
from ridgeline.rundir.analysis_times import DeviceStep


@dataclass(frozen=True)
class Fault:
    """A mechanism, and the sizes at which it is planted."""

    what: str
    rule: str
    run: str
    """The healthy run it is laid over."""
    sizes: tuple[float, ...]
    """Growing."""
    write: str
    """How a size is written."""
    plant: Callable[[Facts, float], Facts]


def waiting(facts: Facts, share: float) -> Facts:
    """The loader is late: its wait is this share of each step."""

    def late(step: Mapping[str, Any]) -> dict[str, Any]:
        wait_s = step["step_time_mean_s"] * share / (1 - share)
        return {**step, "data_wait_s": step["data_wait_s"] + wait_s, "step_time_mean_s": step["step_time_mean_s"] + wait_s}

    return replace(facts, steps=[late(step) if "data_wait_s" in step else step for step in facts.steps])


def padded(facts: Facts, share: float) -> Facts:
    """This share of the positions has no target."""
    return replace(
        facts, steps=[{**s, "target_tokens": s["target_tokens"] * (1 - share)} if "target_tokens" in s else s for s in facts.steps]
    )


def stalled(facts: Facts, share: float) -> Facts:
    """Saves hold the loop up for this share of the time, which becomes longer by it."""
    stall_s = facts.ledger.wall_s * share / (1 - share)
    seconds = {**facts.ledger.seconds, "checkpoint": facts.ledger.seconds["checkpoint"] + stall_s}
    return replace(facts, ledger=dataclasses.replace(facts.ledger, seconds=seconds, wall_s=facts.ledger.wall_s + stall_s))


def late_rank(facts: Facts, share: float) -> Facts:
    """One device comes late to a collective by this share of the step; the others wait for it."""
    return _slower(facts, lambda device: device.total_s * share, "idle_s")


def slow_rank(facts: Facts, speed: float) -> Facts:
    """One device computes at this speed; the others wait for it."""
    return _slower(facts, lambda device: device.compute_s * (1 / speed - 1), "compute_s")


def slow_links(facts: Facts, speed: float) -> Facts:
    """Collectives get this share of the bandwidth."""
    assert facts.analysis is not None
    more_s = 0.0
    rows = []
    for row in facts.analysis.collectives:
        assert row.wire_s is not None and row.bus_bandwidth is not None
        added_s = row.wire_s * (1 / speed - 1)
        more_s += added_s
        rows.append(
            replace(
                row,
                time_s=row.time_s + added_s,
                exposed_s=row.exposed_s + added_s,
                wire_s=row.wire_s + added_s,
                bus_bandwidth=row.bus_bandwidth * speed,
            )
        )
    steps = [replace(step, devices=[_waiting(device, more_s) for device in step.devices]) for step in facts.analysis.steps]
    return replace(facts, analysis=replace(facts.analysis, collectives=rows, steps=steps))


def _waiting(device: DeviceStep, added_s: float) -> DeviceStep:
    return replace(device, exposed_communication_s=device.exposed_communication_s + added_s, total_s=device.total_s + added_s)


def _slower(facts: Facts, added_s: Callable[[DeviceStep], float], where: str) -> Facts:
    """Let the last device need longer in each step, and the others wait in their collectives."""
    assert facts.analysis is not None
    waits_s = 0.0
    steps = []
    for step in facts.analysis.steps:
        *others, last = step.devices
        more_s = added_s(last)
        slow = replace(last, **{where: getattr(last, where) + more_s, "total_s": last.total_s + more_s})
        steps.append(replace(step, devices=[*(_waiting(other, more_s) for other in others), slow]))
        waits_s += more_s * len(others)
    per = len(steps) * len(steps[0].devices)
    longest = max(facts.analysis.collectives, key=lambda row: row.time_s)
    assert longest.wait_s is not None
    longer = replace(
        longest, time_s=longest.time_s + waits_s / per, exposed_s=longest.exposed_s + waits_s / per, wait_s=longest.wait_s + waits_s / per
    )
    rows = [longer if row is longest else row for row in facts.analysis.collectives]
    return replace(facts, analysis=replace(facts.analysis, steps=steps, collectives=rows))


SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
SPEEDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25)
FAULTS = (
    Fault("the loader is late, share of the step", "input pipeline", "healthy", SHARES, "{:.0%}", waiting),
    Fault("positions without a target", "padding waste", "healthy", (*SHARES, 0.64), "{:.0%}", padded),
    Fault("saves, share of the time", "checkpoint stalls", "healthy", SHARES, "{:.0%}", stalled),
    Fault("a rank is late, share of the step", "straggler", "pair", SHARES, "{:.0%}", late_rank),
    Fault("a rank computes at a share of its speed", "clocks throttled", "pair", SPEEDS, "{:.0%}", slow_rank),
    Fault("links at a share of their bandwidth", "link slower than planned", "pair", SPEEDS, "{:.0%}", slow_links),
)


def found(fault: Fault, facts: Facts) -> list[list[str]]:
    """Return the rules that fire at each size, by rank."""
    return [[finding.rule for finding in diagnose(fault.plant(facts, size))] for size in fault.sizes]


def table(results: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Render what was found (fault -> rules at each size) as Markdown."""
    lines = ["| planted over a healthy run | rule | not named | named, not first | first |", "|---|---|---|---|---|"]
    for fault in FAULTS:
        if fault.what in results:
            by: dict[str, list[str]] = {"no": [], "named": [], "first": []}
            for size, rules in zip(fault.sizes, results[fault.what], strict=True):
                kind = "first" if rules[:1] == [fault.rule] else "named" if fault.rule in rules else "no"
                by[kind].append(fault.write.format(size))
            cells = " | ".join(", ".join(by[kind]) or "-" for kind in ("no", "named", "first"))
            lines.append(f"| {fault.what} | {fault.rule} | {cells} |")
    return "\n".join(lines)
