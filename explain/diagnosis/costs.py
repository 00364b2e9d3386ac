"""Where the wall time of a run goes, by cost, and what remains of it when one cost is removed: the next bottleneck."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.rundir.analysis import Analysis

_OF_CATEGORY = {
    "queue": "the scheduler's queue",
    "startup": "start-up and compilation",
    "restore": "start-up and compilation",
    "compile": "start-up and compilation",
    "data_wait": "waiting for input data",
    "evaluation": "evaluation",
    "checkpoint": "saves",
    "check": "corruption checks",
    "profile": "profiling",
    "lost": "repeated steps",
    "hang": "hangs",
    "teardown": "teardown",
    "unexplained": "unexplained time",
}
"""Category of the run ledger -> cost; productive time is divided by the step ledger."""
STEPS, COMPUTE, RECOMPUTE = "training steps", "compute", "rematerialization"
EXPOSED, IDLE = "exposed communication", "idle devices"
_REMOVES = {
    "input pipeline": "waiting for input data",
    "start-up and compilation not amortised": "start-up and compilation",
    "recompilation in steady state": "start-up and compilation",
    "host-bound steps": IDLE,
    "host synchronisation in the step": IDLE,
    "straggler": EXPOSED,
    "exposed communication": EXPOSED,
    "accidental resharding": EXPOSED,
    "link slower than planned": EXPOSED,
    "clocks throttled": EXPOSED,
    "needless rematerialisation": RECOMPUTE,
    "checkpoint stalls": "saves",
    "steps lost to failures": "repeated steps",
    "hang": "hangs",
}
"""Rule -> the cost that its action removes; the others remove a part of the training steps."""


def costs(facts: Facts) -> dict[str, float]:
    """Return the share of the wall time of each cost; {} for a run without any time."""
    found: dict[str, float] = {}
    for category in facts.ledger.seconds:
        parts = _step_parts(facts.analysis) if category == "productive" else {_OF_CATEGORY[category]: 1.0}
        for name, part in parts.items():
            found[name] = found.get(name, 0.0) + part * facts.share(category)
    return {name: share for name, share in found.items() if share > 0}


def _step_parts(analysis: Analysis | None) -> dict[str, float]:
    """Return the share of each part of a profiled step, mean over the devices; all of it is `training steps` without a profile."""
    devices = [] if analysis is None else [device for device in analysis.devices if device.total_s > 0]
    if analysis is None or not devices:
        return {STEPS: 1.0}
    waits = [device.idle_by_cause.get("data_wait", 0.0) for device in devices]  # a cost of its own in the run ledger
    total_s = math.fsum(device.total_s for device in devices) - math.fsum(waits)
    compute_s = math.fsum(device.compute_s for device in devices)
    worked_s = math.fsum(each.time_s for each in analysis.components)
    again_s = math.fsum(each.time_s for each in analysis.components if each.phase == "recompute")
    again = again_s / worked_s if worked_s > 0 else 0.0
    parts = {
        COMPUTE: compute_s * (1 - again),
        RECOMPUTE: compute_s * again,
        EXPOSED: math.fsum(device.exposed_communication_s for device in devices),
        "copies": math.fsum(device.exposed_copy_s for device in devices),
        IDLE: math.fsum(device.idle_s for device in devices) - math.fsum(waits),
    }
    known_s = math.fsum(parts.values())
    return {name: seconds / max(total_s, known_s) for name, seconds in parts.items()} if known_s > 0 else {STEPS: 1.0}


def remaining(facts: Facts, rule: str, gain: float) -> dict[str, float]:
    """Return the share of each cost in the time that remains after a finding's largest possible gain, largest first."""
    removed = gain / (1 + gain) if gain > 0 and math.isfinite(gain) else 0.0
    found = costs(facts)
    named = _REMOVES.get(rule)
    if named is not None:
        taken = min(removed, found.get(named, 0.0))
        found[named] = found.get(named, 0.0) - taken
        removed -= taken
    in_steps = [name for name in (STEPS, COMPUTE, RECOMPUTE, EXPOSED, "copies", IDLE) if name in found and name != named]
    steps = math.fsum(found[name] for name in in_steps)
    for name in in_steps:  # what a rule removes beyond its cost, or padding, is in every part of a step
        found[name] *= 1 - min(1.0, removed / steps) if steps > 0 else 1.0
    total = math.fsum(found.values())
    shares = {name: share / total for name, share in found.items() if total > 0 and share / total >= 0.005}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def next_bottleneck(facts: Facts, rule: str, gain: float) -> str:
    """Return the two largest costs that remain when the cost of a finding is removed, with their shares of the remaining time."""
    return _text(remaining(facts, rule, gain), "remaining time" if gain > 0 else "time")


def _text(shares: Mapping[str, float], of: str) -> str:
    parts = [f"{name} ({share:.0%}{f' of the {of}' if not place else ''})" for place, (name, share) in enumerate([*shares.items()][:2])]
    return ", then ".join(parts) or "unknown: the run has no recorded time"
