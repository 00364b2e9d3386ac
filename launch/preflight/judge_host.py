"""Judge the facts of the hosts: versions, clock, cores, memory, limits, disk. Pure functions of facts and cluster file.

The facts of a node are those of its first process, except cores and versions, which come from all its processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.format import format_bytes
from ridgeline.launch.preflight.checks import STORAGE_LIMITS, Check, Expected, Verdict, judge_rate
from ridgeline.launch.preflight.host import DiskFacts, HostFacts

GB = 1e9
CLOCK_WARN_S, CLOCK_FAIL_S = 0.5, 10.0
"""Event logs of several nodes are merged by wall clock; offsets of seconds also break file times and credentials (munge)."""
SHM_WARN_BYTES, SHM_FAIL_BYTES = 1e9, 128e6
"""Loader workers and NCCL use it as shared memory; the default of containers is 67 MB."""
MEMLOCK_FAIL_BYTES = 4e9
"""InfiniBand pins its send buffers, gigabytes per process."""
MEMORY_WARN, MEMORY_FAIL = 0.95, 0.85
"""Shares of the cluster file's memory: firmware reserves a few percent, a lost module is an eighth or more."""
AVAILABLE_WARN, AVAILABLE_FAIL = 0.5, 0.1
"""Shares of the memory that must be available; other processes use the rest."""
DISK_WARN_BYTES, DISK_FAIL_BYTES = 20e9, 1e9
"""Free space of the run directory if the checkpoint size is unknown."""
CHECKPOINTS_WARN, CHECKPOINTS_FAIL = 4, 2
"""Free space in checkpoints; the previous one is kept until the next is complete."""


@dataclass(frozen=True)
class HostContext:
    """What host facts are compared with."""

    cluster: ClusterConfig | None
    nodes: int
    tasks_per_node: Mapping[str, int]
    """Node -> processes of this job on it."""
    checkpoint_bytes: int | None = None
    """Checkpoint size of the config; None: no config."""


def judge_hosts(facts: Sequence[HostFacts], context: HostContext) -> list[Check]:
    """Judge the hosts of all processes that reported."""
    by_node: dict[str, list[HostFacts]] = {}
    for fact in sorted(facts, key=lambda fact: fact.process):
        by_node.setdefault(fact.node, []).append(fact)
    checks: list[Check] = []
    reference = common_versions(facts)
    rates = [speed for own in by_node.values() if (speed := _write_speed(own[0])) is not None]
    for node, own in by_node.items():
        first = own[0]
        checks += [
            judge_versions(node, own, reference, len(facts)),
            judge_clock(node, first),
            judge_cores(node, own, context),
            judge_memory(node, first, context.cluster),
            judge_available(node, first),
            judge_shm(node, first),
            judge_memlock(node, first, context),
            *judge_disk(node, first, context, rates),
        ]
    return checks


def common_versions(facts: Sequence[HostFacts]) -> dict[str, str | None]:
    """Return the most common version of each component (on a tie the first process's); None: most processes lack it."""
    names = {name for fact in facts for name in fact.versions}
    ordered = sorted(facts, key=lambda fact: fact.process)
    return {name: Counter(fact.versions.get(name) for fact in ordered).most_common(1)[0][0] for name in sorted(names)}


def judge_versions(node: str, own: Sequence[HostFacts], common: Mapping[str, str | None], processes: int) -> Check:
    """Judge whether the versions are the most common ones."""
    odd = {name: (fact.versions.get(name), wanted) for fact in own for name, wanted in common.items() if fact.versions.get(name) != wanted}
    measured = f"jax {own[0].versions.get('jax')}" + (
        f", driver {own[0].versions['nvidia driver']}" if "nvidia driver" in own[0].versions else ""
    )
    if not odd:
        alone = "one process: no comparison" if processes == 1 else ""
        return Check(node, "versions", Verdict.OK, f"{measured}, {len(common)} components", "equal everywhere", alone)
    shown = "; ".join(f"{name} {here or 'absent'} here, {there or 'absent'} elsewhere" for name, (here, there) in list(odd.items())[:3])
    more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
    return Check(
        node,
        "versions",
        Verdict.FAIL,
        ", ".join(f"{name} {here or 'absent'}" for name, (here, _) in list(odd.items())[:3]),
        "equal everywhere",
        shown + more,
        "use one environment on all nodes (shared file system or one container image); ask the site to update the driver",
        against_peers=True,
    )


