"""Detect the processes of a run from environment variables: their number, this one's index, process 0's address, and each value's source.

`describe` is a pure function of its arguments; queries of the machine are passed in as callables. Sources in order: flags, Slurm step, MPI,
Kubernetes, torchrun, single process. Exception: a launcher started *inside* the tasks of a Slurm step (mpirun or torchrun under srun)
starts more processes than the step has tasks, and then its variables are used.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.configs.environment import read_number, shortened
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import RuntimeConfig
from ridgeline.launch.cluster import devices, launchers, network, slurm, slurm_nodes
from ridgeline.launch.cluster.devices import LocalDevices
from ridgeline.launch.cluster.launchers import Launch
from ridgeline.launch.cluster.network import FIRST_PORT, LAST_PORT

PORT_TRIES = 16
"""Number of ports that process 0 tries to listen on, and that the others try to connect to."""

LOCAL_PROCESSES, LOCAL_PROCESS = "RIDGE_LOCAL_PROCESSES", "RIDGE_LOCAL_PROCESS"
"""Set by `ridge launch`: number of processes on this machine, and the index of this one."""
SINGLE, NO_LAUNCHER = "single process", "no launcher's variables are set"
CHOSEN_BY_JAX = LocalDevices(None, "JAX chooses the devices")


@dataclass(frozen=True)
class Flags:
    """Values from the command line; they take precedence over all variables."""

    coordinator: str | None = None
    """HOST:PORT, or HOST if a launcher provides the rest."""
    processes: int | None = None
    process: int | None = None


@dataclass(frozen=True)
class Cluster:
    """The processes of a run and the index of this one. None: unknown."""

    source: str
    processes: int
    process: int
    identity: str
    """Unique to this start of the run, equal in all its processes."""
    nodes: int | None = None
    node: int | None = None
    local_processes: int | None = None
    local_process: int | None = None
    devices: LocalDevices = CHOSEN_BY_JAX
    coordinator: str | None = None
    """Host of process 0; None for a single process."""
    addresses: tuple[str, ...] = ()
    """Numeric addresses of process 0, as resolved by this process."""
    ports: tuple[int, ...] = ()
    """Process 0 listens for the rendezvous on the first of these that is free."""
    hosts: tuple[str | None, ...] = ()
    """Host of every process by its index; empty if unknown."""
    restart: int = 0
    """How often the scheduler has requeued the job."""
    derivations: Mapping[str, str] = field(default_factory=dict)
    """Value -> its source, for messages."""

    def name_of(self, process: int) -> str:
        """Return the name of a process for messages: its index, and its host if known."""
        host = self.hosts[process] if process < len(self.hosts) else None
        return f"process {process}" + (f" on {host}" if host else "")


def describe(
    env: Mapping[str, str],
    *,
    flags: Flags = Flags(),
    platform: str = "auto",
    hostnames: Callable[[str], tuple[list[str], str]] = slurm_nodes.hostnames,
    addresses: Callable[[str], tuple[Sequence[str], str]] | None = None,
    ancestry: Callable[[], Sequence[str]] | None = None,
    gpus: Callable[[], int | None] = devices.gpus_present,
) -> Cluster:
    """Detect the run that this process belongs to.

    Args:
      env: environment variables.
      flags: values from the command line.
      platform: `runtime.platform` of the config.
      hostnames: expands a node list; returns the hosts and the parser's name.
      addresses: resolves a host; returns its addresses and the resolver's name.
      ancestry: returns the names of this process's ancestors, nearest first.
      gpus: returns the number of NVIDIA GPUs on this machine; None without a driver.

    Raises:
      UserError: the processes would train separate copies or could not find each other. Errors of this node's GPUs are not raised: they are
        in `devices.error`, so that the rendezvous can send them to all processes.
    """
    found, step = _detect(env, flags, hostnames, ancestry or ancestors)
    if found.processes < 1 or not 0 <= found.process < found.processes:
        raise UserError(f"process {found.process} is not in 0..{found.processes - 1} (from {found.source})")
    how = dict(found.derivations)
    known, ports = _process_0(found, how, addresses or resolve_node) if found.processes > 1 else ((), ())
    chosen = LocalDevices(None, "runtime.platform; JAX chooses the devices")
    if (env.get("JAX_PLATFORMS", "auto") if platform == "auto" else platform).split(",")[0] in ("auto", "", "cuda", "gpu"):
        on_node = None if step is None else step.gpus_on_node
        chosen = devices.choose(
            env, present=gpus(), on_node=on_node, local_processes=found.local_processes, local_process=found.local_process
        )
    return Cluster(
        source=found.source,
        processes=found.processes,
        process=found.process,
        identity=found.identity,
        nodes=found.nodes,
        node=found.node,
        local_processes=found.local_processes,
        local_process=found.local_process,
        devices=chosen,
        coordinator=found.coordinator if found.processes > 1 else None,
        addresses=known,
        ports=ports,
        hosts=tuple(found.hosts),
        restart=slurm.restart_count(env),
        derivations={**how, "local devices": chosen.how},
    )


def _process_0(
    found: Launch, how: dict[str, str], resolve: Callable[[str], tuple[Sequence[str], str]]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return addresses and ports of process 0; their sources are added to `how`. Raises UserError if its host is unknown."""
    host = found.coordinator
    if host is None:
        raise UserError(f"{found.source} does not provide the host of process 0 ({how['coordinator']}): pass --coordinator HOST:PORT")
    if not re.fullmatch(r"[\w.:%-]{1,253}", host):
        raise UserError(
            f"the host of process 0, '{shortened(host)}' ({how['coordinator']}), is not a host name: pass --coordinator HOST:PORT"
        )
    known = tuple(found.addresses)
    if not known:
        resolved, how["addresses"] = resolve(host)
        known = tuple(resolved)
    if not known:
        raise UserError(
            f"the host of process 0, '{host}' ({how['coordinator']}), does not resolve here, and Slurm has no address for it: "
            "add it to /etc/hosts or DNS, or pass --coordinator ADDRESS:PORT"
        )
    how["port"] = how.get("port") or f"first free of {PORT_TRIES} ports derived from: {found.identity}"
    return known, tuple(derive_ports(found.identity)) if found.port is None else (found.port,)


