"""From environment variables to a described cluster: who takes part in this run, where process 0 listens, and how each value was found.

`describe` is a pure function of its arguments; what it needs to ask of the machine comes in as callables. Sources in order: flags, Slurm
step, MPI, Kubernetes, torchrun, single process. A launcher that was started *inside* the tasks of a Slurm step (mpirun, torchrun under
srun) makes more processes than the step has tasks, and then it is the one that knows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.launch.cluster import devices, launchers, network, scontrol, slurm
from ridgeline.launch.cluster.devices import LocalDevices
from ridgeline.launch.cluster.launchers import Found

FIRST_PORT, LAST_PORT = 61_000, 65_535
"""Above Linux's ephemeral ports (to 60,999): no outgoing connection takes one of these by chance."""
PORT_TRIES = 16
"""Length of the sequence of ports that process 0 tries to listen on, and the others to reach it on."""


LOCAL_PROCESSES, LOCAL_PROCESS = "RIDGE_LOCAL_PROCESSES", "RIDGE_LOCAL_PROCESS"
"""Set by `ridge launch` for what its flags do not say: how many processes share this machine."""
WHAT_JAX_FINDS = LocalDevices(None, "what JAX finds")


@dataclass(frozen=True)
class Flags:
    """What the command line says; it wins over everything."""

    coordinator: str | None = None
    """HOST:PORT, or HOST when a launcher knows the rest."""
    processes: int | None = None
    process: int | None = None


@dataclass(frozen=True)
class Cluster:
    """The processes of a run and this one's place among them. None: nobody says."""

    source: str
    processes: int
    process: int
    identity: str
    """The same in all processes of this start of the run, and in no other."""
    nodes: int | None = None
    node: int | None = None
    local_processes: int | None = None
    local_process: int | None = None
    devices: LocalDevices = WHAT_JAX_FINDS
    coordinator: str | None = None
    """Host of process 0; None for a single process."""
    addresses: tuple[str, ...] = ()
    """Its numeric addresses, as seen from here."""
    ports: tuple[int, ...] = ()
    """Where process 0 listens for the roll call: the first of these that is free."""
    hosts: tuple[str | None, ...] = ()
    """Host of every process by its index; empty where nobody says."""
    restart: int = 0
    """How often the job was requeued, by the scheduler's count."""
    derivations: Mapping[str, str] = field(default_factory=dict)
    """Value -> how it was derived, in words."""

    def name_of(self, process: int) -> str:
        """Name a process for people: its index, and its host where known."""
        host = self.hosts[process] if process < len(self.hosts) else None
        return f"process {process}" + (f" on {host}" if host else "")


def describe(
    env: Mapping[str, str],
    *,
    flags: Flags = Flags(),
    platform: str = "auto",
    hostnames: Callable[[str], tuple[list[str], str]] = scontrol.hostnames,
    addresses: Callable[[str], tuple[Sequence[str], str]] | None = None,
    ancestry: Callable[[], Sequence[str]] | None = None,
    gpus: Callable[[], int | None] = devices.gpus_present,
) -> Cluster:
    """Describe the cluster that this process belongs to.

    platform: `runtime.platform` of the config. hostnames: expands a node list, and says how. addresses: resolves a host, and says how.
    ancestry: names of this process's ancestors, nearest first. gpus: number of NVIDIA GPUs shown here, None without a driver.

    Raises UserError (cause and fix) where the processes would train separate copies, or cannot find each other. Trouble with this node's
    GPUs is in `devices`: all processes are to hear of it.
    """
    found, step = _found(env, flags, hostnames, ancestry or ancestors)
    if found.processes < 1 or not 0 <= found.process < found.processes:
        raise UserError(f"process {found.process} is not in 0..{found.processes - 1} (from {found.source})")
    how = dict(found.derivations)
    host, known, ports = found.coordinator, tuple(found.addresses), tuple(derive_ports(found.identity))
    if found.processes > 1:
        if host is None:
            raise UserError(f"{found.source} does not tell the host of process 0 ({how['coordinator']}): pass --coordinator HOST:PORT")
        if not known:
            resolved, resolver = (addresses or resolve_node)(host)
            known = tuple(resolved)
            how["addresses"] = resolver
        if not known:
            raise UserError(
                f"the host of process 0, '{host}' ({how['coordinator']}), does not resolve here, and Slurm knows no address for it: "
                "add it to /etc/hosts or DNS, or pass --coordinator ADDRESS:PORT"
            )
        if found.port is not None:
            ports = (found.port,)
        how["port"] = how.get("port") or f"the first free of {PORT_TRIES} derived from: {found.identity}"
    chosen = LocalDevices(None, "runtime.platform: what JAX finds")
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
        coordinator=host if found.processes > 1 else None,
        addresses=known if found.processes > 1 else (),
        ports=ports if found.processes > 1 else (),
        hosts=tuple(found.hosts),
        restart=slurm.restart_count(env),
        derivations={**how, "local devices": chosen.how},
    )


def _found(
    env: Mapping[str, str],
    flags: Flags,
    hostnames: Callable[[str], tuple[list[str], str]],
    ancestry: Callable[[], Sequence[str]],
) -> tuple[Found, slurm.SlurmStep | None]:
    """Return what the first source that knows says, and the Slurm step when that is the source."""
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
            f"this job has {allocated} tasks, but srun did not start this process, and each would train its own copy: "
            f"write `srun ridge train ...` (or `--processes 1` for one process on this node; "
            "in a shell that does not belong to the job: `unset ${!SLURM_@}`)"
        )
    else:
        why = "Slurm's variables are stray here: sshd started this shell, not Slurm" if stray else "no launcher's variables are set"
        if allocated is not None and not stray:
            why = "a Slurm job of one task"
        found = Found("single process", 1, 0, "single", {"processes": why, "process": why})
    if flags.coordinator is not None:
        found = _with_coordinator(found, flags.coordinator)
    return found, step


