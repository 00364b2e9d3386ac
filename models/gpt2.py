"""The GPT-2 family.

Initialisation: normal(0, init_std = 0.02) for the token table, the position table and all matrices, except that the two projections
that write to the residual stream start at init_std / sqrt(2 L) (GPT-2 report, section 2.3: "scale the weights of residual layers at
initialization by a factor of 1/sqrt(N)", N the number of residual layers, two per block); biases 0, norm scales 1.
Block: the default one.
"""

from __future__ import annotations

import math

from models.family import Family

FAMILY = Family(
    name="gpt2",
    residual_std=lambda model: model.init_std / math.sqrt(2 * model.num_layers),
    hf_architecture="GPT2LMHeadModel",
)