def _detect(
    env: Mapping[str, str],
    flags: Flags,
    hostnames: Callable[[str], tuple[list[str], str]],
    ancestry: Callable[[], Sequence[str]],
) -> tuple[Launch, slurm.SlurmStep | None]:
    """Return the launch found by the first source that applies, and the Slurm step if that is the source."""
    if flags.processes is not None or flags.process is not None:
        return _from_flags(flags, env), None
    allocated = slurm.allocated_tasks(env)
    stray = allocated is not None and slurm.is_stray(ancestry())
    step = None if stray else slurm.read_step(env)
    inner = _innermost(env)
    if step is not None and (inner is None or inner.processes <= step.tasks):
        found = _from_step(step, hostnames)
    elif inner is not None:
        found, step = inner, None
        if allocated is not None and not stray:
            found.derivations["processes"] += ", started inside a Slurm job"
    elif allocated is not None and allocated > 1 and not stray:
        raise UserError(
            f"this job has {allocated} tasks, but srun did not start this process: each would train its own copy; "
            f"use `srun ridge train ...` (or `--processes 1` for one process on this node; "
            "in a shell outside of the job: `unset ${!SLURM_@}`)"
        )
    else:
        why = "stray Slurm variables ignored: sshd started this shell, not Slurm" if stray else NO_LAUNCHER
        if allocated is not None and not stray:
            why = "a Slurm job of one task"
        found = Launch(SINGLE, 1, 0, "single", {"processes": why, "process": why})
    if flags.coordinator is not None:
        found = _with_coordinator(found, flags.coordinator)
    return found, step


def _from_flags(flags: Flags, env: Mapping[str, str]) -> Launch:
    """Return the launch that complete flags describe; `--processes 1` needs no others."""
    if flags.processes == 1 and flags.process in (None, 0):
        return Launch("command-line flags", 1, 0, "single", {"processes": "--processes", "process": "--processes"})
    given = {"--coordinator": flags.coordinator, "--processes": flags.processes, "--process": flags.process}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        there = ", ".join(name for name in given if name not in missing)
        raise UserError(f"{there} given without {', '.join(missing)}: several processes need all three")
    assert flags.coordinator is not None and flags.processes is not None and flags.process is not None
    if flags.processes < 1 or not 0 <= flags.process < flags.processes:
        raise UserError(f"--process {flags.process} is not in 0..{flags.processes - 1} (--processes {flags.processes})")
    split = network.split_port(flags.coordinator)
    if split is None:
        raise UserError(f"--coordinator '{flags.coordinator}' is not HOST:PORT")
    return Launch(
        source="command-line flags",
        processes=flags.processes,
        process=flags.process,
        identity=f"flags {flags.coordinator} {flags.processes}",
        derivations={"processes": "--processes", "process": "--process", "coordinator": "--coordinator", "port": "--coordinator"},
        coordinator=split[0],
        port=split[1],
        local_processes=read_number(env, LOCAL_PROCESSES),
        local_process=read_number(env, LOCAL_PROCESS),
    )


def _with_coordinator(found: Launch, coordinator: str) -> Launch:
    """Return a launch with process 0's host (and port, if given) from the flag."""
    if found.processes == 1:
        raise UserError("--coordinator given without --processes, --process: several processes need all three")
    host, port = network.split_port(coordinator) or (coordinator, None)
    how = {**found.derivations, "coordinator": "--coordinator", **({"port": "--coordinator"} if port else {})}
    values = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return Launch(**{**values, "coordinator": host, "port": port, "addresses": (), "derivations": how})


