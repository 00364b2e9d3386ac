"""The tasks of `ridge bench`: the layers each one times, its results and the samples it stores."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.measure.checkpoint import measure_checkpoint, scratch
from ridgeline.measure.ladder import Ladder, amortized_s, build_ladder, ms, save_cadence
from ridgeline.measure.loop import LoaderRounds, LoaderTimes, LoopTimes, loop_round
from ridgeline.measure.pieces import Piece, collectives, matmuls, memory_traffic, time_round
from ridgeline.measure.step import Session
from ridgeline.measure.step_work import step_matmuls, step_memory_traffic
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.planner.hardware import peak_flops
from ridgeline.rundir.noise import spread
from ridgeline.trainer.prepare import check_data

TASKS = ("matmul", "memory", "collectives", "loader", "step", "loop", "checkpoint", "all")

PEAK_OF = {"mxfp8": "float8", "nvfp4": "float4"}
"""Block-scaled format -> name of its arithmetic in the hardware catalog."""

Report = Callable[[str], None]


@dataclass
class Outcome:
    """The results of a task."""

    task: str
    series: dict[str, list[float]] = field(default_factory=dict)
    """Layer -> seconds, one entry per round, for comparison with later runs. Per step; save, save_write and restore: per save."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The timed pieces: layer, what, per_step_s, share of its layer, rate."""
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    """Layer -> part of the model, kind of memory traffic or mesh axes -> seconds per step (sums of the pieces' medians)."""
    why: dict[str, str] = field(default_factory=dict)
    """Layer -> the cause of its time, a clause for the verdict."""
    ladder: Ladder | None = None


def measure(task: str, config: Config, repeats: int, report: Report) -> Outcome:
    """Run one task on the devices of this process and its peers.

    Args:
      repeats: rounds of every measurement, at least 3.
      report: called with one line before each layer.

    Raises UserError for a config these devices cannot run, for missing data, and for a layer the config does not have.
    """
    assert task in TASKS and repeats >= 3
    if task in ("loader", "loop", "all"):
        check_data(config)
    out = Outcome(task)
    if task == "loader":
        reading = LoaderRounds(config)
        for _ in range(repeats):
            reading.round()
        _loader(out, reading.times)
        return out
    session = Session(config, repeats)
    wanted = TASKS[:-1] if task == "all" else (task,)
    if task == "collectives" and session.mesh.size == 1:
        raise UserError("the mesh has one device, so the step has no collectives; set mesh.* (and runtime.cpu_devices on a CPU)")
    with scratch(config) if {"loop", "checkpoint"} & set(wanted) else contextlib.nullcontext(Path()) as directory:
        _in_rounds(out, session, wanted, directory, report)
        if "checkpoint" in wanted:
            _checkpoint(out, session, directory, report)
    if task == "all":
        out.ladder = build_ladder({name: out.series[name] for name in out.series if name in _IN_LADDER}, out.why)
    return out


def _in_rounds(out: Outcome, session: Session, wanted: Sequence[str], directory: Path, report: Report) -> None:
    """Time one round of every layer before the next round, so that other load on the machine affects all layers alike."""
    config, mesh, sizes = session.config, session.mesh, session.sizes
    layers: dict[str, list[Piece]] = {}
    if "matmul" in wanted:
        layers["matmul"] = matmuls(step_matmuls(config, sizes, gpu=session.gpu), mesh)
    if "memory" in wanted:
        layers["memory"] = memory_traffic(config, step_memory_traffic(config, sizes), mesh)
    if "collectives" in wanted:
        planned = compiled_collectives(config, sizes, gpu=session.gpu)
        if planned:
            layers["collectives"] = collectives(planned, mesh)
        else:
            out.notes.append("collectives: none, the mesh has one device")
    stepping = bool({"step", "loop"} & set(wanted))
    if stepping:
        report("the step (compiling)")
        session.begin_steps()
        out.facts |= {"compile_s": session.compile_s, "steps_per_round": session.steps_per_round()}
    reading = LoaderRounds(config) if "loader" in wanted else None
    steps_s, loops = list[float](), list[LoopTimes]()
    for number in range(1, session.repeats + 1):
        report(f"round {number} of {session.repeats}: {', '.join(name for name in wanted if name != 'checkpoint')}")
        for pieces in layers.values():
            time_round(pieces)
        if reading is not None:
            reading.round()
        if stepping:
            steps_s.append(session.step_round())
        if "loop" in wanted:
            loops.append(loop_round(session, directory / f"round{number}"))
    if "matmul" in layers:
        _matmul(out, layers["matmul"])
    if "memory" in layers:
        _pieces(out, "memory", layers["memory"], "byte/s")
    if "collectives" in layers:
        _collectives(out, layers["collectives"])
    if stepping:
        out.series["step"] = steps_s
        out.why["step"] = "capture a profile of a run and read it with `ridge analyze`"
    if reading is not None:
        _loader(out, reading.times)
    if loops:
        _loop(out, loops)


_IN_LADDER = ("matmul", "memory", "collectives", "step", "loop", "checkpoint")


def _matmul(out: Outcome, found: Sequence[Piece]) -> None:
    _pieces(out, "matmul", found, "FLOP/s")
    total_s = statistics.median(out.series["matmul"])
    rate = sum(m.amount * m.count for m in found) / total_s
    dtypes = {str(m.detail["dtype"]): None for m in found}  # in the order of the step
    share = _datasheet_share(found, total_s)
    out.facts |= {"matmul_flops_per_s": rate, "matmul_dtype": ", ".join(dtypes), "datasheet_share": share}
    parts = out.groups["matmul"]
    slowest = max(parts, key=lambda part: parts[part])
    compared = f"{share:.0%} of the datasheet peak" if share is not None else "no datasheet peak known"
    most = f"{slowest} ({parts[slowest] / sum(parts.values()):.0%})"
    out.why["matmul"] = f"{rate / 1e12:.3g} TFLOP/s per device ({compared}); most time in {most}"


