"""`ridge goodput RUN`: where the wall time and the cost of a run went, over all its starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.options import FiniteRange, json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.format import format_count, format_duration, plural
from ridgeline.rundir.allocations import usage
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger
from ridgeline.rundir.startup import startup_parts


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--cluster", help="Cluster file or name, for the price per device-hour [default: the cluster RUN was submitted to].")
@click.option("--price", "price_usd", type=FiniteRange(min=0), help="Price of one device per hour in USD; overrides --cluster.")
@json_option
def goodput(run: Path, cluster: str | None, price_usd: float | None, as_json: bool) -> None:
    """Account for the wall time and the cost of RUN, a run directory, across restarts.

    Works during a run and after a crash. The categories sum to the wall time; goodput is the share spent on productive training steps.
    """
    directory = RunDir.open(run)
    events = directory.require_events()
    ledger = run_ledger(events, queue_waits(directory, events))
    devices = directory.require_start().devices.count
    by_start = [start.devices.count for start in directory.record.starts]
    price_usd = directory.price_on(cluster) if price_usd is None else price_usd
    report = describe(ledger, devices, price_usd, by_start)
    report["startup"] = startup = startup_parts(events, max(event.restart for event in events if event.process == 0))
    used = usage(run, max(event.time_s for event in events))
    report["elastic"] = None if used is None else asdict(used)
    if as_json:
        print_json(report)
        return
    usd = report["usd_by_category"]
    rows = [
        {"category": name, "time": seconds, "share": seconds / ledger.wall_s, "usd": None if usd is None else usd[name]}
        for name, seconds in ledger.seconds.items()
        if seconds > 0
    ]
    columns = [Column("category"), Column("time", "seconds", "{:,.1f}".format), Column("share", format="{:.1%}".format)]
    columns += [Column("usd", "USD", "{:,.2f}".format)] if usd is not None else []
    print_table(columns, rows, title=_headline(directory.name, ledger, devices))
    if startup is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in startup.items() if seconds >= 0.05)
        print(f"start-up: {sum(startup.values()):.1f} s until the end of the first step of the last start: {parts}")
    if ledger.lost_steps:
        print(
            f"{ledger.lost_steps} steps were repeated after restarts: save more often than every "
            f"{format_duration(ledger.seconds['lost'])} of training"
        )
    if used is not None:
        spare_hours = used.spare_node_s / 3600
        print(
            f"{format_duration(used.reduced_s)} on fewer nodes than requested ({used.missing_node_s / 3600:,.2f} node-hours missing); "
            f"idle spares: {spare_hours:,.2f} node-hours"
        )
    if report["usd_per_billion_tokens"] is not None:
        print(f"{report['usd']:,.2f} USD in total, {report['usd_per_billion_tokens']:,.2f} USD per 1e9 tokens")


def describe(ledger: Ledger, devices: int, price_usd: float | None, by_start: Sequence[int] = ()) -> dict[str, Any]:
    """Return the ledger as plain values.

    Args:
      ledger: of the run.
      devices: of the newest start.
      price_usd: of one device and hour; None: no money.
      by_start: devices of every start; of those beyond it `devices`.
    """
    device_s = dict.fromkeys(ledger.seconds, 0.0)
    for stretch in ledger.stretches:
        device_s[stretch.category] += stretch.duration_s * (by_start[stretch.restart] if stretch.restart < len(by_start) else devices)
    hours = sum(device_s.values()) / 3600
    usd = None if price_usd is None else hours * price_usd
    billions = (ledger.tokens or 0) / 1e9
    return {
        "wall_s": ledger.wall_s,
        "goodput": ledger.goodput,
        "seconds": ledger.seconds,
        "starts": ledger.starts,
        "steps": ledger.steps,
        "lost_steps": ledger.lost_steps,
        "tokens": ledger.tokens,
        "devices": devices,
        "device_hours": hours,
        "usd": usd,
        "usd_by_category": None if price_usd is None else {k: v / 3600 * price_usd for k, v in device_s.items()},
        "device_hours_per_billion_tokens": hours / billions if billions else None,
        "usd_per_billion_tokens": usd / billions if usd is not None and billions else None,
        "goodput_over_time": [{"wall_s": wall_s, "goodput": share} for wall_s, share in ledger.over_time()],
    }


def _headline(name: str, ledger: Ledger, devices: int) -> str:
    starts = f", {ledger.starts} starts" if ledger.starts > 1 else ""
    tokens = "" if ledger.tokens is None else f", {format_count(ledger.tokens)} tokens"
    wall = format_duration(ledger.wall_s)
    return f"{name}: goodput {ledger.goodput:.1%} of {wall} on {plural(devices, 'device')}{starts}; {plural(ledger.steps, 'step')}{tokens}"