def _innermost(env: Mapping[str, str]) -> Launch | None:
    """Return the launch by MPI, Kubernetes or torchrun: the first found, unless a later one, started inside it, has more processes."""
    torchrun = launchers.torchrun(env)
    counted = read_number(env, "RIDGE_PROCESSES", "JAX_NUM_PROCESSES", "NNODES") is not None
    kubernetes = launchers.kubernetes(env) if torchrun is None or counted else None
    found = [source for source in (launchers.mpi(env), kubernetes, torchrun) if source is not None]
    return max(found, key=lambda source: source.processes) if found else None


def _from_step(step: slurm.SlurmStep, hostnames: Callable[[str], tuple[list[str], str]]) -> Launch:
    if step.tasks == 1:
        how = {"processes": "a Slurm step of one task", "process": "SLURM_PROCID"}
        return Launch("Slurm step", 1, 0, step.identity, how, 1, 0, 1, 0)
    try:
        hosts, parser = hostnames(step.node_list)
    except ValueError as error:
        raise UserError(f"Slurm's {error}: pass --coordinator HOST:PORT") from None
    if not hosts:
        raise UserError("Slurm's variables list no nodes for this step: pass --coordinator HOST:PORT")
    counts = step.tasks_per_node
    return Launch(
        source="Slurm step",
        processes=step.tasks,
        process=step.task,
        identity=step.identity,
        nodes=step.nodes,
        node=step.node,
        local_processes=None if counts is None or step.node >= len(counts) else counts[step.node],
        local_process=step.local_task,
        coordinator=hosts[0],
        hosts=tuple(slurm.hosts_of_tasks(step, hosts)),
        derivations={
            "processes": "SLURM_STEP_NUM_TASKS",
            "process": "SLURM_PROCID",
            "nodes": "SLURM_STEP_NUM_NODES",
            "node": "SLURM_NODEID",
            "local process": "SLURM_LOCALID",
            "coordinator": f"first node of {shortened(step.node_list)} ({parser})",
        },
    )


def derive_ports(identity: str) -> list[int]:
    """Return the ports of one start of a run: even numbers; the odd port after each is for JAX (launch/cluster/join.py)."""
    slots = (LAST_PORT - FIRST_PORT + 1) // 2
    ports: list[int] = []
    for number in range(10 * PORT_TRIES):
        digest = hashlib.sha256(f"{identity} {number}".encode(errors="surrogateescape")).digest()
        port = FIRST_PORT + 2 * (int.from_bytes(digest[:8]) % slots)
        if port not in ports:
            ports.append(port)
        if len(ports) == PORT_TRIES:
            break
    return ports


def resolve_node(host: str) -> tuple[Sequence[str], str]:
    """Return the addresses of a host, from this machine's resolver, else from Slurm's node record, and the name of that source."""
    found = network.resolve(host)
    if found:
        return found, f"{host} resolved"
    known = slurm_nodes.node_address(host)
    return (network.resolve(known), f"NodeAddr of {host} (scontrol)") if known else ([], "not resolved")


def ancestors(proc: Path = Path("/proc")) -> list[str]:
    """Return the names of this process's ancestors, nearest first, as far as /proc shows them."""
    names: list[str] = []
    pid = os.getppid()
    while pid > 0 and len(names) < 100:
        try:
            names.append((proc / str(pid) / "comm").read_text(errors="replace").strip())
            pid = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return names


def summary(cluster: Cluster, runtime: RuntimeConfig, env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the lines that a run prints about its processes: one line for a single process, else one per value with its source."""
    devices_here = devices.device_text(cluster.devices, runtime, env)
    how = cluster.derivations
    if cluster.processes == 1:
        note = f" ({how['processes']})" if cluster.source == SINGLE and how["processes"] != NO_LAUNCHER else ""
        return [f"1 process, {devices_here}{note}"]
    ids = cluster.devices.ids
    values = {
        "processes": cluster.processes,
        "process": cluster.process,
        "nodes": cluster.nodes,
        "node": cluster.node,
        "local process": None if cluster.local_process is None else f"{cluster.local_process} of {cluster.local_processes or '?'}",
        "local devices": "all" if ids is None else ",".join(map(str, ids)),
        "coordinator": cluster.coordinator,
        "addresses": ", ".join(cluster.addresses),
        "port": cluster.ports[0] if len(cluster.ports) == 1 else f"{cluster.ports[0]}, ...",
    }
    lines = [f"{cluster.processes} processes ({cluster.source}), {devices_here} in process {cluster.process}"]
    lines += [f"  {name:<14}{value!s:<24}{how.get(name, '')}".rstrip() for name, value in values.items() if value is not None]
    return [shortened(line, 500) for line in lines]
