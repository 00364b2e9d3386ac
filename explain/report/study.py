"""The part of the report about a study: its verdict, table and charts, and the findings of the rules on several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.explain.diagnosis.finding import TITLES
from ridgeline.explain.diagnosis.rules import STUDY_RULES, diagnose
from ridgeline.explain.diagnosis.several import facts_of
from ridgeline.explain.report.html import table, text
from ridgeline.explain.report.ladder_charts import ladder_charts
from ridgeline.explain.report.study_charts import charts
from ridgeline.explain.study.document import Study, cells, columns, is_ladder, is_scaling
from ridgeline.explain.study.measured import MeasuredRun, read_measured
from ridgeline.explain.study.scaling import Question, scales_of, scaling_study
from ridgeline.explain.study.sweep import Value, sweep_study


def study_of(runs: Sequence[Path], price_usd: float | None = None) -> Study | None:
    """Return the document of the study that several runs form, at several scales or batch sizes; None when they form none."""
    try:
        measured = [read_measured(run) for run in runs]
        facts = facts_of(measured)
    except UserError:
        return None  # a report compares runs whatever they differ in
    name, found = measured[0].name, [asdict(finding) for finding in diagnose(facts, STUDY_RULES)]
    study: Study | None = None
    if facts.study is not None:
        question = Question(weak=facts.study.weak, price_usd=price_usd)
        study = scaling_study(name, scales_of(measured), question, where="finished runs")
    elif facts.batch_study is not None:
        sizes = sorted({run.config.data.batch_size for run in measured})
        values = [Value(size, [run for run in measured if run.config.data.batch_size == size]) for size in sizes]
        study = sweep_study(name, "data.batch_size", values, "time")
    if study is not None:
        study["findings"] = found
    return study


def findings_of(measured: Sequence[MeasuredRun], **question: Any) -> list[dict[str, Any]]:
    """Return the findings of the rules on several runs; [] for too few runs, or where no rule covers what was varied.

    question: `price_usd` and `tokens` of explain.diagnosis.several.facts_of.
    """
    try:
        return [asdict(finding) for finding in diagnose(facts_of(measured, **question), STUDY_RULES)] if len(measured) > 1 else []
    except UserError:
        return []


def study_section(study: Study) -> list[str]:
    """Return the HTML of a study."""
    shown = [column for column in columns(study) if column[0] != "failure"]  # the verdict lists the failures
    title = f"{study['mode'].capitalize()} scaling" if is_scaling(study) else study["kind"][0].upper() + study["kind"][1:]
    parts = [f"<h2>{text(title)}</h2>", "<ul>"]
    parts += [f"<li>{text(sentence)}</li>" for sentence in study["verdict"]]
    parts += ["</ul>", table([heading for _, heading, _ in shown], cells(study, shown))]
    for finding in study.get("findings", []):
        line = f"{TITLES.get(finding['rule'], finding['rule'])}: {'; '.join(finding['evidence'])}. Action: {finding['action']}."
        parts.append(f"<p>{text(line)}</p>")
    pictures = charts(study) if is_scaling(study) else ladder_charts(study) if is_ladder(study) else {}
    return [*parts, '<div class="charts">', *(f"<div>{picture}</div>" for picture in pictures.values()), "</div>"]
