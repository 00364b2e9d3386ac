"""The jitted train and evaluation steps, and the batches they take.

One optimizer step: microbatches of the local rows are differentiated in turn, token sums (never means) are accumulated, the global
gradient norm is clipped, and the update is applied only where loss and gradient are finite, the norm is at most optimizer.skip_norm, and
the loss at most the LOSS_LIMIT of the batch. Dividing the summed loss by the token weight of the *whole* global batch makes every split
into microbatches, devices and packed rows give the same update.

B rows, T tokens per row, D width, V vocabulary, A microbatches, S row shards (data x fsdp).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ridgeline.configs.schema import Config
from ridgeline.models import distillation, mtp
from ridgeline.models import policy as rollouts
from ridgeline.models.decoder import Decoder
from ridgeline.models.loss import LossSums, loss_of, module_metrics, row_log_probs, token_log_probs, top_predictions
from ridgeline.models.matmul import fp8
from ridgeline.models.moe.router import RouterTotals, balanced_bias
from ridgeline.models.policy import PolicySums, policy_of
from ridgeline.models.preference import REFERENCE, PreferenceSums, count_pairs, preference_of
from ridgeline.sharding.manual import on_shards, row_major
from ridgeline.sharding.partition import DATA_AXIS, Partitioner
from ridgeline.trainer.digests import DIGESTS, StepDigests
from ridgeline.trainer.low_precision import apply_updates
from ridgeline.trainer.offload import OffloadedOptimizer
from ridgeline.trainer.pipeline import pipeline_gradient, pipeline_sums
from ridgeline.trainer.state import ModelSpec, TrainState, Tree

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Schedule = Callable[[jax.Array], jax.Array]
DROPOUT = 2
"""Folded into the key of a step for the dropout of adapters."""
LOSS_LIMIT = "loss_limit"
"""Key of a batch with the loss above which its update is not applied (loss_spikes.policy=skip), float32 scalar."""
ROUTER = "router"
"""Key of the router's totals among the means of a microbatch."""


def _forward(
    spec: ModelSpec, config: Config, params: Tree, batch: Batch, recent: Tree | None = None, dropout_key: jax.Array | None = None
) -> tuple[Decoder, jax.Array, RouterTotals | None]:
    """Return the model, the residual stream of a batch after its layers, and the totals of the routers (as `Decoder.forward`)."""
    model: Decoder = spec.merge(params, recent)
    # Without segments attention uses its plain causal kernel; padding is at the end of a row.
    segment_ids = batch["segment_ids"] if config.data.document_masking else None
    return model, *model.forward(batch["tokens"], batch["positions"], segment_ids, dropout_key, mtp.future_tokens(batch))


