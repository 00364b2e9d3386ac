"""A whole plan (`ridge plan`): search, limits, ranking, bottleneck, alternatives and the scaling table, and its JSON form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.context import context_method
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural
from ridgeline.configs.schema import Config
from ridgeline.planner.advice import Alternative, Bottleneck, alternatives, bottleneck, stages_sentence
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.config_changes import ChunkChange, larger_loss_chunk, lower_precision_state, offloaded_state
from ridgeline.planner.economics import Spot, price_text
from ridgeline.planner.experts import exchange_method
from ridgeline.planner.hardware import hardware
from ridgeline.planner.layouts import dividing_nodes
from ridgeline.planner.memory import MemoryEstimate
from ridgeline.planner.overlap import Communication
from ridgeline.planner.ranges import Range, step_range
from ridgeline.planner.scaling import ScalingRow, scaling_table, worth_until
from ridgeline.planner.search import Candidate, Limits, Objective, Rejection, Scale, capacity_bytes, ranked, search, search_scale, within
from ridgeline.planner.step_time import Machine

LARGEST_SUGGESTION = 4096
"""Largest number of nodes that is tried when looking for a layout that fits."""
MOST_TRIED = 24
"""Numbers of nodes that are tried for it."""
COMPILED_ABOVE = 0.9
"""Share of the usable memory above which the best layout is compiled, where that is possible: plans are exact to a few per cent."""
EXPERTS_COMPILED_ABOVE = 0.7
"""As COMPILED_ABOVE, for trained experts: of 60 drawn steps that no term had seen, one needed 34 % more than plan and margin."""
MOST_COMPILED = 6
"""Layouts that are compiled at most until one fits."""


def planned_and_compiled(memory: MemoryEstimate, needed_bytes: int) -> str:
    """Return both as text; the plan has a margin, which the compiled step does not need."""
    planned = f"{memory.total_bytes / 1e9:.1f} GB planned, of which {memory.margin_bytes / 1e9:.1f} GB is margin"
    return f"{planned}, {needed_bytes / 1e9:.1f} GB compiled"


@dataclass(frozen=True)
class Compilation:
    """What the compiler found for a layout that was the best one so far."""

    candidate: Candidate
    needed_bytes: int | None
    """Memory of a device that the compiled step needs, the runtime's own memory included; None: it could not be compiled."""
    capacity_bytes: int
    problem: str = ""
    """Why it could not be compiled."""

    @property
    def fits(self) -> bool | None:
        """Whether a device holds it; None: unknown."""
        return None if self.needed_bytes is None else self.needed_bytes <= self.capacity_bytes

    @property
    def sentence(self) -> str:
        """Planned and compiled bytes, and whether they fit."""
        memory, layout = self.candidate.memory, self.candidate.layout
        name = f"{layout.text()}, {layout.accumulation} x, {layout.remat.policy}"
        if self.needed_bytes is None:
            return f"{name}: {memory.total_bytes / 1e9:.1f} GB planned; not compiled: {self.problem}"
        verdict = "fits" if self.fits else "does not fit"
        return f"{name}: {planned_and_compiled(memory, self.needed_bytes)}: {verdict} in {self.capacity_bytes / 1e9:.1f} GB"


Compiler = Callable[[Candidate], int]
"""Returns the bytes of a device that the compiled step of a layout needs. Raises UserError when it cannot be compiled."""


