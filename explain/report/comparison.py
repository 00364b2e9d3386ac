"""Comparison of two runs in the report: differences in settings, changes in figures, and the verdict of the noise model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.diff import classify_changes
from ridgeline.configs.format import format_seconds
from ridgeline.explain.report.html import table, text
from ridgeline.explain.report.run import RunReport
from ridgeline.explain.report.step import NAMES, PARTS
from ridgeline.rundir.analysis import Component
from ridgeline.rundir.noise import compare, median, spread


def against(base: RunReport, run: RunReport) -> list[str]:
    """Return the HTML that compares a run with a base run."""
    head = [f"<h2>{text(run.label)} against {text(base.label)}</h2>", f'<p class="lead">{text(speed_verdict(base, run))}</p>']
    return [*head, *_settings(base, run), *_figures(base, run), *_ledgers(base, run), *_steps(base, run)]


def speed_verdict(base: RunReport, run: RunReport) -> str:
    """Compare the step times of two runs under the noise model."""
    old, new = base.window_times_s, run.window_times_s
    if min(len(old), len(new)) < 3:
        return "Steps: too few log lines to compare."
    return f"Steps: {compare(old, new).describe()}."


def _settings(base: RunReport, run: RunReport) -> list[str]:
    """Differences in config, environment, packages, code and machine."""
    rows: list[list[str]] = []
    if base.facts.config is not None and run.facts.config is not None:
        changes = classify_changes(base.facts.config.model_dump(mode="json"), run.facts.config.model_dump(mode="json"))
        rows += [["config", change.key, str(change.old), str(change.new)] for change in changes]
    rows += [["environment", *row] for row in _differing(base.settings, run.settings)]
    rows += [["package", *row] for row in _differing(base.start.packages, run.start.packages)]
    rows += [["code", *row] for row in _differing({"commit": base.start.git.commit}, {"commit": run.start.git.commit})]
    machine = [r.start.model_dump(include={"host", "processes", "python"}) | r.start.devices.model_dump() for r in (base, run)]
    rows += [["machine", *row] for row in _differing(*machine)]
    if not rows:
        return ["<h3>Differences</h3>", '<p class="soft">Config, environment, packages, code and machine are the same.</p>']
    return ["<h3>Differences</h3>", table(["where", "setting", base.label, run.label], rows)]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[str]]:
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [[key, str(old.get(key, "not set")), str(new.get(key, "not set"))] for key in keys]


def _figures(base: RunReport, run: RunReport) -> list[str]:
    """Medians over log windows with their spread (half the range), the loss at the last step that both logged, and the goodput."""
    rows = []
    for name, key, better in (("step time", "step_time_p50_s", "low"), ("tokens/s", "tokens_per_s", "high"), ("MFU", "mfu", "high")):
        old, new = ([float(s[key]) for s in r.facts.steps[1:] if isinstance(s.get(key), int | float)] for r in (base, run))
        if min(len(old), len(new)) < 3:
            continue
        times = [values if better == "low" else [1 / v for v in values if v > 0] for values in (old, new)]
        verdict = compare(*times).verdict if min(map(len, times)) >= 3 else "cannot tell"
        middle = [median(values) for values in (old, new)]
        rows.append([name, *(f"{_figure(key, m)} (\u00b1{spread(v):.1%})" for m, v in zip(middle, (old, new), strict=True))])
        rows[-1] += [f"{middle[1] / middle[0] - 1:+.1%}" if middle[0] else "n/a", verdict]
    losses = [{int(s["step"]): float(s["loss"]) for s in r.facts.steps if isinstance(s.get("loss"), int | float)} for r in (base, run)]
    if common := sorted(losses[0].keys() & losses[1].keys()):
        a, b = (found[common[-1]] for found in losses)
        rows.append([f"loss at step {common[-1]}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}", ""])
    ledgers = [r.facts.ledger for r in (base, run)]
    rows.append(
        ["goodput", *(f"{led.goodput:.1%}" for led in ledgers), f"{100 * (ledgers[1].goodput - ledgers[0].goodput):+.1f} points", ""]
    )
    return ["<h3>Changes</h3>", table(["figure", f"{base.label} (spread)", f"{run.label} (spread)", "change", "verdict"], rows)]


def _ledgers(base: RunReport, run: RunReport) -> list[str]:
    old, new = base.facts.ledger.seconds, run.facts.ledger.seconds
    usd = [r.facts.price_usd * r.devices / 3600 if r.facts.price_usd is not None else None for r in (base, run)]
    rows = []
    for name in [n for n in old if old[n] or new[n]]:
        money = [f"{new[name] * usd[1] - old[name] * usd[0]:+,.2f}"] if usd[0] is not None and usd[1] is not None else []
        rows.append([name.replace("_", " "), f"{old[name]:,.1f}", f"{new[name]:,.1f}", f"{new[name] - old[name]:+,.1f}", *money])
    money_head = ["USD"] if all(price is not None for price in usd) else []
    return ["<h3>Run ledgers</h3>", table(["seconds", base.label, run.label, "change", *money_head], rows)]


def _steps(base: RunReport, run: RunReport) -> list[str]:
    """Changes of the parts of a step and of its components, if both runs were profiled."""
    old, new = base.facts.analysis, run.facts.analysis
    if old is None or new is None:
        return []
    rows = []
    for name, key in [*PARTS.items(), ("step", "total_s")]:
        if key in old.summary and key in new.summary:
            a, b = old.summary[key].mean, new.summary[key].mean
            rows.append([NAMES.get(name, name), format_seconds(a), format_seconds(b), _signed(b - a), f"{b / a - 1:+.0%}" if a else ""])
    parts = [{_component(c): c.time_s for c in analysis.components} for analysis in (old, new)]
    changed = sorted(dict.fromkeys([*parts[0], *parts[1]]), key=lambda n: -abs(parts[1].get(n, 0.0) - parts[0].get(n, 0.0)))
    for name in changed[:6]:
        a, b = parts[0].get(name, 0.0), parts[1].get(name, 0.0)
        rows.append([f"\u2003{name}", format_seconds(a), format_seconds(b), _signed(b - a), f"{b / a - 1:+.0%}" if a else ""])
    return [
        "<h3>Step ledgers, as profiled, and the components that changed most</h3>",
        table(["", base.label, run.label, "change", ""], rows),
    ]


def _component(each: Component) -> str:
    return f"{each.component}, {each.phase}"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _figure(key: str, value: float) -> str:
    return format_seconds(value) if key.endswith("_s") and not key.endswith("per_s") else f"{value:,.4g}"
