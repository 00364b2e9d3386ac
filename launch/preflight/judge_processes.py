"""Judge the processes: those that did not start, stopped responding, ended, or did not finish a measurement.

In a joint measurement one stuck process blocks all others. The cause is a process that ended, unless another hung at an earlier
measurement; else those at the earliest measurement. The others only waited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ridgeline.launch.preflight.checks import Check, Verdict
from ridgeline.launch.preflight.probe_runner import ProbeOutcome

NODE_FIX = "exclude the node and report it (dmesg, nvidia-smi)"
JOINT_FIX = "all nodes: check which network ports NCCL uses (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); one node: exclude it"


def judge_missing(missing: Mapping[int, str], timeout_s: float) -> list[Check]:
    """Return a failed check for every process that did not start (process -> node)."""
    fix = "check that the node is up (sinfo) and that srun started its task (log of the job); exclude the node"
    return [
        Check(
            node, "answer", Verdict.FAIL, "none", "", f"process {process} did not start within {timeout_s:.0f} s", fix, against_peers=True
        )
        for process, node in missing.items()
    ]


def judge_silent(silent: Sequence[int], lost: set[int], node_of: Mapping[int, str], doing: Mapping[int, str], stage: str) -> list[Check]:
    """Return a failed check for every process that did not report the result of a stage."""
    checks = []
    for process in silent:
        last = f"; last measurement: '{doing[process]}'" if process in doing else ""
        how = "ended" if process in lost else "stopped responding"
        reason = f"process {process} {how} during {stage}{last}"
        checks.append(Check(node_of[process], "answer", Verdict.FAIL, "none", "", reason, NODE_FIX, against_peers=True))
    return checks


def judge_own_failures(outcomes: Mapping[int, ProbeOutcome], node_of: Mapping[int, str]) -> list[Check]:
    """Return a failed check for every failed measurement of a process's own devices."""
    checks = []
    for process, outcome in sorted(outcomes.items()):
        for name, reason in _failures(outcome).items():
            checks.append(Check(node_of[process], name, Verdict.FAIL, "", "", f"process {process}: {reason}", NODE_FIX))
    return checks


def judge_joint_failures(outcomes: Mapping[int, ProbeOutcome], node_of: Mapping[int, str]) -> list[Check]:
    """Return failed checks for the cause of a failed joint measurement; processes that waited for it are not failed."""
    failures = {process: _failures(outcome) for process, outcome in outcomes.items()}
    failed = {process: texts for process, texts in failures.items() if texts}
    if not failed:
        return []
    # The fewer results a process has, the earlier it stopped.
    progress = {process: len(outcomes[process].results) for process in failed}
    earliest_hung = min((progress[process] for process in failed if outcomes[process].hung_in is not None), default=math.inf)
    died = {process for process in failed if outcomes[process].death is not None and progress[process] <= earliest_hung}
    causes = died or {process for process in failed if progress[process] == min(progress.values())}
    nodes = sorted({node_of[process] for process in causes})
    checks, seen = [], set()
    for process in sorted(failed):
        node, (name, reason) = node_of[process], next(iter(failed[process].items()))
        if (node, process in causes) in seen:
            continue
        seen.add((node, process in causes))
        if process in causes:
            checks.append(Check(node, name, Verdict.FAIL, "", "", f"process {process}: {reason}", JOINT_FIX))
        elif node not in nodes:
            checks.append(Check(node, name, Verdict.NOT_APPLICABLE, "", "", f"waited for {', '.join(nodes)}: {reason}"))
    return checks


def _failures(outcome: ProbeOutcome) -> dict[str, str]:
    """Return measurement -> reason of its failure."""
    found = dict(outcome.errors)
    if outcome.hung_in is not None:
        found[outcome.hung_in] = f"not finished within {outcome.hung_s:g} s"
    if outcome.died_in is not None:
        found[outcome.died_in] = outcome.death or "process ended"
    return found