@dataclass(frozen=True)
class Plan:
    """Everything that `ridge plan` reports."""

    config: Config
    cluster: ClusterConfig
    calibration: Calibration
    tokens: float
    objective: Objective
    limits: Limits
    scales: list[Scale]
    best: list[Candidate]
    """The best few layouts within the limits, best first; at least one."""
    bottlenecks: list[Bottleneck]
    """The bottleneck of each of `best`."""
    alternatives: list[Alternative]
    """Common layouts compared with the best."""
    stages: str
    """Whether pipeline stages pay, and why; empty where none were tried."""
    scaling: list[ScalingRow]
    """The best layout of each number of nodes."""
    worth_nodes: int | None
    """Largest number of nodes that is worth it; None: none is within the limits."""
    worth: str
    """Up to which number of nodes more nodes are worth it, and why."""
    loss_chunk: ChunkChange | None
    """A larger chunk of the cross-entropy that would make the best layout faster; None: none would."""
    compiled: tuple[Compilation, ...] = ()
    """The layouts that were compiled, in this order; all but the last were refused."""
    spot: Spot | None = None

    @property
    def price(self) -> str:
        """The price of a device-hour and where it is from."""
        return price_text(self.cluster, hardware(self.cluster.device)) if self.spot is None else str(self.spot)

    @property
    def range(self) -> Range:
        """The range of every predicted time, rate and cost."""
        return step_range(self.config, hardware(self.cluster.device), self.calibration.software)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of a device that a run may use."""
        return capacity_bytes(Machine(self.cluster, self.calibration, self.best[0].step.devices))


def make_plan(
    config: Config,
    cluster: ClusterConfig,
    calibration: Calibration,
    nodes: Sequence[int],
    *,
    tokens: float | None = None,
    objective: Objective = "time",
    limits: Limits = Limits(),  # noqa: B008 - frozen
    top: int = 3,
    compiler: Compiler | None = None,
    compiled_above: float | None = None,
    spot: Spot | None = None,
) -> Plan:
    """Search the node counts, rank what fits and explain the choice.

    `tokens` of the run; None: trainer.steps * data.batch_size * data.seq_len. The global batch stays as configured. With a `compiler`, the
    best layout is compiled where it is planned to need more than `compiled_above` of the usable memory (None: `compile_above`); if it does
    not fit, the next one is tried.
    Raises UserError when nothing fits or divides, or nothing is within the limits; the message has the shortfall and the nearest choice.
    """
    cluster = cluster if spot is None else spot.of(cluster)
    tokens = tokens or float(config.trainer.steps) * config.data.batch_size * config.data.seq_len
    if limits.budget_usd is not None:
        _check_priced(cluster, calibration)
    scales = search(config, cluster, calibration, nodes, tokens)
    above = compile_above(config) if compiled_above is None else compiled_above
    compiled: list[Compilation] = []
    while True:
        if not any(scale.candidates for scale in scales):
            raise _nothing_fits(config, cluster, calibration, scales, tokens)
        chosen = _distinct(ranked(scales, objective, limits), top)
        if not chosen:
            raise _outside_limits(scales, limits, tokens)
        capacity = capacity_bytes(Machine(cluster, calibration, chosen[0].step.devices))
        if compiler is None or chosen[0].memory.total_bytes <= above * capacity or len(compiled) == MOST_COMPILED:
            break
        compiled.append(_compile(compiler, chosen[0], capacity))
        if compiled[-1].fits is not False:
            break
        _refuse(scales, compiled[-1])
    machines = {c.nodes: Machine(cluster, calibration, c.step.devices) for c in chosen}
    rows = scaling_table(scales, limits)
    worth_nodes, worth = worth_until(rows, objective)
    best_scale = next(scale for scale in scales if scale.nodes == chosen[0].nodes)
    return Plan(
        config=config,
        cluster=cluster,
        calibration=calibration,
        tokens=tokens,
        objective=objective,
        limits=limits,
        scales=scales,
        best=chosen,
        bottlenecks=[bottleneck(candidate, machines[candidate.nodes]) for candidate in chosen],
        alternatives=alternatives(best_scale, machines[chosen[0].nodes]),
        stages=stages_sentence(best_scale),
        scaling=rows,
        worth_nodes=worth_nodes,
        worth=worth,
        loss_chunk=larger_loss_chunk(chosen[0], machines[chosen[0].nodes]),
        compiled=tuple(compiled),
        spot=spot,
    )


def compile_above(config: Config) -> float:
    """Return the share of the usable memory above which the best layout of a run is compiled: how exact the planned memory is decides."""
    trained_experts = config.model.moe is not None and config.lora.rank is None
    return EXPERTS_COMPILED_ABOVE if trained_experts else COMPILED_ABOVE


def best_first(plans: Mapping[str, Plan]) -> list[str]:
    """Return the names of plans of one run on several clusters, best first for their objective; without a price last, by device-hours."""

    def key(name: str) -> tuple[float, ...]:
        best = plans[name].best[0]
        run = best.run
        cost = math.inf if run.wall_cost_usd is None else run.wall_cost_usd
        first = {"time": run.wall_days, "cost": cost, "efficiency": -best.step.tokens_per_s_per_device}[plans[name].objective]
        return first, cost, run.wall_device_hours

    return sorted(plans, key=key)


def _compile(compiler: Compiler, candidate: Candidate, capacity: int) -> Compilation:
    try:
        return Compilation(candidate, compiler(candidate), capacity)
    except UserError as error:
        return Compilation(candidate, None, capacity, str(error))


def _refuse(scales: Sequence[Scale], refused: Compilation) -> None:
    """Move a candidate that the compiler refused to the rejections of its scale."""
    candidate = refused.candidate
    scale = next(scale for scale in scales if candidate in scale.candidates)
    scale.candidates.remove(candidate)
    short = (refused.needed_bytes or 0) - refused.capacity_bytes
    scale.rejections.append(Rejection(candidate.nodes, candidate.layout.mesh, candidate.layout.remat.policy, refused.sentence, short))


def _distinct(candidates: Sequence[Candidate], top: int) -> list[Candidate]:
    """Return the first `top` candidates that differ in nodes, mesh or rematerialization."""
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        layout = candidate.layout
        found.setdefault((candidate.nodes, *layout.sizes.values(), layout.zero_stage, layout.remat.policy), candidate)
        if len(found) == top:
            break
    return list(found.values())


# Errors: nothing fits, or nothing is within the limits.


def _check_priced(cluster: ClusterConfig, calibration: Calibration) -> None:
    machine = Machine(cluster, calibration, cluster.devices_per_node)
    if cluster.price_per_device_hour_usd is None and machine.device.price_per_hour_usd is None:
        raise UserError(
            f"--budget-usd: neither cluster '{cluster.name}' nor the catalog has a price for {machine.device.name};"
            " set price_per_device_hour_usd in the cluster file"
        )


def why_nothing_fits(scales: Sequence[Scale]) -> str:
    """Return why no layout fits on the largest number of nodes."""
    row = scaling_table(scales, Limits())[-1]
    return f"no layout of this config fits: {plural(row.nodes, 'node')} ({plural(row.devices, 'device')}): {row.outside}"


def _nothing_fits(config: Config, cluster: ClusterConfig, calibration: Calibration, scales: list[Scale], tokens: float) -> UserError:
    """Return the error for a config that fits nowhere: the nearest miss, the fewest nodes that work, a change that makes it fit."""
    nearest = _nearest(config, cluster, calibration, scales, tokens)
    ways = (offloaded_state, lower_precision_state) if _short_of_memory(scales[-1]) else ()
    fits = [found for way in ways if (found := way(config, cluster, calibration, scales[-1].nodes, tokens)) is not None]
    return UserError(f"{why_nothing_fits(scales)}. {nearest}" + "".join(f" Or {found.sentence}" for found in fits))


def _short_of_memory(scale: Scale) -> bool:
    """Whether some layout was rejected only for its memory."""
    return any(rejection.short_bytes > 0 for rejection in scale.rejections)


def _nearest(config: Config, cluster: ClusterConfig, calibration: Calibration, scales: list[Scale], tokens: float) -> str:
    """Return the number of nodes nearest to the largest requested that works, at this batch and, where that is far, with another batch."""
    most = min(cluster.nodes or LARGEST_SUGGESTION, LARGEST_SUGGESTION)
    tried = {scale.nodes for scale in scales}
    wanted = max(tried)

    def works(changed: Config, nodes: int) -> Candidate | None:
        return search_scale(changed, cluster, calibration, nodes, tokens).best

    counts = dividing_nodes(config, cluster.devices_per_node, most) - tried
    near = sorted(counts, key=lambda nodes: abs(math.log(nodes / wanted)))[:MOST_TRIED]
    found = next((best for nodes in near if (best := works(config, nodes)) is not None), None)
    parts = [] if found is None else [f"nearest at this batch: {_cost_text(found, wanted)}"]
    if found is None or not wanted / 2 < found.nodes <= wanted:
        for nodes in range(wanted, max(0, wanted - MOST_TRIED), -1):
            if best := works(changed := _with_rows_for(config, nodes * cluster.devices_per_node), nodes):
                parts.append(f"with data.batch_size={changed.data.batch_size}: {_cost_text(best, wanted)}")
                break
    if not parts:
        return f"Nothing up to {most:,} nodes fits either: change data.batch_size={config.data.batch_size}, data.seq_len or the model."
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _cost_text(best: Candidate, wanted: int) -> str:
    """Return the nodes of a layout, what it costs, and how many of the `wanted` nodes it does not use."""
    layout, run, nodes = best.layout, best.run, best.nodes
    usd = "" if run.wall_cost_usd is None else f", {run.wall_cost_usd:,.0f} USD"
    unused = f"; {wanted - nodes:,} of {wanted:,} nodes unused, {1 - nodes / wanted:.1%}" if nodes < wanted else ""
    mesh = f"{layout.text()}, remat {layout.remat.policy}"
    return (
        f"{nodes:,} node{'s' if nodes != 1 else ''} ({mesh}; {best.step.tokens_per_s:.3g} tokens/s, {run.wall_days:.3g} days{usd}{unused})"
    )


def _with_rows_for(config: Config, devices: int) -> Config:
    """Return the config with the batch nearest to its own that gives every device the same number of rows."""
    rows = max(1, round(config.data.batch_size / devices)) * devices
    return config.model_copy(update={"data": config.data.model_copy(update={"batch_size": rows})})


def _outside_limits(scales: list[Scale], limits: Limits, tokens: float) -> UserError:
    """Return the error for limits that no candidate meets: the nearest candidates and by how much they exceed the limits."""
    parts = []
    if limits.deadline_days is not None:
        fastest = ranked(scales, "time", Limits())[0]
        over = within(fastest, Limits(deadline_days=limits.deadline_days))
        parts.append(f"the fastest ({_where(fastest)}) {over or 'meets the deadline'}")
    if limits.budget_usd is not None:
        cheapest = ranked(scales, "cost", Limits())[0]
        over = within(cheapest, Limits(budget_usd=limits.budget_usd))
        cost = cheapest.run.wall_cost_usd
        paid = f"; the budget pays for {tokens * limits.budget_usd / cost:.3g} of {tokens:.3g} tokens" if over and cost else ""
        parts.append(f"the cheapest ({_where(cheapest)}) {over or 'is within the budget'}{paid}")
        if limits.deadline_days is not None:
            in_time = ranked(scales, "cost", replace(limits, budget_usd=None))
            if in_time:
                parts.append(f"the cheapest within the deadline ({_where(in_time[0])}) {within(in_time[0], limits)}")
    if limits.device_hours is not None:
        least = min((c for scale in scales for c in scale.candidates), key=lambda c: c.run.wall_device_hours)
        over, hours = within(least, Limits(device_hours=limits.device_hours)), least.run.wall_device_hours
        paid = f"; the limit is enough for {tokens * limits.device_hours / hours:.3g} of {tokens:.3g} tokens" if over else ""
        parts.append(f"the one with the fewest device-hours ({_where(least)}) {over or 'is within the limit'}{paid}")
    return UserError("nothing meets the limits: " + "; ".join(parts))


def _where(candidate: Candidate) -> str:
    return f"{candidate.nodes} node{'s' if candidate.nodes != 1 else ''}, {candidate.layout.text()}"


# JSON.


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values: `candidates`, `rejected`, `scaling`, and the inputs of the plan."""
    return {
        "config": plan.config.name,
        "cluster": plan.cluster.name,
        "calibration": plan.calibration.name,
        "software": plan.calibration.software.name,
        "range": plan.range.share,
        "range_from": plan.range.basis,
        "tokens": plan.tokens,
        "objective": plan.objective,
        "budget_usd": plan.limits.budget_usd,
        "deadline_days": plan.limits.deadline_days,
        "device_hours_limit": plan.limits.device_hours,
        "spot": None if plan.spot is None else dict_of(plan.spot),
        "capacity_bytes": plan.capacity_bytes,
        "candidates": [
            candidate_json(candidate)
            | ranges_json(candidate, plan.range)
            | {"binds": bound.sentence, "binding_ceiling": bound.ceiling, "gain_if_doubled": bound.gain}
            for candidate, bound in zip(plan.best, plan.bottlenecks, strict=True)
        ],
        "alternatives": [dict_of(alternative) for alternative in plan.alternatives],
        "stages": plan.stages,
        "rejected": [dict_of(rejection) for scale in plan.scales for rejection in scale.rejections],
        "scaling": [_row_json(row) for row in plan.scaling],
        "worth_until_nodes": plan.worth_nodes,
        "worth": plan.worth,
        "loss_chunk": None if plan.loss_chunk is None else dict_of(plan.loss_chunk),
        "compiled": [_compilation_json(compilation) for compilation in plan.compiled],
    }


