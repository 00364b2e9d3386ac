"""Optimizer state of one device: its bytes, and how 8-bit moments are split into blocks that share a scale.

Blocks are the same on every mesh, and no device holds part of a block. A block lies along the dim that fsdp does not shard: the width of
a head, else the hidden width of the MLP. A device therefore finds the largest element of each of its blocks without communication, unless
`tensor` shards the hidden width more than TENSOR ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ridgeline.configs import plugins
from ridgeline.configs.choices import OPTIMIZERS
from ridgeline.planner.local import ITEMSIZE, LocalSizes
from ridgeline.planner.parameters import attention_matmul_parameters, expert_parameters, mlp_matmul_parameters, mtp_projection_parameters

BLOCK = 128
"""Elements that share a scale, where that divides the dim into whole blocks per device."""
LEAST_BLOCK = 16
"""Smallest block: the scale of a smaller one would take as many bits as its elements."""
TENSOR = 8
"""Largest number of devices that `tensor` is expected to have: those of one node."""


@dataclass(frozen=True)
class OptimizerPlugin:
    """An optimizer from an installed package (entry point group `ridgeline.optimizers`).

    The planner imports it: import JAX and optax inside `rule`, so that planning needs no JAX.
    """

    rule: Callable[[Any, Any, Any], Any]
    """(OptimizerConfig, dtype of precision.moments, tree of logical axes) -> optax.GradientTransformation: gradients to updates before
    the learning rate, weight decay included, in float32 (trainer/optimizers.py)."""
    state_bytes_per_parameter: Callable[[int], float]
    """Bytes of an element of precision.moments (1, 2 or 4) -> bytes of state per parameter; the state is sharded as the parameters."""
    flops_per_parameter: float = 0.0
    """FLOPs of an update per parameter beyond elementwise work, which the memory traffic hides."""


def optimizer_plugin(kind: str) -> OptimizerPlugin | None:
    """Return the plug-in of an `optimizer.kind`; None for a built-in one. Raises UserError as `plugins.load`."""
    return None if kind in OPTIMIZERS else plugins.load("optimizers", kind, OptimizerPlugin, OPTIMIZERS)


def block_width(size: int, *, divided: bool) -> int:
    """Return how many elements of a dim of this size share a scale. `divided`: the dim may be sharded (the width of a head never is)."""
    if not divided:
        return BLOCK if size % BLOCK == 0 else size
    width = BLOCK
    while width >= LEAST_BLOCK:
        if size % (width * TENSOR) == 0:
            return width
        width //= 2
    return BLOCK if size % BLOCK == 0 else size


def optimizer_state(local: LocalSizes) -> tuple[int, str]:
    """Return the bytes of the optimizer state of one device, and what it consists of."""
    kind, first = local.config.optimizer.kind, ITEMSIZE[local.config.precision.moments]
    dtype = local.config.precision.moments
    if (plugin := optimizer_plugin(kind)) is not None:
        return int(local.trained * plugin.state_bytes_per_parameter(first)), f"{kind}: as its package declares, sharded as the parameters"
    if kind == "adamw" and dtype == "int8":
        rest = local.parameters - local.layer_matrices
        size = 2 * local.layer_matrices + 2 * 4 * _scales(local) + rest * 8
        return size, "AdamW: 8-bit moments with a float32 scale per block for matrices, float32 moments for the rest"
    if kind == "adamw":
        return local.trained * (first + 4), f"AdamW: first moment {dtype}, second moment float32, sharded as the parameters"
    if kind in ("lion", "sgd"):
        return local.trained * first, f"{kind}: one moment, {dtype}"
    if kind == "muon":
        rest = local.parameters - local.layer_matrices
        return local.layer_matrices * first + rest * (first + 4), f"Muon: one {dtype} momentum per matrix, AdamW moments for the rest"
    model = local.model
    per_matrix = model.embed_dim / local.fsdp + model.mlp_dim / local.tensor
    factored = int(4 * model.num_layers * 7 * per_matrix + 4 * 2 * (local.table / model.embed_dim + model.embed_dim))
    return factored + 4 * local.vectors, "Adafactor: row and column statistics of every matrix, float32"


ON_DEVICE = 2
"""Parameters (stacks of layers) whose offloaded state is on the device at a time (trainer/offload.py)."""


def offloaded_state_bytes(local: LocalSizes) -> int:
    """Return the bytes of optimizer state that one GPU keeps in host memory; 0 without optimizer.offload."""
    return optimizer_state(local.of_state)[0] if local.config.optimizer.offload else 0


def streamed_state_bytes(local: LocalSizes) -> int:
    """Return the bytes of offloaded optimizer state that are on the device at a time in the update: of the ON_DEVICE largest parameters."""
    of = local.of_state
    sizes = [local.model.num_layers * local.mlp_matrix, local.table]
    if local.modules is not None:  # their blocks' MLP matrices are a stack of their own, as are their projections
        sizes += [local.model.mtp_layers * local.modules.mlp_matrix, mtp_projection_parameters(local.model)]
    return int(min(1.0, ON_DEVICE * max(sizes) // of.fsdp / of.trained) * offloaded_state_bytes(local))


def _scales(local: LocalSizes) -> int:
    """Return the number of blocks of the layers' matrices on one device; each has one scale."""
    model, moe = local.model, local.model.moe
    in_heads = attention_matmul_parameters(model) // block_width(model.head_width, divided=False) // local.tensor
    in_others = 0  # of layers with experts
    if moe is not None:
        in_others = _in_hidden(local, moe.shared_experts * expert_parameters(model), max(1, moe.shared_experts) * model.expert_width)
        in_others += model.embed_dim * moe.experts // block_width(moe.experts, divided=True)  # router
    in_mlp = model.dense_layers * _in_hidden(local, mlp_matmul_parameters(model), model.mlp_dim)
    return (model.num_layers * in_heads + in_mlp + model.moe_layers * in_others) // local.fsdp + expert_scales(local)


def expert_scales(local: LocalSizes) -> int:
    """Return the number of these blocks that are of routed experts."""
    model, moe = local.model, local.model.moe
    if moe is None:
        return 0
    return model.moe_layers * moe.experts * _in_hidden(local, expert_parameters(model), model.expert_width) // local.fsdp


def _in_hidden(local: LocalSizes, weights: int, width: int) -> int:
    """Return the number of blocks of matrices with this hidden width, before fsdp shards them."""
    blocks = width // block_width(width, divided=True)
    return weights // width * blocks // (1 if blocks % local.tensor else local.tensor)
