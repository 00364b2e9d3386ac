"""The collectives of one optimizer step: kind, mesh axes and bytes of each, inside and outside the layers.

Sharding and models are written to this plan, and tests compare the compiled step with it:
* parameters are sharded over fsdp and gathered in the compute dtype, in the forward and again in the backward pass; their gradients are
  reduce-scattered over fsdp and then all-reduced over data, in the gradient dtype, once per microbatch;
  with mesh.zero_stage=2 they are reduce-scattered over data too, and the updated parameters are gathered over data once per step;
* over tensor, the residual stream is sharded along the sequence; it is gathered before attention and MLP and reduce-scattered after each
  (arXiv 2205.05198); with compute.tensor_overlap=ring each of these is t - 1 permutes of 1/t of it, and inputs that are not kept gathered
  are sent around the ring again in the backward pass;
* what the backward pass recomputes under compute.remat it also communicates again: the gathers of the inputs over tensor, and the
  reduce-scatter of attention's update (the MLP's update only where a norm follows it, since no other gradient needs it). Parameters are
  gathered once for recomputation and gradients;
* over context, tokens are sharded everywhere. Attention passes keys and values around a ring of C devices, C - 1 hops in each pass, and
  their gradients with them, C - 1 hops in float32 and one in the compute dtype; or it exchanges queries, keys, values and results,
  all-to-all. Gradients of parameters are all-reduced over data and context together;
* Muon moves whole matrices to one device each with all-to-alls (trainer/muon.py); every other optimizer works on shards.

Legend: D embed width, F MLP width, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.configs.context import context_method
from ridgeline.configs.schema import MESH_AXES, Config, ModelConfig, MoEConfig, RematConfig
from ridgeline.planner.parameters import attention_matmul_parameters, expert_parameters, head_norms, layer_norms, mlp_matmul_parameters

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all"]
Phase = Literal["forward", "backward"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_ITEMSIZE = {"float32": 4, "bfloat16": 4, "float16": 2, "float8": 2}
"""Bytes per element in collectives of XLA's CPU backend, which has none in bfloat16 (it moves float32) or float8 (float16)."""
NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's orthogonalization (optax's default)."""


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the step."""

    what: str
    """What is communicated, e.g. `mlp parameters`."""
    where: Literal["layer", "embed", "loss", "optimizer"]
    """`layer`: inside the blocks; `embed`: the token lookup; `loss`: final norm, unembedding and cross-entropy; `optimizer`: the update."""
    phase: Literal["forward", "backward"]
    kind: Kind
    axes: tuple[str, ...]
    """Mesh axes, all larger than 1."""
    bytes: int
    """Bytes of the unsharded side on one device: input of a reduction, output of a gather, bytes sent by a permute, all bytes of an
    all-to-all."""
    count: int
    """Executions per optimizer step."""
    parts: int = 1
    """Number of matmul results whose sum is reduced: a compiler that does not reassociate (XLA's CPU backend) reduces each of them."""
    by_hand: bool = False
    """Written with shard_map, so that every backend has this kind. Otherwise XLA forms a reduce-scatter from an all-reduce and a slice,
    which its GPU backend does and its CPU backend does not."""
    loop_invariant: bool = False
    """The result is the same for every microbatch: XLA's CPU backend moves it out of their loop, the GPU backend does not."""
    summed: bool = False
    """The result is only added to a sum over microbatches: XLA's GPU backend adds first and communicates once."""
    replicated: bool = False
    """The gradient of a replicated parameter: XLA's GPU backend reduces it over all axes at once."""


def planned_collectives(config: Config, sizes: Mapping[str, int], *, gpu: bool = True) -> list[PlannedCollective]:
    """List the collectives of one optimizer step on a mesh of these axis sizes, for every compute.remat policy and optimizer.

    Scalars and Adafactor's row and column sums are omitted.

    Args:
      gpu: whether the devices are GPUs; CPU devices move wider elements (CPU_ITEMSIZE).
    """
    plan = _Plan(config, sizes, gpu)
    planned = [*plan.layer(), *plan.recomputed(), *plan.embedding(), *plan.loss(), *plan.optimizer()]
    return [item for item in planned if item.axes]


def compiled_collectives(config: Config, sizes: Mapping[str, int], *, gpu: bool = True) -> list[PlannedCollective]:
    """Return the planned collectives in the form, number and dtype in which the backend of a GPU or CPU compiles them."""
    planned = planned_collectives(config, sizes, gpu=gpu)
    return as_compiled_for_gpu(planned) if gpu else [as_compiled_for_cpu(item) for item in planned]


