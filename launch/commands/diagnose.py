"""`ridge diagnose RUN`: what holds a run back, by how much at most, and what to do about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from launch.commands.goodput import read_run
from launch.options import json_option
from launch.tables import print_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def diagnose(run: Path, as_json: bool) -> None:
    """Name what binds RUN: constraint, evidence, what to measure next, what to change, the most it can gain, and what binds after that.

    Reads the run ledger and the metrics; the step ledger of a captured profile, the plan and the compile report where they are there.
    """
    from perf.diagnosis.facts import read_facts
    from perf.diagnosis.rules import diagnose as apply_rules

    read_run(run)
    facts = read_facts(run)
    findings = apply_rules(facts)
    if as_json:
        print_json({"run": facts.name, "goodput": facts.ledger.goodput, "findings": [dataclasses.asdict(f) for f in findings]})
        return
    profile = "" if facts.analysis is not None else "; no profile was analysed, so nothing is known of the inside of a step"
    if not findings:
        print(f"{facts.name}: nothing worth changing (goodput {facts.ledger.goodput:.1%}{profile})")
        return
    print(f"{facts.name}: {len(findings)} finding(s), goodput {facts.ledger.goodput:.1%}{profile}")
    for number, finding in enumerate(findings, 1):
        gain = f"gain at most {finding.gain:.0%}" if finding.gain > 0 else "no gain in speed"
        print(f"\n{number}. {finding.rule} ({gain}, confidence {finding.confidence})")
        rows = [*(("evidence", text) for text in finding.evidence), ("do", finding.action), ("measure next", finding.measure_next)]
        rows += [("binds next", finding.next_bottleneck), ("lens", f"{finding.lens}: {finding.pattern}")]
        for heading, text in rows:
            print(f"   {heading + ':':<14}{text}")
