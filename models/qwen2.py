"""The Qwen2 and Qwen2.5 family.

Initialisation: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not say more); biases 0, norm scales 1.
Block: the default one.
"""

from __future__ import annotations

from models.family import Family

FAMILY = Family(
    name="qwen2",
    residual_std=lambda model: model.init_std,
    hf_architecture="Qwen2ForCausalLM",
)
