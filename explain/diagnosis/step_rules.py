"""Rules on the step ledger of a profile, on the ranks, and on the compiled step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over
from ridgeline.explain.diagnosis.held_down import held_down
from ridgeline.explain.diagnosis.ranks import host_of, slowest

UNMEASURED = 0.1
"""Share of a step that communication is taken to be where no profile says."""


def host_bound(facts: Facts) -> Finding | None:
    """Devices idle while the host launches work: steps too small for their overhead."""
    idle = facts.every_device(lambda device: sum(float(device["idle_by_cause"].get(cause, 0.0)) for cause in ("launch", "other")))
    share = None if idle is None else idle - _starved_share(facts)
    if share is None or not over("host_bound", share):
        return None
    step = f" at {facts.step_s * 1e3:.1f} ms per step" if facts.step_s else ""
    batch = remedies.batch(facts, share, "host_bound")
    return Finding(
        rule="host-bound steps",
        confidence="medium",
        gain=ceiling(share * facts.share("productive")),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"all devices were idle {share:.1%} of the step while the host launched or did other work{step}",),
        measure_next="ridge analyze: launch rate, queue depth and host synchronisations",
        action=f"{batch or 'a larger batch'}: more work per launch",
        next_bottleneck="memory bandwidth, as the kernels grow",
        overrides=(batch,) if batch else (),
    )


def host_syncs(facts: Facts) -> Finding | None:
    """The host waits for the device inside the step, and the device then waits for the host."""
    share = _starved_share(facts)
    if not over("host_syncs", share):
        return None
    syncs = [s for host in (facts.analysis or {}).get("hosts", []) for s in host.get("syncs", [])]
    steps = max(1, len((facts.analysis or {}).get("steps", [])))
    count = sum(int(s.get("count", 1)) for s in syncs)
    where = ", ".join(sorted({f"{s.get('what', 'wait')} at {s.get('source', '?')}" for s in syncs})[:3])
    return Finding(
        rule="host synchronisation in the step",
        confidence="high",
        gain=ceiling(share * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{count / steps:.1f} host synchronisations per step left devices idle for {share:.1%} of it ({where})",),
        measure_next="the idle time around each of them in the trace viewer",
        action="read results one step late, or every log line only, at the lines it names",
        next_bottleneck="the device",
        command=remedies.of_run(facts, "analyze"),
    )


def straggler(facts: Facts) -> Finding | None:
    """One rank comes late to every collective though its compute is not longer: everybody waits for it."""
    found = slowest(facts.analysis)
    if found is None or not found.step_s or not over("straggler", found.late_s / found.step_s):
        return None
    causes = _idle_causes(facts, found.device)
    return Finding(
        rule="straggler",
        confidence="high",
        gain=ceiling(found.late_s / found.step_s * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{found.device} needs {found.own_s * 1e3:.1f} ms of its own per step, others {found.usual_own_s * 1e3:.1f} ms",
            f"its compute takes {found.compute_s * 1e3:.1f} ms, theirs {found.usual_compute_s * 1e3:.1f} ms{causes}",
        ),
        measure_next="ridge doctor on its node: other jobs, its file system; ridge analyze: what its host does in the gaps",
        action=f"exclude the node of {found.device} and requeue",
        next_bottleneck="communication among equal ranks",
        command=remedies.without_nodes(facts, [host_of(found.device)]),
    )


def _idle_causes(facts: Facts, name: str) -> str:
    devices: list[Mapping[str, Any]] = (facts.analysis or {}).get("devices", [])
    device = next((d for d in devices if d["device"] == name), {})
    parts = {cause: seconds for cause, seconds in device.get("idle_by_cause", {}).items() if seconds > 0}
    most = max(parts, key=lambda cause: parts[cause], default=None)
    return "" if most is None else f"; while it idles its host does: {most.replace('_', ' ')}"


def exposed_communication(facts: Facts) -> Finding | None:
    """Communication that compute does not hide."""
    exposed = facts.every_device(lambda device: float(device["exposed_communication_s"]))
    if exposed is None:
        return None
    exposed_s, waiting_s = _exposed(facts)
    planned, extra, _ = _beyond_plan(facts)
    share = exposed * (1 - waiting_s / exposed_s if exposed_s > 0 else 1.0) - _slow_share(facts)
    share *= planned / (planned + extra) if planned else 1.0
    split = all(row.get("wait_s") is not None for row in (facts.analysis or {}).get("collectives", []))
    if not over("exposed_communication" if split else "exposed_unsplit", share):
        return None
    rows = sorted((facts.analysis or {}).get("collectives", []), key=lambda c: -float(c.get("exposed_s", 0.0)))
    batch = remedies.batch(facts, share, "exposed_communication")
    worst = [f"most of it {c['kind']} over {c.get('axes')} in {c.get('layer', '?')}" for c in rows[:1]]
    return Finding(
        rule="exposed communication",
        confidence="high" if split else "medium",
        gain=ceiling(share * facts.share("productive")),
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{share:.1%} of the step is communication with no compute beside it{', waiting for others left out' * split}", *worst),
        measure_next="ridge analyze: which collective, over which axis; its bus bandwidth against the plan",
        action=f"{batch or 'a larger data.batch_size'}: more tokens per device for the same bytes; or a layout that keeps them inside the "
        "node (ridge plan)",
        next_bottleneck="compute",
        overrides=(batch,) if batch else (),
    )


def resharding(facts: Facts) -> Finding | None:
    """Collectives that the plan does not contain."""
    planned, extra, beyond = _beyond_plan(facts)
    if not beyond or not over("unplanned", extra / planned if planned else 1.0):
        return None
    share = facts.every_device(lambda device: float(device["exposed_communication_s"]))
    worst = max(beyond, key=lambda row: row["compiled_bytes"] - row["planned_bytes"])
    changed = facts.config is not None and bool(facts.config.mesh.rules)
    return Finding(
        rule="accidental resharding",
        confidence="high" if share is not None else "medium",
        gain=ceiling((UNMEASURED if share is None else share) * extra / (planned + extra)),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{extra / 1e6:.1f} MB per step beyond the {planned / 1e6:.1f} MB planned",
            f"{worst['kind']} over {worst['axes']}: {worst['explanation']}",
        ),
        measure_next="ridge compile: the source line of each",
        action="mesh.rules={}: the rules of this run are not the default ones"
        if changed
        else "constrain the activation at that line to the sharding its consumer wants (mesh.rules holds the table)",
        next_bottleneck="the planned communication",
        overrides=("mesh.rules={}",) if changed else (),
        command=None if changed else remedies.of_run(facts, "shardings"),
    )


def _beyond_plan(facts: Facts) -> tuple[float, float, list[Mapping[str, Any]]]:
    """Return planned bytes of collectives, bytes beyond them, and the rows of what is beyond."""
    planned = math.fsum(float(row["planned_bytes"]) for row in facts.traffic)
    beyond = [row for row in facts.traffic if not row["agrees"] and row["compiled_bytes"] > row["planned_bytes"]]
    return planned, math.fsum(float(row["compiled_bytes"]) - float(row["planned_bytes"]) for row in beyond), beyond


def over_remat(facts: Facts) -> Finding | None:
    """Recomputation that memory does not ask for."""
    components = (facts.analysis or {}).get("components") or []
    total_s = math.fsum(float(c["time_s"]) for c in components)
    again_s = math.fsum(float(c["time_s"]) for c in components if c.get("phase") == "recompute")
    if not total_s or not over("recompute", again_s / total_s) or over("recompute_memory", facts.memory_share):
        return None
    policy = facts.config.compute.remat.policy if facts.config is not None else "?"
    if policy == "none":  # what an attention or an activation computes again by itself, no key turns off
        return None
    weaker = "compute.remat.policy=none" if policy == "dots" or _doubles_fit(facts) else "compute.remat.policy=dots"
    memory = "unknown" if facts.memory_share is None else f"{facts.memory_share:.0%}"
    return Finding(
        rule="needless rematerialisation",
        confidence="high" if facts.memory_share is not None else "medium",
        gain=ceiling(again_s / total_s * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"{again_s / total_s:.1%} of compute is done again in the backward pass (policy {policy}); memory in use: {memory}",),
        measure_next="ridge compile with compute.remat.policy=none: does it fit",
        action=f"{weaker}: it should fit",
        next_bottleneck="memory capacity",
        overrides=(weaker,),
    )


def _doubles_fit(facts: Facts) -> bool:
    """Whether there is room for several times what is in use; unknown memory is taken to have it, as on a CPU."""
    return facts.memory_share is None or facts.memory_share < THRESHOLDS["recompute_memory"][0] / 3


def throttled(facts: Facts) -> Finding | None:
    """A device computes longer than the others for equal work, or says itself that it is held down."""
    held, found = held_down(facts.devices), slowest(facts.analysis)
    evidence, shares, device = [], [], ""
    if found is not None and found.slow_s and found.step_s:
        equal = found.usual_compute_s / (found.usual_compute_s + found.slow_s)
        if equal < THRESHOLDS["unequal_compute"][0]:
            shares.append(found.slow_s / found.step_s)
            device = found.device
            evidence.append(
                f"{found.device} computes {found.compute_s * 1e3:.1f} ms for the step that takes the median other device "
                f"{found.usual_compute_s * 1e3:.1f} ms: it runs at {equal:.0%} of their speed"
            )
    if held is not None:
        shares.append(held.share * (1.0 if facts.compute_share is None else facts.compute_share))
        evidence.append(held.seen)
        device = device or held.device
    if not shares:
        return None
    if held is None:
        evidence.append(
            "neither its clock nor a quota says why" if facts.devices else "neither a clock nor a quota was recorded that would say why"
        )
    return Finding(
        rule="clocks throttled",
        confidence="high" if held is not None else "medium",
        gain=ceiling(shares[0] * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=tuple(evidence),
        measure_next="ridge doctor: power, temperature, the reason NVML gives; who else uses its cores",
        action="exclude the node, or raise its power limit; on CPUs: cores of its own for every rank",
        next_bottleneck="memory bandwidth",
        command=remedies.without_nodes(facts, [host_of(device)]),
    )


def slow_link(facts: Facts) -> Finding | None:
    """A link slower than planned: equal compute, less bus bandwidth."""
    share = _slow_share(facts)
    found = _slow_links(facts)
    if not found or not over("slow_link_share", share):
        return None
    worst = max(found, key=_beyond_plan_s)
    return Finding(
        rule="link slower than planned",
        confidence="medium",
        gain=ceiling(share * facts.share("productive")),
        lens="co-design",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(
            f"{worst.get('kind')} over {worst.get('axes')}: {worst['bus_bandwidth'] / 1e9:.3g} GB/s of bus bandwidth, "
            f"{worst['planned_bus_bandwidth'] / 1e9:.3g} planned",
            f"{share:.1%} of the step is communication beyond the plan",
        ),
        measure_next="ridge doctor: bandwidth by axis, on these nodes",
        action="see which adapters and protocol NCCL chose, then NCCL_IB_HCA, NCCL_SOCKET_IFNAME or NCCL_NET; or exclude the node",
        next_bottleneck="compute",
        command=remedies.with_variables(facts, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET"),
    )


def _slow_links(facts: Facts) -> list[Mapping[str, Any]]:
    """Collectives whose bus bandwidth is below the plan."""
    return [
        c
        for c in (facts.analysis or {}).get("collectives", [])
        if c.get("bus_bandwidth")
        and c.get("planned_bus_bandwidth")
        and c["bus_bandwidth"] < THRESHOLDS["slow_link"][0] * c["planned_bus_bandwidth"]
    ]


def _beyond_plan_s(row: Mapping[str, Any]) -> float:
    """Exposed time on the wire of a collective that the planned bandwidth would not take."""
    waiting = (row.get("wait_s") or 0.0) / row["time_s"] if row.get("time_s") else 0.0
    wire_s = float(row.get("exposed_s", 0.0)) * (1 - waiting)
    return wire_s * (1 - float(row["bus_bandwidth"]) / float(row["planned_bus_bandwidth"]))


def _slow_share(facts: Facts) -> float:
    """Share of the step that links slower than planned take beyond the plan."""
    beyond_s = math.fsum(_beyond_plan_s(row) for row in _slow_links(facts))
    exposed_s, _ = _exposed(facts)
    share = facts.every_device(lambda device: float(device["exposed_communication_s"]))
    return share * beyond_s / exposed_s if share and exposed_s > 0 else 0.0


def _exposed(facts: Facts) -> tuple[float, float]:
    """Return the exposed time of all collectives per step and device, and how much of it waits for the last member."""
    rows = (facts.analysis or {}).get("collectives", [])
    exposed_s = math.fsum(float(row.get("exposed_s", 0.0)) for row in rows)
    waiting_s = math.fsum(float(row["exposed_s"]) * (row.get("wait_s") or 0.0) / row["time_s"] for row in rows if row.get("time_s"))
    return exposed_s, waiting_s


def _starved_share(facts: Facts) -> float:
    """Share of the analysed time that devices idled after a wait of their host for them, on the host that did so least."""
    shares = [
        math.fsum(float(s.get("idle_after_s", 0.0)) for s in host.get("syncs", [])) / float(host["span_s"])
        for host in (facts.analysis or {}).get("hosts", [])
        if host.get("span_s")
    ]
    return min(shares, default=0.0)
