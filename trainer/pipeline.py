"""Loss and gradient of a model whose layers are in pipeline stages (planner/pipeline.py has the schedule, 1F1B).

One SPMD program: `jax.shard_map` over `pipeline` and `data` (Partitioner.stage_axes), so that inside of a stage XLA and the hand-written
collectives partition over the other axes as they do without stages. The microbatches of gradient accumulation are those of the pipeline;
their gradients are summed over `data` once, after the last tick (sharding/stages.py).

A tick permutes the residual stream to the next stage and its gradient to the previous one. The backward pass is explicit: `jax.vjp` of a
stage in the tick of its forward pass; its residuals, which compute.remat decides, are kept in a ring of slots until the tick of the
backward pass. Parameters, views of them (the layers of a turn, or one layer) and positions are not kept: they are given to it again.
All stages compute embedding and loss, so that none waits for another: each looks up its tokens, of which the first stage uses its own, and
each computes the loss of 1/S of the tokens of a row.

Legend: M microbatches, S stages, B rows of a microbatch, T tokens of a row, D embed width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from ridgeline.configs.pipeline import chunk_layers
from ridgeline.configs.schema import Config
from ridgeline.models.loss import LossSums, loss_of
from ridgeline.models.moe.router import RouterTotals
from ridgeline.planner.pipeline import Schedule
from ridgeline.sharding.manual import on_shards, row_major
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import PIPELINE_AXIS, Axes
from ridgeline.sharding.stages import Stages
from ridgeline.trainer.state import ModelSpec, Tree

AXIS = PIPELINE_AXIS
STACK = "blocks"
"""Key of the stacked parameters of the layers."""
Batch = dict[str, jax.Array]


class Gradient(NamedTuple):
    """What one step sums over its microbatches."""

    grads: Tree
    amax: Tree
    """Of delayed scaling; the maximum over microbatches."""
    sums: LossSums
    router: RouterTotals | None


class _Carry(NamedTuple):
    """What a tick hands to the next one, on one stage."""

    x_BTD: jax.Array
    """The residual stream from the previous stage."""
    dx_BTD: jax.Array
    """The gradient of this stage's input, not yet permuted."""
    kept: Tree
    """The residuals of units whose backward pass has not run, in slots."""
    gradient: Gradient


def pipeline_gradient(spec: ModelSpec, config: Config, partitioner: Partitioner) -> Callable[..., Gradient]:
    """Return the function (params, recent amax, microbatches [M, B, T], weight of the step) -> gradient of the step."""
    stage = _Stage(spec, config, partitioner.in_stage, partitioner.stage_axes, Schedule.of(config, partitioner.mesh.shape))
    stages = stages_of(config, partitioner)
    stack_axes, shared_axes = split_stack(spec.param_axes)
    copies = partitioner.stage_axes[1:]  # gradients of a step that are not summed yet
    of_sums = lambda leaf: ("layers", *[None] * (leaf.ndim - 1))  # noqa: E731
    of_amax = lambda leaf: ("layers", None, "batch", "seq")  # noqa: E731

    def local(index: jax.Array, blocks: Tree, shared: Tree, recent: Tree, micro: Batch, divisor: jax.Array) -> Gradient:
        return _Ticks(stage, index[0], blocks, shared, recent, micro, divisor).gradient()

    def gradient(params: Tree, recent: Tree, micro: Batch, divisor: jax.Array) -> Gradient:
        blocks, shared = split_stack(params)
        blocks = jax.tree.map(stages.given_out, blocks, stack_axes)
        shared = jax.tree.map(stages.gathered, shared, shared_axes)
        recent = jax.tree.map(lambda leaf: stages.given_out(leaf, of_amax(leaf)), recent)
        staged, everywhere, of_rows = PartitionSpec(AXIS), PartitionSpec(), PartitionSpec(None, copies or None)
        scales = PartitionSpec(AXIS, None, copies or None)
        grads = {STACK: PartitionSpec(copies or None, AXIS), **dict.fromkeys(shared, PartitionSpec(partitioner.stage_axes))}
        out_specs = Gradient(grads, scales, everywhere, staged)  # type: ignore[arg-type]  # a spec stands for a tree
        in_specs = (staged, staged, everywhere, scales, of_rows, everywhere)
        run = _on_stages(partitioner, local, in_specs, out_specs)
        total: Gradient = run(jnp.arange(stage.schedule.stages), blocks, shared, recent, micro, divisor)
        dblocks, dshared = split_stack(total.grads)
        dblocks = jax.tree.map(stages.summed_layers, dblocks, stack_axes)
        dshared = jax.tree.map(stages.summed, dshared, shared_axes)
        grads = jax.tree.map(lambda g, axes: partitioner.of_state.constrain(g, *axes), {STACK: dblocks, **dshared}, spec.param_axes)
        amax = jax.tree.map(lambda leaf: stages.taken_back(leaf, of_amax(leaf)), total.amax)
        router = jax.tree.map(lambda leaf: stages.taken_back(leaf, of_sums(leaf)), total.router)
        return Gradient(grads, amax, total.sums, router)

    return gradient


