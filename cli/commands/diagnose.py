"""`ridge diagnose RUN [RUN...]`: what holds a run back, or what several runs say together, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.commands.goodput import read_run
from ridgeline.cli.options import json_option
from ridgeline.cli.tables import print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.explain.diagnosis.facts import Facts
    from ridgeline.explain.diagnosis.terms import Term


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", help="Cluster file or name the run ran on. Default: the one it was submitted to, or that of its devices.")
@click.option("--calibration", type=click.Path(path_type=Path), help="File of `ridge calibrate` from there. Default: published rates.")
@json_option
def diagnose(runs: tuple[Path, ...], cluster: str | None, calibration: Path | None, as_json: bool) -> None:
    """Name what binds RUN: constraint, evidence, what to measure next, what to change, the most it can gain, and what binds after that.

    Reads the run ledger and the metrics; the step ledger of a captured profile, the plan and the compile report where they are there.

    Predicted stands beside measured where a cluster is known: seconds of a step by term, memory, bytes and bandwidth of collectives.

    Several finished RUNs of the same work are diagnosed by what they say together: at several scales (or the directory of `ridge scale`),
    at several batch sizes, of several models at several scales, or with and without performance settings.
    """
    from ridgeline.explain.diagnosis.rules import STUDY_RULES
    from ridgeline.explain.diagnosis.rules import diagnose as apply_rules
    from ridgeline.explain.diagnosis.terms import largest, terms

    facts, several = _facts(runs, cluster, calibration)
    predicted = [] if several else terms(facts)
    worst = largest(predicted)
    findings = apply_rules(facts, STUDY_RULES) if several else apply_rules(facts)
    if as_json:
        print_json(
            {
                "run": facts.name,
                "goodput": facts.ledger.goodput,
                "findings": [dataclasses.asdict(f) for f in findings],
                "predicted": [dataclasses.asdict(term) for term in predicted],
                "largest_disagreement": None if worst is None else dataclasses.asdict(worst),
            }
        )
        return
    if several:
        print(f"{len(several)} runs together; `ridge diagnose` of one of them says what it suffers from by itself")
    profile = "" if facts.analysis is not None else "; no profile was analysed, so nothing is known of the inside of a step"
    known = "their comparison" if several else f"goodput {facts.ledger.goodput:.1%}{profile}"
    if not findings:
        print(f"{facts.name}: nothing worth changing ({known})")
    else:
        print(f"{facts.name}: {len(findings)} finding(s), {known}")
    for number, finding in enumerate(findings, 1):
        print(f"\n{number}. {finding.rule} ({finding.gain_text}, confidence {finding.confidence})")
        rows = [*(("evidence", text) for text in finding.evidence), ("do", finding.action)]
        rest = [override for override in finding.overrides if override not in finding.action]
        rows += [("with", " ".join(rest))] if rest else []
        rows += [("run", finding.command)] if finding.command else []
        rows += [
            ("measure next", finding.measure_next),
            ("binds next", finding.next_bottleneck),
            ("lens", f"{finding.lens}: {finding.pattern}"),
        ]
        for heading, text in rows:
            print(f"   {heading + ':':<14}{text}")
    _print_predicted(predicted, worst)


def _print_predicted(predicted: Sequence[Term], worst: Term | None) -> None:
    """Predicted beside measured, and the largest disagreement in words."""
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
        print(f"largest disagreement: {worst.name}, {measured} where {planned} was planned:")
        print(f"   {worst.explanation}")


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.3g} ms"
    return f"{value / 1e6:.3g} MB" if unit == "bytes" else f"{value / 1e9:.3g} GB/s"


def _facts(runs: tuple[Path, ...], cluster: str | None, calibration: Path | None = None) -> tuple[Facts, Sequence[Path]]:
    """Return the facts, and the runs they compare (none: a single run)."""
    from ridgeline.explain.diagnosis.facts import read_facts
    from ridgeline.explain.diagnosis.several import read_several, read_study, study_runs

    if len(runs) == 1:
        inside = study_runs(runs[0])
        if inside is not None:
            study = read_study(runs[0])
            facts = read_several(inside, price_usd=study.get("price_usd"), tokens=study.get("tokens"))
            return dataclasses.replace(facts, name=str(study["name"])), inside
        read_run(runs[0])
        return read_facts(runs[0], cluster=cluster, calibration=calibration), ()
    if cluster is not None or calibration is not None:
        raise UserError("--cluster and --calibration are for one run: several runs are compared with each other, not with a plan")
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice: compare different run directories")
    return read_several(runs), runs
