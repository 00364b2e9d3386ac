"""`ridge diagnose RUN [RUN...]`: the bottlenecks of a run or a captured profile, or of several runs compared, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import print_json, print_table
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural

if TYPE_CHECKING:
    from ridgeline.explain.diagnosis.facts import Facts
    from ridgeline.explain.diagnosis.terms import Term


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", help="Cluster of the run, name or file [default: the one it was submitted to, or one with its devices].")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Calibration file of that machine, from `ridge calibrate` [default: published rates].",
)
@json_option
def diagnose(runs: tuple[Path, ...], cluster: str | None, calibration: Path | None, as_json: bool) -> None:
    """Report the bottlenecks of RUN: finding, evidence, next measurement, change, largest possible gain, and the next bottleneck.

    Uses the events and metrics of the run and, if present, its analyzed profile, plan and compile report. If the cluster is known, compares
    predicted with measured values: step time by term, memory, bytes and bandwidth of collectives.

    RUN may also be a captured profile of any JAX program (an .xplane.pb file or its directory): then the rules judge its steps only.

    Several finished RUNs of the same work are compared: at several scales (or the directory of `ridge scale`), at several batch sizes, for
    several models at several scales, or with and without performance settings.
    """
    from ridgeline.explain.diagnosis.captured import findings as capture_findings
    from ridgeline.explain.diagnosis.captured import is_capture
    from ridgeline.explain.diagnosis.rules import STUDY_RULES
    from ridgeline.explain.diagnosis.rules import diagnose as apply_rules
    from ridgeline.explain.diagnosis.terms import largest, terms

    facts, several = _facts(runs, cluster, calibration)
    predicted = [] if several else terms(facts)
    worst = largest(predicted)
    alone = len(runs) == 1 and is_capture(runs[0]) and facts.path is None
    findings = capture_findings(facts) if alone else apply_rules(facts, STUDY_RULES) if several else apply_rules(facts)
    if as_json:
        print_json(
            {
                "run": facts.name,
                "goodput": None if alone else facts.ledger.goodput,
                "findings": [dataclasses.asdict(f) for f in findings],
                "predicted": [dataclasses.asdict(term) for term in predicted],
                "largest_disagreement": None if worst is None else dataclasses.asdict(worst),
            }
        )
        return
    if several:
        print(f"comparing {len(several)} runs; for the bottlenecks of a single run, use `ridge diagnose` with that run")
    profile = "" if facts.analysis is not None else "; no analyzed profile, so the parts of a step are unknown"
    known = "comparison" if several else f"goodput {facts.ledger.goodput:.1%}{profile}"
    if alone and facts.analysis is not None:
        known = f"capture of {len(facts.analysis.steps)} {facts.analysis.per}(s); start-up, saves and metrics of the run are unknown"
    if not findings:
        print(f"{facts.name}: no findings ({known})")
    else:
        print(f"{facts.name}: {plural(len(findings), 'finding')}, {known}")
    for number, finding in enumerate(findings, 1):
        print(f"\n{number}. {finding.title} ({finding.gain_text}, confidence {finding.confidence})")
        rows = [*(("evidence", text) for text in finding.evidence), ("action", finding.action)]
        rest = [override for override in finding.overrides if override not in finding.action]
        rows += [("with", " ".join(rest))] if rest else []
        rows += [("command", finding.command)] if finding.command else []
        rows += [
            ("measure next", finding.measure_next),
            ("next bottleneck", finding.next_bottleneck),
            ("lens", f"{finding.lens}: {finding.pattern}"),
        ]
        for heading, text in rows:
            print(f"   {heading + ':':<17}{text}")
    _print_predicted(predicted, worst)


def _print_predicted(predicted: Sequence[Term], worst: Term | None) -> None:
    """Print predicted and measured values, and the largest disagreement."""
    if not predicted:
        return
    print("\npredicted and measured (time per step)")
    rows = [
        {
            "term": term.name,
            "planned": _figure(term.planned, term.unit),
            "measured": _figure(term.measured, term.unit),
            "ratio": f"{term.ratio:.2f}",
            "verdict": "as planned" if term.explanation == "as planned" else "differs",
        }
        for term in predicted
    ]
    print_table(["term", "planned", "measured", "ratio", "verdict"], rows)
    if worst is not None:
        measured, planned = _figure(worst.measured, worst.unit), _figure(worst.planned, worst.unit)
        print(f"largest disagreement: {worst.name}, {measured} measured and {planned} planned:")
        print(f"   {worst.explanation}")


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.3g} ms"
    return f"{value / 1e6:.3g} MB" if unit == "bytes" else f"{value / 1e9:.3g} GB/s"


def _facts(runs: tuple[Path, ...], cluster: str | None, calibration: Path | None = None) -> tuple[Facts, Sequence[Path]]:
    """Return the facts, and the runs they compare (none: a single run)."""
    from ridgeline.explain.diagnosis.captured import capture_facts, is_capture
    from ridgeline.explain.diagnosis.facts import read_facts
    from ridgeline.explain.diagnosis.several import read_several
    from ridgeline.explain.study.document import is_ladder, is_scaling, read_study, study_runs
    from ridgeline.rundir.directory import RunDir

    if len(runs) == 1:
        study = read_study(runs[0])
        if study is not None:
            if is_ladder(study):
                raise UserError(f"{runs[0]} is a scaling-law ladder, whose runs differ in size: use `ridge report {runs[0]}`")
            inside = study_runs(study, runs[0])
            price_usd, tokens = (study["price_usd"], study["tokens"]) if is_scaling(study) else (None, None)
            facts = read_several(inside, price_usd=price_usd, tokens=tokens)
            return dataclasses.replace(facts, name=study["name"]), inside
        if is_capture(runs[0]):
            return capture_facts(runs[0], cluster=cluster, calibration=calibration), ()
        run = RunDir.open(runs[0])
        run.require_events()
        return read_facts(run, cluster=cluster, calibration=calibration), ()
    if cluster is not None or calibration is not None:
        raise UserError("--cluster and --calibration need a single run; several runs are compared with each other")
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is given twice; give different run directories")
    return read_several(runs), runs
