"""Closed sets of names in a config: what each key may name. The registries of models and trainer implement exactly the built-in ones."""

from __future__ import annotations

from ridgeline.configs import plugins
from ridgeline.configs.remat import POLICIES

ATTENTION_BACKENDS = ("auto", "reference", "xla", "chunked", "cudnn", "pallas")
CONTEXT_METHODS = ("auto", "ring", "all_to_all")
EXPERT_EXCHANGES = ("auto", "gather", "all_to_all")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
SCHEDULES = ("constant", "linear", "cosine", "wsd")

CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "compute.attention.backend": ("attention backend", ATTENTION_BACKENDS),
    "compute.attention.context": ("context method", CONTEXT_METHODS),
    "compute.experts.exchange": ("exchange of tokens", EXPERT_EXCHANGES),
    "compute.remat.policy": ("remat policy", tuple(POLICIES)),
    "optimizer.kind": ("optimizer", OPTIMIZERS),
    "schedule.kind": ("schedule", SCHEDULES),
}
"""Config key -> (what the name is, the built-in names)."""
PLUGIN_GROUPS = {"optimizer.kind": "optimizers", "schedule.kind": "schedules"}
"""Config key -> the group of plug-ins that add names to it."""


def allowed_names(key: str) -> tuple[str, ...]:
    """Return the names that a config key may have, those of plug-ins included."""
    built_in = CHOICES[key][1]
    return tuple(plugins.all_names(PLUGIN_GROUPS[key], built_in)) if key in PLUGIN_GROUPS else built_in
