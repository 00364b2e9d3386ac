"""`ridge launch --processes N CONFIG [key=value ...]`."""

from __future__ import annotations

import os
import sys

import click

from ridgeline.cli.options import config_arguments
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch import local
from ridgeline.launch.cluster.devices import gpus_present


@click.command()
@config_arguments
@click.option("--processes", "-n", type=click.IntRange(1), required=True, help="Processes to start on this machine.")
@click.option(
    "--grace", "grace_s", type=click.FloatRange(0), default=local.GRACE_S, show_default=True, help="Seconds the others get to end."
)
def launch(config: str, overrides: tuple[str, ...], processes: int, grace_s: float) -> None:
    """Train with several processes on this machine, without Slurm.

    Each gets an even share of the GPUs (on CPU: runtime.cpu_devices virtual devices), and its output carries its index.
    Signals go to all. When one fails the others are ended, and its exit code is this command's.
    """
    resolved = load(config, overrides)  # what is wrong with the config is said once
    cpu = resolved.config.runtime.platform == "cpu" or os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    try:
        environments = local.environments(processes, os.environ, None if cpu else gpus_present())
    except ValueError as error:
        raise UserError(f"--processes {processes}: {error}") from None
    group = local.Group(local.commands(processes, ["train", config, *overrides], local.free_port()), environments)
    ended = group.wait(grace_s=grace_s)
    if ended.culprit is not None and processes > 1:
        click.echo(f"ridge launch: process {ended.culprit} was the first to fail", err=True)
    sys.exit(ended.code)
