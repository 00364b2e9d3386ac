"""`ridge plan CONFIG --cluster C --nodes 1,2,4`: what a run should cost in every layout, and what binds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import config_arguments, json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.planner.plan import Plan
    from ridgeline.planner.search import Candidate

GB = 1e9


@click.command()
@config_arguments
@click.option("--cluster", "-c", required=True, help="Cluster file: a shipped one by name, or a YAML file.")
@click.option("--nodes", "-N", default="1", show_default=True, metavar="N[,N...]", help="Numbers of nodes to compare.")
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "efficiency"]),
    default="time",
    show_default=True,
    help="time: earliest end. cost: least money. efficiency: most tokens per second and device.",
)
@click.option("--budget-usd", type=click.FloatRange(min=0, min_open=True), help="Leave out what costs more, failures included.")
@click.option("--deadline-days", type=click.FloatRange(min=0, min_open=True), help="Leave out what takes longer, failures included.")
@click.option("--tokens", type=click.FloatRange(min=1), help="Tokens of the run [default: trainer.steps x batch x length].")
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Layouts to show.")
@click.option("--calibration", metavar="FILE", help="Efficiency factors measured by `ridge calibrate` [default: published ones].")
@click.option("--write", metavar="FILE", type=click.Path(path_type=Path), help="Write a config with the best layout, on top of CONFIG.")
@json_option
def plan(
    config: str,
    overrides: tuple[str, ...],
    cluster: str,
    nodes: str,
    objective: str,
    budget_usd: float | None,
    deadline_days: float | None,
    tokens: float | None,
    top: int,
    calibration: str | None,
    write: Path | None,
    as_json: bool,
) -> None:
    """Search every mesh, number of microbatches and rematerialisation policy of CONFIG on a cluster.

    Prints the best few with memory, time by ceiling, money and one sentence on what binds; why the obvious alternatives lose; and the best
    of every number of nodes with its parallel efficiency. The global batch stays as configured. No GPU and no JAX is needed.
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.load import load
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.planner.plan import make_plan, plan_json
    from ridgeline.planner.search import Limits

    resolved = load(config, overrides).config
    made = make_plan(
        resolved,
        load_cluster(cluster).config,
        load_calibration(calibration),
        parse_nodes(nodes),
        tokens=tokens,
        objective=objective,  # type: ignore[arg-type]  # click.Choice holds it to the literals
        limits=Limits(budget_usd, deadline_days),
        top=top,
    )
    if write is not None:
        write_layout(write, config, overrides, made)
    if as_json:
        print_json(plan_json(made))
    else:
        print_plan(made)
        if write is not None:
            print(f"\nwritten: {write} (ridge compile {write} --cluster {cluster} --nodes {made.best[0].nodes} proves it)")


def parse_nodes(text: str) -> list[int]:
    """Read `1,2,4`. Raises UserError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UserError(f"--nodes {text}: numbers of nodes separated by commas, as in 1,2,4,8")
    return [int(part) for part in parts]


def write_layout(path: Path, config: str, overrides: tuple[str, ...], made: Plan) -> None:
    """Write a config file: CONFIG as its base, the command line's overrides, and the best layout."""
    from ridgeline.configs.layout_file import layout_yaml

    if path.exists():
        raise UserError(f"--write {path}: exists already; choose another name or remove it")
    best = made.best[0]
    layout = best.layout
    settings: dict[str, Any] = {
        "mesh": layout.sizes,
        "trainer": {"accumulation": layout.accumulation},
        "compute": {"remat": {"policy": layout.remat.policy, "names": list(layout.remat.names)}},
    }
    notes = [
        f"Layout for {best.nodes} node{'s' if best.nodes != 1 else ''} of {made.cluster.name} ({best.step.devices} devices),"
        f" planned with {made.calibration.name}.",
        f"Predicted: {best.step.step_s:.4g} s per step, {best.step.tokens_per_s_per_device:,.0f} tokens/s per device,"
        f" MFU {best.step.mfu:.1%}, {best.memory.total_bytes / GB:.1f} GB per device.",
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(layout_yaml(config, path.parent, overrides, settings, notes))
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from error


# Text.


def print_plan(made: Plan) -> None:
    """Print the plan for people."""
    best = made.best[0]
    data = made.config.data
    print(
        f"{made.config.name}: {data.batch_size:,} rows of {data.seq_len:,} tokens per step, {made.tokens:.4g} tokens;"
        f" cluster {made.cluster.name} ({made.cluster.device}), rates: {made.calibration.name}\n"
    )
    _print_candidates(made)
    print(f"\n{made.bindings[0].sentence}\n")
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
                Column("name", "why not"),
                Column("mesh", "layout"),
                Column("slower", "step", lambda x: f"{x:+.0%}"),
                Column("reason", "because"),
            ],
            [vars(alternative) | {"slower": alternative.slower} for alternative in made.alternatives],
        )
    if len(made.scaling) > 1:
        print()
        _print_scaling(made)
    print(f"\n{_run_sentence(made, best)}")


