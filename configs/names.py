"""Closed sets of names a config may use: the registries of models and trainer implement exactly these."""

from __future__ import annotations

ATTENTION_BACKENDS = ("auto", "reference", "xla", "chunked", "cudnn", "pallas")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
SCHEDULES = ("constant", "linear", "cosine", "wsd")
REMAT_POLICIES = ("none", "full", "dots", "attention-only", "names", "offload")
REMAT_NAMES = (
    "block_input",
    "query",
    "key",
    "value",
    "attention_context",
    "attention_lse",
    "attention_out",
    "mlp_gate",
    "mlp_up",
    "mlp_out",
)
"""Values of a block that the policies `names` and `offload` can save."""

NAMES_BY_KEY: dict[str, tuple[str, tuple[str, ...]]] = {
    "compute.attention.backend": ("attention backend", ATTENTION_BACKENDS),
    "compute.remat.policy": ("remat policy", REMAT_POLICIES),
    "optimizer.kind": ("optimizer", OPTIMIZERS),
    "schedule.kind": ("schedule", SCHEDULES),
}
"""Config key -> (what the name is, the allowed names)."""
