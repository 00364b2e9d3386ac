"""Scaling-law ladders: train several sizes of a config with the machinery of sweeps, and return what `explain.study.ladder` needs.

The directory is that of a sweep (launch/trials/sweep.py), one point per size and seed, with the study's files beside. An interrupted run
continues where it saved; finished runs do not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config
from ridgeline.explain.study.ladder import LadderQuestion, MeasuredSize, Planned
from ridgeline.explain.study.ladder_document import PlannedCost
from ridgeline.launch.slurm import filesystems
from ridgeline.launch.slurm.shape import job_shape
from ridgeline.launch.slurm.submit import Submitter
from ridgeline.launch.trials import sweep as on_disk
from ridgeline.launch.trials.engine import SWEEP, TrialFiles
from ridgeline.launch.trials.ladder_sizes import Size, nearest_width, scaled_model, sizes_of
from ridgeline.launch.trials.sweep_file import Point, Sweep, SweepConfig
from ridgeline.launch.trials.sweep_local import run_sweep
from ridgeline.loaders.loader import read_manifests
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.parameters import count_parameters
from ridgeline.planner.plan import make_plan
from ridgeline.rundir.directory import METRICS_FILE, read_metrics

Report = Callable[[str], None]
POLL_S = 3.0
LAST_SHARE = 0.1
"""Share of the steps at the end of a run over which its training loss is averaged."""
TRAINING = "training"


@dataclass(frozen=True)
class LadderOptions:
    """How a ladder is run and what it is asked."""

    tokens_per_parameter: float = 20.0
    repeats: int = 1
    """Seeds of each size."""
    loss: str | None = None
    """`training` or an evaluation set; None: the first evaluation set, else `training`."""
    target: str | None = None
    """Config whose model is the target; None: the ladder's."""
    budget_flops: float | None = None
    """None: the compute of the target."""
    cluster: ClusterConfig | None = None
    """For the plan, and with `nodes` where the sizes are trained."""
    nodes: int | None = None
    """Nodes of each run, through Slurm; None: on this machine."""
    target_nodes: Sequence[int] = (1,)
    """Node counts that the plan of the target may use."""
    calibration: str | None = None
    time_limit: str | None = None
    preflight: bool = True


@dataclass(frozen=True)
class Ladder:
    """The runs of a ladder so far, and the question to answer."""

    name: str
    sizes: list[MeasuredSize]
    question: LadderQuestion
    output: Path


def run_ladder(config: str, overrides: Sequence[str], sizes: str, output: Path | None, options: LadderOptions, report: Report) -> Ladder:
    """Train what is missing, and return the ladder.

    Raises UserError for a config or size that cannot run, and KeyboardInterrupt; finished runs are kept, and the interrupted one saves.
    """
    base = load(config, overrides).config
    loss_of = _loss_name(base, options.loss)
    made = sizes_of(config, overrides, sizes, options.tokens_per_parameter)
    question = _question(base, made, loss_of, options)
    sweep = _sweep(base, made, output, options.repeats)
    _refuse_other_config(sweep)
    try:
        if options.nodes is None:
            chosen = _missing(sweep)
            if len(chosen) < len(sweep.points):
                report(f"{len(sweep.points) - len(chosen)} of {len(sweep.points)} runs are finished")
            if chosen:
                run_sweep(sweep, chosen, report)
        else:
            _run_on_cluster(sweep, options, report)
    except KeyboardInterrupt:
        done = len(sweep.points) - len(_missing(sweep))
        report(f"interrupted: {done} of {len(sweep.points)} runs are finished or submitted; run the same command again to continue")
        raise
    return Ladder(base.name, _measured(sweep, made, options.repeats, loss_of), question, sweep.directory)


def _loss_name(config: Config, wanted: str | None) -> str:
    """Return which loss is fitted. Raises UserError for an unknown set."""
    known = [*config.evaluation.sets, TRAINING]
    if wanted is not None and wanted not in known:
        raise unknown_name("--loss", wanted, known)
    return wanted or known[0]


