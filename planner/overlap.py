"""Exposed and overlapped communication of a step.

Gathers of parameters and reductions of gradients do not depend on the computation of the neighboring layer, so they can be overlapped
with it: T = Tc + Tm - eta * min(Tc, Tm) for each pass over a layer. Gathers and scatters of the residual stream over `tensor`, all-to-alls
over `context` and the exchange of tokens over `expert` are between two dependent matmuls and fully exposed; rings overlap with their own
matmuls in part. In the backward pass XLA's scheduler overlaps two kinds of those over `tensor` too: scatters of gradients of inputs, on
which no gradient of weights depends, and gathers for recomputation, which depend on no gradient; where the MLP is recomputed also gathers
of gradients. It does not where layers have experts. Collectives of embedding, loss and optimizer are exposed.

Collectives of all axes run one after another. Where tokens wait for an exchange or for hops of a ring, they also wait for the gather of
experts' parameters, which XLA starts with the layer, and in the backward pass for the reduction of their gradients, which it starts after
the MLP: these overlap with the computation around attention, up to the first transfer, and the MLP overlaps with none of them. Where these
run while attention does (models/beside_attention.py), they overlap with it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ridgeline.planner.collectives import PlannedCollective
from ridgeline.planner.communication import CollectiveCost
from ridgeline.planner.recompute import Recomputed

ETA = 0.9
"""Fraction of the shorter of compute and communication that XLA's latency-hiding scheduler overlaps with the longer. The rest is the
slowdown of compute by communication kernels: NCCL occupies 8 to 20 of 132 multiprocessors."""
OVERLAPPED_AXES = ("pipeline", "data", "fsdp", "context", "expert")
"""Mesh axes whose gathers and reductions inside layers are of parameters and overlapped with compute."""
POOL_SHARE = 0.95
"""Fraction of a device's memory in XLA's pool in a run; the rest is for the CUDA context, NCCL and cuDNN."""
WIDEST_TENSOR = 2
"""Devices on tensor up to which a third collective may be in flight in a run (launch/environment.py)."""
ETA_RING = 0.5
"""Fraction of a ring's hops over tensor that is overlapped with the ring's matmuls, since attention's matmuls take less time than the hops
(70B, fsdp=8 x tensor=8, simulated schedule: 53 %). It is less where other communication takes part of the time: that is queued first."""
OVERLAP_SLOP = 0.95
"""Fraction of the pool, without the step's arguments, up to which XLA's scheduler overlaps (`xla_gpu_memory_limit_slop_factor`). Overlap
needs memory: where a schedule would exceed the limit, collectives end right after their start. In a run JAX
passes the size of the pool to the compiler (the allocator's limit in `PyClient::CompileAndLoad`); XLA's own assumption, 80 % of the
device, applies only without it. With it a 405B step on 64 GPUs that needs 71 of 85 GB overlaps 3 % of its bytes (docs/LOG.md)."""


@dataclass(frozen=True)
class Communication:
    """One planned collective with its time."""

    planned: PlannedCollective
    cost: CollectiveCost
    beside_gradients: bool = False
    """Of the residual stream in the backward pass, where it is overlapped with gradients of weights or with recomputation."""

    @property
    def seconds(self) -> float:
        """Seconds of all executions in a step."""
        return self.cost.seconds * self.planned.count

    @property
    def overlappable(self) -> bool:
        """Whether it can be overlapped with the compute of a layer."""
        item = self.planned
        if self.beside_gradients:
            return True
        return item.where == "layer" and set(item.axes) <= set(OVERLAPPED_AXES) and item.kind != "all-to-all" and not item.of_tokens

    @property
    def groups(self) -> tuple[str, ...]:
        """What it is of, among the communication that is overlapped, from the narrowest to the widest group."""
        if self.beside_gradients:
            return "stream", "parameters"
        of_experts = ("experts",) if self.planned.kind == "all-gather" else ("expert gradients", "experts")
        return (*(of_experts if self.planned.what == "experts" else ()), "parameters")

    @property
    def in_ring(self) -> bool:
        """Whether it is a hop of a ring. A transfer between pipeline stages is not: it overlaps with a whole pass of another unit."""
        return self.planned.kind == "collective-permute" and self.planned.axes != ("pipeline",) and not self.beside_gradients

    @property
    def hides_under(self) -> str:
        """What it can be overlapped with, in words."""
        if self.in_ring:
            return "matmuls of the ring"
        if self.beside_gradients:
            return "gradients of weights and recomputation"
        return f"{self.planned.phase} pass of the neighboring layer" if self.overlappable else "nothing"

    def by_kind(self) -> dict[str, float]:
        """Return seconds by kind of link (nvlink, network, ...); they sum to `seconds`."""
        total = sum(term.seconds for term in self.cost.terms) or 1.0
        shares: dict[str, float] = {}
        for term in self.cost.terms:
            shares[term.link.kind] = shares.get(term.link.kind, 0.0) + term.seconds / total * self.seconds
        return shares


def beside_gradients(item: PlannedCollective, again: Recomputed) -> bool:
    """Return whether XLA overlaps a gather or scatter over tensor, or its ring, with gradients of weights or with recomputation."""
    if item.where != "layer" or item.phase != "backward" or item.axes != ("tensor",) or item.of_tokens:
        return False
    return item.what.endswith((" input", "(recomputed)")) or (item.what.endswith(" update") and "up" in again.weights)


OVERLAP_ROOM = 0.9
"""Fraction of that limit up to which overlap is complete. Closer to it some collectives at the peak of memory are not overlapped."""
OVERLAP_NEAR_LIMIT = 0.94
"""Fraction of ETA that is left there: the mean share of bytes overlapped in the compiled schedules of ten layouts above OVERLAP_ROOM of the
limit: 72, 84, 88, 96, 96 and five times 100 % (docs/LOG.md, 2026-11-22). No layout that fits lost all of its overlap."""


def overlap_limit_bytes(argument_bytes: int, device_bytes: int) -> int:
    """Return the bytes of a step, arguments and temporaries, up to which XLA's scheduler overlaps fully."""
    return int(OVERLAP_ROOM * (argument_bytes + OVERLAP_SLOP * (POOL_SHARE * device_bytes - argument_bytes)))


def overlap_share(compiled_bytes: int, argument_bytes: int, device_bytes: int) -> float:
    """Return the eta of a step that needs this much memory."""
    return ETA if compiled_bytes <= overlap_limit_bytes(argument_bytes, device_bytes) else ETA * OVERLAP_NEAR_LIMIT


def exposed_s(
    communication: Iterable[Communication],
    compute_s: Mapping[str, float],
    eta: float = ETA,
    faster: Mapping[str, float] | None = None,
    tensor_overlap: float = 0.0,
    beside_s: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Return the seconds of exposed communication of a step, by kind of link.

    Args:
      communication: of the whole step.
      compute_s: phase (forward, backward) -> seconds of compute of all layers, with which communication of that phase overlaps.
      eta: fraction of the shorter of the two that is overlapped.
      faster: kind of link -> hypothetical speed-up, default 1.
      tensor_overlap: fraction of the gathers and scatters over tensor that the software overlaps with the matmuls around them.
      beside_s: group of communication (`Communication.groups`: the residual stream over tensor, experts' parameters, their gradients) ->
        phase -> the part of that compute that it overlaps with. Without its group it is one of the next wider group; `parameters`: all.
    """
    speed = faster or {}
    parts = dict(beside_s or {}) | {"parameters": compute_s}
    overlappable: dict[str, dict[str, dict[str, float]]] = {group: {phase: {} for phase in compute_s} for group in parts}
    hops: dict[str, dict[str, float]] = {phase: {} for phase in compute_s}
    exposed: dict[str, float] = {}
    for item in communication:
        group = next(name for name in item.groups if name in parts)
        into = hops[item.planned.phase] if item.in_ring else overlappable[group][item.planned.phase] if item.overlappable else exposed
        visible = 1.0 - tensor_overlap if item.planned.where == "layer" and item.planned.axes == ("tensor",) else 1.0
        for kind, seconds in item.by_kind().items():
            into[kind] = into.get(kind, 0.0) + visible * seconds / speed.get(kind, 1.0)
    for phase, compute in compute_s.items():
        free = compute
        for group, beside in parts.items():
            total = sum(overlappable[group][phase].values())
            covered = min(beside[phase], free, total)
            free -= covered
            for kind, seconds in overlappable[group][phase].items():
                exposed[kind] = exposed.get(kind, 0.0) + seconds * (1.0 - eta * covered / total if total else 0.0)
        occupied = 1.0 - free / compute if compute else 1.0  # by collectives queued before the hops
        for kind, seconds in hops[phase].items():
            exposed[kind] = exposed.get(kind, 0.0) + seconds * (1.0 - (ETA_RING * (1.0 - occupied) if eta else 0.0))
    return exposed
