"""The examination: every process reads its host, measures its devices, then all measure the links together; process 0 judges.

    host facts  ->  gathered  ->  own devices (a probe process each)  ->  gathered  ->  links and collectives together  ->  verdict

What the processes tell each other goes over `launch.preflight.exchange`, so a node that cannot start JAX is still heard. Only nodes that
came through the own-device stage take part in the last one, which would otherwise wait for a broken node.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.launch.cluster import Cluster
from ridgeline.launch.exit_codes import BAD_NODE, DONE
from ridgeline.launch.preflight import host, judge_answers, judge_devices, judge_gpu, judge_host, nvml
from ridgeline.launch.preflight.checks import Check, Verdict
from ridgeline.launch.preflight.exchange import Centre, Member, free_port
from ridgeline.launch.preflight.report import Report, conclude
from ridgeline.launch.preflight.watch import ProbeOutcome, run_probe
from ridgeline.measure.probe import ProbePlan
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.parameters import count_parameters

SLACK_S = 15.0
"""Beyond the time of a stage: for words to travel and processes to end."""
DISK_BYTES, DISK_QUICK_BYTES = 256 << 20, 32 << 20
DISK_S = 5.0
STATE_BYTES_PER_PARAMETER = 12
"""float32 parameters and two moments: what a checkpoint holds."""


@dataclass(frozen=True)
class Examination:
    """What to examine, and against what."""

    here: Cluster
    node: str
    """Name of this process's node, as the scheduler knows it."""
    config: Config | None
    cluster: ClusterConfig | None
    calibration: Calibration
    run_dir: Path | None
    gpus_on_node: int | None
    """GPUs the allocation has on this node; None: nobody says."""
    join_s: float
    """Wait for the other processes."""
    timeout_s: float
    """For each of the two measuring stages."""
    quick: bool


class _Shared:
    """Words of this process to process 0, whichever side it is on."""

    def __init__(self, channel: Centre | Member) -> None:
        self.channel = channel

    def progress(self, name: str) -> None:
        """Say what is being measured, so that a process that falls silent can be told where."""
        self.channel.put("progress", name)


def examine(exam: Examination, listeners: Sequence[Any] = ()) -> Report | int:
    """Examine this process's node with all others; process 0 gets the report, the others the exit code.

    Args:
      listeners: process 0's listening sockets; none for a single process.

    Raises LostCentre when process 0 does not answer.
    """
    if exam.here.process == 0:
        return _lead(exam, listeners)
    return _follow(exam)


def _follow(exam: Examination) -> int:
    """Take part as a process other than 0; return the exit code that process 0 tells."""
    here = exam.here
    member = Member(here.addresses, here.ports, here.identity, here.process, exam.node, timeout_s=exam.join_s)
    try:
        offset_s, error_s = member.clock_offset()
        begin = member.hear("begin", exam.join_s + SLACK_S)
        facts = replace(_host_facts(exam, begin["leaders"]), clock_offset_s=offset_s, clock_error_s=error_s)
        member.put("host", _host_message(exam, facts))
        member.hear("own", exam.join_s + SLACK_S)
        member.put("own", _own_devices(exam, _Shared(member)))
        together = member.hear("together", exam.timeout_s + 2 * SLACK_S)
        if together is not None:
            member.put("together", asdict(_together(exam, together, _Shared(member))))
        code: int = member.hear("verdict", exam.timeout_s + 2 * SLACK_S)
        return code
    finally:
        member.close()


def _lead(exam: Examination, listeners: Sequence[Any]) -> Report:
    """Take part as process 0, gather what all say, and judge."""
    begun = time.monotonic()
    here = exam.here
    centre = Centre(listeners, here.identity, here.processes, exam.node)
    came = dict(sorted(centre.wait_for_all(exam.join_s).items()))
    missing = {process: _name(here, process) for process in range(here.processes) if process not in came}
    leaders = [min(process for process in came if came[process] == node) for node in dict.fromkeys(came.values())]
    centre.announce("begin", {"leaders": leaders})
    centre.put("host", _host_message(exam, _host_facts(exam, leaders)))
    hosts = centre.gather("host", exam.join_s)
    checks = judge_answers.judge_missing(missing, exam.join_s) + _silent(centre, came, set(hosts), "the host checks")
    centre.announce("own", None)
    centre.put("own", _own_devices(exam, _Shared(centre)))
    own = centre.gather("own", exam.timeout_s + SLACK_S, list(hosts))
    checks += _silent(centre, {process: came[process] for process in hosts}, set(own), "the measurements of its own devices")
    node_of = dict(came)
    checks += _judge_hosts(exam, hosts, node_of) + _judge_own(exam, hosts, own, node_of)
    plan = _plan_together(exam, came, hosts, own, checks)
    if isinstance(plan, str):
        centre.announce("together", None)
        checks += [Check(node, "collectives", Verdict.NOT_APPLICABLE, "", "", plan) for node in dict.fromkeys(came.values())]
    else:
        centre.announce("together", plan)
        centre.put("together", asdict(_together(exam, plan, _Shared(centre))))
        joint = centre.gather("together", exam.timeout_s + SLACK_S)
        checks += _silent(centre, came, set(joint), "the collectives")
        checks += _judge_together(exam, joint, own, node_of)
    nodes = list(dict.fromkeys([*came.values(), *missing.values()]))
    return _finish(conclude(nodes, _in_order(checks, nodes), time.monotonic() - begun), centre)


