"""Comparison of two runs in the report: differences in settings, changes in figures, and the verdict of the noise model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.diff import classify_changes
from ridgeline.configs.format import format_seconds
from ridgeline.explain.report.html import table, text
from ridgeline.explain.report.run import RunReport
from ridgeline.explain.report.step import NAMES, PARTS
from ridgeline.rundir.analysis import Component
from ridgeline.rundir.noise import compare, compare_losses, curve_noise, median, spread


def against(base: RunReport, run: RunReport) -> list[str]:
    """Return the HTML that compares a run with a base run."""
    lead = " ".join([*loss_verdicts(base, run), speed_verdict(base, run)])
    head = [f"<h2>{text(run.label)} against {text(base.label)}</h2>", f'<p class="lead">{text(lead)}</p>']
    return [*head, *_figures(base, run), *_settings(base, run), *_ledgers(base, run), *_steps(base, run)]


def loss_verdicts(base: RunReport, run: RunReport) -> list[str]:
    """Compare the losses of the evaluation sets of two runs, a sentence for each set."""
    return [
        f"Validation loss ({row.name}, step {row.step}): {row.figures[1]} against {row.figures[0]}, {row.verdict}."
        for row in _validation(base, run)
    ]


@dataclass(frozen=True)
class _Validation:
    """The losses of one evaluation set at the last step at which both runs evaluated it."""

    name: str
    step: int
    losses: tuple[float, float]
    noise: tuple[float | None, float | None]
    same_data: bool

    @property
    def figures(self) -> tuple[str, str]:
        """Losses with their noise."""
        one, other = (f"{x:.4f} \u00b1 {n:.4f}" if n is not None else f"{x:.4f}" for x, n in zip(self.losses, self.noise, strict=True))
        return one, other

    @property
    def verdict(self) -> str:
        """Lower, higher, or cannot tell, with the reason."""
        if not self.same_data:
            return "not comparable: other validation data or data.seq_len"
        if None in self.noise:
            return "cannot tell: the noise needs 5 evaluations of each run"
        return compare_losses(*self.losses, self.noise)


def _validation(base: RunReport, run: RunReport) -> list[_Validation]:
    found = []
    for name in [name for name in base.evaluations if name in run.evaluations]:
        curves = base.evaluations[name], run.evaluations[name]
        if common := curves[0].keys() & curves[1].keys():
            step = max(common)
            old, new = (list(curve.values()) for curve in curves)
            losses, noise = (curves[0][step], curves[1][step]), (curve_noise(old), curve_noise(new))
            found.append(_Validation(name, step, losses, noise, _validation_data(base, name) == _validation_data(run, name)))
    return found


def _validation_data(run: RunReport, name: str) -> object:
    config = run.facts.config
    return None if config is None else (str(config.evaluation.sets.get(name)), config.data.seq_len)


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
    """Validation losses with their noise; speeds with their spread over the log windows (half the range); training loss; goodput."""
    rows = [
        [f"validation loss ({each.name}, step {each.step})", *each.figures, f"{each.losses[1] - each.losses[0]:+.4f}", each.verdict]
        for each in _validation(base, run)
    ]
    rows += _speeds(base, run)
    losses = [{int(s["step"]): s["loss"] for s in r.facts.steps if "loss" in s} for r in (base, run)]
    if common := sorted(losses[0].keys() & losses[1].keys()):
        a, b = (found[common[-1]] for found in losses)
        rows.append([f"training loss at step {common[-1]}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}", ""])
    ledgers = [r.facts.ledger for r in (base, run)]
    rows.append(
        ["goodput", *(f"{led.goodput:.1%}" for led in ledgers), f"{100 * (ledgers[1].goodput - ledgers[0].goodput):+.1f} points", ""]
    )
    return ["<h3>Changes</h3>", table(["figure", f"{base.label} (spread)", f"{run.label} (spread)", "change", "verdict"], rows)]


def _speeds(base: RunReport, run: RunReport) -> list[list[str]]:
    """Step time (median), tokens/s and MFU of both runs; the verdict compares the log windows."""
    facts = base.facts, run.facts
    if any(each.speed is None or len(each.windows) < 3 for each in facts):
        return []
    times = [[window.median_s for window in each.windows] for each in facts]
    rates = [[window.tokens_per_s for window in each.windows] for each in facts]
    mfus = [[window.mfu for window in each.windows if window.mfu is not None] for each in facts]
    speeds = [each.speed for each in facts if each.speed is not None]
    rows = [_speed("step time", [format_seconds(median(t)) for t in times], [median(t) for t in times], times, times)]
    per_s = [speed.tokens_per_s for speed in speeds]
    rows.append(_speed("tokens/s", [f"{rate:,.4g}" for rate in per_s], per_s, rates, [[1 / r for r in values] for values in rates]))
    mfu = [speed.mfu for speed in speeds if speed.mfu]
    if len(mfu) == 2 and all(m > 0 for values in mfus for m in values):
        rows.append(_speed("MFU", [f"{value:.1%}" for value in mfu], mfu, mfus, [[1 / m for m in values] for values in mfus]))
    return rows


def _speed(
    name: str, shown: Sequence[str], values: Sequence[float], scatter: Sequence[Sequence[float]], times: Sequence[Sequence[float]]
) -> list[str]:
    figures = [f"{shown_} (\u00b1{spread(of):.1%})" for shown_, of in zip(shown, scatter, strict=True)]
    return [name, *figures, f"{values[1] / values[0] - 1:+.1%}", compare(*times).verdict]


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
