"""`ridge scale CONFIG --devices 1,2,4,8`: measure the same work at several scales, and recommend one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import FiniteRange, Int32Range, json_option, parse_counts
from ridgeline.cli.progress import print_progress
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG [KEY=VALUE]... | --from RUN...")
@click.option("--from", "from_runs", is_flag=True, help="Compare finished RUNs, given in place of CONFIG; start nothing.")
@click.option("--devices", metavar="N[,N...]", help="Scales in devices: virtual CPU devices or GPUs of this machine, or of --cluster.")
@click.option("--nodes", "-N", metavar="N[,N...]", help="Scales in nodes, through Slurm (with --cluster).")
@click.option("--weak/--strong", default=False, help="Weak: the batch grows with the devices. Strong: it stays the same [default: strong].")
@click.option("--axis", type=click.Choice(["data", "fsdp", "tensor"]), help="Mesh axis that grows [default: the one set to -1].")
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "efficiency"]),
    default="time",
    show_default=True,
    help="Basis of the recommended scale: earliest end, least money, or parallel efficiency.",
)
@click.option("--repeats", type=Int32Range(min=1), default=1, show_default=True, help="Runs of each scale; three or more show the noise.")
@click.option("--warmup", "warmup_steps", type=Int32Range(min=0), help="Steps to exclude from the speed [default: the first log line].")
@click.option("--tokens", type=FiniteRange(min=1), help="Tokens of the real run, to estimate its duration and cost at each scale.")
@click.option("--per-process", type=Int32Range(min=1), help="Virtual CPU devices per process [default: all in one process].")
@click.option("--cluster", "-c", help="Cluster file or name: run there through Slurm. Its links and price are used in the analysis.")
@click.option("--cluster-set", multiple=True, metavar="KEY=VALUE", help="Override a key of the cluster file; repeatable.")
@click.option("--time", "time_limit", help="Time limit of each job in Slurm's format.")
@click.option("--no-preflight", is_flag=True, help="Start jobs without `ridge doctor`.")
@click.option("--at-once", type=Int32Range(min=1), help="Maximum number of pending and running jobs [default: all].")
@click.option("--predict", metavar="CLUSTER", help="Show the planner's predictions for this cluster beside the measurements.")
@click.option("--calibration", metavar="FILE", help="Calibration file for the predictions, from `ridge calibrate`.")
@click.option("--price", "price_usd", type=FiniteRange(min=0), help="Price of one device per hour in USD; overrides the cluster's.")
@click.option("--retry", is_flag=True, help="Run failed trials again.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Directory of the study [default: runs/NAME-strong or -weak].")
@json_option
def scale(
    arguments: tuple[str, ...],
    from_runs: bool,
    devices: str | None,
    nodes: str | None,
    weak: bool,
    axis: str | None,
    cluster: str | None,
    cluster_set: tuple[str, ...],
    no_preflight: bool,
    predict: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run CONFIG at several scales and recommend the scale at which to stop.

    Only the number of devices changes, and with --weak the batch size in proportion. Warm-up steps are excluded. A scale that fails is a
    row with its reason. The same command runs only what is missing; Ctrl-C keeps all finished runs.

    OUTPUT contains study.json, study.md and plots; `ridge diagnose OUTPUT` and `ridge report OUTPUT` read them.
    """
    from ridgeline.cli.printing.study import print_study
    from ridgeline.cli.slurm import read_cluster
    from ridgeline.explain.report.study import findings_of
    from ridgeline.explain.report.study_charts import charts
    from ridgeline.explain.study.document import write_study
    from ridgeline.explain.study.scaling import scaling_study
    from ridgeline.launch.trials.scales import ScalingRequest
    from ridgeline.launch.trials.scaling_study import StudyOptions, run_study, study_of_runs

    if from_runs:
        _reject_run_options(
            devices=devices, nodes=nodes, axis=axis, **{name: options[name] for name in ("time_limit", "at_once", "per_process")}
        )
    site = None if cluster is None else read_cluster(cluster, cluster_set)
    other = None if predict is None else read_cluster(predict, cluster_set if from_runs and cluster is None else ())
    settings = StudyOptions(cluster=site, predict=other, preflight=not no_preflight, **options)
    if from_runs:
        study = study_of_runs([Path(argument) for argument in arguments], settings)
    else:
        request = ScalingRequest(arguments[0], tuple(arguments[1:]), _scales(devices, nodes, site), weak, axis)
        study = run_study(request, output, settings, print_progress)
    question = study.question
    found = scaling_study(study.name, study.scales, question, **study.facts)
    found["findings"] = findings_of([r for one in study.scales for r in one.runs], price_usd=question.price_usd, tokens=question.tokens)
    directory = study.output or output
    if directory is not None:
        write_study(found, directory, charts(found))
    print_study(found, directory, as_json=as_json)


def _reject_run_options(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(f"--{name.replace('_limit', '').replace('_', '-')} cannot be used with --from, which starts no runs")


def _scales(devices: str | None, nodes: str | None, site: ClusterConfig | None) -> list[int]:
    """Return the requested scales in devices. Raises UserError."""
    if site is None:
        if nodes is not None:
            raise UserError("--nodes needs --cluster; on this machine use --devices")
        if devices is None:
            raise UserError(
                "no scales given: use --devices 1,2,4 on this machine, --nodes 1,2,4 with --cluster, or --from with finished runs"
            )
        return parse_counts("--devices", devices, distinct=True)
    per_node = site.devices_per_node
    if nodes is not None:
        return [count * per_node for count in parse_counts("--nodes", nodes, distinct=True)]
    if devices is None:
        raise UserError(f"no scales given: use --nodes 1,2,4 ({per_node} devices per node)")
    counts = parse_counts("--devices", devices, distinct=True)
    partial = [count for count in counts if count % per_node]
    if partial:
        raise UserError(f"--devices {partial[0]}: jobs use whole nodes, and nodes of {site.name} have {per_node} devices")
    return counts
