"""Seconds of one optimizer step by ceiling: an extended roofline.

    step = compute + device memory + exposed communication (per kind of link) + optimizer, or host input where that takes longer

Each ceiling is a lower bound: no step is faster than its matmuls at their calibrated rate, than its passes over device memory, than its
exposed communication, or than its input data can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.model_schema import MoEConfig
from ridgeline.configs.pipeline import layer_slots
from ridgeline.configs.schema import Config
from ridgeline.planner.activations import offloaded_bytes
from ridgeline.planner.as_run import as_run
from ridgeline.planner.attention_time import PassTimes
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.collectives import PlannedCollective, compiled_collectives
from ridgeline.planner.communication import CollectiveCost, forwarded_s, hop_s, time_s
from ridgeline.planner.experts import exchange_method
from ridgeline.planner.flops import config_flops_per_token
from ridgeline.planner.hardware import Hardware, hardware
from ridgeline.planner.host_copies import HostCopy, host_copies, waits_s
from ridgeline.planner.kernels import Kernels
from ridgeline.planner.layer_costs import LayerPoint, without_recompute
from ridgeline.planner.links import Fabric
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import MemoryEstimate, memory_per_device
from ridgeline.planner.optimizer_state import ON_DEVICE, offloaded_state_bytes, streamed_state_bytes
from ridgeline.planner.overlap import Communication, beside_gradients, exposed_s, overlap_share
from ridgeline.planner.recompute import recomputed_by
from ridgeline.planner.stragglers import slowest_over_mean
from ridgeline.planner.work import Work

HOST_INPUT_TOKENS_PER_S = 20e6
"""Tokens per second and host of the input pipeline where the calibration has none: a quarter of what two cores read (docs/LOG.md)."""
BATCH_BYTES_PER_TOKEN = 20
"""Bytes of a batch per token: five int32 or float32 arrays."""


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step on a mesh."""

    step_s: float
    breakdown_s: dict[str, float]
    """Seconds by ceiling: compute, hbm, nvlink, network (and other kinds of links), optimizer, bubble, host_input. They sum to step_s."""
    tokens_per_s: float
    """Throughput of all devices together."""
    devices: int
    mfu: float
    """Model FLOPs (planner.flops: causal, no recomputation) over the datasheet peak."""
    communication: tuple[Communication, ...]

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput of one device."""
        return self.tokens_per_s / self.devices

    @property
    def communication_s(self) -> float:
        """Seconds of all communication, overlapped or not."""
        return sum(item.seconds for item in self.communication)


class Machine:
    """A cluster for one number of devices: device, links and calibration, with a cache of collective times."""

    def __init__(self, cluster: ClusterConfig, calibration: Calibration, devices: int) -> None:
        self.cluster, self.calibration, self.devices = cluster, calibration, devices
        self.device: Hardware = hardware(cluster.device)
        self.fabric = Fabric.from_cluster(cluster, calibration, num_devices=devices)
        self._costs: dict[tuple[str, int, tuple[tuple[str, int], ...], tuple[str, ...]], CollectiveCost] = {}

    def cost(self, item: PlannedCollective, sizes: Mapping[str, int], moe: MoEConfig | None = None) -> CollectiveCost:
        """Return the time of one execution of a planned collective on a mesh of these axis sizes. moe: the model's experts."""
        size = item.sent_bytes
        if moe is not None and item.of_tokens and item.kind == "all-to-all" and self.calibration.software.forwards_tokens:
            group = self.fabric.axes_group(sizes, item.axes, self.calibration.software.mesh_order)
            return forwarded_s(size, group, moe.experts, moe.experts_per_token)
        key = (item.kind, size, tuple(sizes.items()), item.axes)
        found = self._costs.get(key)
        if found is None:
            group = self.fabric.axes_group(sizes, item.axes, self.calibration.software.mesh_order)
            permuted = item.kind == "collective-permute"
            found = self._costs[key] = hop_s(size, group) if permuted else time_s(item.kind.removeprefix("ragged-"), size, group)
        return found


