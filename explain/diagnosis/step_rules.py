"""Rules on the step ledger of a profile, on the ranks, and on the compiled step."""

from __future__ import annotations

import math

from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over
from ridgeline.explain.diagnosis.ranks import Slowest, host_of, slowest
from ridgeline.explain.diagnosis.throttled import most_throttled
from ridgeline.rundir.analysis import Collective
from ridgeline.rundir.records import TrafficRow

UNMEASURED = 0.1
"""Assumed share of communication in a step without a profile."""


def host_bound(facts: Facts) -> Finding | None:
    """Devices are idle while the host launches work: the steps are too small for their overhead."""
    idle = facts.every_device(lambda device: sum(device.idle_by_cause.get(cause, 0.0) for cause in ("launch", "blocked", "other")))
    share = None if idle is None else idle - _starved_share(facts)
    if share is None or not over("host_bound", share):
        return None
    step = f" (step time {facts.step_s * 1e3:.1f} ms)" if facts.step_s else ""
    batch = remedies.batch(facts, share, "host_bound")
    return Finding(
        rule="host-bound steps",
        confidence="medium",
        gain=ceiling(share * facts.share("productive")),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(f"all devices were idle for {share:.1%} of the step while the host launched work or ran other code{step}",),
        measure_next="launch rate, queue depth and host synchronizations (ridge analyze)",
        action=f"{f'set {batch}' if batch else 'increase data.batch_size'}: more work per launch",
        overrides=(batch,) if batch else (),
    )


def host_syncs(facts: Facts) -> Finding | None:
    """The host waits for the device inside the step, and the device is idle until the host launches again."""
    share = _starved_share(facts)
    if facts.analysis is None or not over("host_syncs", share):
        return None
    syncs = [sync for host in facts.analysis.hosts for sync in host.syncs]
    per_step = sum(sync.count for sync in syncs) / max(1, len(facts.analysis.steps))
    where = ", ".join(sorted({f"{sync.what} at {sync.source}" for sync in syncs})[:3])
    return Finding(
        rule="host synchronisation in the step",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{per_step:.1f} host synchronizations per step left the devices idle for {share:.1%} of the step ({where})",),
        measure_next="idle time around each synchronization in the trace viewer",
        action="at these source lines, read results one step later, or only when logging",
        command=remedies.of_run(facts, "analyze"),
    )


def straggler(facts: Facts) -> Finding | None:
    """One rank is late at every collective, and all others wait for it.

    Its longer compute counts too, unless it is reported as throttled, or is a CPU device that shares its cores.
    """
    found = slowest(facts.analysis)
    if found is None or not found.step_s:
        return None
    late_s = found.late_s + (0.0 if _throttled(found) or found.shares_cores else found.slow_s)
    if not over("straggler", late_s / found.step_s):
        return None
    return Finding(
        rule="straggler",
        confidence="high",
        gain=ceiling(late_s / found.step_s * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{found.device} needs {found.own_s * 1e3:.1f} ms per step outside of communication, the median other device "
            f"{found.usual_own_s * 1e3:.1f} ms",
            f"its compute takes {found.compute_s * 1e3:.1f} ms, that of the others {found.usual_compute_s * 1e3:.1f} ms"
            f"{_idle_cause(facts, found.device)}",
        ),
        measure_next="other jobs and the file system on its node (ridge doctor); what its host does in the gaps (ridge analyze)",
        action=f"exclude the node of {found.device} and requeue",
        command=remedies.without_nodes(facts, [host_of(found.device)]),
    )


def _idle_cause(facts: Facts, name: str) -> str:
    """Name the main cause of the idle time of a device; empty without one."""
    devices = () if facts.analysis is None else facts.analysis.devices
    parts = next((device.idle_by_cause for device in devices if device.device == name), {})
    most = max((cause for cause, seconds in parts.items() if seconds > 0), key=lambda cause: parts[cause], default=None)
    return "" if most is None else f"; main cause of its idle time: {most.replace('_', ' ')}"


