"""`ridge scale CONFIG --devices 1,2,4,8`: the same work at several scales, and where to stop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ridgeline.cli.options import json_option
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.explain.study.measured import MeasuredRun
    from ridgeline.explain.study.scaling import Objective
    from ridgeline.explain.study.study import Question, Scale
    from ridgeline.launch.trials.engine import Setting, Trials
    from ridgeline.launch.trials.scales import Asked


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG [KEY=VALUE]... | --from RUN...")
@click.option("--from", "from_runs", is_flag=True, help="Analyse finished runs, given instead of CONFIG; run nothing.")
@click.option("--devices", metavar="N[,N...]", help="Scales on this machine: virtual CPU devices, or GPUs. With --cluster: of its nodes.")
@click.option("--nodes", "-N", metavar="N[,N...]", help="Scales through Slurm, in nodes (with --cluster).")
@click.option("--weak/--strong", default=False, help="Batch grows with the devices, or the work stays the same [default: strong].")
@click.option("--axis", type=click.Choice(["data", "fsdp", "tensor"]), help="Mesh axis that grows [default: the one that is -1].")
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "efficiency"]),
    default="time",
    show_default=True,
    help="What decides where to stop: earliest end, least money, or parallel efficiency.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each scale; three show the scatter.")
@click.option("--warmup", "warmup_steps", type=click.IntRange(min=0), help="Steps left out of the speed [default: the first log line].")
@click.option("--tokens", type=click.FloatRange(min=1), help="Tokens of the real run: its time to solution and cost at the measured rates.")
@click.option("--per-process", type=click.IntRange(min=1), help="On CPU: devices of one process [default: all in one process].")
@click.option("--cluster", "-c", help="Cluster file or name: run through Slurm there; links and price for the analysis.")
@click.option("--cluster-set", multiple=True, metavar="KEY=VALUE", help="Override a key of the cluster file; repeatable.")
@click.option("--time", "time_limit", help="Time limit of each job as Slurm writes it.")
@click.option("--no-preflight", is_flag=True, help="Jobs start without `ridge doctor`.")
@click.option("--at-once", type=click.IntRange(min=1), help="Jobs that may wait or run at once [default: all].")
@click.option("--predict", metavar="CLUSTER", help="Cluster file whose planner predictions are shown beside what was measured here.")
@click.option("--calibration", metavar="FILE", help="Rates measured by `ridge calibrate`, for the predictions.")
@click.option("--price", "price_usd", type=click.FloatRange(min=0), help="Price of one device for an hour, USD; wins over the cluster's.")
@click.option("--retry", is_flag=True, help="Make failed runs again.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Directory of the study [default: runs/NAME-strong or -weak].")
@json_option
def scale(arguments: tuple[str, ...], from_runs: bool, output: Path | None, as_json: bool, **options: Any) -> None:
    """Run CONFIG at several scales and say where to stop.

    One thing changes: the devices (with --weak also the batch, in proportion to the smallest scale's). Warm-up is left out, failed
    scales are rows with their reason, and the same command makes only what is missing; Ctrl-C loses nothing that is finished.
    The result is in OUTPUT: study.json, study.md, pictures; `ridge diagnose OUTPUT` and `ridge report OUTPUT` read it.
    """
    from ridgeline.cli.study_files import show_study, write_study
    from ridgeline.explain.report.study import findings_of
    from ridgeline.explain.report.study_charts import charts
    from ridgeline.explain.study.study import document
    from ridgeline.explain.study.table import COLUMNS

    if from_runs:
        name, scales, question, more = _from_runs(arguments, options)
    else:
        name, scales, question, more, output = _made(arguments, output, options)
    study = document(name, scales, question, **more)
    study["findings"] = findings_of([r for one in scales for r in one.runs], price_usd=question.price_usd, tokens=question.tokens)
    if output is not None:
        write_study(study, output, charts(study), COLUMNS)
    show_study(study, output, as_json=as_json)


def say(line: str) -> None:
    """Tell progress, beside the answer."""
    click.echo(line, err=True)


def _from_runs(arguments: Sequence[str], options: dict[str, Any]) -> tuple[str, list[Scale], Question, dict[str, Any]]:
    """Gather finished runs into scales; they must differ in their scale only."""
    from ridgeline.explain.diagnosis.several import differing_keys, is_weak
    from ridgeline.explain.study.measured import read_measured
    from ridgeline.explain.study.study import scales_of
    from ridgeline.launch.trials.scales import VARIED, VARIED_WEAK
    from ridgeline.rundir.money import run_price

    for name in ("devices", "nodes", "axis", "time_limit", "at_once", "per_process"):
        if options[name] is not None:
            raise UserError(f"--{name.replace('_limit', '').replace('_', '-')} says how to run a config; with --from nothing is run")
    paths = [Path(argument) for argument in arguments]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run is named twice: compare different run directories")
    runs = [read_measured(path, warmup_steps=options["warmup_steps"]) for path in paths]
    weak = len({run.config.data.batch_size for run in runs}) > 1
    varied = VARIED_WEAK if weak else VARIED
    others = [key for key in differing_keys(runs) if not key.startswith(varied)]
    if weak and not is_weak(runs):
        others.append("data.batch_size (not in proportion to the devices)")
    if others:
        raise UserError(f"these runs differ in more than their scale: {', '.join(others)}; a scaling study changes one thing")
    site = _site(options["cluster"] or options["predict"], options["cluster_set"])
    scales = [_scale(scale.devices, scale.runs, (), None, site, options) for scale in scales_of(runs)]
    question = _question(options, site, weak)
    if question.price_usd is None:
        question = replace(question, price_usd=run_price(runs[0].path))
    return runs[0].name, scales, question, {"where": "finished runs"}


def _made(
    arguments: Sequence[str], output: Path | None, options: dict[str, Any]
) -> tuple[str, list[Scale], Question, dict[str, Any], Path]:
    """Run what is missing of a study; return its scales and directory."""
    from ridgeline.launch.trials.engine import Trials, known_numbers
    from ridgeline.launch.trials.scales import VARIED, VARIED_WEAK, Asked, growing_axis, output_of

    site = _site(options["cluster"], options["cluster_set"])
    wanted = _wanted(options, site)
    asked = Asked(arguments[0], tuple(arguments[1:]), wanted, options["weak"], options["axis"])
    output = output_of(asked.base, output, "weak" if asked.weak else "strong")
    asked = replace(asked, devices=sorted({*wanted, *known_numbers(output, "devices")}))  # a study keeps the scales it has
    nodes = None if site is None else {devices: devices // site.devices_per_node for devices in asked.devices}
    settings, cpu = _settings(asked, nodes, options["per_process"])
    trials = Trials(output, settings, options["repeats"], VARIED_WEAK if asked.weak else VARIED)
    if options["retry"]:
        trials.forget_failures()
    try:
        _run(trials, site, cpu, options)
    except KeyboardInterrupt:
        say(f"interrupted: {len(trials.trials) - len(trials.to_do())} of {len(trials.trials)} runs are done; the same command goes on")
        raise
    known = site if site is not None else _site(options["predict"], ())
    scales = []
    for setting in settings:
        outcome = trials.outcome(setting, options["warmup_steps"])
        scales.append(_scale(setting.devices, outcome.runs, outcome.failures, setting.nodes, known, options))
    where = f"Slurm, {site.name}" if site is not None else "this machine, virtual CPU devices" if cpu else "this machine"
    more = {"where": where, "axis": growing_axis(asked.base, asked.axis), "cores": os.cpu_count() if cpu and site is None else None}
    return asked.base.name, scales, _question(options, site, asked.weak), more, output


def _wanted(options: dict[str, Any], site: ClusterConfig | None) -> list[int]:
    """Return the scales that were asked for, in devices."""
    from ridgeline.launch.trials.scales import parse_counts

    nodes, devices = options["nodes"], options["devices"]
    if site is None:
        if nodes is not None:
            raise UserError("--nodes needs --cluster: on this machine scales are --devices")
        if devices is None:
            raise UserError("which scales? --devices 1,2,4 on this machine, --nodes 1,2,4 with --cluster, or --from with finished runs")
        return parse_counts(devices, "--devices")
    per_node = site.devices_per_node
    if nodes is not None:
        return [count * per_node for count in parse_counts(nodes, "--nodes")]
    if devices is None:
        raise UserError(f"which scales? --nodes 1,2,4 (of {per_node} devices each)")
    counts = parse_counts(devices, "--devices")
    partial = [count for count in counts if count % per_node]
    if partial:
        raise UserError(f"--devices {partial[0]}: nodes of {site.name} have {per_node} devices, and jobs take whole nodes")
    return counts


def _settings(asked: Asked, nodes: dict[int, int] | None, per_process: int | None) -> tuple[list[Setting], bool]:
    """Return the settings, and whether they run on virtual CPU devices of this machine."""
    from ridgeline.launch.trials.local import check_devices_here, on_cpu, processes_of
    from ridgeline.launch.trials.scales import settings_of

    if per_process is not None and (nodes is not None or not on_cpu(asked.base, os.environ)):
        raise UserError("--per-process divides virtual CPU devices of this machine; GPUs of one machine are run from one process")
    if nodes is not None:
        return settings_of(asked, nodes=nodes), False
    if not on_cpu(asked.base, os.environ):
        return settings_of(asked, check=check_devices_here), False
    return settings_of(asked, per_process=lambda devices: devices // processes_of(devices, per_process)), True


def _run(trials: Trials, site: ClusterConfig | None, cpu: bool, options: dict[str, Any]) -> None:
    from ridgeline.launch.trials import local, slurm

    if site is None:
        local.run_all(trials, processes=lambda t: local.processes_of(t.setting.devices, options["per_process"]), cpu=cpu, say=say)
    else:
        where = slurm.Site(site, options["time_limit"], not options["no_preflight"], options["at_once"])
        slurm.run_all(trials, where, say)


def _scale(
    devices: int,
    runs: Sequence[MeasuredRun],
    failures: Sequence[str],
    nodes: int | None,
    site: ClusterConfig | None,
    options: dict[str, Any],
) -> Scale:
    from ridgeline.explain.study.study import Scale, mesh_text
    from ridgeline.launch.trials.scales import prediction
    from ridgeline.planner.calibration import load_calibration

    config = runs[0].config if runs else None
    if config is None:
        return Scale(devices, (), failures, nodes)
    predicted = prediction(config, devices, runs[0].device_kind, site, load_calibration(options["calibration"]))
    return Scale(devices, runs, failures, nodes, mesh_text(config, devices), config.data.batch_size, predicted)


def _question(options: dict[str, Any], site: ClusterConfig | None, weak: bool) -> Question:
    from ridgeline.explain.study.study import Question
    from ridgeline.rundir.money import cluster_price

    price = options["price_usd"]
    if price is None and options["cluster"] is not None and site is not None:
        price = site.price_per_device_hour_usd if site.price_per_device_hour_usd is not None else cluster_price(options["cluster"])
    return Question(cast("Objective", options["objective"]), weak, price, options["tokens"])


def _site(cluster: str | None, overrides: Sequence[str]) -> ClusterConfig | None:
    from ridgeline.cli.commands.submit import read_cluster

    return None if cluster is None else read_cluster(cluster, overrides)
