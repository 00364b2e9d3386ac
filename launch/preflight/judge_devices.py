"""Judge the devices of the nodes and the links between them. Pure functions of measurements, cluster file and hardware catalog.

Expected rates are those of a plan: the catalog's datasheet peaks times the reached share (planner/calibration.yaml, or a file of
`ridge calibrate`). The catalog has no CPU models, so without a calibration of the machine CPUs are compared with their peers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_bytes
from ridgeline.launch.preflight.checks import CPU_LIMITS, GPU_LIMITS, NETWORK_LIMITS, Check, Expected, Limits, Verdict, judge_rate
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.communication import time_s
from ridgeline.planner.hardware import Hardware, find_hardware, hardware
from ridgeline.planner.links import Fabric

MATMUL_SIZE = 8192
"""Size of the square matmuls on GPUs (measure/device_rates.py)."""


@dataclass(frozen=True)
class DeviceFacts:
    """Measurements of one process, on its own devices and together with the others."""

    node: str
    process: int
    results: Mapping[str, Any] = field(default_factory=dict)
    """Results of the probe: measurement -> value."""


@dataclass(frozen=True)
class DeviceContext:
    """What device measurements are compared with."""

    cluster: ClusterConfig | None
    calibration: Calibration
    expected_devices: Mapping[str, int] = field(default_factory=dict)
    """Node -> allocated devices, where known."""

    def limits(self, platform: str) -> Limits:
        """Return the limits for rates of a platform's devices."""
        return CPU_LIMITS if platform == "cpu" else GPU_LIMITS

    def device(self, kind: str, platform: str) -> Hardware | None:
        """Return the catalog entry of a device; for a CPU only if the calibration measured it."""
        if platform != "cpu":
            return find_hardware(kind)
        measured = any(point.device == "cpu" for point in (*self.calibration.file.matmul, *self.calibration.file.memory))
        return hardware("cpu") if measured else None


def judge_devices(facts: Sequence[DeviceFacts], context: DeviceContext) -> list[Check]:
    """Judge the measurements of every process's own devices."""
    by_node = _by_node(facts)
    checks: list[Check] = []
    for node, own in by_node.items():
        checks += [judge_count(node, own, context), judge_kind(node, own, context), *judge_arithmetic(node, own)]
    rates = {name for fact in facts for name in fact.results if name.startswith("matmul ") or name == "memory bandwidth"}
    for name in sorted(rates):
        checks += _judge_device_rate(name, by_node, context)
    return checks


def judge_joint(facts: Sequence[DeviceFacts], context: DeviceContext) -> list[Check]:
    """Judge the joint measurements: links between nodes, collectives over mesh axes."""
    by_node = _by_node(facts)
    return [*_judge_links(by_node, context), *_judge_axes(by_node, context)]


def _by_node(facts: Sequence[DeviceFacts]) -> dict[str, list[DeviceFacts]]:
    """Group the facts of processes with open devices by node, in process order."""
    by_node: dict[str, list[DeviceFacts]] = {}
    for fact in sorted(facts, key=lambda fact: fact.process):
        if fact.results.get("devices"):
            by_node.setdefault(fact.node, []).append(fact)
    return by_node


def judge_count(node: str, own: Sequence[DeviceFacts], context: DeviceContext) -> Check:
    """Judge the number of devices that the node's processes see."""
    seen = sum(fact.results["devices"]["count"] for fact in own)
    measured = f"{seen} {own[0].results['devices']['platform']}"
    if context.cluster is None:
        return Check(node, "devices", Verdict.NOT_APPLICABLE, measured, "", "no cluster file", value=seen)
    wanted = context.expected_devices.get(node, context.cluster.devices_per_node)
    if seen == wanted:
        return Check(node, "devices", Verdict.OK, measured, str(wanted), value=seen)
    if seen > wanted:
        reason, fix = f"{seen - wanted} more than expected", "check devices_per_node in the cluster file, and jax_num_cpu_devices"
        return Check(node, "devices", Verdict.WARN, measured, str(wanted), reason, fix, seen)
    reason = f"{wanted - seen} missing"
    fix = "exclude the node and report it (nvidia-smi -L, dmesg | grep Xid), unless the job requested fewer (--gres)"
    return Check(node, "devices", Verdict.FAIL, measured, str(wanted), reason, fix, seen)


