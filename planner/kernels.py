"""Time of the computation on one device, by part of the step: matmuls with parameters, attention, and passes over device memory.

A matmul takes its FLOPs over the calibrated rate of its shape. Elementwise work (norms, rotation, activations, residual adds, casts, the
softmax of the loss, the optimizer) is counted in bytes, each read or written once per fused kernel, over the calibrated memory bandwidth.

Legend: R rows per device, T sequence, D width, F MLP width, N/K query/key heads, H head width, V vocabulary rows, C tokens of a loss chunk;
f, t devices on fsdp and tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ridgeline.planner.activations import TAGS_STATISTICS, saved_activations, stacked_bytes
from ridgeline.planner.attention_time import PassTimes, attention_times
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.experts import TILE
from ridgeline.planner.hardware import Hardware, matmul_dtype
from ridgeline.planner.local import ITEMSIZE, LocalSizes, muon_layers
from ridgeline.planner.optimizer_state import optimizer_plugin
from ridgeline.planner.parameters import DOWN, attention_weights, layer_norms, matmul_weights
from ridgeline.planner.recompute import Recomputed, gathers_mlp_input, recomputed_by, waiting
from ridgeline.planner.software import DEFAULT_SOFTWARE, Software
from ridgeline.planner.work import Work

LOGIT_PASSES_BYTES = 18
"""Per logit: written once and read three times in float32 (maximum, sum, probability), its gradient written in 16 bits."""
SUM_EXPOSED = 0.27
"""Share of the passes over the float32 sum of the unembedding's gradient that the matmul which adds to it does not hide: 0.26 to 0.27 in
steps of three models on an H200 (vocabularies of 128,256 and 151,936, widths 2,048 and 4,096)."""
TEACHER_PASSES_BYTES = {"bucket": 34, "renormalize": 8}
"""Per logit, of the divergence from a teacher (distillation.rest), as XLA compiles it for an H100: marks of the teacher's tokens, the
probability of the others, and the gradient, to which that of the teacher's tokens is added in place."""
LOG_PROB_PASSES_BYTES = 12
"""Per logit of a pass without gradient: written once and read twice in float32 (maximum, sum)."""
EXPERT_MATMULS = ("gate", "up", "down")
TRANSPOSED_BYTES = 16
"""Additional bytes per element with a transposed gradient: written and read in float32, and so its update."""
TRANSPOSED_BYTE = 4
"""Bytes that pass in the time of one transposed element of 8 bits: such writes ran at 960 to 1,300 of 4,030 GB/s in a step on an H200."""
TRANSPOSED_INT8_BYTES = 28
"""TRANSPOSED_BYTES with 8-bit moments: both decoded moments are written and read too."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's orthogonalization (optax's default)."""


