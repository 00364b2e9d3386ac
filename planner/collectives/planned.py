"""One collective of a step, and the sizes from which the collectives of its parts follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.configs.pipeline import data_summed_once, of_stage
from ridgeline.configs.schema import MESH_AXES, Config
from ridgeline.planner.parameters import latent_width
from ridgeline.planner.pipeline import Schedule
from ridgeline.planner.recompute import FROM_BLOCK_INPUTS, defers_reductions

Where = Literal["layer", "embed", "loss", "optimizer"]
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", "ragged-all-to-all"]
Phase = Literal["forward", "backward"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_ITEMSIZE = {"float32": 4, "bfloat16": 4, "float16": 2, "float8": 2}
"""Bytes per element in collectives of XLA's CPU backend, which has none in bfloat16 (it moves float32) or float8 (float16)."""


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the step."""

    what: str
    """What is communicated, e.g. `mlp parameters`."""
    where: Where
    """`layer`: inside the blocks; `embed`: the token lookup; `loss`: final norm, unembedding and cross-entropy; `optimizer`: the update."""
    phase: Literal["forward", "backward"]
    kind: Kind
    axes: tuple[str, ...]
    """Mesh axes, all larger than 1."""
    bytes: int
    """Bytes of the unsharded side on one device: input of a reduction, output of a gather, bytes sent by a permute, all bytes of an
    all-to-all (of a ragged one: of the array that it sends from)."""
    count: int
    """Executions per optimizer step."""
    parts: int = 1
    """Number of matmul results whose sum is reduced: a compiler that does not reassociate (XLA's CPU backend) reduces each of them."""
    by_hand: bool = False
    """Written with shard_map, so that every backend has this kind. Otherwise XLA forms a reduce-scatter from an all-reduce and a slice,
    which its GPU backend does and its CPU backend does not."""
    invariant_count: int | None = None
    """Executions per step once those with the same result for every microbatch are moved out of their loop, as XLA's CPU backend does and
    its GPU backend does not; None: each microbatch has its own result."""
    summed: bool = False
    """The result is only added to a sum over microbatches: XLA's GPU backend adds first and communicates once."""
    replicated: bool = False
    """The gradient of a replicated parameter: XLA's GPU backend reduces it over all axes at once."""
    of_tokens: bool = False
    """Of tokens on the way to their experts and back, on which the next matmul waits."""
    used_bytes: int | None = None
    """Of a ragged all-to-all: bytes that are sent when the experts are chosen evenly; `bytes` is the size of its buffer."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that its time depends on."""
        return self.bytes if self.used_bytes is None else self.used_bytes


class StepSizes:
    """The sizes of one step that its collectives share, and collectives that several parts of it have."""

    def __init__(self, config: Config, sizes: Mapping[str, int], gpu: bool, *, scanned: bool = True) -> None:
        """`scanned`: the layers run in a loop, which cuts each layer's parameters out of a stack."""
        itemsize = ITEMSIZE if gpu else CPU_ITEMSIZE
        self.config, self.model, self.sizes = config, of_stage(config, sizes).model, sizes
        self.gpu, self.scanned = gpu, scanned
        self.frozen = config.lora.rank is not None
        """Only adapters are trained."""
        self.schedule = Schedule.of(config, sizes)
        self.tensor, self.context, self.expert = sizes["tensor"], sizes["context"], sizes.get("expert", 1)
        self.fsdp = sizes["fsdp"] * self.expert  # outside of the experts a further fsdp axis
        self.micro = config.trainer.accumulation
        self.rows = config.data.batch_size // self.micro // (sizes["data"] * self.fsdp)
        self.act = itemsize[config.precision.compute]
        narrow = itemsize.get("float8", 1) if config.precision.gathers_8_bit else self.act
        self.gathered = 1 if self.frozen and config.lora.base == "int8" else narrow
        """Bytes per element of a layer's parameters in an all-gather; of adapters `act`."""
        self.update_grad = narrow if gpu else self.act
        """Bytes per element of the gradients of attention's and MLP's updates in an all-gather. GPUs quantize before they communicate."""
        self.grad = itemsize[config.precision.gradients]
        self.master = itemsize[config.precision.params]
        self.tokens = self.rows * config.data.seq_len // self.context
        self.stream = self.tokens * self.model.embed_dim * self.act
        self.heads = 1 + self.model.mtp_layers
        """Hidden states per token in the loss, and lookups of the embedding: of the model and of modules of multi-token prediction."""
        self.latents = self.tokens * latent_width(self.model) * self.act
        self.layers = self.model.num_layers * self.schedule.forward_ticks // self.schedule.chunks
        """Executions of a layer on a device, those of the bubble included."""
        self.lookups = self.schedule.forward_ticks if self.schedule.chunks == 1 else self.micro
        self.once = data_summed_once(config, sizes)
        """Gradients are summed over data after all microbatches (planner/collectives/stages.py), not in the layers."""
        self.ring = config.compute.tensor_overlap == "ring" and self.tensor > 1
        self.defers = scanned and self.model.moe_layers > 1 and defers_reductions(self.model, config.compute, sizes, frozen=self.frozen)
        """Gradients of layers with experts are summed after their layer (models/deferred_gradients.py)."""
        turn_outside = gpu and self.model.layer_period > 1 and config.compute.remat.policy not in FROM_BLOCK_INPUTS
        last_has_experts = self.model.moe is not None and self.model.moe.every > 1 and self.model.has_experts(self.model.num_layers - 1)
        self.zeros = self.micro if self.defers and not turn_outside and not last_has_experts else 0
        """Reductions of zeros, in the first layer of the backward pass: none in one with experts that a layer without comes before. XLA
        takes the first turn of several layers out of the loop where the inputs of MLP down are kept, and sees the zeros then."""

    def over(self, *axes: str) -> tuple[str, ...]:
        """Return the axes with more than one device over which the program of a stage communicates."""
        return tuple(axis for axis in self.over_mesh(*axes) if axis != "data" or not self.once)

    def over_mesh(self, *axes: str) -> tuple[str, ...]:
        """Return the axes with more than one device."""
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    def in_layers(self, layers: int, planned: list[PlannedCollective]) -> list[PlannedCollective]:
        """Return collectives of every layer as those of this number of layers."""
        return [replace(item, count=item.count * layers // self.model.num_layers) for item in planned]

    def deferred(self, what: str, planned: list[PlannedCollective]) -> list[PlannedCollective]:
        """Return the collectives of layers; where the gradients of `what` are deferred with those of zeros."""
        return [
            replace(item, count=item.count + self.zeros) if item.what == what and item.kind != "all-gather" else item for item in planned
        ]

    def summed_once(self, planned: list[PlannedCollective]) -> list[PlannedCollective]:
        """Return the reductions of the gradients of vectors of every layer; where these are deferred as one for all layers with experts."""
        if not self.defers or not planned:
            return planned
        axes = tuple(axis for axis in MESH_AXES if any(axis in item.axes for item in planned))
        once = replace(planned[0], axes=axes, bytes=planned[0].bytes * self.model.moe_layers, count=self.micro, summed=True)
        dense = self.in_layers(self.model.dense_layers, planned) if self.model.dense_layers else []
        return [once, *(replace(item, what=f"{item.what} of dense layers") for item in dense)]

    def half(self, half: str, inputs: int) -> list[PlannedCollective]:
        """Return the collectives of the residual stream around attention or MLP, over tensor."""
        narrow = self.stream // self.act * self.update_grad
        # Inside a stage whose tokens are sharded, XLA's partitioner gathers the gradient of an update for each of its two uses; on CPUs it
        # merges some of these.
        again = self.schedule.stages > 1 and self.over("data", "fsdp", "context", "expert")
        # The part of the adapters of the inputs' matrices is replicated over tensor: XLA adds it between the reduction and the slice.
        added = set(self.config.lora.targets_of(self.model)) & set(("query", "key", "value") if half == "attention" else ("gate", "up"))
        into_input: Kind = "all-reduce" if added and not self.latents else "reduce-scatter"
        return [
            *([self.through_tensor(f"{half} update (again)", "backward", "all-gather", narrow)] if again else []),
            self.through_tensor(f"{half} input", "forward", "all-gather", self.stream),
            self.through_tensor(f"{half} update", "forward", "reduce-scatter", self.stream),
            self.through_tensor(f"{half} update", "backward", "all-gather", narrow),
            self.through_tensor(f"{half} input", "backward", into_input, self.stream, inputs),
        ]

    def through_tensor(self, what: str, phase: Literal["forward", "backward"], kind: Kind, size: int, parts: int = 1) -> PlannedCollective:
        """Return a gather or scatter of the stream over tensor, or the ring that replaces it (a ring sums `parts` first)."""
        item = self.item(what, phase, kind, self.over("tensor"), size)
        if not self.ring:
            return replace(item, parts=parts)
        return replace(item, kind="collective-permute", bytes=size // self.tensor, count=item.count * (self.tensor - 1), by_hand=True)

    def item(self, what: str, phase: Literal["forward", "backward"], kind: Kind, axes: tuple[str, ...], size: int) -> PlannedCollective:
        return PlannedCollective(what, "layer", phase, kind, axes, size, self.layers)

    def parameters(
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
        whole: bool = False,
        gathered: int | None = None,
    ) -> list[PlannedCollective]:
        """Return the gathers of `weights` parameters, sharded over fsdp and tensor, and without adapters the reductions of their
        gradient.

        by_hand: both are written by hand (models/moe, sharding/manual.py); reduced_by_hand: only the reductions are. whole: not sharded
        over tensor, which shards the tokens. gathered: bytes per element in the gathers, where not those of the layers' matrices.
        """
        local, grad = weights // (1 if whole else self.tensor) // (self.expert if of_experts else 1), grad or self.grad
        gathered = local * (gathered or (self.gathered if where == "layer" else self.act))
        fsdp, sequence = self.over("fsdp") if of_experts else self.over("fsdp", "expert"), ("context", "tensor") if whole else ("context",)
        data = self.over("data", *sequence)
        shards = self.fsdp // self.expert if of_experts else self.fsdp
        planned = [
            PlannedCollective(what, where, "forward", "all-gather", fsdp, gathered, count, 1, by_hand, self.invariant_count(where)),
            PlannedCollective(what, where, "backward", "all-gather", fsdp, gathered, count, 1, by_hand),
            PlannedCollective(what, where, "backward", "reduce-scatter", fsdp, local * grad, count, 1, by_hand),
            PlannedCollective(what, where, "backward", "all-reduce", data, local // shards * grad, count, 1, by_hand),
        ]
        if self.config.mesh.zero_stage and self.schedule.stages == 1:
            planned[3] = replace(planned[3], kind="reduce-scatter", by_hand=False)
        groups = [axes for axes in (self.over("data"), self.over(*sequence)) if axes]
        if reduced_by_hand:
            planned[2:] = [replace(item, by_hand=True) for item in planned[2:]]
        elif where == "layer" and not fsdp and len(groups) > 1:  # sums over rows and over the sequence
            planned[3:] = [replace(planned[3], axes=axes, replicated=True) for axes in groups]
        gathers = planned[:2] if backward_gather else planned[:1]
        return gathers if self.frozen else [*gathers, *planned[2:]]

    def invariant_count(self, where: Where) -> int | None:
        """Return how many different parameters a forward pass gathers, the same for every microbatch; None: in a loop over layers."""
        if where == "layer":
            return None if self.scanned else self.model.num_layers
        return 1

    def replicated_gradient(self, what: str, size: int) -> list[PlannedCollective]:
        """Return the reductions of the gradient of a replicated parameter; none with adapters."""
        if self.frozen:
            return []
        groups = (self.over("context", "tensor"), self.over("data", "fsdp", "expert"))
        return [replace(self.item(what, "backward", "all-reduce", axes, size), replicated=True) for axes in groups]
