"""The decoder: embedding, scanned blocks, final norm. The unembedding belongs to the loss, which never forms the whole logits.

Legend: B batch, T sequence, D embed width, V vocabulary rows (padded), M modules of multi-token prediction, H = 1 + M heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.attention.layer import AttendWith
from ridgeline.models.attention.masks import chunk_segments, soft_cap
from ridgeline.models.backward_order import after_forward, slot_like_layer, wait_for_gradients, with_gradients_sent
from ridgeline.models.block import Block
from ridgeline.models.deferred_gradients import defer
from ridgeline.models.family import Family
from ridgeline.models.lora import set_dropout
from ridgeline.models.matmul import set_amax
from ridgeline.models.moe.layer import router_sums
from ridgeline.models.moe.router import RouterSums, RouterTotals
from ridgeline.models.mtp import PredictionModule, gradients_together, of_all_heads
from ridgeline.models.norms import NORMS
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory
from ridgeline.models.rope import RotaryTable, rotary_table, tempered

Carry = TypeVar("Carry")
Stacks = tuple[Block, ...]
"""Stacks of equal blocks; those of two stacks take turns."""


class Decoder(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, family: Family, model: ModelConfig, execution: Execution, make: ParamFactory) -> None:
        vocab, width = model.padded_vocab_size, model.embed_dim
        self.embedding = make.normal((vocab, width), ("vocab", "embed"), model.init_std)
        learned = model.position == "learned"
        self.position_embedding = make.normal((model.max_seq_len, width), ("positions", "embed"), model.init_std) if learned else None
        dense = model.dense_layers if model.moe else 0
        residual_std = family.residual_std(model) / math.sqrt(model.width_ratio)
        self.dense_blocks = family.block(model.without_experts(), execution, residual_std, make.stacked(dense)) if dense else None
        self.blocks = family.block(model, execution, residual_std, make.stacked(model.num_layers - dense))
        self.final_norm = NORMS[model.norm](width, model.norm_eps, make, execution.partitioner)
        self.output = None if model.tie_embeddings else make.normal((width, vocab), ("embed", "vocab"), model.init_std)
        # Created last: the values of the other parameters do not depend on it.
        outside_scan = replace(execution, remat=replace(execution.remat, in_scan=False, waits="nothing"))
        modules = model.mtp_layers
        self.mtp = PredictionModule(family.block, model, outside_scan, residual_std, make.stacked(modules)) if modules else None
        self.model = model
        self.execution = execution

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        """Return the final-normed hidden states [B, T, D] in the compute dtype.

        tokens int32; positions int32, restarting at 0 in each segment (None: 0..T-1); segment_ids int32, 0 = padding (None: one document
        per row).
        """
        return self.forward(tokens_BT, positions_BT, segment_ids_BT)[0]

    def forward(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        future_BTM: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterTotals | None]:
        """Return the final-normed hidden states [B, T, D], and the totals of the routers (None: no experts); arguments as `__call__`.

        dropout_key: for the dropout of adapters; None: no dropout. future: the tokens after each one, int32; with them the hidden states
        are [B * H, T, D], those of the model and of the modules of multi-token prediction for one row after the other
        (models/mtp.py: of_all_heads), and the totals are of their routers too.
        """
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        if future_BTM is None:
            x_BTD, embedded = self.embed(tokens_BT, positions_BT), None
        else:  # one lookup, so that the table is gathered, and its gradient reduced, once
            embedded = self._by_head(self.look_up(of_all_heads(tokens_BT, future_BTM)), len(tokens_BT))
            x_BTD = self.add_positions(embedded[:, 0], positions_BT)
        sums, layer = None, 0
        for stacks in self.runs:
            x_BTD, sums = self.run_blocks(stacks, layer, x_BTD, positions_BT, segment_ids_BT, dropout_key)
            layer += sum(map(num_layers_of, stacks))
        x_BTD = self.normalize(x_BTD)
        if embedded is not None:
            x_BTD, sums = self._predict(x_BTD, embedded[:, 1:], positions_BT, segment_ids_BT, sums)
        return x_BTD, None if sums is None else RouterTotals.of(sums, tokens_BT.shape[1])

    def _by_head(self, x: jax.Array, rows: int) -> jax.Array:
        """Return [B * H, T, D] as [B, H, T, D]."""
        split = x.reshape(rows, -1, *x.shape[1:])
        return self.execution.partitioner.constrain(split, "batch", None, "residual_seq", "act_embed")

    def _predict(
        self,
        x_BTD: jax.Array,
        embedded_BMTD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        sums: RouterSums | None,
    ) -> tuple[jax.Array, RouterSums | None]:
        """Return the final-normed hidden states of all heads [B * H, T, D], and the sums of the routers with those of the modules."""
        assert self.mtp is not None
        remat, (structure, stacked) = self.mtp.execution.remat, nnx.split(self.mtp)
        windowed = self.model.windowed(self.model.num_layers - 1)
        rotary = self.rotary(positions_BT, windowed=windowed)
        segments = self.visible_segments(segment_ids_BT, x_BTD.shape[:2], windowed=windowed)
        attend_with = self._attend_everywhere(positions_BT, segment_ids_BT) if self.model.local_span is not None and not windowed else None

        def module(number: int, stacked: nnx.State) -> Any:
            return nnx.merge(structure, jax.tree.map(lambda stack: stack[number], stacked))

        def block_of(number: int) -> Callable[..., tuple[jax.Array, RouterSums | None]]:
            def run(stacked: nnx.State, hidden_BTD: jax.Array, embedded_BTD: jax.Array) -> tuple[jax.Array, RouterSums | None]:
                one = module(number, stacked)
                out_BTD = one(hidden_BTD, embedded_BTD, lambda block, x_BTD: block(x_BTD, rotary, segments, attend_with))
                return out_BTD, router_sums(one.block)

            return remat.wrap_block(run)

        heads, found = [x_BTD], [] if sums is None else [sums]
        for number in range(self.model.mtp_layers):
            out_BTD, of_router = block_of(number)(*gradients_together(stacked, heads[-1], embedded_BMTD[:, number]))
            # Not in what is recomputed, or the update of the MLP would be too.
            out_BTD = module(number, stacked).final_norm(out_BTD)
            heads.append(self.execution.partitioner.constrain(out_BTD, "batch", "residual_seq", "act_embed"))
            found += [] if of_router is None else [jax.tree.map(lambda each: each[None], of_router)]
        x_BHTD = self.execution.partitioner.constrain(jnp.stack(heads, axis=1), "batch", None, "residual_seq", "act_embed")
        joined = jax.tree.map(lambda *each: jnp.concatenate(each), *found) if found else None
        return x_BHTD.reshape(-1, *x_BTD.shape[1:]), joined

    @property
    def runs(self) -> list[Stacks]:
        """The layers in order, as runs of the layers of one stack, or of two stacks whose layers take turns: dense ones, with experts."""
        if self.dense_blocks is None:
            return [(self.blocks,)]
        return [(self.dense_blocks, self.blocks)] if self.model.interleaved_experts else [(self.dense_blocks,), (self.blocks,)]

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the residual stream [B, T, D] before the first block."""
        return self.add_positions(self.look_up(tokens_BT), positions_BT)

    def look_up(self, tokens_BT: jax.Array) -> jax.Array:
        """Return the embeddings of tokens [B, T, D]."""
        with jax.named_scope("embed"):
            x_BTD = self.execution.matmul.look_up(self.embedding, tokens_BT)
            if self.model.scale_embeddings:
                x_BTD *= jnp.asarray(self.model.embedding_scale, x_BTD.dtype)
            return x_BTD

    def add_positions(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return embeddings of tokens plus those of their positions, where these are learned."""
        with jax.named_scope("embed"):
            if self.position_embedding is not None:
                x_BTD += self.execution.matmul.look_up(self.position_embedding, positions_BT)
            return self.execution.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

    def rotary(self, positions_BT: jax.Array, *, windowed: bool) -> RotaryTable | None:
        """Return the rotary table of the positions, for layers with or without the window; None for layers without rotary positions."""
        model = self.model
        if model.position != "rope" or (not windowed and not model.full_attention_rope):
            return None
        if windowed and model.local_rope_theta is not None:
            return rotary_table(positions_BT, model.rotary_dims, model.local_rope_theta, None)
        return rotary_table(positions_BT, model.rotary_dims, model.rope_theta, model.rope_scaling)

    def normalize(self, x_BTD: jax.Array) -> jax.Array:
        """Return the final-normed residual stream, with muP divided by the width ratio: so are the logits."""
        x_BTD = self.final_norm(x_BTD)
        if self.model.width_ratio != 1:
            x_BTD = (x_BTD.astype(jnp.float32) / self.model.width_ratio).astype(x_BTD.dtype)
        return self.execution.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

    def unembedding(self) -> jax.Array:
        """Return the stored (sharded) output projection [D, V] in the parameter dtype; the loss casts and gathers it."""
        return self.embedding[...].T if self.output is None else self.output[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits [B, T, vocab_size] of hidden states. For generation and parity tests; training uses loss.py."""
        partitioner = self.execution.partitioner
        with jax.named_scope("unembed"):
            x_BTD = partitioner.constrain(x_BTD, "batch", "seq", "act_embed")
            w_DV = partitioner.gather_param(self.unembedding().astype(x_BTD.dtype), "embed", "vocab")
            logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, w_DV, preferred_element_type=jnp.float32)[..., : self.model.vocab_size]
            return soft_cap(logits_BTV, self.model.logit_softcap)

    def run_blocks(
        self,
        stacks: Stacks,
        first: int,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterSums | None]:
        """Run the layers of some stacks (`runs`), of which the first is layer `first`; return the sums of the layers with experts."""
        model = self.model
        places = LayerPlaces.of(model, first, stacks)
        execution = self.execution.for_layers(places.count)
        structures, stacked = zip(*map(nnx.split, stacks), strict=True)
        experts_until = np.cumsum([model.has_experts(layer) for layer in range(first, first + places.count)])
        defers = execution.defers and places.count > 1 and experts_until[-1] > 0
        deferred = defer(execution.partitioner, stacked[-1], dense_between=len(stacks) > 1) if defers else None
        given = stacked if deferred is None else [*stacked[:-1], deferred.parameters]
        keys = None if dropout_key is None else jax.random.split(jax.random.fold_in(dropout_key, first), places.count)
        layers: list[tuple[Any, ...]] = [
            (parameters, execution.matmul.amax_of_layers(parameters), None if keys is None else keys[places.layers_of(stack)])
            for stack, parameters in enumerate(given)
        ]
        if deferred is not None:
            vectors = [*({} for _ in stacks[:-1]), deferred.vectors]
            following = [jnp.asarray(experts_until[places.layers_of(stack)]) for stack, _ in enumerate(stacks)]
            layers = [(*of_stack, *others) for of_stack, *others in zip(layers, vectors, following, strict=True)]
        tables = {windowed: self.rotary(positions_BT, windowed=windowed) for windowed in sorted(set(places.windowed))}
        segments = {windowed: self.visible_segments(segment_ids_BT, x_BTD.shape[:2], windowed=windowed) for windowed in tables}
        everywhere = self._attend_everywhere(positions_BT, segment_ids_BT)

        def block_of(windowed: bool, stack: int, at: int | None) -> Callable[[jax.Array, Any], tuple[Any, RouterSums | None]]:
            """Return the function of a layer.

            Its second argument: parameters, their amax and the key of dropout, where gradients are deferred also the slots of vectors and
            the index of the next layer with experts among these; for layers in order a pair of these and the slot. Where gradients are
            deferred a pair of that and of what the layer before hands over; then the function also returns what the layer hands over.
            `at`: its index in layers that are passed instead of it; it is chosen within what is recomputed, or a copy of its parameters
            would be kept for the backward pass.
            """

            def block(x_BTD: jax.Array, given: Any) -> tuple[Any, RouterSums | None]:
                handed: Any
                given, handed = given if deferred is not None else (given, None)
                layer, slot = given if execution.in_order else (given, None)
                parameters, amax, key, *of_deferred = layer if at is None else jax.tree.map(lambda stack: stack[at], layer)
                block = nnx.merge(structures[stack], parameters if slot is None else with_gradients_sent(parameters, slot))
                set_amax(block, amax)
                set_dropout(block, key)
                attend_with = everywhere if model.local_span is not None and not windowed else None
                inputs = x_BTD, tables[windowed], segments[windowed], attend_with
                if deferred is None:
                    return block(*inputs), router_sums(block)
                carried = deferred.run(block, inputs, handed, *of_deferred, with_experts=stack == len(stacks) - 1)
                return carried, router_sums(block)

            return execution.remat.wrap_block(block)

        @functools.cache
        def run(windowed: bool, stack: int, at: int | None) -> Callable[[Any, Any], tuple[Any, RouterSums | None]]:
            block = block_of(windowed, stack, at)
            return block if deferred is None else lambda carry, layer: block(carry[0], (layer, carry[1]))

        unroll = execution.scan_unroll if execution.scan_layers else None
        later = [*(set() for _ in stacks[:-1]), set() if deferred is None else deferred.paths]
        slots = list(map(slot_like_layer, stacked, later)) if execution.in_order else None
        scan = functools.partial(
            scan_layers,
            slots=slots,
            saves_first=execution.saves_first,
            splits_turns=execution.splits_turns,
            across_turns=execution.across_turns,
        )
        if deferred is None:
            return scan(places, layers, run, x_BTD, unroll=unroll)
        (x_BTD, _), sums = scan(places, layers, run, (x_BTD, deferred.handed), unroll=unroll)
        return x_BTD, sums

    def _attend_everywhere(self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None) -> AttendWith:
        """Return the attention of layers without the window, in a model where others have it."""
        model, execution = self.model, self.execution

        def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
            q_BTNH = tempered(q_BTNH, positions_BT, model.attention_temperature)
            return execution.attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, windowed=False)

        return attend

    def visible_segments(self, segment_ids_BT: jax.Array | None, shape: tuple[int, ...], *, windowed: bool) -> jax.Array | None:
        """Return the segment ids of layers with or without the window: those of the documents or of their chunks; shape: [B, T, ...]."""
        chunk = self.model.attention_chunk
        return segment_ids_BT if chunk is None or not windowed else chunk_segments(segment_ids_BT, (shape[0], shape[1]), chunk)


