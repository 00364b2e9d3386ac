"""Launchers other than Slurm, detected by their variables: MPI (Open MPI, MPICH and derivatives, PMIx), Kubernetes indexed jobs, torchrun.

Each reader returns a `Launch`; None if its launcher did not start this process. It raises UserError if a needed variable is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.configs.environment import is_number, read_number, shortened
from ridgeline.configs.errors import UserError


@dataclass(frozen=True)
class Launch:
    """The processes of a run as one launcher describes them. None: not provided."""

    source: str
    processes: int
    process: int
    identity: str
    derivations: dict[str, str]
    nodes: int | None = None
    node: int | None = None
    local_processes: int | None = None
    local_process: int | None = None
    coordinator: str | None = None
    """Host of process 0."""
    addresses: tuple[str, ...] = ()
    """Numeric addresses of process 0's host, if the launcher provides them."""
    port: int | None = None
    """The only port to use; None: derived from the identity."""
    hosts: tuple[str | None, ...] = field(default=())
    """Host of every process."""


def mpi(env: Mapping[str, str]) -> Launch | None:
    """Read Open MPI's (mpirun), MPICH's, Intel MPI's and Cray's (PMI) variables.

    MPI provides no host of process 0. With Open MPI 4 it is mpirun's host (the first node); if all processes are on this node, it is this
    node; otherwise RIDGE_COORDINATOR, MASTER_ADDR or --coordinator must name it.
    """
    families = (
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("MPI (PMI)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        ("MPI (Cray PMI)", "PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID"),
    )
    for name, size, rank, local_size, local_rank in families:
        processes, process = read_number(env, size), read_number(env, rank)
        if processes is None or process is None:
            continue
        local_processes = read_number(env, local_size)
        host, addresses, how = _mpi_host(env, processes, local_processes)
        namespace = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("PBS_JOBID") or env.get("LSB_JOBID") or ""
        return Launch(
            source=name,
            processes=processes,
            process=process,
            identity=f"mpi {namespace.split('@')[0]} {host} {processes}",
            coordinator=host,
            addresses=addresses,
            derivations={"processes": size, "process": rank, "local process": local_rank, "coordinator": how},
            local_processes=local_processes,
            local_process=read_number(env, local_rank),
        )
    return None


def _mpi_host(env: Mapping[str, str], processes: int, local_processes: int | None) -> tuple[str | None, tuple[str, ...], str]:
    for name in ("RIDGE_COORDINATOR", "MASTER_ADDR"):
        if env.get(name):
            return env[name], (), name
    if local_processes == processes:
        return "127.0.0.1", ("127.0.0.1",), "all processes are on this node"
    uri = env.get("OMPI_MCA_orte_hnp_uri", env.get("PMIX_SERVER_URI", ""))
    match = re.search(r"tcp6?://\[?([^\]/]+?)\]?:\d+", uri) if "OMPI_MCA_orte_hnp_uri" in env else None
    if match:
        addresses = tuple(match.group(1).split(","))
        return addresses[0], addresses, "the node of mpirun, OMPI_MCA_orte_hnp_uri"
    return None, (), "MPI does not provide it"


def kubernetes(env: Mapping[str, str]) -> Launch | None:
    """Read an indexed job's or a JobSet's variables.

    Every indexed job sets JOB_COMPLETION_INDEX. No variable of Kubernetes holds the number of pods, so the manifest must set
    RIDGE_PROCESSES (or JAX_NUM_PROCESSES, NNODES). The host of process 0 is <job>-0 in the pod's subdomain, or JAX_COORDINATOR_ADDRESS
    (host or host:port).
    """
    if "JOB_COMPLETION_INDEX" in env:
        index_name = "JOB_COMPLETION_INDEX"
    elif "JAX_PROCESS_ID" in env and "JAX_NUM_PROCESSES" in env:
        index_name = "JAX_PROCESS_ID"
    else:
        return None
    index = read_number(env, "JAX_PROCESS_ID", index_name)
    count_name = next((n for n in ("RIDGE_PROCESSES", "JAX_NUM_PROCESSES", "NNODES") if read_number(env, n) is not None), None)
    if index is None:
        raise UserError(f"{index_name}={shortened(env[index_name])} is not a process index")
    if count_name is None:
        raise UserError(
            f"pod {index} of an indexed Kubernetes job: the number of pods is unknown, and each pod would train its own copy; "
            "set RIDGE_PROCESSES in the manifest to the job's completions (1 for a single pod)"
        )
    processes = read_number(env, count_name) or 0
    host, port, how = _kubernetes_host(env, index, processes)
    name = env.get("JOBSET_NAME") or env.get("JOB_NAME") or (host or "").split(".")[0]
    restart = env.get("JOBSET_RESTART_ATTEMPT", env.get("RESTART_ATTEMPT", ""))
    return Launch(
        source="Kubernetes job",
        processes=processes,
        process=index,
        identity=f"kubernetes {env.get('POD_NAMESPACE', '')} {name} {restart} {host} {processes}",
        derivations={"processes": count_name, "process": index_name, "coordinator": how},
        coordinator=host,
        port=port,
    )


def _kubernetes_host(env: Mapping[str, str], index: int, processes: int) -> tuple[str | None, int | None, str]:
    given = env.get("JAX_COORDINATOR_ADDRESS") or env.get("RIDGE_COORDINATOR")
    if given:
        host, _, port = given.rpartition(":") if ":" in given else (given, "", "")
        return (
            host,
            int(port) if is_number(port) and len(port) <= 5 and 0 < int(port) < 65536 else None,
            "JAX_COORDINATOR_ADDRESS" if "JAX_COORDINATOR_ADDRESS" in env else "RIDGE_COORDINATOR",
        )
    if processes == 1:
        return None, None, "not needed for a single process"
    pod = env.get("HOSTNAME", "")
    if not pod.endswith(f"-{index}"):
        return None, None, "unknown: set JAX_COORDINATOR_ADDRESS to the host of pod 0"
    first = pod.removesuffix(f"-{index}") + "-0"
    domain = env.get("RIDGE_SUBDOMAIN") or env.get("JOBSET_NAME") or ""
    return (f"{first}.{domain}" if domain else first), None, "derived from this pod's name" + (", subdomain JOBSET_NAME" if domain else "")


def torchrun(env: Mapping[str, str]) -> Launch | None:
    """Read the variables that torchrun and many launch scripts set: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

    torchrun's store listens on MASTER_PORT, so that port is only hashed into the derived ports.
    """
    processes, process = read_number(env, "WORLD_SIZE"), read_number(env, "RANK")
    if processes is None or process is None:
        return None
    host = env.get("MASTER_ADDR") or None
    if processes > 1 and host is None:
        raise UserError(f"RANK={process} and WORLD_SIZE={processes} without MASTER_ADDR: set it to the host of rank 0, or unset all three")
    tag = " ".join(env.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return Launch(
        source="torchrun",
        processes=processes,
        process=process,
        identity=f"torchrun {host} {tag} {processes}",
        derivations={"processes": "WORLD_SIZE", "process": "RANK", "local process": "LOCAL_RANK", "coordinator": "MASTER_ADDR"},
        nodes=read_number(env, "GROUP_WORLD_SIZE"),
        node=read_number(env, "GROUP_RANK"),
        local_processes=read_number(env, "LOCAL_WORLD_SIZE"),
        local_process=read_number(env, "LOCAL_RANK"),
        coordinator=host,
    )