def _from_flags(flags: Flags, env: Mapping[str, str]) -> Found:
    """Return what complete flags say; `--processes 1` needs no others."""
    if flags.processes == 1 and flags.process in (None, 0):
        return Found("command-line flags", 1, 0, "single", {"processes": "--processes", "process": "--processes"})
    given = {"--coordinator": flags.coordinator, "--processes": flags.processes, "--process": flags.process}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        there = ", ".join(name for name in given if name not in missing)
        raise UserError(f"{there} given without {', '.join(missing)}: a launch of several processes needs all three")
    assert flags.coordinator is not None and flags.processes is not None and flags.process is not None
    if flags.processes < 1 or not 0 <= flags.process < flags.processes:
        raise UserError(f"--process {flags.process} is not in 0..{flags.processes - 1} (--processes {flags.processes})")
    split = network.split_port(flags.coordinator)
    if split is None:
        raise UserError(f"--coordinator '{flags.coordinator}' is not HOST:PORT")
    return Found(
        source="command-line flags",
        processes=flags.processes,
        process=flags.process,
        identity=f"flags {flags.coordinator} {flags.processes}",
        derivations={"processes": "--processes", "process": "--process", "coordinator": "--coordinator", "port": "--coordinator"},
        coordinator=split[0],
        port=split[1],
        local_processes=int(env[LOCAL_PROCESSES]) if env.get(LOCAL_PROCESSES, "").isdigit() else None,
        local_process=int(env[LOCAL_PROCESS]) if env.get(LOCAL_PROCESS, "").isdigit() else None,
    )


def _with_coordinator(found: Found, coordinator: str) -> Found:
    """Return what a launcher says with process 0's host (and perhaps port) from the flag."""
    if found.processes == 1:
        raise UserError("--coordinator given without --processes, --process: a launch of several processes needs all three")
    host, port = network.split_port(coordinator) or (coordinator, None)
    how = {**found.derivations, "coordinator": "--coordinator", **({"port": "--coordinator"} if port else {})}
    values = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return Found(**{**values, "coordinator": host, "port": port, "addresses": (), "derivations": how})


def _innermost(env: Mapping[str, str]) -> Found | None:
    """Return what MPI, Kubernetes or torchrun says: the first of them, unless a later one, started inside it, has more processes."""
    torchrun = launchers.torchrun(env)
    counted = any(env.get(name, "").isdigit() for name in ("RIDGE_PROCESSES", "JAX_NUM_PROCESSES", "NNODES"))
    kubernetes = launchers.kubernetes(env) if torchrun is None or counted else None
    found = [source for source in (launchers.mpi(env), kubernetes, torchrun) if source is not None]
    return max(found, key=lambda source: source.processes) if found else None


def _from_step(step: slurm.SlurmStep, hostnames: Callable[[str], tuple[list[str], str]]) -> Found:
    if step.tasks == 1:
        how = {"processes": "a Slurm step of one task", "process": "SLURM_PROCID"}
        return Found("Slurm step", 1, 0, step.identity, how, 1, 0, 1, 0)
    try:
        hosts, said_by = hostnames(step.node_list)
    except ValueError as error:
        raise UserError(f"Slurm's {error}: pass --coordinator HOST:PORT") from None
    if not hosts:
        raise UserError("Slurm's variables name no nodes for this step: pass --coordinator HOST:PORT")
    counts = step.tasks_per_node
    return Found(
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
            "coordinator": f"first node of {step.node_list} ({said_by})",
        },
    )


def derive_ports(identity: str) -> list[int]:
    """Return the sequence of ports of a start of a run: even ones, each followed by its own port for JAX (see launch/cluster/join.py)."""
    slots = (LAST_PORT - FIRST_PORT + 1) // 2
    ports: list[int] = []
    for number in range(10 * PORT_TRIES):
        digest = hashlib.sha256(f"{identity} {number}".encode()).digest()
        port = FIRST_PORT + 2 * (int.from_bytes(digest[:8]) % slots)
        if port not in ports:
            ports.append(port)
        if len(ports) == PORT_TRIES:
            break
    return ports


def resolve_node(host: str) -> tuple[Sequence[str], str]:
    """Return the addresses of a host by this machine's resolver, else by what Slurm knows of the node, and which of them answered."""
    found = network.resolve(host)
    if found:
        return found, f"{host} resolved"
    known = scontrol.node_address(host)
    return (network.resolve(known), f"NodeAddr of {host} (scontrol)") if known else ([], "not resolved")


def ancestors(proc: Path = Path("/proc")) -> list[str]:
    """Return the names of this process's ancestors, nearest first, as far as they can be seen."""
    names: list[str] = []
    pid = os.getppid()
    while pid > 0 and len(names) < 100:
        try:
            names.append((proc / str(pid) / "comm").read_text().strip())
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return names


def explain(cluster: Cluster) -> list[str]:
    """Say in aligned lines what was detected and how; one line for a single process."""
    how = cluster.derivations
    if cluster.processes == 1:
        return [f"cluster: a single process ({cluster.source}: {how['processes']}); devices: {cluster.devices.how}"]
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
    lines = [f"cluster: {cluster.source}"]
    lines += [f"  {name:<14}{value!s:<24}{how.get(name, '')}".rstrip() for name, value in values.items() if value is not None]
    return lines
