"""The collectives of a compiled step held against the plan: bytes by kind and mesh axes, and those that nobody planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.configs.schema import Config
from ridgeline.hlo.collectives import Collective
from ridgeline.planner.collectives import PlannedCollective, as_compiled_for_cpu, as_compiled_for_gpu, planned_collectives

SMALL_BYTES = 1 << 18
"""Collectives and differences below this are scalars, norms and counters: nobody plans them."""
TOLERANCE = 0.01


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes, inside the layers or outside, planned and compiled."""

    where: str
    """layer or once."""
    kind: str
    axes: tuple[str, ...]
    planned_bytes: float
    """Per step and device, all runs."""
    compiled_bytes: float

    @property
    def excess_bytes(self) -> float:
        """Compiled beyond planned."""
        return self.compiled_bytes - self.planned_bytes

    @property
    def agrees(self) -> bool:
        """Equal to the tolerance, small things aside."""
        return abs(self.excess_bytes) <= max(SMALL_BYTES, TOLERANCE * self.planned_bytes)


def payload_bytes(collective: Collective) -> int:
    """Bytes of a collective without the scalars XLA combined into it."""
    return collective.bytes - 4 * sum(dims == () for dims in collective.operands)


def expected(config: Config, sizes: Mapping[str, int], *, gpu: bool = True) -> list[PlannedCollective]:
    """Return the plan as the backend of a GPU or CPU compiles it."""
    planned = planned_collectives(config, sizes)
    return as_compiled_for_gpu(planned) if gpu else [as_compiled_for_cpu(item) for item in planned]


def compare_traffic(config: Config, sizes: Mapping[str, int], found: Sequence[Collective], *, gpu: bool = True) -> list[Traffic]:
    """Add up planned and compiled bytes by kind and axes, inside the layers and outside them."""
    loops = config.model.num_layers * config.trainer.accumulation
    planned: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
    compiled: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
    for item in expected(config, sizes, gpu=gpu):
        planned[_where_planned(item), item.kind, item.axes] += float(item.bytes) * item.count
    for c in found:
        if payload_bytes(c) > 0:
            compiled[_where(c, loops), c.kind, c.axes or ("?",)] += payload_bytes(c) * c.count
    merged = _merge_places(planned, compiled)
    return [Traffic(where, kind, axes, p, c) for (where, kind, axes), (p, c) in sorted(merged.items())]


def _merge_places(
    planned: Mapping[tuple[str, str, tuple[str, ...]], float], compiled: Mapping[tuple[str, str, tuple[str, ...]], float]
) -> dict[tuple[str, str, tuple[str, ...]], tuple[float, float]]:
    """Pair them; pipelined loops peel a layer or unroll it, so what is inside the layers is told by its count only when that is exact."""
    result: dict[tuple[str, str, tuple[str, ...]], tuple[float, float]] = {}
    for kind, axes in sorted({key[1:] for key in (*planned, *compiled)}):
        parts = {w: (planned.get((w, kind, axes), 0.0), compiled.get((w, kind, axes), 0.0)) for w in ("layer", "once")}
        if all(abs(p - c) <= max(SMALL_BYTES, TOLERANCE * p) for p, c in parts.values()):
            result.update({(w, kind, axes): pair for w, pair in parts.items() if any(pair)})
        else:
            result["all", kind, axes] = (sum(p for p, _ in parts.values()), sum(c for _, c in parts.values()))
    return result


def _where_planned(item: PlannedCollective) -> str:
    return "layer" if item.where == "layer" else "once"


def _where(collective: Collective, loops: int) -> str:
    return "layer" if collective.count == loops else "once"


def unplanned(config: Config, sizes: Mapping[str, int], found: Sequence[Collective], traffic: Sequence[Traffic]) -> list[Collective]:
    """Of every kind and axes with more bytes than planned: the collectives that match no planned one, else the whole group."""
    items = expected(config, sizes)
    extra: list[Collective] = []
    for row in traffic:
        if row.agrees or row.excess_bytes <= 0:
            continue
        group = [c for c in found if c.kind == row.kind and (c.axes or ("?",)) == row.axes and payload_bytes(c) >= SMALL_BYTES]
        sizes_planned = [item.bytes for item in items if item.kind == row.kind and item.axes == row.axes]
        odd = [c for c in group if not any(abs(payload_bytes(c) - size) <= TOLERANCE * size for size in sizes_planned)]
        extra += sorted(odd or group, key=lambda c: -c.total_bytes)
    return extra