def loss_sums(
    spec: ModelSpec,
    config: Config,
    partitioner: Partitioner,
    params: Tree,
    batch: Batch,
    recent: Tree | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[LossSums, RouterTotals | None]:
    """Forward pass: sums over the batch of nats, z-loss and token weights (fp32 scalars), and of the routers (None: no experts).

    `recent`: as in `ModelSpec.merge`; `dropout_key`: as in `Decoder.forward`.
    """
    model, x_BTD, router = _forward(spec, config, params, batch, recent, dropout_key)
    return loss_of(model, config, partitioner, x_BTD, batch, frozen=spec.adapted), router


def preference_sums(
    spec: ModelSpec,
    config: Config,
    partitioner: Partitioner,
    params: Tree,
    batch: Batch,
    recent: Tree | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, PreferenceSums, RouterTotals | None]:
    """As `loss_sums`, of preference pairs: the scalar and the sums of `models.preference.preference_of`, and the totals of the routers."""
    model, x_BTD, router = _forward(spec, config, params, batch, recent, dropout_key)
    return *preference_of(model, config, partitioner, x_BTD, batch, frozen=spec.adapted), router


def policy_sums(
    spec: ModelSpec,
    config: Config,
    partitioner: Partitioner,
    params: Tree,
    batch: Batch,
    recent: Tree | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, PolicySums, RouterTotals | None]:
    """As `loss_sums`, of rollouts: the scalar and the sums of `models.policy.policy_of`, and the totals of the routers."""
    model, x_BTD, router = _forward(spec, config, params, batch, recent, dropout_key)
    return *policy_of(model, config, partitioner, x_BTD, batch, frozen=spec.adapted), router


def make_token_log_prob_step(spec: ModelSpec, config: Config, partitioner: Partitioner) -> Callable[[Tree, Batch], jax.Array]:
    """Return the pure step (params, batch) -> log-probability of each target, float32 [B, T], sharded as the batch."""

    def log_prob_step(params: Tree, batch: Batch) -> jax.Array:
        model, x_BTD, _ = _forward(spec, config, params, batch)
        return token_log_probs(model, config, partitioner, x_BTD, batch)

    return log_prob_step


def make_top_prediction_step(
    spec: ModelSpec, config: Config, partitioner: Partitioner, *, count: int, temperature: float, vocab_size: int
) -> Callable[[Tree, Batch], distillation.Teacher]:
    """Return the pure step (params, batch) -> the `count` most likely tokens at every position (`models.loss.top_predictions`)."""

    def top_prediction_step(params: Tree, batch: Batch) -> distillation.Teacher:
        model, x_BTD, _ = _forward(spec, config, params, batch)
        return top_predictions(model, config, partitioner, x_BTD, batch, count=count, temperature=temperature, vocab_size=vocab_size)

    return top_prediction_step


def make_log_prob_step(spec: ModelSpec, config: Config, partitioner: Partitioner) -> Callable[[Tree, Batch], jax.Array]:
    """Return the pure step (params, batch) -> log-probability of the targets of each row, float32 [B], replicated."""

    def log_prob_step(params: Tree, batch: Batch) -> jax.Array:
        model, x_BTD, _ = _forward(spec, config, params, batch)
        return partitioner.constrain(row_log_probs(model, config, partitioner, x_BTD, batch), None)

    return log_prob_step


def make_train_step(
    spec: ModelSpec,
    config: Config,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    partitioner: Partitioner,
    digests: StepDigests | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the pure step (state, batch [B, T]) -> (state, scalar metrics); the caller jits it and donates the state.

    digests: adds the digests of state and gradient to the metrics, uint32 [devices, arrays] (trainer/digests.py).
    """
    gradient, of_state = _make_gradient(spec, config, partitioner), partitioner.of_state
    rows, tokens = config.data.batch_size, config.data.batch_size * config.data.seq_len
    offloaded = OffloadedOptimizer.of(config, spec.trained_axes, partitioner) if config.optimizer.offload else None

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        limit, batch = batch.get(LOSS_LIMIT), {name: x for name, x in batch.items() if name != LOSS_LIMIT}
        key, rounding = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step))
        recent = jax.tree.map(partial(recent_magnitudes, partitioner), state.amax)
        grads, now, means, weight = gradient(state.params, recent, batch, jax.random.fold_in(key, DROPOUT))
        now = jax.tree.map(lambda rows: jnp.max(rows, (-2, -1)), now)  # over the row shards, once per step
        router: RouterTotals | None = means.pop(ROUTER, None)
        if config.trainer.accumulation > 1 and config.precision.moments == "int8" and partitioner.zero_stage:
            means, key, rounding, state = _after_microbatches(means, key, rounding, state)
        with jax.named_scope("optimizer"):
            grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            good = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
            if digests is not None:
                state, found = digests.before_update(state, grads, grad_norm)
            if config.optimizer.skip_norm is not None:
                good &= grad_norm <= config.optimizer.skip_norm
            if limit is not None:
                good &= means["loss"] <= limit
            if config.optimizer.clip_norm is not None:
                scale = jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))
                grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
            old_params, frozen = spec.split(state.params)
            old_params = constrain_params(old_params, spec, of_state) if partitioner.zero_stage else old_params
            learning_rate = schedule(state.step)
            if offloaded is not None:  # chooses itself, one parameter after the other
                params, opt_state = offloaded.update(grads, state.opt_state, old_params, good, learning_rate, key, rounding)
            else:
                updates, opt_state = optimizer.update(grads, state.opt_state, old_params, learning_rate=learning_rate, key=key)
                apply = partial(apply_updates, key=rounding) if config.precision.stochastic_rounding else optax.apply_updates
                params = apply(old_params, updates)
            if router is not None and not spec.adapted:
                params = _with_router_bias(config, params, old_params, router)
            # select, not lax.cond: a device-side predicate would make the host wait for it on GPUs
            amax = jax.tree.map(lambda steps, newest: jnp.concatenate([newest[..., None], steps[..., :-1]], -1), state.amax, now)
            choose = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
            if offloaded is None:
                opt_state = choose(opt_state, state.opt_state)
            params, amax = choose((params, amax), (old_params, state.amax))
            if partitioner.zero_stage and partitioner.mesh.shape[DATA_AXIS] > 1:
                params = _gathered_in_turn(params, spec, partitioner)
        bad = jnp.where(good, 0, 1).astype(jnp.int32)
        new_state = TrainState(
            step=state.step + 1,
            params=spec.join(params, frozen),
            opt_state=opt_state,
            amax=amax,
            skipped=state.skipped + bad,
            bad_in_a_row=(state.bad_in_a_row + 1) * bad,
            rng=state.rng,
        )
        metrics = {
            **module_metrics(means),
            **({} if router is None else router.metrics(rows, tokens)),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "weight": weight,
            "skipped": new_state.skipped,
            "bad_in_a_row": new_state.bad_in_a_row,
            **({} if digests is None else {DIGESTS: digests.after_update(found, new_state)}),
        }
        return new_state, metrics

    return train_step


GATHERED_AT_ONCE = 2
"""Updated parameters that are gathered over data at a time (mesh.zero_stage=2)."""


def _gathered_in_turn(params: Tree, spec: ModelSpec, partitioner: Partitioner) -> Tree:
    """Return the updated parameters, sharded as those of the model: gathered once, after the update has been chosen (mesh.zero_stage=2).

    The gather of one starts when the one before the previous one is in its place: XLA gathers into a buffer of its own, and would start all
    gathers at once. Large and small ones take turns, so that one buffer of the largest size is there at a time. Shards and gathered
    parameters have the layout of the state, else XLA would write the moments, which the same kernel computes, in the layout of the gather,
    and copy them. Llama 3.1 8B over data=8 needs 52.7 GB so, and 72.6 GB without, for a step that is 7 ms longer (simulated, H100).
    """
    leaves, structure = jax.tree.flatten(params)
    axes = jax.tree.leaves(spec.trained_axes, is_leaf=lambda node: type(node) is tuple)
    shards = [partitioner.of_state.spec(of, leaf.shape) for of, leaf in zip(axes, leaves, strict=True)]
    whole = [partitioner.spec(of, leaf.shape) for of, leaf in zip(axes, leaves, strict=True)]
    waiting = deque(sorted((at for at in range(len(leaves)) if shards[at] != whole[at]), key=lambda at: -leaves[at].size))
    gathered = list[jax.Array]()
    while waiting:
        at = waiting.popleft() if len(gathered) % 2 == 0 else waiting.pop()
        shard = partitioner.of_state.constrain(leaves[at], *axes[at])
        shard = on_shards(partitioner, row_major, shards[at], shards[at])(shard)
        if len(gathered) >= GATHERED_AT_ONCE:
            shard, _unused = jax.lax.optimization_barrier((shard, gathered[-GATHERED_AT_ONCE]))
        leaves[at] = on_shards(partitioner, row_major, whole[at], whole[at])(partitioner.constrain(shard, *axes[at]))
        gathered.append(leaves[at])
    return constrain_params(jax.tree.unflatten(structure, leaves), spec, partitioner)


def _after_microbatches(
    means: Tree, key: jax.Array, rounding: jax.Array, state: TrainState
) -> tuple[Tree, jax.Array, jax.Array, TrainState]:
    """Return the arguments, such that nothing reads the keys and the optimizer state before the losses of all microbatches are there.

    Else XLA may draw random numbers and decode moments of the largest parameters before the microbatches, and keep them in float32 until
    the update: 15 % of the memory of Llama 2 13B over data=2 x fsdp=8.
    """
    means, key, rounding, opt_state = jax.lax.optimization_barrier((means, key, rounding, state.opt_state))
    return means, key, rounding, replace(state, opt_state=opt_state)


def _make_gradient(
    spec: ModelSpec, config: Config, partitioner: Partitioner
) -> Callable[[Tree, Tree, Batch, jax.Array], tuple[Tree, Tree, Tree, jax.Array]]:
    """Return the function of parameters, recent magnitudes, a batch and a key for dropout that gives the gradient of the trained
    parameters, summed over microbatches, the magnitudes of its matmuls, mean losses and its weight."""
    accumulation = config.trainer.accumulation
    grad_dtype = jnp.dtype(config.precision.gradients)
    of_state = partitioner.of_state
    rows, tokens = config.data.batch_size, config.data.batch_size * config.data.seq_len
    drops = spec.adapted and config.lora.dropout > 0
    staged = pipeline_gradient(spec, config, partitioner) if partitioner.mesh.shape["pipeline"] > 1 else None
    pairs, policy = config.preference.loss is not None, config.policy.loss is not None
    names = (
        PreferenceSums.names()
        if pairs
        else PolicySums.names()
        if policy
        else LossSums.names(teacher=config.distillation.weight is not None, modules=config.model.mtp_layers > 0)
    )

    def divisor_of(weights: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the number that sums of the whole batch are divided by."""
        return jnp.maximum(count_pairs(weights) if pairs else rollouts.count_tokens(weights) if policy else weight, 1.0)

    def loss_and_means(params: Tree, recent: Tree, batch: Batch, total: jax.Array, key: jax.Array | None) -> tuple[Any, Tree, Any]:
        """Return what is differentiated, the means and the router's totals. `total`: `divisor_of` the whole batch."""
        if pairs:
            surrogate, of_pairs, router = preference_sums(spec, config, partitioner, params, batch, recent, key)
            return surrogate / total, of_pairs.means(total), router
        if policy:  # the weights are shares of the loss
            surrogate, of_tokens, router = policy_sums(spec, config, partitioner, params, batch, recent, key)
            return surrogate, of_tokens.means(total), router
        sums, router = loss_sums(spec, config, partitioner, params, batch, recent, key)
        return sums.objective / total, sums.means(total), router

    def microbatch_gradient(params: Tree, recent: Tree, batch: Batch, total: jax.Array, key: jax.Array | None) -> tuple[Tree, Tree, Tree]:
        trained, frozen = spec.split(params)

        def objective(trained: Tree, recent: Tree) -> tuple[jax.Array, Tree]:
            value, means, router = loss_and_means(spec.join(trained, frozen), recent, batch, total, key)
            if router is None:
                return value, means
            return value + router.objective(config.loss, rows, tokens), {**means, ROUTER: router}

        (_, means), (grads, now) = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(trained, recent)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return constrain_params(grads, spec, of_state) if partitioner.zero_stage else grads, now, means

    def gradient(params: Tree, recent: Tree, batch: Batch, key: jax.Array) -> tuple[Tree, Tree, Tree, jax.Array]:
        weight = jnp.sum(batch["weights"], dtype=jnp.float32)
        divisor = divisor_of(batch["weights"], weight)
        if staged is not None:
            total = staged(params, recent, microbatches(batch, accumulation, partitioner), divisor)
            means = total.sums.means(divisor)
            return total.grads, total.amax, means if total.router is None else {**means, ROUTER: total.router}, weight
        if accumulation == 1:
            return *microbatch_gradient(params, recent, batch, divisor, key if drops else None), weight
        micro = microbatches(batch, accumulation, partitioner)

        def body(index: jax.Array, carry: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
            one = {name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in micro.items()}
            grads, now, means = microbatch_gradient(params, recent, one, divisor, jax.random.fold_in(key, index) if drops else None)
            return (
                jax.tree.map(jnp.add, carry[0], grads),
                jax.tree.map(jnp.maximum, carry[1], now),
                jax.tree.map(jnp.add, carry[2], means),
            )

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, grad_dtype), spec.split(params)[0])
        nothing: Tree = {name: jnp.zeros((), jnp.float32) for name in names}
        if config.model.moe is not None:
            modules = config.model.mtp_blocks
            nothing[ROUTER] = RouterTotals.zeros(config.model.moe_layers + modules.moe_layers, config.model.moe.experts)
        least = jax.tree.map(jnp.zeros_like, recent)
        # XLA on GPUs unrolls a loop with a known trip count, which keeps the activations of two microbatches alive: hide the count.
        count = jax.lax.optimization_barrier(jnp.int32(accumulation))
        grads, now, means = jax.lax.fori_loop(0, count, body, (constrain_params(zeros, spec, of_state), least, nothing))
        return grads, now, means, weight

    return gradient


def _with_router_bias(config: Config, params: Tree, before: Tree, router: RouterTotals) -> Tree:
    """Return the parameters with the choice bias of the routers changed by the loads of the step, not by the optimizer."""
    assert config.model.moe is not None
    if not config.model.moe.choice_bias:
        return params
    rate, layers = config.loss.router_bias_rate, config.model.moe_layers

    def with_bias(blocks: Tree, before: Tree, load_LE: jax.Array) -> Tree:
        return {**blocks, "mlp": {**blocks["mlp"], "router_bias": balanced_bias(before["mlp"]["router_bias"], load_LE, rate)}}

    changed = {"blocks": with_bias(params["blocks"], before["blocks"], router.load_LE[:layers])}
    if config.model.mtp_blocks.moe_layers:
        block = with_bias(params["mtp"]["block"], before["mtp"]["block"], router.load_LE[layers:])
        changed["mtp"] = {**params["mtp"], "block": block}
    return {**params, **changed}


def recent_magnitudes(partitioner: Partitioner, steps: jax.Array) -> jax.Array:
    """Return the maximum over the steps of [..., steps], with one copy per row shard (models.params.Amax)."""
    shards = fp8.row_shards(partitioner)
    copies = jnp.broadcast_to(jnp.max(steps, -1)[..., None, None], (*steps.shape[:-1], *shards))
    return partitioner.constrain(copies, *[None] * (steps.ndim - 1), "batch", "seq")


def make_evaluation_step(spec: ModelSpec, config: Config, partitioner: Partitioner) -> Callable[[Tree, Batch], Metrics]:
    """Return the pure step (params, batch) -> token sums of one evaluation batch, or sums over the pairs of a batch of pairs."""

    def evaluation_step(params: Tree, batch: Batch) -> Metrics:
        if REFERENCE in batch:
            _, of_pairs, _ = preference_sums(spec, config, partitioner, params, batch)
            return {**of_pairs._asdict(), "pairs": count_pairs(batch["weights"])}
        if partitioner.mesh.shape["pipeline"] > 1:
            most = len(batch["tokens"]) // partitioner.axis_size("batch")
            count = max(n for n in range(1, most + 1) if most % n == 0 and n <= config.trainer.accumulation)
            sums = pipeline_sums(spec, config, partitioner, params, microbatches(batch, count, partitioner))
        else:
            sums, _ = loss_sums(spec, config, partitioner, params, batch)
        return {"nats": sums.nats, "weight": sums.weight, "correct": sums.correct}

    return evaluation_step


def microbatches(batch: Batch, count: int, partitioner: Partitioner) -> Batch:
    """Return the microbatches [count, B / count, T] of a batch."""
    return {name: split_rows(x, count, partitioner, partitioner.batch_axes(name)[1]) for name, x in batch.items()}


def split_rows(x_BT: jax.Array, accumulation: int, partitioner: Partitioner, sequence: str | None = None) -> jax.Array:
    """Reshape [B, T, ...] to [A, B/A, T, ...] without moving rows between devices.

    Rows are sharded in contiguous blocks over the S row shards; microbatch a takes the a-th part of every block. `sequence`: the logical
    axis of T.
    """
    shards = partitioner.axis_size("batch")
    rows, *rest = x_BT.shape
    assert rows % (accumulation * shards) == 0, (rows, accumulation, shards)
    split = x_BT.reshape(shards, accumulation, rows // (shards * accumulation), *rest)
    micro = split.swapaxes(0, 1).reshape(accumulation, rows // accumulation, *rest)
    return partitioner.constrain(micro, None, "batch", sequence, *[None] * (len(rest) - 1))


def constrain_params(tree: Tree, spec: ModelSpec, partitioner: Partitioner) -> Tree:
    """Constrain a tree of the trained parameters' structure to their shardings."""
    return jax.tree.map(lambda x, axes: partitioner.constrain(x, *axes), tree, spec.trained_axes)


def param_norm(params: Tree) -> Any:
    """Global L2 norm of the parameters (fp32 scalar)."""
    return optax.tree.norm(jax.tree.map(lambda p: p.astype(jnp.float32), params))


def abstract_batch(config: Config, partitioner: Partitioner) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes [B, T], dtypes and shardings of a training batch."""
    rows, length = config.data.batch_size, config.data.seq_len
    arrays = {**dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), ("int32", length)), "weights": ("float32", length)}
    if config.preference.loss is not None:
        arrays[REFERENCE] = ("float32", 1)
    if config.policy.loss is not None:
        arrays |= dict.fromkeys(
            (rollouts.ADVANTAGES, rollouts.OLD, *([rollouts.REFERENCE] if config.policy.kl else [])), ("float32", length)
        )
    shapes: dict[str, tuple[tuple[int, ...], str]] = {name: ((rows, width), dtype) for name, (dtype, width) in arrays.items()}
    if config.distillation.weight is not None:
        shapes[distillation.IDS] = ((rows, length, config.distillation.top_k), "int32")
        shapes[distillation.LOG_PROBS] = ((rows, length, config.distillation.outcomes), "float32")
    if modules := config.model.mtp_layers:
        shapes |= {mtp.TARGETS: ((rows, length, modules), "int32"), mtp.WEIGHTS: ((rows, length, modules), "float32")}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.batch_sharding(name)) for name, (shape, dtype) in shapes.items()}
    if config.loss_spikes.policy == "skip":
        batch[LOSS_LIMIT] = jax.ShapeDtypeStruct((), "float32", sharding=partitioner.sharding(()))
    return batch


def local_rows(batch_size: int, partitioner: Partitioner) -> np.ndarray:
    """Return the global row indices (sorted, int64) that this process's devices hold of a batch of `batch_size` rows."""
    sharding = partitioner.sharding(("batch", None))
    index_map = sharding.addressable_devices_indices_map((batch_size, 1))
    rows = [np.arange(*index[0].indices(batch_size)) for index in index_map.values() if index is not None]
    return np.unique(np.concatenate(rows))


def with_loss_limit(batch: Batch, limit: float, partitioner: Partitioner) -> Batch:
    """Return a batch with the limit of its loss on all devices (asynchronous). All processes give the same limit."""
    with jax.transfer_guard_host_to_device("allow"):
        return {**batch, LOSS_LIMIT: jax.make_array_from_callback((), partitioner.sharding(()), lambda _: np.float32(limit))}


def to_global(batch: Mapping[str, np.ndarray], partitioner: Partitioner) -> Batch:
    """Put this process's rows [B_local, T, ...] on its devices as part of the global [B, T, ...] arrays (asynchronous)."""
    length = batch["tokens"].shape[1]
    if (order := partitioner.row_order(length)) is not None:
        batch = {name: x if partitioner.batch_axes(name)[1] is None else x[:, order] for name, x in batch.items()}
    if jax.process_count() == 1:
        return {name: jax.device_put(x, partitioner.batch_sharding(name)) for name, x in batch.items()}
    with jax.transfer_guard_host_to_device("allow"):  # intended; unlike device_put this copy does not count as explicit
        shards = partitioner.axis_size("batch")
        # This process has whole rows, of which its devices may hold pieces: the global shape cannot be inferred.
        rows = len(batch["tokens"]) // len(local_rows(shards, partitioner)) * shards
        return {
            name: jax.make_array_from_process_local_data(partitioner.batch_sharding(name), x, (rows, *x.shape[1:]))
            for name, x in batch.items()
        }
