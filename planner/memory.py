"""Memory of one device at the fullest moment of a training step, by component.

The step is a sequence of moments: the loss (all saved activations plus one chunk of logits), the backward pass of a layer (saved
activations plus one layer's worth of intermediates and whole-layer gradients on their way into a reduce-scatter), the gradient of the
embedding, and the optimiser. Each is a sum of components; the fullest one is what a device needs. The moments and what lives in them were
read off the buffer assignments of the compiled step (GPU backend, default flags, jax 0.10.2), and the totals are held to compiled sizes in
tests/planner/test_memory.py. Nothing here is fitted: every term is a buffer with a name.

Legend: R rows per device, T sequence, D width, F MLP width, N/K query/key heads, H head width, V vocabulary rows, L layers, C tokens of a
loss chunk; f, t devices on fsdp and tensor; a, g, p bytes of an element in precision.compute, .gradients, .params.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.schema import Config
from planner.local import ITEMSIZE, LocalSizes, attention_backend

FRAGMENTATION = 0.01
"""Share of the temporary bytes that XLA's heap placement loses: 0-5 % in the compiled cases, 1 % usual."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Driver context and modules of one process on an H100 (0.5-0.7 GiB in nvidia-smi before the first allocation)."""
NCCL_BYTES_PER_COMMUNICATOR = 200 * 2**20
"""Channels and protocol buffers of one NCCL communicator (NCCL 2.2x, default channels; 0.1-0.3 GiB reported)."""
HOST_PROCESS_BYTES = 500 * 2**20
"""A process with JAX loaded, where host memory is the device's."""
STREAMS_IN_FLIGHT = 8
"""Full-sequence streams [R, T, D] that are live in the backward pass of one layer (inputs, cotangents and their transposes)."""


@dataclass(frozen=True)
class Component:
    """Bytes of one device and the assumption behind them."""

    bytes: int
    assumption: str


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes one device needs at the fullest moment of a step."""

    components: dict[str, Component]
    moment: str
    """The fullest moment: loss, backward, embedding gradient or optimizer."""
    moments: dict[str, int] = field(default_factory=dict)
    """Bytes of every moment, all components together."""

    @property
    def total_bytes(self) -> int:
        """Everything, the runtime's own included: what must fit into the device."""
        return sum(component.bytes for component in self.components.values())

    @property
    def compiled_bytes(self) -> int:
        """Arguments and temporaries: what the compiler reports for the step."""
        return self.total_bytes - self.components["runtime_reserve"].bytes

    @property
    def argument_bytes(self) -> int:
        """State and batch: what the step takes in."""
        return sum(self.components[name].bytes for name in ("parameters", "moments", "batch"))

    @property
    def temp_bytes(self) -> int:
        """What lives only within the step."""
        return self.compiled_bytes - self.argument_bytes

    def bytes_by_component(self) -> dict[str, int]:
        """Component name to bytes."""
        return {name: component.bytes for name, component in self.components.items()}


def memory_per_device(config: Config, sizes: Mapping[str, int], *, gpu: bool = True) -> MemoryEstimate:
    """Estimate the memory of one device of a mesh with these axis sizes, by component, at the fullest moment of a step.

    `gpu`: which attention backend `auto` becomes. The config must divide over the mesh (configs.rules.check_devices).
    """
    local = LocalSizes.of(config, sizes)
    state = _state(local, sizes, gpu)
    backend = attention_backend(config, gpu=gpu)
    saved = _saved(local, backend)
    moments = {
        "loss": _loss(local, saved, backend),
        "backward": _backward(local, saved, backend),
        "embedding gradient": _embedding_gradient(local),
        "optimizer": _optimizer(local),
    }
    totals = {name: sum(part.bytes for part in parts.values()) for name, parts in moments.items()}
    fullest = max(totals, key=lambda name: totals[name])
    temporary = moments[fullest]
    components = {
        **{name: state[name] for name in ("parameters", "moments")},
        **{name: temporary.get(name, Component(0, "none at the fullest moment")) for name in TEMPORARY},
        "batch": state["batch"],
        "fragmentation": Component(
            int(FRAGMENTATION * totals[fullest]), f"{FRAGMENTATION:.0%} of the temporary bytes lost to heap placement"
        ),
        "runtime_reserve": state["runtime_reserve"],
    }
    fixed = sum(part.bytes for part in state.values())
    return MemoryEstimate(components, fullest, {name: fixed + int(total * (1 + FRAGMENTATION)) for name, total in totals.items()})


