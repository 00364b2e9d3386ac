"""`ridge bench TASK CONFIG`: one layer of the stack at a time, on the real config."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.commands.bench_compare import SLOWER, change_option, fail_option, show, to_json
from ridgeline.cli.options import config_arguments, json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config


def _task(name: str, help: str) -> click.Command:
    """Make the command of one task; all take the same options."""

    @click.command(name, help=help)
    @config_arguments
    @click.option("--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="Rounds of every measurement.")
    @click.option("--save", type=click.Path(path_type=Path), help="Store the result in this file [default: one below --results].")
    @click.option("--results", type=click.Path(path_type=Path), default=Path("bench"), show_default=True, help="Directory of results.")
    @click.option("--no-save", is_flag=True, help="Store nothing.")
    @click.option("--baseline", type=click.Path(path_type=Path), help="Compare with this stored result, or with those of a directory.")
    @change_option
    @fail_option
    @json_option
    def command(config: str, overrides: tuple[str, ...], **options: Any) -> int:
        return _run(name, config, overrides, **options)

    return command


matmul = _task("matmul", "Measure the matrix products of CONFIG's step alone: shapes, dtypes and counts of one device.")
memory = _task("memory", "Measure device memory bandwidth on arrays of CONFIG's sizes, and what its step moves.")
collectives = _task("collectives", "Measure the collectives of CONFIG's step over its mesh axes, nothing beside them.")
loader = _task("loader", "Measure the loader alone on CONFIG's data: time per batch and tokens/s.")
step = _task("step", "Measure the compiled train step of CONFIG on synthetic data.")
loop = _task("loop", "Measure the training loop on CONFIG's real data, log lines included, beside the step alone.")
checkpoint = _task("checkpoint", "Measure saves and restores of CONFIG's whole state, on the file system of its run directory.")
all_layers = _task("all", "Measure every layer and print the ladder: what each adds to the time of a step, and which to look at.")


def _run(
    task: str,
    config: str,
    overrides: tuple[str, ...],
    *,
    repeats: int,
    save: Path | None,
    results: Path,
    no_save: bool,
    baseline: Path | None,
    changes: tuple[str, ...],
    fail_on_slower: bool,
    as_json: bool,
) -> int:
    from ridgeline.configs.load import load
    from ridgeline.measure.guard import BUSY, choose, judge
    from ridgeline.measure.neighbours import Neighbours
    from ridgeline.rundir import bench_results as stored

    if no_save and save is not None:
        raise UserError("--save and --no-save exclude each other")
    if baseline is None and (fail_on_slower or changes):
        raise UserError(f"{'--fail-on-slower' if fail_on_slower else '--change'} needs --baseline: compared with what?")
    resolved = load(config, overrides).config
    before = [] if baseline is None else stored.read_all(baseline)
    if save is not None and save.exists():
        raise UserError(f"{save} exists already: a stored result is never overwritten")
    first = _start(resolved)

    from ridgeline.cli import bench_report as report
    from ridgeline.measure import tasks

    now = datetime.now(UTC)
    made_with = stored.provenance(resolved, command=sys.argv, overrides=overrides, device=_device(), now=now)
    if before:  # what cannot be compared is refused before minutes are spent on it
        choose(before, [stored.as_stored(Path("this measurement"), {"task": task, "series": {}}, resolved, made_with)], changes)
    neighbours = Neighbours()
    outcome = tasks.measure(task, resolved, repeats, _say if first else lambda line: None)
    if not first:
        return 0
    alone = made_with["device"]["processes"] == 1  # others of the run are no neighbours, and cannot be told from them
    found, made_with["neighbours"] = tasks.to_json(outcome), neighbours.share() if alone else None
    path = None
    if not no_save:
        path = stored.write(save or stored.default_path(results, task, resolved.name, now), found, resolved, made_with)
    judgement = None
    if before:
        judgement = judge(before, [stored.as_stored(path or Path("this measurement"), found, resolved, made_with)], changes)
    if as_json:
        compared = {} if judgement is None else {"comparison": to_json(judgement)}
        print_json({**found, "provenance": made_with, "stored": None if path is None else str(path), **compared})
    else:
        report.show(outcome, resolved)
        if (taken := made_with["neighbours"]) is not None and taken > BUSY:
            print(
                f"other programs took {taken:.0%} of the cores meanwhile: rounds slow their layers alike, but figures are of a busy machine"
            )
        if path is not None:
            print(f"\nstored in {path}")
        if judgement is not None:
            print()
            show(judgement)
    return SLOWER if fail_on_slower and judgement is not None and judgement.slower else 0


def _start(config: Config) -> bool:
    """Set up the devices as a run of this config has them; return whether this process is the one that reports."""
    from ridgeline.launch import cluster, environment

    here = cluster.describe(os.environ, flags=cluster.Flags(None, None, None), platform=config.runtime.platform)
    environment.prepare(config, here)
    try:
        cluster.join(here, config)
    except cluster.ClusterError as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        sys.exit(error.exit_code)
    return here.process == 0


def _device() -> Any:
    import jax

    from ridgeline.rundir.bench_results import Device

    device = jax.devices()[0]
    return Device(device.platform, device.device_kind, jax.device_count(), jax.process_count())


def _say(line: str) -> None:
    print(f"measuring {line}", file=sys.stderr, flush=True)