def exposed_communication(facts: Facts) -> Finding | None:
    """Communication that compute does not overlap."""
    exposed = facts.every_device(lambda device: device.exposed_communication_s)
    if exposed is None:
        return None
    exposed_s, waiting_s = _exposed(facts)
    planned, extra, _ = _beyond_plan(facts)
    share = exposed * (1 - waiting_s / exposed_s if exposed_s > 0 else 1.0) - _slow_share(facts)
    share *= planned / (planned + extra) if planned else 1.0
    split = all(row.wait_s is not None for row in facts.collectives)
    if not over("exposed_communication" if split else "exposed_unsplit", share):
        return None
    batch = remedies.batch(facts, share, "exposed_communication")
    longest = [f"longest: {row.kind} over {_axes(row)} in {row.layer}" for row in facts.collectives[:1]]
    return Finding(
        rule="exposed communication",
        confidence="high" if split else "medium",
        gain=ceiling(share * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{share:.1%} of the step is exposed communication{', without waiting for other devices' * split}", *longest),
        measure_next="the collective, its mesh axes, and its bus bandwidth against the plan (ridge analyze)",
        action=f"{f'set {batch}' if batch else 'increase data.batch_size'}: more tokens per device for the same bytes; or choose a layout "
        "that keeps this communication inside the node (ridge plan)",
        overrides=(batch,) if batch else (),
    )


def resharding(facts: Facts) -> Finding | None:
    """Collectives that the plan does not contain."""
    planned, extra, beyond = _beyond_plan(facts)
    if not beyond or not over("unplanned", extra / planned if planned else 1.0):
        return None
    share = facts.every_device(lambda device: device.exposed_communication_s)
    worst = max(beyond, key=lambda row: row.compiled_bytes - row.planned_bytes)
    changed = facts.config is not None and bool(facts.config.mesh.rules)
    return Finding(
        rule="accidental resharding",
        confidence="high" if share is not None else "medium",
        gain=ceiling((UNMEASURED if share is None else share) * extra / (planned + extra)),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{extra / 1e6:.1f} MB of collectives per step more than the planned {planned / 1e6:.1f} MB",
            f"{worst.kind} over {', '.join(worst.axes)}: {worst.explanation}",
        ),
        measure_next="the source line of each collective (ridge compile)",
        action="set mesh.rules={}: this run changes the default sharding rules"
        if changed
        else "constrain the activation at that source line to the sharding that its consumer uses",
        overrides=("mesh.rules={}",) if changed else (),
        command=None if changed else remedies.of_run(facts, "shardings"),
    )


def _beyond_plan(facts: Facts) -> tuple[float, float, list[TrafficRow]]:
    """Return the planned bytes of collectives, the bytes beyond them, and the rows that exceed the plan."""
    planned = math.fsum(row.planned_bytes for row in facts.traffic)
    beyond = [row for row in facts.traffic if not row.agrees and row.compiled_bytes > row.planned_bytes]
    return planned, math.fsum(row.compiled_bytes - row.planned_bytes for row in beyond), beyond


