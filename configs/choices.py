"""Closed sets of names in a config: what each key may name. The registries of models and trainer implement exactly these."""

from __future__ import annotations

from ridgeline.configs.remat import POLICIES

ATTENTION_BACKENDS = ("auto", "reference", "xla", "chunked", "cudnn", "pallas")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
SCHEDULES = ("constant", "linear", "cosine", "wsd")

CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "compute.attention.backend": ("attention backend", ATTENTION_BACKENDS),
    "compute.remat.policy": ("remat policy", tuple(POLICIES)),
    "optimizer.kind": ("optimizer", OPTIMIZERS),
    "schedule.kind": ("schedule", SCHEDULES),
}
"""Config key -> (what the name is, the allowed names)."""
