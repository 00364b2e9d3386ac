"""Changes of a config that make it fit into device memory, or make it faster.

* `fitting_changes`: the smallest change of one layout that fits: more microbatches, stronger rematerialization, more sharding.
* `lower_precision_state`: the first lower-precision training state with which some layout fits.
* `offloaded_state`: the optimizer state in host memory.
* `larger_loss_chunk`: a larger chunk of the cross-entropy, where that is faster and fits. Every chunk reads and writes the whole float32
  gradient of the unembedding, so small chunks of a large vocabulary are limited by memory bandwidth; larger ones have larger matmuls and
  need `chunk * V * (4 + a)` bytes of logits (V vocabulary rows, a bytes of the compute dtype).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.remat import POLICIES
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.hardware import Hardware, hardware
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import Candidate, capacity_bytes, search_scale
from ridgeline.planner.step_time import Machine, step_parts

REMAT_LADDER = tuple(name for name, policy in POLICIES.items() if not policy.takes_names)
"""Rematerialization policies without names, from most to least memory."""
NARROWEST_MOMENTS = {"adamw": "int8", "lion": "bfloat16", "muon": "bfloat16", "sgd": "bfloat16"}
"""Optimizer -> smallest dtype of its moments (configs/rules.py). Adafactor's statistics are small in any dtype."""
LEAST_GAIN = 0.01
"""Smallest relative gain in throughput that is worth a suggestion."""
NEARLY = 0.002
"""A smaller loss chunk is preferred where its step takes at most this fraction longer."""
DOUBLINGS = 3
"""How often the loss chunk is doubled at most."""


def fitting_changes(config: Config, sizes: Mapping[str, int], capacity_bytes: int, device: Hardware | None = None) -> list[str] | None:
    """Return the overrides of the smallest change whose estimated memory is within the capacity; None when no single or paired change is.

    Changes are tried in the order of their cost: microbatches cost kernel launches, stronger rematerialization costs FLOPs, more sharding
    costs communication, pairs cost both. device: as in `memory_per_device`.
    """
    for overrides, changed, mesh in _changes(config, sizes):
        if memory_per_device(changed, mesh, device=device).total_bytes <= capacity_bytes:
            return overrides
    return None