def over_remat(facts: Facts) -> Finding | None:
    """Rematerialization although there is memory to spare."""
    components = () if facts.analysis is None else facts.analysis.components
    total_s = math.fsum(each.time_s for each in components)
    again_s = math.fsum(each.time_s for each in components if each.phase == "recompute")
    if not total_s or not over("recompute", again_s / total_s) or over("recompute_memory", facts.memory_share):
        return None
    policy = facts.config.compute.remat.policy if facts.config is not None else "?"
    if policy == "none":  # no key turns off what an attention kernel or an activation recomputes
        return None
    weaker = "compute.remat.policy=none" if policy == "dots" or _doubles_fit(facts) else "compute.remat.policy=dots"
    memory = "unknown" if facts.memory_share is None else f"{facts.memory_share:.0%}"
    return Finding(
        rule="needless rematerialisation",
        confidence="high" if facts.memory_share is not None else "medium",
        gain=ceiling(again_s / total_s * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{again_s / total_s:.1%} of compute is rematerialization (policy {policy}); memory in use: {memory}",),
        measure_next="memory with compute.remat.policy=none (ridge compile)",
        action=f"set {weaker}: the memory in use leaves room for it",
        overrides=(weaker,),
    )


def _doubles_fit(facts: Facts) -> bool:
    """Whether several times the memory in use would fit; assumed where memory is unknown, as on a CPU."""
    return facts.memory_share is None or facts.memory_share < THRESHOLDS["recompute_memory"][0] / 3


def throttled(facts: Facts) -> Finding | None:
    """A device computes longer than the others for equal work, or reports that it is throttled."""
    reported, found = most_throttled(facts.devices), slowest(facts.analysis)
    evidence, shares, device = [], [], ""
    if found is not None and _throttled(found):
        shares.append(found.slow_s / found.step_s)
        device = found.device
        evidence.append(
            f"{found.device} computes {found.compute_s * 1e3:.1f} ms per step, the median other device "
            f"{found.usual_compute_s * 1e3:.1f} ms for equal work: {found.speed:.0%} of the speed"
        )
    if reported is not None:
        shares.append(reported.share * (1.0 if facts.compute_share is None else facts.compute_share))
        evidence.append(reported.reason)
        device = device or reported.device
    if not shares:
        return None
    if reported is None:
        evidence.append(
            "its clock and CPU quota do not explain it" if facts.devices else "no clock or CPU quota was recorded to explain it"
        )
    return Finding(
        rule="clocks throttled",
        confidence="high" if reported is not None else "medium",
        gain=ceiling(shares[0] * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=tuple(evidence),
        measure_next="power, temperature and NVML's throttle reason (ridge doctor); other processes on its cores",
        action="exclude the node, or raise its power limit; on CPUs, give every rank its own cores",
        command=remedies.without_nodes(facts, [host_of(device)]),
    )


def _throttled(found: Slowest) -> bool:
    """Whether the slowest device computes so much longer for equal work that its clock is the likely reason."""
    return found.speed < THRESHOLDS["unequal_compute"][0]


def slow_link(facts: Facts) -> Finding | None:
    """A link slower than planned: equal compute, less bus bandwidth."""
    share = _slow_share(facts)
    found = _slow_links(facts)
    if not found or not over("slow_link_share", share):
        return None
    row, measured, planned = max(found, key=lambda each: _beyond_plan_s(*each))
    return Finding(
        rule="link slower than planned",
        confidence="medium",
        gain=ceiling(share * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{row.kind} over {_axes(row)}: bus bandwidth {measured / 1e9:.3g} GB/s, planned {planned / 1e9:.3g} GB/s",
            f"{share:.1%} of the step is communication beyond the plan",
        ),
        measure_next="bandwidth by mesh axis on these nodes (ridge doctor)",
        action="check which adapters and protocol NCCL chose, then set NCCL_IB_HCA, NCCL_SOCKET_IFNAME or NCCL_NET; or exclude the node",
        command=remedies.with_variables(facts, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET"),
    )


def _axes(row: Collective) -> str:
    return "unknown axes" if row.axes is None else ", ".join(row.axes)


def _slow_links(facts: Facts) -> list[tuple[Collective, float, float]]:
    """Return the collectives whose bus bandwidth is below the plan, with the measured and the planned one in bytes/s."""
    known = [(row, row.bus_bandwidth, row.planned_bus_bandwidth) for row in facts.collectives]
    return [(row, bus, plan) for row, bus, plan in known if bus and plan and bus < THRESHOLDS["slow_link"][0] * plan]


def _beyond_plan_s(row: Collective, measured: float, planned: float) -> float:
    """Return the exposed transfer time of a collective that exceeds its time at the planned bandwidth."""
    return row.exposed_s * (1 - row.wait_share) * (1 - measured / planned)


def _slow_share(facts: Facts) -> float:
    """Return the share of the step that slow links take beyond the plan."""
    beyond_s = math.fsum(_beyond_plan_s(*each) for each in _slow_links(facts))
    exposed_s, _ = _exposed(facts)
    share = facts.every_device(lambda device: device.exposed_communication_s)
    return share * beyond_s / exposed_s if share and exposed_s > 0 else 0.0


def _exposed(facts: Facts) -> tuple[float, float]:
    """Return the exposed time of all collectives per step and device, and how much of it is waiting for the last member."""
    rows = facts.collectives
    return math.fsum(row.exposed_s for row in rows), math.fsum(row.exposed_s * row.wait_share for row in rows)


def _starved_share(facts: Facts) -> float:
    """Return the share of the analyzed time that devices were idle after a host synchronization, on the host with the least of it."""
    hosts = () if facts.analysis is None else facts.analysis.hosts
    shares = [math.fsum(sync.idle_after_s for sync in host.syncs) / host.span_s for host in hosts if host.span_s]
    return min(shares, default=0.0)
