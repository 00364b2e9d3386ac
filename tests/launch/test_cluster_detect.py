"""Detection as a pure function: environment mappings, most of them as a real Slurm 22.05 sets them, to a described cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ridgeline import PACKAGE
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import RuntimeConfig
from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import slurm
from ridgeline.launch.cluster.detect import PORT_TRIES, Cluster, Flags, describe, summary
from ridgeline.launch.cluster.network import FIRST_PORT, LAST_PORT
from ridgeline.launch.cluster.slurm_nodes import expand
from ridgeline.rundir.provenance import PACKAGES

NO_FLAGS = Flags()
CPU = RuntimeConfig(platform="cpu", cpu_devices=8)
ROOT = Path(__file__).parents[2]
JOB = {
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
"""An salloc shell of `-N2 -n4`."""
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURMD_NODENAME": "node01"}
"""The batch script of the same job."""


def step(task: int = 0, **changes: str) -> dict[str, str]:
    """Return the variables of one task of `srun -N2 -n4`."""
    node = task // 2
    return {
        **JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % 2),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": f"{2 * node},{2 * node + 1}",
        "SLURMD_NODENAME": f"node0{node + 1}",
        **changes,
    }


def found(
    env: Mapping[str, str],
    *,
    flags: Flags = NO_FLAGS,
    ancestry: Sequence[str] = ("bash", "slurmstepd"),
    gpus: int | None = None,
    unresolvable: bool = False,
) -> Cluster:
    return describe(
        env,
        flags=flags,
        hostnames=lambda text: (expand(text), "test"),
        addresses=lambda host: ([] if unresolvable else [f"10.0.0.{len(host)}"], "test resolver"),
        ancestry=lambda: ancestry,
        gpus=lambda: gpus,
    )


def test_a_step_is_described_with_the_source_of_each_value() -> None:
    cluster = found(step(3))
    assert (cluster.source, cluster.processes, cluster.process) == ("Slurm step", 4, 3)
    assert (cluster.nodes, cluster.node, cluster.local_processes, cluster.local_process) == (2, 1, 2, 1)
    assert cluster.coordinator == "node01"
    assert cluster.addresses == ("10.0.0.6",)
    assert cluster.hosts == ("node01", "node01", "node02", "node02")
    assert cluster.name_of(2) == "process 2 on node02"
    text = "\n".join(summary(cluster, CPU, {}))
    for message in (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "first node of node[01-02] (test)",
        "derived from: slurm c job 7",
    ):
        assert message in text


def test_tasks_are_named_by_host_for_block_and_cyclic_distributions_only() -> None:
    cyclic = step(1, SLURM_DISTRIBUTION="cyclic", SLURM_NODEID="1", SLURM_GTIDS="1,3")
    assert found(cyclic).hosts == ("node01", "node02", "node01", "node02")
    assert set(found(step(1, SLURM_DISTRIBUTION="arbitrary")).hosts) == {None}
    contradicting = step(3, SLURM_GTIDS="0,3")
    assert set(found(contradicting).hosts) == {None}
    uneven = step(2, SLURM_STEP_TASKS_PER_NODE="3,1", SLURM_TASKS_PER_NODE="3,1", SLURM_GTIDS="0,1,2", SLURM_NODEID="0")
    assert found(uneven).hosts == ("node01", "node01", "node01", "node02")


def test_tasks_of_a_step_agree_on_ports_and_other_steps_have_others() -> None:
    ports = {found(step(task)).ports for task in range(4)}
    assert len(ports) == 1
    (first,) = ports
    assert len(set(first)) == PORT_TRIES
    assert all(FIRST_PORT <= port < LAST_PORT and port % 2 == 0 for port in first)
    others = [
        step(SLURM_STEP_ID="1"),
        step(SLURM_JOB_ID="8"),
        step(SLURM_RESTART_COUNT="1"),
        step(SLURM_CLUSTER_NAME="d"),
        # two components of one heterogeneous job run steps of one id; only the nodes differ
        step(SLURM_STEP_NODELIST="node[03-04]"),
    ]
    identities = {found(env).identity for env in others}
    assert len(identities) == len(others)
    assert found(step()).identity not in identities
    assert all(found(env).ports != first for env in others)


def test_a_heterogeneous_step_is_one_run() -> None:
    # srun -n1 -N1 : -n2 -N2, second component: the variables count over all components
    env = step(2, SLURM_HET_SIZE="2", SLURM_JOB_ID_PACK_GROUP_1="8", SLURM_STEP_NODELIST="node[01-03]", SLURM_STEP_NUM_NODES="3")
    env |= {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    env |= {"SLURM_GTIDS": "2", "SLURM_DISTRIBUTION": "cyclic"}
    cluster = found(env)
    assert (cluster.processes, cluster.process, cluster.coordinator) == (3, 2, "node01")
    assert cluster.hosts == ("node01", "node02", "node03")


def test_a_step_on_part_of_the_allocation_counts_only_itself() -> None:
    env = step(1, SLURM_STEP_NODELIST="node02", SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2")
    env |= {"SLURM_NODEID": "0", "SLURM_GTIDS": "0,1", "SLURM_NTASKS": "2"}
    cluster = found(env)
    assert (cluster.processes, cluster.coordinator, cluster.nodes) == (2, "node02", 1)


@pytest.mark.parametrize("env", [JOB, BATCH, {**BATCH, "SLURM_STEP_ID": "4294967291"}], ids=["salloc shell", "batch script", "batch step"])
def test_several_tasks_without_srun_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"4 tasks.*srun ridge train.*--processes 1"):
        found(env, ancestry=["bash", "slurmstepd"])
    # two nodes without -n are two tasks
    with pytest.raises(UserError, match="2 tasks"):
        found({name: value for name, value in env.items() if name not in ("SLURM_NTASKS", "SLURM_NPROCS")})
    assert found(env, flags=Flags(processes=1)).processes == 1


def test_one_task_without_srun_is_a_single_process() -> None:
    one = {**BATCH, "SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"}
    cluster = found(one)
    assert (cluster.processes, cluster.source) == (1, "single process")
    assert summary(cluster, CPU, {}) == ["1 process, 8 CPU devices (a Slurm job of one task)"]


@pytest.mark.parametrize("env", [JOB, BATCH, step(2)], ids=["salloc's", "a script's", "a step's"])
def test_stray_variables_in_a_remote_shell_do_not_count(env: dict[str, str]) -> None:
    cluster = found(env, ancestry=["zsh", "sshd", "sshd", "systemd"])
    assert cluster.processes == 1
    assert "stray" in summary(cluster, CPU, {})[0]
    # srun inside an ssh session, and a container whose ancestors are unknown, are steps
    assert found(step(2), ancestry=["bash", "slurmstepd", "sshd"]).processes == 4
    assert found(step(2), ancestry=[]).processes == 4


def test_flags_win_over_everything() -> None:
    flags = Flags("head:4000", 8, 5)
    cluster = found({**step(1), "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, flags=flags)
    assert (cluster.processes, cluster.process, cluster.coordinator, cluster.ports) == (8, 5, "head", (4000,))
    only_host = found(step(1), flags=Flags("10.1.2.3"))
    assert (only_host.processes, only_host.coordinator, len(only_host.ports)) == (4, "10.1.2.3", PORT_TRIES)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags("h:1", 2), "--coordinator, --processes given without --process"),
        (Flags(None, 2, 0), "--processes, --process given without --coordinator"),
        (Flags("h:1"), "--coordinator given without --processes, --process"),
        (Flags("h:1", 2, 2), r"--process 2 is not in 0\.\.1"),
        (Flags("h", 2, 1), "'h' is not HOST:PORT"),
        (Flags("h:99999", 2, 1), "is not HOST:PORT"),
    ],
)
def test_incomplete_flags_are_refused(flags: Flags, message: str) -> None:
    with pytest.raises(UserError, match=message):
        found({}, flags=flags)


def test_a_coordinator_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(UserError, match=r"'node01' \(first node of node\[01-02\] \(test\)\), does not resolve.*--coordinator"):
        found(step(1), unresolvable=True)


def test_mpi_is_detected() -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    cluster = found({**env, **uri})
    assert (cluster.source, cluster.processes, cluster.process, cluster.local_process) == ("Open MPI", 4, 3, 1)
    assert cluster.addresses == ("10.96.0.1", "10.148.0.1")
    with pytest.raises(UserError, match=r"Open MPI .*host of process 0.*--coordinator"):
        found(env)
    here = found({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"})
    assert (here.source, here.process, here.addresses) == ("MPI (PMI)", 1, ("127.0.0.1",))


def test_kubernetes_needs_the_number_of_pods() -> None:
    env = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2", "JOBSET_NAME": "set"}
    with pytest.raises(UserError, match=r"pod 2 .* set RIDGE_PROCESSES"):
        found(env)
    cluster = found({**env, "RIDGE_PROCESSES": "4"})
    assert (cluster.source, cluster.processes, cluster.process, cluster.coordinator) == ("Kubernetes job", 4, 2, "train-0.set")
    named = found({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "head.ns:1234"})
    assert (named.process, named.coordinator, named.ports) == (1, "head.ns", (1234,))


def test_torchrun_is_detected_and_its_own_port_avoided() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    cluster = found(env)
    assert (cluster.source, cluster.processes, cluster.process, cluster.local_process) == ("torchrun", 8, 5, 1)
    assert 29500 not in cluster.ports
    assert found({**env, "MASTER_PORT": "29501"}).ports != cluster.ports
    with pytest.raises(UserError, match="without MASTER_ADDR"):
        found({"RANK": "1", "WORLD_SIZE": "2"})


def test_sources_have_an_order_and_a_launcher_inside_a_step_has_precedence() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x"}
    assert found({**step(1), **torchrun}).source == "Slurm step"
    inside = found({**step(1), **torchrun, "WORLD_SIZE": "16", "RANK": "9"})
    assert (inside.source, inside.processes, inside.process) == ("torchrun", 16, 9)
    mpi = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "2"}
    assert found({**BATCH, **mpi}).source == "MPI (PMI)", "mpirun in a batch script is not a missing srun"
    assert found({**mpi, **torchrun}).source == "MPI (PMI)"
    assert found({}).source == "single process"
    assert summary(found({}), CPU, {}) == ["1 process, 8 CPU devices"]


def test_errors_of_the_gpus_are_kept_for_the_rendezvous() -> None:
    cluster = found(step(1, SLURM_GPUS_ON_NODE="4", CUDA_VISIBLE_DEVICES="0,1,2"), gpus=3)
    assert cluster.devices.error is not None
    assert cluster.devices.error[0] in (exit_codes.BAD_NODE, exit_codes.USAGE)
    assert found(step(1, SLURM_GPUS_ON_NODE="4", JAX_PLATFORMS="cpu")).devices.error is None


def test_slurms_variables_are_read_in_one_file() -> None:
    # reads of env with a quoted name count; names in job scripts and messages do not
    pattern = re.compile(r"""(environ|env)\w*(\.get\(|\[)\s*f?["']SLURM|getenv\(\s*["']SLURM|["']SLURM_[A-Z_]+["']\s*in\s""")
    files = [path for package in PACKAGES for path in (PACKAGE / package).rglob("*.py")]
    # the lease names the job that holds it, bad_nodes the node; rundir imports nothing of launch
    allowed = {slurm.__file__, *(str(PACKAGE / "rundir" / name) for name in ("lease.py", "bad_nodes.py"))}
    assert {str(path) for path in files if pattern.search(path.read_text())} == allowed