def judge_clock(node: str, fact: HostFacts) -> Check:
    """Judge the offset to process 0's clock beyond the uncertainty of its measurement."""
    if fact.process == 0:
        return Check(node, "clock", Verdict.OK, "reference", "", "the other nodes are compared with this one")
    sure_s = max(0.0, abs(fact.clock_offset_s) - fact.clock_error_s)
    verdict = Verdict.FAIL if sure_s > CLOCK_FAIL_S else Verdict.WARN if sure_s > CLOCK_WARN_S else Verdict.OK
    bad = verdict != Verdict.OK
    return Check(
        node,
        "clock",
        verdict,
        f"{fact.clock_offset_s * 1e3:+.3g} ms +- {fact.clock_error_s * 1e3:.2g} ms",
        f"within {CLOCK_WARN_S:g} s",
        "differs from the clock of the first node" if bad else "",
        "ask the site to fix time synchronization (chronyc tracking)" if bad else "",
        fact.clock_offset_s,
        "s",
        against_peers=bad,
    )


def judge_cores(node: str, own: Sequence[HostFacts], context: HostContext) -> Check:
    """Judge the processors that affinity and quota allow against the cluster file's cores."""
    usable = len({cpu for fact in own for cpu in fact.affinity})
    quota = min((fact.quota_cpus for fact in own if fact.quota_cpus is not None), default=None)
    limited = usable if quota is None else min(usable, quota)
    tasks = len(own)
    each = ", ".join(sorted({str(len(fact.affinity)) for fact in own}, key=int))
    measured = f"{limited:g} of {own[0].cpus} processors" + (f", {each} per task" if tasks > 1 else "")
    if quota is not None and quota < usable:
        measured += f" (quota {quota:g})"
    if context.cluster is None:
        return Check(node, "cores", Verdict.NOT_APPLICABLE, measured, "", "no cluster file", value=limited)
    # A job on part of a node gets a share of the cores in proportion to its tasks.
    whole = context.cluster.slurm.tasks_per_node or context.cluster.devices_per_node
    wanted = context.cluster.cores_per_node * min(1.0, tasks / whole)
    expected = f"{wanted:g} cores"
    if limited >= wanted:
        return Check(node, "cores", Verdict.OK, measured, expected, value=limited)
    per_task = max(1, int(wanted / tasks))
    why = "the control group's quota" if quota is not None and quota < usable else "the affinity" if usable < own[0].cpus else "the machine"
    return Check(
        node,
        "cores",
        Verdict.FAIL if limited < wanted / 2 else Verdict.WARN,
        measured,
        expected,
        f"{why} leaves {limited:g} of {wanted:g}",
        f"pass --cpus-per-task={per_task} to sbatch and to srun"
        if why != "the machine"
        else "exclude the node, or correct cores_per_node in the cluster file",
        limited,
    )


def judge_memory(node: str, fact: HostFacts, cluster: ClusterConfig | None) -> Check:
    """Judge the memory of the machine, or of its control group, against the cluster file."""
    size = fact.memory_total_bytes if fact.memory_limit_bytes is None else fact.memory_limit_bytes
    limited = fact.memory_limit_bytes is not None
    measured = f"{size / GB:.0f} GB" + (f" (control group; the machine has {fact.memory_total_bytes / GB:.0f})" if limited else "")
    if cluster is None:
        return Check(node, "memory", Verdict.NOT_APPLICABLE, measured, "", "no cluster file", value=size / GB, unit="GB")
    share = size / (cluster.memory_per_node_gib * 2**30)
    verdict = Verdict.FAIL if share < MEMORY_FAIL and not limited else Verdict.WARN if share < MEMORY_WARN else Verdict.OK
    fix = "pass --mem=0 for all of the node's memory" if limited else "exclude the node and report it: a memory module may be lost"
    bad = verdict != Verdict.OK
    expected = f"{cluster.memory_per_node_gib * 2**30 / GB:.0f} GB"
    return Check(node, "memory", verdict, measured, expected, f"{share:.0%} of the cluster file's" * bad, fix * bad, size / GB, "GB")


def judge_available(node: str, fact: HostFacts) -> Check:
    """Judge how much of the machine's memory is free."""
    share = fact.memory_available_bytes / fact.memory_total_bytes
    verdict = Verdict.FAIL if share < AVAILABLE_FAIL else Verdict.WARN if share < AVAILABLE_WARN else Verdict.OK
    bad = verdict != Verdict.OK
    return Check(
        node,
        "free memory",
        verdict,
        f"{fact.memory_available_bytes / GB:.1f} GB",
        f"{AVAILABLE_WARN:.0%} of {fact.memory_total_bytes / GB:.0f} GB",
        f"{share:.0%} available: other processes use the rest" * bad,
        "look for processes left by other jobs; request --exclusive" * bad,
        fact.memory_available_bytes / GB,
        "GB",
    )