def _changes(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[list[str], Config, Mapping[str, int]]]:
    accumulations = list(_accumulations(config, sizes))
    policies = list(_policies(config))
    for overrides, changed in (*accumulations, *policies):
        yield overrides, changed, sizes
    for remat, with_remat in policies:
        for more, changed in _accumulations(with_remat, sizes):
            yield remat + more, changed, sizes
    data, fsdp = sizes["data"], sizes["fsdp"]
    factor = 2
    while data % factor == 0:
        mesh = {**sizes, "data": data // factor, "fsdp": fsdp * factor}
        overrides = [f"mesh.data={mesh['data']}", f"mesh.fsdp={mesh['fsdp']}"]
        yield overrides, config, mesh
        for remat, with_remat in policies:
            yield overrides + remat, with_remat, mesh
        factor *= 2


def _accumulations(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[list[str], Config]]:
    rows = config.data.batch_size // (sizes["data"] * sizes["fsdp"] * sizes["expert"])
    for count in range(config.trainer.accumulation + 1, rows + 1):
        if rows % count == 0:
            trainer = config.trainer.model_copy(update={"accumulation": count})
            yield [f"trainer.accumulation={count}"], config.model_copy(update={"trainer": trainer})


def _policies(config: Config) -> Iterator[tuple[list[str], Config]]:
    now = config.compute.remat.policy
    stronger = REMAT_LADDER[REMAT_LADDER.index(now) + 1 :] if now in REMAT_LADDER else ("full",)
    for policy in stronger:
        remat = config.compute.remat.model_copy(update={"policy": policy, "names": []})
        compute = config.compute.model_copy(update={"remat": remat})
        yield [f"compute.remat.policy={policy}"], config.model_copy(update={"compute": compute})


@dataclass(frozen=True)
class StateChange:
    """Settings of a lower-precision training state with which a config fits."""

    settings: dict[str, object]
    """Key below `precision` to value."""
    best: Candidate
    """The fastest layout that fits with them."""
    saved_bytes: int
    """Per device, compared with the same layout without them."""

    @property
    def overrides(self) -> str:
        """The settings as command-line overrides."""
        return " ".join(f"precision.{key}={str(value).lower()}" for key, value in self.settings.items())

    @property
    def sentence(self) -> str:
        """The suggestion: the overrides, the bytes they save, the layout that then fits."""
        layout = self.best.layout
        where = f"{layout.text()}, {layout.accumulation} x, remat {layout.remat.policy}"
        return f"{self.overrides} saves {self.saved_bytes / 1e9:.1f} GB per device and fits ({where})."


def state_settings(config: Config) -> Iterator[dict[str, object]]:
    """Yield the settings of `precision` to try, smallest loss of precision first. Settings that change nothing are skipped."""
    now = config.precision.model_dump()
    moments = {"moments": NARROWEST_MOMENTS[config.optimizer.kind]} if config.optimizer.kind in NARROWEST_MOMENTS else {}
    gradients = {"gradients": "bfloat16"}
    masters = {"params": "bfloat16", "stochastic_rounding": True}
    tried: list[dict[str, object]] = [{}]
    for wanted in (moments, gradients, moments | gradients, moments | masters, moments | gradients | masters):
        changed: dict[str, object] = {key: value for key, value in wanted.items() if now[key] != value and now[key] != "int8"}
        if changed not in tried:
            tried.append(changed)
            yield changed


def lower_precision_state(
    config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int, tokens: float
) -> StateChange | None:
    """Return the first of `state_settings` with which some layout fits on this number of nodes; None: none does."""
    for settings in state_settings(config):
        changed = config.model_copy(update={"precision": config.precision.model_copy(update=settings)})
        best = search_scale(changed, cluster, calibration, nodes, tokens).best
        if best is not None:
            before = memory_per_device(best.layout.apply(config), best.layout.sizes, device=hardware(cluster.device))
            return StateChange(settings, best, before.total_bytes - best.memory.total_bytes)
    return None


@dataclass(frozen=True)
class OffloadChange:
    """A layout that fits with the optimizer state in host memory."""

    best: Candidate
    """The fastest one."""
    saved_bytes: int
    """Per device, compared with the same layout without it."""

    @property
    def sentence(self) -> str:
        """The suggestion: the setting, the bytes it saves and moves, the layout that then fits, the share of the step that copies take."""
        layout, step = self.best.layout, self.best.step
        where = f"{layout.text()}, {layout.accumulation} x, remat {layout.remat.policy}"
        return (
            f"optimizer.offload=true, which changes no results, saves {self.saved_bytes / 1e9:.1f} GB per device and fits ({where}; "
            f"copies to and from host memory take {step.breakdown_s.get('pcie', 0.0) / step.step_s:.0%} of the step)."
        )


def offloaded_state(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int, tokens: float) -> OffloadChange | None:
    """Return the fastest layout that fits on this number of nodes with optimizer.offload; None: none does, or it is refused."""
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": True})})
    if config.optimizer.offload or check_config(changed) or not hardware(cluster.device).tensor_cores:
        return None
    best = search_scale(changed, cluster, calibration, nodes, tokens).best
    if best is None:
        return None
    before = memory_per_device(best.layout.apply(config), best.layout.sizes, device=hardware(cluster.device))
    return OffloadChange(best, before.total_bytes - best.memory.total_bytes)


@dataclass(frozen=True)
class ChunkChange:
    """A larger compute.loss_chunk that is faster and fits."""

    loss_chunk: int
    """Tokens."""
    gain: float
    """Relative gain in throughput."""
    memory_bytes: int
    """Per device, with the larger chunk."""

    @property
    def sentence(self) -> str:
        """The suggestion with its gain and memory."""
        return (
            f"compute.loss_chunk={self.loss_chunk} would speed a step up {1 + self.gain:.3f}x and fits ({self.memory_bytes / 1e9:.1f} GB)."
        )


def larger_loss_chunk(candidate: Candidate, machine: Machine) -> ChunkChange | None:
    """Return the smallest larger chunk that is nearly the fastest of those that fit; None: the gain would be below LEAST_GAIN."""
    config, sizes = candidate.parts.config, candidate.layout.sizes
    fitting: list[tuple[int, float, int]] = []
    for doubling in range(1, DOUBLINGS + 1):
        chunk = config.compute.loss_chunk << doubling
        larger = _with_chunk(config, chunk)
        memory = memory_per_device(larger, sizes, gpu=machine.device.tensor_cores, device=machine.device)
        if memory.total_bytes > capacity_bytes(machine):
            break
        fitting.append((chunk, step_parts(larger, sizes, machine, memory=memory).assemble().step_s, memory.total_bytes))
    if not fitting:
        return None
    fastest_s = min(step_s for _, step_s, _ in fitting)
    chunk, step_s, size = next(found for found in fitting if found[1] <= fastest_s * (1 + NEARLY))
    # Predicted again: candidate.step has the overlap of a device that is nearly full (planner.overlap), these steps do not.
    now_s = step_parts(config, sizes, machine).assemble().step_s
    gain = now_s / step_s - 1
    return ChunkChange(chunk, gain, size) if gain >= LEAST_GAIN else None


def _with_chunk(config: Config, chunk: int) -> Config:
    return config.model_copy(update={"compute": config.compute.model_copy(update={"loss_chunk": chunk})})
