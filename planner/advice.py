"""What binds a layout, in one sentence, and why the obvious alternatives lose.

A ceiling binds when raising it helps most: the step is predicted again with each ceiling twice as high, and the largest gain names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ridgeline.configs.schema import RematConfig
from ridgeline.planner.layouts import MEMORY_LADDER, Layout
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import Candidate, Rejection, Scale, capacity_bytes
from ridgeline.planner.step_time import Machine, step_parts

CEILINGS = ("compute", "hbm", "nvlink", "network", "pcie", "memory", "host_input")


@dataclass(frozen=True)
class Binding:
    """The ceiling that binds."""

    ceiling: str
    share: float
    """Of the step, spent on it."""
    gain: float
    """Relative gain in throughput if it were twice as high."""
    sentence: str
    """What binds and what would change it."""


def binding(candidate: Candidate, machine: Machine) -> Binding:
    """Name the ceiling whose doubling would speed the candidate up most, and what the user can do about it."""
    step = candidate.step
    gains = {
        ceiling: step.step_s / candidate.parts.assemble({ceiling: 2.0}).step_s - 1
        for ceiling in CEILINGS
        if ceiling in ("compute", "hbm", "host_input") or step.breakdown_s.get(ceiling, 0.0) > 0 or ceiling in _link_kinds(candidate)
    }
    ceiling = max(gains, key=lambda name: gains[name])
    share = step.breakdown_s.get(ceiling, 0.0) / step.step_s
    sentence = (
        f"{_WHAT[ceiling](candidate, share)}; twice as much of it would give {gains[ceiling]:.0%}. {_change(ceiling, candidate, machine)}"
    )
    return Binding(ceiling, share, gains[ceiling], sentence)


def _link_kinds(candidate: Candidate) -> set[str]:
    return {term.link.kind for item in candidate.step.communication for term in item.cost.terms}


def _largest_wait(candidate: Candidate, kind: str) -> str:
    """The collective that spends most time on a kind of link."""
    items = [item for item in candidate.step.communication if kind in item.by_kind()]
    worst = max(items, key=lambda item: item.by_kind()[kind])
    return f"{worst.planned.kind} of {worst.planned.what} over {' and '.join(worst.planned.axes)}"


_WHAT: dict[str, Callable[[Candidate, float], str]] = {
    "compute": lambda c, share: f"Compute binds: products and attention take {share:.0%} of the step",
    "hbm": lambda c, share: f"Device memory bandwidth binds: passes beside the products take {share:.0%} of the step",
    "nvlink": lambda c, share: f"NVLink binds: {share:.0%} of the step waits for it, most for the {_largest_wait(c, 'nvlink')}",
    "network": lambda c, share: f"The network binds: {share:.0%} of the step waits for it, most for the {_largest_wait(c, 'network')}",
    "pcie": lambda c, share: f"PCIe binds: {share:.0%} of the step waits for it, most for the {_largest_wait(c, 'pcie')}",
    "memory": lambda c, share: f"Host memory links bind: {share:.0%} of the step waits for them, most for the {_largest_wait(c, 'memory')}",
    "host_input": lambda c, share: f"Host input binds: devices wait for rows {share:.0%} of the step",
}


def _change(ceiling: str, candidate: Candidate, machine: Machine) -> str:
    """What the user can do."""
    if ceiling == "host_input":
        return "More loader workers per node (data.workers), or fewer devices per host."
    if ceiling == "hbm":
        if candidate.parts.config.data.document_masking:
            return "Rows without packed documents (data.document_masking=false), or fewer elementwise passes (fused kernels), would help."
        return "Fused kernels or a larger compute.loss_chunk would help; more FLOP/s would not."
    keep = _keep_more(candidate, machine)
    if ceiling == "compute":
        return keep or "Only more devices or a narrower dtype make this faster: nothing is recomputed."
    layout = candidate.layout
    if layout.accumulation > 1:
        return (
            f"Weights are gathered for each of {layout.accumulation} microbatches: device memory for larger ones would halve the traffic."
        )
    if layout.tensor > 1:
        return f"tensor={layout.tensor} moves the residual stream in every layer: a larger batch would allow a smaller tensor axis."
    return (
        f"{candidate.microbatch} row{'s' if candidate.microbatch != 1 else ''} per device hide too little: a larger data.batch_size,"
        f" or fewer nodes, would give compute to hide it under."
    )


def _keep_more(candidate: Candidate, machine: Machine) -> str | None:
    """What the next policy up the memory ladder would bring, when something is recomputed."""
    remat = candidate.layout.remat
    if remat not in MEMORY_LADDER[1:]:
        return None
    more = MEMORY_LADDER[MEMORY_LADDER.index(remat) - 1]
    layout = replace(candidate.layout, remat=more)
    config = layout.apply(candidate.parts.config)
    memory = memory_per_device(config, layout.sizes, gpu=machine.device.tensor_cores)
    gain = candidate.step.step_s / step_parts(config, layout.sizes, machine).assemble().step_s - 1
    short = memory.total_bytes - capacity_bytes(machine)
    if short <= 0 or gain <= 0:
        return None
    return f"compute.remat.policy={more.policy} would give {gain:.0%}, but needs {short / 1e9:.1f} GB more than the device has."


@dataclass(frozen=True)
class Alternative:
    """An obvious layout and why it is not the one chosen."""

    name: str
    mesh: str
    slower: float | None
    """Relative to the best, 0.2: takes 20 % longer; None: it is out."""
    reason: str


def alternatives(scale: Scale, machine: Machine) -> list[Alternative]:
    """Compare the best layout of a scale with the ones a reader would ask about."""
    best = scale.best
    if best is None:
        return []
    node = min(machine.cluster.devices_per_node, scale.devices)
    asked: dict[str, Callable[[Layout], bool]] = {
        "data parallel only": lambda x: x.data == scale.devices,
        "fsdp over everything": lambda x: x.fsdp == scale.devices,
        "fsdp in a node, data across": lambda x: x.fsdp == node and x.tensor == 1,
        "tensor in a node, fsdp across": lambda x: x.tensor == node and x.data == 1,
        "nothing recomputed": lambda x: x.remat.policy == "none",
        "everything recomputed": lambda x: x.remat.policy == "full",
    }
    found = []
    for name, matches in asked.items():
        if matches(best.layout):
            continue
        same = next((candidate for candidate in scale.candidates if matches(candidate.layout)), None)
        if same is not None:
            slower = same.step.step_s / best.step.step_s - 1
            found.append(Alternative(name, _full_text(same.layout), slower, _slower_reason(same, best)))
        else:
            rejected = next((r for r in scale.rejections if _rejected_as(r, matches)), None)
            if rejected is not None:
                mesh = " x ".join(f"{axis}={size}" for axis, size in rejected.mesh.items())
                found.append(Alternative(name, mesh, None, rejected.reason))
    return found


def _rejected_as(rejection: Rejection, matches: Callable[[Layout], bool]) -> bool:
    """Whether a rejected layout is one the question is about; a mesh that is refused answers for no rematerialisation policy."""
    mesh, remat = rejection.mesh, next((r for r in MEMORY_LADDER if r.policy == rejection.remat), None)
    layout = Layout(mesh.get("data", 1), mesh.get("fsdp", 1), mesh.get("tensor", 1), remat=remat or RematConfig(policy="dots"))
    return matches(layout)


def _full_text(layout: Layout) -> str:
    return f"{layout.text()}, {layout.accumulation} x, remat {layout.remat.policy}"


def _slower_reason(other: Candidate, best: Candidate) -> str:
    """The ceiling on which an alternative spends most more than the best does."""
    more = {name: seconds - best.step.breakdown_s.get(name, 0.0) for name, seconds in other.step.breakdown_s.items()}
    worst = max(more, key=lambda name: more[name])
    words = {"compute": "computing", "hbm": "passes over device memory", "host_input": "waiting for rows"}.get(
        worst, f"waiting for {worst}"
    )
    return f"{more[worst] / best.step.step_s:.0%} of the best step more {words}" if more[worst] > 0 else "no faster"
