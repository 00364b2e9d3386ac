"""The report: verdict, curves, ledgers, timeline, plan against measurement, diagnosis, configuration; for one run or several.

Everything is in one HTML file: styles, pictures and figures; no script, nothing from a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_count, format_duration, format_seconds
from ridgeline.explain.diagnosis.facts import Facts, read_facts
from ridgeline.explain.diagnosis.finding import Finding
from ridgeline.explain.diagnosis.rules import diagnose
from ridgeline.explain.gantt import gantt_svg
from ridgeline.explain.report.charts import Series, line_chart, stacked_bars
from ridgeline.explain.report.comparison import against, speed_verdict
from ridgeline.explain.report.devices import devices_section
from ridgeline.explain.report.html import table, text
from ridgeline.explain.report.plan import plan_section
from ridgeline.explain.report.step import step_section
from ridgeline.explain.report.study import section, study_of
from ridgeline.explain.report.style import STYLE
from ridgeline.rundir.events import Event, event_files, read_events
from ridgeline.rundir.phases import phases

UNFOLDED = 3
"""More runs than these are told in a sentence each, with the rest folded away."""
MAIN_PACKAGES = ("ridgeline", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass(frozen=True)
class RunReport:
    """What the page shows of one run."""

    path: Path
    record: Mapping[str, Any]
    """run.json."""
    events: Sequence[Event]
    facts: Facts
    findings: Sequence[Finding]
    label: str
    """What it is called on the page."""

    @property
    def start(self) -> Mapping[str, Any]:
        """The newest entry of run.json's starts."""
        return self.record["starts"][-1] if self.record.get("starts") else {}

    @property
    def settings(self) -> dict[str, str]:
        """XLA flags and variables of the newest start, by name; those that were dropped left out."""
        return {str(s["name"]): str(s["value"]) for s in self.environment or [] if s.get("chosen") != "dropped"}

    @property
    def environment(self) -> list[dict[str, Any]] | None:
        """Settings of the newest start with who chose them and why; None where they were not recorded."""
        found = [event.fields for event in self.events if event.kind == "environment" and event.process == 0]
        return list(found[-1].get("settings", [])) if found else None

    @property
    def devices(self) -> int:
        """Devices of the newest start."""
        return int(self.start.get("devices", {}).get("count", 1))


