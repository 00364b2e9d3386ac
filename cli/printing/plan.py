"""Print a plan: the best layouts, where a step's time goes, memory, communication, scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ridgeline.cli.printing.estimate import formula_results, print_results, print_symbols
from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.context import context_method
from ridgeline.planner.experts import exchange_method
from ridgeline.planner.plan import Plan
from ridgeline.planner.search import Candidate
from ridgeline.planner.software import DEFAULT_SOFTWARE
from ridgeline.planner.summary import sentences

if TYPE_CHECKING:
    from ridgeline.planner.formulas import Formulas

GB = 1e9


def print_plan(made: Plan) -> None:
    """Print all tables of a plan."""
    best = made.best[0]
    data = made.config.data
    print(
        f"{made.config.name}: {data.batch_size:,} rows of {data.seq_len:,} tokens per step, {made.tokens:.4g} tokens;"
        f" cluster {made.cluster.name} ({made.cluster.device}), rates: {made.calibration.name}"
        f"{_software(made)}\n"
    )
    for sentence in sentences(made):
        print(sentence)
    print()
    _print_candidates(made)
    for compilation in made.compiled:
        print(f"\n{compilation.sentence}.")
    print(f"\n{_range_sentence(made)}")
    print(f"\n{made.bottlenecks[0].sentence}\n")
    if best.parts.measured is not None:
        print(f"{best.parts.measured.sentence()}\n")
    if made.loss_chunk is not None:
        print(f"{made.loss_chunk.sentence}\n")
    _print_breakdown(made)
    print()
    _print_memory(made, best)
    if best.step.communication:
        print()
        _print_communication(best)
    if made.alternatives:
        print()
        print_table(
            [
                Column("name", "alternative"),
                Column("mesh", "layout"),
                Column("slower", "step time", lambda x: f"{x:+.0%}"),
                Column("reason", "reason"),
            ],
            [vars(alternative) | {"slower": alternative.slower} for alternative in made.alternatives],
        )
    if len(made.scaling) > 1:
        print()
        _print_scaling(made)
    print(f"\n{_run_sentence(made, best)}")


def print_comparison(plans: Sequence[Plan], refused: Mapping[str, str]) -> None:
    """Print the best layout of every cluster, best first, and why others have none."""
    title = f"best layout of each cluster for {plans[0].objective}; +- is the range of times and costs"
    print_table(_FIGURES, [_figures(made) for made in plans], title=title)
    for name, reason in refused.items():
        print(f"{name}: {reason}")
    print()


_FIGURES: list[Column | str] = [
    "cluster",
    "nodes",
    "layout",
    Column("step", "step s", lambda x: f"{x:.4g}"),
    Column("range", "+-", lambda x: f"{x:.0%}"),
    Column("days", format=lambda x: f"{x:.4g}"),
    Column("hours", "device-hours", lambda x: f"{x:,.0f}"),
    Column("cost", "USD", lambda x: f"{x:,.0f}"),
]


def _figures(made: Plan) -> dict[str, Any]:
    best = made.best[0]
    run = best.run
    return {
        "cluster": made.cluster.name,
        "nodes": best.nodes,
        "layout": best.layout.text(),
        "step": best.step.step_s,
        "range": made.range.share,
        "days": run.wall_days,
        "hours": run.wall_device_hours,
        "cost": run.wall_cost_usd,
    }


def _software(made: Plan) -> str:
    name = made.calibration.software.name
    return "" if name == DEFAULT_SOFTWARE else f"; software: {name}"


def _range_sentence(made: Plan) -> str:
    """Return the range of the best layout's time and cost, and what it follows from."""
    best, around = made.best[0], made.range
    step, days, hours = (around.around(value) for value in (best.step.step_s, best.run.wall_days, best.run.wall_device_hours))
    parts = [f"{step[0]:.3g} to {step[1]:.3g} s per step", f"{days[0]:.3g} to {days[1]:.3g} days"]
    parts.append(f"{hours[0]:,.0f} to {hours[1]:,.0f} device-hours")
    if best.run.wall_cost_usd is not None:
        low, high = around.around(best.run.wall_cost_usd)
        parts.append(f"{low:,.0f} to {high:,.0f} USD")
    return f"range of the best layout, +-{around.share:.0%}: {', '.join(parts)} ({around.basis})"


def _methods_note(candidate: Candidate) -> str:
    config, sizes = candidate.parts.config, candidate.layout.sizes
    methods = (context_method(config, sizes), exchange_method(config.model.moe, config.compute.experts, sizes))
    return "".join(f" ({method})" for method in methods if method)


def _print_candidates(made: Plan) -> None:
    rows = [
        {
            "nodes": c.nodes,
            "layout": c.layout.text() + _methods_note(c),
            "micro": f"{c.layout.accumulation} x {c.microbatch}",
            "remat": c.layout.remat.policy,
            "memory": c.memory.total_bytes / GB,
            "step": c.step.step_s,
            "mfu": c.step.mfu,
            "rate": c.step.tokens_per_s_per_device,
            "days": c.run.wall_days,
            "hours": c.run.wall_device_hours,
            "cost": c.run.wall_cost_usd,
        }
        for c in made.best
    ]
    print_table(
        [
            "nodes",
            Column("layout"),
            Column("micro", "microbatches x rows"),
            "remat",
            Column("memory", f"GB of {made.capacity_bytes / GB:.0f}", lambda x: f"{x:.1f}"),
            Column("step", "step s", lambda x: f"{x:.4g}"),
            Column("mfu", "MFU", lambda x: f"{x:.1%}"),
            Column("rate", "tokens/s/device", lambda x: f"{x:,.0f}"),
            Column("days", format=lambda x: f"{x:.4g}"),
            Column("hours", "device-hours", lambda x: f"{x:,.0f}"),
            Column("cost", "USD", lambda x: f"{x:,.0f}"),
        ],
        rows,
        title=f"best layouts for {made.objective}; days and USD include saves, failures and restarts; GB is 1e9 bytes",
    )