def judge_shm(node: str, fact: HostFacts) -> Check:
    """Judge the free space of /dev/shm."""
    expected = f"{SHM_WARN_BYTES / GB:g} GB free"
    fix = "containers: --shm-size or --ipc=host; else remove files left in /dev/shm"
    if fact.shm_free_bytes is None or fact.shm_total_bytes is None:
        return Check(node, "/dev/shm", Verdict.FAIL, "none", expected, "there is no /dev/shm", fix)
    free = fact.shm_free_bytes
    verdict = Verdict.FAIL if free < SHM_FAIL_BYTES else Verdict.WARN if free < SHM_WARN_BYTES else Verdict.OK
    bad = verdict != Verdict.OK
    measured = f"{free / GB:.2f} of {fact.shm_total_bytes / GB:.2f} GB free"
    reason = "loader workers and NCCL need it as shared memory" * bad
    return Check(node, "/dev/shm", verdict, measured, expected, reason, fix * bad, free / GB, "GB")


def judge_memlock(node: str, fact: HostFacts, context: HostContext) -> Check:
    """Judge the limit of locked memory, which InfiniBand and RoCE need between nodes."""
    measured = "unlimited" if fact.memlock_bytes is None else format_bytes(fact.memlock_bytes)
    value = None if fact.memlock_bytes is None else fact.memlock_bytes / GB
    if context.cluster is None or context.cluster.nic_gb_per_s is None:
        why = "no cluster file" if context.cluster is None else "the cluster file has no network ports (nic_gb_per_s): TCP pins no memory"
        return Check(node, "memlock", Verdict.NOT_APPLICABLE, measured, "", why, value=value, unit="GB")
    if fact.memlock_bytes is None:
        return Check(node, "memlock", Verdict.OK, measured, "unlimited")
    failed = fact.memlock_bytes < MEMLOCK_FAIL_BYTES and context.nodes > 1
    reason = "too low for the buffers that InfiniBand pins" if failed else "a limit that InfiniBand may reach"
    fix = "ask the site for LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK, or ulimit -l unlimited"
    return Check(node, "memlock", Verdict.FAIL if failed else Verdict.WARN, measured, "unlimited", reason, fix, value, "GB")


def judge_disk(node: str, fact: HostFacts, context: HostContext, rates: Sequence[float]) -> list[Check]:
    """Judge free space and write rate of the run directory; `rates`: of all nodes, writing at the same time."""
    if fact.disk is None:
        why = "no run directory given (--run-dir)"
        return [Check(node, name, Verdict.NOT_APPLICABLE, "", "", why) for name in ("disk space", "disk write")]
    disk = DiskFacts(**fact.disk)
    if disk.error is not None:
        fix = "free space, mount the file system, or choose another run_dir"
        reason = f"{disk.path} cannot be written: {disk.error}"
        return [
            Check(node, "disk write", Verdict.FAIL, f"{format_bytes(disk.written_bytes)} written", "a writable run directory", reason, fix)
        ]
    one = context.checkpoint_bytes
    warn, fail = (DISK_WARN_BYTES, DISK_FAIL_BYTES) if one is None else (CHECKPOINTS_WARN * one, CHECKPOINTS_FAIL * one)
    wanted = f"{warn / 1e9:.3g} GB" + ("" if one is None else f" ({CHECKPOINTS_WARN} checkpoints)")
    verdict = Verdict.FAIL if disk.free_bytes < fail else Verdict.WARN if disk.free_bytes < warn else Verdict.OK
    bad = verdict != Verdict.OK
    reason = f"{disk.path} has {disk.free_bytes / 1e9:.3g} GB left" * bad
    fix = "free space, or keep fewer checkpoints" * bad
    space = Check(node, "disk space", verdict, f"{disk.free_bytes / 1e9:.3g} GB free", wanted, reason, fix, disk.free_bytes / 1e9, "GB")
    assert disk.write_bytes_per_s is not None
    # The schema's default is an assumption of plans, not a property of this machine.
    known = context.cluster is not None and "storage" in context.cluster.model_fields_set
    share_of_job = context.cluster.storage.write_gb_per_s / max(1, context.nodes) if context.cluster is not None and known else None
    speed = judge_rate(
        node,
        "disk write",
        disk.write_bytes_per_s / 1e9,
        "GB/s",
        expected=Expected(
            share_of_job,
            "no storage rate in the cluster file" if share_of_job is None else "this node's share of the cluster file's storage",
        ),
        peers=[rate / 1e9 for rate in rates],
        limits=STORAGE_LIMITS,
        fix="check the mount of the file system on this node; checkpoints will be slow",
        detail=f"{format_bytes(disk.written_bytes)}, synced",
        capped=False,
    )
    return [space, speed]


def _write_speed(fact: HostFacts) -> float | None:
    return None if fact.disk is None else DiskFacts(**fact.disk).write_bytes_per_s
