"""`ridge train CONFIG [key=value ...]`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from configs.load import load
from launch import cluster, environment, exit_codes
from launch.early_stop import EarlyStop


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--coordinator", metavar="HOST:PORT", help="Where process 0 listens, if no launcher says it.")
@click.option("--processes", type=int, help="Number of processes of the run, if no launcher says it.")
@click.option("--process", type=int, help="Index of this process, if no launcher says it.")
def train(config: Path, overrides: tuple[str, ...], coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Train a model: start a run, or continue the one in its run directory.

    CONFIG is a YAML file; each override is section.key=value, e.g. trainer.steps=200 mesh.fsdp=4.
    Under srun, mpirun, torchrun or a Kubernetes indexed job the processes find each other by themselves.
    Ctrl-C saves and stops; the same command continues.
    """
    resolved = load(config, overrides)
    here = cluster.describe(os.environ, flags=cluster.Flags(coordinator, processes, process), platform=resolved.config.runtime.platform)
    settings = environment.prepare(resolved.config, here)
    if here.process == 0 and (here.processes > 1 or settings):
        click.echo("\n".join([*cluster.explain(here), *environment.lines(settings)]))
    stop = EarlyStop()
    if here.processes > 1:
        stop.install()
    try:
        joined = cluster.join(here, resolved.config, stop=stop)
        stop.hand_over()
    except cluster.ClusterError as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        sys.exit(error.exit_code)
    except cluster.Preempted as error:
        click.echo(f"ridge: stopped: {error}; nothing to save yet", err=True)
        sys.exit(exit_codes.PREEMPTED)

    from trainer.checkpoint import CheckpointError
    from trainer.loop import NumericalFailure
    from trainer.run import train as run_training

    try:
        stopped_by = run_training(
            resolved.config,
            command=sys.argv,
            rendezvous=joined.interval,
            facts={
                "cluster": {"described": asdict(here), "joined": asdict(joined)},
                "environment": {"settings": [asdict(setting) for setting in settings]},
            },
        )
    except NumericalFailure as error:
        click.echo(f"ridge: stopped: {error}; the last good checkpoint is intact", err=True)
        sys.exit(exit_codes.NUMERICAL_FAILURE)
    except CheckpointError as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        sys.exit(exit_codes.SAVE_FAILURE)
    if stopped_by is not None:
        sys.exit(exit_codes.INTERRUPTED if stopped_by.name == "SIGINT" else exit_codes.PREEMPTED)