def _print_breakdown(made: Plan) -> None:
    names = [name for name in made.best[0].step.breakdown_s if any(c.step.breakdown_s.get(name, 0) > 0 for c in made.best)]
    rows = [
        {"layout": f"{c.nodes} x {c.layout.text()}", **{name: c.step.breakdown_s.get(name, 0.0) / c.step.step_s for name in names}}
        for c in made.best
    ]
    print_table(["layout", *(Column(name, format=lambda x: f"{x:.1%}") for name in names)], rows, title="share of the step time by limit")


def _print_memory(made: Plan, best: Candidate) -> None:
    rows = [
        {"name": name, "gb": component.bytes / GB, "assumption": component.assumption}
        for name, component in best.memory.components.items()
        if component.bytes
    ]
    print_table(
        [Column("name", "memory of the best layout"), Column("gb", "GB", lambda x: f"{x:.2f}"), Column("assumption", "assumption")],
        rows,
        title=f"{best.memory.total_bytes / GB:.1f} GB of {made.capacity_bytes / GB:.1f} GB usable per device;"
        f" peak memory: {best.memory.peak_at}",
    )


def _print_communication(best: Candidate) -> None:
    """Print one row per kind, mesh axes and overlap."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for item in best.step.communication:
        planned, cost = item.planned, item.cost
        key = (planned.kind, *planned.axes, item.hides_under)
        row = rows.setdefault(
            key,
            {
                "kind": planned.kind,
                "axes": " x ".join(planned.axes),
                "gb": 0.0,
                "seconds": 0.0,
                "algorithm": cost.algorithm,
                "link": cost.bottleneck_link,
                "hides": item.hides_under,
            },
        )
        row["gb"] += planned.bytes * planned.count / GB
        row["seconds"] += item.seconds
    print_table(
        [
            Column("kind", "communication"),
            Column("axes", "over"),
            Column("gb", "GB per step", lambda x: f"{x:.3g}"),
            Column("seconds", "s not overlapped", lambda x: f"{x:.3g}"),
            Column("algorithm"),
            Column("link", "slowest link"),
            Column("hides", "can overlap with"),
        ],
        sorted(rows.values(), key=lambda row: -row["seconds"]),
        title="communication of the best layout, per device and step; GB of the unsharded tensor",
    )


def print_formulas(found: Formulas) -> None:
    """Print the formulas of the best layout, and what their symbols are."""
    for title, formulas in (("memory at its peak", found.memory), ("step time", found.step), ("run", found.run)):
        print(f"\nformulas of the best layout: {title}")
        print_results(formula_results(formulas), as_json=False, explain=True)
    print()
    print_symbols(found.symbols)


def _print_scaling(made: Plan) -> None:
    rows = []
    for row in made.scaling:
        best = row.best
        rows.append(
            {
                "nodes": row.nodes,
                "devices": row.devices,
                "layout": None if best is None else f"{best.layout.text()}, {best.layout.accumulation} x, {best.layout.remat.policy}",
                "step": None if best is None else best.step.step_s,
                "rate": None if best is None else best.step.tokens_per_s,
                "efficiency": row.efficiency,
                "marginal": row.marginal_efficiency,
                "days": None if best is None else best.run.wall_days,
                "cost": None if best is None else best.run.wall_cost_usd,
                "goodput": None if best is None else best.run.goodput,
                "note": row.outside or "",
            }
        )
    print_table(
        [
            "nodes",
            "devices",
            Column("layout", "best layout"),
            Column("step", "step s", lambda x: f"{x:.4g}"),
            Column("rate", "tokens/s", lambda x: f"{x:,.0f}"),
            Column("efficiency", format=lambda x: f"{x:.1%}"),
            Column("marginal", "of added devices", lambda x: f"{x:.1%}"),
            Column("days", format=lambda x: f"{x:.4g}"),
            Column("cost", "USD", lambda x: f"{x:,.0f}"),
            Column("goodput", format=lambda x: f"{x:.1%}"),
            Column("note", ""),
        ],
        rows,
        title="scaling at this batch size; efficiency: tokens/s per device relative to the first row",
    )
    print(f"{made.objective}: {made.worth}.")
    if made.stages:
        print(made.stages)


def _run_sentence(made: Plan, best: Candidate) -> str:
    run = best.run
    pause = f"{run.save_s:.1f} s" if run.save_s >= 0.1 else f"{run.save_s * 1000:.0f} ms"
    return (
        f"Over {run.wall_days:.3g} days on {best.nodes} node{'s' if best.nodes != 1 else ''} expect {run.expected_failures:.1f} failures"
        f" (one every {run.mtbf_hours:,.0f} h); save every {run.checkpoint_interval_s / 60:.0f} minutes"
        f" (blocks training for {pause});"
        f" goodput {run.goodput:.1%}. Energy: {run.device_energy_kwh / 1000:,.1f} MWh of the devices at their power limit,"
        f" {run.energy_kwh / 1000:,.1f} MWh with the facility's overhead. Price: {made.price}."
    )
