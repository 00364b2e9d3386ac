"""Memory of one device at the fullest moment of a training step, by component.

The step is a sequence of moments: the loss (all saved activations plus one chunk of logits), the backward pass of a layer (saved
activations plus one layer's worth of intermediates and whole-layer gradients on their way into a reduce-scatter), the gradient of the
embedding, and the optimiser. Each is a sum of components; the fullest one is what a device needs. The moments and what lives in them were
read off the buffer assignments of the compiled step (GPU backend, jax 0.10.2, with and without the latency-hiding scheduler), and the
totals are held to compiled sizes in tests/planner/test_memory.py. Nothing here is fitted: every term is a buffer with a name.
planner/activations.py has what is saved, planner/peak_memory.py the moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.configs.schema import Config
from ridgeline.planner.activations import Component, saved_activations
from ridgeline.planner.local import ITEMSIZE, LocalSizes, attention_backend
from ridgeline.planner.parameters import attention_matmul_parameters, mlp_matmul_parameters
from ridgeline.planner.peak_memory import Moments
from ridgeline.planner.scales import block_width

FRAGMENTATION = 0.01
"""Share of the temporary bytes that XLA's heap placement loses: 0-5 % in the compiled cases, 1 % usual."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Driver context and modules of one process on an H100 (0.5-0.7 GiB in nvidia-smi before the first allocation)."""
NCCL_BYTES_PER_COMMUNICATOR = 200 * 2**20
"""Channels and protocol buffers of one NCCL communicator (NCCL 2.2x, default channels; 0.1-0.3 GiB reported)."""
HOST_PROCESS_BYTES = 500 * 2**20
"""A process with JAX loaded, where host memory is the device's."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes one device needs at the fullest moment of a step."""

    components: dict[str, Component]
    moment: str
    """Name of the fullest moment."""
    moments: dict[str, int] = field(default_factory=dict)
    """Bytes of every moment, all components together."""

    @property
    def total_bytes(self) -> int:
        """Everything, the runtime's own included: what must fit into the device."""
        return sum(component.bytes for component in self.components.values())

    @property
    def compiled_bytes(self) -> int:
        """Arguments and temporaries: what the compiler reports for the step."""
        return self.total_bytes - self.components["runtime_reserve"].bytes

    @property
    def argument_bytes(self) -> int:
        """State and batch: what the step takes in."""
        return sum(self.components[name].bytes for name in ("parameters", "moments", "batch"))

    @property
    def temp_bytes(self) -> int:
        """What lives only within the step."""
        return self.compiled_bytes - self.argument_bytes

    def bytes_by_component(self) -> dict[str, int]:
        """Component name to bytes."""
        return {name: component.bytes for name, component in self.components.items()}


def memory_per_device(
    config: Config, sizes: Mapping[str, int], *, gpu: bool = True, overlap: bool = True, combined: bool = True
) -> MemoryEstimate:
    """Estimate the memory of one device of a mesh with these axis sizes, by component, at the fullest moment of a step.

    Args:
      config: must divide over the mesh (configs.rules.check_devices).
      sizes: mesh axis -> devices.
      gpu: which attention backend `auto` becomes, and what the runtime takes.
      overlap: compiled with the latency-hiding scheduler, as for GPUs (JAX_OPTIMIZATION_LEVEL=O1); false: XLA's default flags.
      combined: collectives are combined and overlapped as in a run (launch/overlap_flags.py); false: by XLA's defaults.
    """
    local = LocalSizes.of(config, sizes)
    state = _state(local, sizes, gpu)
    backend = attention_backend(config, gpu=gpu)
    moments = Moments(local, backend, overlap and gpu, overlap and gpu and combined, saved_activations(local, backend)).all()
    totals = {name: sum(part.bytes for part in parts.values()) for name, parts in moments.items()}
    fullest = max(totals, key=lambda name: totals[name])
    temporary = moments[fullest]
    components = {
        **{name: state[name] for name in ("parameters", "moments")},
        **{name: temporary.get(name, Component(0, "none at the fullest moment")) for name in TEMPORARY},
        "batch": state["batch"],
        "fragmentation": Component(
            int(FRAGMENTATION * totals[fullest]), f"{FRAGMENTATION:.0%} of the temporary bytes lost to heap placement"
        ),
        "runtime_reserve": state["runtime_reserve"],
    }
    fixed = sum(part.bytes for part in state.values())
    return MemoryEstimate(components, fullest, {name: fixed + int(total * (1 + FRAGMENTATION)) for name, total in totals.items()})


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
"""Components that live within a step, in the order they are shown."""


