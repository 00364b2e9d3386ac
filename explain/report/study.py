"""The part of the report about a study: what it says, its table, its pictures, what the rules on several runs find in it."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.explain.diagnosis.rules import STUDY_RULES, diagnose
from ridgeline.explain.diagnosis.several import facts_of
from ridgeline.explain.report.study_charts import charts
from ridgeline.explain.study.measured import MeasuredRun, read_measured
from ridgeline.explain.study.study import Question, document, scales_of
from ridgeline.explain.study.sweep import COLUMNS as SWEEP_COLUMNS
from ridgeline.explain.study.sweep import Value, sweep_document
from ridgeline.explain.study.table import COLUMNS, columns

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def study_of(runs: Sequence[Path], price_usd: float | None = None) -> dict[str, Any] | None:
    """Return the study that several runs are: at several scales or batch sizes; None where they are none."""
    try:
        measured = [read_measured(run) for run in runs]
        facts = facts_of(measured)
    except UserError:
        return None  # runs may be compared in a report whatever they differ in
    name, found = measured[0].name, [asdict(finding) for finding in diagnose(facts, STUDY_RULES)]
    if facts.study is not None:
        question = Question(weak=facts.study.weak, price_usd=price_usd)
        return document(name, scales_of(measured), question, where="finished runs") | {"findings": found}
    if facts.batch_study is not None:
        sizes = sorted({run.config.data.batch_size for run in measured})
        values = [Value(size, [run for run in measured if run.config.data.batch_size == size]) for size in sizes]
        return sweep_document(name, "data.batch_size", values, "time") | {"findings": found}
    return None


def findings_of(measured: Sequence[MeasuredRun], **question: Any) -> list[dict[str, Any]]:
    """Return what the rules on several runs find in the runs of a study; [] where too few ran, or what was varied has no rule.

    question: `price_usd` and `tokens` of explain.diagnosis.several.facts_of.
    """
    try:
        return [asdict(finding) for finding in diagnose(facts_of(measured, **question), STUDY_RULES)] if len(measured) > 1 else []
    except UserError:
        return []


def section(study: Mapping[str, Any], table: Table) -> list[str]:
    """Return the HTML of a study; `table` makes one from headings and rows."""
    scaling = study["kind"] == "scaling"
    shown = [column for column in columns(study["rows"], COLUMNS if scaling else SWEEP_COLUMNS) if column[0] != "failure"]  # said above
    rows = [["n/a" if row.get(key) is None else write(row[key]) for key, _, write in shown] for row in study["rows"]]
    title = f"{study['mode'].capitalize()} scaling" if scaling else f"S{study['kind'][1:]}"
    parts = [f"<h2>{html.escape(title)}</h2>", "<ul>"]
    parts += [f"<li>{html.escape(sentence)}</li>" for sentence in study["verdict"]]
    parts += ["</ul>", table([heading for _, heading, _ in shown], rows)]
    for finding in study.get("findings", []):
        told = f"{finding['rule']}: {'; '.join(finding['evidence'])}. Do: {finding['action']}."
        parts.append(f"<p>{html.escape(told)}</p>")
    pictures = charts(study) if scaling else {}
    return [*parts, '<div class="charts">', *(f"<div>{picture}</div>" for picture in pictures.values()), "</div>"]
