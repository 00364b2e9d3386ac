"""The catalog of rules, and their application to the facts of a run.

The gain of a finding on one run is an upper limit on its whole wall time, so that findings of the run ledger and of the step ledger can be
ranked together. The gain of a finding on several runs is in what is compared: time or cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.explain.diagnosis import run_rules, step_rules, study_rules
from ridgeline.explain.diagnosis.costs import next_bottleneck
from ridgeline.explain.diagnosis.facts import Facts, read_facts
from ridgeline.explain.diagnosis.finding import THRESHOLDS, Finding
from ridgeline.rundir.directory import RunDir

Rule = Callable[[Facts], Finding | None]


@dataclass(frozen=True)
class Row:
    """One rule of the catalog."""

    name: str
    check: Rule
    """The first line of its docstring is the symptom."""
    thresholds: tuple[str, ...]
    """Keys of THRESHOLDS that it compares with; none for a rule that compares choices."""
    reads: str
    """Its input."""
    action: str

    @property
    def symptom(self) -> str:
        """What is observed, in one line."""
        assert self.check.__doc__ is not None
        return self.check.__doc__.splitlines()[0].rstrip(".")


_RUN, _STEP, _RUNS = "run ledger and metrics", "step ledger of a profile", "several runs"
CATALOG: tuple[Row, ...] = (
    Row(
        "input pipeline",
        run_rules.input_pipeline,
        ("data_wait",),
        _RUN,
        "more loader workers or CPU cores; tokenize and pack ahead of time",
    ),
    Row(
        "start-up and compilation not amortised",
        run_rules.cold_start,
        ("cold_start", "cold_start_s", "cold_compile_s"),
        _RUN,
        "a compilation cache; more steps",
    ),
    Row(
        "recompilation in steady state",
        run_rules.recompilation,
        ("recompilations", "recompilation_share"),
        _RUN,
        "pad every batch to one shape",
    ),
    Row("host-bound steps", step_rules.host_bound, ("host_bound",), _STEP, "a larger batch"),
    Row("host synchronisation in the step", step_rules.host_syncs, ("host_syncs",), _STEP, "read results one step later"),
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
        "constrain the activation at the reported source line",
    ),
    Row("padding waste", run_rules.padding, ("padding",), _RUN, "pack documents, or shorten the rows"),
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
        "save asynchronously, less often, or to a faster file system",
    ),
    Row("steps lost to failures", run_rules.lost_steps, ("lost",), _RUN, "save more often"),
    Row("hang", run_rules.hang, ("hang",), _RUN, "exclude the node of the suspect in the hang report"),
    Row(
        "memory near the limit",
        run_rules.memory_near_limit,
        ("memory",),
        "metrics, or compiled step and cluster",
        "gradient accumulation, or more rematerialization",
    ),
    Row("loss spikes", run_rules.loss_spikes, ("loss_spike",), _RUN, "gradient clipping, or a lower learning rate"),
    Row(
        "clocks throttled",
        step_rules.throttled,
        ("throttled", "stopped", "unequal_compute"),
        "recorded clocks and CPU quotas; step ledger of a profile",
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
        "keep the smaller batch; fuse kernels",
    ),
    Row("batch too small", study_rules.small_batch, ("small_batch",), _RUNS, "the larger batch, below the critical batch size"),
    Row(
        "fixed overheads at scale",
        study_rules.time_barely_down,
        ("throughput_up", "worthwhile"),
        _RUNS,
        "fewer devices; compare time to solution",
    ),
    Row(
        "parallel efficiency falls",
        study_rules.efficiency_falls,
        ("efficiency",),
        _RUNS,
        "fewer devices, more work per device, or another layout",
    ),
    Row(
        "large models scale better than small",
        study_rules.large_scales_better,
        ("size_gap", "efficiency"),
        _RUNS,
        "accept it if the goal needs the large model",
    ),
    Row("faster but fragile", study_rules.fragile, ("fragile_knobs", "fragile_gain"), _RUNS, "use the simpler run"),
    Row("best configuration is also the dearest", study_rules.dearest, ("dear", "efficiency"), _RUNS, "choose by objective"),
    Row("the verdict depends on the metric", study_rules.verdict_depends, (), _RUNS, "choose the objective first"),
)
"""Every rule. Of findings with equal gains the earlier row comes first."""

RULES: tuple[Rule, ...] = tuple(row.check for row in CATALOG)
STUDY_RULES: tuple[Rule, ...] = tuple(row.check for row in CATALOG if row.reads == _RUNS)
"""Rules on several runs: findings of their comparison, not of a single run."""


OF_TRAINING = frozenset({"loss spikes"})
"""Rules on what goes wrong with the training itself: their findings come before those that only cost time."""


def diagnose(facts: Facts, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Apply rules; return the findings: those of the training itself, then the largest gain first. Empty: no rule applies."""
    found = [finding for rule in rules if (finding := rule(facts)) is not None]
    found = [replace(f, next_bottleneck=f.next_bottleneck or next_bottleneck(facts, f.rule, f.gain)) for f in found]
    return sorted(found, key=lambda finding: (finding.rule not in OF_TRAINING, -finding.gain))


def summary_line(path: Path) -> str:
    """Return the main finding of a finished run in one line. It never raises: a run must not fail at its end because of the diagnosis."""
    more = f"ridge diagnose {path}"
    try:
        facts = read_facts(RunDir(path))
        findings = diagnose(facts)
    except Exception as error:
        return f"diagnosis: none ({type(error).__name__}: {error}); {more}"
    if not findings:
        unknown = "" if facts.analysis is not None else "; no step was profiled"
        return f"diagnosis: no findings (goodput {facts.ledger.goodput:.1%}{unknown}); {more}"
    first, others = findings[0], len(findings) - 1
    rest = f"; {others} more finding{'' if others == 1 else 's'}" if others else ""
    return f"diagnosis: {first.title} ({first.gain_text}): {first.evidence[0]}{rest}; {more}"


def rules_table() -> str:
    """Return the catalog as a Markdown table."""
    lines = ["| rule | symptom | threshold | reads | action |", "|---|---|---|---|---|"]
    for row in CATALOG:
        limits = (
            "<br>".join(f"{THRESHOLDS[name][0]:g}: {THRESHOLDS[name][1]}" for name in row.thresholds) or "three objectives, three scales"
        )
        lines.append(f"| {row.name} | {row.symptom} | {limits} | {row.reads} | {row.action} |")
    return "\n".join(lines)
