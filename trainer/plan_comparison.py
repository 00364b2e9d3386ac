"""Comparison of a compiled step with the plan: memory, and collectives by kind and mesh axes, with a reason for each difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.configs.schema import Config
from ridgeline.hlo.collectives import Collective
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.planner.memory import MemoryEstimate
from ridgeline.rundir.records import MemoryRow, TrafficRow

SMALL_BYTES = 1 << 18
"""Collectives and differences below this are scalars, norms and counters, which are not planned."""
TRAFFIC_TOLERANCE = 0.01
MEMORY_TOLERANCE = 0.05
"""Relative differences up to these agree with the plan; the memory model is tested to this accuracy."""
_NOT_TEMPORARY = ("parameters", "moments", "batch", "runtime_reserve", "reference_parameters", "margin", "fragmentation")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes, inside the layers or outside, planned and compiled."""

    where: str
    """layer, once or all (both)."""
    kind: str
    axes: tuple[str, ...]
    planned_bytes: float
    """Per step and device, over all executions."""
    compiled_bytes: float

    @property
    def excess_bytes(self) -> float:
        """Compiled beyond planned."""
        return self.compiled_bytes - self.planned_bytes

    @property
    def agrees(self) -> bool:
        """Whether the difference is small or within the tolerance."""
        return abs(self.excess_bytes) <= max(SMALL_BYTES, TRAFFIC_TOLERANCE * self.planned_bytes)


def payload_bytes(collective: Collective) -> int:
    """Return the bytes of a collective without the scalars that XLA combined into it."""
    return collective.bytes - 4 * sum(dims == () for dims in collective.operands)


def compare_traffic(config: Config, sizes: Mapping[str, int], found: Sequence[Collective], *, gpu: bool = True) -> list[Traffic]:
    """Add up planned and compiled bytes by kind and axes, inside the layers and outside them. `gpu`: whether the devices are GPUs."""
    loops = config.model.num_layers * config.trainer.accumulation
    planned: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
    compiled: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
    for item in compiled_collectives(config, sizes, gpu=gpu):
        planned["layer" if item.where == "layer" else "once", item.kind, item.axes] += float(item.bytes) * item.count
    for c in found:
        if payload_bytes(c) > 0:
            compiled["layer" if c.count == loops else "once", c.kind, c.axes or ("?",)] += payload_bytes(c) * c.count
    merged = _merge_places(planned, compiled)
    return [Traffic(where, kind, axes, p, c) for (where, kind, axes), (p, c) in sorted(merged.items())]


def _merge_places(
    planned: Mapping[tuple[str, str, tuple[str, ...]], float], compiled: Mapping[tuple[str, str, tuple[str, ...]], float]
) -> dict[tuple[str, str, tuple[str, ...]], tuple[float, float]]:
    """Pair planned and compiled bytes. Where "layer" and "once" do not agree (XLA peels or unrolls a loop) they are added up as "all"."""
    result: dict[tuple[str, str, tuple[str, ...]], tuple[float, float]] = {}
    for kind, axes in sorted({key[1:] for key in (*planned, *compiled)}):
        parts = {w: (planned.get((w, kind, axes), 0.0), compiled.get((w, kind, axes), 0.0)) for w in ("layer", "once")}
        if all(abs(p - c) <= max(SMALL_BYTES, TRAFFIC_TOLERANCE * p) for p, c in parts.values()):
            result.update({(w, kind, axes): pair for w, pair in parts.items() if any(pair)})
        else:
            result["all", kind, axes] = (sum(p for p, _ in parts.values()), sum(c for _, c in parts.values()))
    return result


def unplanned(config: Config, sizes: Mapping[str, int], found: Sequence[Collective], traffic: Sequence[Traffic]) -> list[Collective]:
    """Return, for every kind and axes with more bytes than planned, the collectives without a planned size; if none, all of them."""
    items = compiled_collectives(config, sizes)
    extra: list[Collective] = []
    for row in traffic:
        if row.agrees or row.excess_bytes <= 0:
            continue
        group = [c for c in found if c.kind == row.kind and (c.axes or ("?",)) == row.axes and payload_bytes(c) >= SMALL_BYTES]
        sizes_planned = [item.bytes for item in items if item.kind == row.kind and item.axes == row.axes]
        odd = [c for c in group if not any(abs(payload_bytes(c) - size) <= TRAFFIC_TOLERANCE * size for size in sizes_planned)]
        extra += sorted(odd or group, key=lambda c: -c.total_bytes)
    return extra


def memory_rows(estimate: MemoryEstimate, argument_bytes: int, temp_bytes: int) -> list[MemoryRow]:
    """Return planned and compiled bytes of arguments, temporaries and both together, with an explanation of each difference.

    Donated outputs, which alias arguments, count once, as in the plan.
    """
    fullest = max((p for p in estimate.components.items() if p[0] not in _NOT_TEMPORARY), key=lambda p: p[1].bytes)[0]
    temporaries = f"the planned peak is at '{estimate.peak_at}', most of it {fullest.replace('_', ' ')}"
    planned_peak, compiled_peak = estimate.compiled_bytes, argument_bytes + temp_bytes
    return [
        _memory_row("arguments", estimate.argument_bytes, argument_bytes, "state and batch: they differ only in the padding of shards"),
        _memory_row("temporaries", estimate.temp_bytes, temp_bytes, f"{temporaries}; the compiler chooses its own schedule and buffers"),
        _memory_row("step", planned_peak, compiled_peak, "arguments and temporaries"),
    ]


def _memory_row(what: str, planned: int, compiled: int, why: str) -> MemoryRow:
    difference = compiled - planned
    agrees = abs(difference) <= max(SMALL_BYTES, MEMORY_TOLERANCE * planned)
    share = f"{difference / planned:+.1%}" if planned else "not planned"
    return MemoryRow(
        what=what,
        planned_bytes=planned,
        compiled_bytes=compiled,
        difference_bytes=difference,
        agrees=agrees,
        explanation="as planned" if agrees else f"{share}: {why}",
    )


def traffic_rows(traffic: Sequence[Traffic], found: Sequence[Collective]) -> list[TrafficRow]:
    """Return planned and compiled bytes of every kind of collective over every set of axes, with an explanation of each difference."""
    return [
        TrafficRow(
            where=row.where,
            kind=row.kind,
            axes=row.axes,
            planned_bytes=row.planned_bytes,
            compiled_bytes=row.compiled_bytes,
            difference_bytes=row.excess_bytes,
            agrees=row.agrees,
            explanation=_explain(row, found),
        )
        for row in traffic
    ]


def _explain(row: Traffic, found: Sequence[Collective]) -> str:
    if row.agrees:
        return "as planned"
    if row.excess_bytes < 0:
        return "fewer than planned: the compiler combined some, replaced them by another kind, or unrolled a loop whose count is unknown"
    group = [c for c in found if c.kind == row.kind and (c.axes or ("?",)) == row.axes]
    largest = max(group, key=lambda c: c.total_bytes)
    place = f"{largest.source.file}:{largest.source.line}" if largest.source else largest.op_name or largest.name
    reason = "nothing of this kind is planned" if not row.planned_bytes else "more than planned"
    return f"{reason}: the largest is {largest.bytes / 1e6:.1f} MB x {largest.count:g} at {place}"
