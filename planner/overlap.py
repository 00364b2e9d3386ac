"""How much of a step's communication is paid for: what runs under compute, and what the devices wait for.

Gathers of parameters and reductions of gradients depend on nothing the layer before computes, so a scheduler can run them under compute:
T = Tc + Tm - eta * min(Tc, Tm) for each pass over a layer. The gathers and scatters of the residual stream over `tensor` stand between two
dependent products and are paid in full, or, as rings, in the share that their own products do not cover; embedding, loss and optimiser
have no neighbour to hide under.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ridgeline.planner.collectives import PlannedCollective
from ridgeline.planner.communication import CollectiveCost

ETA = 0.9
"""Share of the shorter of compute and communication that runs under the longer, with XLA's latency-hiding scheduler. The rest is what
communication kernels take from compute: NCCL occupies 8 to 20 of 132 multiprocessors while it runs."""
HIDEABLE = ("data", "fsdp")
POOL_SHARE = 0.95
"""Share of a device's memory that a run gives XLA's pool; the rest is for the CUDA context, NCCL and cuDNN."""
ETA_RING = 0.5
"""The same of the hops of a ring over tensor and the products they stand beside, of which those of attention take less time than the hops
(70B, fsdp=8 x tensor=8, played: 53 %). Less where other communication takes its share of the time: it stands before the hops in line."""
OVERLAP_SLOP = 0.95
"""Share of the pool, less what the step takes in, up to which XLA's scheduler overlaps (its `xla_gpu_memory_limit_slop_factor`): where even
its tightest schedule takes more, it puts every collective's end next to its start, since overlapping takes memory. In a run the pool is
what JAX tells the compiler (`PyClient::CompileAndLoad` passes the allocator's limit); 80 % of the device, XLA's own assumption, holds only
where nobody says. A 405B step of 64 GPUs that takes 71 of 85 GB hides 3 % of its bytes under that assumption (docs/LOG.md)."""


@dataclass(frozen=True)
class Communication:
    """One planned collective with its time."""

    planned: PlannedCollective
    cost: CollectiveCost

    @property
    def seconds(self) -> float:
        """All executions in a step."""
        return self.cost.seconds * self.planned.count

    @property
    def hideable(self) -> bool:
        """Whether it can run under a layer's compute."""
        return self.planned.where == "layer" and set(self.planned.axes) <= set(HIDEABLE)

    @property
    def in_ring(self) -> bool:
        """Whether it is a hop of a ring, beside the products of the ring."""
        return self.planned.kind == "collective-permute"

    @property
    def hides_under(self) -> str:
        """What it can run under, in words."""
        if self.in_ring:
            return "products of the ring"
        return f"{self.planned.phase} pass of the neighbouring layer" if self.hideable else "nothing"

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind of link (nvlink, network, ...), adding up to `seconds`."""
        total = sum(term.seconds for term in self.cost.terms) or 1.0
        shares: dict[str, float] = {}
        for term in self.cost.terms:
            shares[term.link.kind] = shares.get(term.link.kind, 0.0) + term.seconds / total * self.seconds
        return shares


OVERLAP_ROOM = 0.9
"""Share of that limit up to which nothing is given up. Steps that come closer are overlapped in part: 405B over fsdp=32 x tensor=2 hides
84 % of its bytes at 72 GB and 96 % at 69 GB, of a limit of 78; 70B over data=4 x fsdp=64 x tensor=2, 74 of 78 GB, takes 8.4 s for 7.3."""


def overlap_limit_bytes(argument_bytes: int, device_bytes: int) -> int:
    """Return the bytes of a step, arguments and temporaries, up to which XLA's scheduler overlaps all it can."""
    return int(OVERLAP_ROOM * (argument_bytes + OVERLAP_SLOP * (POOL_SHARE * device_bytes - argument_bytes)))


def overlap_share(compiled_bytes: int, argument_bytes: int, device_bytes: int) -> float:
    """Return the eta of a step that takes this much memory: ETA, or 0 where XLA's scheduler gives up overlapping."""
    return ETA if compiled_bytes <= overlap_limit_bytes(argument_bytes, device_bytes) else 0.0


def exposed_s(
    communication: Iterable[Communication], compute_s: Mapping[str, float], eta: float = ETA, faster: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the seconds a step waits for communication, by kind of link.

    Args:
      communication: of the whole step.
      compute_s: seconds of compute of all layers by phase (forward, backward), which hideable communication of that phase runs under.
      eta: share of the shorter of the two that is hidden.
      faster: kind of link -> how many times faster it is taken to be.
    """
    speed = faster or {}
    hideable: dict[str, dict[str, float]] = {phase: {} for phase in compute_s}
    hops: dict[str, dict[str, float]] = {phase: {} for phase in compute_s}
    exposed: dict[str, float] = {}
    for item in communication:
        into = hops[item.planned.phase] if item.in_ring else hideable[item.planned.phase] if item.hideable else exposed
        for kind, seconds in item.by_kind().items():
            into[kind] = into.get(kind, 0.0) + seconds / speed.get(kind, 1.0)
    for phase, compute in compute_s.items():
        total = sum(hideable[phase].values())
        paid = 1.0 - eta * min(compute, total) / total if total else 0.0
        for kind, seconds in hideable[phase].items():
            exposed[kind] = exposed.get(kind, 0.0) + seconds * paid
        waits = min(1.0, total / compute) if compute else 1.0  # behind those, in line
        for kind, seconds in hops[phase].items():
            exposed[kind] = exposed.get(kind, 0.0) + seconds * (1.0 - (ETA_RING * (1.0 - waits) if eta else 0.0))
    return exposed
