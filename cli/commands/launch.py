"""`ridge launch --processes N CONFIG [key=value ...]`: train with several processes on this machine."""

from __future__ import annotations

import os
import sys

import click

from ridgeline.cli.options import FiniteRange, config_arguments
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch import local
from ridgeline.launch.cluster.devices import gpus_present
from ridgeline.launch.cluster.network import free_port

MOST_PROCESSES = 1024
"""Most processes of one machine."""


@click.command()
@config_arguments
@click.option(
    "--processes", "-n", type=click.IntRange(1, MOST_PROCESSES), required=True, help="Number of processes to start on this machine."
)
@click.option(
    "--grace",
    "grace_s",
    type=FiniteRange(0),
    default=local.GRACE_S,
    show_default=True,
    help="Seconds that the other processes have to exit after a failure.",
)
def launch(config: str, overrides: tuple[str, ...], processes: int, grace_s: float) -> None:
    """Train with several processes on this machine, without Slurm.

    Each process gets an equal share of the GPUs (on a CPU: runtime.cpu_devices virtual devices). Its output lines begin with its index.
    Signals are forwarded to all processes. When one fails, the others are stopped, and its exit code is returned.
    """
    resolved = load(config, overrides)  # report an invalid config once, not once per process
    cpu = resolved.config.runtime.platform == "cpu" or os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    try:
        environments = local.environments(processes, os.environ, None if cpu else gpus_present())
    except ValueError as error:
        raise UserError(f"--processes {processes}: {error}") from None
    group = local.Group(local.commands(processes, ["train", config, *overrides], free_port()), environments)
    ended = group.wait(grace_s=grace_s)
    if ended.failed_first is not None and processes > 1:
        click.echo(f"ridge launch: process {ended.failed_first} was the first to fail", err=True)
    sys.exit(ended.code)