def judge_kind(node: str, own: Sequence[DeviceFacts], context: DeviceContext) -> Check:
    """Judge whether the devices are those of the cluster file."""
    kinds = sorted({kind for fact in own for kind in fact.results["devices"]["kinds"]})
    platform = own[0].results["devices"]["platform"]
    names = ["cpu"] if platform == "cpu" else [found.name if (found := find_hardware(kind)) else kind for kind in kinds]
    measured = ", ".join(kinds)
    if context.cluster is None:
        return Check(node, "device kind", Verdict.NOT_APPLICABLE, measured, "", "no cluster file")
    wanted = context.cluster.device
    if names == [wanted]:
        return Check(node, "device kind", Verdict.OK, measured, wanted)
    reason = f"{', '.join(names)} instead of {wanted}"
    fix = "use the cluster file of these machines; if a GPU node shows CPUs, check the driver and the extra cuda12 or cuda13"
    return Check(node, "device kind", Verdict.FAIL, measured, wanted, reason, fix)


def judge_arithmetic(node: str, own: Sequence[DeviceFacts]) -> list[Check]:
    """Judge exact matmuls: a device with wrong results corrupts the training silently."""
    if not any("arithmetic" in fact.results for fact in own):
        return []
    wrong = [text for fact in own for text in fact.results.get("arithmetic", ())]
    if not wrong:
        return [Check(node, "arithmetic", Verdict.OK, "exact", "exact")]
    fix = "exclude the node and report it: silent data corruption"
    return [Check(node, "arithmetic", Verdict.FAIL, f"{len(wrong)} devices wrong", "exact", "; ".join(wrong)[:300], fix)]


def _judge_device_rate(name: str, by_node: Mapping[str, Sequence[DeviceFacts]], context: DeviceContext) -> list[Check]:
    """Judge matmul rates or memory bandwidth; the rate of a node is that of its slowest device."""
    slowest: dict[str, tuple[float, str]] = {}
    for node, own in by_node.items():
        ids = [
            (rate, device) for fact in own for rate, device in zip(fact.results.get(name, ()), fact.results["devices"]["ids"], strict=False)
        ]
        if ids:
            rate, device = min(ids)
            slowest[node] = rate, f"device {device}, the slowest of {len(ids)}" if len(ids) > 1 else ""
    checks = []
    matmul = name.startswith("matmul ")
    scale, unit = (1e12, "TFLOP/s") if matmul else (1e9, "GB/s")
    peers = [rate / scale for rate, _ in slowest.values()]
    for node, (rate, detail) in slowest.items():
        seen = by_node[node][0].results["devices"]
        expected = _expected_device_rate(name, context.device(seen["kinds"][0], seen["platform"]), seen["kinds"][0], context)
        if expected.value is not None:
            expected = Expected(expected.value / scale, expected.source)
        checks.append(
            judge_rate(
                node,
                name,
                rate / scale,
                unit,
                expected=expected,
                peers=peers,
                limits=context.limits(seen["platform"]),
                fix="check for throttling, a power limit, or another process on the device; exclude the node",
                detail=detail,
            )
        )
    return checks


def _expected_device_rate(name: str, device: Hardware | None, kind: str, context: DeviceContext) -> Expected:
    """Return the expected rate of a device, as a plan uses it."""
    if device is None:
        return Expected(None, f"no expected rate for '{kind}' (--calibration)")
    source = f"the rate of {device.name} ({context.calibration.name})"
    if name == "memory bandwidth":
        return Expected(context.calibration.memory_bytes_per_s(device), source)
    size = MATMUL_SIZE if device.tensor_cores else 1024
    try:
        return Expected(context.calibration.matmul_flops_per_s(device, name.removeprefix("matmul "), size, size, size), source)
    except UserError as error:
        return Expected(None, str(error))