def _compilation_json(compilation: Compilation) -> dict[str, Any]:
    candidate = compilation.candidate
    return {
        "nodes": candidate.nodes,
        "mesh": candidate.layout.sizes,
        "zero_stage": candidate.layout.zero_stage,
        "accumulation": candidate.layout.accumulation,
        "remat": candidate.layout.remat.policy,
        "planned_bytes": candidate.memory.total_bytes,
        "margin_bytes": candidate.memory.margin_bytes,
        "compiled_bytes": compilation.needed_bytes,
        "fits": compilation.fits,
        "problem": compilation.problem,
    }


def dict_of(value: Any) -> dict[str, Any]:
    """Return the fields of a flat dataclass."""
    return dict(vars(value))


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return one candidate as JSON values."""
    layout, step, run, memory, config = candidate.layout, candidate.step, candidate.run, candidate.memory, candidate.parts.config
    return {
        "nodes": candidate.nodes,
        "devices": step.devices,
        "mesh": layout.sizes,
        "zero_stage": layout.zero_stage,
        "context_method": context_method(config, layout.sizes),
        "expert_exchange": exchange_method(config.model.moe, config.compute.experts, layout.sizes),
        "pipeline_chunks": layout.pipeline_chunks,
        "bubble_fraction": candidate.parts.bubble,
        "microbatch": candidate.microbatch,
        "accumulation": layout.accumulation,
        "remat": layout.remat.policy,
        "remat_names": list(layout.remat.names),
        "memory_bytes": memory.total_bytes,
        "memory_components": memory.bytes_by_component(),
        "memory_moment": memory.peak_at,
        "step_s": step.step_s,
        "recompute_measured_s": candidate.parts.recompute_s,
        "breakdown_s": step.breakdown_s,
        "communication_s": step.communication_s,
        "communication": [communication_json(item) for item in step.communication],
        "mfu": step.mfu,
        "tokens_per_s": step.tokens_per_s,
        "tokens_per_s_per_device": step.tokens_per_s_per_device,
        "steps": run.steps,
        "days": run.days,
        "device_hours": run.device_hours,
        "wall_device_hours": run.wall_device_hours,
        "cost_usd": run.cost_usd,
        "wall_days": run.wall_days,
        "wall_cost_usd": run.wall_cost_usd,
        "goodput": run.goodput,
        "expected_failures": run.expected_failures,
        "mtbf_hours": run.mtbf_hours,
        "checkpoint_interval_s": run.checkpoint_interval_s,
        "energy_kwh": run.energy_kwh,
        "device_energy_kwh": run.device_energy_kwh,
    }


def ranges_json(candidate: Candidate, around: Range) -> dict[str, list[float] | None]:
    """Return the lower and upper end of each time, rate and cost of a candidate; null where it has none."""
    step, run = candidate.step, candidate.run
    times = {"step_s": step.step_s, "wall_days": run.wall_days, "wall_device_hours": run.wall_device_hours}
    times |= {"days": run.days, "device_hours": run.device_hours}
    rates = {"tokens_per_s": step.tokens_per_s, "tokens_per_s_per_device": step.tokens_per_s_per_device}
    costs = {"cost_usd": run.cost_usd, "wall_cost_usd": run.wall_cost_usd}
    return (
        {f"{key}_range": list(around.around(value)) for key, value in times.items()}
        | {f"{key}_range": list(around.around_rate(value)) for key, value in rates.items()}
        | {f"{key}_range": None if value is None else list(around.around(value)) for key, value in costs.items()}
    )


def communication_json(item: Communication) -> dict[str, Any]:
    """Return one planned collective as JSON values; bytes and seconds are those of one execution."""
    planned, cost = item.planned, item.cost
    return {
        "what": planned.what,
        "where": planned.where,
        "phase": planned.phase,
        "kind": planned.kind,
        "axes": list(planned.axes),
        "bytes": planned.bytes,
        "count": planned.count,
        "seconds": cost.seconds,
        "algorithm": cost.algorithm,
        "link": cost.bottleneck_link,
        "hides_under": item.hides_under,
    }


def _row_json(row: ScalingRow) -> dict[str, Any]:
    best = row.best
    base: dict[str, Any] = {
        "nodes": row.nodes,
        "devices": row.devices,
        "efficiency": row.efficiency,
        "marginal_efficiency": row.marginal_efficiency,
        "outside": row.outside,
    }
    if best is None:
        return base
    keys = (
        "mesh accumulation remat step_s mfu tokens_per_s tokens_per_s_per_device memory_bytes days wall_days device_hours cost_usd goodput"
    )
    found = candidate_json(best)
    return base | {key: found[key] for key in keys.split()}
