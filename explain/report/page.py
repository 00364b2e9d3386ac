"""The report page: verdict, curves, ledgers, timeline, planned against measured figures, diagnosis, configuration; for one run or several.

The page is one HTML file with styles and charts inside; it has no script and loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ridgeline.configs.files import read_limited
from ridgeline.configs.format import format_count, format_duration, format_seconds, plural
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import Finding
from ridgeline.explain.diagnosis.throttled import most_throttled
from ridgeline.explain.gantt import gantt_svg
from ridgeline.explain.report.charts import Series, line_chart, stacked_bars
from ridgeline.explain.report.comparison import against, speed_verdict
from ridgeline.explain.report.html import document, table, text
from ridgeline.explain.report.plan import plan_section
from ridgeline.explain.report.run import RunReport
from ridgeline.explain.report.step import step_section
from ridgeline.explain.report.study import study_of, study_section
from ridgeline.explain.study.document import Study
from ridgeline.rundir.device_state import DeviceState
from ridgeline.rundir.noise import median

UNFOLDED = 3
"""With more runs than this, each is summarized in a sentence and its details are folded."""
MAIN_PACKAGES = ("ridgeline", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
DEVICE_COLUMNS = (
    ("clock_mhz", "clock MHz", "{:.0f}"),
    ("rated_mhz", "highest or base MHz", "{:.0f}"),
    ("power_w", "power W", "{:.0f}"),
    ("power_limit_w", "limit W", "{:.0f}"),
    ("temperature_c", "temperature C", "{:.0f}"),
    ("stopped_share", "stopped by quota", "{:.0%}"),
)
"""Key of a device state, heading, format."""


def render(runs: Sequence[RunReport], study: Study | None = None) -> str:
    """Return the page about one run, or about several with a comparison against the first.

    study: the document of a study that the runs belong to; None: built from runs at several scales or batch sizes.
    """
    if study is None and len(runs) > 1:
        study = study_of([run.run.path for run in runs], runs[0].facts.price_usd)
    title = runs[0].label if len(runs) == 1 else " against ".join(run.label for run in runs)
    title = title if study is None else f"{study['name']}: {len(runs)} runs"
    body = [f"<h1>{text(title)}</h1>"]
    body += [] if study is None else study_section(study)
    if len(runs) > 1:
        body += _comparison(runs)
    if len(runs) > UNFOLDED:
        body.append("<h2>The runs</h2>")
    for run in runs:
        body += _one(run, heading=len(runs) > 1) if len(runs) <= UNFOLDED else _folded(run)
    return document(title, body)


def render_capture(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the page about a captured profile: its steps and their bottlenecks."""
    first = "No findings."
    if findings:
        first = f"Main finding: {findings[0].title} ({findings[0].gain_text}): {findings[0].evidence[0]}. Action: {findings[0].action}."
    body = [f"<h1>{text(facts.name)}</h1>", f'<p class="lead">{text(first)}</p>', *step_section(facts.analysis), *_diagnosis(findings)]
    return document(facts.name, body)


def verdict(run: RunReport) -> str:
    """Summarize the run and its main finding in a few sentences."""
    ledger = run.facts.ledger
    losses = [line["loss"] for line in run.facts.steps if "loss" in line]
    went = f"{ledger.steps:,} steps in {format_duration(ledger.wall_s)} on {plural(run.devices, 'device')}"
    if ledger.starts > 1:
        went += f", {ledger.starts} starts"
    loss = f"; loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
    if not run.findings:
        return f"{went}{loss}. Goodput {ledger.goodput:.0%}; no findings."
    first = run.findings[0]
    finding = f"{first.title} ({first.gain_text}): {first.evidence[0]}"
    return f"{went}{loss}. Goodput {ledger.goodput:.0%}. Main finding: {finding}. Action: {first.action}."


def _folded(run: RunReport) -> list[str]:
    """One of many runs: its verdict, and the details folded."""
    lead = [f"<h3>{text(run.label)}</h3>", f"<p>{text(verdict(run))}</p>"]
    return [*lead, f"<details><summary>details of {text(run.label)}</summary>", *_one(run, heading=False), "</details>"]


def _one(run: RunReport, *, heading: bool) -> list[str]:
    parts = [f"<h1>{text(run.label)}</h1>"] if heading else []
    parts += [f'<p class="lead">{text(verdict(run))}</p>', _cards(run)]
    parts += ["<h2>Curves</h2>", f'<div class="charts">{_curves([run])}</div>']
    parts += ["<h2>Where the time went</h2>", '<div class="wide">', stacked_bars("Run ledger", {"run": run.facts.ledger.seconds}), "</div>"]
    parts += [_ledger_table(run), "<h2>Timeline</h2>", '<div class="wide">', gantt_svg(run.events), "</div>"]
    parts += step_section(run.facts.analysis) + _devices(run.facts.devices) + plan_section(run.facts)
    return parts + _diagnosis(run.findings) + _configuration(run)