def _finish(report: Report, centre: Centre) -> Report:
    centre.announce("verdict", DONE if report.fit else BAD_NODE)
    centre.close()
    return report


def _name(here: Cluster, process: int) -> str:
    known = here.hosts[process] if process < len(here.hosts) else None
    return known or f"process-{process}"


def _silent(centre: Centre, expected: Mapping[int, str], answered: set[int], stage: str) -> list[Check]:
    silent = sorted(set(expected) - answered)
    return judge_answers.judge_silent(silent, centre.lost, expected, centre.last("progress"), stage)


def _in_order(checks: Sequence[Check], nodes: Sequence[str]) -> list[Check]:
    return [check for node in nodes for check in checks if check.node == node]


def _host_facts(exam: Examination, leaders: Sequence[int]) -> host.HostFacts:
    """Read the host; a node's first process also measures the disk."""
    facts = host.read_host(exam.node, exam.here.process)
    if exam.run_dir is None or exam.here.process not in leaders:
        return facts
    found: list[host.DiskFacts] = []
    size = DISK_QUICK_BYTES if exam.quick else DISK_BYTES
    thread = threading.Thread(target=lambda: found.append(host.measure_disk(exam.run_dir or Path(), size, DISK_S)), daemon=True)
    thread.start()
    thread.join(exam.join_s / 2)
    if not found:
        limit = f"no answer within {exam.join_s / 2:.0f} s: the file system hangs"
        return replace(facts, disk=asdict(host.DiskFacts(str(exam.run_dir), 0, None, 0, limit)))
    return replace(facts, disk=asdict(found[0]))


def _host_message(exam: Examination, facts: host.HostFacts) -> dict[str, Any]:
    trouble = exam.here.devices.trouble
    gpus = _own_gpus(exam)
    return {
        "facts": asdict(facts),
        "trouble": None if trouble is None else trouble[1],
        "gpus": gpus.as_dict(),
        "gpus_on_node": exam.gpus_on_node,
    }


def _own_gpus(exam: Examination) -> nvml.GpuReport:
    """Return the GPUs of this process: what it may see, or of those the ones it takes."""
    report = nvml.read_gpus(os.environ)
    ids = exam.here.devices.ids
    return report if ids is None else nvml.GpuReport(tuple(report.gpus[i] for i in ids if i < len(report.gpus)), report.missing)


def _own_devices(exam: Examination, shared: _Shared) -> dict[str, Any]:
    """Measure this process's devices while watching them through NVML."""
    sampler = nvml.LoadSampler(_own_gpus(exam), os.environ)
    outcome = run_probe(_plan(exam, together=False), exam.timeout_s, shared.progress)
    return {"outcome": asdict(outcome), "gpus": [asdict(gpu) for gpu in sampler.stop()]}


def _plan(exam: Examination, *, together: bool, coordinator: str | None = None, nodes: Sequence[str] = ()) -> ProbePlan:
    runtime = None if exam.config is None else exam.config.runtime
    ids = exam.here.devices.ids
    return ProbePlan(
        together=together,
        process=exam.here.process,
        processes=exam.here.processes,
        coordinator=coordinator,
        local_device_ids=None if ids is None else list(ids),
        nodes=list(nodes),
        mesh=None if exam.config is None else exam.config.mesh.model_dump(mode="json"),
        platform="auto" if runtime is None else runtime.platform,
        cpu_devices=1 if runtime is None else runtime.cpu_devices,
        dtypes=None,
        quick=exam.quick,
        channel=-1,
    )