def read_run(path: Path, label: str | None = None, **more: Any) -> RunReport:
    """Gather what the page shows of a run directory. Raises UserError when it is none."""
    try:
        record = json.loads((path / "run.json").read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is not a run directory: it has no run.json") from None
    except ValueError as error:
        raise UserError(f"{path / 'run.json'} cannot be read: {error}") from None
    files = event_files(path)
    if not files:
        raise UserError(f"{path} has no events.jsonl: the run never started")
    facts = read_facts(path, **more)
    return RunReport(path, record, read_events(files), facts, diagnose(facts), label or str(record.get("name", path.name)))


def render(runs: Sequence[RunReport], study: Mapping[str, Any] | None = None) -> str:
    """Return the page about one run, or about several with a comparison against the first.

    study: the document of a study that the runs belong to (explain/study/study.py); None: made from runs at several scales or batch sizes.
    """
    if study is None and len(runs) > 1:
        study = study_of([run.path for run in runs], runs[0].facts.price_usd)
    title = runs[0].label if len(runs) == 1 else " against ".join(run.label for run in runs)
    title = title if study is None else f"{study['name']}: {len(runs)} runs"
    body = [f"<h1>{text(title)}</h1>"]
    body += [] if study is None else section(study, table)
    if len(runs) > 1:
        body += _comparison(runs)
    if len(runs) > UNFOLDED:
        body.append("<h2>The runs</h2>")
    for run in runs:
        body += _one(run, heading=len(runs) > 1) if len(runs) <= UNFOLDED else _folded(run)
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return f"{head}<title>{text(title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def verdict(run: RunReport) -> str:
    """Say in a sentence or two how the run went and what to do first."""
    ledger = run.facts.ledger
    losses = [(e.fields["step"], e.fields["loss"]) for e in run.events if e.kind == "step" and e.process == 0]
    went = f"{ledger.steps:,} steps in {format_duration(ledger.wall_s)} on {run.devices} device(s)"
    if ledger.starts > 1:
        went += f", {ledger.starts} starts"
    loss = f"; loss {float(losses[0][1]):.3f} to {float(losses[-1][1]):.3f}" if losses else ""
    useful = f"{ledger.goodput:.0%} of the time was steps that count"
    if not run.findings:
        return f"{went}{loss}. {useful}; nothing worth changing was found."
    first = run.findings[0]
    return f"{went}{loss}. {useful}. First to change: {first.rule} ({first.gain_text}): {first.action}."


def _folded(run: RunReport) -> list[str]:
    """One of many runs: its verdict, and the rest when it is asked for."""
    lead = [f"<h3>{text(run.label)}</h3>", f"<p>{text(verdict(run))}</p>"]
    return [*lead, f"<details><summary>everything about {text(run.label)}</summary>", *_one(run, heading=False), "</details>"]


def _one(run: RunReport, *, heading: bool) -> list[str]:
    parts = [f"<h1>{text(run.label)}</h1>"] if heading else []
    parts += [f'<p class="lead">{text(verdict(run))}</p>', _cards(run)]
    parts += ["<h2>Curves</h2>", f'<div class="charts">{_curves([run])}</div>']
    parts += ["<h2>Where the time went</h2>", '<div class="wide">', stacked_bars("Run ledger", {"run": run.facts.ledger.seconds}), "</div>"]
    parts += [_ledger_table(run), "<h2>Timeline</h2>", '<div class="wide">', gantt_svg(run.events), "</div>"]
    parts += (
        step_section(run.facts.analysis)
        + devices_section(run.facts.devices)
        + plan_section(run.facts)
        + _diagnosis(run)
        + _configuration(run)
    )
    return parts


def _cards(run: RunReport) -> str:
    facts, ledger = run.facts, run.facts.ledger
    steps = facts.steps
    last = steps[-1] if steps else {}
    hours = ledger.wall_s / 3600 * run.devices
    cards = [
        ("goodput", f"{ledger.goodput:.1%}"),
        ("step time", format_seconds(facts.step_s) if facts.step_s else "n/a"),
        ("tokens/s", format_count(float(last["tokens_per_s"])) if "tokens_per_s" in last else "n/a"),
        ("MFU", f"{float(last['mfu']):.1%}" if "mfu" in last else "n/a"),
        ("tokens", format_count(ledger.tokens) if ledger.tokens else "n/a"),
        ("device-hours", f"{hours:,.2f}"),
        ("money", f"{hours * facts.price_usd:,.2f} USD" if facts.price_usd is not None else "n/a"),
        ("peak memory", f"{facts.memory_share:.0%}" if facts.memory_share is not None else "n/a"),
    ]
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><span>{k}</span><b>{text(v)}</b></div>' for k, v in cards if v != "n/a")
        + "</div>"
    )


def _curves(runs: Sequence[RunReport]) -> str:
    """Loss, evaluation, speed and goodput over steps, of one run or of several in one picture."""

    def of(run: RunReport, key: str) -> list[tuple[float, float]]:
        return [(float(s["step"]), float(s[key])) for s in run.facts.steps if isinstance(s.get(key), int | float)]

    many = len(runs) > 1
    loss = [Series(run.label if many else "training", of(run, "loss")) for run in runs]
    for run in runs:
        for name, points in _evaluations(run).items():
            loss.append(Series(f"{run.label}: {name}" if many else name, points, dashed=True))
    speed = [Series(run.label if many else "tokens/s", of(run, "tokens_per_s")) for run in runs]
    waits = [Series(run.label if many else "waiting", of(run, "data_wait_fraction")) for run in runs]
    goodput = [Series(run.label if many else "goodput", [(t, g) for t, g in run.facts.ledger.over_time()]) for run in runs]
    charts = [
        line_chart("Loss", "step", "nats/token", loss),
        line_chart("Speed", "step", "tokens/s", speed, from_zero=True),
        line_chart("Waiting for data", "step", "share of the step", waits, from_zero=True),
        line_chart("Goodput so far", "seconds of wall time", "share", goodput, from_zero=True),
    ]
    return "\n".join(f"<div>{chart}</div>" for chart in charts if chart)


def _evaluations(run: RunReport) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for phase in phases(run.events):
        if phase.name == "evaluation" and phase.process == 0:
            for name, loss in phase.fields.get("results", {}).items():
                if isinstance(loss, int | float):
                    found.setdefault(name, []).append((float(phase.fields["step"]), float(loss)))
    return found


