"""`ridge goodput RUN`: where the wall time and the money of a run went, over all its starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_count, format_duration
from ridgeline.rundir.events import event_files, read_events
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger
from ridgeline.rundir.money import cluster_price, run_price
from ridgeline.rundir.startup import startup_parts


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--cluster", help="Cluster file or name: its price per device and hour. Default: the cluster RUN was submitted to.")
@click.option("--price", "price_usd", type=click.FloatRange(min=0), help="Price of one device for an hour, in USD; wins over --cluster.")
@json_option
def goodput(run: Path, cluster: str | None, price_usd: float | None, as_json: bool) -> None:
    """Account for every second of RUN, a run directory, and for what it cost.

    Works while the run goes on, and on one that was killed. The parts sum to the wall time; goodput is the productive part of it.
    """
    record = read_run(run)
    events = read_events(event_files(run))
    ledger = run_ledger(events, queue_waits(run, events))
    devices = int(record["starts"][-1]["devices"]["count"])
    price_usd = price_of(cluster, run) if price_usd is None else price_usd
    report = describe(ledger, devices, price_usd)
    report["startup"] = startup = startup_parts(events, max(event.restart for event in events if event.process == 0))
    if as_json:
        print_json(report)
        return
    per_s = None if price_usd is None else devices * price_usd / 3600
    rows = [
        {"category": name, "time": seconds, "share": seconds / ledger.wall_s, "usd": None if per_s is None else seconds * per_s}
        for name, seconds in ledger.seconds.items()
        if seconds > 0
    ]
    columns = [Column("category"), Column("time", "seconds", "{:,.1f}".format), Column("share", format="{:.1%}".format)]
    columns += [Column("usd", "USD", "{:,.2f}".format)] if per_s is not None else []
    print_table(columns, rows, title=_headline(record["name"], ledger, devices))
    if startup is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in startup.items() if seconds >= 0.05)
        print(f"the last start took {sum(startup.values()):.1f} s to the end of its first step: {parts}")
    if ledger.lost_steps:
        print(
            f"{ledger.lost_steps} steps were done again: save more often than every {format_duration(ledger.seconds['lost'])} of training"
        )
    if report["usd_per_billion_tokens"] is not None:
        print(f"{report['usd']:,.2f} USD in all, {report['usd_per_billion_tokens']:,.2f} USD per 1e9 tokens")


def read_run(run: Path) -> dict[str, Any]:
    """Return run.json of a run directory. Raises UserError when it is none, or has no events yet."""
    try:
        record: dict[str, Any] = json.loads((run / "run.json").read_bytes())
        _ = record["name"], record["starts"][-1]["devices"]["count"]
    except FileNotFoundError:
        raise UserError(f"{run} is not a run directory: it has no run.json") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{run / 'run.json'} cannot be read: {error}") from None
    if not event_files(run):
        raise UserError(f"{run} has no events.jsonl: the run never started")
    return record


def describe(ledger: Ledger, devices: int, price_usd: float | None) -> dict[str, Any]:
    """Return the ledger as plain values; `price_usd` is of one device and hour, None: no money."""
    hours = ledger.wall_s / 3600 * devices
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
        "usd_by_category": None if usd is None else {k: usd * v / ledger.wall_s for k, v in ledger.seconds.items()},
        "device_hours_per_billion_tokens": hours / billions if billions else None,
        "usd_per_billion_tokens": usd / billions if usd is not None and billions else None,
        "goodput_over_time": [{"wall_s": wall_s, "goodput": share} for wall_s, share in ledger.over_time()],
    }


def _headline(name: str, ledger: Ledger, devices: int) -> str:
    starts = f", {ledger.starts} starts" if ledger.starts > 1 else ""
    tokens = "" if ledger.tokens is None else f", {format_count(ledger.tokens)} tokens"
    wall = format_duration(ledger.wall_s)
    return f"{name}: goodput {ledger.goodput:.1%} of {wall} on {devices} device(s){starts}; {ledger.steps} steps{tokens}"


def price_of(cluster: str | None, run: Path) -> float | None:
    """Return the price of one device for an hour, USD, of a cluster, or without one of that the run was submitted to; None: no cluster."""
    return run_price(run) if cluster is None else cluster_price(cluster)