def _plan_together(
    exam: Examination, came: Mapping[int, str], hosts: Mapping[int, Any], own: Mapping[int, Any], checks: Sequence[Check]
) -> dict[str, Any] | str:
    """Return what all need to measure together, or why they cannot."""
    processes = exam.here.processes
    if len(came) < processes or len(hosts) < processes or len(own) < processes:
        return "not measured: some processes gave no answer"
    outcomes = [ProbeOutcome(**value["outcome"]) for value in own.values()]
    blocking = {"answer", "versions", "devices", "arithmetic"}
    bad = sorted({check.node for check in checks if check.verdict == Verdict.FAIL and check.name in blocking})
    broken = [outcome for outcome in outcomes if "devices" not in outcome.results or outcome.hung_in or outcome.died_in]
    if (bad and processes > 1) or broken:
        return f"not measured: {', '.join(bad) or 'a process'} would hold up the others"
    if len({outcome.results["devices"]["platform"] for outcome in outcomes}) > 1:
        return "not measured: some processes have GPUs and some do not"
    if sum(outcome.results["devices"]["count"] for outcome in outcomes) == 1:
        return "one device: nothing to communicate with"
    address = next((address for address in _listening(exam)), "127.0.0.1")
    where = f"[{address}]" if ":" in address else address
    return {"coordinator": f"{where}:{free_port(address)}", "nodes": [came[process] for process in range(processes)]}


def _listening(exam: Examination) -> list[str]:
    from ridgeline.launch.cluster.join import own_addresses

    return own_addresses(exam.here) if exam.here.processes > 1 else []


def _together(exam: Examination, plan: Mapping[str, Any], shared: _Shared) -> ProbeOutcome:
    return run_probe(_plan(exam, together=True, coordinator=plan["coordinator"], nodes=plan["nodes"]), exam.timeout_s, shared.progress)


def _judge_hosts(exam: Examination, hosts: Mapping[int, Any], node_of: Mapping[int, str]) -> list[Check]:
    facts = [host.HostFacts(**message["facts"]) for message in hosts.values()]
    tasks = {node: sum(name == node for name in node_of.values()) for node in node_of.values()}
    size = None if exam.config is None else count_parameters(exam.config.model).total * STATE_BYTES_PER_PARAMETER
    return judge_host.judge_hosts(facts, judge_host.HostContext(exam.cluster, len(tasks), tasks, size))


def _judge_own(exam: Examination, hosts: Mapping[int, Any], own: Mapping[int, Any], node_of: Mapping[int, str]) -> list[Check]:
    """Judge NVML's facts and what each process measured alone."""
    checks: list[Check] = []
    for node in dict.fromkeys(node_of.values()):
        mine = [process for process in sorted(own) if node_of[process] == node]
        missing = next((hosts[process]["gpus"]["missing"] for process in mine if process in hosts), "no answer")
        gpus = {gpu["uuid"]: nvml.GpuFacts(**gpu) for process in mine for gpu in own[process]["gpus"]}
        checks += judge_gpu.judge_gpus(node, nvml.GpuReport(tuple(gpus.values()), None if gpus else missing))
        for process in mine:
            if process in hosts and hosts[process]["trouble"] is not None:
                text = hosts[process]["trouble"]
                checks.append(Check(node, "allocation", Verdict.FAIL, "", "", text, "see the reason"))
    outcomes = {process: ProbeOutcome(**value["outcome"]) for process, value in own.items()}
    checks += judge_answers.judge_own_failures(outcomes, node_of)
    return checks + judge_devices.judge_devices(_device_facts(outcomes, node_of), _device_context(exam, hosts, node_of))


def _judge_together(exam: Examination, joint: Mapping[int, Any], own: Mapping[int, Any], node_of: Mapping[int, str]) -> list[Check]:
    outcomes = {process: ProbeOutcome(**value) for process, value in joint.items()}
    devices = {process: value["outcome"]["results"].get("devices") for process, value in own.items()}
    facts = [replace(fact, results={**fact.results, "devices": devices[fact.process]}) for fact in _device_facts(outcomes, node_of)]
    checks = judge_answers.judge_joint_failures(outcomes, node_of)
    return checks + judge_devices.judge_joint(facts, _device_context(exam, {}, node_of))


def _device_facts(outcomes: Mapping[int, ProbeOutcome], node_of: Mapping[int, str]) -> list[judge_devices.DeviceFacts]:
    return [judge_devices.DeviceFacts(node_of[process], process, outcome.results) for process, outcome in outcomes.items()]


def _device_context(exam: Examination, hosts: Mapping[int, Any], node_of: Mapping[int, str]) -> judge_devices.DeviceContext:
    granted = {node_of[process]: message["gpus_on_node"] for process, message in hosts.items() if message["gpus_on_node"]}
    return judge_devices.DeviceContext(exam.cluster, exam.calibration, granted)


def listen(here: Cluster) -> list[Any]:
    """Return process 0's listening sockets on the first free port. Raises ClusterError when there is none."""
    from ridgeline.launch.cluster import ClusterError, rollcall_server
    from ridgeline.launch.cluster.join import own_addresses

    own = own_addresses(here)
    for port in here.ports:
        listeners = rollcall_server.listen(own, port)
        if listeners is not None:
            return listeners
    taken = ", ".join(map(str, here.ports[:3]))
    raise ClusterError(f"process 0 cannot listen on {', '.join(own)}: port {taken} in use", BAD_NODE)