def _ledger_table(run: RunReport) -> str:
    ledger, price = run.facts.ledger, run.facts.price_usd
    head = ["category", "seconds", "share", *(["USD"] if price is not None else [])]
    rows = []
    for name, seconds in sorted(ledger.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            money = [f"{seconds / 3600 * run.devices * price:,.2f}"] if price is not None else []
            rows.append([name.replace("_", " "), f"{seconds:,.1f}", f"{seconds / ledger.wall_s:.1%}", *money])
    total = [f"{ledger.wall_s / 3600 * run.devices * price:,.2f}"] if price is not None else []
    rows.append(["all", f"{ledger.wall_s:,.1f}", "100.0%", *total])
    return table(head, rows)


def _diagnosis(run: RunReport) -> list[str]:
    if not run.findings:
        return ["<h2>Diagnosis</h2>", '<p class="mark">Nothing worth changing.</p>']
    return ["<h2>Diagnosis</h2>", *(_finding(number, finding) for number, finding in enumerate(run.findings, 1))]


def _finding(number: int, finding: Finding) -> str:
    """One finding: evidence, what to do, what binds next."""
    told = [("evidence", evidence) for evidence in finding.evidence] + [("do", finding.action)]
    rows = [(name, text(value)) for name, value in told]
    rows += [("run", f"<code>{text(finding.command)}</code>")] if finding.command else []
    rows += [("measure next", text(finding.measure_next)), ("binds next", text(finding.next_bottleneck))]
    rows.append(("lens", text(f"{finding.lens}: {finding.pattern}")))
    head = f"<h3>{number}. {text(finding.rule)} <span>({text(finding.gain_text)}, confidence {finding.confidence})</span></h3>"
    return f'<div class="finding">{head}<dl>{"".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows)}</dl></div>'


def _configuration(run: RunReport) -> list[str]:
    start = run.start
    git, devices = start.get("git", {}), start.get("devices", {})
    commit = f"{git.get('commit') or 'not known'}{' with uncommitted changes' if git.get('dirty') else ''}"
    where = f"in {start.get('processes', 1)} process(es) on {start.get('host', '?')}"
    rows = [
        ["run", f"{run.record.get('name')} ({run.record.get('id')})"],
        ["command", " ".join(start.get("command", []))],
        ["commit (SHA)", commit],
        ["devices", f"{run.devices} x {devices.get('kind')} {where}"],
        ["system", f"Python {start.get('python', '?')}, {start.get('system', '?')}"],
        ["started", ", ".join(str(s.get("time")) for s in run.record.get("starts", []))],
    ]
    packages = start.get("packages", {})
    main = [f"{name} {packages[name]}" for name in MAIN_PACKAGES if name in packages]
    rows += [["packages", ", ".join(main)]] if main else []
    parts = ["<h2>Configuration and environment</h2>", table(["", ""], rows)]
    if run.environment:
        lines = [[str(s.get(key, "")) for key in ("name", "value", "chosen", "reason")] for s in run.environment]
        parts += ["<h3>XLA flags and environment settings</h3>", table(["setting", "value", "chosen by", "why"], lines)]
    elif run.environment is not None:
        parts.append('<p class="soft">No XLA flag or environment setting was set.</p>')
    config = run.path / "config.yaml"
    listing = config.read_text() if config.is_file() else "n/a"
    every = "\n".join(f"{name}=={version}" for name, version in packages.items())
    parts.append(f"<details><summary>config.yaml</summary><pre>{text(listing)}</pre></details>")
    return [*parts, f"<details><summary>all packages</summary><pre>{text(every)}</pre></details>"]


def _comparison(runs: Sequence[RunReport]) -> list[str]:
    parts = ["<h2>Side by side</h2>", f'<div class="charts">{_curves(runs)}</div>']
    parts += ['<div class="wide">', stacked_bars("Run ledgers", {run.label: run.facts.ledger.seconds for run in runs}), "</div>"]
    for run in runs[1:]:
        compared = against(runs[0], run)
        if len(runs) > UNFOLDED:
            said = f"{run.label} against {runs[0].label}: {speed_verdict(runs[0], run)}"
            compared = [f"<details><summary>{text(said)}</summary>", *compared, "</details>"]
        parts += compared
    return parts
