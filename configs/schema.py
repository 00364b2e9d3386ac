"""The experiment schema: every key a config may hold, its type, range, default and meaning.

Nothing here imports JAX. Two kinds of settings are kept apart because a resume treats them differently:
`model`, `optimizer.kind`, `precision.params` and the tokenizer say *what* is trained (a checkpoint depends on them);
`compute`, `mesh`, `trainer.accumulation`, ... say *how* (they may change at a resume).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MESH_AXES = ("pipeline", "data", "fsdp", "context", "tensor", "expert")
"""Mesh axes, slowest-varying first: `tensor` and `expert` neighbours are neighbours in the device order."""

DType = Literal["float32", "bfloat16", "float16"]
INT32_MAX = 2**31 - 1
"""Token ids, positions and step counters are int32 on the devices."""
PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT32_MAX)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
MeshSize = Annotated[int, Field(ge=-1, le=INT32_MAX)]
LocalPath = Annotated[Path, Field(strict=False)]
"""A path given as text, relative to the working directory."""
Name = Annotated[str, StringConstraints(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def env_allowed(**kwargs: Any) -> Any:
    """Declare a field whose YAML value may use `${env:NAME}` or `${env:NAME,default}`."""
    return Field(json_schema_extra={"env_interpolation": True}, **kwargs)


class Section(BaseModel):
    """Base of every section: unknown keys refused, values immutable, docstrings become field descriptions.

    Strict: "12", 1.5 and true are no integers; an integer is a float.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True)


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the trained context."""

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    """linear: positions divided by `factor`. llama3: the piecewise rule of Llama 3.1. yarn: arXiv 2309.00071."""
    factor: PositiveFloat = 8.0
    """Context extension factor."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3 only: wavelengths above original/low are divided by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3 only: wavelengths below original/high are kept."""
    original_max_seq_len: PositiveInt = 8192
    """Context length the base model was trained with."""


class ModelConfig(Section):
    """What is computed: the architecture. A checkpoint depends on every field here."""

    family: str = "llama"
    """Architecture family; its defaults come from configs/models/families/<family>.yaml."""
    vocab_size: PositiveInt = 32000
    """Number of token ids (V)."""
    pad_vocab_to: PositiveInt | None = None
    """Rows of the embedding table when larger than vocab_size (so that it divides over `tensor`); the extra logits are masked out."""
    num_layers: PositiveInt = 4
    """Transformer blocks (L)."""
    embed_dim: PositiveInt = 256
    """Width of the residual stream (D)."""
    num_heads: PositiveInt = 4
    """Query heads (N)."""
    num_kv_heads: PositiveInt | None = None
    """Key/value heads (K); null means num_heads (multi-head attention)."""
    head_dim: PositiveInt | None = None
    """Width of one head (H); null means embed_dim / num_heads."""
    mlp_dim: PositiveInt = 1024
    """Hidden width of the MLP (F)."""
    max_seq_len: PositiveInt = 2048
    """Longest sequence the model is defined for."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation, applied before attention and MLP and at the end."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance inside the normalisation."""
    position: Literal["rope", "learned"] = "rope"
    """Rotary embedding, or a learned table of max_seq_len rows."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Rotary scaling for long contexts."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """MLP non-linearity."""
    gated_mlp: bool = True
    """True: down(act(gate(x)) * up(x)); false: down(act(up(x)))."""
    attention_bias: bool = False
    """Bias on the query, key and value projections."""
    output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Bias on the MLP projections."""
    qk_norm: bool = False
    """RMSNorm over each query and key head (Qwen3)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output projection."""
    sliding_window: PositiveInt | None = None
    """Each token attends to this many tokens, itself included; null: all earlier tokens."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the normal initialisation (what it applies to is documented per family in models/)."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads with the default resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Head dimension with the default resolved."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.pad_vocab_to or self.vocab_size


class AttentionConfig(Section):
    """Which attention implementation runs. Never changes the mathematical result."""

    backend: str = "auto"
    """auto, reference, xla, chunked, cudnn or pallas (see models/attention). auto: cudnn on a supported GPU, else chunked.
    pallas: for packed documents on GPUs, without a mask in memory."""
    chunk: PositiveInt = 128
    """chunked backend: queries and keys per block. 64-128 suit a CPU's caches; on a GPU without cuDNN try 512."""


class RematConfig(Section):
    """What the backward pass recomputes."""

    policy: str = "none"
    """none, full, dots, attention-only, names (save only `names`) or offload (save `names` in host memory)."""
    names: list[str] = []
    """Checkpoint names of the model (see models/remat) for the policies `names` and `offload`."""