@dataclass(frozen=True)
class Recomputed:
    """What the backward pass of a block computes a second time."""

    weights: frozenset[str]
    """Matmuls with these parameters: query, key, value, out, gate, up."""
    inputs: bool
    """The normalized inputs of attention and MLP, gathered over tensor."""
    attention: bool
    """Attention scores, softmax and values."""
    attention_update: bool
    """Attention's update of the residual stream, reduce-scattered over tensor."""
    mlp_update: bool = False
    """The MLP's update of the residual stream, which only a norm after it needs."""


MATMULS = ("query", "key", "value", "out", "gate", "up")
"""Matmuls of a block whose results the backward pass needs (all but the MLP's down projection, unless a norm follows it)."""


def recomputed(model: ModelConfig, remat: RematConfig) -> Recomputed:
    """Return what a rematerialization policy recomputes (models/remat.py)."""
    matmuls = frozenset(MATMULS if model.gated_mlp else MATMULS[:4] + MATMULS[5:])
    after = model.norm_position != "pre"  # a norm after the MLP needs its result
    if remat.policy == "none":
        return Recomputed(frozenset(), False, False, False)
    if remat.policy == "attention-only":
        return Recomputed(frozenset(), False, True, False)
    if remat.policy == "dots":
        return Recomputed(frozenset(), True, True, False)
    if remat.policy == "full":
        return Recomputed(matmuls | ({"down"} if after else set()), True, True, True, after)
    saved = set(remat.names)
    keeps = {"query": "query", "key": "key", "value": "value", "out": "attention_out", "gate": "mlp_gate", "up": "mlp_up"}
    again = {matmul for matmul in matmuls if keeps[matmul] not in saved}
    if model.qk_norm:
        again |= {"query", "key"}  # their norms need the values before the norm
    again |= {"down"} if after and "mlp_out" not in saved else set()
    attention = "attention_lse" not in saved or "attention_context" not in saved
    return Recomputed(frozenset(again), True, attention, "out" in again, "down" in again)


def matmul_weights(model: ModelConfig) -> dict[str, int]:
    """Return the weights of each matmul of a block, unsharded: D*N*H for query and out, D*K*H for key and value, D*F for gate, up, down.

    Of a mixture of experts: those of one expert.
    """
    query, key = (model.embed_dim * heads * model.head_width for heads in (model.num_heads, model.kv_heads))
    mlp = model.embed_dim * model.expert_width  # of experts: of one
    weights = {"query": query, "key": key, "value": key, "out": query, "up": mlp, "down": mlp}
    return weights | ({"gate": mlp} if model.gated_mlp else {})


