"""Upcycling: a model with experts from the parameters of a dense one.

Every expert begins as a copy of the layer's MLP, with a new router (arXiv 2212.05055). The weights of the chosen experts sum to 1, so that
the model computes the function of the dense one until training makes the experts differ. Reinitializing a share of each expert's hidden
dims (drop-upcycling, arXiv 2502.19261) makes them differ from the start.

Legend: D embed width, E experts, F hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.configs.rules import model_problems
from ridgeline.models.huggingface.convert import ReadParameter, hf_config, parameter_shapes
from ridgeline.models.params import STACKS

FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense family -> the family with experts that has the same layers otherwise."""
_MATRICES = ("gate", "up", "down")
_MLP = "blocks.mlp."


@dataclass(frozen=True)
class Upcycling:
    """What becomes of a dense model."""

    experts: int
    experts_per_token: int = 2
    reinitialized: float = 0.0
    """Share of each expert's hidden dims that are drawn from a normal distribution with the mean and deviation of their weights."""
    seed: int = 0

    def model(self, dense: ModelConfig) -> ModelConfig:
        """Return the model with experts. Raises UserError for a family without one, and for what that family cannot have."""
        if dense.moe is not None:
            raise UserError("the model has experts already; upcycling needs a dense one")
        if dense.family not in FAMILIES:
            raise UserError(f"model family '{dense.family}' has no counterpart with experts (supported: {', '.join(sorted(FAMILIES))})")
        family = FAMILIES[dense.family]
        width = None if family == "mixtral" else dense.mlp_dim
        moe = MoEConfig(experts=self.experts, experts_per_token=self.experts_per_token, expert_dim=width)
        model = dense.model_copy(update={"family": family, "moe": moe})
        for problem in model_problems(model):
            raise UserError(f"{problem.keys[0]}: {problem.message}")
        hf_config(model, "float32", {})  # refuses what the family cannot have
        return model

    def slices(self, dense: ModelConfig, read: ReadParameter, dtype: np.dtype) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """Yield (path, layer, values) of every parameter of the model with experts, one layer of one parameter at a time.

        read: of the dense model; its values are in `dtype` already, or are cast.
        """
        model = self.model(dense)
        for path, shape in parameter_shapes(model).items():
            name = path.removeprefix(_MLP)
            for layer in range(shape[0]) if path.startswith(STACKS) else (None,):
                if path == _MLP + "router":
                    assert layer is not None
                    values = model.init_std / model.width_ratio * self._random(layer, len(_MATRICES)).standard_normal(shape[1:], np.float32)
                elif path.startswith(_MLP) and name in _MATRICES:
                    assert layer is not None
                    values = self._copies(name, layer, read(path, layer))
                else:
                    values = read(path, layer)
                yield path, layer, values.astype(dtype, copy=False)

    def _copies(self, name: str, layer: int, dense: np.ndarray) -> np.ndarray:
        """Return the experts' matrices [D, E, F] of one layer, from the matrix of the MLP: [D, F], down [F, D]."""
        dense_DF = dense.T if name == "down" else dense
        copies_DEF = np.repeat(dense_DF[:, None], self.experts, axis=1)
        width, count = dense_DF.shape[1], round(self.reinitialized * dense_DF.shape[1])
        if count == 0:
            return copies_DEF
        for expert in range(self.experts):
            # The same dims in all three matrices; the values are those of one matrix.
            dims = self._random(layer, len(_MATRICES) + 1 + expert).choice(width, count, replace=False)
            old = dense_DF[:, dims].astype(np.float32)
            drawn = self._random(layer, _MATRICES.index(name), expert).standard_normal(old.shape, np.float32)
            copies_DEF[:, expert, dims] = old.mean() + old.std() * drawn
        return copies_DEF

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *key))
