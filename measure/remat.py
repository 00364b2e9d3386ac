"""Time a config's layer, forward and backward, under each rematerialization policy.

Under every policy a model with few layers is compiled, without an optimizer and with a small vocabulary. Time: each round runs all
policies, so that other load on the machine affects them alike; the result is the difference to `none` in the same round, per layer, which
cancels everything outside the layers. Bytes: the growth of temporary memory per layer, compared with a shallower model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MESH_AXES, Config, RematConfig
from ridgeline.measure.timer import DeviceTimer
from ridgeline.planner.layer_costs import LayerPoint, LayerShape, PolicyCost
from ridgeline.planner.layouts import MEMORY_LADDER
from ridgeline.planner.local import LocalSizes
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.state import INIT_OPTIONS, ModelSpec, Tree, model_spec
from ridgeline.trainer.step import Batch, loss_sums, recent_magnitudes

MOST_TOKENS = 16384
"""Upper limit for the tokens of the measured rows."""
VOCABULARY = 256
ROUND_S = 0.2
BATCH = ("tokens", "targets", "positions", "segment_ids", "weights")

Report = Callable[[str], None]


def policies_of(config: Config) -> list[RematConfig]:
    """Return the policies to measure: the planner's, attention-only and the config's own. Not offload, whose copies the planner counts."""
    wanted = [*MEMORY_LADDER[:1], RematConfig(policy="attention-only"), *MEMORY_LADDER[1:], config.compute.remat]
    found: dict[tuple[str, frozenset[str]], RematConfig] = {}
    for remat in wanted:
        found.setdefault((remat.policy, frozenset(remat.names)), remat)
    return [remat for remat in found.values() if remat.policy != "offload"]


def measure_layer(
    config: Config,
    device_name: str,
    *,
    rounds: int,
    rows: int | None = None,
    policies: Sequence[RematConfig] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    report: Report = lambda line: None,
) -> LayerPoint:
    """Measure a layer of the config on the first local device, sharded as `mesh.tensor` shards it but without communication.

    Args:
      config: its mesh gives the shard of one device; its batch the rows, unless `rows` is given.
      device_name: name of the device in the hardware catalog.
      rounds: rounds of every policy.
      policies: the policies to measure, including `none`. None: `policies_of(config)`.
      clock: seconds. Pass `time.process_time` on a CPU that other programs also use.
      report: called with one line before each part.

    Raises UserError when the rows do not fit into device memory.
    """
    assert rounds >= 1
    layer = one_device(config, rows)
    remats = list(policies_of(config) if policies is None else policies)
    device = jax.local_devices()[0]
    shallow, deep = (depth * layer.compute.scan_unroll for depth in (2, 4))
    tokens = layer.data.batch_size * layer.data.seq_len
    report(f"{len(remats)} policies, {deep} layers, {layer.data.batch_size} rows of {layer.data.seq_len:,} tokens: compiling")
    programs = [_program(layer, remat, deep) for remat in remats]
    below = [_program(layer, remat, shallow, quick=True) for remat in remats]
    kept = [(a.temporary_bytes - b.temporary_bytes) // (deep - shallow) for a, b in zip(programs, below, strict=True)]
    report(f"{rounds} rounds")
    seconds = _rounds_s(programs, rounds, clock)
    none = seconds[next(index for index, remat in enumerate(remats) if remat.policy == "none")]
    none_s = statistics.median(none) / deep
    more_s = [statistics.median((a - b) / deep for a, b in zip(each, none, strict=True)) for each in seconds]
    return LayerPoint(
        device=device_name,
        shape=LayerShape.of(LocalSizes.of(layer, dict.fromkeys(MESH_AXES, 1)), gpu=device.platform == "gpu"),
        tokens=tokens,
        policies=[
            PolicyCost(policy=remat.policy, names=list(remat.names), layer_s=max(none_s + more, 1e-9), kept_bytes=size)
            for remat, more, size in zip(remats, more_s, kept, strict=True)
        ],
        source=f"{device.device_kind}, jax {jax.__version__}, median of {rounds} rounds",
    )


def one_device(config: Config, rows: int | None = None) -> Config:
    """Return a one-device config with the layer shard and the microbatch rows of one device of the config's mesh."""
    model, tensor = config.model, max(1, config.mesh.tensor)
    assert all(size % tensor == 0 for size in (model.num_heads, model.kv_heads, model.mlp_dim)), "configs/rules.py rejects others"
    replicas = max(1, config.mesh.data) * max(1, config.mesh.fsdp)
    usual = min(config.data.batch_size // config.trainer.accumulation // replicas, MOST_TOKENS // config.data.seq_len)
    cut = {
        "head_dim": None if model.latent_attention is not None else model.head_width,
        "num_heads": model.num_heads // tensor,
        "num_kv_heads": model.kv_heads // tensor,
        "mlp_dim": model.mlp_dim // tensor,
        "vocab_size": VOCABULARY,
        "pad_vocab_to": None,
        "max_seq_len": max(model.max_seq_len, config.data.seq_len),
    }
    return config.model_copy(
        update={
            "model": model.model_copy(update=cut),
            "mesh": config.mesh.model_copy(update=dict.fromkeys(MESH_AXES, 1)),
            "data": config.data.model_copy(update={"batch_size": rows or max(1, usual)}),
            "trainer": config.trainer.model_copy(update={"accumulation": 1}),
        }
    )


@dataclass
class _Program:
    """The compiled gradients of a model with a few layers."""

    compiled: Any
    config: Config
    spec: ModelSpec

    @property
    def temporary_bytes(self) -> int:
        """Bytes needed beside parameters and gradients."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)


def _program(layer: Config, remat: RematConfig, depth: int, *, quick: bool = False) -> _Program:
    """Compile loss and gradients. Each call overwrites the gradients of the call before (donation).

    `quick`: faster compilation to slower code with the same memory, where the platform supports it (trainer.state.INIT_OPTIONS).
    """
    config = layer.model_copy(
        update={
            "model": layer.model.model_copy(update={"num_layers": depth}),
            "compute": layer.compute.model_copy(update={"remat": remat}),
        }
    )
    partitioner = Partitioner.single()
    spec = model_spec(config, partitioner)

    def gradient(params: Tree, before: Tree, amax: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        del before
        recent = jax.tree.map(partial(recent_magnitudes, partitioner), amax)

        def nats_of(params: Tree, recent: Tree) -> jax.Array:
            return loss_sums(spec, config, partitioner, params, batch, recent)[0].nats

        nats, (grads, _) = jax.value_and_grad(nats_of, argnums=(0, 1))(params, recent)
        return nats, jax.tree.map(lambda g: g.astype(config.precision.gradients), grads)

    options = INIT_OPTIONS.get(jax.local_devices()[0].platform) if quick else None
    jitted = jax.jit(gradient, donate_argnums=1, keep_unused=True, compiler_options=options)
    precision = config.compute.matmul_precision
    with jax.default_matmul_precision(None if precision == "default" else precision):
        lowered = jitted.lower(spec.abstract_params, _gradients(config, spec), spec.abstract_amax, _batch(config, jax.ShapeDtypeStruct))
    return _Program(lowered.compile(), config, spec)


def _gradients(config: Config, spec: ModelSpec) -> Tree:
    dtype = jnp.dtype(config.precision.gradients)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), spec.abstract_params)


def _batch(config: Config, make: Callable[[tuple[int, int], Any], Any]) -> dict[str, Any]:
    shape = (config.data.batch_size, config.data.seq_len)
    return {name: make(shape, jnp.float32 if name == "weights" else jnp.int32) for name in BATCH}


def _rounds_s(programs: Sequence[_Program], rounds: int, clock: Callable[[], float]) -> list[list[float]]:
    """Return the seconds per call of each program, one entry per round. All programs share parameters and gradients."""
    first = programs[0]
    try:
        options = INIT_OPTIONS.get(jax.local_devices()[0].platform)
        params = jax.jit(first.spec.build, compiler_options=options)(jax.random.key(0))
        timed = [DeviceTimer.of(call, least_s=ROUND_S, clock=clock) for call in _calls(programs, params)]
        for _ in range(rounds):
            for each in timed:
                each.round()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        rows, length = first.config.data.batch_size, first.config.data.seq_len
        raise UserError(
            f"{rows} rows of {length:,} tokens and {first.config.model.num_layers} layers do not fit into device memory; use fewer --rows"
        ) from None
    return [each.rounds_s for each in timed]


def _calls(programs: Sequence[_Program], params: Tree) -> list[Callable[[], jax.Array]]:
    """Return a call for each program. All share one set of gradients: each call depends on the one before and overwrites its gradients."""
    config, spec = programs[0].config, programs[0].spec
    held = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _gradients(config, spec))]
    amax = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), spec.abstract_amax)
    batch = _batch(config, jnp.ones)
    length = config.data.seq_len
    batch["tokens"] = batch["targets"] = jax.random.randint(jax.random.key(1), batch["tokens"].shape, 0, VOCABULARY)
    batch["positions"] = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), batch["tokens"].shape)

    def call(compiled: Any) -> jax.Array:
        nats, held[0] = compiled(params, held[0], amax, batch)
        return nats

    return [partial(call, program.compiled) for program in programs]
