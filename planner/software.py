"""Training software whose steps can be predicted (planner/software.yaml): its efficiency relative to kernels measured in isolation.

The shipped calibration has the rates of single kernels. What a step makes of them depends on the software: which attention kernel it runs,
whether it fuses elementwise kernels, how fast its matmuls run inside a step. `--software` selects an entry; the default is this project.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import ValidationError
from ruamel.yaml import YAML

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.schema import MESH_AXES
from ridgeline.configs.section import Fraction, Name, PositiveFloat, Section
from ridgeline.planner.hardware import Hardware

FILE = Path(__file__).with_name("software.yaml")
DEFAULT_SOFTWARE = "ridgeline"


class Software(Section):
    """One entry of planner/software.yaml."""

    name: Name
    """Name, as `--software` takes it."""
    description: str
    """What it is, and which versions were measured."""
    source: str
    """What set the constants below."""
    like: str | None = None
    """The software whose published runs validate it; None: its own."""
    in_step: dict[str, dict[str, Fraction]]
    """Device or generation (`default`: any other) -> dtype of the matmul inputs -> rate of matmuls and attention inside a step over their
    rate in isolation: clocks fall under sustained load and kernels wait for each other. Without an entry float4 has the share of float8,
    others that of bfloat16."""
    attention: dict[str, PositiveFloat] = {}
    """Device or generation -> rate of its attention kernel over the calibrated one; without an entry: 1."""
    elementwise_passes: PositiveFloat = 1.0
    """Bytes of a layer's elementwise kernels over those of fused bfloat16 kernels. In eager software each operation is a pass, and norms,
    residual adds and their gradients stay in float32."""
    transposed_gradients: bool = False
    """Whether gradients that fsdp shards along their last dim are transposed for their reduction, as XLA does in this project's step."""

    accumulates_in_matmuls: bool = False
    """Whether matmuls add gradients of weights to their sum over microbatches, which other software adds in passes of its own."""
    reduces_once: bool = False
    """Whether parameters are replicated over `data`, `context` and (outside of experts) `expert`, and their gradients are reduced over
    these axes once per step. In this project `expert` shards all parameters, and each microbatch reduces its gradients."""
    casts_once: bool = False
    """Whether parameters are cast for matmuls once per step instead of once per microbatch."""
    keeps_received: bool = False
    """Whether the backward pass has what the forward pass received: inputs of experts, and gradients of updates in pipeline stages, which
    this project's step communicates again."""
    stages_hold_layers: bool = False
    """Whether each pipeline stage stores its own layers, the first one the embedding too, and the last one computes the loss. In this
    project layers that do not divide evenly move to their stages, and all stages share embedding and loss."""
    own_attention: bool = False
    """Whether it has one fused attention kernel, at the calibrated rate times `attention`, whatever backend the config chooses here."""
    mesh_order: list[str] = list(MESH_AXES)
    """Mesh axes in the order of the devices, slowest-varying first."""
    grouped_rate: Fraction = 0.75
    """Rate of the matmuls of experts inside a step over that of a matmul of the same size. The default is estimated for grouped matmuls in
    Triton against cuBLAS. Those of models/moe/grouped_matmul.py reach 597 TFLOP/s on an H200 in short runs (benchmarks/gpu_experts.py) and,
    as they draw less power, inside a step too: 0.87 of the 682 of its other matmuls."""
    forwards_tokens: bool = False
    """Whether a token is sent once to each node with any of its experts, whose devices pass it on."""
    matmul_per_expert: bool = False
    """Whether each expert of a device has a matmul of its own, of the size of its tokens."""
    shards_update: bool = False
    """Whether the update is sharded over `data` (ZeRO stage 1)."""
    gathers_narrow: bool = False
    """Whether inputs of 8-bit matmuls are gathered over `tensor` in 8 bits. In this project they are quantized after their gather."""
    overlaps_scatters: bool = False
    """Whether scatters of gradients of inputs over `tensor` are overlapped with gradients of weights, and gathers for recomputation with
    gradients, as XLA's scheduler does."""
    one_queue: bool = False
    """Whether collectives over all axes run one after another, as XLA's do, so that tokens on their way to experts, or hops of a ring, wait
    for transfers of parameters that began before."""
    launch_s: float = 0.0
    """Seconds in which the host launches the kernels of a layer with experts, forward and backward: no such layer is faster. 0: less than
    any layer takes."""
    tensor_overlap: Fraction = 0.0
    """Fraction of the communication over `tensor` that is overlapped with the matmuls around it."""

    def in_step_share(self, dtype: str, device: Hardware) -> float:
        """Return the rate of matmuls of this dtype inside a step over their rate in isolation."""
        shares = next(self.in_step[key] for key in (device.name, device.generation, "default") if key in self.in_step)
        narrow = shares.get("float8", shares["bfloat16"]) if dtype == "float4" else shares["bfloat16"]
        return shares.get(dtype, narrow)

    def attention_share(self, device: Hardware) -> float:
        """Return the rate of its attention kernel over the calibrated one."""
        return next((self.attention[key] for key in (device.name, device.generation) if key in self.attention), 1.0)


@functools.cache
def software_names() -> list[str]:
    """Return the names that `--software` takes, the default first."""
    return list(_entries())


@functools.cache
def software(name: str = DEFAULT_SOFTWARE) -> Software:
    """Return an entry by name. Raises UserError with the nearest name."""
    entries = _entries()
    if name not in entries:
        raise unknown_name("software", name, list(entries))
    try:
        return Software.model_validate({"name": name} | entries[name])
    except ValidationError as error:
        raise UserError(f"{FILE.name}: {name}: {error}") from None


@functools.cache
def _entries() -> dict[str, dict[str, object]]:
    entries: dict[str, dict[str, object]] = YAML(typ="safe").load(FILE)
    return entries
