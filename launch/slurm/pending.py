"""What a pending job waits for: its turn, a person who releases it, or a change without which it never starts.

Slurm's reasons are in the manual of squeue, section JOB REASON CODES. Priority 0 is reserved for held jobs (`scontrol hold`,
src/slurmctld/job_mgr.c).
"""

from __future__ import annotations

import re

QUEUED = "queued"
"""It starts by itself: resources, priority, a limit on running jobs, a start time."""
HELD = "held"
"""It starts after `scontrol release`, not before."""
BLOCKED = "blocked"
"""It never starts as it was submitted."""
STUCK = (HELD, BLOCKED)
"""Kinds of wait that do not end by themselves."""

PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""States of a job without nodes that may start."""
HOLDS = frozenset({"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""States of a job that was requeued and held."""

_HOLDS = (
    (r"JobHeldAdmin", "by an administrator, who has to release it"),
    (r"JobHeldUser", "by its user"),
    (r"JobHoldMaxRequeue", "its batch script was lost with its node too often, and an administrator has to release it"),
    (r"launch", "a node failed to start it: `scontrol show node` names drained ones"),
    (r"ReservationDeleted", "its reservation was deleted"),
    (r"BurstBufferOperation", "its burst buffer failed"),
)
"""Why a job is held."""
_NEVER = (
    (r"DependencyNeverSatisfied", "a job that it depends on failed or was cancelled: `scontrol update JobId={job} Dependency=` drops it"),
    (r"BadConstraints", "no nodes of the cluster satisfy the request: submit it with another"),
    (r"PartitionConfig", "the partition has no such nodes, or too few: `scontrol show partition`"),
    (r"PartitionTimeLimit", "its time limit is above the partition's: submit it with a shorter --time"),
    (r"PartitionNodeLimit", "the partition does not allow this number of nodes"),
    (r"(QOS|Assoc)MaxWallDurationPerJobLimit", "its time limit is above the limit per job: submit it with a shorter --time"),
    (r"InvalidAccount|AccountNotAllowed|InvalidQOS|QOSNotAllowed", "its account or QOS may not be used here: submit it with others"),
    (r"(QOS|Assoc)Max\w+Per(Job|JobLimit|Node)", "it asks for more than the limit per job or node: submit it with less"),
    (r"QOSMin\w+", "it asks for less than the QOS requires: submit it with more, or another QOS"),
    (r"MaxMemPerLimit", "it asks for more memory than allowed: submit it with less"),
)
"""Reasons that time does not resolve, and what does."""
_LIMITS = (
    (
        r"(QOS|Assoc)Grp(?!\w*Run)\w*Minutes\w*|AssociationTimeLimit|QOSTimeLimit|QOSUsageThreshold",
        "the budget of device time of its account or QOS is used up",
    ),
    (
        r"QOSMax\w+Per(User|UserLimit|Account)|Max\w+PerAccount|AssocMaxJobsLimit",
        "waits for other jobs of its user or account; a job larger than the limit never starts",
    ),
    (r"ReqNodeNotAvail", "a node that it needs is down, drained or reserved: `scontrol show node`"),
    (r"Partition(Down|Inactive)", "the partition is closed"),
)
"""Reasons that time may resolve, and that a person should know."""


def waiting(state: str, reason: str | None, priority: int) -> str | None:
    """Return what kind of wait a job is in: QUEUED, HELD or BLOCKED; None if it is not pending.

    state, reason: as Slurm prints them. priority: 0 for a held job.
    """
    if state not in PENDING:
        return None
    if _first(_NEVER, reason) is not None:
        return BLOCKED
    return HELD if priority == 0 or state in HOLDS else QUEUED


def advice(job: str, kind: str | None, reason: str | None, slurm_cluster: str | None = None) -> str | None:
    """Return in one line what a person can do for a pending job; None if it only has to wait its turn.

    job: its id; for all tasks of an array the array's. kind: as `waiting` returns.
    """
    if kind == HELD:
        line = f"held: {_first(_HOLDS, reason) or 'it does not start by itself'}; `scontrol release {job}` releases it"
    elif kind == BLOCKED:
        line = f"never starts: {_first(_NEVER, reason)}"
    else:
        line = (_first(_LIMITS, reason) if kind == QUEUED else None) or ""
    scontrol = f"`scontrol --clusters={slurm_cluster}" if slurm_cluster else "`scontrol"
    return line.format(job=job).replace("`scontrol", scontrol) or None


def _first(table: tuple[tuple[str, str], ...], reason: str | None) -> str | None:
    code = re.split(r"[,_ ]", reason or "")[0]
    return next((text for pattern, text in table if re.fullmatch(pattern, code)), None)
