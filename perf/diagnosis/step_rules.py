"""Rules on the step ledger of a profile, on the ranks, and on the compiled step."""

from __future__ import annotations

import math

from perf.diagnosis.facts import Facts
from perf.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over


def host_bound(facts: Facts) -> Finding | None:
    """Device idle while the host launches work: steps too small for their overhead."""
    share = _idle_share(facts, "launch", "other")
    if share is None or not over("host_bound", share):
        return None
    step = f" at {facts.step_s * 1e3:.1f} ms per step" if facts.step_s else ""
    batch = 2 * facts.config.data.batch_size if facts.config is not None else 0
    return Finding(
        rule="host-bound steps",
        confidence="medium",
        gain=ceiling(share * facts.share("productive")),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"the device was idle {share:.1%} of the step while the host launched or did other work{step}",),
        measure_next="ridge analyze: launch rate, queue depth and host synchronisations",
        action=f"data.batch_size={batch}: more work per launch" if batch else "a larger batch: more work per launch",
        next_bottleneck="memory bandwidth, as the kernels grow",
    )


def host_syncs(facts: Facts) -> Finding | None:
    """The host waits for the device inside the step, again and again."""
    syncs = [s for host in (facts.analysis or {}).get("hosts", []) for s in host.get("syncs", [])]
    steps = max(1, len((facts.analysis or {}).get("steps", [])))
    count = sum(int(s.get("count", 1)) for s in syncs)
    if not over("host_syncs", count / steps):
        return None
    share = _idle_share(facts, "other", "launch") or 0.0
    where = ", ".join(sorted({str(s.get("source", "?")) for s in syncs})[:3])
    return Finding(
        rule="host synchronisation in the step",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{count / steps:.1f} host synchronisations per step ({where})",),
        measure_next="the idle time around each of them in the trace viewer",
        action="read results one step late, or every log line only",
        next_bottleneck="the device",
    )


def straggler(facts: Facts) -> Finding | None:
    """One rank slower than the others: everybody waits for it."""
    times = facts.ranks_step_s
    if len(times) < 2:
        return None
    ordered = sorted(times.values())
    median_s = ordered[(len(ordered) - 1) // 2]
    slowest = max(times, key=lambda rank: times[rank])
    excess = times[slowest] / median_s - 1 if median_s > 0 else 0.0
    if not over("straggler", excess):
        return None
    return Finding(
        rule="straggler",
        confidence="high" if len(times) > 2 else "medium",
        gain=ceiling((1 - median_s / times[slowest]) * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"process {slowest} needs {times[slowest] * 1e3:.1f} ms of its own per step, the median process {median_s * 1e3:.1f} ms",
        ),
        measure_next="ridge doctor on its node: clocks, memory, other jobs",
        action=f"exclude the node of process {slowest} and requeue",
        next_bottleneck="communication among equal ranks",
    )


def exposed_communication(facts: Facts) -> Finding | None:
    """Communication that compute does not hide."""
    share = facts.step_share("exposed_communication_s")
    if share is None or not over("exposed_communication", share):
        return None
    return Finding(
        rule="exposed communication",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{share:.1%} of the step is communication with no compute beside it",),
        measure_next="ridge analyze: which collective, over which axis; its bus bandwidth against the plan",
        action="more tokens per device (data.batch_size), less over the slow link (mesh.fsdp inside the node), or trainer.accumulation",
        next_bottleneck="compute",
    )


def resharding(facts: Facts) -> Finding | None:
    """Collectives that the plan does not contain."""
    unplanned = (facts.compiled or {}).get("unplanned") or []
    planned = math.fsum(float(c["bytes"]) * float(c.get("count", 1)) for c in (facts.compiled or {}).get("collectives", []))
    extra = math.fsum(float(c["bytes"]) * float(c.get("count", 1)) for c in unplanned)
    if not unplanned or not over("unplanned", extra / planned if planned else 1.0):
        return None
    first = unplanned[0]
    return Finding(
        rule="accidental resharding",
        confidence="high",
        gain=ceiling(min(0.9, extra / planned * (facts.step_share("communication_s") or 0.1)) if planned else 0.1),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{len(unplanned)} collectives of {extra / 1e6:.1f} MB are not in the plan; the first: {first.get('kind')} over "
            f"{first.get('axes')} at {first.get('source', '?')}",
        ),
        measure_next="ridge compile: the source line of each",
        action="constrain the activation at that line to the sharding its consumer wants",
        next_bottleneck="the planned communication",
    )


