"""The bottleneck of a layout, what to change, and why obvious alternative layouts are slower.

A ceiling (compute, memory bandwidth, a kind of link, ...) is the bottleneck if raising it speeds the step up most: the step is predicted
again with each ceiling doubled.
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
class Bottleneck:
    """The ceiling that limits a step most."""

    ceiling: str
    """One of CEILINGS."""
    share: float
    """Fraction of the step spent on it."""
    gain: float
    """Relative gain in throughput if it were twice as high."""
    sentence: str
    """The bottleneck with its share, the speed-up from doubling it, and what to change."""


def bottleneck(candidate: Candidate, machine: Machine) -> Bottleneck:
    """Return the ceiling whose doubling would speed the candidate up most, and what to change."""
    step = candidate.step
    gains = {
        ceiling: step.step_s / candidate.parts.assemble({ceiling: 2.0}).step_s - 1
        for ceiling in CEILINGS
        if ceiling in ("compute", "hbm", "host_input") or step.breakdown_s.get(ceiling, 0.0) > 0 or ceiling in _link_kinds(candidate)
    }
    ceiling = max(gains, key=lambda name: gains[name])
    share = step.breakdown_s.get(ceiling, 0.0) / step.step_s
    sentence = f"{_finding(ceiling, candidate, share)}; doubling it would speed a step up {1 + gains[ceiling]:.2f}x."
    return Bottleneck(ceiling, share, gains[ceiling], f"{sentence} {_change(ceiling, candidate, machine)}")


def _link_kinds(candidate: Candidate) -> set[str]:
    return {term.link.kind for item in candidate.step.communication for term in item.cost.terms}


def _finding(ceiling: str, candidate: Candidate, share: float) -> str:
    """Return the first part of the sentence: the bottleneck and its share of the step."""
    if ceiling == "compute":
        return f"The bottleneck is compute: matmuls and attention take {share:.0%} of the step"
    if ceiling == "hbm":
        return f"The bottleneck is device memory bandwidth: passes of other kernels take {share:.0%} of the step"
    if ceiling == "host_input":
        return f"The bottleneck is host input: devices wait for data {share:.0%} of the step"
    name = {"nvlink": "NVLink", "network": "the network", "pcie": "PCIe", "memory": "the link to host memory"}[ceiling]
    return f"The bottleneck is {name}: exposed communication takes {share:.0%} of the step, most in the {_slowest(candidate, ceiling)}"


def _slowest(candidate: Candidate, kind: str) -> str:
    """Return the collective that takes most time on a kind of link."""
    items = [item for item in candidate.step.communication if kind in item.by_kind()]
    slowest = max(items, key=lambda item: item.by_kind()[kind])
    return f"{slowest.planned.kind} of {slowest.planned.what} over {' and '.join(slowest.planned.axes)}"


def _change(ceiling: str, candidate: Candidate, machine: Machine) -> str:
    """Return what the user can change."""
    if ceiling == "host_input":
        return "Use more loader workers per node (data.workers), or fewer devices per host."
    if ceiling == "hbm":
        if candidate.parts.config.data.document_masking:
            return "To reduce memory traffic, set data.document_masking=false, or use fused kernels."
        return "To reduce memory traffic, use fused kernels or a larger compute.loss_chunk. More FLOP/s would not help."
    if ceiling == "compute":
        return _keep_more(candidate, machine) or f"{_recomputed(candidate)}: only more devices or a lower-precision dtype make it faster."
    layout = candidate.layout
    if layout.accumulation > 1:
        return (
            f"Weights are gathered for each of {layout.accumulation} microbatches: with memory for twice as large ones, half the traffic"
            " would remain."
        )
    if layout.tensor > 1:
        return f"mesh.tensor={layout.tensor} communicates the residual stream in every layer: a larger batch allows a smaller tensor axis."
    return (
        f"{candidate.microbatch} row{'s' if candidate.microbatch != 1 else ''} per device are too little compute to overlap it with:"
        " raise data.batch_size, or use fewer nodes."
    )


def _recomputed(candidate: Candidate) -> str:
    """Return what the backward pass recomputes, for the case that keeping more brings nothing."""
    policy = candidate.layout.remat.policy
    if policy == "none":
        return "Nothing is recomputed"
    return f"compute.remat.policy={policy} is the fastest policy that fits"


def _keep_more(candidate: Candidate, machine: Machine) -> str | None:
    """Return the gain of the next policy that keeps more, and the memory it lacks; None when it brings nothing or would fit."""
    remat = candidate.layout.remat
    if remat not in MEMORY_LADDER[1:]:
        return None
    more = MEMORY_LADDER[MEMORY_LADDER.index(remat) - 1]
    layout = replace(candidate.layout, remat=more)
    config = layout.apply(candidate.parts.config)
    memory = memory_per_device(config, layout.sizes, gpu=machine.device.tensor_cores, device=machine.device)
    gain = candidate.step.step_s / step_parts(config, layout.sizes, machine, memory=memory).assemble().step_s - 1
    short = memory.total_bytes - capacity_bytes(machine)
    if short <= 0 or gain <= 0:
        return None
    return f"compute.remat.policy={more.policy} would be {1 + gain:.2f}x as fast, but needs {short / 1e9:.1f} GB more than a device has."


STAGES = "pipeline stages across nodes"


@dataclass(frozen=True)
class Alternative:
    """An obvious layout, and why it was not chosen."""

    name: str
    """What the layout is, in words."""
    mesh: str
    """Its mesh, microbatches and rematerialization."""
    slower: float | None
    """Step time relative to the best layout, minus 1 (0.2: 20 % longer); None: the layout is rejected."""
    reason: str
    """Why it is slower or rejected."""


def alternatives(scale: Scale, machine: Machine) -> list[Alternative]:
    """Compare the best layout on a number of nodes with common alternatives."""
    best = scale.best
    if best is None:
        return []
    node = min(machine.cluster.devices_per_node, scale.devices)
    common: dict[str, Callable[[Layout], bool]] = {
        "data parallel only": lambda x: x.data == scale.devices and not x.zero_stage,
        "data parallel with ZeRO stage 2": lambda x: x.data == scale.devices and x.zero_stage == 2,
        "fsdp over everything": lambda x: x.fsdp == scale.devices,
        "fsdp in a node, data across": lambda x: x.fsdp == node and x.tensor == 1,
        "tensor in a node, fsdp across": lambda x: x.tensor == node and x.data == 1,
        "nothing recomputed": lambda x: x.remat.policy == "none",
        "everything recomputed": lambda x: x.remat.policy == "full",
        STAGES: lambda x: x.pipeline > 1,
    }
    found = []
    for name, matches in common.items():
        if matches(best.layout):
            continue
        staged = best.layout.pipeline > 1 or name == STAGES
        same = next((c for c in scale.candidates if matches(c.layout) and (staged or c.layout.pipeline == 1)), None)
        if same is not None:
            slower = same.step.step_s / best.step.step_s - 1
            found.append(Alternative(name, _full_text(same.layout), slower, _slower_reason(same, best)))
        else:
            rejected = next((r for r in scale.rejections if _rejected_as(r, matches)), None)
            if rejected is not None:
                mesh = " x ".join(f"{axis}={size}" for axis, size in rejected.mesh.items())
                found.append(Alternative(name, mesh, None, rejected.reason))
    return found


def stages_sentence(scale: Scale) -> str:
    """Return whether pipeline stages pay on a number of nodes, and why; empty where none were tried."""
    found = {staged: next((c for c in scale.candidates if (c.layout.pipeline > 1) is staged), None) for staged in (True, False)}
    with_them, without = found[True], found[False]
    if with_them is None:
        return ""
    bubble = f"{with_them.step.breakdown_s['bubble'] / with_them.step.step_s:.0%} bubble"
    name = f"{with_them.layout.text()}, {with_them.layout.accumulation} microbatches"
    if without is None:
        return f"Pipeline stages pay: nothing fits without them ({name}: {bubble})."
    faster = without.step.step_s / with_them.step.step_s - 1
    if faster > 0:
        network = without.step.breakdown_s.get("network", 0.0) / without.step.step_s
        return f"Pipeline stages pay: {1 + faster:.2f}x as fast as without ({name}: {bubble}; {network:.0%} exposed network without them)."
    why, slower = _slower_reason(with_them, without), -faster / (1 + faster)
    return f"Pipeline stages do not pay: {name} takes {slower:.0%} longer ({why}). They pay with a slower network between nodes."


def _rejected_as(rejection: Rejection, matches: Callable[[Layout], bool]) -> bool:
    """Whether a rejected layout matches; a mesh that was rejected as a whole matches no rematerialization policy."""
    mesh, remat = rejection.mesh, next((r for r in MEMORY_LADDER if r.policy == rejection.remat), None)
    layout = Layout(
        mesh.get("data", 1),
        mesh.get("fsdp", 1),
        mesh.get("tensor", 1),
        remat=remat or RematConfig(policy="dots"),
        context=mesh.get("context", 1),
        expert=mesh.get("expert", 1),
    )
    return matches(layout)


def _full_text(layout: Layout) -> str:
    return f"{layout.text()}, {layout.accumulation} x, remat {layout.remat.policy}"


def _slower_reason(other: Candidate, best: Candidate) -> str:
    """Return the ceiling on which an alternative spends most additional time, relative to the best step."""
    more = {name: seconds - best.step.breakdown_s.get(name, 0.0) for name, seconds in other.step.breakdown_s.items()}
    worst = max(more, key=lambda name: more[name])
    names = {"compute": "compute", "hbm": "memory traffic", "host_input": "waiting for data", "bubble": "bubble of the stages"}
    what = names.get(worst, f"exposed {worst} communication")
    return f"{more[worst] / best.step.step_s:.0%} of the best step more {what}" if more[worst] > 0 else "not faster"
