"""`ridge debug nan`: where the first step of a run with a loss or gradient that is not finite gets it from.

The newest checkpoint before that step is restored (or the run's first state made again), the steps up to it are taken again on the same
batches, and the step is run operation by operation (trainer/nonfinite_origin.py). On another mesh than the run's, sums are in another
order: a value at the edge of the range of its dtype may then stay finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError
from ridgeline.configs.fault_schema import CorruptionCheckConfig
from ridgeline.configs.load import from_resolved, override_mesh
from ridgeline.configs.rules import fit_devices, place_on_devices
from ridgeline.configs.schema import Config
from ridgeline.loaders.loader import build_loader
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.skipped_batches import read_skipped_batches
from ridgeline.trainer.checkpoint.payload import named_leaves
from ridgeline.trainer.checkpoint.reader import CheckpointReader
from ridgeline.trainer.nonfinite_origin import Origin, find_origin, state_of
from ridgeline.trainer.prepare import Prepared, check_data, data_seed, prepare
from ridgeline.trainer.pretrained import start_from
from ridgeline.trainer.state import TrainState, Tree
from ridgeline.trainer.step import DROPOUT, Batch, local_rows, loss_sums, microbatches, recent_magnitudes, to_global, with_loss_limit

Log = Callable[[str], None]


@dataclass(frozen=True)
class NanReport:
    """What was found."""

    step: int
    """The step that was run again; the first one is 1."""
    from_step: int
    """The checkpoint from which it was reached; 0: the start of the run."""
    what: str
    """`loss`, the name of a gradient, `gradient norm`, or the name of a parameter; '' where all is finite."""
    microbatch: int | None
    """Number of the microbatch whose loss or gradient is not finite."""
    layers: tuple[int, int] | None
    """First and last layer (of one iteration of the loop over layers) of the origin; None: outside of the layers."""
    origin: Origin | None
    """The operation; None where no operation of one microbatch is the cause."""

    def describe(self) -> str:
        """Return the report as lines."""
        head = f"step {self.step}, reached from step {self.from_step}: "
        if not self.what:
            return head + "loss, gradients and their norm are finite on this mesh"
        if self.origin is None:
            norm = self.what == "gradient norm"
            operations = "" if self.microbatch is None else f" (microbatch {self.microbatch}); operation by operation it stays finite"
            return f"{head}{'the gradients are finite, their global norm overflows' if norm else f'{self.what} is not finite{operations}'}"
        first, last = self.layers or (0, 0)
        layer = "outside of the layers" if self.layers is None else f"layer {first}" if first == last else f"layers {first} to {last}"
        origin, way = self.origin, "backward" if self.origin.backward else "forward"
        largest = ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}] up to {x.largest:.3g}" for x in origin.operands)
        return (
            f"{head}{self.what} is not finite (microbatch {self.microbatch})\n"
            f"first: {way} pass, {layer}: {origin.operation} gives {origin.result} of {largest}\n"
            f"in {origin.scope or '-'}, {origin.source}"
        )


def first_bad_step(events: Sequence[Event]) -> int | None:
    """Return the first step of a run whose loss or gradient norm was not finite, by its event log; None: there is none."""
    steps = [
        event.fields["step"]
        for event in events
        if event.kind == "skipped_step" and not all(math.isfinite(float(event.fields[key])) for key in ("loss", "grad_norm"))
    ]
    return min(steps, default=None)


def find_nan(run: Path, step: int, *, mesh: Sequence[str] = (), log: Log = lambda line: None) -> NanReport:
    """Run a step of a run again, and find where what is not finite comes from.

    Args:
      run: the run directory.
      step: the step, from 1 on.
      mesh: overrides `mesh.KEY=VALUE` [default: the run's, or the largest smaller one that the machine has].
      log: receives progress, a line at a time.

    Raises UserError: a step beyond the last one, a damaged checkpoint, changed data, or a run whose loss is not that of tokens.
    """
    config = _adapted(override_mesh(from_resolved(run / "config.yaml"), mesh))
    if step > config.trainer.steps:
        raise UserError(f"--step {step}: the run has trainer.steps={config.trainer.steps}")
    devices = jax.local_devices()
    config = (place_on_devices if mesh else fit_devices)(config, len(devices))
    parts = prepare(config, devices[: math.prod(config.mesh.sizes.values())])
    reader = CheckpointReader(run / "checkpoints", config.checkpoint, log=log)
    start = max((at for at in reader.steps() if at < step), default=0)
    state = _first_state(config, parts) if start == 0 else reader.restore(parts.abstract, start)[0]
    loader = build_loader(
        config.data,
        seed=data_seed(config),
        vocab_size=config.model.vocab_size,
        rows=local_rows(config.data.batch_size, parts.partitioner),
        start_step=start,
        distillation=config.distillation,
        mtp_layers=config.model.mtp_layers,
        skipped=read_skipped_batches(run),
    )
    not_applied = {event.fields.get("step") for event in read_events(event_file(run, 0)) if event.kind == "skipped_step"}
    try:
        for number, rows in enumerate(loader, start + 1):
            batch = to_global(rows, parts.partitioner)
            if config.loss_spikes.policy == "skip":
                batch = with_loss_limit(batch, -math.inf if number in not_applied else math.inf, parts.partitioner)
            if number == step:
                return _examined(config, parts, state, batch, start)
            log(f"step {number} of {start + 1} to {step - 1}")
            state, _ = parts.train_step(state, batch)
    finally:
        loader.close()
    raise AssertionError("a loader has no end")


def _first_state(config: Config, parts: Prepared) -> TrainState:
    """Return the state of step 0, as a start of the run makes it."""
    state: TrainState = parts.make_state()
    if config.init_from is None:
        return state
    sha256 = check_data(config).sha256
    return start_from(config.init_from, config.model, sha256, parts.spec, state, config.lora, with_optimizer=config.init_optimizer)


def _adapted(config: Config) -> Config:
    """Return the config for running a step by itself. Raises UserError where that is not supported."""
    for key, loss in (("preference.loss", config.preference.loss), ("policy.loss", config.policy.loss)):
        if loss is not None:
            raise UserError(f"{key}={loss} is not supported by `ridge debug nan`, only losses of tokens")
    compute = config.compute.model_copy(update={"scan_layers": True, "scan_unroll": 1})
    own = {"pipeline": 1, "pipeline_chunks": 1} if config.mesh.pipeline != 1 else {}
    update = {"compute": compute, "corruption_check": CorruptionCheckConfig(), "mesh": config.mesh.model_copy(update=own)}
    return config.model_copy(update=update)


def _examined(config: Config, parts: Prepared, state: TrainState, batch: Batch, start: int) -> NanReport:
    """Return what is not finite in a step from this state."""
    report = partial(NanReport, int(state.step) + 1, start)
    for name, leaf in named_leaves(state.params).items():
        if state_of(leaf):
            return report(f"parameter {name}", None, None, None)
    gradient, trained, total = _gradient_of(config, parts, state, batch), parts.spec.split(state.params)[0], None
    for number in range(config.trainer.accumulation):
        of_batch = partial(gradient, number)
        loss, grads = jax.jit(of_batch)(trained)
        leaves = {"loss": loss, **{f"gradient of {name}": leaf for name, leaf in named_leaves(grads).items()}}
        for place, (what, leaf) in enumerate(leaves.items()):
            if state_of(leaf):
                origin = find_origin(of_batch, trained, result=place)
                return report(what, number, None if origin is None else _layers(config, origin), origin)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    norm = math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(total)))
    return report("" if math.isfinite(norm) else "gradient norm", None, None, None)


def _gradient_of(config: Config, parts: Prepared, state: TrainState, batch: Batch) -> Callable[[int, Tree], Any]:
    """Return the function (microbatch, trained parameters) -> (loss, gradients), as the train step computes them."""
    spec, partitioner, count = parts.spec, parts.partitioner, config.trainer.accumulation
    micro = microbatches(batch, count, partitioner) if count > 1 else {name: x[None] for name, x in batch.items()}
    divisor = jnp.maximum(jnp.sum(batch["weights"], dtype=jnp.float32), 1.0)
    recent = jax.tree.map(partial(recent_magnitudes, partitioner), state.amax)
    key = jax.random.fold_in(jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step))[0], DROPOUT)
    drops = spec.adapted and config.lora.dropout > 0
    frozen = spec.split(state.params)[1]
    rows, tokens = config.data.batch_size, config.data.batch_size * config.data.seq_len

    def gradient(number: int, trained: Tree) -> Any:
        def objective(trained: Tree) -> jax.Array:
            dropout = None if not drops else key if count == 1 else jax.random.fold_in(key, number)
            one = {name: x[number] for name, x in micro.items()}
            sums, router = loss_sums(spec, config, partitioner, spec.join(trained, frozen), one, recent, dropout)
            value = sums.objective / divisor
            return value if router is None else value + router.objective(config.loss, rows, tokens)

        return jax.value_and_grad(objective)(trained)

    return gradient


def _layers(config: Config, origin: Origin) -> tuple[int, int] | None:
    """Return the first and last layer of the iteration of the loop over layers that the origin is in."""
    model, period = config.model, config.model.layer_period
    for loop in origin.loops:
        dense = 0 if model.interleaved_experts else model.dense_layers
        for first, count in ((0, dense), (dense, model.num_layers - dense)):
            if count and loop.length == count // period:
                return first + loop.index * period, first + loop.index * period + period - 1
    return None