def over_remat(facts: Facts) -> Finding | None:
    """Recomputation that memory does not ask for."""
    components = (facts.analysis or {}).get("components") or []
    total_s = math.fsum(float(c["time_s"]) for c in components)
    again_s = math.fsum(float(c["time_s"]) for c in components if c.get("phase") == "recompute")
    if not total_s or not over("recompute", again_s / total_s) or over("recompute_memory", facts.memory_share):
        return None
    policy = facts.config.compute.remat.policy if facts.config is not None else "?"
    memory = "unknown" if facts.memory_share is None else f"{facts.memory_share:.0%}"
    return Finding(
        rule="needless rematerialisation",
        confidence="high" if facts.memory_share is not None else "medium",
        gain=ceiling(again_s / total_s * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{again_s / total_s:.1%} of compute is done again in the backward pass (policy {policy}); memory in use: {memory}",),
        measure_next="ridge compile with compute.remat.policy=none: does it fit",
        action="compute.remat.policy=dots, or none where it fits",
        next_bottleneck="memory capacity",
    )


def throttled(facts: Facts) -> Finding | None:
    """Clocks below their rated value."""
    clocks = [float(h["clock_fraction"]) for h in (facts.analysis or {}).get("hosts", []) if "clock_fraction" in h]
    if not clocks or min(clocks) >= THRESHOLDS["throttled"][0]:
        return None
    return Finding(
        rule="clocks throttled",
        confidence="high",
        gain=ceiling((1 - min(clocks)) * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"a device ran at {min(clocks):.0%} of its rated clock",),
        measure_next="ridge doctor: power, temperature, the reason NVML gives",
        action="exclude the node, or raise its power limit",
        next_bottleneck="memory bandwidth",
    )


def slow_link(facts: Facts) -> Finding | None:
    """A link slower than planned: equal compute, less bus bandwidth."""
    found = [
        c
        for c in (facts.analysis or {}).get("collectives", [])
        if c.get("bus_bandwidth")
        and c.get("planned_bus_bandwidth")
        and c["bus_bandwidth"] < THRESHOLDS["slow_link"][0] * c["planned_bus_bandwidth"]
    ]
    if not found:
        return None
    worst = min(found, key=lambda c: c["bus_bandwidth"] / c["planned_bus_bandwidth"])
    share = facts.step_share("exposed_communication_s") or 0.0
    return Finding(
        rule="link slower than planned",
        confidence="medium",
        gain=ceiling(share * (1 - worst["bus_bandwidth"] / worst["planned_bus_bandwidth"]) * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{worst.get('kind')} over {worst.get('axes')}: {worst['bus_bandwidth'] / 1e9:.1f} GB/s of bus bandwidth, "
            f"{worst['planned_bus_bandwidth'] / 1e9:.1f} planned",
        ),
        measure_next="ridge doctor: bandwidth by axis, on these nodes",
        action="NCCL settings (NCCL_IB_HCA, NCCL_NET), or exclude the node",
        next_bottleneck="compute",
    )


def _idle_share(facts: Facts, *causes: str) -> float | None:
    """Share of the step ledger's total in which devices idled for these causes."""
    devices = (facts.analysis or {}).get("devices")
    if not devices:
        return None
    total_s = math.fsum(float(d["total_s"]) for d in devices)
    idle_s = math.fsum(float(d.get("idle_by_cause", {}).get(cause, 0.0)) for d in devices for cause in causes)
    return idle_s / total_s if total_s > 0 else None
