"""The preflight: every process reads its host and measures its devices, then all measure the links together; process 0 judges.

    host facts  ->  gathered  ->  own devices (in a probe process)  ->  gathered  ->  links and collectives together  ->  verdict

The processes exchange messages through `launch.preflight.exchange`, so a node that cannot start JAX still reports. The last stage runs only
if all nodes passed the previous one, because it would otherwise wait for a broken node.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.launch.cluster import Cluster, ClusterError, network
from ridgeline.launch.cluster.join import own_addresses
from ridgeline.launch.cluster.rendezvous import SECRET
from ridgeline.launch.exit_codes import BAD_NODE, DONE
from ridgeline.launch.preflight import host, judge_devices, judge_gpu, judge_host, judge_processes, nvml
from ridgeline.launch.preflight.checks import Check, Verdict
from ridgeline.launch.preflight.exchange import ExchangeClient, ExchangeServer
from ridgeline.launch.preflight.probe_runner import ProbeOutcome, run_probe
from ridgeline.launch.preflight.report import Report, conclude
from ridgeline.measure.probe import ProbePlan
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.economics import state_bytes

SLACK_S = 15.0
"""Added to the timeout of a stage for messages and the end of processes."""
DISK_BYTES, DISK_QUICK_BYTES = 256 << 20, 32 << 20
DISK_S = 5.0


@dataclass(frozen=True)
class Examination:
    """Input of a preflight."""

    here: Cluster
    node: str
    """Name of this process's node in the scheduler."""
    config: Config | None
    cluster: ClusterConfig | None
    calibration: Calibration
    run_dir: Path | None
    gpus_on_node: int | None
    """GPUs allocated on this node; None: unknown."""
    join_s: float
    """Timeout of the wait for the other processes."""
    timeout_s: float
    """Timeout of each of the two measuring stages."""
    quick: bool


def _reporter(channel: ExchangeServer | ExchangeClient) -> Callable[[str], None]:
    """Return a function that reports the running measurement to process 0, which names it if the process stops responding."""
    return lambda name: channel.put("progress", name)


def examine(exam: Examination, listeners: Sequence[Any] = ()) -> Report | int:
    """Check this process's node together with all others; return the report in process 0, the exit code in the others.

    Args:
      listeners: process 0's listening sockets; none for a single process.

    Raises ExchangeLost if process 0 cannot be reached.
    """
    if exam.here.process == 0:
        return _lead(exam, listeners)
    return _follow(exam)


def _follow(exam: Examination) -> int:
    """Run as a process other than 0; return the exit code from process 0."""
    here = exam.here
    client = ExchangeClient(here.addresses, here.ports, here.identity, here.process, exam.node, timeout_s=exam.join_s, secret=_secret())
    try:
        offset_s, error_s = client.clock_offset()
        begin = client.receive("begin", exam.join_s + SLACK_S)
        facts = replace(_host_facts(exam, begin["leaders"]), clock_offset_s=offset_s, clock_error_s=error_s)
        client.put("host", _host_message(exam, facts))
        client.receive("own", exam.join_s + SLACK_S)
        client.put("own", _own_devices(exam, _reporter(client)))
        together = client.receive("together", exam.timeout_s + 2 * SLACK_S)
        if together is not None:
            client.put("together", asdict(_together(exam, together, _reporter(client))))
        code: int = client.receive("verdict", exam.timeout_s + 2 * SLACK_S)
        return code
    finally:
        client.close()


def _lead(exam: Examination, listeners: Sequence[Any]) -> Report:
    """Run as process 0: gather the facts of all processes and judge them."""
    begun = time.monotonic()
    here = exam.here
    server = ExchangeServer(listeners, here.identity, here.processes, exam.node, secret=_secret(), log=_log)
    node_of = dict(sorted(server.wait_for_all(exam.join_s).items()))
    missing = {process: _name(here, process) for process in range(here.processes) if process not in node_of}
    leaders = [min(process for process in node_of if node_of[process] == node) for node in dict.fromkeys(node_of.values())]
    server.broadcast("begin", {"leaders": leaders})
    server.put("host", _host_message(exam, _host_facts(exam, leaders)))
    hosts = _valid(server.gather("host", exam.join_s), _check_host)
    checks = judge_processes.judge_missing(missing, exam.join_s) + _silent(server, node_of, set(hosts), "the host checks")
    server.broadcast("own", None)
    server.put("own", _own_devices(exam, _reporter(server)))
    own = _valid(server.gather("own", exam.timeout_s + SLACK_S, list(hosts)), _check_own)
    checks += _silent(server, {process: node_of[process] for process in hosts}, set(own), "the measurements of its own devices")
    checks += _judge_hosts(exam, hosts, node_of) + _judge_own(exam, hosts, own, node_of)
    plan = _plan_together(exam, node_of, hosts, own, checks)
    if isinstance(plan, str):
        server.broadcast("together", None)
        checks += [Check(node, "collectives", Verdict.NOT_APPLICABLE, "", "", plan) for node in dict.fromkeys(node_of.values())]
    else:
        deadline_s = time.monotonic() + exam.timeout_s + SLACK_S
        server.broadcast("together", plan)
        # The probe of process 0 serves jax.distributed, so it ends last: a probe that lost its server would look like the cause.
        others = [process for process in node_of if process != here.process]
        outcome = _together(exam, plan, _reporter(server), lambda: server.gather("together", deadline_s - time.monotonic(), others))
        server.put("together", asdict(outcome))
        joint = _valid(server.gather("together", max(0.0, deadline_s - time.monotonic())), _OUTCOME.validate_python)
        checks += _silent(server, node_of, set(joint), "the collectives")
        checks += _judge_together(exam, joint, own, node_of)
    nodes = list(dict.fromkeys([*node_of.values(), *missing.values()]))
    return _finish(conclude(nodes, _in_order(checks, nodes), time.monotonic() - begun), server)


