"""All rules, and their application to the facts of a run.

Gains are ceilings on the run's wall time, so that findings from the run ledger and from the step ledger rank against each other; those of
rules on several runs are ceilings on what the comparison is about: time, or money.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.explain.diagnosis import run_rules, step_rules, study_rules
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import THRESHOLDS, Finding

Rule = Callable[[Facts], Finding | None]


@dataclass(frozen=True)
class Row:
    """One rule of the catalogue."""

    name: str
    check: Rule
    """Its docstring is the symptom."""
    thresholds: tuple[str, ...]
    """Keys of THRESHOLDS it compares with; none: what it looks for is no matter of degree."""
    reads: str
    action: str

    @property
    def symptom(self) -> str:
        """What is observed, in one line."""
        assert self.check.__doc__ is not None
        return self.check.__doc__.splitlines()[0].rstrip(".")


_RUN, _STEP, _RUNS = "run ledger and metrics", "step ledger of a profile", "several runs"
CATALOGUE: tuple[Row, ...] = (
    Row("input pipeline", run_rules.input_pipeline, ("data_wait",), _RUN, "more loader workers or cores; tokenise and pack ahead"),
    Row(
        "start-up and compilation not amortised",
        run_rules.cold_start,
        ("cold_start", "cold_start_s", "cold_compile_s"),
        _RUN,
        "keep compilations in a cache; only long runs repay the rest",
    ),
    Row(
        "recompilation in steady state",
        run_rules.recompilation,
        ("recompilations", "recompilation_share"),
        _RUN,
        "one shape for every batch",
    ),
    Row("host-bound steps", step_rules.host_bound, ("host_bound",), _STEP, "a larger batch: more work per launch"),
    Row("host synchronisation in the step", step_rules.host_syncs, ("host_syncs",), _STEP, "read results a step late"),
    Row("straggler", step_rules.straggler, ("straggler",), _STEP, "exclude its node and requeue"),
    Row(
        "exposed communication",
        step_rules.exposed_communication,
        ("exposed_communication", "exposed_unsplit"),
        _STEP,
        "more tokens per device, or another layout",
    ),
    Row(
        "accidental resharding",
        step_rules.resharding,
        ("unplanned",),
        "plan and compiled step",
        "constrain the activation at the line it names",
    ),
    Row("padding waste", run_rules.padding, ("padding",), _RUN, "pack documents, or shorter rows"),
    Row(
        "needless rematerialisation",
        step_rules.over_remat,
        ("recompute", "recompute_memory"),
        _STEP,
        "compute.remat.policy=dots, or none where it fits",
    ),
    Row(
        "checkpoint stalls",
        run_rules.checkpoint_stall,
        ("checkpoint", "checkpoint_s"),
        _RUN,
        "save asynchronously, more rarely, or to a faster disk",
    ),
    Row("steps lost to failures", run_rules.lost_steps, ("lost",), _RUN, "save more often"),
    Row("hang", run_rules.hang, ("hang",), _RUN, "exclude the node the stacks name"),
    Row(
        "memory near the limit",
        run_rules.memory_near_limit,
        ("memory",),
        "metrics, or compiled step and cluster",
        "accumulate, or a stronger remat",
    ),
    Row(
        "clocks throttled",
        step_rules.throttled,
        ("throttled", "stopped", "unequal_compute"),
        "clocks and quotas that were recorded; step ledger of a profile",
        "exclude the node, or raise its power limit",
    ),
    Row(
        "link slower than planned",
        step_rules.slow_link,
        ("slow_link", "slow_link_share"),
        "step ledger and plan",
        "NCCL settings, or exclude the node",
    ),
    Row(
        "throughput flat as the batch grows",
        study_rules.flat_batch,
        ("flat_batch",),
        _RUNS,
        "stop growing the batch; fuse kernels, or accept",
    ),
    Row("batch too small", study_rules.small_batch, ("small_batch",), _RUNS, "the larger batch, below the critical one"),
    Row(
        "fixed overheads at scale",
        study_rules.time_barely_down,
        ("throughput_up", "worthwhile"),
        _RUNS,
        "fewer devices; look at time to solution",
    ),
    Row("parallel efficiency falls", study_rules.efficiency_falls, ("efficiency",), _RUNS, "fewer devices, more work each, another layout"),
    Row(
        "large models scale better than small",
        study_rules.large_scales_better,
        ("size_gap", "efficiency"),
        _RUNS,
        "accept if the goal needs the large one",
    ),
    Row("faster but fragile", study_rules.fragile, ("fragile_knobs", "fragile_gain"), _RUNS, "prefer the simpler option"),
    Row("best configuration is also the dearest", study_rules.dearest, ("dear", "efficiency"), _RUNS, "choose by budget and objective"),
    Row("the verdict depends on the metric", study_rules.verdict_depends, (), _RUNS, "name the objective, decide again"),
)
"""Every rule. Of findings with equal gains the earlier row comes first."""

RULES: tuple[Rule, ...] = tuple(row.check for row in CATALOGUE)
STUDY_RULES: tuple[Rule, ...] = tuple(row.check for row in CATALOGUE if row.reads == _RUNS)
"""Rules on several runs: what their comparison says, whatever each run by itself suffers from."""


def diagnose(facts: Facts, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Apply rules; the largest ceiling first. An empty list means: nothing worth changing."""
    found = [finding for rule in rules if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -finding.gain)


def rules_table() -> str:
    """Render the catalogue as Markdown."""
    lines = ["| rule | symptom | threshold | reads | action |", "|---|---|---|---|---|"]
    for row in CATALOGUE:
        limits = (
            "<br>".join(f"{THRESHOLDS[name][0]:g}: {THRESHOLDS[name][1]}" for name in row.thresholds) or "three objectives, three scales"
        )
        lines.append(f"| {row.name} | {row.symptom} | {limits} | {row.reads} | {row.action} |")
    return "\n".join(lines)
