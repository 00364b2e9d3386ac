"""`ridge ladder CONFIG --sizes 64,128,192,256`: train several sizes, fit the scaling law of the loss, predict a target and its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeline.cli.options import COUNT, MEMBERS, FiniteRange, Int32Range, config_arguments, json_option, parse_counts
from ridgeline.cli.progress import print_progress
from ridgeline.configs.errors import UserError


@click.command()
@config_arguments
@click.option(
    "--sizes",
    required=True,
    metavar="SIZE,SIZE[,...]",
    help="Widths (256), widths x layers (256x8) or numbers of parameters (10M); other dims keep the proportions of CONFIG.",
)
@click.option(
    "--tokens-per-parameter",
    type=FiniteRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Tokens of each run per parameter that processes a token.",
)
@click.option("--repeats", type=Int32Range(min=1), default=1, show_default=True, help="Seeds of each size; two or more show the noise.")
@click.option("--loss", metavar="SET|training", help="Loss to fit [default: the first evaluation set, else the training loss].")
@click.option("--target", metavar="CONFIG", help="Config whose model to predict [default: CONFIG].")
@click.option("--budget-flops", type=COUNT, help="Compute of the recommended model [default: that of the target].")
@click.option("--cluster", "-c", help="Cluster file or name: the planner's time and cost there; with --nodes, also train there.")
@click.option("--cluster-set", multiple=True, metavar="KEY=VALUE", help="Override a key of the cluster file; repeatable.")
@click.option("--target-nodes", default="1", show_default=True, metavar="N[,N...]", help="Node counts to plan the target for.")
@click.option("--calibration", metavar="FILE", help="Calibration file for the plan, from `ridge calibrate`.")
@click.option("--nodes", "-N", type=MEMBERS, help="Train through Slurm on --cluster, on this number of nodes per run.")
@click.option("--time", "time_limit", help="Time limit of each job in Slurm's format.")
@click.option("--no-preflight", is_flag=True, help="Start jobs without `ridge doctor`.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Directory of the ladder [default: runs/NAME-ladder].")
@json_option
def ladder(
    config: str,
    overrides: tuple[str, ...],
    sizes: str,
    cluster: str | None,
    cluster_set: tuple[str, ...],
    target_nodes: str,
    no_preflight: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train CONFIG at several sizes, fit the loss as a function of compute, and predict a larger model.

    Sizes are trained on this machine one after another, or with --nodes through Slurm. The same command runs only what is missing; Ctrl-C
    saves the running size. Prints the fitted law with 90 % intervals, the largest size predicted from the smaller ones, the loss of the
    target, the model that a budget buys, and with --cluster what both cost.

    OUTPUT contains study.json, study.md and plots; `ridge report OUTPUT` shows them.
    """
    from ridgeline.cli.printing.study import print_study
    from ridgeline.cli.slurm import read_cluster
    from ridgeline.explain.report.ladder_charts import ladder_charts
    from ridgeline.explain.study.document import write_study
    from ridgeline.explain.study.ladder import ladder_study
    from ridgeline.launch.trials.ladder import LadderOptions, run_ladder

    if cluster is None:
        for name in ("nodes", "calibration", "time_limit"):
            if options[name] is not None:
                raise UserError(f"--{name.removesuffix('_limit')} needs --cluster")
    if options["nodes"] is None and options["time_limit"] is not None:
        raise UserError("--time is for Slurm: it needs --nodes")
    site = None if cluster is None else read_cluster(cluster, cluster_set)
    nodes = parse_counts("--target-nodes", target_nodes, distinct=True)
    settings = LadderOptions(cluster=site, preflight=not no_preflight, target_nodes=nodes, **options)
    made = run_ladder(config, overrides, sizes, output, settings, print_progress)
    found = ladder_study(made.name, made.sizes, made.question)
    write_study(found, made.output, ladder_charts(found))
    print_study(found, made.output, as_json=as_json)