def _finish(report: Report, server: ExchangeServer) -> Report:
    server.broadcast("verdict", DONE if report.fit else BAD_NODE)
    server.close()
    return report


def _secret() -> str:
    return os.environ.get(SECRET, "")


def _log(message: str) -> None:
    sys.stderr.write(f"ridge: {message}\n")


def _valid(values: Mapping[int, Any], check: Callable[[Any], object]) -> dict[int, Any]:
    """Return the values of the expected types; a process that sent anything else counts as one that did not respond."""
    valid: dict[int, Any] = {}
    for process, value in values.items():
        try:
            check(value)
        except (ValueError, TypeError, KeyError):
            _log(f"WARNING: ignored a message of process {process} with unexpected types")
        else:
            valid[process] = value
    return valid


_FACTS: TypeAdapter[host.HostFacts] = TypeAdapter(host.HostFacts)
_GPU: TypeAdapter[nvml.GpuFacts] = TypeAdapter(nvml.GpuFacts)
_OUTCOME: TypeAdapter[ProbeOutcome] = TypeAdapter(ProbeOutcome)
_HOST: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


def _check_host(value: Any) -> None:
    message = _HOST.validate_python(value)
    _FACTS.validate_python(message["facts"])
    _HOST.validate_python(message["gpus"])["missing"]
    if not isinstance(message["error"], str | None) or not isinstance(message["gpus_on_node"], int | None):
        raise TypeError("not a host message")


def _check_own(value: Any) -> None:
    message = _HOST.validate_python(value)
    _OUTCOME.validate_python(message["outcome"])
    if not isinstance(message["gpus"], list):
        raise TypeError("not a list of GPUs")
    for gpu in message["gpus"]:
        _GPU.validate_python(gpu)


def _name(here: Cluster, process: int) -> str:
    known = here.hosts[process] if process < len(here.hosts) else None
    return known or f"process-{process}"


def _silent(server: ExchangeServer, expected: Mapping[int, str], answered: set[int], stage: str) -> list[Check]:
    silent = sorted(set(expected) - answered)
    return judge_processes.judge_silent(silent, server.lost, expected, server.latest("progress"), stage)


def _in_order(checks: Sequence[Check], nodes: Sequence[str]) -> list[Check]:
    return [check for node in nodes for check in checks if check.node == node]


def _host_facts(exam: Examination, leaders: Sequence[int]) -> host.HostFacts:
    """Read the facts of the host; the first process of a node also measures the disk."""
    facts = host.read_host(exam.node, exam.here.process)
    if exam.run_dir is None or exam.here.process not in leaders:
        return facts
    found: list[host.DiskFacts] = []
    size = DISK_QUICK_BYTES if exam.quick else DISK_BYTES
    thread = threading.Thread(target=lambda: found.append(host.measure_disk(exam.run_dir or Path(), size, DISK_S)), daemon=True)
    thread.start()
    thread.join(exam.join_s / 2)
    if not found:
        limit = f"not finished within {exam.join_s / 2:.0f} s: the file system hangs"
        return replace(facts, disk=asdict(host.DiskFacts(str(exam.run_dir), 0, None, 0, limit)))
    return replace(facts, disk=asdict(found[0]))


def _host_message(exam: Examination, facts: host.HostFacts) -> dict[str, Any]:
    error = exam.here.devices.error
    gpus = _own_gpus(exam)
    return {
        "facts": asdict(facts),
        "error": None if error is None else error[1],
        "gpus": gpus.as_dict(),
        "gpus_on_node": exam.gpus_on_node,
    }


def _own_gpus(exam: Examination) -> nvml.GpuReport:
    """Return the GPUs of this process: of the visible ones those it uses."""
    report = nvml.read_gpus(os.environ)
    ids = exam.here.devices.ids
    return report if ids is None else nvml.GpuReport(tuple(report.gpus[i] for i in ids if i < len(report.gpus)), report.missing)


