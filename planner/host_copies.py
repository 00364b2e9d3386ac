"""Waits for copies of activations between device and host memory (compute.remat.policy=offload).

Copies run beside computation, one after another in each direction, and those of a layer end with it: XLA carries only finished copies to
the next iteration of the loop over layers. In the forward pass a value can be copied once it is computed, so that the copy of an MLP's
hidden activation overlaps only with the matmuls of the MLP after it. In the backward pass the copies of a layer start with it, and each is
awaited where recomputation first needs its value; inputs of blocks, which are needed first, are copied one layer ahead.

Read from the schedules of compiled steps (Gemma 2 9B on B200, Phi-4 on H100, GLM-4 9B on H100; jaxlib 0.10.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ridgeline.planner.activations import offloaded_bytes
from ridgeline.planner.kernels import EXPERT_MATMULS, Kernels
from ridgeline.planner.recompute import recomputed_by

STAGES = (
    ("block_input",),
    ("query", "key", "value"),
    ("attention_context", "attention_lse"),
    ("attention_out",),
    ("mlp_up",),
    ("mlp_gate",),
    ("mlp_out",),
)
"""Values that can be offloaded, in the order of a layer's computation. Before those of each stage come: nothing, the projections,
attention, its output projection, one and the other of the MLP's first matmuls, and its last one."""


@dataclass(frozen=True)
class HostCopy:
    """The copies of one value of all layers and microbatches, in one direction."""

    seconds: float
    ready: float
    """Share of the forward pass of a layer that comes before the value."""
    needed: float | None
    """Share of the backward pass of a layer that comes before its first use; None: the copy is made one layer ahead."""


def host_copies(kernels: Kernels, repeats: int, bytes_per_s: float) -> tuple[HostCopy, ...]:
    """Return the copies of the values in compute.remat.names in their order; none with another policy.

    Args:
      kernels: of the device.
      repeats: microbatches.
      bytes_per_s: between device and host memory in one direction.
    """
    local = kernels.local
    remat = local.config.compute.remat
    if not remat.offloads:
        return ()
    forward, again = _stages_s(kernels, kernels.matmuls()), recomputed_by(local.config)
    recomputed = _stages_s(kernels, again.weights, attention=again.attention)
    whole = sum(_stages_s(kernels, kernels.matmuls(), attention=False)) * 2 + kernels.attention().backward.seconds + sum(recomputed)
    found = []
    for stage, names in enumerate(STAGES):
        for name in names:
            if name not in remat.names:
                continue
            alone = remat.model_copy(update={"names": [name]})
            compute = local.config.compute.model_copy(update={"remat": alone})
            size = offloaded_bytes(replace(local, config=local.config.model_copy(update={"compute": compute})))
            before = sum(forward[: stage + 1]) / sum(forward)
            needed = None if stage == 0 else sum(recomputed[: stage + 1]) / whole
            found.append(HostCopy(size * repeats / bytes_per_s, before, needed))
    return tuple(found)


def _stages_s(kernels: Kernels, weights: Iterable[str], *, attention: bool = True) -> list[float]:
    """Return the seconds of the matmuls with these weights, and of attention, before the values of each stage, after those before it."""
    shapes, chosen = kernels.matmuls(), set(weights)

    def matmuls_s(names: Iterable[str]) -> float:
        return sum(kernels.layer_matmul_s(name, *shapes[name], kernels.forward_dtype) for name in names if name in chosen)

    projections = [name for name in shapes if name not in (*EXPERT_MATMULS, "out")]
    scores_s = kernels.attention().forward.seconds if attention else 0.0
    return [
        0.0,
        matmuls_s(projections),
        scores_s,
        matmuls_s(["out"]),
        matmuls_s(["up"]),
        matmuls_s(["gate"]),
        matmuls_s(["down"]),
    ]


def waits_s(copies: Sequence[HostCopy], forward_s: float, backward_s: float, faster: float = 1.0) -> float:
    """Return the seconds in which both passes wait for copies.

    Args:
      copies: in the order in which values are computed.
      forward_s: computation of the forward pass, all layers and microbatches.
      backward_s: that of the backward pass.
      faster: hypothetical speed-up of the copies.
    """
    copied_s = waited_s = arrived_s = 0.0
    for copy in copies:
        copied_s = max(copied_s, copy.ready * forward_s) + copy.seconds / faster
        if copy.needed is not None:
            arrived_s += copy.seconds / faster
            waited_s += max(0.0, arrived_s - copy.needed * backward_s - waited_s)
    whole_s = sum(copy.seconds for copy in copies) / faster
    return max(0.0, copied_s - forward_s) + max(waited_s, whole_s - backward_s, 0.0)
