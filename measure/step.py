"""Time the compiled train step of a config on synthetic batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ridgeline.configs.schema import Config
from ridgeline.loaders.rows import with_future_targets
from ridgeline.measure.timer import agreed
from ridgeline.models.distillation import IDS, LOG_PROBS
from ridgeline.models.policy import ADVANTAGES, OLD
from ridgeline.models.policy import REFERENCE as OF_REFERENCE
from ridgeline.models.preference import REFERENCE
from ridgeline.trainer.prepare import Prepared, prepare
from ridgeline.trainer.step import abstract_batch, local_rows, param_norm, to_global

STEP_ROUND_S = 0.5
"""A round of steps takes this long, unless MOST_STEPS take less."""
MOST_STEPS = 50


@dataclass
class Session:
    """Mesh, compiled programs and state shared by the tasks of one `ridge bench`. Each is created on first use."""

    config: Config
    repeats: int
    parts: Prepared = field(init=False)
    compile_s: float | None = None
    """Compilation time of the step; None before it is compiled."""
    _step: Any = None
    _norm: Any = None
    _state: Any = None
    _batch: Any = None
    _steps_per_round: int | None = None

    def __post_init__(self) -> None:
        """Build the mesh and the abstract model. Raises UserError for a config these devices cannot run."""
        self.parts = prepare(self.config)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The device mesh of the config."""
        return self.parts.mesh

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> devices, all axes."""
        return dict(self.mesh.shape)

    @property
    def gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return bool(self.mesh.devices.flat[0].platform == "gpu")

    @property
    def step(self) -> Any:
        """The compiled train step."""
        if self._step is None:
            begun = time.perf_counter()
            self._step = self.parts.train_step.lower(self.parts.abstract, abstract_batch(self.config, self.parts.partitioner)).compile()
            self.compile_s = time.perf_counter() - begun
        return self._step

    @property
    def norm(self) -> Any:
        """The compiled parameter norm, which log lines contain."""
        if self._norm is None:
            self._norm = jax.jit(param_norm).lower(self.parts.abstract.params).compile()
        return self._norm

    def take_state(self) -> Any:
        """Return the state, created by the first call. Steps donate it: pass the new state to `keep_state`."""
        if self._state is None:
            self._state = jax.block_until_ready(self.parts.make_state())
        state, self._state = self._state, None
        return state

    def keep_state(self, state: Any) -> None:
        """Keep the state for the next task."""
        self._state = state

    def synthetic_batch(self) -> dict[str, jax.Array]:
        """Return a batch of random tokens on the devices, one document per row."""
        rows = local_rows(self.config.data.batch_size, self.parts.partitioner)
        shape = (len(rows), self.config.data.seq_len)
        tokens, targets = np.random.default_rng(0).integers(0, self.config.model.vocab_size, (2, *shape), dtype=np.int32)
        made = {
            "tokens": tokens,
            "targets": targets,
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
            "segment_ids": np.ones(shape, np.int32),
            "weights": np.ones(shape, np.float32),
        }
        if self.config.preference.loss is not None:
            made[REFERENCE] = np.zeros((len(rows), 1), np.float32)
        if self.config.distillation.weight is not None:
            wanted = self.config.distillation
            made[IDS] = np.broadcast_to(np.arange(wanted.top_k, dtype=np.int32), (*shape, wanted.top_k)).copy()
            made[LOG_PROBS] = np.zeros((*shape, wanted.outcomes), np.float32)
        if self.config.policy.loss is not None:
            made |= {name: np.zeros(shape, np.float32) for name in (ADVANTAGES, OLD, *([OF_REFERENCE] if self.config.policy.kl else []))}
        made = with_future_targets(made, self.config.model.mtp_layers)
        return jax.block_until_ready(to_global(made, self.parts.partitioner))

    def steps_per_round(self) -> int:
        """Return the steps of one round. Call `begin_steps` first."""
        assert self._steps_per_round is not None, "call begin_steps first"
        return self._steps_per_round

    def begin_steps(self) -> None:
        """Compile and warm up the step, and choose how many steps fill a round."""
        self._batch = self.synthetic_batch()
        self._steps(2)
        begun = time.perf_counter()
        self._steps(1)
        step_s = time.perf_counter() - begun
        self._steps_per_round = agreed(max(1, min(MOST_STEPS, round(STEP_ROUND_S / max(step_s, 1e-7)))))

    def step_round(self) -> float:
        """Return the seconds per step of one round on a synthetic batch. Results are waited for only at the end of the round."""
        steps = self.steps_per_round()
        begun = time.perf_counter()
        self._steps(steps)
        return (time.perf_counter() - begun) / steps

    def _steps(self, number: int) -> None:
        step, state, metrics = self.step, self.take_state(), None
        for _ in range(number):
            state, metrics = step(state, self._batch)
        jax.block_until_ready((state, metrics))
        self.keep_state(state)
