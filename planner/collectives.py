"""The collectives one optimiser step should contain: kind, mesh axes and bytes of each, per layer and outside the layers.

This is the plan that sharding and models are written to (and that the compiled step is tested against):
* parameters are sharded over fsdp and gathered for use in the compute dtype, forward and again backward; their gradients are
  reduce-scattered over fsdp and then all-reduced over data, in the gradient dtype, once per microbatch;
* over tensor, the residual stream is cut along the sequence; it is gathered before each block half and reduce-scattered after it
  (arXiv 2205.05198).

Legend: D embed width, F MLP width, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from configs.schema import Config, ModelConfig

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the step."""

    what: str
    """What moves, e.g. `mlp parameters`."""
    where: Literal["layer", "embed", "loss"]
    """`layer`: inside the blocks; `embed`: the token lookup; `loss`: final norm, unembedding and cross-entropy."""
    phase: Literal["forward", "backward"]
    kind: Kind
    axes: tuple[str, ...]
    """Mesh axes, all larger than 1."""
    bytes: int
    """Bytes of the unsharded side on one device: what a reduction takes in, what a gather gives out."""
    count: int
    """Times per optimiser step."""
    parts: int = 1
    """A sum of this many products: a compiler that does not reassociate reductions (XLA's CPU backend) communicates each."""
    by_hand: bool = False
    """Written with shard_map: the kind is what it says on every backend. Otherwise XLA forms a reduce-scatter from an all-reduce and a
    slice, which its GPU backend does and its CPU backend does not."""
    loop_invariant: bool = False
    """No microbatch changes its result: XLA's CPU backend moves it out of their loop, the GPU backend does not."""


def planned_collectives(config: Config, sizes: Mapping[str, int]) -> list[PlannedCollective]:
    """List the collectives of the gradient computation of one optimiser step on a mesh of these axis sizes.

    For compute.remat.policy none (the others repeat forward collectives in the backward pass). Left out, being small: scalars, the
    gradients of biases, head norms and learned positions.
    """
    plan = _Plan(config, sizes)
    planned = [*plan.layer(), *plan.embedding(), *plan.loss()]
    return [item for item in planned if item.axes]


def as_compiled_for_cpu(item: PlannedCollective) -> PlannedCollective:
    """Return what XLA's CPU backend makes of a planned collective."""
    kind: Kind = "all-reduce" if item.kind == "reduce-scatter" and not item.by_hand else item.kind
    return replace(item, kind=kind, bytes=item.bytes * item.parts, parts=1, count=1 if item.loop_invariant else item.count)


class _Plan:
    """The parts of a plan, with the sizes they share."""

    def __init__(self, config: Config, sizes: Mapping[str, int]) -> None:
        self.config, self.model, self.sizes = config, config.model, sizes
        self.tensor, self.fsdp = sizes["tensor"], sizes["fsdp"]
        self.micro = config.trainer.accumulation
        self.rows = config.data.batch_size // self.micro // (sizes["data"] * self.fsdp)
        self.act = ITEMSIZE[config.precision.compute]
        self.grad = ITEMSIZE[config.precision.gradients]
        self.stream = self.rows * config.data.seq_len * self.model.embed_dim * self.act
        self.layers = self.model.num_layers * self.micro

    def over(self, *axes: str) -> tuple[str, ...]:
        """The axes that have more than one device."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def layer(self) -> list[PlannedCollective]:
        """Everything inside one block."""
        gated = 2 if self.model.gated_mlp else 1
        planned = []
        for half, inputs in (("attention", 3), ("mlp", gated)):
            planned += self._parameters(f"{half} parameters", "layer", _half_weights(self.model)[half], self.layers)
            planned += self._half(half, inputs)
        norms = 2 * (2 if self.model.norm == "layernorm" else 1)
        return planned + self._replicated_gradient("norms", norms * self.model.embed_dim * 4)

    def embedding(self) -> list[PlannedCollective]:
        """Token lookup."""
        table = self.model.padded_vocab_size * self.model.embed_dim
        planned = self._parameters("embedding", "embed", table, self.micro, by_hand=True, backward_gather=False)
        planned += [
            PlannedCollective(
                "embedded tokens", "embed", "forward", "reduce-scatter", self.over("tensor"), self.stream, self.micro, 1, True
            ),
            PlannedCollective("embedded tokens", "embed", "backward", "all-gather", self.over("tensor"), self.stream, self.micro, 1, True),
        ]
        return planned

    def loss(self) -> list[PlannedCollective]:
        """Final norm, unembedding and cross-entropy, which does its backward pass in the forward one."""
        model, tensor = self.model, self.over("tensor")
        tokens = self.rows * self.config.data.seq_len
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
        return planned + [replace(item, where="loss", count=self.micro) for item in final]

    def _half(self, half: str, inputs: int) -> list[PlannedCollective]:
        """The residual stream around one half of a block, over tensor."""
        tensor = self.over("tensor")
        return [
            self._item(f"{half} input", "forward", "all-gather", tensor, self.stream),
            self._item(f"{half} update", "forward", "reduce-scatter", tensor, self.stream),
            self._item(f"{half} update", "backward", "all-gather", tensor, self.stream),
            replace(self._item(f"{half} input", "backward", "reduce-scatter", tensor, self.stream), parts=inputs),
        ]

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
    ) -> list[PlannedCollective]:
        """Gather for use and reduce the gradient of `weights` parameters, each cut over fsdp and tensor."""
        local, grad = weights // self.tensor, grad or self.grad
        fsdp, data = self.over("fsdp"), self.over("data")
        planned = [
            PlannedCollective(what, where, "forward", "all-gather", fsdp, local * self.act, count, 1, by_hand, where != "layer"),
            PlannedCollective(what, where, "backward", "all-gather", fsdp, local * self.act, count, 1, by_hand),
            PlannedCollective(what, where, "backward", "reduce-scatter", fsdp, local * grad, count, 1, by_hand),
            PlannedCollective(what, where, "backward", "all-reduce", data, local // self.fsdp * grad, count, 1, by_hand),
        ]
        return planned if backward_gather else [planned[0], *planned[2:]]

    def _replicated_gradient(self, what: str, size: int) -> list[PlannedCollective]:
        """The gradient of a parameter that every device holds, used on the tokens a device has."""
        return [self._item(what, "backward", "all-reduce", axes, size) for axes in (self.over("tensor"), self.over("data", "fsdp"))]


def _half_weights(model: ModelConfig) -> dict[str, int]:
    """Weights of each half of a block: 2*D*(N+K)*H and 2*D*F, or 3*D*F gated."""
    attention = 2 * model.embed_dim * (model.num_heads + model.kv_heads) * model.head_width
    return {"attention": attention, "mlp": (3 if model.gated_mlp else 2) * model.embed_dim * model.mlp_dim}


def bytes_per_step(planned: list[PlannedCollective]) -> dict[tuple[Kind, tuple[str, ...]], int]:
    """Bytes of a step by kind and axes."""
    totals: dict[tuple[Kind, tuple[str, ...]], int] = {}
    for item in planned:
        totals[item.kind, item.axes] = totals.get((item.kind, item.axes), 0) + item.bytes * item.count
    return totals
