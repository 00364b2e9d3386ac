"""muP (arXiv 2203.03466, table 8) in the model: the initialization of matrices, and an export without multipliers.

What the model multiplies is in ModelConfig (width_ratio, query_scale, embedding_scale); learning rates are in trainer/optimizers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ridgeline.configs.model_schema import ModelConfig

Read = Callable[[str, int | None], np.ndarray]
"""(dotted path, layer or None) -> a parameter, or one layer of it."""


def matrix_std(model: ModelConfig) -> float:
    """Return the initial standard deviation of a layer's matrices (variance over that of the base: 1 / m)."""
    return model.init_std / math.sqrt(model.width_ratio)


def without_multipliers(model: ModelConfig, read: Read) -> tuple[ModelConfig, Read]:
    """Return the model without muP that computes the same function, and what reads its parameters.

    The final norm takes the factor of the logits, queries (or their norm) that of the attention scores, and the embedding that of
    scale_embeddings. Exact where the factors are powers of 2, else to one rounding of each value.
    """
    if model.mup is None:
        return model, read
    standard = model.model_copy(update={"mup": None})
    embedding = model.embedding_scale / standard.embedding_scale
    logits = 1 / model.width_ratio / (embedding if model.tie_embeddings else 1.0)
    query = model.query_scale / standard.query_scale
    offset = 1.0 if model.norm == "rmsnorm_1p" else 0.0
    factors = {
        "embedding": (embedding, 0.0),
        "final_norm.scale": (logits, offset),
        "final_norm.bias": (logits, 0.0),
    }
    for stack in ("blocks", "dense_blocks"):
        if model.qk_norm:
            factors[f"{stack}.attention.query_norm.scale"] = (query, offset)
        else:
            factors |= {f"{stack}.attention.{name}": (query, 0.0) for name in ("query", "query_bias")}

    def folded(path: str, layer: int | None) -> np.ndarray:
        values = read(path, layer)
        factor, added = factors.get(path, (1.0, 0.0))
        if factor == 1:
            return values
        wide = (values.astype(np.float32) + np.float32(added)) * np.float32(factor) - np.float32(added)
        return wide.astype(values.dtype)

    return standard, folded