class ComputeConfig(Section):
    """How the step is computed. Free to change at any resume."""

    attention: AttentionConfig = AttentionConfig()
    remat: RematConfig = RematConfig()
    scan_layers: bool = True
    """Scan over stacked layers: compile time independent of depth."""
    scan_unroll: PositiveInt = 1
    """Layers per scan iteration (must divide num_layers)."""
    loss_chunk: PositiveInt = 1024
    """Tokens per chunk of the cross-entropy; [chunk, V] is the largest logits array that exists on a device."""
    tensor_overlap: Literal["gather", "ring"] = "gather"
    """Around products that `tensor` cuts: gather the stream and scatter the sums, or pass parts of it round a ring while others are
    multiplied (models/ring.py), which hides what moves where `tensor` is wide (4 and more) and costs more, smaller messages."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """jax_default_matmul_precision: matters for float32 on GPUs (TF32)."""


class PrecisionConfig(Section):
    """The mixed-precision policy."""

    params: DType = "float32"
    """Master parameters."""
    compute: DType = "bfloat16"
    """Activations and matmul inputs; parameters are cast before they are gathered."""
    matmul: Literal["compute", "fp8", "fp8_delayed", "mxfp8", "nvfp4"] = "compute"
    """Inputs of the layers' products with parameters, forward and backward: the compute dtype; float8 with a scale per tensor (e4m3,
    gradients e5m2), taken from the tensor itself (fp8) or from the steps before (fp8_delayed); or, on NVIDIA's Blackwell and newer, blocks
    of 32 e4m3 (mxfp8), in the forward pass of 16 e2m1 (nvfp4), with a scale each. Embedding, attention scores and unembedding stay in the
    compute dtype."""
    amax_history: PositiveInt = 16
    """fp8_delayed: steps whose largest magnitudes are remembered for the scales."""
    gradients: DType = "float32"
    """Gradient accumulation and reduction across devices."""
    moments: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    """First moments of the optimiser; second moments stay float32. int8 (adamw): both in 8 bits with a scale per 128, for matrices."""
    stochastic_rounding: bool = False
    """Round updated bfloat16 parameters up or down at random instead of to nearest, which loses small updates."""

    @property
    def eight_bit(self) -> bool:
        """Whether the layers' products read float8 with a scale per tensor."""
        return self.matmul in ("fp8", "fp8_delayed")

    @property
    def block_scaled(self) -> Literal["mxfp8", "nvfp4"] | None:
        """The format of block-scaled products."""
        return self.matmul if self.matmul in ("mxfp8", "nvfp4") else None

    @property
    def delayed(self) -> bool:
        """Whether the scales of products come from earlier steps."""
        return self.matmul == "fp8_delayed"


class MeshConfig(Section):
    """Devices per mesh axis. At most one axis may be -1: it takes the devices that are left."""

    pipeline: MeshSize = 1
    """Pipeline stages (only 1 for now)."""
    data: MeshSize = 1
    """Plain data parallelism: parameters replicated."""
    fsdp: MeshSize = -1
    """Fully sharded data parallelism (ZeRO-3)."""
    context: MeshSize = 1
    """Sequence sharding for attention (only 1 for now)."""
    tensor: MeshSize = 1
    """Tensor parallelism, with sequence-parallel norms."""
    expert: MeshSize = 1
    """Expert parallelism (only 1 for now)."""
    rules: dict[str, list[str]] = {}
    """Overrides of the logical-axis rules: logical axis -> mesh axes (see sharding/rules.py)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to configured size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


class DataSource(Section):
    """One prepared corpus (a directory with manifest.json)."""

    path: LocalPath = env_allowed()
    """Directory written by `ridge data prepare`."""
    weight: PositiveFloat = 1.0
    """Share of rows drawn from this source, relative to the other sources."""


class DataConfig(Section):
    """Training data and how rows are made."""

    train: list[DataSource] = []
    """Weighted mixture of prepared corpora."""
    seq_len: PositiveInt = 1024
    """Tokens per row (T)."""
    batch_size: PositiveInt = 8
    """Rows per optimiser step over all devices (B)."""
    shuffle: bool = True
    """Global shuffle of rows, anew each epoch."""
    seed: NonNegativeInt | None = None
    """Seed of the shuffle and the mixture; null: the run's seed."""
    document_masking: bool = True
    """Attention stays within a document (segment ids); false: rows are plain token streams."""
    workers: NonNegativeInt = 0
    """Worker processes; 0 reads in threads of the training process."""
    threads: PositiveInt = 4
    """Reader threads per process."""
    prefetch: PositiveInt = 4
    """Batches prepared ahead."""


