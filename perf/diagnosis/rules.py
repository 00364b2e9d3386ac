"""All rules, and their application to the facts of a run.

Gains are ceilings on the run's wall time, so that findings from the run ledger and from the step ledger rank against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perf.diagnosis import run_rules, step_rules, study_rules
from perf.diagnosis.facts import Facts
from perf.diagnosis.finding import Finding

Rule = Callable[[Facts], Finding | None]

STUDY_RULES: tuple[Rule, ...] = (
    study_rules.flat_batch,
    study_rules.small_batch,
    study_rules.time_barely_down,
    study_rules.efficiency_falls,
    study_rules.large_scales_better,
    study_rules.fragile,
    study_rules.dearest,
    study_rules.verdict_depends,
)
"""Rules on several runs: what their comparison says, whatever each run by itself suffers from."""

RULES: tuple[Rule, ...] = (
    run_rules.input_pipeline,
    run_rules.cold_start,
    run_rules.recompilation,
    step_rules.host_bound,
    step_rules.host_syncs,
    step_rules.straggler,
    step_rules.exposed_communication,
    step_rules.resharding,
    run_rules.padding,
    step_rules.over_remat,
    run_rules.checkpoint_stall,
    run_rules.lost_steps,
    run_rules.hang,
    run_rules.memory_near_limit,
    step_rules.throttled,
    step_rules.slow_link,
    *STUDY_RULES,
)


def diagnose(facts: Facts, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Apply rules; the largest ceiling first. An empty list means: nothing worth changing."""
    found = [finding for rule in rules if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -finding.gain)