TEMPORARY = (
    "gradients",
    "accumulated_gradients",
    "parameter_copies",
    "activations",
    "working_activations",
    "attention_workspace",
    "loss",
    "collective_buffers",
)
"""Components that live within a step, in the order they are shown."""


def _state(local: LocalSizes, sizes: Mapping[str, int], gpu: bool) -> dict[str, Component]:
    """What exists between steps, and what the runtime takes for itself."""
    config = local.config
    used = [axis for axis, size in sizes.items() if size > 1]
    groups = len(used) + (1 if {"data", "fsdp"} <= set(used) else 0)
    bytes_of_moments, of_moments = _moments(local)
    rows = config.data.batch_size // (local.data * local.fsdp)
    arrays = 5 if config.data.document_masking else 4
    return {
        "parameters": Component(
            local.parameters * local.parameter_itemsize, f"{config.precision.params} masters, cut over fsdp and tensor; norms whole"
        ),
        "moments": Component(bytes_of_moments, of_moments),
        "batch": Component(arrays * rows * config.data.seq_len * 4, f"{arrays} int32 or float32 arrays of the step's rows"),
        "runtime_reserve": Component(
            CUDA_CONTEXT_BYTES + groups * NCCL_BYTES_PER_COMMUNICATOR if gpu else HOST_PROCESS_BYTES,
            f"CUDA context 0.6 GiB, NCCL 0.2 GiB for each of {groups} communicators; not part of the compiled size"
            if gpu
            else "the process with JAX loaded; not part of the compiled size",
        ),
    }


def moment_bytes(local: LocalSizes) -> int:
    """Return the bytes of the optimiser's state on a device."""
    return _moments(local)[0]


def _moments(local: LocalSizes) -> tuple[int, str]:
    """Bytes of the optimiser's state and what they are made of."""
    kind, first = local.config.optimizer.kind, ITEMSIZE[local.config.precision.moments]
    word = local.config.precision.moments
    if kind == "adamw":
        return local.parameters * (first + 4), f"AdamW: first moment {word}, second float32, laid out as the parameters"
    if kind in ("lion", "sgd"):
        return local.parameters * first, f"{kind}: one moment, {word}"
    if kind == "muon":
        rest = local.parameters - local.layer_matrices
        return local.layer_matrices * first + rest * (first + 4), f"Muon: one {word} momentum per matrix, AdamW moments for the rest"
    model = local.model
    per_matrix = model.embed_dim / local.fsdp + model.mlp_dim / local.tensor
    factored = int(4 * model.num_layers * 7 * per_matrix + 4 * 2 * (local.table / model.embed_dim + model.embed_dim))
    return factored + 4 * local.vectors, "Adafactor: row and column statistics of every matrix, float32"


# What the backward pass finds.


def _saved(local: LocalSizes, backend: str) -> Component:
    """Activations kept from the forward to the backward pass, all layers."""
    config = local.config
    policy, layers = config.compute.remat.policy, local.model.num_layers
    stream, cut, q, k, hidden = local.stream_bytes, local.cut_stream_bytes, local.query_bytes, local.key_bytes, local.hidden_bytes
    normed_heads = q + k if local.model.qk_norm else 0
    packed = q if config.data.document_masking and backend == "cudnn" else 0
    gates = 2 if local.model.gated_mlp else 1
    if policy in ("none", "attention-only"):
        per_layer = 2 * cut + 2 * stream + 2 * q + 2 * k + (gates + 1) * hidden + normed_heads
        words = "block input, both normed inputs, queries, keys, values, attention result, MLP hidden values"
        if policy == "none":
            per_layer += packed + local.softmax_bytes + _scores_saved(local, backend)
            words += ", softmax statistics"
    elif policy == "dots":
        per_layer = 2 * cut + q + 2 * k + gates * hidden
        words = "block input and the results of products with parameters"
    elif policy == "full":
        per_layer, words = cut, "each block's input"
    else:
        named = _named_bytes(local)
        listed = sum(named[name] for name in dict.fromkeys(config.compute.remat.names) if name != "block_input")
        on_device = policy == "names"
        per_layer = cut + (listed if on_device else 0)
        words = f"each block's input and {'' if on_device else '(in host memory) '}{', '.join(config.compute.remat.names)}"
    return Component(layers * per_layer, f"{policy}: {words}; {layers} layers, {config.precision.compute}")


