"""Slurm's variables. No other file of the project reads them.

Where Slurm sets which (observed with 22.05): a job script and an `salloc` shell have the job's variables, and a script also has
SLURM_PROCID=0; only the variables of a *step* show that `srun` started this process. Steps started by srun are numbered from 0; the batch
script, the extern step and an interactive step have numbers close to 2**32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.configs.environment import is_number, read_number, shortened
from ridgeline.configs.errors import UserError
from ridgeline.launch.cluster.slurm_nodes import expand_counts

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_TASK_PARENTS = ("slurmstepd", "srun", "salloc")
"""Programs of Slurm whose descendants belong to a job."""
_REMOTE_SHELLS = ("sshd", "sshd-session", "telnetd", "rlogind")


@dataclass(frozen=True)
class SlurmStep:
    """A Slurm step as one of its tasks sees it."""

    job: str
    step: str
    restart: int
    tasks: int
    task: int
    local_task: int
    node: int
    nodes: int
    node_list: str
    node_name: str | None
    tasks_per_node: tuple[int, ...] | None
    """By node index; None: not provided."""
    distribution: str
    own_tasks: tuple[int, ...] | None
    """Indices of all tasks of this node."""
    gpus_on_node: int | None
    cpus_per_task: int | None
    identity: str
    """The same in all tasks of the step, different for every other step of the cluster."""


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the srun step that the variables describe; None outside of a step. Raises UserError for contradictory variables."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    job = env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", ""))
    if not is_number(step) or len(step) > 10 or int(step) >= _FIRST_SPECIAL_STEP or not job or "SLURM_PROCID" not in env:
        return None
    tasks = read_number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is None:
        return None
    node_list = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    task = read_number(env, "SLURM_PROCID")
    if task is None:
        raise UserError(f"SLURM_PROCID={shortened(env['SLURM_PROCID'])} is not the number of a task (was it edited?)")
    if not task < tasks:
        raise UserError(f"SLURM_PROCID={task} of a step with {tasks} tasks: these variables contradict each other (were they edited?)")
    restart = restart_count(env)
    # All components of a heterogeneous job have the leader's job id and the same step numbers: only the nodes differ.
    identity = f"slurm {env.get('SLURM_CLUSTER_NAME', '')} job {job} step {step} restart {restart} tasks {tasks} on {node_list}"
    return SlurmStep(
        job=job,
        step=step,
        restart=restart,
        tasks=tasks,
        task=task,
        local_task=read_number(env, "SLURM_LOCALID") or 0,
        node=read_number(env, "SLURM_NODEID") or 0,
        nodes=read_number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1,
        node_list=node_list,
        node_name=env.get("SLURMD_NODENAME"),
        tasks_per_node=_tasks_per_node(env, tasks),
        distribution=env.get("SLURM_DISTRIBUTION", "block").split(":")[0],
        own_tasks=_own_tasks(env, tasks),
        gpus_on_node=read_number(env, "SLURM_GPUS_ON_NODE"),
        cpus_per_task=read_number(env, "SLURM_CPUS_PER_TASK"),
        identity=identity,
    )


def allocated_tasks(env: Mapping[str, str]) -> int | None:
    """Return the number of tasks allocated to the job of this script or shell; None outside of a job."""
    if not (env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        return None
    tasks = read_number(env, "SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is not None:
        return tasks
    return (read_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1) * (read_number(env, "SLURM_NTASKS_PER_NODE") or 1)


def restart_count(env: Mapping[str, str]) -> int:
    """Return how often Slurm has requeued this job."""
    return read_number(env, "SLURM_RESTART_COUNT") or 0


def node_list(env: Mapping[str, str]) -> str | None:
    """Return the compressed list of the job's nodes, None outside of a job."""
    return env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or None


def cpus_per_task(env: Mapping[str, str]) -> int | None:
    """Return the cores of a task: as requested, else an equal share of the node's."""
    requested = read_number(env, "SLURM_CPUS_PER_TASK")
    step = read_step(env)
    if requested is not None or step is None:
        return requested
    on_node, counts = read_number(env, "SLURM_CPUS_ON_NODE"), step.tasks_per_node
    if on_node is None or counts is None or step.node >= len(counts):
        return None
    return max(1, on_node // counts[step.node])


def is_stray(ancestry: Sequence[str]) -> bool:
    """Return whether the Slurm variables do not belong to this process, from the names of its ancestors, nearest first.

    True if a remote shell is nearer than any program of Slurm. Unknown ancestors, as in a container, return False.
    """
    for name in ancestry:
        if name in _TASK_PARENTS:
            return False
        if name in _REMOTE_SHELLS:
            return True
    return False


def hosts_of_tasks(step: SlurmStep, hosts: Sequence[str]) -> list[str | None]:
    """Return the host of every task of a step; None if the distribution does not determine it."""
    unknown: list[str | None] = [None] * step.tasks
    counts = step.tasks_per_node
    if counts is None or len(counts) != len(hosts):
        return unknown
    order: list[int] = []
    if step.distribution == "block":
        order = [node for node, count in enumerate(counts) for _ in range(count)]
    elif step.distribution == "cyclic":
        order = [node for turn in range(max(counts)) for node, count in enumerate(counts) if turn < count]
    if len(order) != step.tasks or any(order[task] != step.node for task in step.own_tasks or ()):
        return unknown
    return [hosts[node] for node in order]


def _tasks_per_node(env: Mapping[str, str], tasks: int) -> tuple[int, ...] | None:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in env:
            try:
                counts = tuple(expand_counts(env[name]))
            except ValueError:
                continue
            if sum(counts) == tasks:
                return counts
    return None


def _own_tasks(env: Mapping[str, str], tasks: int) -> tuple[int, ...] | None:
    items = env.get("SLURM_GTIDS", "").split(",")
    if not all(is_number(item) and len(item) < 10 and int(item) < tasks for item in items):
        return None
    return tuple(int(item) for item in items)
