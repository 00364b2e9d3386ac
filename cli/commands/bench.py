"""`ridge bench TASK CONFIG`: time one layer of the stack at a time with a real config."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import FAILED_CHECK, Int32Range, change_option, config_arguments, fail_option, json_option
from ridgeline.cli.progress import print_measuring
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config


def _task(name: str, help: str) -> click.Command:
    """Return the command of one task. All tasks have the same options."""

    @click.command(name, help=help)
    @config_arguments
    @click.option("--repeats", type=Int32Range(min=3), default=5, show_default=True, help="Rounds of every measurement.")
    @click.option("--save", type=click.Path(path_type=Path), help="Store the result in this file [default: a new file in --results].")
    @click.option(
        "--results", type=click.Path(path_type=Path), default=Path("bench"), show_default=True, help="Directory of stored results."
    )
    @click.option("--no-save", is_flag=True, help="Do not store the result.")
    @click.option("--baseline", type=click.Path(path_type=Path), help="Compare with this stored result, or with a directory of results.")
    @change_option
    @fail_option
    @json_option
    def command(config: str, overrides: tuple[str, ...], **options: Any) -> int:
        return _run(name, config, overrides, **options)

    return command


matmul = _task("matmul", "Time the matmuls of CONFIG's train step alone, with the shapes, dtypes and counts of one device.")
memory = _task("memory", "Time the device memory traffic of CONFIG's train step, on arrays of its sizes.")
collectives = _task("collectives", "Time the collectives of CONFIG's train step over its mesh axes, without compute beside them.")
loader = _task("loader", "Time the data loader alone on CONFIG's data: time per batch and tokens/s.")
step = _task("step", "Time the compiled train step of CONFIG on synthetic data.")
loop = _task("loop", "Time the training loop on CONFIG's data, including log lines, and the step alone.")
checkpoint = _task("checkpoint", "Time saves and restores of CONFIG's training state, on the file system of its run directory.")
all_layers = _task("all", "Time every layer and print how much each adds to a training step, and the most expensive one.")


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
    from ridgeline.measure.cpu_load import OtherCpuLoad
    from ridgeline.measure.regression import BUSY, choose, judge, to_json
    from ridgeline.rundir import bench_results as stored

    if no_save and save is not None:
        raise UserError("--save and --no-save exclude each other")
    if baseline is None and (fail_on_slower or changes):
        raise UserError(f"{'--fail-on-slower' if fail_on_slower else '--change'} needs --baseline")
    resolved = load(config, overrides).config
    before = [] if baseline is None else stored.read_all(baseline)
    if save is not None and save.exists():
        raise UserError(f"{save} exists already; choose another file (stored results are never overwritten)")
    first = _start(resolved)

    from ridgeline.cli.printing.bench import print_outcome
    from ridgeline.cli.printing.comparison import print_comparison
    from ridgeline.measure import tasks

    now = datetime.now(UTC)
    made_with = stored.provenance(resolved, command=sys.argv, overrides=overrides, device=_device(), now=now)
    if before:  # reject an unusable baseline before measuring for minutes
        choose(before, [stored.as_stored(Path("this measurement"), {"task": task, "series": {}}, resolved, made_with)], changes)
    load_of_others = OtherCpuLoad()
    outcome = tasks.measure(task, resolved, repeats, print_measuring if first else lambda line: None)
    if not first:
        return 0
    alone = made_with["device"]["processes"] == 1  # the kernel counters cannot separate the other processes of this run
    found, made_with["neighbours"] = tasks.to_json(outcome), load_of_others.share() if alone else None
    path = None
    if not no_save:
        path = stored.write(save or stored.default_path(results, task, resolved.name, now), found, resolved, made_with)
    judgment = None
    if before:
        judgment = judge(before, [stored.as_stored(path or Path("this measurement"), found, resolved, made_with)], changes)
    if as_json:
        compared = {} if judgment is None else {"comparison": to_json(judgment)}
        print_json({**found, "provenance": made_with, "stored": None if path is None else str(path), **compared})
    else:
        print_outcome(outcome, resolved)
        if (taken := made_with["neighbours"]) is not None and taken > BUSY:
            print(f"other programs used {taken:.0%} of the cores: the shares of the layers hold, but all times are too long")
        if path is not None:
            print(f"\nstored in {path}")
        if judgment is not None:
            print()
            print_comparison(judgment)
    return FAILED_CHECK if fail_on_slower and judgment is not None and judgment.slower else 0


def _start(config: Config) -> bool:
    """Set up the devices as a training run of this config does; return whether this process prints the result."""
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
