"""`ridge doctor [CONFIG]`: check this machine, or all nodes of a job, before training."""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import MEMBERS, FiniteRange, Int32Range, complete_key, json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError
from ridgeline.launch import exit_codes

if TYPE_CHECKING:
    from ridgeline.launch.cluster import Cluster
    from ridgeline.launch.preflight.report import Report


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option("--cluster", "-c", "cluster_name", help="Cluster with the expected values: the name of a shipped one, or a YAML file.")
@click.option("--calibration", help="Calibration file with the expected rates, from `ridge calibrate` [default: published rates].")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Run directory: its disk is checked, and results are written to it.")
@click.option("--job", is_flag=True, help="Check all nodes of this job; start with srun, one task per node or per device.")
@click.option("--quick", is_flag=True, help="Smaller and fewer measurements.")
@click.option("--timeout", default=150.0, type=FiniteRange(min=1), show_default=True, help="Seconds for each measurement stage.")
@click.option("--join-timeout", default=60.0, type=FiniteRange(min=1), show_default=True, help="Seconds to wait for other processes.")
@click.option("--coordinator", metavar="HOST:PORT", help="Address of process 0, if there is no launcher.")
@click.option("--processes", type=MEMBERS, help="Number of processes, if there is no launcher.")
@click.option("--process", type=Int32Range(), help="Index of this process, if there is no launcher.")
@click.option("--node", help="Name of this node, if there is no launcher.")
@json_option
def doctor(
    config: str | None,
    overrides: tuple[str, ...],
    cluster_name: str | None,
    calibration: str | None,
    run_dir: Path | None,
    job: bool,
    quick: bool,
    timeout: float,
    join_timeout: float,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    node: str | None,
    as_json: bool,
) -> int:
    """Check this machine, or with --job all nodes of a job, and report nodes that are not fit for training.

    Each measurement is compared with the cluster file, the hardware catalog and the other nodes. CONFIG defines the mesh axes to measure,
    the platform and the checkpoint size. Exit code 73: a node is unfit; RUN_DIR/bad_nodes contains its name.
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.load import load
    from ridgeline.configs.schema import Config
    from ridgeline.launch import environment
    from ridgeline.launch.cluster import ClusterError, Flags, describe, slurm
    from ridgeline.launch.preflight.doctor import Examination, examine, listen
    from ridgeline.launch.preflight.exchange import ExchangeLost
    from ridgeline.planner.calibration import load_calibration

    settings = None if config is None else load(config, overrides).config
    site = None if cluster_name is None else load_cluster(cluster_name).config
    measured = load_calibration(calibration)
    flags = Flags(coordinator, processes, process)
    platform = "auto" if settings is None else settings.runtime.platform
    here = describe(os.environ, flags=flags, platform=platform) if job or flags != Flags() else _alone(platform)
    environment.prepare(settings or Config(), here)  # measure collectives with the settings of a training run
    step = slurm.read_step(os.environ) if here.source == "Slurm step" else None
    directory = run_dir or (settings.directory if settings is not None and job else None)
    known = here.hosts[here.process] if here.process < len(here.hosts) else None
    exam = Examination(
        here=here,
        node=node or known or (step.node_name if step is not None else None) or socket.gethostname(),
        config=settings,
        cluster=site,
        calibration=measured,
        run_dir=directory,
        gpus_on_node=None if step is None else step.gpus_on_node,
        join_s=join_timeout,
        timeout_s=timeout,
        quick=quick,
    )
    signal.signal(signal.SIGTERM, _stop)
    leads = here.process == 0
    try:
        outcome = examine(exam, listen(here) if leads and here.processes > 1 else ())
    except ClusterError as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        return error.exit_code
    except ExchangeLost as error:
        click.echo(f"ridge: stopped: {error}", err=True)
        return exit_codes.LOST_PEER
    if isinstance(outcome, int):
        return outcome
    _show(outcome, as_json=as_json)
    _record(outcome, directory, here.restart)
    return exit_codes.DONE if outcome.fit else exit_codes.BAD_NODE


def _alone(platform: str) -> Cluster:
    """Describe this machine alone. Raises UserError in one of several tasks, which would all check the same machine."""
    from ridgeline.launch.cluster import Flags, describe, slurm

    step = slurm.read_step(os.environ)
    if step is not None and step.tasks > 1:
        raise UserError(f"this is one of {step.tasks} tasks of a Slurm step: use --job to check their nodes together")
    return describe(os.environ, flags=Flags(None, 1, 0), platform=platform)


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM with the code for preemption, so that the job may be requeued."""
    print("ridge: stopped: SIGTERM during the preflight; nothing to save yet", file=sys.stderr, flush=True)
    os._exit(exit_codes.PREEMPTED)


def _show(report: Report, *, as_json: bool) -> None:
    from ridgeline.launch.preflight.report import as_json as to_json
    from ridgeline.launch.preflight.report import tables, verdict_lines

    if as_json:
        print_json(to_json(report))
        return
    columns: list[Column | str] = [
        Column("name", "check"),
        "measured",
        "expected",
        Column("verdict", format=lambda verdict: verdict.value),
        "reason",
        "fix",
    ]
    for node, rows in tables(report):
        print_table(columns, rows, title=f"node {node}")
        print()
    print("\n".join(verdict_lines(report)))


def _record(report: Report, directory: Path | None, restart: int) -> None:
    from ridgeline.launch.preflight.report import write

    if directory is not None:
        write(report, directory, datetime.now(UTC), restart=restart)