def _cards(run: RunReport) -> str:
    facts, ledger, speed = run.facts, run.facts.ledger, run.facts.speed
    hours = ledger.wall_s / 3600 * run.devices
    cards = [
        ("goodput", f"{ledger.goodput:.1%}"),
        ("step time", format_seconds(facts.step_s) if facts.step_s else "n/a"),
        ("tokens/s", format_count(speed.tokens_per_s) if speed is not None else "n/a"),
        ("MFU", f"{speed.mfu:.1%}" if speed is not None and speed.mfu is not None else "n/a"),
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
    """Loss, evaluation, speed and goodput over steps, of one run or of several in one chart."""

    def of(run: RunReport, key: str) -> list[tuple[float, float]]:
        return [(s["step"], s[key]) for s in run.facts.steps if math.isfinite(s.get(key, math.nan))]

    many = len(runs) > 1
    loss = [Series(run.label if many else "training", of(run, "loss")) for run in runs]
    for run in runs:
        for name, losses in run.evaluations.items():
            points = [(float(step), value) for step, value in losses.items()]
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


def _devices(devices: Mapping[str, Sequence[DeviceState]]) -> list[str]:
    """Clock, power and temperature of every device: medians over the log lines; [] where none was recorded."""
    if not devices:
        return []
    rows = []
    for name, samples in devices.items():
        known = [[getattr(sample, key) for sample in samples if getattr(sample, key) is not None] for key, _, _ in DEVICE_COLUMNS]
        figures = [write.format(median(values)) if values else "n/a" for values, (_, _, write) in zip(known, DEVICE_COLUMNS, strict=True)]
        rows.append([name, *figures, ", ".join(sorted({reason for sample in samples for reason in sample.reasons}))])
    found = most_throttled(devices)
    summary = "No device is throttled." if found is None else f"Throttled: {found.reason}."
    head = ["device", *(heading for _, heading, _ in DEVICE_COLUMNS), "throttle reasons"]
    return ["<h3>Devices</h3>", f'<p class="soft">{text(summary)} Medians over the log lines.</p>', table(head, rows)]


def _diagnosis(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["<h2>Diagnosis</h2>", '<p class="mark">No findings.</p>']
    return ["<h2>Diagnosis</h2>", *(_finding(number, finding) for number, finding in enumerate(findings, 1))]


def _finding(number: int, finding: Finding) -> str:
    """One finding: title and gain, evidence, action; then what to measure next and the next bottleneck."""
    rows = [("evidence", "<br>".join(text(line) for line in finding.evidence)), ("action", text(finding.action))]
    rows += [("command", f"<code>{text(finding.command)}</code>")] if finding.command else []
    head = f"<h3>{number}. {text(finding.title)} <span>({text(finding.gain_text)}, confidence {finding.confidence})</span></h3>"
    body = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows)
    after = f"Measure next: {finding.measure_next}. Next bottleneck: {finding.next_bottleneck}. Principle: {finding.pattern}."
    return f'<div class="finding">{head}<dl>{body}</dl><p class="soft">{text(after)}</p></div>'


def _configuration(run: RunReport) -> list[str]:
    start, record = run.start, run.run.record
    commit = f"{start.git.commit or 'unknown'}{' with uncommitted changes' if start.git.dirty else ''}"
    rows = [
        ["run", f"{record.name} ({record.id})"],
        ["command", " ".join(start.command)],
        ["commit (SHA)", commit],
        [
            "devices",
            f"{run.devices} x {start.devices.kind or 'unknown'} in {start.processes} process(es) on {start.host or 'unknown host'}",
        ],
        ["system", f"Python {start.python or '?'}, {start.system or '?'}"],
        ["started", ", ".join(each.time for each in record.starts)],
    ]
    packages = start.packages
    main = [f"{name} {packages[name]}" for name in MAIN_PACKAGES if name in packages]
    rows += [["packages", ", ".join(main)]] if main else []
    parts = ["<h2>Configuration and environment</h2>", table(["", ""], rows)]
    if run.environment:
        lines = [[str(s.get(key, "")) for key in ("name", "value", "chosen", "reason")] for s in run.environment]
        parts += ["<h3>XLA flags and environment settings</h3>", table(["setting", "value", "chosen by", "why"], lines)]
    elif run.environment is not None:
        parts.append('<p class="soft">No XLA flag or environment setting was set.</p>')
    config = run.run.config_file
    listing = read_limited(config).decode(errors="replace") if config.is_file() else "n/a"
    every = "\n".join(f"{name}=={version}" for name, version in packages.items())
    parts.append(f"<details><summary>config.yaml</summary><pre>{text(listing)}</pre></details>")
    return [*parts, f"<details><summary>all packages</summary><pre>{text(every)}</pre></details>"]


def _comparison(runs: Sequence[RunReport]) -> list[str]:
    parts = ["<h2>Side by side</h2>", f'<div class="charts">{_curves(runs)}</div>']
    parts += ['<div class="wide">', stacked_bars("Run ledgers", {run.label: run.facts.ledger.seconds for run in runs}), "</div>"]
    for run in runs[1:]:
        compared = against(runs[0], run)
        if len(runs) > UNFOLDED:
            summary = f"{run.label} against {runs[0].label}: {speed_verdict(runs[0], run)}"
            compared = [f"<details><summary>{text(summary)}</summary>", *compared, "</details>"]
        parts += compared
    return parts