def _named_bytes(local: LocalSizes) -> dict[str, int]:
    """Bytes of one layer's value by checkpoint name (models/remat.py)."""
    return {
        "block_input": local.cut_stream_bytes,
        "query": local.query_bytes,
        "key": local.key_bytes,
        "value": local.key_bytes,
        "attention_context": local.query_bytes,
        "attention_lse": local.softmax_bytes,
        "attention_out": local.cut_stream_bytes,
        "mlp_gate": local.hidden_bytes if local.model.gated_mlp else 0,
        "mlp_up": local.hidden_bytes,
        "mlp_out": local.cut_stream_bytes,
    }


def _score_bytes(local: LocalSizes, itemsize: int) -> int:
    """One [R, N/t, T, T] array."""
    return local.tokens * local.config.data.seq_len * local.model.num_heads * itemsize // local.tensor


def _scores_saved(local: LocalSizes, backend: str) -> int:
    """Attention probabilities that a backend without a backward pass of its own keeps for it."""
    return {"xla": _score_bytes(local, 4 + local.compute_itemsize), "reference": _score_bytes(local, 8)}.get(backend, 0)


def _mask_bytes(local: LocalSizes, backend: str) -> int:
    """The mask of packed documents, given to cuDNN as a bias [R, T, T] in the compute dtype and to the score backends as booleans."""
    if not local.config.data.document_masking or backend == "chunked":
        return 0
    return local.tokens * local.config.data.seq_len * (local.compute_itemsize if backend == "cudnn" else 1)


def _attention_workspace(local: LocalSizes, backend: str) -> Component:
    """What the attention of one layer needs beside its inputs and outputs, in the backward pass."""
    mask = _mask_bytes(local, backend)
    if backend == "cudnn":
        words = "cuDNN flash attention keeps no scores" + (f"; the mask of packed documents costs {mask / 1e6:.0f} MB" if mask else "")
        return Component(2 * mask, words)
    if backend == "chunked":
        accumulators = 2 * local.query_bytes * 4 // local.compute_itemsize
        return Component(accumulators, "chunked: float32 accumulators of the query gradient")
    return Component(mask + 3 * _score_bytes(local, 4), f"{backend}: float32 scores [R, N/t, T, T], their gradient and a temporary")


# The moments.


def _layout_copies(local: LocalSizes) -> int:
    """Transposed masters of the two matrices that fsdp cuts along their last dim (MLP down, attention out): XLA gathers leading dims."""
    if local.fsdp == 1:
        return 0
    return local.model.num_layers * (local.mlp_matrix + local.query_matrix) // local.fsdp * local.parameter_itemsize


def _accumulated(local: LocalSizes) -> Component:
    """The sum over microbatches."""
    if local.config.trainer.accumulation == 1:
        return Component(0, "one microbatch: no sum is kept")
    size = local.parameters * local.gradient_itemsize
    return Component(size, f"sum over {local.config.trainer.accumulation} microbatches, {local.config.precision.gradients}")


def _table_copies(local: LocalSizes) -> int:
    """With microbatches in a loop, the transposed embedding is made once before it."""
    return local.tables // (1 if local.model.tie_embeddings else 2) * 4 if local.config.trainer.accumulation > 1 and local.fsdp > 1 else 0


def _zeroed(local: LocalSizes) -> Component:
    """Gradient buffers that the schedule zeroes before the loss, long before the backward pass fills them."""
    layers = (2 if local.model.gated_mlp else 1) * local.model.num_layers * local.mlp_matrix // local.fsdp * local.gradient_itemsize
    return Component(layers + _zeroed_table(local), "gradient buffers of MLP gate and up (and embedding), zeroed before the loss")


def _zeroed_table(local: LocalSizes) -> int:
    """The embedding's whole gradient, zeroed before the loss: seen inside a loop over microbatches, and when its dtype is not float32."""
    alone = not local.model.tie_embeddings or (local.data > 1 and local.fsdp > 1)  # else it is added into that of the unembedding
    in_loop = local.config.trainer.accumulation > 1 and local.tensor == 1 and alone
    return local.table * local.gradient_itemsize if in_loop or local.gradient_itemsize != 4 else 0