def _datasheet_share(found: Sequence[Piece], total_s: float) -> float | None:
    """Return the time of all matmuls at the datasheet peak of their dtypes, divided by the measured time."""
    kind = jax.devices()[0].device_kind
    peaks = [peak_flops(kind, PEAK_OF.get(m.detail["dtype"], m.detail["dtype"])) for m in found]
    if any(peak is None for peak in peaks):
        return None
    return sum(m.amount * m.count / peak for m, peak in zip(found, peaks, strict=True) if peak) / total_s


def _collectives(out: Outcome, found: Sequence[Piece]) -> None:
    _pieces(out, "collectives", found, "byte/s")
    longest = max(found, key=lambda m: statistics.median(m.per_step_s()))
    size = f"{longest.amount / 1e6:.3g} MB x {longest.count:g}"
    out.why["collectives"] = f"the longest is the {longest.detail['kind']} of {longest.what} over {longest.part} ({size})"


def _pieces(out: Outcome, layer: str, found: Sequence[Piece], unit: str) -> None:
    """Add the pieces of a layer to the results, and their sum per round as its series."""
    rounds = zip(*(piece.per_step_s() for piece in found), strict=True)
    out.series[layer] = [sum(times) for times in rounds]
    total_s = statistics.median(out.series[layer])
    groups = out.groups[layer] = dict[str, float]()
    for piece in found:
        groups[piece.part] = groups.get(piece.part, 0.0) + statistics.median(piece.per_step_s())
        once_s, seconds = statistics.median(piece.once_s), statistics.median(piece.per_step_s())
        out.rows.append(
            {
                "layer": layer,
                "part": piece.part,
                "what": piece.what,
                "count": piece.count,
                "once_s": once_s,
                "per_step_s": seconds,
                "share": seconds / total_s,
                "rate": piece.amount / once_s,
                "unit": unit,
                "spread": spread(piece.once_s),
                **piece.detail,
            }
        )
    if layer == "memory":
        largest = max(found, key=lambda m: statistics.median(m.per_step_s()))
        moved = sum(m.amount * m.count for m in found)
        rate = moved / total_s
        out.why["memory"] = f"{moved / 1e9:.3g} GB per step at {rate / 1e9:.3g} GB/s, most in {largest.what}"


def _loader(out: Outcome, found: LoaderTimes) -> None:
    out.series["loader"] = found.batch_s
    out.facts |= {
        "loader_tokens_per_s": statistics.median(found.tokens_per_s),
        "first_batch_s": found.first_batch_s,
        "loader_batches": found.batches,
    }


def _loop(out: Outcome, rounds: Sequence[LoopTimes]) -> None:
    out.series["loop"] = [found.step_s for found in rounds]
    waits_s = [found.wait_s for found in rounds]
    out.facts |= {"data_wait_s": statistics.median(waits_s), "log_lines": sum(found.log_lines for found in rounds)}
    out.why["loop"] = _why_loop(out, statistics.median(waits_s))


def _checkpoint(out: Outcome, session: Session, directory: Path, report: Report) -> None:
    report("saves and restores")
    c, times = session.config.checkpoint, measure_checkpoint(session, directory)
    # 0 when no step was measured: the cost of a save per step is then unknown
    step_s = statistics.median(out.series.get("loop") or out.series.get("step") or [0.0])
    out.series |= {"save": times.blocking_s, "save_write": times.write_s, "restore": times.restore_s}
    out.facts |= {"checkpoint_bytes": times.size_bytes}
    if step_s:
        steps = session.config.trainer.steps
        cadence = save_cadence(every=c.every, every_minutes=c.every_minutes, final=c.final, steps=steps, step_s=step_s)
        out.series["checkpoint"] = amortized_s(times.blocking_s, times.write_s, cadence, step_s)
        out.facts |= {"steps_between_saves": cadence.steps, "cadence": cadence.reason}
        held = statistics.median(times.blocking_s)
        out.why["checkpoint"] = f"each save blocks training for {ms(held)}, every {cadence.steps or 0:,.0f} steps ({cadence.reason})"


def _why_loop(out: Outcome, wait_s: float) -> str:
    alone_s = statistics.median(out.series.get("loader", [0.0]))
    step_s = statistics.median(out.series["step"])
    loader = f"; the loader alone takes {ms(alone_s)} per batch, the step {ms(step_s)}" if alone_s else ""
    more_s = statistics.median(out.series["loop"]) - step_s
    if wait_s > 0.5 * more_s:
        return f"it waits {ms(wait_s)} per step for the next batch{loader}"
    return f"it waits only {ms(wait_s)} per step for data{loader}; the rest is host work between steps"


def to_json(out: Outcome) -> dict[str, Any]:
    """Return the outcome as JSON values: series with medians and spreads, pieces, facts, ladder."""
    found: dict[str, Any] = {
        "task": out.task,
        "series": out.series,
        "summary": {
            name: {"median_s": statistics.median(values), "spread": spread(values), "rounds": len(values)}
            for name, values in out.series.items()
        },
        "groups": out.groups,
        "pieces": out.rows,
        "facts": out.facts,
        "notes": out.notes,
    }
    if out.ladder is not None:
        found["ladder"] = [asdict(rung) for rung in out.ladder.rungs]
        found["verdict"] = asdict(out.ladder.verdict)
    return found