def _sweep(base: Config, sizes: Iterable[Size], output: Path | None, repeats: int) -> Sweep:
    """Return the sweep of all sizes, each with its seeds; all sizes of a seed before the next seed."""
    points = []
    sizes = list(sizes)
    for seed in range(base.seed, base.seed + repeats):
        for size in sizes:
            points.append(Point({**size.overrides, "seed": seed}, size.config.model_copy(update={"seed": seed})))
    directory = output or Path("runs") / f"{base.name}-ladder"
    return Sweep(directory, SweepConfig(name=f"{base.name}-ladder", config=base.name, directory=directory), tuple(points))


def _refuse_other_config(sweep: Sweep) -> None:
    """Raise UserError when a run of the directory was started with another config."""
    files = TrialFiles(sweep.directory, SWEEP)
    for number, point in on_disk.numbered(sweep):
        name = on_disk.point_name(number.index)
        if not files.config_file(name).exists():
            continue
        stored = files.config(name)
        changed = files.changes(name, point.config.model_copy(update={"name": stored.name, "run_dir": stored.run_dir, "mesh": stored.mesh}))
        if changed:
            raise UserError(f"{sweep.directory} holds runs with another config ({', '.join(changed)}): choose another --output")


def _missing(sweep: Sweep) -> on_disk.Chosen:
    found = on_disk.results(sweep.directory) if on_disk.is_sweep(sweep.directory) else []
    return on_disk.to_do(sweep, found)


def _run_on_cluster(sweep: Sweep, options: LadderOptions, report: Report) -> None:
    """Submit what is missing as a job array and wait for it. Ctrl-C ends the wait, not the jobs."""
    assert options.cluster is not None and options.nodes is not None
    chosen = _missing(sweep)
    if chosen:
        shape = job_shape(options.cluster, options.nodes, options.time_limit)
        by = Submitter.here(datetime.now(UTC))
        jobs = on_disk.submission(sweep, chosen, options.cluster, shape, by, preflight=options.preflight)
        if errors := [finding.message for finding in jobs.lint(filesystems.read_mounts()) if finding.error]:
            raise UserError("; ".join(errors))
        on_disk.write_points(sweep)
        (number,) = jobs.submit()
        report(f"job array {number}: {len(chosen)} of {len(sweep.points)} runs submitted")
    reported = ""
    while True:
        found = on_disk.results(sweep.directory)
        states = [result.state for result in found]
        text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        if text != reported:
            report(text)
            reported = text
        if not any(result.busy for result in found):
            return
        time.sleep(POLL_S)


def _measured(sweep: Sweep, sizes: Sequence[Size], repeats: int, loss_of: str) -> list[MeasuredSize]:
    found = {result.point.index: result for result in on_disk.results(sweep.directory)} if on_disk.is_sweep(sweep.directory) else {}
    numbers = [number for number, _ in on_disk.numbered(sweep)]
    measured = []
    for place, size in enumerate(sizes):
        results = [found.get(numbers[place + seed * len(sizes)].index) for seed in range(repeats)]
        finished = [result for result in results if result is not None and result.finished]
        failures = [result.problem or result.state for result in results if result is not None and not result.finished]
        losses: dict[str, float] = {}
        for result in finished:
            try:
                losses[str(result.point.directory)] = _final_loss(result.point.directory, loss_of, size.config.trainer.steps)
            except UserError as error:
                failures.append(str(error))
        model = size.config.model
        measured.append(
            MeasuredSize(
                name=size.name,
                embed_dim=model.embed_dim,
                num_layers=model.num_layers,
                params=size.params,
                tokens=size.tokens,
                steps=size.config.trainer.steps,
                flops=size.flops,
                runs=list(losses),
                losses=list(losses.values()),
                failures=failures,
            )
        )
    return measured