def pipeline_sums(spec: ModelSpec, config: Config, partitioner: Partitioner, params: Tree, micro: Batch) -> LossSums:
    """Return the loss sums of the microbatches [M, B, T], without a gradient."""
    schedule = replace(Schedule.of(config, partitioner.mesh.shape), microbatches=len(micro["tokens"]))
    stage, stages = _Stage(spec, config, partitioner.in_stage, partitioner.stage_axes, schedule), stages_of(config, partitioner)

    def local(index: jax.Array, blocks: Tree, shared: Tree, micro: Batch) -> LossSums:
        return _Ticks(stage, index[0], blocks, shared, None, micro, jnp.float32(1)).sums()

    staged, everywhere = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (staged, staged, everywhere, PartitionSpec(None, partitioner.stage_axes[1:] or None))
    run = _on_stages(partitioner, local, in_specs, everywhere)
    stack_axes, shared_axes = split_stack(spec.param_axes)
    blocks, shared = split_stack(params)
    blocks, shared = jax.tree.map(stages.given_out, blocks, stack_axes), jax.tree.map(stages.gathered, shared, shared_axes)
    result: LossSums = run(jnp.arange(schedule.stages), blocks, shared, micro)
    return result


def _on_stages(partitioner: Partitioner, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return a function that runs the program of a stage on each of them."""
    axes = set(partitioner.stage_axes)
    return jax.shard_map(local, mesh=partitioner.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def stages_of(config: Config, partitioner: Partitioner) -> Stages:
    """Return the layers of the stages of a config."""
    per_chunk = chunk_layers(config, partitioner.mesh.shape[AXIS])
    return Stages(partitioner, config.model.num_layers, config.mesh.pipeline_chunks, per_chunk)


def split_stack(params: Tree) -> tuple[Tree, Tree]:
    """Split parameters into those of the layers and the others."""
    return params[STACK], {name: tree for name, tree in params.items() if name != STACK}


@dataclass(frozen=True)
class _Stage:
    """What is the same for all stages and ticks."""

    spec: ModelSpec
    config: Config
    partitioner: Partitioner
    """Of a stage."""
    axes: Axes
    """Over which its program is manual."""
    schedule: Schedule

    def forward(self, blocks: Tree, recent: Tree, x_BTD: jax.Array, rows: Batch, shared: Tree) -> tuple[tuple[jax.Array, jax.Array], Any]:
        """Return the residual stream after the layers and the objective of their routers; and the totals of the routers."""
        data, model = self.config.data, self.spec.merge({STACK: blocks, **shared}, recent)
        segments = rows["segment_ids"] if data.document_masking else None
        x_BTD, sums = model.run_blocks((model.blocks,), 0, x_BTD, rows["positions"], segments)
        if sums is None:
            return (x_BTD, jnp.zeros((), jnp.float32)), None
        totals = RouterTotals.of(sums, data.seq_len)
        return (x_BTD, totals.objective(self.config.loss, data.batch_size, data.batch_size * data.seq_len)), totals

    def embed(self, shared: Tree, blocks: Tree, rows: Batch) -> jax.Array:
        """Return the residual stream before the first layer."""
        x_BTD: jax.Array = self.spec.merge({STACK: blocks, **shared}).embed(rows["tokens"], rows["positions"])
        return x_BTD

    def loss(self, shared: Tree, blocks: Tree, x_BTD: jax.Array, rows: Batch) -> LossSums:
        """Return the sums of the tokens of one stage, from the residual stream after the last layer."""
        model = self.spec.merge({STACK: blocks, **shared})
        return loss_of(model, self.config, self.partitioner, model.normalize(x_BTD), rows)

    # The tokens of a stage are 1/S of those of each device: no token moves but over `pipeline`.

    def own_tokens(self, x_BT: jax.Array) -> jax.Array:
        """Return [B, T/S]: the tokens of this stage."""

        def local(x_BT: jax.Array) -> jax.Array:
            split = x_BT.reshape(x_BT.shape[0], self.schedule.stages, -1)
            return jax.lax.dynamic_index_in_dim(split, jax.lax.axis_index(AXIS), 1, keepdims=False)

        return self._on_rows(local, x_BT, "batch", "residual_seq")

    def scatter(self, x_BTD: jax.Array) -> jax.Array:
        """Return [B, T/S, D]: the sum over stages for the tokens of this stage."""

        def local(x_BTD: jax.Array) -> jax.Array:
            split = x_BTD.reshape(x_BTD.shape[0], self.schedule.stages, -1, x_BTD.shape[2])
            return jax.lax.psum_scatter(split, AXIS, scatter_dimension=1, tiled=False)

        return self._on_rows(local, x_BTD, "batch", "residual_seq", "act_embed")

    def gather(self, x_BTD: jax.Array) -> jax.Array:
        """Return [B, T, D] from the tokens of all stages, [B, T/S, D] each."""

        def local(x_BTD: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x_BTD, AXIS, axis=1, tiled=True)

        return self._on_rows(local, x_BTD, "batch", "residual_seq", "act_embed")

    def _on_rows(self, local: Callable[[jax.Array], jax.Array], x: jax.Array, *axes: str) -> jax.Array:
        spec = self.partitioner.spec(axes)
        result: jax.Array = on_shards(self.partitioner, local, spec, spec)(self.partitioner.constrain(x, *axes))
        return result


class _Ticks:
    """The ticks of one step on one stage (inside `_on_stages`)."""

    def __init__(
        self, stage: _Stage, index: jax.Array, blocks: Tree, shared: Tree, recent: Tree | None, micro: Batch, divisor: jax.Array
    ) -> None:
        self.stage, self.index, self.blocks, self.shared, self.recent, self.micro = stage, index, blocks, shared, recent, micro
        self.divisor, self.schedule, self.config = divisor, stage.schedule, stage.config
        self.last = index == self.schedule.stages - 1
        self.gradient_dtype = jnp.dtype(stage.config.precision.gradients)
        layers = self.chunk(blocks, jnp.int32(0)), self.chunk(recent, jnp.int32(0))
        traced, outputs = jax.make_jaxpr(self.run_layers, return_shape=True)(*layers, self.no_stream(), self.side(self.rows(0)))
        _, self.pull, self.totals = outputs
        """The pullback of a stage and the totals of its routers, without values."""
        pull = jax.tree.unflatten(jax.tree.structure(outputs), traced.jaxpr.outvars)[1]
        self.views = views_of_inputs(traced.jaxpr, jax.tree.leaves(self.residuals(pull)), len(jax.tree.leaves(blocks)))
        """For each residual the function that makes it of the parameters, where it is a view of them, or None."""

    # The passes of a tick.

    def rows(self, microbatch: Any) -> Batch:
        """Return a microbatch."""
        return {name: jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False) for name, x in self.micro.items()}

    def no_stream(self) -> jax.Array:
        model, (_, rows, length) = self.config.model, self.micro["tokens"].shape
        zeros = jnp.zeros((rows, length, model.embed_dim), self.config.precision.compute)
        return self.stage.partitioner.constrain(zeros, "batch", "residual_seq", "act_embed")

    def chunk(self, stacked: Tree, chunk: Any) -> Tree:
        """Return the parameters (or sums) of the layers of a chunk."""
        if self.schedule.chunks == 1:
            return stacked
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(self.by_chunk(x), chunk, keepdims=False), stacked)

    def by_chunk(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.schedule.chunks, -1, *x.shape[1:])

    def into_chunk(self, combine: Callable[..., jax.Array], stacked: Tree, new: Tree, chunk: Any) -> Tree:
        """Combine sums over microbatches with those of one unit, of the layers of a chunk."""
        if self.schedule.chunks == 1:
            return jax.tree.map(combine, stacked, new)

        def one(total: jax.Array, new: jax.Array) -> jax.Array:
            chunks = self.by_chunk(total)
            updated = combine(jax.lax.dynamic_index_in_dim(chunks, chunk, keepdims=False), new)
            return jax.lax.dynamic_update_index_in_dim(chunks, updated, chunk, 0).reshape(total.shape)

        return jax.tree.map(one, stacked, new)

    def when(self, predicate: jax.Array, run: Callable[[], Any]) -> Any:
        """Return run(), or zeros in a tick without it: with one chunk per stage there is none. `predicate` is the same on all devices."""
        if self.schedule.chunks == 1:
            return run()
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run))
        return jax.lax.cond(predicate, run, lambda: zeros)

    def run(self, x_BTD: jax.Array, rows: Batch, chunk: Any) -> Any:
        """Return the result of the layers of a chunk, their pullback and the totals of the routers."""
        return self.run_layers(self.chunk(self.blocks, chunk), self.chunk(self.recent, chunk), x_BTD, self.side(rows))

    def run_layers(self, blocks: Tree, recent: Tree, x_BTD: jax.Array, side: Batch) -> Any:
        """As `run`, from the parameters of a chunk and their recent magnitudes."""
        run = lambda blocks, recent, x_BTD, side: self.stage.forward(blocks, recent, x_BTD, side, self.shared)  # noqa: E731
        return jax.vjp(run, blocks, recent, x_BTD, side, has_aux=True)

    @staticmethod
    def side(rows: Batch) -> Batch:
        """Return what of the rows the layers get beside the residual stream."""
        return {name: rows[name] for name in ("positions", "segment_ids")}

    def input(self, tick: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Return the input of the unit of a tick: embedded tokens for the first chunk of the first stage."""
        first = self.schedule.forward(0, tick)
        used = first.real & (first.chunk == 0)
        embedded_BTD = self.when(used, lambda: self.stage.embed(self.shared, self.blocks, self.rows(first.microbatch)))
        return jnp.where((self.index == 0) & used, embedded_BTD, x_BTD)

    def permute(self, x_BTD: jax.Array, by: int) -> jax.Array:
        """Send to the next (1) or previous (-1) stage."""
        stages = self.schedule.stages
        permuted: jax.Array = jax.lax.ppermute(x_BTD, AXIS, [(at, (at + by) % stages) for at in range(stages)])
        return permuted

    def loss_of_last(self, y_BTD: jax.Array, microbatch: jax.Array, differentiate: bool) -> tuple[LossSums, Tree, jax.Array | None]:
        """Return the loss of the last stage's result, of which each stage takes 1/S of the tokens; its gradients in the shared parameters
        and, on every stage, in the whole result."""
        stage, rows = self.stage, self.rows(microbatch)
        own = {name: stage.partitioner.constrain(stage.own_tokens(rows[name]), "batch", "seq") for name in ("targets", "weights")}
        piece_BTD = stage.scatter(jnp.where(self.last, y_BTD, 0))

        def objective(shared: Tree, x_BTD: jax.Array) -> tuple[jax.Array, LossSums]:
            sums = stage.loss(shared, self.blocks, x_BTD, own)
            return (sums.nats + sums.z) / self.divisor, sums

        if not differentiate:
            return objective(self.shared, piece_BTD)[1], None, None
        (_, sums), (dshared, dpiece_BTD) = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(self.shared, piece_BTD)
        return sums, dshared, stage.gather(dpiece_BTD)

    # A tick.

    def forward(self, tick: jax.Array, carry: _Carry) -> tuple[_Carry, jax.Array]:
        """Run the forward pass of a unit; return also its result."""
        unit = self.schedule.forward(self.index, tick)
        rows = self.rows(unit.microbatch)
        (y_BTD, _), pull, totals = self.run(self.input(tick, carry.x_BTD), rows, unit.chunk)
        slot = tick % self.schedule.kept
        write = lambda ring, new: self.in_one_layout(jax.lax.dynamic_update_index_in_dim(ring, new, slot, 0))  # noqa: E731
        # Else XLA reads what the backward pass needs from the residuals and the slots before it, and both stay until the end of the tick.
        kept = jax.lax.optimization_barrier(jax.tree.map(write, carry.kept, self.to_keep(pull)))
        router = carry.gradient.router
        if router is not None:
            router = self.into_chunk(lambda total, new: total + jnp.where(unit.real, new, 0), router, totals, unit.chunk)
        gradient = carry.gradient._replace(router=router)
        return carry._replace(x_BTD=self.permute(y_BTD, 1), kept=kept, gradient=gradient), y_BTD

    def backward(self, tick: jax.Array, carry: _Carry, dx_BTD: jax.Array, dloss_BTD: jax.Array | None) -> _Carry:
        """Run the backward pass of a unit, from the gradient that the next stage sent or, of the last one, from that of the loss."""
        schedule, gradient = self.schedule, carry.gradient
        unit = schedule.backward(self.index, tick)
        if dloss_BTD is not None:
            dx_BTD = jnp.where(self.last & (unit.chunk == schedule.chunks - 1), dloss_BTD, dx_BTD)
        # Residuals of a unit that is not real are those of another one, so that 0 times them is 0.
        slot = schedule.forward_tick(self.index, unit) % schedule.kept
        kept = jax.tree.map(lambda ring: jax.lax.dynamic_index_in_dim(ring, slot, 0, keepdims=False), carry.kept)
        rows = self.rows(unit.microbatch)
        pull = self.with_kept(kept, self.side(rows), unit.chunk)
        dblocks, amax, dx_BTD, _ = pull((jnp.where(unit.real, dx_BTD, 0), unit.real.astype(jnp.float32)))
        first = schedule.backward(0, tick)
        embedded = first.real & (first.chunk == 0)
        dembedded_BTD = jnp.where((self.index == 0) & embedded, dx_BTD, 0)
        dshared = self.when(embedded, lambda: self.embedding_gradient(first.microbatch, dembedded_BTD))
        stacked, shared = split_stack(gradient.grads)
        stacked = self.into_chunk(self.add, stacked, dblocks, unit.chunk)
        grads = {STACK: stacked, **jax.tree.map(self.add, shared, dshared)}
        most = lambda old, new: jnp.maximum(old, jnp.where(unit.real, new, 0))  # noqa: E731
        amax = self.into_chunk(most, gradient.amax, amax, unit.chunk)
        return carry._replace(dx_BTD=dx_BTD, gradient=gradient._replace(grads=grads, amax=amax))

    def embedding_gradient(self, microbatch: jax.Array, dx_BTD: jax.Array) -> Tree:
        """Return the gradient of the shared parameters through the embedding."""
        rows = self.rows(microbatch)
        gradient: Tree = jax.vjp(lambda shared: self.stage.embed(shared, self.blocks, rows), self.shared)[1](dx_BTD)[0]
        return gradient

    def add(self, total: jax.Array, new: jax.Array) -> jax.Array:
        """Add a gradient to its sum over microbatches."""
        return total + new.astype(self.gradient_dtype)

    # What is kept of a pullback differs between units; parameters and the rows of a microbatch are given to it again.

    def to_keep(self, pull: Any) -> Tree:
        x_position = 2  # of the arguments of `run_layers`
        residuals = jax.tree.leaves(self.residuals(pull))
        return pull.args_res[x_position], [leaf for leaf, view in zip(residuals, self.views, strict=True) if view is None]

    @staticmethod
    def residuals(pull: Any) -> dict[str, Tree]:
        """Return the attributes of a pullback that hold what its arguments do not: jax 0.12 has one more than 0.10."""
        return {field.name: getattr(pull, field.name) for field in fields(pull) if field.name.endswith("_residuals")}

    def in_one_layout(self, x: jax.Array) -> jax.Array:
        """Return slots of streams in the order of their dims: XLA may transpose all slots between the loops over ticks.

        Over tensor some streams are gathered, and which cannot be seen from the shape.
        """
        partitioner, stream = self.stage.partitioner, (*self.micro["tokens"].shape[1:], self.config.model.embed_dim)
        spec = partitioner.spec(("batch", "residual_seq", "act_embed"))
        if partitioner.axis_size("residual_seq") > partitioner.axis_size("seq") or x.shape[-len(stream) :] != stream:
            return x
        spec = PartitionSpec(*[None] * (x.ndim - len(stream)), *spec)
        ordered: jax.Array = on_shards(partitioner, row_major, spec, spec)(x)
        return ordered

    def with_kept(self, kept: Tree, side: Batch, chunk: Any) -> Any:
        x_BTD = kept[0] if jax.tree.leaves(kept[0]) else jnp.zeros(())  # not needed, but it has a place
        blocks = self.chunk(self.blocks, chunk)
        parameters, others = jax.tree.leaves(blocks), iter(kept[1])
        leaves = [next(others) if view is None else view(parameters) for view in self.views]
        residuals = jax.tree.unflatten(jax.tree.structure(self.residuals(self.pull)), leaves)
        args = jax.tree.leaves((blocks, self.chunk(self.recent, chunk), x_BTD, side))
        return replace(self.pull, args_res=args, **residuals)

    # The step.

    def gradient(self) -> Gradient:
        """Run all ticks."""
        schedule = self.schedule

        def with_forward(tick: jax.Array, carry: _Carry) -> _Carry:
            return self.forward(tick, carry)[0]

        def with_both(tick: jax.Array, carry: _Carry) -> _Carry:
            dx_BTD = self.permute(carry.dx_BTD, -1)  # before the forward pass, which overlaps it
            carry, y_BTD = self.forward(tick, carry)
            last = schedule.forward(schedule.stages - 1, tick)
            run = lambda: self.loss_of_last(y_BTD, last.microbatch, True)  # noqa: E731
            sums, dshared, dloss_BTD = self.when(last.chunk == schedule.chunks - 1, run)
            stacked, shared = split_stack(carry.gradient.grads)
            grads = {STACK: stacked, **jax.tree.map(self.add, shared, dshared)}
            sums = jax.tree.map(jnp.add, carry.gradient.sums, sums)
            carry = carry._replace(gradient=carry.gradient._replace(grads=grads, sums=sums))
            return self.backward(tick, carry, dx_BTD, dloss_BTD)

        def with_backward(tick: jax.Array, carry: _Carry) -> _Carry:
            return self.backward(tick, carry, self.permute(carry.dx_BTD, -1), None)

        carry = self.start()
        carry = ticks(0, schedule.first_backward, with_forward, carry)
        carry = ticks(schedule.first_backward, schedule.forward_ticks, with_both, carry)
        total = ticks(schedule.forward_ticks, schedule.ticks, with_backward, carry).gradient
        grads = jax.tree.map(lambda g: g[None], total.grads)  # summed outside (sharding/stages.py)
        router, copies = total.router, self.stage.axes[1:]
        if router is not None and copies:
            router = jax.lax.psum(router, copies)
        return total._replace(grads=grads, sums=jax.lax.psum(total.sums, self.stage.axes), router=router)

    def start(self) -> _Carry:
        """Return the carry before the first tick."""
        ring = jax.tree.map(lambda leaf: jnp.zeros((self.schedule.kept, *leaf.shape), leaf.dtype), self.to_keep(self.pull))
        params = {STACK: self.blocks, **self.shared}
        constrain = self.stage.partitioner.constrain
        grads = jax.tree.map(lambda p, axes: constrain(jnp.zeros(p.shape, self.gradient_dtype), *axes), params, self.stage.spec.param_axes)
        amax = jax.tree.map(jnp.zeros_like, self.recent)
        router = jax.tree.map(lambda leaf: jnp.zeros((self.schedule.chunks * leaf.shape[0], *leaf.shape[1:]), leaf.dtype), self.totals)
        sums = LossSums.of(jnp.zeros((), jnp.float32))
        return _Carry(self.no_stream(), self.no_stream(), ring, Gradient(grads, amax, sums, router))

    def sums(self) -> LossSums:
        """Run the forward passes alone and return the sums of the loss."""
        schedule = self.schedule

        def tick(tick: jax.Array, carry: tuple[jax.Array, LossSums]) -> tuple[jax.Array, LossSums]:
            x_BTD, sums = carry
            unit = schedule.forward(self.index, tick)
            blocks, rows = self.chunk(self.blocks, unit.chunk), self.rows(unit.microbatch)
            (y_BTD, _), _ = self.stage.forward(blocks, self.recent, self.input(tick, x_BTD), rows, self.shared)
            last = schedule.forward(schedule.stages - 1, tick)
            used = last.real & (last.chunk == schedule.chunks - 1)
            more = self.when(used, lambda: self.loss_of_last(y_BTD, last.microbatch, False)[0])
            sums = jax.tree.map(lambda total, new: total + jnp.where(used, new, 0), sums, more)
            return self.permute(y_BTD, 1), sums

        start = (self.no_stream(), LossSums.of(jnp.zeros((), jnp.float32)))
        total: LossSums = jax.lax.psum(ticks(0, schedule.forward_ticks, tick, start)[1], self.stage.axes)
        return total


def ticks(first: int, end: int, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Run ticks. XLA on GPUs unrolls a loop with a known trip count, which keeps the activations of two ticks alive: hide the count."""
    if first == end:
        return carry
    return jax.lax.fori_loop(first, jax.lax.optimization_barrier(jnp.int32(end)), body, carry)


VIEWS = {"reshape", "squeeze", "slice"}
"""Names of primitives that compute nothing."""
View = Callable[[Sequence[jax.Array]], jax.Array]


def views_of_inputs(jaxpr: Any, values: Sequence[Any], count: int) -> list[View | None]:
    """Return, for each value of a traced program, the function that makes it of the first `count` inputs; None where that is no view."""
    made_by = {output: equation for equation in jaxpr.eqns for output in equation.outvars}
    inputs = {variable: position for position, variable in enumerate(jaxpr.invars[:count])}

    def view_of(value: Any) -> View | None:
        steps: list[Any] = []
        while not isinstance(value, Literal) and value not in inputs:
            equation = made_by.get(value)
            if equation is None or equation.primitive.name not in VIEWS:
                return None
            steps.append(equation)
            value = equation.invars[0]
        return None if isinstance(value, Literal) else functools.partial(_replay, steps[::-1], inputs[value])

    return [view_of(value) for value in values]


def _replay(steps: Sequence[Any], position: int, inputs: Sequence[jax.Array]) -> jax.Array:
    """Apply the equations of a view to one of the inputs."""
    found = inputs[position]
    for equation in steps:
        found = equation.primitive.bind(found, **equation.params)
    return found