def _print_candidates(made: Plan) -> None:
    rows = [
        {
            "nodes": c.nodes,
            "layout": c.layout.text(),
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
        title=f"best for {made.objective}; days and money include saves, failures and restarts; GB is 1e9 bytes",
    )


def _print_breakdown(made: Plan) -> None:
    names = [name for name in made.best[0].step.breakdown_s if any(c.step.breakdown_s.get(name, 0) > 0 for c in made.best)]
    rows = [
        {"layout": f"{c.nodes} x {c.layout.text()}", **{name: c.step.breakdown_s.get(name, 0.0) / c.step.step_s for name in names}}
        for c in made.best
    ]
    print_table(["layout", *(Column(name, format=lambda x: f"{x:.1%}") for name in names)], rows, title="where a step goes, by ceiling")


def _print_memory(made: Plan, best: Candidate) -> None:
    rows = [
        {"name": name, "gb": component.bytes / GB, "assumption": component.assumption}
        for name, component in best.memory.components.items()
        if component.bytes
    ]
    print_table(
        [Column("name", "memory of the best"), Column("gb", "GB", lambda x: f"{x:.2f}"), Column("assumption", "counted as")],
        rows,
        title=f"{best.memory.total_bytes / GB:.1f} GB of {made.capacity_bytes / GB:.1f} GB a device may plan with;"
        f" fullest moment: {best.memory.moment}",
    )


def _print_communication(best: Candidate) -> None:
    """Print a row for every kind, set of axes and hiding place."""
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
            Column("gb", "GB a step", lambda x: f"{x:.3g}"),
            Column("seconds", "s if alone", lambda x: f"{x:.3g}"),
            Column("algorithm"),
            Column("link", "slowest link"),
            Column("hides", "can hide under"),
        ],
        sorted(rows.values(), key=lambda row: -row["seconds"]),
        title="communication of the best, per device and step; GB of the unsharded side",
    )


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
            Column("marginal", "of added", lambda x: f"{x:.1%}"),
            Column("days", format=lambda x: f"{x:.4g}"),
            Column("cost", "USD", lambda x: f"{x:,.0f}"),
            Column("goodput", format=lambda x: f"{x:.1%}"),
            Column("note", ""),
        ],
        rows,
        title="scaling at this batch; efficiency: tokens/s per device against the first row; of added: that of the devices added",
    )
    print(f"{made.objective}: {made.worth}.")


def _run_sentence(made: Plan, best: Candidate) -> str:
    run = best.run
    pause = f"{run.save_s:.1f} s" if run.save_s >= 0.1 else f"{run.save_s * 1000:.0f} ms"
    return (
        f"Over {run.wall_days:.3g} days on {best.nodes} node{'s' if best.nodes != 1 else ''} expect {run.expected_failures:.1f} failures"
        f" (one every {run.mtbf_hours:,.0f} h); save every {run.checkpoint_interval_s / 60:.0f} minutes"
        f" (training stands still for {pause});"
        f" goodput {run.goodput:.1%}. Energy of the devices {run.energy_kwh / 1000:,.1f} MWh at their power limit."
    )