class EvaluationConfig(Section):
    """Held-out sets."""

    sets: dict[Name, LocalPath] = env_allowed(default={})
    """Name to prepared corpus."""
    every: NonNegativeInt = 0
    """Steps between evaluations during training; 0: only at the end."""
    batch_size: PositiveInt | None = None
    """Rows per evaluation step over all devices; null: data.batch_size / trainer.accumulation."""
    max_batches: PositiveInt | None = None
    """Cap per set and evaluation during training; null: the whole set. The final evaluation is always whole."""


class OptimizerConfig(Section):
    """The update rule."""

    kind: str = "adamw"
    """adamw, adafactor, lion, muon or sgd."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    b1: DecayRate = 0.9
    """First-moment decay (momentum for sgd and muon)."""
    b2: DecayRate = 0.95
    """Second-moment decay."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    decay: Literal["matrices", "all", "none"] = "matrices"
    """Which parameters decay. matrices: all but norms, biases and other vectors."""
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient-norm limit; null: off."""


class ScheduleConfig(Section):
    """Learning rate over steps."""

    kind: str = "cosine"
    """constant, linear, cosine or wsd (warm-up, stable, decay)."""
    warmup_steps: NonNegativeInt = 0
    """Linear warm-up from 0."""
    decay_fraction: Fraction = 0.1
    """wsd only: last share of the steps over which the rate falls."""
    final_fraction: Fraction = 0.1
    """Final learning rate as a share of the peak."""


class LossConfig(Section):
    """The objective."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 per token (PaLM, arXiv 2204.02311, section 5)."""


class TrainerConfig(Section):
    """The training loop."""

    steps: PositiveInt = 1000
    """Optimiser steps of the whole run."""
    accumulation: PositiveInt = 1
    """Microbatches per optimiser step; must divide data.batch_size."""
    log_every: PositiveInt = 10
    """Steps between log lines and metric records."""
    max_bad_steps: PositiveInt = 10
    """Stop after this many non-finite steps in a row (each is skipped and counted; none is saved)."""
    hang_timeout_s: PositiveFloat | None = 1800.0
    """End the process (exit code 71, stacks in the run directory) when no step finishes for this long, and for 20 usual steps; null: never.
    Start-up, saves and the end of a run may take ten times as long."""
    stop_after_s: PositiveFloat | None = None
    """Stop cleanly (saving) after this much wall time in the loop; null: off."""


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every: NonNegativeInt = 500
    """Steps between permanent-cadence saves; 0: off."""
    every_minutes: NonNegativeFloat = 0.0
    """Minutes between time-based saves; 0: off."""
    keep_last: PositiveInt = 2
    """Most recent checkpoints kept; with 1, the one before the newest stays until the next save."""
    keep_every: NonNegativeInt = 0
    """Also keep every checkpoint whose step is a multiple of this; 0: off."""
    final: bool = True
    """Save at the last step."""
    asynchronous: bool = True
    """Write in the background while training continues."""
    verify: bool = True
    """Verify the integrity manifest before a restore."""
    max_failures: PositiveInt = 3
    """Consecutive failing saves after which the run stops."""


class LoggingConfig(Section):
    """Where metrics go. metrics.jsonl is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to <run_dir>/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; null: off (needs the extra `wandb`)."""


class ProfilerConfig(Section):
    """XLA profile capture. On demand: SIGUSR1, or a file `profile` in the run directory."""

    start_step: NonNegativeInt | None = None
    """First profiled step; null: only on demand."""
    num_steps: PositiveInt = 3
    """Steps per capture."""


class RuntimeConfig(Section):
    """The process and its devices."""

    platform: Literal["auto", "cpu", "cuda", "rocm"] = "auto"
    """auto: what JAX finds, GPUs first."""
    cpu_devices: PositiveInt = 1
    """Virtual devices per process on the cpu platform."""
    compilation_cache: LocalPath | None = env_allowed(default=None)
    """Directory of compiled programs, shared by all processes: a second start of the same config compiles nothing; null: off."""
    rendezvous_timeout_s: PositiveFloat = 120.0
    """Longest wait for the other processes of the run to report before training; who is missing is then named."""


class Config(Section):
    """A whole experiment."""

    name: Name = "run"
    """Name of the run."""
    seed: NonNegativeInt = 0
    """Seed of initialisation and, unless data.seed is set, of the data order."""
    run_dir: LocalPath | None = env_allowed(default=None)
    """Run directory; null: runs/<name>."""
    init_from: LocalPath | None = env_allowed(default=None)
    """Start from the parameters of this run directory or Hugging Face directory (while the run has no checkpoint); null: random."""
    model: ModelConfig = ModelConfig()
    compute: ComputeConfig = ComputeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def directory(self) -> Path:
        """The run directory with the default resolved."""
        return self.run_dir or Path("runs") / self.name