def num_layers_of(blocks: Block) -> int:
    """Return the number of layers of a stack."""
    return int(jax.tree.leaves(nnx.state(blocks))[0].shape[0])


@dataclass(frozen=True)
class LayerPlaces:
    """Of each layer of a run: its kind, and its place in the stacks of the run."""

    windowed: tuple[bool, ...]
    stack: tuple[int, ...]
    index: tuple[int, ...]
    """Index in its stack."""
    period: int
    """Layers after which kinds and stacks repeat."""

    @classmethod
    def of(cls, model: ModelConfig, first: int, stacks: Stacks) -> LayerPlaces:
        """Return the places of the layers of stacks, of which the first is layer `first`."""
        layers = range(first, first + sum(map(num_layers_of, stacks)))
        stack = tuple(int(len(stacks) > 1 and model.has_experts(layer)) for layer in layers)
        index = tuple(stack[:at].count(which) for at, which in enumerate(stack))
        return cls(tuple(map(model.windowed, layers)), stack, index, model.layer_period)

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.stack)

    def layers_of(self, stack: int) -> np.ndarray:
        """Return the layers of a stack, counted from the first of the run."""
        return np.flatnonzero(np.array(self.stack) == stack)


def turns_of(layers: Sequence[Any], places: LayerPlaces, whole: int, *, split_up: bool) -> list[Any]:
    """Return the first `whole` layers of stacks as turns: of each stack arrays [turns, its layers in a turn, ...], of which a turn chooses.

    split_up: of each layer of a turn arrays [turns, ...] of its own.
    """
    period, turns = places.period, whole // places.period

    def of_stack(stack: int) -> Any:
        each = places.stack[:period].count(stack)
        return jax.tree.map(lambda x: x[: turns * each].reshape(turns, each, *x.shape[1:]), layers[stack])

    scanned = list(map(of_stack, range(len(layers))))
    if not split_up:
        return scanned
    places_in_turn = zip(places.stack[:period], places.index[:period], strict=True)
    return [jax.tree.map(lambda x, at=at: x[:, at], scanned[stack]) for stack, at in places_in_turn]