def _final_loss(run: Path, loss_of: str, steps: int) -> float:
    """Return the last loss of an evaluation set, or the mean training loss of the last steps. Raises UserError without one."""
    records = read_metrics(run / METRICS_FILE)
    if loss_of != TRAINING:
        values = [record[key] for record in records if (key := f"eval/{loss_of}/loss") in record][-1:]
    else:
        lines = [record for record in records if "train/loss" in record]
        last = [line for line in lines if line["step"] > (1 - LAST_SHARE) * steps] or lines[-1:]
        values = [line["train/loss"] for line in last]
    if not values:
        raise UserError(f"{run} has no {loss_of} loss")
    if not all(map(math.isfinite, values)):
        raise UserError(f"{run}: its last {loss_of} loss is not finite")
    return float(sum(values) / len(values))


def _question(base: Config, sizes: Sequence[Size], loss_of: str, options: LadderOptions) -> LadderQuestion:
    """Return what the ladder answers. Raises UserError for a target that is not a config."""
    doubts = _known_doubts(base, sizes)
    target, name = base, base.name
    if options.target is not None:
        model, name = load(options.target).config.model, Path(options.target).stem
        if model.vocab_size != base.model.vocab_size:
            doubts.append(f"the target has {model.vocab_size:,} token ids and the ladder {base.model.vocab_size:,}: their losses differ")
        target = base.model_copy(update={"model": model, "name": name})
    ratio, length = options.tokens_per_parameter, base.data.seq_len

    def flops(model: ModelConfig) -> float:
        return train_flops_per_token(model, length).total * ratio * count_parameters(model).active

    budget = options.budget_flops or flops(target.model)
    width = nearest_width(base.model, budget, lambda width: flops(scaled_model(base.model, width)))
    chosen = scaled_model(base.model, width)
    tokens = budget / train_flops_per_token(chosen, length).total
    recommended = base.model_copy(update={"model": chosen, "name": f"{width}x{chosen.num_layers}"})
    return LadderQuestion(
        tokens_per_parameter=ratio,
        loss_of=loss_of,
        target=_planned(target, ratio * count_parameters(target.model).active, flops(target.model), options),
        recommendation=_planned(recommended, tokens, budget, options),
        budget_flops=budget,
        where="this machine" if options.nodes is None or options.cluster is None else f"Slurm, {options.cluster.name}",
        doubts=doubts,
    )


def _known_doubts(base: Config, sizes: Sequence[Size]) -> list[str]:
    """Return the doubts that do not depend on the losses."""
    found = []
    if base.model.mup is None:
        found.append(
            "all sizes have the same learning rate; the best one falls with the width: set model.mup.base_embed_dim, so that it transfers"
        )
    tokens = sum(manifest.tokens for _, manifest in read_manifests(base.data))
    if (most := max(size.tokens for size in sizes)) > tokens:
        found.append(f"the largest run reads {most:.3g} tokens of a corpus of {tokens:.3g}: repeated text lowers the training loss")
    return found


def _planned(config: Config, tokens: float, flops: float, options: LadderOptions) -> Planned:
    model = config.model
    cost = None if options.cluster is None else _cost(config, tokens, options.cluster, options)
    return Planned(config.name, model.embed_dim, model.num_layers, count_parameters(model).active, tokens, flops, cost)


def _cost(config: Config, tokens: float, cluster: ClusterConfig, options: LadderOptions) -> PlannedCost:
    """Return what a run takes by the planner, or why there is no plan."""
    try:
        best = make_plan(config, cluster, load_calibration(options.calibration), options.target_nodes, tokens=tokens, top=1).best[0]
    except UserError as error:
        return {"cluster": cluster.name, "why_none": " ".join(str(error).split())}
    run = best.run
    return {
        "cluster": cluster.name,
        "nodes": best.nodes,
        "devices": best.step.devices,
        "days": run.days,
        "wall_days": run.wall_days,
        "device_hours": run.wall_device_hours,
        "usd": run.cost_usd,
        "wall_usd": run.wall_cost_usd,
        "mfu": best.step.mfu,
        "layout": best.layout.text(),
    }
