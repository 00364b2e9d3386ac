"""One turn of the loop over layers, and what XLA keeps in memory for a turn of several layers.

Where kinds of layers alternate (with and without a window: Gemma 2 and 3, OLMo 3, gpt-oss), a turn runs one layer of each kind. The
backward passes of dense layers follow each other (`in_order`), and of layers with experts where MLPs are computed again
(planner/ordered_experts.py). Of other layers with experts, of frozen ones and without a loop the scheduler interleaves those of a turn: it
gathers their weights together, and delays their weight gradients to the end of the turn.
Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device. Turns of one layer add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.activations import offloaded_bytes, offloads_inputs
from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import gradients_first, in_order

NORMS = {"pre": 2, "post": 2, "both": 4}
"""Norms of residual streams in a layer, by model.norm_position."""
FEW_TOKENS = 2**16
"""Tokens of a device and microbatch up to which XLA fuses the kernels around a norm's backward pass in one way, and with more in another.

Up to it one kernel computes the gradients of the final norm's scale and input; and kernels that read the gradient of the MLP's input add
those by gate and by up themselves, so that both are live until the gradient of the scale of a norm before the MLP is computed.

Bounds from heaps of OLMo 2 1B: the first with 65,536, in rows of 8,192 and 32,768; not with 131,072, in rows of 16,384 and 32,768; of
Gemma 3 4B with 65,536 in rows of 8,192 and 131,072 in rows of 32,768.
"""
NOT_REDUCED = 4
"""Layers of a turn that is not pipelined whose weight gradients wait: they are reduced within it (heaps of Gemma 3 4B, 4 of 6)."""
AFTER_LEFT = 2
"""Layers of the loop whose weight gradients wait with those of the layers after the last whole turn."""


@dataclass(frozen=True)
class Turn:
    """A turn of the loop over layers."""

    local: LocalSizes
    overlap: bool
    """Compiled with the latency-hiding scheduler."""
    in_loop: bool
    """Microbatches run in a loop."""
    program: GpuProgram = field(default_factory=GpuProgram)
    """What is particular to the device's programs."""

    @cached_property
    def layers(self) -> int:
        """Layers that are scheduled together."""
        return self.local.model.layer_period if self.overlap and not self.in_order else 1

    @cached_property
    def in_order(self) -> bool:
        """Whether the backward passes of the layers of a turn follow each other (models/backward_order.py).

        Such a turn is as a loop of equal layers; the weight gradients of one layer are pending in the next one's backward pass.
        """
        local = self.local
        deferring = local.model.layer_period > 1 and local.defers_reductions
        return self.overlap and (deferring or in_order(local.model, local.config.compute, frozen=bool(local.adapted)))

    @property
    def gradients_first(self) -> bool:
        """Whether each matmul of these layers computes its weight gradients before the gradient of its input is used."""
        local = self.local
        sizes = {"context": local.context, "tensor": local.tensor, "pipeline": local.pipeline}
        return self.overlap and gradients_first(local.model, local.config.compute, sizes, frozen=bool(local.adapted))

    @property
    def left_over(self) -> int:
        """Layers after the last whole turn, which are not in the loop."""
        return self.local.model.num_layers % self.local.model.layer_period

    @property
    def gathers_own(self) -> bool:
        """Whether an ordered turn gathers its own weights (planner/recompute.py, gathers_within_turn).

        XLA then takes no turn out of the loops over layers to gather weights for the next one.
        """
        return self.in_order and self.local.gathers_within_turn

    @property
    def all_in_loops(self) -> bool:
        """Whether all layers run in the loops over turns that gather their own weights."""
        return self.gathers_own and not self.left_over and self.local.pipeline == 1

    def not_stacked(self, saved_bytes: int) -> int:
        """Return the size of what the last turn kept, which is not yet in the stacks of all turns: that turn is not in the loop.

        Over tensor it is there before the loss (planner/recompute.py: saves_first), and without fsdp, as no weights are gathered for which
        XLA would take the turn out of the loop. So it is in a stage, which writes the stacks to a slot before its loss.

        saved_bytes: of all layers.
        """
        local = self.local
        in_loop = local.saves_first or self.gathers_own
        several = self.overlap and local.model.layer_period > 1 and not in_loop and local.fsdp > 1 and local.pipeline == 1
        return local.model.layer_period * saved_bytes // local.model.num_layers if several else 0

    def last_stacks(self, saved_bytes: int) -> int:
        """Return the size of the stacks of what layers kept that are left in the turn of ordered layers that comes last.

        Each layer of a turn has a stack for all turns, which is freed with the layer's backward pass; the first one's is when most is
        needed (heaps of Gemma 2 and 3 and OLMo 3).

        saved_bytes: of all layers.
        """
        model = self.local.model
        turns = model.num_layers // model.layer_period
        return (model.layer_period - 1) * turns * saved_bytes // model.num_layers

    @property
    def trained_weights(self) -> int:
        """Matrix elements of these layers that are trained, gathered over fsdp and sharded over tensor and expert."""
        return self.local.period_weights if self.layers > 1 else self.local.gathered_trained_weights

    @property
    def first(self) -> int:
        """Turns at the start of the backward pass that are not in the loop, which XLA unrolls by two; 1 after layers that are left over."""
        turns, left = divmod(self.local.model.num_layers, self.local.model.layer_period)
        if not self.pipelined:
            return turns % 2
        return 1 if left else 1 + turns % 2

    @property
    def pipelined(self) -> bool:
        """Whether the loop of the backward pass gathers and reduces across turns, for which XLA takes its first and last turn out of it.

        It does not where layers are left over and blocks are recomputed.
        """
        return (
            (self.layers == 1 and not self.in_order)
            or not self.recomputes
            or self.local.model.num_layers % self.local.model.layer_period == 0
        )

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass runs blocks again."""
        return POLICIES[self.local.config.compute.remat.policy].recomputes_block

    def delayed(self, turns: int) -> int:
        """Return the number of layers whose weight gradients are computed together, of some turns that are scheduled together."""
        return turns * self.layers if self.pipelined else min(self.layers, NOT_REDUCED)

    @property
    def delayed_at_start(self) -> int:
        """Layers whose weight gradients are computed together at the start of the backward pass.

        Where whole blocks are recomputed, those of the layers after the last whole turn and of two more (heaps of Gemma 3 4B, `full`).
        """
        left = self.local.model.num_layers % self.local.model.layer_period
        if left and not self.pipelined and self.local.config.compute.remat.policy == "full":
            return left + AFTER_LEFT
        return self.delayed(self.first)

    @property
    def in_loss(self) -> int:
        """Turns of the backward pass whose gathers and recomputation may start in the loss; none in a loop of microbatches."""
        return 0 if self.layers == 1 or self.in_loop else self.first

    def kept_parameters(self) -> int:
        """Return the size of the parameters of each kind of layers, which are kept for the backward pass where no layer is recomputed.

        Where layers are left after the last whole turn, those of the whole turns are cut out of the stack of all, by any policy.
        """
        model = self.local.model
        several = model.layer_period > 1 and (not self.recomputes or model.num_layers % model.layer_period > 0)
        return self.local.layer_matrices * self.local.weight_itemsize if several else 0

    def cut_before_layers(self) -> int:
        """Return the size of the parameters that an ordered turn with layers left over has been given before the loss; 0: no such turn.

        With one microbatch the parameters of the whole turns are cut out of the stacks of all once per step, and those of MLP down and
        attention out are transposed by the same kernel. Of the last turn and the layers left over, which are not in the loop, those for
        the backward pass are cut with them, in the compute dtype (heap of Gemma 3 4B, data=8 x fsdp=4, names of gate and up).
        """
        local, layers = self.local, self.local.model.num_layers
        if not (self.in_order and self.left_over) or self.in_loop:
            return 0
        outside = self.left_over + local.model.layer_period
        size = (layers - self.left_over) * local.weight_itemsize + outside * local.compute_itemsize
        return local.layer_matrices // layers * size

    def rotary_tables(self) -> int:
        """Return the size of the float32 cosines and sines of the kinds of layers, over tensor in two layouts.

        Looked at only with one microbatch and layers left over (`cut_before_layers`; heap of Gemma 3 4B over tensor, `full`).
        """
        local, model = self.local, self.local.model
        if not self.cut_before_layers() or model.position != "rope":
            return 0
        kinds = 1 if model.local_rope_theta is None else 2
        return kinds * (2 if local.tensor > 1 else 1) * local.tokens * model.head_width * 4

    def gradients_left_over(self) -> int:
        """Return the size of the unsharded gradients of the layers after the last whole turn, which wait while the turns run."""
        local = self.local
        left = local.model.num_layers % local.model.layer_period if self.layers > 1 and local.fsdp > 1 else 0
        return left * local.gathered_trained_weights * local.gradient_itemsize

    def reduced_gradients(self, fsdp: int) -> int:
        """Return the size of the reduced gradients of an ordered turn, which are written into the stacks of all turns in the next one.

        fsdp: devices that gradients are sharded over.
        """
        local = self.local
        several = local.model.layer_period if self.in_order else 0
        return several * local.gathered_trained_weights // fsdp * local.parameter_itemsize

    def slices_of_kept(self, saved_bytes: int) -> int:
        """Return the size of the slices of what a turn kept, which are cut out of the stacks together where no layer is recomputed.

        saved_bytes: of all layers.
        """
        local = self.local
        if self.layers == 1 or self.recomputes:
            return 0
        hidden = sum(layers * kind.hidden_bytes for layers, kind in local.kinds) // local.model.num_layers
        gates = (2 if local.model.gated_mlp else 1) * hidden if local.saves_first else 0
        return self.layers * (saved_bytes // local.model.num_layers - gates)

    def of_offload_in_loss(self, one_chunk: bool, backend: str) -> int:
        """Return the size of what offload has in the loss for a turn.

        Offloaded values of a layer are back on the device; those of a whole turn where the loss is one chunk and thus no loop, and without
        pipelined turns those of all layers whose weight gradients wait. The last turn is outside of the loop in both passes, so XLA merges
        the recomputation of a layer's gate and queries with the forward pass.

        Of an ordered turn of dense layers, values within the blocks of the first half have not left the device; with Pallas's attention,
        and cuDNN's on A100, those of the others have already come back (heaps of Gemma 2 and 3 and OLMo 3).

        one_chunk: the only microbatch has one chunk of logits. backend: of attention.
        """
        local = self.local
        if self.in_order:
            layers = local.model.layer_period
            stays = backend == "chunked" or (backend == "cudnn" and self.program.adds_bfloat16)
            if stays and local.model.moe is None and not offloads_inputs(local):
                layers //= 2
            return layers * offloaded_bytes(local) // local.model.num_layers
        if not self.pipelined and offloads_inputs(local):
            return 0
        copied = offloaded_bytes(local) // local.model.num_layers
        copied *= self.delayed(1) if one_chunk or not self.pipelined else 1
        return copied + (local.hidden_bytes if local.model.gated_mlp else 0) + local.query_bytes

    def not_yet_offloaded(self) -> int:
        """Return the size of values within blocks of an ordered last turn that are still on their way to host memory as its backward pass
        begins.

        In the second layer of that pass, which needs most, those of it and of the next one have come back; those of the layers after them
        have not left the device (heaps of OLMo 3 7B, turns of four layers; Gemma 2 9B has two). Inputs of blocks of layers left over after
        the last whole turn have not either, on A100 in float32; of these layers less is live where values within blocks leave it, and it is
        not counted (heaps of Gemma 3 4B).
        """
        remat = self.local.config.compute.remat
        if not remat.offloads:
            return 0
        if offloads_inputs(self.local):
            return self.left_over * self.local.cut_stream_bytes * (1 if self.program.adds_bfloat16 else 2)
        others = 0 if self.left_over else self.local.model.layer_period - 3
        return max(0, others) * offloaded_bytes(self.local) // self.local.model.num_layers

    def norm_gradients(self) -> int:
        """Return the size of the float32 gradients of the norms of a turn before their sums over tokens, which wait for its end."""
        local = self.local
        norms = 0 if self.layers == 1 else self.layers * NORMS[local.model.norm_position]
        return norms * local.tokens * local.model.embed_dim * 4 // local.tensor

    def before_weight_gradients(self) -> int:
        """Return the size of what the weight gradients of a turn are computed from: inputs of matmuls and gradients of their results.

        8-bit matmuls keep one byte of an element (of attention results, which are quantized later, all). The gradients of the norms, which
        are computed together with those of the matrices, need the inputs of the norms too, and the residual stream; with norms of queries
        and keys also the gradients of attention's input by both, and an offloaded input of the block. Without 8-bit matmuls the kernels of
        the norms' backward pass compute them.

        Not for dense layers in order that are not over tensor (planner/ordered_dense.py).
        """
        local = self.local
        hidden = (3 if local.model.gated_mlp else 2) * local.hidden_bytes
        attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes
        normed = 2 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0  # inputs, and gradients of the results
        if local.config.precision.eight_bit and (self.layers > 1 or self.in_order) and local.model.moe is None:
            operands = hidden + 4 * local.stream_bytes + local.query_bytes + 2 * local.key_bytes
            if self.in_order:  # inputs are gathered in the compute dtype, and the norm's inputs are sharded
                inputs = 2 * local.stream_bytes - 2 * local.stream_bytes // local.compute_itemsize
                return operands // local.compute_itemsize + inputs + local.context_bytes + 2 * local.cut_stream_bytes + normed
            streams = NORMS[local.model.norm_position] + 1
            streams += (3 if offloads_inputs(local) else 2) if local.model.qk_norm else 0
            of_norms = streams * local.stream_bytes + normed
            return self.layers * (operands // local.compute_itemsize + local.context_bytes + of_norms)
        of_norm = 2 * local.cut_stream_bytes if self.in_order else 0  # the norm before the MLP: the stream and attention's update
        return self.layers * (hidden + 4 * local.stream_bytes + attention + normed + of_norm)