@dataclass(frozen=True)
class StepParts:
    """Computation and communication of a step, before they are overlapped."""

    config: Config
    devices: int
    forward: Work
    """Forward pass of all layers and microbatches."""
    backward: Work
    """Backward pass of all layers and microbatches, recomputation included."""
    rest: Work
    """Embedding, loss, the scan's stacks and gradient accumulation."""
    optimizer: Work
    """The update."""
    communication: tuple[Communication, ...]
    host_input_s: float
    peak_flops: float
    eta: float
    """Fraction of the shorter of compute and communication that is overlapped with the longer (planner.overlap)."""
    tensor_overlap: float = 0.0
    """Fraction of the communication over tensor that is overlapped with the matmuls around it (planner.software)."""
    beside: Mapping[str, PassTimes] = field(default_factory=dict)
    """Group of communication -> the part of `forward` and `backward` that it overlaps with (planner.overlap.exposed_s)."""
    measured: LayerPoint | None = None
    """Measurement that the time of recomputation is from; None: it is counted by formulas."""
    recompute_s: float | None = None
    """Seconds per step that the policy adds to `none` by that measurement, part of `backward`; None: counted by formulas."""
    bubble: float = 0.0
    """Share of the time of `forward`, `backward` and their communication in which a pipeline stage does nothing of use, empty layers
    included."""
    launch_s: float = 0.0
    """Seconds in which the host launches the kernels of all layers: `forward`, `backward` and their communication take at least as long."""
    host_copies: tuple[HostCopy, ...] = ()
    """Copies of activations to host memory in the forward pass, and back in the backward pass."""
    state_copy_s: float = 0.0
    """Seconds of copying the optimizer state from host memory, and back at the same time (optimizer.offload)."""

    def assemble(self, faster: Mapping[str, float] | None = None) -> StepEstimate:
        """Overlap communication with compute. `faster`: ceiling -> hypothetical speed-up, default 1."""
        speed = {"compute": 1.0, "hbm": 1.0, "host_input": 1.0, **(faster or {})}

        def scaled(work: Work) -> Work:
            return Work(work.compute_s / speed["compute"], work.memory_s / speed["hbm"])

        forward, backward, rest = scaled(self.forward), scaled(self.backward), scaled(self.rest)
        passes = {"forward": forward.seconds, "backward": backward.seconds}
        beside = {
            group: {"forward": scaled(times.forward).seconds, "backward": scaled(times.backward).seconds}
            for group, times in self.beside.items()
        }
        exposed = exposed_s(self.communication, passes, self.eta, speed, self.tensor_overlap, beside)
        state_copies_s = max(0.0, self.state_copy_s / speed.get("pcie", 1.0) - scaled(self.optimizer).seconds)
        waited_s = waits_s(self.host_copies, forward.seconds, backward.seconds, speed.get("pcie", 1.0)) + state_copies_s
        if waited_s:
            exposed["pcie"] = exposed.get("pcie", 0.0) + waited_s
        outside = [item for item in self.communication if item.planned.where != "layer"]
        apart = bool(self.bubble or self.launch_s)
        once = exposed_s(outside, {"forward": 0.0, "backward": 0.0}, self.eta, speed) if apart else exposed
        in_ticks = {kind: seconds - once.get(kind, 0.0) for kind, seconds in exposed.items()}
        busy = 1 - self.bubble
        breakdown = {
            "compute": busy * (forward.compute_s + backward.compute_s) + rest.compute_s,
            "hbm": busy * (forward.memory_s + backward.memory_s) + rest.memory_s,
            "nvlink": 0.0,
            "network": 0.0,
            **{kind: seconds - self.bubble * in_ticks[kind] for kind, seconds in exposed.items()},
            "optimizer": scaled(self.optimizer).seconds,
            "bubble": self.bubble * (forward.seconds + backward.seconds + sum(in_ticks.values())),
        }
        if self.launch_s:
            in_layers = forward.seconds + backward.seconds + sum(in_ticks.values())
            breakdown["host_launch"] = max(0.0, self.launch_s - in_layers)
        on_device = sum(breakdown.values())
        breakdown["host_input"] = max(0.0, self.host_input_s / speed["host_input"] - on_device)
        step_s = on_device + breakdown["host_input"]
        config = self.config
        tokens = config.data.batch_size * config.data.seq_len
        flops = config_flops_per_token(config).total * tokens
        return StepEstimate(
            step_s=step_s,
            breakdown_s=breakdown,
            tokens_per_s=tokens / step_s,
            devices=self.devices,
            mfu=flops / (step_s * self.peak_flops * self.devices),
            communication=self.communication,
        )


