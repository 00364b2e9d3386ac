"""Bytes that the optimiser moves on one device: a pass for the gradients' norm, and the update of everything it keeps.

Read off the kernels of compiled updates (8B over fsdp=8, GPU backend, jax 0.10.2): 37.9 bytes per parameter all in float32, 26.8 with a
narrow state, held to this count in tests/planner/test_step_time.py.
"""

from __future__ import annotations

from ridgeline.planner.local import ITEMSIZE, LocalSizes

TRANSPOSED_BYTES = 16
"""Beyond the others, per element whose gradient lies transposed: written and read in float32, and its update once more."""
TRANSPOSED_CODES_BYTES = 28
"""The same with 8-bit moments, whose two decoded moments are written and read."""


def update_bytes(local: LocalSizes, *, turned: bool) -> float:
    """Return the bytes of one update. Per parameter: gradient twice (norm, update), parameter and moments read and written.

    8-bit moments take a pass of their own for the scales: gradient and both codes are read once more. Adafactor reads the gradient twice
    more, for its statistics and its clipping. `turned`: the gradients of what fsdp cuts along its last dim come transposed, as XLA leaves
    them: MLP down, attention out and the embedding.
    """
    precision, kind = local.config.precision, local.config.optimizer.kind
    first = ITEMSIZE[precision.moments]
    both = 2 * (local.gradient_itemsize + local.parameter_itemsize)
    matrices, rest = local.layer_matrices, local.parameters - local.layer_matrices
    codes = precision.moments == "int8"
    if codes:
        moved = matrices * (both + local.gradient_itemsize + 3 * 2) + rest * (both + 16)
    elif kind == "adamw":
        moved = local.parameters * (both + 2 * first + 8)
    elif kind == "muon":
        moved = matrices * (both + 2 * first) + rest * (both + 2 * first + 8)
    elif kind == "adafactor":
        moved = local.parameters * (both + 2 * local.gradient_itemsize)
    else:
        moved = local.parameters * (both + 2 * first)
    if not turned:
        return float(moved)
    elements = local.model.num_layers * (local.mlp_matrix + local.query_matrix) // local.fsdp
    return float(moved + elements * (TRANSPOSED_CODES_BYTES if codes else TRANSPOSED_BYTES) + local.table // local.fsdp * TRANSPOSED_BYTES)