def _own_devices(exam: Examination, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure this process's devices while sampling them through NVML."""
    sampler = nvml.LoadSampler(_own_gpus(exam), os.environ)
    outcome = run_probe(_plan(exam, together=False), exam.timeout_s, progress)
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
    exam: Examination, node_of: Mapping[int, str], hosts: Mapping[int, Any], own: Mapping[int, Any], checks: Sequence[Check]
) -> dict[str, Any] | str:
    """Return the parameters of the joint measurement, or the reason against it."""
    processes = exam.here.processes
    if len(node_of) < processes or len(hosts) < processes or len(own) < processes:
        return "not measured: some processes did not report"
    outcomes = [ProbeOutcome(**value["outcome"]) for value in own.values()]
    blocking = {"answer", "versions", "devices", "arithmetic"}
    bad = sorted({check.node for check in checks if check.verdict == Verdict.FAIL and check.name in blocking})
    broken = [outcome for outcome in outcomes if "devices" not in outcome.results or outcome.hung_in or outcome.died_in]
    if (bad and processes > 1) or broken:
        return f"not measured: {', '.join(bad) or 'a process'} would block the others"
    if len({outcome.results["devices"]["platform"] for outcome in outcomes}) > 1:
        return "not measured: some processes have GPUs and some do not"
    if sum(outcome.results["devices"]["count"] for outcome in outcomes) == 1:
        return "one device: no communication"
    address = own_addresses(exam.here)[0] if processes > 1 else network.LOOPBACK
    return {
        "coordinator": network.with_port(address, network.free_port(address)),
        "nodes": [node_of[process] for process in range(processes)],
    }


def _together(
    exam: Examination, plan: Mapping[str, Any], progress: Callable[[str], None], before_end: Callable[[], object] = lambda: None
) -> ProbeOutcome:
    probe = _plan(exam, together=True, coordinator=plan["coordinator"], nodes=plan["nodes"])
    return run_probe(probe, exam.timeout_s, progress, before_end)


def _judge_hosts(exam: Examination, hosts: Mapping[int, Any], node_of: Mapping[int, str]) -> list[Check]:
    facts = [host.HostFacts(**message["facts"]) for message in hosts.values()]
    tasks = {node: sum(name == node for name in node_of.values()) for node in node_of.values()}
    size = None if exam.config is None else int(state_bytes(exam.config))
    return judge_host.judge_hosts(facts, judge_host.HostContext(exam.cluster, len(tasks), tasks, size))


def _judge_own(exam: Examination, hosts: Mapping[int, Any], own: Mapping[int, Any], node_of: Mapping[int, str]) -> list[Check]:
    """Judge NVML's facts and the measurements of each process's own devices."""
    checks: list[Check] = []
    for node in dict.fromkeys(node_of.values()):
        mine = [process for process in sorted(own) if node_of[process] == node]
        missing = next((hosts[process]["gpus"]["missing"] for process in mine if process in hosts), "no report")
        gpus = {gpu["uuid"]: nvml.GpuFacts(**gpu) for process in mine for gpu in own[process]["gpus"]}
        checks += judge_gpu.judge_gpus(node, nvml.GpuReport(tuple(gpus.values()), None if gpus else missing))
        for process in mine:
            if process in hosts and hosts[process]["error"] is not None:
                text = hosts[process]["error"]
                checks.append(Check(node, "allocation", Verdict.FAIL, "", "", text, "see the reason"))
    outcomes = {process: ProbeOutcome(**value["outcome"]) for process, value in own.items()}
    checks += judge_processes.judge_own_failures(outcomes, node_of)
    return checks + judge_devices.judge_devices(_device_facts(outcomes, node_of), _device_context(exam, hosts, node_of))


def _judge_together(exam: Examination, joint: Mapping[int, Any], own: Mapping[int, Any], node_of: Mapping[int, str]) -> list[Check]:
    outcomes = {process: ProbeOutcome(**value) for process, value in joint.items()}
    devices = {process: value["outcome"]["results"].get("devices") for process, value in own.items()}
    facts = [replace(fact, results={**fact.results, "devices": devices[fact.process]}) for fact in _device_facts(outcomes, node_of)]
    checks = judge_processes.judge_joint_failures(outcomes, node_of)
    return checks + judge_devices.judge_joint(facts, _device_context(exam, {}, node_of))


def _device_facts(outcomes: Mapping[int, ProbeOutcome], node_of: Mapping[int, str]) -> list[judge_devices.DeviceFacts]:
    return [judge_devices.DeviceFacts(node_of[process], process, outcome.results) for process, outcome in outcomes.items()]


def _device_context(exam: Examination, hosts: Mapping[int, Any], node_of: Mapping[int, str]) -> judge_devices.DeviceContext:
    granted = {node_of[process]: message["gpus_on_node"] for process, message in hosts.items() if message["gpus_on_node"]}
    return judge_devices.DeviceContext(exam.cluster, exam.calibration, granted)


def listen(here: Cluster) -> list[Any]:
    """Return process 0's listening sockets on the first free port. Raises ClusterError without one."""
    own = own_addresses(here)
    for port in here.ports:
        listeners = network.listen(own, port)
        if listeners is not None:
            return listeners
    taken = ", ".join(map(str, here.ports[:3]))
    raise ClusterError(f"process 0 cannot listen on {', '.join(own)}: port {taken} in use", BAD_NODE)