def scan_layers(
    places: LayerPlaces,
    layers: Sequence[Any],
    run: Callable[[bool, int, int | None], Callable[[Carry, Any], tuple[Carry, Any]]],
    carry: Carry,
    *,
    unroll: int | None = 1,
    slots: Sequence[Any] | None = None,
    across_turns: bool = False,
    saves_first: bool = False,
    splits_turns: bool = False,
) -> tuple[Carry, Any]:
    """Run layers one after another: a scan over whole periods, in which each layer has its own kind, then the rest.

    Args:
      places: of the layers.
      layers: of each stack, arrays with a leading dim of its layers.
      run: (windowed, stack, at) -> function (carry, layer) -> (carry, result); with `at` the function gets several layers of the stack, of
        which it is to run number `at`.
      carry: before the first layer: the residual stream, or a tuple that begins with it.
      unroll: layers per turn of the scan at least; None: no scan.
      slots: of each stack, arrays like parameters of one layer; the backward passes of the layers of a turn, and of those of the rest,
        then follow each other (models/backward_order.py), and functions get (layer, slot or None) in place of the layer.
      across_turns: so do the last layer of a turn and the first of the next one, which the scan carries a slot for.
      saves_first: the backward pass of the scan begins when all that it saved is there (models/backward_order.py).
      splits_turns: each layer of a turn has arrays of its own, cut out of those of all before the scan, which then saves no parameters
        where nothing is recomputed; a scan over turns would save what a function chose of a turn.

    Returns the carry and the results with a leading dim of all layers; layers whose result is None are left out (None: all of them).
    """
    period, count = places.period, places.count
    whole = count // period * period if unroll is not None else 0
    results: list[Any] = []  # of one or several layers, stacked

    def with_slot(carry: Any, layer: Any, slot: Any, following: int | None) -> tuple[Any, Any, Any]:
        """Return the carry, what the function of a layer gets, and the slot for the next layer, of stack `following`; None: it has none."""
        if slots is None:
            return carry, layer, None
        if following is None:
            return carry, (layer, slot), None
        x_BTD, *others = carry if isinstance(carry, tuple) else (carry,)
        x_BTD, sent = wait_for_gradients(x_BTD, slots[following])
        return (x_BTD, *others) if others else x_BTD, (layer, slot), sent

    slot = slots[places.stack[0]] if slots is not None and across_turns and whole else None
    if whole:
        split_up = splits_turns and period > 1
        turn = [
            (at if split_up else stack, run(places.windowed[at], stack, None if period == 1 or split_up else places.index[at]))
            for at, stack in enumerate(places.stack[:period])
        ]
        after = [*places.stack[1:period], places.stack[0] if across_turns else None]  # the stack of the layer after each

        def body(carried: tuple[Carry, Any], layers: Sequence[Any]) -> tuple[tuple[Carry, Any], Any]:
            (carry, slot), found = carried, []
            for (part, layer), following in zip(turn, after, strict=True):
                carry, values, slot = with_slot(carry, layers[part], slot, following)
                carry, result = layer(carry, values)
                found += [] if result is None else [result]
            results = None if not found else found[0] if period == 1 else jax.tree.map(lambda *each: jnp.stack(each), *found)
            return (carry, slot), results

        scanned = list(layers) if period == 1 else turns_of(layers, places, whole, split_up=split_up)
        scan = functools.partial(jax.lax.scan, body, unroll=-(-(unroll or 1) // period))
        (carry, slot), result = (after_forward(scan) if saves_first else scan)((carry, slot), scanned)
        if result is not None:
            results.append(result if period == 1 else jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), result))
    for at in range(whole, count):
        stack, index = places.stack[at], places.index[at]
        following = places.stack[at + 1] if at + 1 < count else None
        carry, values, slot = with_slot(carry, jax.tree.map(lambda x, index=index: x[index], layers[stack]), slot, following)
        carry, result = run(places.windowed[at], stack, None)(carry, values)
        results += [] if result is None else [jax.tree.map(lambda each: each[None], result)]
    joined = results[0] if len(results) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *results) if results else None
    return carry, joined