@dataclass(frozen=True)
class Kernels:
    """Times of the kernels of one device: its calibrated rates applied to its local sizes."""

    local: LocalSizes
    device: Hardware
    calibration: Calibration

    @property
    def software(self) -> Software:
        """The training software whose step is predicted."""
        return self.calibration.software

    @property
    def dtype(self) -> str:
        """Arithmetic of the matmuls, as in peak_flops."""
        return matmul_dtype(self.local.config.precision.compute, self.local.config.compute.matmul_precision)

    @property
    def layer_dtype(self) -> str:
        """Arithmetic of the layers' matmuls with parameters; embedding, attention and unembedding use `dtype`."""
        return "float8" if self.local.config.precision.matmul != "compute" else self.dtype

    @property
    def forward_dtype(self) -> str:
        """Arithmetic of the layers' matmuls in the forward pass: 4-bit inputs are used only there."""
        return "float4" if self.local.config.precision.matmul == "nvfp4" else self.layer_dtype

    def matmul_s(self, m: int, n: int, k: int, dtype: str | None = None) -> float:
        """Return the time of an [M, K] x [K, N] matmul."""
        used = dtype or self.dtype
        rate = self.calibration.matmul_flops_per_s(self.device, used, m, n, k)
        return 2.0 * m * n * k / rate / self.software.in_step_share(used, self.device)

    def layer_matmul_s(self, name: str, m: int, n: int, k: int, dtype: str, rows: int = 0) -> float:
        """Return the time of a matmul of a layer, of experts that of all experts of the device.

        Args:
          name: of the weight.
          m: of [M, K] x [K, N], as n and k.
          n: columns of the result.
          k: inner dim.
          dtype: of the inputs.
          rows: which of the three has the tokens, of which each expert has a part.
        """
        moe = self.local.model.moe
        if moe is None or name not in EXPERT_MATMULS or not self.software.matmul_per_expert:
            return self.matmul_s(m, n, k, dtype)
        experts, shape = moe.experts // self.local.expert, [m, n, k]
        shape[rows] = max(1, shape[rows] // experts)
        return experts * self.matmul_s(shape[0], shape[1], shape[2], dtype)

    def memory_s(self, size: float) -> float:
        """Return the time to read or write this many bytes of device memory."""
        return size / self.calibration.memory_bytes_per_s(self.device)

    def matmuls(self) -> dict[str, tuple[int, int, int]]:
        """Return (M, N, K) of each forward matmul of a layer on one device."""
        width, tokens = self.local.model.embed_dim, self.local.tokens
        shapes, tensor = {}, self.local.tensor
        moe = self.local.model.moe
        for name, (inputs, outputs) in attention_weights(self.local.model).items():
            if name in DOWN:  # tensor shards their tokens
                shapes[name] = (tokens // tensor, outputs, inputs)
            else:
                shapes[name] = (tokens, outputs, inputs // tensor) if name == "out" else (tokens, outputs // tensor, inputs)
        for name, weights in matmul_weights(self.local.model).items():
            if name in shapes:
                continue
            other, rows = weights // width // tensor, tokens
            if moe is not None and name in EXPERT_MATMULS:
                rows = self._routed_rows() + moe.shared_experts * tokens
                if self.local.config.compute.experts.capacity_factor is None and self.software.name == DEFAULT_SOFTWARE:
                    other += -other % TILE  # models/moe/grouped_matmul.py
            shapes[name] = (rows, width, other) if name == "down" else (rows, other, width)
        return shapes

    def _routed_rows(self) -> int:
        """Return the rows of a matmul of the routed experts that takes as long at the full rate. With a capacity the matmuls are plain ones
        of a batch."""
        local = self.local
        if local.config.compute.experts.capacity_factor is not None:
            return local.expert_rows
        return round(local.busy_rows / self.software.grouped_rate)

    def layer_forward(self) -> Work:
        """Return the forward pass of one layer, the mean where layers have different MLPs."""
        return self._mean(Kernels._layer_forward)

    def layer_backward(self) -> Work:
        """Return the backward pass of one layer, the mean where layers have different MLPs."""
        return self._mean(Kernels._layer_backward)

    def _mean(self, of_layer: Callable[[Kernels], Work]) -> Work:
        if len(self.local.kinds) == 1:
            return of_layer(self)
        total = Work(0.0)
        for layers, kind in self.local.kinds:
            total += of_layer(replace(self, local=kind)) * (layers / self.local.model.num_layers)
        return total

    def _layer_forward(self) -> Work:
        compute = sum(self.layer_matmul_s(name, *shape, self.forward_dtype) for name, shape in self.matmuls().items())
        return (
            Work(compute + self._adapters())
            + self.attention().forward
            + Work(0.0, self.memory_s(self.software.elementwise_passes * self._elementwise_forward() + self._quantize()))
        )

    def _layer_backward(self) -> Work:
        """Return the backward pass of one layer: gradients of inputs and weights, and recomputation."""
        again = recomputed_by(self.local.config)
        twice = self.attention_twice(again)
        compute = of_weights = 0.0
        for name, (m, n, k) in self.matmuls().items():
            compute += self.layer_matmul_s(name, m, k, n, self.layer_dtype)
            of_weights += 0.0 if self.local.adapted else self.layer_matmul_s(name, k, n, m, self.layer_dtype, rows=2)
            times_again = int(name in again.weights) + (twice if name in attention_weights(self.local.model) else 0.0)
            compute += times_again * self.layer_matmul_s(name, m, n, k, self.forward_dtype)
        times = self.attention()
        attention = times.backward + times.forward if self._attention_again(again) else times.backward
        attention += times.forward * twice
        moved = self.software.elementwise_passes * self._elementwise_backward(again) + 2 * self._quantize() + self._transpose_quantized()
        work = Work(compute + of_weights + 2 * self._adapters()) + attention + Work(0.0, self.memory_s(moved))
        if self.software.accumulates_in_matmuls:  # the sums pass through device memory while the matmul computes
            work += Work(0.0, max(0.0, self.memory_s(8 * self.local.gathered_trained_weights) - of_weights))
        return work

    def _adapters(self) -> float:
        """Return the seconds of the adapters' matmuls of one layer, forward: x A and its result times B."""
        local, seconds = self.local, 0.0
        for matrix in local.adapted:
            if matrix.experts:
                rows, hidden = self._routed_rows(), local.model.expert_width // local.tensor
                both = self.matmul_s(rows, matrix.rank, local.model.embed_dim) + self.matmul_s(rows, matrix.rank, hidden)
                seconds += matrix.layers / local.model.num_layers * both
                continue
            tensor, tokens = local.tensor, local.tokens // (local.tensor if matrix.on_shards else 1)
            inputs = matrix.inputs // (tensor if matrix.writes_stream else 1)
            outputs = matrix.outputs // (1 if matrix.on_shards else tensor)
            first = self.matmul_s(tokens if matrix.writes_latent else local.tokens, matrix.rank, inputs)
            seconds += matrix.layers / local.model.num_layers * (first + self.matmul_s(tokens, outputs, matrix.rank))
        return seconds

    def _attention_again(self, again: Recomputed) -> bool:
        """Whether the backward pass recomputes attention; with named values also if the backend does not tag its softmax statistics."""
        named = self.local.config.compute.remat.takes_names
        backend = self.local.attention_backend(gpu=self.device.tensor_cores)
        return again.attention or (named and backend not in TAGS_STATISTICS)

    def attention_twice(self, again: Recomputed) -> float:
        """Return the share of layers whose attention is recomputed twice, where the backward pass does not wait (recompute.py: `waiting`).

        XLA moves the gather that follows attention's update (of the MLP's input over tensor, of tokens over expert) to the iteration
        before, together with a copy of all computation before it; the gradients of attention recompute it in their own. Only the layers of
        the first iteration have no iteration before.
        """
        local, model, compute = self.local, self.local.model, self.local.config.compute
        gathered = gathers_mlp_input(self.local.config, local.tensor, local.expert)
        in_loop = compute.scan_layers and local.pipeline == 1 and self.device.tensor_cores and self.software.name == DEFAULT_SOFTWARE
        if not (again.attention_update and gathered and in_loop and waiting(local.config, local.tensor, local.expert) == "nothing"):
            return 0.0
        looped = model.num_layers - local.first_dense[0]
        return max(0, looped - model.layer_period) / model.num_layers

    def beside_scatters(self) -> PassTimes:
        """Return the gradients of one layer's weights, and what is recomputed: scatters of gradients of inputs do not wait for them."""
        again, shapes = recomputed_by(self.local.config), self.matmuls()
        trained = {} if self.local.adapted else shapes
        seconds = sum(self.layer_matmul_s(name, k, n, m, self.layer_dtype, rows=2) for name, (m, n, k) in trained.items())
        seconds += sum(self.layer_matmul_s(name, *shapes[name], self.forward_dtype) for name in again.weights if name in shapes)
        work = Work(seconds)
        return PassTimes(Work(), work + self.attention().forward if self._attention_again(again) else work)

    def around_attention(self) -> PassTimes:
        """Return the matmuls of attention's projections of one layer, and attention but in a ring."""
        shapes, times = self.matmuls(), self.attention()
        projections = Work(sum(self.matmul_s(*shapes[name], self.forward_dtype) for name in attention_weights(self.local.model)))
        if self.local.ring and self.local.context > 1:
            return PassTimes(projections, projections * 2)
        return PassTimes(projections + times.forward, projections * 2 + times.backward)

    def attention(self) -> PassTimes:
        """Return scores, softmax and values of one layer."""
        return attention_times(self.local, self.device, self.calibration, self.dtype)

    def embedding(self) -> Work:
        """Return the token lookup, and the scatter of its gradient into a zeroed table."""
        local = self.local
        if local.adapted:
            return Work(0.0, self.memory_s(2 * local.stream_bytes))
        looked_up = local.heads * (2 * local.stream_bytes + 3 * 4 * local.tokens * local.model.embed_dim)
        return Work(0.0, self.memory_s(looked_up + 8 * local.table))

    def modules_forward(self) -> Work:
        """Return the forward pass of the modules of multi-token prediction, without embedding and loss."""
        return self._modules(Kernels._layer_forward, 1)

    def modules_backward(self) -> Work:
        """Return the backward pass of these modules."""
        return self._modules(Kernels._layer_backward, 2)

    def _modules(self, of_block: Callable[[Kernels], Work], matmuls: int) -> Work:
        """Add up blocks, projections (matmuls of 2*D*D per token), and norms of embedding, hidden state and result (read, write each)."""
        local = self.local
        if local.modules is None:
            return Work()
        width, streams = local.model.embed_dim, 6 * local.cut_stream_bytes
        projection = matmuls * self.matmul_s(local.tokens // local.tensor, width, 2 * width)
        return (of_block(replace(self, local=local.modules)) + Work(projection, self.memory_s(matmuls * streams))) * local.model.mtp_layers

    def unembedding_gradient_s(self, width: int, vocab: int, chunk: int) -> float:
        """Return the time of the unembedding's gradient of one chunk of tokens, [D, C] x [C, V].

        It is a float32 sum over chunks: every chunk reads and writes the whole table.
        """
        passes_s = self.memory_s(8 * width * vocab)
        exposed_s = SUM_EXPOSED * passes_s if self.software.name == DEFAULT_SOFTWARE else 0.0
        return max(self.matmul_s(width, vocab, chunk) + exposed_s, passes_s)

    def loss(self) -> Work:
        """Return logits, cross-entropy and both gradients of a microbatch, chunk by chunk."""
        local = self.local
        width, vocab, chunk = local.model.embed_dim, local.model.padded_vocab_size // local.tensor, local.loss_chunk_tokens
        stages = 1 if self.software.stages_hold_layers else local.pipeline
        tokens = local.heads * local.tokens // stages  # each stage has a part of the tokens
        chunks = math.ceil(tokens / chunk)
        weight = self.unembedding_gradient_s(width, vocab, chunk)
        compute = self.matmul_s(chunk, vocab, width) + self.matmul_s(chunk, width, vocab) + (0.0 if local.adapted else weight)
        table = 2 * local.compute_itemsize if local.adapted else 12
        memory = chunks * LOGIT_PASSES_BYTES * chunk * vocab + table * local.table + 8 * local.heads * local.stream_bytes // stages
        tuned = local.config.preference.loss is not None or local.config.policy.loss is not None
        if tuned:  # log-probabilities come first, in a pass of their own: logits without gradient
            compute += self.matmul_s(chunk, vocab, width)
            memory += chunks * LOG_PROB_PASSES_BYTES * chunk * vocab
        teacher = local.config.distillation
        if teacher.weight is not None:
            again = LOG_PROB_PASSES_BYTES if teacher.rest == "bucket" and teacher.temperature != 1 else 0  # the sum at the temperature
            memory += chunks * (TEACHER_PASSES_BYTES[teacher.rest] + again) * chunk * vocab
        return Work(chunks * compute, self.memory_s(memory))

    def optimizer(self) -> Work:
        """Return the gradient norm and the update of the parameters on the device."""
        local, kind = self.local, self.local.config.optimizer.kind
        moved = update_bytes(local, transposed=self.software.transposed_gradients and local.fsdp > 1)
        work = Work(0.0, self.memory_s(moved / (local.data if self.software.shards_update or local.config.mesh.zero_stage else 1)))
        if (plugin := optimizer_plugin(kind)) is not None and plugin.flops_per_parameter:
            peak = self.device.peak_flops["float32"]
            return work + Work(plugin.flops_per_parameter * local.trained / peak)
        if kind != "muon":
            return work
        seconds = 0.0
        for weights in matmul_weights(local.model).values():
            small = min(local.model.embed_dim, weights // local.model.embed_dim)
            large = weights // small
            flops = NEWTON_SCHULZ_STEPS * (4.0 * small * small * large + 2.0 * small**3)
            dtype = "tfloat32" if "tfloat32" in self.device.peak_flops else "float32"
            seconds += flops / self.calibration.matmul_flops_per_s(self.device, dtype, small, large, small)
        return work + Work(seconds * muon_layers(local.model.num_layers, local.fsdp * local.tensor))

    def accumulate(self) -> Work:
        """Return the addition of one microbatch's gradients to their sum."""
        local = self.local
        many = local.config.trainer.accumulation > 1 and not self.software.accumulates_in_matmuls
        return Work(0.0, self.memory_s(3 * local.trained * local.gradient_itemsize) if many else 0.0)

    def stacks(self) -> Work:
        """Return what the scan over layers copies and zeroes in a microbatch."""
        local, backend = self.local, self.local.attention_backend(gpu=self.device.tensor_cores)
        # with stages the stacks are also written to the slot of a unit, and read from it
        slots = 4 * saved_activations(local, backend).bytes if local.pipeline > 1 and not self.software.stages_hold_layers else 0
        return Work(0.0, self.memory_s(stacked_bytes(local, backend) + slots))

    def _elementwise_forward(self) -> float:
        """Return the bytes of the norms (read, write), two residual adds (read 2, write), rotation, activation, casts of the weights.

        And of sorting tokens by expert and of adding up their results (read and write each).
        """
        local = self.local
        gates = 2 if local.model.gated_mlp else 1
        streams = 6 + 2 * layer_norms(local.model)
        return (
            streams * local.cut_stream_bytes
            + 2 * (local.query_bytes + local.key_bytes + local.latent_bytes // local.tensor)
            + (gates + 1) * local.hidden_bytes
            + 4 * local.row_bytes
            + self._casts()
            + self._turned(2, 2)
        )

    def _elementwise_backward(self, again: Recomputed) -> float:
        """Return the bytes of the gradients of the forward pass's elementwise work, of weight gradients and of recomputation.

        Weight gradients in float32 are written, read and added to their stack. With fsdp those of MLP down and attention out are
        transposed before their reduction.
        """
        local = self.local
        gates = 2 if local.model.gated_mlp else 1
        size: float = (
            (6 + 3 * layer_norms(local.model)) * local.cut_stream_bytes
            + 2 * (local.query_bytes + local.key_bytes)
            + 3 * local.latent_bytes // local.tensor
            + (2 * gates + 2) * local.hidden_bytes
        )
        size += 8 * local.row_bytes
        size += self._turned(1 + int(again.inputs) + int(again.attention_update), 1 + int(again.inputs) + int(again.mlp_update))
        size += self._turned(2, 1) * self.attention_twice(again)
        if halves := self._halves_over_tensor:  # the results of the matmuls that read an input are added up before they are scattered
            size += (4 + (gates + 1) * (halves - 1)) * local.stream_bytes
        if not self.software.accumulates_in_matmuls:
            size += 8 * local.gathered_trained_weights
            size += 3 * (local.trained if local.adapted else local.layer_matrices) // local.model.num_layers * local.gradient_itemsize
        size += self._casts()
        if self.software.transposed_gradients and local.fsdp > 1 and not local.adapted:
            size += 8 * local.turned_matrices
        if again.inputs:
            size += (6 + 2 * layer_norms(local.model)) * local.cut_stream_bytes + (gates + 1) * local.hidden_bytes
        return size

    @property
    def _halves_over_tensor(self) -> int:
        """How many of attention and MLP have their input gathered, and their update scattered, over tensor by XLA: attention alone where
        the MLP has experts; none with latents, whose gathers are narrow, and with adapters."""
        local, model = self.local, self.local.model
        gathered = local.tensor > 1 and local.config.compute.tensor_overlap == "gather" and self.software.name == DEFAULT_SOFTWARE
        if not gathered or local.adapted or model.latent_attention is not None:
            return 0
        return 2 if model.moe is None or model.moe.shared_experts else 1

    def _turned(self, of_attention: int, of_mlp: int) -> int:
        """Return the bytes of transposing the residual stream for a number of gathers and scatters over tensor.

        Matmuls have rows first, these collectives the sequence, which is what they cut.
        """
        halves = self._halves_over_tensor if self.local.rows > 1 else 0
        return 2 * self.local.stream_bytes * ((0, of_attention, of_attention + of_mlp)[halves])

    def _casts(self) -> float:
        """Return the bytes of casting the parameters of a layer."""
        local = self.local
        shard = local.layer_matrices // local.model.num_layers
        if local.int8_base:  # dequantized after the gather
            return local.gathered_layer_weights * (1 + local.compute_itemsize)
        casts = 0 if local.adapted else shard * (local.parameter_itemsize + local.compute_itemsize)
        return casts / local.config.trainer.accumulation if self.software.casts_once else casts

    def _quantize(self) -> float:
        """Return the bytes of quantizing the inputs of 8-bit matmuls: read for their amax (not with delayed scaling), read again, written.

        Weights are part of the casts.
        """
        local = self.local
        if self.layer_dtype != "float8":
            return 0.0
        inputs = 2 * local.stream_bytes + local.query_bytes + local.hidden_bytes
        return inputs * ((1 if local.config.precision.delayed else 2) + 1 / local.compute_itemsize)

    def _transpose_quantized(self) -> float:
        """Return the bytes that take as long as the transposed copies of 8-bit operands of gradients of weights.

        cuBLAS reads inputs and gradients of results along the tokens. Other software has kernels that write both layouts at once.
        """
        local = self.local
        if self.layer_dtype != "float8" or self.software.name != DEFAULT_SOFTWARE or local.adapted:
            return 0.0
        inputs = 2 * local.stream_bytes + local.query_bytes + local.hidden_bytes
        gradients = 2 * local.stream_bytes + local.query_bytes + 2 * local.key_bytes + 2 * local.hidden_bytes
        return TRANSPOSED_BYTE * (inputs + gradients) / local.compute_itemsize


def update_bytes(local: LocalSizes, *, transposed: bool) -> float:
    """Return the bytes of one optimizer update on one device.

    Per parameter: the gradient is read twice (norm, update), parameter and moments are read and written. 8-bit moments need another pass
    for the scales: gradient and both moments are read once more. Adafactor reads the gradient twice more, for its statistics and its
    clipping. `transposed`: the gradients of parameters that fsdp shards along their last dim (MLP down, attention out, embedding) are
    transposed, as XLA leaves them.

    Read from the kernels of compiled updates (8B over fsdp=8, GPU backend, jax 0.10.2): 37.9 bytes per parameter in float32, 26.8 with
    lower-precision state; tests/planner/test_step_time.py compares this count with them.
    """
    precision, kind = local.config.precision, local.config.optimizer.kind
    first = ITEMSIZE[precision.moments]
    both = 2 * (local.gradient_itemsize + local.parameter_itemsize)
    matrices, rest = local.layer_matrices, local.parameters - local.layer_matrices
    codes = precision.moments == "int8"
    if codes:
        moved = matrices * (both + local.gradient_itemsize + 3 * 2) + rest * (both + 16)
    elif (plugin := optimizer_plugin(kind)) is not None:
        moved = int(local.trained * (both + 2 * plugin.state_bytes_per_parameter(first)))
    elif kind == "adamw":
        moved = local.trained * (both + 2 * first + 8)
    elif kind == "muon":
        moved = matrices * (both + 2 * first) + rest * (both + 2 * first + 8)
    elif kind == "adafactor":
        moved = local.parameters * (both + 2 * local.gradient_itemsize)
    else:
        moved = local.trained * (both + 2 * first)
    if not transposed or local.adapted:
        return float(moved)
    elements = local.model.num_layers * local.turned_matrices // local.fsdp
    return float(moved + elements * (TRANSPOSED_INT8_BYTES if codes else TRANSPOSED_BYTES) + local.table // local.fsdp * TRANSPOSED_BYTES)
