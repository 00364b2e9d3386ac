"""`ridge simulate CONFIG --cluster C --nodes N --days D`: what failures, restarts and checkpoints make of a campaign."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import (
    COUNT_OR_ZERO,
    DAYS,
    DURATION,
    DURATION_OR_ZERO,
    MEMBERS,
    Int32Range,
    config_arguments,
    json_option,
    software_option,
)
from ridgeline.cli.tables import print_json
from ridgeline.configs.environment import MOST

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.planner.campaign.report import Wanted


@click.command()
@config_arguments
@click.option("--cluster", "-c", required=True, help="Cluster: the name of a shipped one, or a YAML file.")
@click.option(
    "--cluster-set", multiple=True, metavar="KEY=VALUE", help="Override a key of the cluster file, such as slurm.max_restarts=500."
)
@click.option("--nodes", "-N", type=MEMBERS, required=True, help="Nodes of the job.")
@click.option("--days", type=DAYS, help="Days of steps, without any loss [default: trainer.steps].")
@click.option("--seed", type=Int32Range(min=0), default=0, show_default=True, help="Seed of the random numbers.")
@click.option("--trials", type=click.IntRange(min=2, max=5000), default=200, show_default=True, help="Number of simulated campaigns.")
@click.option("--objective", type=click.Choice(["cost", "time"]), default="cost", show_default=True, help="What the best choice minimizes.")
@click.option("--interval", "interval_s", type=DURATION, help="Time between saves, such as 10m [default: the best].")
@click.option("--spares", type=click.IntRange(min=0, max=MOST), help="Nodes that replace a lost one at once [default: the best number].")
@click.option(
    "--tier",
    type=click.Choice(["shared", "local"]),
    help="Where frequent checkpoints are [default: local with checkpoint.local, else shared].",
)
@click.option(
    "--policy",
    "elastic",
    type=click.Choice(["wait", "shrink"]),
    help="Without a spare: wait for the node, or go on with fewer [default: shrink if elastic.min_nodes is set].",
)
@click.option("--fleet", help="Published failure rate: llama-3, rsc-1, rsc-2 [default: node_mtbf_hours of the cluster, else llama-3].")
@click.option("--failure-scale", type=COUNT_OR_ZERO, default=1.0, show_default=True, help="Factor on all failure rates.")
@click.option("--stragglers/--no-stragglers", default=True, show_default=True, help="Nodes that become slow.")
@click.option(
    "--queue-wait", "queue_wait_s", type=DURATION_OR_ZERO, default=0.0, help="Mean wait in the queue at each start, not paid [default: 0]."
)
@click.option("--time-limit", metavar="TIME", help="Time limit of one job in Slurm's format [default: slurm.max_time of the cluster].")
@click.option("--preemptions", "preemptions_per_day", type=COUNT_OR_ZERO, default=0.0, help="Preemptions of the job per day [default: 0].")
@click.option("--step-time", "step_s", type=DURATION, help="Time of a step [default: planned].")
@click.option("--save", "save_s", type=DURATION_OR_ZERO, help="Time that a save blocks training [default: planned].")
@click.option("--write", "write_s", type=DURATION_OR_ZERO, help="Time of a write in the background [default: planned].")
@click.option("--restore", "restore_s", type=DURATION_OR_ZERO, help="Time to read a checkpoint [default: planned].")
@click.option("--detection", "detection_s", type=DURATION_OR_ZERO, help="From a failure to the end of the last process [default: 2m].")
@click.option("--requeue", "requeue_s", type=DURATION_OR_ZERO, help="From there to the next start of the job script [default: 2m].")
@click.option("--startup", "startup_s", type=DURATION_OR_ZERO, help="Start-up without restore and compilation [default: 3m].")
@click.option("--compile", "compile_s", type=DURATION_OR_ZERO, help="Compilation of each start [default: 3m].")
@click.option("--repair", "repair_s", type=DURATION_OR_ZERO, help="Until a replaced node is back [default: 24h].")
@click.option("--resubmit", "resubmit_s", type=DURATION_OR_ZERO, help="Until a person submits a job that is not requeued [default: 30m].")
@click.option("--calibration", metavar="FILE", help="Calibration file from `ridge calibrate` [default: published rates].")
@software_option
@json_option
def simulate(
    config: str,
    overrides: tuple[str, ...],
    cluster: str,
    cluster_set: tuple[str, ...],
    nodes: int,
    days: float | None,
    seed: int,
    trials: int,
    objective: str,
    interval_s: float | None,
    spares: int | None,
    tier: str | None,
    elastic: str | None,
    time_limit: str | None,
    calibration: str | None,
    software: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Simulate a campaign of CONFIG on a cluster: failures, restarts, queues, checkpoints, spares.

    Prints days, money and goodput as percentiles over seeded trials, where the lost time goes, and which interval, checkpoint tier, number
    of spares and policy is best. Failure rates by class of component are published ones (planner/failures.yaml); all times are options, so
    that a run can be predicted from measured ones (`ridge goodput`). Needs neither a GPU nor JAX.
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.load import load
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.planner.campaign.inputs import Given, inputs
    from ridgeline.planner.campaign.report import Wanted, make_report, report_json

    resolved = load(config, overrides).config
    site = load_cluster(cluster, cluster_set).config
    stated = Given(**given, time_limit_s=_time_limit_s(time_limit, site))
    found = inputs(resolved, site, load_calibration(calibration, software), nodes, days, stated)
    elastic = elastic or ("shrink" if resolved.elastic.min_nodes is not None else "wait")
    wanted = Wanted(interval_s, spares, tier, elastic)  # type: ignore[arg-type]  # click.Choice allows only these literals
    _check(wanted, nodes, site)
    report = make_report(found, wanted, objective=objective, trials=trials, seed=seed)  # type: ignore[arg-type]
    if as_json:
        print_json({"config": resolved.name, "cluster": site.name} | report_json(report))
        return
    from ridgeline.cli.printing.simulate import print_report

    print_report(report, resolved, site)


def _time_limit_s(text: str | None, site: ClusterConfig) -> float | None:
    """Return the time limit of a job: the option's, else the cluster's longest. Raises UserError."""
    from ridgeline.launch.slurm.units import parse_time_s

    if text is not None:
        return parse_time_s(text, "--time-limit")
    return None if site.slurm.max_time is None else parse_time_s(site.slurm.max_time, "slurm.max_time")


def _check(wanted: Wanted, nodes: int, site: ClusterConfig) -> None:
    """Raise UserError for more spares than the cluster has nodes left."""
    from ridgeline.configs.errors import UserError

    if wanted.spares is not None and site.nodes is not None and nodes + wanted.spares > site.nodes:
        raise UserError(f"--spares {wanted.spares}: cluster '{site.name}' has {site.nodes - nodes:,} nodes beside those of the job")
