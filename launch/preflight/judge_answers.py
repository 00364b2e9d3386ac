"""Judging who answered at all: processes that never came, fell silent, died, or could not finish a measurement.

When several processes measure together, one that is stuck holds up all the others. The one that died, or that stands at the earliest
measurement, is the cause; the others only waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.launch.preflight.checks import Check, Verdict
from ridgeline.launch.preflight.watch import ProbeOutcome

LOOK = "exclude the node and report it (dmesg, nvidia-smi)"
TOGETHER_LOOK = "all nodes: check NCCL's choice of network ports (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME); one node: exclude it"


def judge_missing(missing: Mapping[int, str], timeout_s: float) -> list[Check]:
    """Name processes that never came (process -> node)."""
    fix = "is the node up (sinfo), and did srun start its task (the job's log)? exclude the node"
    return [
        Check(node, "answer", Verdict.FAIL, "none", "", f"process {process} did not come within {timeout_s:.0f} s", fix, against_peers=True)
        for process, node in missing.items()
    ]


def judge_silent(silent: Sequence[int], lost: set[int], node_of: Mapping[int, str], doing: Mapping[int, str], stage: str) -> list[Check]:
    """Name processes that came and then gave no answer to a stage."""
    checks = []
    for process in silent:
        last = f"; it was at '{doing[process]}'" if process in doing else ""
        how = "ended without a word" if process in lost else "fell silent"
        reason = f"process {process} {how} during {stage}{last}"
        checks.append(Check(node_of[process], "answer", Verdict.FAIL, "none", "", reason, LOOK, against_peers=True))
    return checks


def judge_own_failures(outcomes: Mapping[int, ProbeOutcome], node_of: Mapping[int, str]) -> list[Check]:
    """Judge what processes could not measure on their own devices: each failure is its node's."""
    checks = []
    for process, outcome in sorted(outcomes.items()):
        for name, reason in _failures(outcome).items():
            checks.append(Check(node_of[process], name, Verdict.FAIL, "", "", f"process {process}: {reason}", LOOK))
    return checks


def judge_joint_failures(outcomes: Mapping[int, ProbeOutcome], node_of: Mapping[int, str]) -> list[Check]:
    """Judge what processes could not measure together: name the cause, and let those that waited for it be."""
    failures = {process: _failures(outcome) for process, outcome in outcomes.items()}
    failed = {process: texts for process, texts in failures.items() if texts}
    if not failed:
        return []
    died = {process for process in failed if outcomes[process].death is not None}
    # The fewer results a process has, the earlier it stopped.
    progress = {process: len(outcomes[process].results) for process in failed}
    earliest = min(progress.values())
    causes = died or {process for process in failed if progress[process] == earliest}
    nodes = sorted({node_of[process] for process in causes})
    checks, told = [], set()
    for process in sorted(failed):
        node, (name, reason) = node_of[process], next(iter(failed[process].items()))
        if (node, process in causes) in told:
            continue
        told.add((node, process in causes))
        if process in causes:
            checks.append(Check(node, name, Verdict.FAIL, "", "", f"process {process}: {reason}", TOGETHER_LOOK))
        elif node not in nodes:
            checks.append(Check(node, name, Verdict.NOT_APPLICABLE, "", "", f"waited for {', '.join(nodes)}: {reason}"))
    return checks


def _failures(outcome: ProbeOutcome) -> dict[str, str]:
    """Return measurement -> why it failed."""
    found = dict(outcome.errors)
    if outcome.hung_in is not None:
        found[outcome.hung_in] = f"no answer within {outcome.hung_s:g} s"
    if outcome.died_in is not None:
        found[outcome.died_in] = outcome.death or "died"
    return found