def step_parts(
    config: Config,
    sizes: Mapping[str, int],
    machine: Machine,
    *,
    memory: MemoryEstimate | None = None,
) -> StepParts:
    """Return computation and communication of one step (arguments as in `step_time`).

    Args:
      memory: `memory_per_device` of the same config and mesh, from which the overlap follows; None: it is computed.
    """
    local = LocalSizes.of(config, sizes)
    memory = memory or memory_per_device(config, sizes, gpu=machine.device.tensor_cores, device=machine.device)
    repeats = config.trainer.accumulation
    # Bubble included: in a tick without a unit a stage computes nothing of use, and takes as long.
    ticks = local.schedule.forward_ticks / local.schedule.chunks
    layers = local.model.num_layers * ticks
    # The shapes of measured layers have no experts.
    measured, again_s = None if config.model.moe is not None else machine.calibration.layer(machine.device, local), None
    if measured is not None:
        again_s = measured.again_s(config.compute.remat, local.tokens)
    counted = local if again_s is None else LocalSizes.of(without_recompute(config), sizes)
    kernels = Kernels(counted, machine.device, machine.calibration)
    again = _recompute(again_s or 0.0) * layers
    software = machine.calibration.software
    planned = as_run(
        compiled_collectives(config, sizes, gpu=machine.device.name != "cpu"),
        software,
        local.schedule,
        narrow=config.precision.matmul != "compute",
    )
    layers_of_stages = layer_slots(config, local.pipeline) if local.pipeline > 1 else config.model.num_layers  # some may be empty
    slowest = slowest_over_mean(local.devices) if machine.device.tensor_cores else 1.0
    offloaded = offloaded_bytes(local) * repeats
    state = offloaded_state_bytes(local) if machine.device.tensor_cores else 0
    copies = Work(0.0, kernels.memory_s(offloaded))  # host copies also use device memory bandwidth
    in_queue = (local.ring and local.context > 1) or exchange_method(config.model.moe, config.compute.experts, sizes) is not None
    in_queue |= config.model.moe is not None and local.tensor > 1
    stream = software.overlaps_scatters and config.model.moe is None
    beside = {"stream": kernels.beside_scatters()} if stream else {}
    if software.one_queue and local.beside_attention:
        core = kernels.attention()
        beside |= {"experts": PassTimes(core.forward, core.forward), "expert gradients": PassTimes(Work(), core.backward)}
    elif software.one_queue and in_queue:
        beside |= {"experts": kernels.around_attention()}
    return StepParts(
        config=config,
        devices=local.devices,
        forward=(kernels.layer_forward() * layers + kernels.modules_forward() * repeats + copies) * slowest,
        backward=(kernels.layer_backward() * layers + kernels.modules_backward() * repeats + again + copies) * slowest,
        rest=(_outside(kernels, layers_of_stages - config.model.num_layers) + kernels.stacks() + kernels.accumulate())
        * (repeats * slowest),
        bubble=1 - (1 - local.schedule.bubble_fraction) * config.model.num_layers / layers_of_stages,
        optimizer=(kernels.optimizer() + Work(0.0, kernels.memory_s(2 * state))) * slowest,
        communication=tuple(
            Communication(
                item,
                machine.cost(item, sizes, config.model.moe),
                beside_gradients=stream and beside_gradients(item, recomputed_by(config)),
            )
            for item in planned
        ),
        host_input_s=host_input_s(local, machine),
        beside={
            group: PassTimes(*(work * (layers * slowest) for work in (times.forward, times.backward))) for group, times in beside.items()
        },
        measured=None if again_s is None else measured,
        recompute_s=None if again_s is None else again.seconds,
        launch_s=software.launch_s * layers if config.model.moe is not None else 0.0,
        # The first copy from host memory and the last one to it overlap with nothing.
        state_copy_s=(state + streamed_state_bytes(local) / ON_DEVICE) / host_bytes_per_s(machine.device, machine.calibration),
        host_copies=host_copies(kernels, repeats, host_bytes_per_s(machine.device, machine.calibration)),
        tensor_overlap=software.tensor_overlap,
        eta=overlap_share(memory.compiled_bytes, memory.argument_bytes, machine.device.memory_bytes),
        peak_flops=machine.device.peak_flops[kernels.dtype],
    )