def _loss(local: LocalSizes, saved: Component, backend: str) -> dict[str, Component]:
    tokens, table, vocab = local.loss_chunk_tokens, local.table, local.model.padded_vocab_size // local.tensor
    logits = tokens * vocab * (4 + local.compute_itemsize)
    gradient, used = 4 * table, local.compute_itemsize * table
    streams = 3 * local.stream_bytes + local.cut_stream_bytes
    return {
        "activations": saved,
        "parameter_copies": Component(
            _layout_copies(local) + _table_copies(local),
            "transposed masters of MLP down and attention out, for gathers along a leading dim",
        ),
        "gradients": _zeroed(local),
        "accumulated_gradients": _accumulated(local),
        "attention_workspace": Component(_mask_bytes(local, backend), "mask of packed documents"),
        "working_activations": Component(streams, "final hidden states, their gradient and the last block's output"),
        "loss": Component(
            logits + gradient + used,
            f"logits of {tokens:,} tokens in float32 and their gradient, the gathered unembedding and its whole float32 gradient",
        ),
    }


def _backward(local: LocalSizes, saved: Component, backend: str) -> dict[str, Component]:
    """The fullest of three points in the backward pass of a layer: its MLP, its attention, its end."""
    policy, layers = local.config.compute.remat.policy, local.model.num_layers
    hidden, stream = local.hidden_bytes, local.stream_bytes
    gathered = 2 * local.mlp_matrix * local.compute_itemsize
    reduced = local.fsdp * local.data > 1
    waiting = local.gathered_layer_weights * 4 if reduced else 2 * local.mlp_matrix * 4
    mask, attention = _mask_bytes(local, backend), _attention_workspace(local, backend)
    recomputed = 4 if policy in ("full", "names", "offload") else 3
    # (hidden activations, streams, gathered weights, waiting gradients, attention's own)
    points = {
        "its MLP": (recomputed * hidden, STREAMS_IN_FLIGHT * stream, gathered, 0, mask),
        "its attention": (3 * hidden, 6 * stream, 0, 0, attention.bytes),
        "its end": (hidden, (5 if 1 in (local.tensor, local.rows) else STREAMS_IN_FLIGHT) * stream, 0, waiting, mask),
    }
    where = max(points, key=lambda name: sum(points[name]))
    hidden_live, streams, copies, waits, workspace = points[where]
    relaid = layers * stream if local.tensor > 1 and policy in ("none", "attention-only") else 0
    relaid += layers * _score_bytes(local, 4) if backend in ("xla", "reference") and policy == "none" else 0
    cotangent = 4 * local.tokens * local.model.embed_dim // local.tensor
    gradients = (local.layer_matrices + local.vectors) * local.gradient_itemsize
    return {
        "activations": saved,
        "gradients": Component(
            gradients + _zeroed_table(local), f"of the layers, {local.config.precision.gradients}, cut as the parameters"
        ),
        "accumulated_gradients": _accumulated(local),
        "parameter_copies": Component(
            _layout_copies(local) + _table_copies(local) + copies,
            "transposed masters of MLP down and attention out" + ("; two gathered MLP matrices" if copies else ""),
        ),
        "working_activations": Component(
            hidden_live + streams + relaid + cotangent,
            f"one layer's backward pass, fullest at {where}" + ("; one saved value of all layers in another layout" if relaid else ""),
        ),
        "attention_workspace": Component(workspace, attention.assumption),
        "loss": Component(4 * local.table, "whole float32 gradient of the unembedding, reduced only after the layers"),
        "collective_buffers": Component(waits, "one layer's whole float32 gradients, waiting for their reduction"),
    }


def _embedding_gradient(local: LocalSizes) -> dict[str, Component]:
    whole = 4 * local.table
    both = whole if local.model.tie_embeddings else whole // local.fsdp
    gradients = (local.layer_matrices + local.vectors) * local.gradient_itemsize
    return {
        "gradients": Component(gradients + both, "of the layers, and of the unembedding"),
        "accumulated_gradients": _accumulated(local),
        "collective_buffers": Component(whole + whole // local.fsdp, "whole gradient of the embedding before and after its reduction"),
    }


def _optimizer(local: LocalSizes) -> dict[str, Component]:
    gradients = local.parameters * local.gradient_itemsize
    layers = local.model.num_layers
    copies = 2 * 4 * local.tables // (1 if local.model.tie_embeddings else 2)
    if local.fsdp > 1:
        copies += 4 * layers * (2 * local.mlp_matrix + local.query_matrix) // local.fsdp
    parts = {
        "gradients": Component(gradients, f"all, {local.config.precision.gradients}"),
        "parameter_copies": Component(copies, "transposes between the layouts of gradients and parameters"),
    }
    if local.config.optimizer.kind == "muon":
        whole = 4 * 4 * layers * (local.mlp_matrix + local.query_matrix)
        parts["collective_buffers"] = Component(whole, "Muon: stacks of whole float32 matrices gathered for orthogonalisation")
    return parts
