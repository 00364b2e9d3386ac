"""Peak memory of one device in a training step, by component.

Memory can peak at several points of a step: in the loss (all saved activations plus one chunk of logits), in the backward pass of a layer
(saved activations plus the intermediates of one layer and its unsharded gradients before their reduce-scatter), at the gradient of the
embedding, and in the optimizer. The memory at each point is a sum of components, and a device needs the largest sum. The points and their
components were read from the buffer assignments of compiled steps (GPU backend, jax 0.10.2, with and without the latency-hiding
scheduler), and tests/planner/test_memory.py compares the totals with compiled sizes. No term is fitted: each is a buffer of the program.
planner/activations.py counts what is saved for the backward pass, planner/peak_memory.py what is live at each point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.configs.schema import Config
from ridgeline.planner.activations import Component, units_in_flight
from ridgeline.planner.hardware import GpuProgram, Hardware
from ridgeline.planner.local import LocalSizes, parameter_bytes
from ridgeline.planner.optimizer_state import ON_DEVICE, optimizer_state, streamed_state_bytes
from ridgeline.planner.peak_memory import StepMemory
from ridgeline.planner.recompute import FROM_BLOCK_INPUTS

FRAGMENTATION = 0.01
"""Fraction of the temporary bytes that XLA's heap placement loses: 0 to 5 % in the compiled cases, usually 1 %."""
FRAGMENTATION_OF_TURNS = 0.04
"""The same in layers of several kinds with experts whose MLPs are computed again: large arrays of slightly different sizes, of rows and of
padded hidden activations, leave gaps (mean of 33 heaps of gpt-oss and Llama 4 Scout, 0 to 10 %)."""
MARGIN = 0.02
"""Fraction of the temporary bytes that is kept free in every plan: where XLA places buffers in its heap is not predicted."""
MARGINS = {
    "microbatches": 0.01,
    "8-bit matmuls": 0.02,
    "8-bit matmuls of experts": 0.08,
    "mesh.tensor": 0.02,
    "mesh.context": 0.04,
    "trained experts": 0.10,
    "mesh.expert": 0.05,
    "latent attention": 0.03,
    "adapters of a model with experts": 0.13,
    "layers with and without a window": 0.10,
    "such layers with trained experts": 0.05,
    "such layers with block-scaled matmuls": 0.10,
    "such layers with compute.tensor_overlap=ring": 0.10,
    "compute.remat.policy=offload": 0.05,
    "mesh.zero_stage=2": 0.02,
    "mesh.pipeline": 0.10,
    "stages of one or two layers": 0.10,
}
"""Setting -> further fraction of the temporary bytes that is kept free, where compiled steps exceeded the plan by more than MARGIN
(`make bench-memory`; table in docs/guides/planning.md)."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Driver context and modules of one process on an H100 (0.5 to 0.8 GB in nvidia-smi before the first allocation)."""
NCCL_BYTES_PER_COMMUNICATOR = 200 * 2**20
"""Channels and protocol buffers of one NCCL communicator (NCCL 2.2x, default channels; 0.1 to 0.3 GB reported)."""
REFERENCE = "reference_parameters"
"""Component: with policy.kl, the parameters before training stay in memory beside the state; no argument of the train step."""
STREAMED = "streamed_moments"
"""Component: with optimizer.offload, the optimizer state that is on the device in the update."""
HOST_PROCESS_BYTES = 500 * 2**20
"""A process with JAX loaded, on platforms where the device's memory is the host's."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one device needs for a step."""

    components: dict[str, Component]
    """Components at the peak, the margin and the runtime's own memory included; their sum is `total_bytes`."""
    peak_at: str
    """Point of the step with the peak, as in planner/peak_memory.py: loss, backward pass, optimizer, ..."""
    bytes_at: dict[str, int] = field(default_factory=dict)
    """Point of the step -> bytes of all components."""

    @property
    def total_bytes(self) -> int:
        """All of it, the margin and the runtime's own memory included: what must fit into the device."""
        return sum(component.bytes for component in self.components.values())

    @property
    def compiled_bytes(self) -> int:
        """Arguments plus temporaries: what the compiler reports for the step."""
        return self.total_bytes - self.reserve_bytes - self.margin_bytes

    @property
    def margin_bytes(self) -> int:
        """Memory that is kept free because compiled sizes differ from planned ones."""
        return self.components["margin"].bytes

    @property
    def reserve_bytes(self) -> int:
        """Memory in use beside the step: by the runtime, and by parameters that are no argument of the step."""
        return sum(self.components[name].bytes for name in ("runtime_reserve", REFERENCE) if name in self.components)

    @property
    def argument_bytes(self) -> int:
        """Arguments of the step: state and batch."""
        return sum(self.components[name].bytes for name in ("parameters", "moments", "batch"))

    @property
    def temp_bytes(self) -> int:
        """Temporaries: what is live only within the step."""
        return self.compiled_bytes - self.argument_bytes

    def bytes_by_component(self) -> dict[str, int]:
        """Return component name -> bytes."""
        return {name: component.bytes for name, component in self.components.items()}


