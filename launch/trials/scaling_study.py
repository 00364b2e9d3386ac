"""Scaling studies: measure a config at several scales, or collect finished runs, and return what `explain.study` needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.explain.diagnosis.several import differing_keys, is_weak
from ridgeline.explain.study.measured import MeasuredRun, read_measured
from ridgeline.explain.study.scaling import Question, Scale, mesh_text, scales_of
from ridgeline.launch.trials import local, slurm
from ridgeline.launch.trials.scales import VARIED, VARIED_WEAK, ScalingRequest, growing_axis, output_of, prediction, settings_of
from ridgeline.launch.trials.study import Setting, Trials, known_numbers
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.search import Objective
from ridgeline.rundir.directory import RunDir, cluster_price

Report = Callable[[str], None]


@dataclass(frozen=True)
class StudyOptions:
    """How a study is run and judged."""

    objective: Objective = "time"
    repeats: int = 1
    warmup_steps: int | None = None
    tokens: float | None = None
    """Tokens of the real run, for its time to solution and cost."""
    per_process: int | None = None
    """On a CPU: devices of one process; None: all devices in one process."""
    cluster: ClusterConfig | None = None
    """Run through Slurm on this cluster; for finished runs: the cluster they ran on."""
    predict: ClusterConfig | None = None
    """Compare with the planner's predictions for this cluster; `cluster` has precedence."""
    time_limit: str | None = None
    preflight: bool = True
    at_once: int | None = None
    """Jobs that may be pending or running at once; None: all."""
    calibration: str | None = None
    price_usd: float | None = None
    """Of one device and hour; None: the cluster's."""
    retry: bool = False
    """Run failed trials again."""


@dataclass(frozen=True)
class Study:
    """The measured scales and the question to answer."""

    name: str
    scales: list[Scale]
    question: Question
    facts: dict[str, Any]
    """Further facts for the document: where the runs ran, the mesh axis that grows, the CPU cores."""
    output: Path | None = field(default=None)
    """Directory of the study; None for finished runs."""


def study_of_runs(paths: Sequence[Path], options: StudyOptions) -> Study:
    """Collect finished runs into scales. Raises UserError when they differ in more than their scale."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run is named twice: compare different run directories")
    runs = [read_measured(path, warmup_steps=options.warmup_steps) for path in paths]
    weak = len({run.config.data.batch_size for run in runs}) > 1
    varied = VARIED_WEAK if weak else VARIED
    others = [key for key in differing_keys(runs) if not key.startswith(varied)]
    if weak and not is_weak(runs):
        others.append("data.batch_size (not proportional to the devices)")
    if others:
        raise UserError(f"these runs differ in more than their scale: {', '.join(others)}; a scaling study changes only the scale")
    site = options.cluster or options.predict
    scales = [_scale(scale.devices, scale.runs, (), None, site, options) for scale in scales_of(runs)]
    question = _question(options, weak)
    if question.price_usd is None:
        question = replace(question, price_usd=RunDir(runs[0].path).price)
    return Study(runs[0].name, scales, question, {"where": "finished runs"})


def run_study(request: ScalingRequest, output: Path | None, options: StudyOptions, report: Report) -> Study:
    """Run the missing trials of a study, and return all of its scales. A scale that the study already has is kept.

    Args:
      request: the config and the scales, in devices.
      output: directory of the study; None: runs/NAME-strong or runs/NAME-weak.
      report: called with one line per event.

    Raises UserError for a config or scale that cannot run, and KeyboardInterrupt; finished trials are kept.
    """
    site = options.cluster
    output = output_of(request.base, output, "weak" if request.weak else "strong")
    request = replace(request, devices=sorted({*request.devices, *known_numbers(output, "devices")}))
    nodes = None if site is None else {devices: devices // site.devices_per_node for devices in request.devices}
    settings, cpu = _settings(request, nodes, options.per_process)
    trials = Trials(output, settings, options.repeats, VARIED_WEAK if request.weak else VARIED)
    if options.retry:
        trials.forget_failures()
    try:
        _run(trials, cpu, options, report)
    except KeyboardInterrupt:
        finished = len(trials.trials) - len(trials.to_do())
        report(f"interrupted: {finished} of {len(trials.trials)} runs are finished; run the same command again to continue")
        raise
    known = site if site is not None else options.predict
    scales = []
    for setting in settings:
        outcome = trials.outcome(setting, options.warmup_steps)
        scales.append(_scale(setting.devices, outcome.runs, outcome.failures, setting.nodes, known, options))
    where = f"Slurm, {site.name}" if site is not None else "this machine, virtual CPU devices" if cpu else "this machine"
    facts = {"where": where, "axis": growing_axis(request.base, request.axis), "cores": os.cpu_count() if cpu and site is None else None}
    return Study(request.base.name, scales, _question(options, request.weak), facts, output)


def _settings(request: ScalingRequest, nodes: dict[int, int] | None, per_process: int | None) -> tuple[list[Setting], bool]:
    """Return the settings, and whether they run on virtual CPU devices of this machine."""
    if per_process is not None and (nodes is not None or not local.on_cpu(request.base, os.environ)):
        raise UserError("--per-process is for virtual CPU devices of this machine; the GPUs of one machine are used by one process")
    if nodes is not None:
        return settings_of(request, nodes=nodes), False
    if not local.on_cpu(request.base, os.environ):
        return settings_of(request, check=local.check_devices_here), False
    return settings_of(request, per_process=lambda devices: devices // local.processes_of(devices, per_process)), True


def _run(trials: Trials, cpu: bool, options: StudyOptions, report: Report) -> None:
    if options.cluster is None:
        local.run_all(trials, processes=lambda t: local.processes_of(t.setting.devices, options.per_process), cpu=cpu, log=report)
    else:
        slurm.run_all(trials, slurm.Site(options.cluster, options.time_limit, options.preflight, options.at_once), report)


def _scale(
    devices: int,
    runs: Sequence[MeasuredRun],
    failures: Sequence[str],
    nodes: int | None,
    site: ClusterConfig | None,
    options: StudyOptions,
) -> Scale:
    config = runs[0].config if runs else None
    if config is None:
        return Scale(devices, (), failures, nodes)
    predicted = prediction(config, devices, runs[0].device_kind, site, load_calibration(options.calibration))
    return Scale(devices, runs, failures, nodes, mesh_text(config, devices), config.data.batch_size, predicted)


def _question(options: StudyOptions, weak: bool) -> Question:
    price = options.price_usd
    if price is None and options.cluster is not None:
        price = cluster_price(options.cluster)
    return Question(options.objective, weak, price, options.tokens)