def _judge_links(by_node: Mapping[str, Sequence[DeviceFacts]], context: DeviceContext) -> list[Check]:
    """Judge each node's link to its faster neighbor: a node that is slow with both neighbors is the cause."""
    best: dict[str, float] = {}
    for node, own in by_node.items():
        rounds = [min(rates) for r in (0, 1) if (rates := [rate for fact in own if (rate := fact.results.get(f"link {r}")) is not None])]
        if rounds:
            best[node] = max(rounds)
    cpu = any(own[0].results["devices"]["platform"] == "cpu" for own in by_node.values())
    checks = []
    for node, rate in best.items():
        width = sum(fact.results["devices"]["count"] for fact in by_node[node])
        checks.append(
            judge_rate(
                node,
                "link to neighbours",
                rate / 1e9,
                "GB/s",
                expected=_expected_link_rate(context, width, len(best)),
                peers=[rate / 1e9 for rate in best.values()],
                limits=CPU_LIMITS if cpu else NETWORK_LIMITS,
                fix="check the node's network ports (ibstat, ibdiagnet), NCCL_IB_HCA and NCCL_SOCKET_IFNAME; exclude the node",
                detail="per device and direction, both directions at once",
                capped=not cpu,
            )
        )
    return checks


_LINK_BYTES = 64 << 20
"""Message size of a link's expected rate."""


def _expected_link_rate(context: DeviceContext, width: int, nodes: int) -> Expected:
    if context.cluster is None:
        return Expected(None, "no cluster file")
    fabric = Fabric.from_cluster(context.cluster, context.calibration, num_devices=width * nodes)
    cost = time_s("point-to-point", _LINK_BYTES, fabric.group(width, 2))
    return Expected(cost.bus_bandwidth / 1e9, f"the cluster file's {cost.bottleneck_link}")


def _judge_axes(by_node: Mapping[str, Sequence[DeviceFacts]], context: DeviceContext) -> list[Check]:
    """Judge collectives per mesh axis at the largest measured size; the smaller sizes are shown."""
    names = [name for own in by_node.values() for fact in own for name in fact.results if name.startswith(("all-reduce ", "all-gather "))]
    cpu = any(own[0].results["devices"]["platform"] == "cpu" for own in by_node.values())
    checks = []
    for name in dict.fromkeys(names):
        op, axis = name.split(" ", 1)
        measured: dict[str, tuple[float, float, str]] = {}
        for node, own in by_node.items():
            series = [fact.results[name] for fact in own if fact.results.get(name)]
            if series:
                worst = min(series, key=lambda points: points[-1][2])
                size, _, rate = worst[-1]
                small = ", ".join(f"{format_bytes(s)}: {t * 1e6:,.0f} us" for s, t, _ in worst[:-1])
                measured[node] = size, rate, f"{format_bytes(size)}; {small}"
        for node, (size, rate, detail) in measured.items():
            sizes = by_node[node][0].results["mesh"]
            checks.append(
                judge_rate(
                    node,
                    name,
                    rate / 1e9,
                    "GB/s",
                    expected=_expected_axis_rate(context, op, axis, sizes, size),
                    peers=[rate / 1e9 for _, rate, _ in measured.values()],
                    limits=CPU_LIMITS if cpu else NETWORK_LIMITS,
                    fix="all nodes: check which ports and algorithm NCCL uses (NCCL_DEBUG=INFO); one node: exclude it",
                    detail=detail,
                    capped=not cpu,
                )
            )
    return checks


def _expected_axis_rate(context: DeviceContext, op: str, axis: str, sizes: Mapping[str, int], size_bytes: float) -> Expected:
    if context.cluster is None:
        return Expected(None, "no cluster file")
    devices = 1
    for size in sizes.values():
        devices *= size
    try:
        group = Fabric.from_cluster(context.cluster, context.calibration, num_devices=devices).axes_group(sizes, (axis,))
    except UserError as error:
        return Expected(None, str(error))
    cost = time_s(op, size_bytes, group)
    return Expected(cost.bus_bandwidth / 1e9, f"a plan's rate for the cluster file's {cost.bottleneck_link}")