def memory_per_device(
    config: Config,
    sizes: Mapping[str, int],
    *,
    gpu: bool = True,
    overlap: bool = True,
    combined: bool = True,
    device: Hardware | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of one device of a mesh with these axis sizes, by component.

    Args:
      config: must divide over the mesh (configs.rules.check_devices).
      sizes: mesh axis -> devices.
      gpu: affects the attention backend of `auto`, and the memory of the runtime.
      overlap: compiled with the latency-hiding scheduler, as for GPUs (JAX_OPTIMIZATION_LEVEL=O1); false: XLA's default flags.
      combined: collectives are combined and overlapped as in a run (launch/environment.py); false: by XLA's defaults.
      device: for whose generation XLA compiles; None: Hopper or later.
    """
    return memory_of(LocalSizes.of(config, sizes), sizes, gpu=gpu, overlap=overlap, combined=combined, device=device)


def memory_of(
    local: LocalSizes,
    sizes: Mapping[str, int],
    *,
    gpu: bool,
    overlap: bool = True,
    combined: bool = True,
    device: Hardware | None = None,
) -> MemoryEstimate:
    """As `memory_per_device`, from the sizes on one device."""
    state = _state(local, sizes, gpu)
    backend = local.attention_backend(gpu=gpu)
    program = GpuProgram() if device is None else device.program
    points = StepMemory(local, backend, overlap and gpu, overlap and gpu and combined, units_in_flight(local, backend), program).points()
    if gpu and local.config.optimizer.offload:
        points["optimizer"] = points["optimizer"] | {STREAMED: _streamed(local)}
    totals = {name: sum(part.bytes for part in parts.values()) for name, parts in points.items()}
    peak = max(totals, key=lambda name: totals[name])
    temporary = points[peak]
    again = local.config.compute.remat.policy in FROM_BLOCK_INPUTS
    gaps = FRAGMENTATION_OF_TURNS if local.model.layer_period > 1 and local.defers_reductions and again else FRAGMENTATION
    components = {
        **{name: state[name] for name in ("parameters", "moments")},
        **({STREAMED: temporary.get(STREAMED, Component(0, "none at the peak"))} if local.config.optimizer.offload and gpu else {}),
        **{name: temporary.get(name, Component(0, "none at the peak")) for name in TEMPORARY},
        "batch": state["batch"],
        "fragmentation": Component(int(gaps * totals[peak]), f"{gaps:.0%} of the temporary bytes, lost to heap placement"),
        "margin": _margin(local, totals[peak], gpu),
        "runtime_reserve": state["runtime_reserve"],
        **{name: part for name, part in state.items() if name == REFERENCE},
    }
    fixed = sum(part.bytes for part in state.values()) + components["margin"].bytes
    return MemoryEstimate(components, peak, {name: fixed + int(total * (1 + gaps)) for name, total in totals.items()})


def _margin(local: LocalSizes, temporary_bytes: int, gpu: bool) -> Component:
    """Return what is kept free because the plan is not exact, by the settings for which it is less so. Nothing without a GPU."""
    config, overlap = local.config, local.config.compute.tensor_overlap
    if not gpu:
        return Component(0, "none: not a GPU")
    uses = {
        "microbatches": config.trainer.accumulation > 1,
        "8-bit matmuls": config.precision.matmul != "compute",
        "8-bit matmuls of experts": config.precision.eight_bit and local.model.moe is not None,
        "mesh.tensor": local.tensor > 1,
        "mesh.context": local.context > 1,
        "trained experts": local.model.moe is not None and not local.adapted,
        "mesh.expert": local.expert > 1,
        "latent attention": local.model.latent_attention is not None,
        "layers with and without a window": local.model.layer_period > 1,
        "such layers with trained experts": local.model.layer_period > 1 and local.model.moe is not None and not local.adapted,
        "such layers with block-scaled matmuls": local.model.layer_period > 1 and config.precision.block_scaled is not None,
        "such layers with compute.tensor_overlap=ring": local.model.layer_period > 1 and local.tensor > 1 and overlap == "ring",
        "adapters of a model with experts": bool(local.adapted) and local.model.moe is not None,
        "compute.remat.policy=offload": config.compute.remat.offloads,
        "mesh.zero_stage=2": config.mesh.zero_stage == 2,
        "mesh.pipeline": local.pipeline > 1,
        "stages of one or two layers": local.pipeline > 1 and local.model.num_layers // config.mesh.pipeline_chunks <= 2,
    }
    used = {name: MARGINS[name] for name, applies in uses.items() if applies}
    share = MARGIN + sum(used.values())
    text = f"{share:.0%} of the temporary bytes: {MARGIN:.0%} always" + "".join(f", {part:.0%} for {name}" for name, part in used.items())
    return Component(int(share * temporary_bytes), f"{text}; kept free because compiled sizes differ from planned ones")


def _streamed(local: LocalSizes) -> Component:
    """Return the offloaded optimizer state that is on the device in the update."""
    return Component(streamed_state_bytes(local), f"optimizer.offload: state of the {ON_DEVICE} largest parameters")


def _moments(local: LocalSizes, gpu: bool) -> Component:
    """Return the optimizer state between steps. Without a GPU, device and host memory are the same."""
    size, assumption = optimizer_state(local.of_state)
    if gpu and local.config.optimizer.offload:
        return Component(0, f"{assumption}; {size / 1e9:.2f} GB in host memory (optimizer.offload)")
    return Component(size, f"{assumption}, and over data (mesh.zero_stage=2)" if local.config.mesh.zero_stage else assumption)


TEMPORARY = (
    "gradients",
    "accumulated_gradients",
    "parameter_copies",
    "activations",
    "working_activations",
    "attention_workspace",
    "loss",
    "collective_buffers",
)
"""Components that are live only within a step, in the order of display."""


def _state(local: LocalSizes, sizes: Mapping[str, int], gpu: bool) -> dict[str, Component]:
    """Return what is live between steps, and the memory of the runtime itself."""
    config = local.config
    used = [axis for axis, size in sizes.items() if size > 1]
    groups = len(used) + (1 if {"data", "fsdp"} <= set(used) else 0)
    rows = config.data.batch_size // (local.data * local.fsdp)
    arrays = 5 if config.data.document_masking else 4
    teacher = config.distillation
    predictions = 0 if teacher.weight is None else teacher.top_k + teacher.outcomes  # numbers per token
    keeps_reference = config.policy.loss is not None and config.policy.kl > 0
    reference = {
        REFERENCE: Component(parameter_bytes(local), "the parameters before training, for policy.kl; not part of the compiled size")
    }
    return {
        **(reference if keeps_reference else {}),
        "parameters": Component(
            parameter_bytes(local),
            f"{config.precision.params} master weights, sharded over fsdp and tensor; norms replicated"
            if not local.adapted
            else f"frozen, {'int8 and ' if local.int8_base else ''}{config.precision.compute}, and adapters, {config.precision.params}; "
            "sharded over fsdp and tensor",
        ),
        "moments": _moments(local, gpu),
        "batch": Component(
            rows * ((4 + predictions + 2 * local.model.mtp_layers) * local.length + (arrays - 4) * config.data.seq_len) * 4,
            f"{arrays} int32 or float32 arrays of the step's rows"
            + (f", and {predictions} numbers of the teacher per token" if predictions else ""),
        ),
        "runtime_reserve": Component(
            CUDA_CONTEXT_BYTES + groups * NCCL_BYTES_PER_COMMUNICATOR if gpu else HOST_PROCESS_BYTES,
            f"CUDA context {CUDA_CONTEXT_BYTES / 1e9:.2f} GB, NCCL {NCCL_BYTES_PER_COMMUNICATOR / 1e9:.2f} GB for each of {groups} "
            "communicators; not part of the compiled size"
            if gpu
            else "the process with JAX loaded; not part of the compiled size",
        ),
    }