def _state(local: LocalSizes, sizes: Mapping[str, int], gpu: bool) -> dict[str, Component]:
    """What exists between steps, and what the runtime takes for itself."""
    config = local.config
    used = [axis for axis, size in sizes.items() if size > 1]
    groups = len(used) + (1 if {"data", "fsdp"} <= set(used) else 0)
    bytes_of_moments, of_moments = _moments(local)
    rows = config.data.batch_size // (local.data * local.fsdp)
    arrays = 5 if config.data.document_masking else 4
    return {
        "parameters": Component(
            local.parameters * local.parameter_itemsize, f"{config.precision.params} masters, cut over fsdp and tensor; norms whole"
        ),
        "moments": Component(bytes_of_moments, of_moments),
        "batch": Component(arrays * rows * config.data.seq_len * 4, f"{arrays} int32 or float32 arrays of the step's rows"),
        "runtime_reserve": Component(
            CUDA_CONTEXT_BYTES + groups * NCCL_BYTES_PER_COMMUNICATOR if gpu else HOST_PROCESS_BYTES,
            f"CUDA context 0.6 GiB, NCCL 0.2 GiB for each of {groups} communicators; not part of the compiled size"
            if gpu
            else "the process with JAX loaded; not part of the compiled size",
        ),
    }


def moment_bytes(local: LocalSizes) -> int:
    """Return the bytes of the optimiser's state on a device."""
    return _moments(local)[0]


def _scales(local: LocalSizes) -> int:
    """Blocks of the layers' matrices that one device keeps, each with a scale (planner/scales.py)."""
    model = local.model
    in_heads = attention_matmul_parameters(model) // block_width(model.head_width, divided=False) // local.tensor
    blocks = model.mlp_dim // block_width(model.mlp_dim, divided=True)
    in_mlp = mlp_matmul_parameters(model) // model.mlp_dim * blocks // (1 if blocks % local.tensor else local.tensor)
    return model.num_layers * (in_heads + in_mlp) // local.fsdp


def _moments(local: LocalSizes) -> tuple[int, str]:
    """Bytes of the optimiser's state and what they are made of."""
    kind, first = local.config.optimizer.kind, ITEMSIZE[local.config.precision.moments]
    word = local.config.precision.moments
    if kind == "adamw" and word == "int8":
        rest = local.parameters - local.layer_matrices
        size = 2 * local.layer_matrices + 2 * 4 * _scales(local) + rest * 8
        return size, "AdamW: 8-bit codes and a float32 scale per block for matrices, else float32"
    if kind == "adamw":
        return local.parameters * (first + 4), f"AdamW: first moment {word}, second float32, laid out as the parameters"
    if kind in ("lion", "sgd"):
        return local.parameters * first, f"{kind}: one moment, {word}"
    if kind == "muon":
        rest = local.parameters - local.layer_matrices
        return local.layer_matrices * first + rest * (first + 4), f"Muon: one {word} momentum per matrix, AdamW moments for the rest"
    model = local.model
    per_matrix = model.embed_dim / local.fsdp + model.mlp_dim / local.tensor
    factored = int(4 * model.num_layers * 7 * per_matrix + 4 * 2 * (local.table / model.embed_dim + model.embed_dim))
    return factored + 4 * local.vectors, "Adafactor: row and column statistics of every matrix, float32"