def muon_layers(layers: int, devices: int) -> int:
    """Return of how many layers each of these devices orthogonalizes the matrices."""
    return -(-layers // devices)


def as_compiled_for_gpu(planned: Sequence[PlannedCollective]) -> list[PlannedCollective]:
    """Return the collectives that XLA's GPU backend compiles a plan to.

    Gradients of replicated parameters are reduced over all their axes in one all-reduce. Reductions that are only added to the sum over
    microbatches run once, after it.
    """
    merged: dict[tuple[str, str], PlannedCollective] = {}
    compiled = []
    for item in planned:
        item = replace(item, count=1) if item.summed else item
        if not item.replicated:
            compiled.append(item)
        elif (item.what, item.where) in merged:
            axes = merged[item.what, item.where].axes + item.axes
            merged[item.what, item.where] = replace(item, axes=tuple(axis for axis in MESH_AXES if axis in axes))
        else:
            merged[item.what, item.where] = item
    return compiled + list(merged.values())


def as_compiled_for_cpu(item: PlannedCollective) -> PlannedCollective:
    """Return the collective that XLA's CPU backend compiles a planned one to."""
    kind: Kind = "all-reduce" if item.kind == "reduce-scatter" and not item.by_hand else item.kind
    return replace(item, kind=kind, bytes=item.bytes * item.parts, parts=1, count=1 if item.loop_invariant else item.count)


class _Plan:
    """The collectives of each part of a step, and the sizes they share."""

    def __init__(self, config: Config, sizes: Mapping[str, int], gpu: bool) -> None:
        itemsize = ITEMSIZE if gpu else CPU_ITEMSIZE
        self.config, self.model, self.sizes, self.gpu = config, config.model, sizes, gpu
        self.tensor, self.context, self.expert = sizes["tensor"], sizes["context"], sizes.get("expert", 1)
        self.fsdp = sizes["fsdp"] * self.expert  # outside of the experts a further fsdp axis
        self.micro = config.trainer.accumulation
        self.rows = config.data.batch_size // self.micro // (sizes["data"] * self.fsdp)
        self.act = itemsize[config.precision.compute]
        narrow = itemsize.get("float8", 1) if config.precision.eight_bit or config.precision.matmul == "mxfp8" else self.act
        self.gathered = narrow
        """Bytes per element of a layer's parameters in an all-gather."""
        self.update_grad = narrow if gpu else self.act
        """Bytes per element of the gradients of attention's and MLP's updates in an all-gather. GPUs quantize before they communicate."""
        self.grad = itemsize[config.precision.gradients]
        self.master = itemsize[config.precision.params]
        self.tokens = self.rows * config.data.seq_len // self.context
        self.stream = self.tokens * self.model.embed_dim * self.act
        self.layers = self.model.num_layers * self.micro
        self.ring = config.compute.tensor_overlap == "ring" and self.tensor > 1

    def over(self, *axes: str) -> tuple[str, ...]:
        """Return the axes with more than one device."""
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    def layer(self) -> list[PlannedCollective]:
        """Return the collectives inside the blocks, without recomputation."""
        gated, moe, model = 2 if self.model.gated_mlp else 1, self.model.moe, self.model
        planned = self._parameters("attention parameters", "layer", attention_matmul_parameters(model), self.layers)
        planned += self._half("attention", 3)
        if model.dense_layers:
            mlp = self._parameters("mlp parameters", "layer", mlp_matmul_parameters(model), self.layers) + self._half("mlp", gated)
            planned += self._in(model.dense_layers, mlp)
        if moe is not None and moe.shared_experts:
            shared = self._parameters("shared experts", "layer", moe.shared_experts * expert_parameters(model), self.layers)
            planned += self._in(model.moe_layers, shared + self._half("shared experts", gated))
        if moe is not None:
            planned += self._in(model.moe_layers, self._experts(moe))
        norms = layer_norms(self.model) * (2 if self.model.norm == "layernorm" else 1) * self.model.embed_dim
        norms += head_norms(self.model) if self.model.qk_norm_dims == "head" else 0
        return [*planned, *self._sequence(), *self._replicated_gradient("norms", norms * 4), *self._all_head_norms(), *self._biases()]

    def _all_head_norms(self) -> list[PlannedCollective]:
        """Return what norms over all heads of queries and keys add: sums over the heads of each token, and gradients of their scales.

        The backward pass computes the sums of squares again and sums the products with the gradient.
        """
        if not self.model.qk_norm or self.model.qk_norm_dims != "all_heads":
            return []
        sums = self.tokens * 4
        tensor, scales = self.over("tensor"), head_norms(self.model) // self.tensor * 4
        planned = [self._item(f"sums of {what} norms", "forward", "all-reduce", tensor, sums) for what in ("query", "key")]
        planned += [
            replace(self._item(f"sums of {what} norms", "backward", "all-reduce", tensor, sums), count=2 * self.layers)
            for what in ("query", "key")
        ]
        groups = (self.over("data", "fsdp", "expert"), self.over("context"))
        names = "query and key norms"
        return planned + [replace(self._item(names, "backward", "all-reduce", axes, scales), replicated=True) for axes in groups]

    def _sequence(self) -> list[PlannedCollective]:
        """Return the collectives of attention over a sharded sequence (models/attention/ring.py, dispatch.py)."""
        method = context_method(self.config, self.sizes)
        if method is None:
            return []
        if method == "all_to_all":
            return [*self._exchanges("forward", 4), *self._exchanges("backward", 4)]
        keys = 2 * self.keys
        home = replace(self._hops("gradients of keys and values", "backward", keys), count=self.layers)
        return [
            self._hops("keys and values", "forward", keys),
            self._hops("keys and values", "backward", keys),
            self._hops("sums of gradients of keys and values", "backward", keys // self.act * 4),
            home,
        ]

    def _sequence_recomputed(self, again: Recomputed) -> list[PlannedCollective]:
        """Return what the backward pass of a block repeats of `_sequence`."""
        method = context_method(self.config, self.sizes)
        if method is None:
            return []
        if method == "ring":
            if not self.gpu and self.context == 2:  # XLA's CPU backend unrolls a loop of one hop, and does not repeat it
                return []
            return [self._hops("keys and values (recomputed)", "backward", 2 * self.keys)] if again.attention else []
        exchanged = {"none": 0, "attention-only": 3}.get(self.config.compute.remat.policy, 4)
        return self._exchanges("backward", exchanged, " (recomputed)")

    @property
    def keys(self) -> int:
        """Bytes of the keys (or values) of a device."""
        return self.tokens * self.model.kv_heads * self.model.head_width * self.act // self.tensor

    def _hops(self, what: str, phase: Literal["forward", "backward"], size: int) -> PlannedCollective:
        item = self._item(what, phase, "collective-permute", self.over("context"), size)
        return replace(item, count=self.layers * (self.context - 1), by_hand=True)

    def _exchanges(self, phase: Literal["forward", "backward"], number: int, note: str = "") -> list[PlannedCollective]:
        """Return the first `number` all-to-alls of queries, keys, values and attention result."""
        query = self.keys * self.model.num_heads // self.model.kv_heads
        arrays = (("queries", query), ("keys", self.keys), ("values", self.keys), ("attention result", query))
        return [
            replace(self._item(what + note, phase, "all-to-all", self.over("context"), size), by_hand=True)
            for what, size in arrays[:number]
        ]

    def _in(self, layers: int, planned: list[PlannedCollective]) -> list[PlannedCollective]:
        """Return collectives of every layer as those of this number of layers."""
        return [replace(item, count=item.count * layers // self.model.num_layers) for item in planned]

    def _experts(self, moe: MoEConfig) -> list[PlannedCollective]:
        """Return the collectives of the router and the routed experts, written by hand (models/moe), with their recomputation.

        The backward pass computes the router's choice again, and gathers the tokens again: no policy keeps them in the experts' rows.
        """
        model = self.model
        weights = moe.experts * expert_parameters(model)
        routed = self._parameters("experts", "layer", weights, self.layers, of_experts=True, reduced_by_hand=True)
        router = [
            replace(item, bytes=item.bytes * 4 // (self.act if item.kind == "all-gather" else self.grad))
            for item in self._parameters("router", "layer", model.embed_dim * moe.experts * self.tensor, self.layers, reduced_by_hand=True)
        ]
        router = [replace(item, axes=(*item.axes, *self.over("tensor"))) if item.kind == "all-reduce" else item for item in router]
        choice = self.tokens * moe.experts_per_token * 4
        stream: list[tuple[str, Phase, Kind, int, int]] = [
            ("experts input", "forward", "all-gather", self.stream, 1),
            ("choice and weights of experts", "forward", "all-gather", choice, 2),
            ("experts update", "forward", "reduce-scatter", self.stream, 1),
            ("experts update", "backward", "all-gather", self.stream, 1),
            ("experts input (again)", "backward", "all-gather", self.stream, 1),
            ("choice and weights of experts (again)", "backward", "all-gather", choice, 2),
            ("weights of experts", "backward", "reduce-scatter", choice, 1),
            ("experts input", "backward", "reduce-scatter", self.stream, 1),
        ]
        # Tokens are gathered over expert while sharded along the sequence, then over tensor; scattered in the opposite order.
        planned = [
            replace(self._item(what, phase, kind, axes, size * times * self.expert // parts), by_hand=True)
            for what, phase, kind, size, times in stream
            for axes, parts in ((self.over("expert"), self.tensor), (self.over("tensor"), 1))
        ]
        return routed + router + planned

    def _biases(self) -> list[PlannedCollective]:
        """Return the reductions of the gradients of biases, which are in the compute dtype."""
        model, width = self.model, self.model.embed_dim
        size = (model.num_heads + 2 * model.kv_heads) * model.head_width // self.tensor if model.attention_bias else 0
        size += (2 if model.gated_mlp else 1) * model.mlp_dim // self.tensor if model.mlp_bias else 0
        groups = (self.over("data", "fsdp", "expert"), self.over("context")) if size else ()
        planned = [replace(self._item("biases", "backward", "all-reduce", axes, size * self.act), replicated=True) for axes in groups]
        updates = width * (model.output_bias + model.mlp_bias)  # added where tokens are sharded over tensor
        return planned + (self._replicated_gradient("biases of updates", updates * self.act) if updates else [])

    def recomputed(self) -> list[PlannedCollective]:
        """Return the gathers and reductions that the backward pass of a block repeats."""
        again = recomputed(self.model, self.config.compute.remat)
        planned = []
        if again.inputs or self.ring:
            planned.append(self._stream("attention input (recomputed)", "backward", "all-gather", self.stream))
            mlp = self._stream("mlp input (recomputed)", "backward", "all-gather", self.stream)
            layers = self.model.num_layers if self.model.moe is None or self.model.moe.shared_experts else self.model.dense_layers
            planned += self._in(layers, [mlp]) if layers else []
        parts = self.ring and self.config.compute.remat.policy == "dots"  # only parts of the sum are kept
        if again.attention_update or parts:
            planned.append(self._stream("attention update (recomputed)", "backward", "reduce-scatter", self.stream))
        if again.mlp_update or (parts and self.model.norm_position != "pre"):
            planned.append(self._stream("mlp update (recomputed)", "backward", "reduce-scatter", self.stream))
        return [*planned, *self._sequence_recomputed(again)]

    def optimizer(self) -> list[PlannedCollective]:
        """Return the collectives of the optimizer: none but for Muon, and of mesh.zero_stage=2.

        Muon, in float32: an all-to-all per mesh axis shards each stack of matrices over its layers, and another one back.
        """
        model, weights = self.model, matmul_weights(self.model)
        if self.config.mesh.zero_stage:
            tables = (1 if model.tie_embeddings else 2) * model.padded_vocab_size * model.embed_dim
            sharded = (model.num_layers * sum(weights.values()) + tables) // self.tensor
            sharded += model.max_seq_len * model.embed_dim if model.position == "learned" else 0
            size = sharded // self.fsdp * self.master
            return [PlannedCollective("updated parameters", "optimizer", "backward", "all-gather", self.over("data"), size, 1, 1, True)]
        if self.config.optimizer.kind != "muon":
            return []
        stack = 4 * muon_layers(self.model.num_layers, self.fsdp * self.tensor)
        return [
            PlannedCollective(
                f"{name} to orthogonalize", "optimizer", "backward", "all-to-all", self.over(axis), stack * matrix, 2, 1, True
            )
            for name, matrix in weights.items()
            for axis in ("fsdp", "tensor")
        ]

    def embedding(self) -> list[PlannedCollective]:
        """Return the collectives of the token lookup."""
        table = self.model.padded_vocab_size * self.model.embed_dim
        planned = self._parameters("embedding", "embed", table, self.micro, by_hand=True, backward_gather=False)
        alone = not self.model.tie_embeddings  # with tied embeddings the gradient is first added to that of the unembedding
        planned = [replace(item, summed=alone) if item.kind == "all-reduce" else item for item in planned]
        planned += [
            PlannedCollective(
                "embedded tokens", "embed", "forward", "reduce-scatter", self.over("tensor"), self.stream, self.micro, 1, True
            ),
            PlannedCollective("embedded tokens", "embed", "backward", "all-gather", self.over("tensor"), self.stream, self.micro, 1, True),
        ]
        return [*planned, *self._positions()]

    def _positions(self) -> list[PlannedCollective]:
        """Return the collectives of learned positions: tensor shards their tokens, not their table.

        With mesh.zero_stage=2 their gradient is scattered over data only where nothing is summed over tensor.
        """
        if self.model.position != "learned":
            return []
        whole = self.model.max_seq_len * self.model.embed_dim
        scattered = self.config.mesh.zero_stage == 2 and self.tensor == 1
        rest = self.over("context") if scattered else self.over("data", "context", "tensor")
        planned = self._parameters("positions", "embed", whole * self.tensor, self.micro, by_hand=True, backward_gather=False)
        gathered = [item for item in planned if item.kind != "all-reduce" and (scattered or item.axes != self.over("data"))]
        summed = PlannedCollective(
            "positions", "embed", "backward", "all-reduce", rest, whole // self.fsdp * self.grad, self.micro, 1, True
        )
        return [*gathered, replace(summed, summed=not self.config.mesh.zero_stage)]

    def loss(self) -> list[PlannedCollective]:
        """Return the collectives of final norm, unembedding and cross-entropy, whose gradients are computed in the forward pass."""
        model, tensor = self.model, self.over("tensor")
        tokens = self.tokens
        table = model.padded_vocab_size * model.embed_dim
        planned = self._parameters("unembedding", "loss", table, self.micro, by_hand=True, backward_gather=False, grad=4)
        planned = [replace(item, phase="forward") for item in planned]

        def item(what: str, kind: Kind, size: int) -> PlannedCollective:
            return PlannedCollective(what, "loss", "forward", kind, tensor, size, self.micro)

        planned += [
            item("final hidden states", "all-gather", self.stream),
            item("largest logits", "all-reduce", tokens * 4),
            item("partition function and target logits", "all-reduce", 2 * tokens * 4),
            item("gradient of the final hidden states", "all-reduce", self.stream),
        ]
        norms = 2 if model.norm == "layernorm" else 1
        final = self._replicated_gradient("final norm", norms * model.embed_dim * 4)
        return planned + [replace(item, where="loss", count=self.micro, summed=True) for item in final]

    def _half(self, half: str, inputs: int) -> list[PlannedCollective]:
        """Return the collectives of the residual stream around attention or MLP, over tensor."""
        narrow = self.stream // self.act * self.update_grad
        return [
            self._stream(f"{half} input", "forward", "all-gather", self.stream),
            self._stream(f"{half} update", "forward", "reduce-scatter", self.stream),
            self._stream(f"{half} update", "backward", "all-gather", narrow),
            self._stream(f"{half} input", "backward", "reduce-scatter", self.stream, inputs),
        ]

    def _stream(self, what: str, phase: Literal["forward", "backward"], kind: Kind, size: int, parts: int = 1) -> PlannedCollective:
        """Return a gather or scatter of the stream over tensor, or the ring that replaces it (a ring sums `parts` first)."""
        item = self._item(what, phase, kind, self.over("tensor"), size)
        if not self.ring:
            return replace(item, parts=parts)
        return replace(item, kind="collective-permute", bytes=size // self.tensor, count=item.count * (self.tensor - 1), by_hand=True)

    def _item(self, what: str, phase: Literal["forward", "backward"], kind: Kind, axes: tuple[str, ...], size: int) -> PlannedCollective:
        return PlannedCollective(what, "layer", phase, kind, axes, size, self.layers)

    def _parameters(
        self,
        what: str,
        where: Literal["layer", "embed", "loss"],
        weights: int,
        count: int,
        *,
        by_hand: bool = False,
        backward_gather: bool = True,
        grad: int | None = None,
        of_experts: bool = False,
        reduced_by_hand: bool = False,
    ) -> list[PlannedCollective]:
        """Return the gathers of `weights` parameters, sharded over fsdp and tensor, and the reductions of their gradient.

        by_hand: both are written by hand (models/moe, sharding/manual.py); reduced_by_hand: only the reductions are.
        """
        local, grad = weights // self.tensor // (self.expert if of_experts else 1), grad or self.grad
        gathered = local * (self.gathered if where == "layer" else self.act)
        fsdp, data = self.over("fsdp") if of_experts else self.over("fsdp", "expert"), self.over("data", "context")
        shards = self.fsdp // self.expert if of_experts else self.fsdp
        planned = [
            PlannedCollective(what, where, "forward", "all-gather", fsdp, gathered, count, 1, by_hand, where != "layer"),
            PlannedCollective(what, where, "backward", "all-gather", fsdp, gathered, count, 1, by_hand),
            PlannedCollective(what, where, "backward", "reduce-scatter", fsdp, local * grad, count, 1, by_hand),
            PlannedCollective(what, where, "backward", "all-reduce", data, local // shards * grad, count, 1, by_hand),
        ]
        if self.config.mesh.zero_stage:
            planned[3] = replace(planned[3], kind="reduce-scatter", by_hand=False)
        if reduced_by_hand:
            planned[2:] = [replace(item, by_hand=True) for item in planned[2:]]
        elif where == "layer" and not fsdp and len(data) > 1:  # sums over rows and over the sequence
            planned[3:] = [replace(planned[3], axes=(axis,), replicated=True) for axis in data]
        return planned if backward_gather else [planned[0], *planned[2:]]

    def _replicated_gradient(self, what: str, size: int) -> list[PlannedCollective]:
        """Return the reductions of the gradient of a replicated parameter."""
        groups = (self.over("context", "tensor"), self.over("data", "fsdp", "expert"))
        return [replace(self._item(what, "backward", "all-reduce", axes, size), replicated=True) for axes in groups]


def bytes_per_step(planned: list[PlannedCollective]) -> dict[tuple[Kind, tuple[str, ...]], int]:
    """Return the bytes of a step by kind and axes."""
    totals: dict[tuple[Kind, tuple[str, ...]], int] = {}
    for item in planned:
        totals[item.kind, item.axes] = totals.get((item.kind, item.axes), 0) + item.bytes * item.count
    return totals