def _outside(kernels: Kernels, empty: int) -> Work:
    """Return embedding and loss of a microbatch. Where one stage has each, the others wait for the longer of the two; the loss takes the
    place of empty layers first."""
    embedding, loss = kernels.embedding(), kernels.loss()
    if kernels.local.pipeline == 1 or not kernels.software.stages_hold_layers:
        return embedding + loss
    free = empty * (kernels.layer_forward() + kernels.layer_backward()).seconds
    waits = max(0.0, 1 - free / loss.seconds)
    return max((embedding, loss * waits), key=lambda work: work.seconds)


def _recompute(seconds: float) -> Work:
    """Return the measured time that a policy adds to a layer: compute, or, where it is negative, avoided memory traffic."""
    return Work(compute_s=max(0.0, seconds), memory_s=min(0.0, seconds))


def step_time(
    config: Config, sizes: Mapping[str, int], cluster: ClusterConfig, calibration: Calibration, *, machine: Machine | None = None
) -> StepEstimate:
    """Predict one optimizer step of a config on a mesh with these axis sizes.

    Args:
      config: batch, accumulation, remat and precision are taken from it; it must divide over the mesh (configs.rules.check_devices).
      sizes: mesh axis -> devices, all axes.
      cluster: device, links, nodes.
      calibration: measured rates.
      machine: the same cluster and calibration for this number of devices, to share its cache between layouts.

    Raises UserError for a device or dtype without an entry in catalog or calibration.
    """
    machine = machine or Machine(cluster, calibration, math.prod(sizes.values()))
    return step_parts(config, sizes, machine).assemble()


def host_input_s(local: LocalSizes, machine: Machine) -> float:
    """Return the time of one host to read its rows of a step and copy them to its devices; it overlaps with the previous step."""
    host, config = machine.calibration.file.host, local.config
    copy = host_bytes_per_s(machine.device, machine.calibration)
    on_node = min(machine.cluster.devices_per_node, local.devices)
    readers = max(1, on_node // (local.tensor * local.context))  # each reads whole rows
    tokens = config.data.batch_size * config.data.seq_len / (local.data * local.fsdp) * readers
    return tokens / (host.input_tokens_per_s or HOST_INPUT_TOKENS_PER_S) + tokens / on_node * BATCH_BYTES_PER_TOKEN / copy


def host_bytes_per_s(device: Hardware, calibration: Calibration) -> float:
    """Return the bandwidth between a device and host memory in one direction, bytes/s: calibrated, else the datasheet's."""
    host = calibration.file.host
    return host.copy_gb_per_s * 1e9 if host.copy_gb_per_s else device.host_bandwidth_bytes_per_s
