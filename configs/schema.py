"""The experiment schema: every key of a config with its type, range, default and meaning.

A resume treats two kinds of settings differently (configs/diff.py): `model`, `optimizer.kind`, `precision.params` and the tokenizer define
what is trained, so a checkpoint fixes them; `compute`, `mesh`, `trainer.accumulation` and others define how it is computed, and may change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ridgeline.configs.fault_schema import CorruptionCheckConfig, ElasticConfig, LossSpikesConfig, StragglersConfig
from ridgeline.configs.model_schema import DType, ModelConfig
from ridgeline.configs.remat import POLICIES, policy_help
from ridgeline.configs.section import (
    DecayRate,
    Fraction,
    LocalPath,
    MeshSize,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    env_allowed,
)
from ridgeline.configs.tuning_schema import DistillationConfig, LoraConfig, PolicyConfig, PreferenceConfig

MESH_AXES = ("pipeline", "data", "fsdp", "context", "tensor", "expert")
"""Mesh axes, slowest-varying first: neighbors along `tensor` and `expert` are neighbors in the device order."""


class AttentionConfig(Section):
    """The attention implementation. All of them compute the same function."""

    backend: str = "auto"
    """auto, reference, xla, chunked, cudnn or pallas (models/attention). auto, on a supported GPU: cudnn for rows of one document, pallas
    for packed documents; else chunked. The memory of reference and xla grows with the square of the row length; auto never takes them."""
    context: str = "auto"
    """Attention over a sequence sharded over mesh.context: ring (keys and values travel around the devices), all_to_all
    (each device gets the whole row of some heads; runs any backend), or auto: the one that moves fewer bytes."""
    chunk: PositiveInt = 128
    """chunked backend only: queries and keys per block. 64 to 128 fit a CPU's caches; on a GPU without cuDNN try 512."""


class RematConfig(Section):
    """Rematerialization: which values of a block the backward pass computes again instead of keeping them (configs/remat.py)."""

    policy: str = Field(default="none", description=policy_help())
    names: list[str] = []
    """Values to keep, for the policies `names` and `offload`."""

    @property
    def takes_names(self) -> bool:
        """Whether `names` lists the values that are kept."""
        return POLICIES[self.policy].takes_names

    @property
    def offloads(self) -> bool:
        """Whether the values that are kept are in host memory."""
        return self.policy == "offload"


class ExpertsConfig(Section):
    """How the experts of model.moe are computed."""

    capacity_factor: PositiveFloat | None = None
    """Most tokens of a device's microbatch that each expert processes, over the mean: later ones are dropped and counted. null: no
    token is dropped."""
    exchange: str = "auto"
    """How tokens come to the experts of other devices (mesh.expert): gather (every device of the axis receives all), all_to_all (those
    that chose its experts, once each); auto is all_to_all where mesh.expert is larger than model.moe.experts_per_token, times
    capacity_factor if there is one."""


class ComputeConfig(Section):
    """How the step is computed. May change at any resume."""

    attention: AttentionConfig = AttentionConfig()
    """The attention implementation."""
    remat: RematConfig = RematConfig()
    """What the backward pass recomputes."""
    experts: ExpertsConfig = ExpertsConfig()
    """The experts of model.moe."""
    scan_layers: bool = True
    """Run the layers as a scan over stacked parameters, so that compile time does not grow with depth."""
    scan_unroll: PositiveInt = 1
    """Layers per scan iteration; must divide model.num_layers."""
    loss_chunk: PositiveInt = 1024
    """Tokens per chunk of the cross-entropy. The largest array of logits on a device is [loss_chunk, V]."""
    tensor_overlap: Literal["gather", "ring"] = "gather"
    """Communication of matmuls that are sharded over `tensor`. gather: all-gather the residual stream before, reduce-scatter after.
    ring: send shards around a ring while others are multiplied (models/matmul/collective.py); this overlaps communication where `tensor`
    is 4 or more, at the cost of more, smaller messages."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """jax_default_matmul_precision. It affects float32 matmuls on GPUs: default and high use TF32, highest does not."""

    @property
    def reduces_unembedding_first(self) -> bool:
        """Whether the unembedding's gradient is reduced before the layers' backward pass: less memory, but nothing to overlap it with.

        So with offloading, which is chosen where memory is short.
        """
        return self.remat.offloads


class PrecisionConfig(Section):
    """dtypes of parameters, activations, gradients and optimizer state."""

    params: DType = "float32"
    """Master parameters."""
    compute: DType = "bfloat16"
    """Activations and matmul inputs. Parameters are cast to it before they are gathered."""
    matmul: Literal["compute", "fp8", "fp8_delayed", "mxfp8", "nvfp4"] = "compute"
    """Inputs of the layers' matmuls with parameters, forward and backward. compute: the compute dtype. fp8: float8 (e4m3, gradients e5m2)
    with one scale per tensor, computed from the tensor. fp8_delayed: the same with scales from the amax history of earlier steps. mxfp8:
    blocks of 32 e4m3 elements with one scale each; nvfp4: blocks of 16 e2m1 elements in the forward pass, else mxfp8 (both need NVIDIA
    Blackwell or newer). Embedding, attention scores and unembedding stay in the compute dtype. Experts: fp8 and fp8_delayed, with one
    scale per expert's matrix, and in both with scales of their inputs and gradients computed from the tensor."""
    amax_history: PositiveInt = 16
    """fp8_delayed only: number of earlier steps whose amax (largest magnitude) determines the scale."""
    gradients: DType = "float32"
    """Accumulation of gradients over microbatches and their reduction over devices."""
    moments: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    """First moments of the optimizer; second moments stay float32. int8 (adamw only): both moments of matrices in 8 bits, with one scale
    per block of up to 128 elements."""
    stochastic_rounding: bool = False
    """Round updated bfloat16 parameters stochastically. Rounding to nearest loses updates that are small relative to the parameter."""

    @property
    def eight_bit(self) -> bool:
        """Whether the layers' matmuls use float8 with one scale per tensor."""
        return self.matmul in ("fp8", "fp8_delayed")

    @property
    def gathers_8_bit(self) -> bool:
        """Whether the layers' matrices are quantized before they are gathered, with one byte per element."""
        return self.eight_bit or self.matmul == "mxfp8"

    @property
    def block_scaled(self) -> Literal["mxfp8", "nvfp4"] | None:
        """The format of block-scaled matmuls; None: they are not block-scaled."""
        return self.matmul if self.matmul in ("mxfp8", "nvfp4") else None

    @property
    def delayed(self) -> bool:
        """Whether the scales of matmul inputs come from earlier steps."""
        return self.matmul == "fp8_delayed"


class MeshConfig(Section):
    """Devices per mesh axis. At most one axis may be -1: it gets the remaining devices."""

    pipeline: MeshSize = 1
    """Stages of layers (pipeline parallelism, 1F1B). The microbatches of trainer.accumulation pass through them."""
    data: MeshSize = 1
    """Data parallelism with replicated parameters; with `fsdp`, hybrid sharding (HSDP)."""
    fsdp: MeshSize = -1
    """Fully sharded data parallelism (ZeRO stage 3)."""
    context: MeshSize = 1
    """Sequence sharding (context parallelism), by the method of compute.attention.context."""
    tensor: MeshSize = 1
    """Tensor parallelism, with the residual stream sharded along the sequence between blocks (sequence parallelism)."""
    expert: MeshSize = 1
    """Expert parallelism: each device has whole experts of model.moe. The rest of the model uses the axis as a further fsdp axis."""
    zero_stage: Literal[0, 2] = 0
    """What `data` shards besides the batch. 0: nothing. 2: gradients, optimizer state and its update (ZeRO stage 2, arXiv 1910.02054); the
    updated parameters are gathered once per step. With `pipeline` gradients are sharded only after the last microbatch. Stage 3 is `fsdp`;
    stage 1 would keep more and move no less."""
    pipeline_chunks: PositiveInt = 1
    """Chunks of layers per stage (interleaved schedule, arXiv 2104.04473): n of them divide the bubble by about n."""
    rules: dict[str, list[str]] = {}
    """Changes to the sharding rules: logical axis -> mesh axes, [] for replicated (defaults: sharding/rules.py)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to configured size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


class DataSource(Section):
    """One prepared corpus."""

    path: LocalPath = env_allowed()
    """Directory written by `ridge data prepare` (it has a manifest.json)."""
    weight: PositiveFloat = 1.0
    """Share of the rows drawn from this corpus, relative to the weights of the others."""
    teacher: LocalPath | None = env_allowed(default=None)
    """Directory with a teacher's predictions of this corpus, written by `ridge data teacher`; only with distillation.weight."""


class CurriculumEntry(Section):
    """A change of the mixture during training."""

    step: NonNegativeInt
    """First step with these weights."""
    weights: list[NonNegativeFloat]
    """One weight per corpus, in the order of data.train; 0: none of its rows."""
    linear: bool = False
    """true: the weights change linearly to these from those of the entry before (data.train, if it is the first), over the steps between
    both entries. false: they change at `step`."""


class DataConfig(Section):
    """Training data and how its rows are formed."""

    train: list[DataSource] = []
    """Prepared corpora, mixed by weight."""
    curriculum: list[CurriculumEntry] = []
    """Other weights from given steps on, such as [{step: 8000, weights: [1, 4]}]. Before the first entry, those of data.train."""
    seq_len: PositiveInt = 1024
    """Tokens per row (T)."""
    batch_size: PositiveInt = 8
    """Rows per optimizer step, over all devices and microbatches (B)."""
    shuffle: bool = True
    """Shuffle the rows of each corpus globally, in a new order each epoch."""
    seed: NonNegativeInt | None = None
    """Seed of the shuffle and the mixture; null: the config's `seed`."""
    document_masking: bool = True
    """true: tokens attend only within their document (segment ids). false: a row is one sequence."""
    workers: NonNegativeInt = 0
    """Worker processes of the loader; 0: the training process reads in threads."""
    threads: PositiveInt = 4
    """Reader threads per process."""
    prefetch: PositiveInt = 4
    """Number of batches prepared ahead."""


class TasksConfig(Section):
    """Tasks of lm-evaluation-harness during training (extra `eval`)."""

    names: list[str] = []
    """Tasks or groups of the harness, or of `directory`."""
    directory: LocalPath | None = env_allowed(default=None)
    """Directory with task files of your own."""
    every: NonNegativeInt = 0
    """Steps between evaluations on the tasks; 0: only at the end."""
    limit: PositiveInt | None = None
    """Samples per task; null: all."""
    batch_size: PositiveInt = 32
    """Rows at a time, rounded up to fit the mesh."""


class SamplesConfig(Section):
    """Texts that the model samples during training, written to TensorBoard and to events.jsonl."""

    prompts: list[str] = []
    """Texts to continue; an empty text is the start of a document."""
    file: LocalPath | None = env_allowed(default=None)
    """File of further prompts, as `ridge generate --prompts` reads it."""
    every: NonNegativeInt = 0
    """Steps between samples; 0: only at the end."""
    chat: bool = False
    """Write each prompt with the chat template of the tokenizer, as a message of the user."""
    max_tokens: PositiveInt = 64
    """Largest number of new tokens of a sample."""
    temperature: NonNegativeFloat = 0.8
    """0: always the most likely token."""
    top_k: PositiveInt | None = None
    """Sample from the k most likely tokens; null: all."""
    top_p: PositiveFloat | None = None
    """Sample from the most likely tokens whose probabilities sum to this value; null: all."""
    seed: NonNegativeInt = 0
    """Seed of the samples, the same at each step."""

    @property
    def wanted(self) -> bool:
        """Whether there are prompts."""
        return bool(self.prompts) or self.file is not None


class EvaluationConfig(Section):
    """Evaluation on held-out corpora, on tasks, and by samples."""

    sets: dict[Name, LocalPath] = env_allowed(default={})
    """Name of each evaluation set to the directory of its prepared corpus."""
    every: NonNegativeInt = 0
    """Steps between evaluations during training; 0: only at the end."""
    batch_size: PositiveInt | None = None
    """Rows per evaluation step, over all devices; null: data.batch_size / trainer.accumulation."""
    max_batches: PositiveInt | None = None
    """Most batches per set in an evaluation during training; null: the whole set. The final evaluation always uses the whole set."""
    tasks: TasksConfig = TasksConfig()
    samples: SamplesConfig = SamplesConfig()


class OptimizerConfig(Section):
    """The update rule."""

    kind: str = "adamw"
    """adamw, adafactor, lion, muon or sgd."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    b1: DecayRate = 0.9
    """Decay of the first moment (momentum of sgd and muon)."""
    b2: DecayRate = 0.95
    """Decay of the second moment. The default is that of the GPT-3 and Llama papers."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay."""
    decay: Literal["matrices", "all", "none"] = "matrices"
    """Parameters that weight decay applies to. matrices: all but norms, biases and other vectors."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global norm of the gradient; a larger gradient is scaled down to it. null: no clipping."""
    skip_norm: PositiveFloat | None = None
    """Global norm of the gradient (before clipping) above which the update of a step is skipped, as that of a step that is not finite;
    null: only steps that are not finite are skipped. trainer.max_bad_steps in a row end the run."""
    offload: bool = False
    """Keep the optimizer state in the pinned memory of the host between steps. In the update the state of one parameter after the other
    is copied to the device and back (trainer/offload.py): less device memory, for copies over the host link in every step."""


class ScheduleConfig(Section):
    """Learning rate as a function of the step."""

    kind: str = "cosine"
    """constant, linear, cosine or wsd (warmup, stable, decay)."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup. Step s (from 0) has the fraction f + (1 - f) (s + 1) / (warmup_steps + 1) of the peak, f is
    initial_fraction."""
    initial_fraction: Fraction = 0.0
    """Learning rate from which the warmup begins, as a fraction of the peak."""
    decay_fraction: Fraction = 0.1
    """wsd only: the last fraction of the steps, in which the learning rate falls."""
    final_fraction: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""


class LossConfig(Section):
    """The training objective."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 per token, which keeps the logits small (PaLM, arXiv 2204.02311, section 5); 0: off."""
    load_balance: NonNegativeFloat = 1e-3
    """model.moe only: weight of the load-balancing loss, summed over layers (Switch, arXiv 2101.03961, equation 4, of each row of tokens);
    0: off."""
    router_z_loss: NonNegativeFloat = 0.0
    """model.moe only: weight of log(Z)^2 of the router's logits per token, summed over layers (ST-MoE, arXiv 2202.08906, equation 5);
    0: off."""
    router_bias_rate: NonNegativeFloat = 1e-3
    """model.moe.choice_bias only: step by which each step raises the bias of experts with less than the mean load and lowers that of the
    others (arXiv 2408.15664)."""
    mtp_weight: PositiveFloat = 0.3
    """model.mtp_layers only: weight of the mean over the modules of their cross-entropy, each divided by the target tokens of the main loss
    (arXiv 2412.19437, equations 24 and 25). DeepSeek V3: 0.3, and 0.1 after 10T of 14.8T tokens."""


class DeadlinesConfig(Section):
    """How long each phase may make no progress before the watchdog ends the process (code 71). trainer.hang_timeout_s=null: never."""

    startup_s: PositiveFloat = 7200.0
    """Seconds to create or restore the state."""
    compile_s: PositiveFloat = 7200.0
    """Seconds to compile the train step, and then to wait for the other processes to compile theirs."""
    step_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 20.0
    """A step may take this many times the median of the recent steps, but at least trainer.hang_timeout_s."""
    evaluation_s: PositiveFloat = 1800.0
    """Seconds for a batch of an evaluation, or of generated samples; the first one compiles."""
    save_s: PositiveFloat = 3600.0
    """Seconds that a save may stop training, the wait for an earlier save included; and for the end of a run, which waits for its last
    save."""


class TrainerConfig(Section):
    """The training loop."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    accumulation: PositiveInt = 1
    """Microbatches per optimizer step (gradient accumulation); must divide data.batch_size."""
    log_every: PositiveInt = 10
    """Steps between log lines and metric records."""
    max_bad_steps: PositiveInt = 10
    """Stop after this many consecutive steps with a non-finite loss or gradient. Each such step is skipped and counted, and its state
    is not saved."""
    hang_timeout_s: PositiveFloat | None = 1800.0
    """Seconds without a finished step after which the process exits (code 71; in the run directory stacks.N.txt has the stacks of its
    threads, hang.N.txt of start N what all processes did and which one is suspect), but at least trainer.deadlines.step_factor times the
    usual step. null: no phase has a deadline."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    stop_after_s: PositiveFloat | None = None
    """Seconds in the training loop after which the run saves and stops; null: no limit."""


class LocalCheckpointConfig(Section):
    """Frequent checkpoints on a disk or in memory of each node, beside those in the run directory (docs/guides/checkpoints.md)."""

    directory: LocalPath | None = env_allowed(default=None)
    """Directory that each node has for itself, such as /local/scratch or /dev/shm; null: no local checkpoints."""
    every: PositiveInt = 50
    """Steps between local saves. One that is due while the previous one is being written is skipped."""
    keep: PositiveInt = 1
    """Number of most recent local checkpoints to keep."""
    neighbor: bool = True
    """Send a copy of each node's part to the next node, so that a lost node's part is not lost."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept."""

    every: NonNegativeInt = 500
    """Steps between saves; 0: none by step."""
    every_minutes: NonNegativeFloat = 0.0
    """Minutes between additional saves by time; 0: none by time."""
    keep_last: PositiveInt = 2
    """Number of most recent checkpoints to keep. Two, so that a damaged one has a predecessor; with 1, the predecessor stays until the next
    save."""
    keep_every: NonNegativeInt = 0
    """Also keep each checkpoint whose step is a multiple of this; 0: none."""
    keep_best: NonNegativeInt = 0
    """Also keep this many checkpoints with the least loss of an evaluation set, evaluated at the step of the save; 0: none."""
    best_set: str | None = None
    """Evaluation set whose loss counts for keep_best; null: the first one."""
    keep_set_aside: NonNegativeInt = 4
    """Number of set-aside checkpoints (damaged, incomplete, or superseded by a restart from an earlier step) to keep, the newest ones. Each
    save deletes the others."""
    final: bool = True
    """Save at the last step."""
    asynchronous: bool = True
    """Write in the background while training continues."""
    verify: bool = True
    """Verify the checksums of the integrity manifest before a restore."""
    max_failures: PositiveInt = 3
    """Consecutive failed saves after which the run stops."""
    copy_to: str | None = None
    """URL to which each checkpoint is copied in the background, such as s3://bucket/run (fsspec; extra `remote`); null: no copies. One URL
    per run. Copies follow the same retention. A failed copy is reported and does not stop training."""
    local: LocalCheckpointConfig = LocalCheckpointConfig()
    """Frequent checkpoints on each node's own disk; off unless checkpoint.local.directory is set."""


class LoggingConfig(Section):
    """Where metrics are written, in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to <run_dir>/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project (needs the extra `wandb`); null: off."""
    writers: list[str] = []
    """Metric writers of installed packages (docs/guides/python.md), in addition to the others."""
    metrics: list[str] = []
    """Metrics of installed packages, computed from the others of a log line."""


class ProfilerConfig(Section):
    """Capture of XLA profiles. A capture can also be requested with SIGUSR1 or a file `profile` in the run directory."""

    start_step: NonNegativeInt | None = None
    """First profiled step; null: only on request."""
    num_steps: PositiveInt = 3
    """Steps per capture."""


class RuntimeConfig(Section):
    """The process and its devices."""

    platform: Literal["auto", "cpu", "cuda", "rocm"] = "auto"
    """JAX platform. auto: JAX's own choice, GPUs first."""
    cpu_devices: PositiveInt = 1
    """Virtual devices per process on the cpu platform."""
    compilation_cache: LocalPath | None = env_allowed(default=None)
    """Directory of compiled programs, shared by all processes, from which a second start of the same config loads them; null: no cache."""
    deterministic: bool = False
    """Bitwise repeatable steps on NVIDIA GPUs, but slower: deterministic operations of XLA, kernel choices stored in the run directory."""
    rendezvous_timeout_s: PositiveFloat = 120.0
    """Seconds to wait for all processes of the run to report before training. After that the missing ranks are listed."""
    lease_timeout_s: PositiveFloat = 30.0
    """Another start may take over the run directory when its holder gave no sign of life for this many seconds."""


class Config(Section):
    """One experiment."""

    name: Name = "run"
    """Name of the run."""
    seed: NonNegativeInt = 0
    """Seed of the initialization and, unless data.seed is set, of the data order."""
    run_dir: LocalPath | None = env_allowed(default=None)
    """Run directory; null: runs/<name>."""
    init_from: LocalPath | None = env_allowed(default=None)
    """Run directory or Hugging Face directory whose parameters the run starts from, while it has no checkpoint; null: random ones.
    Its model section may differ in rope_theta, rope_scaling and max_seq_len (longer rows)."""
    init_optimizer: bool = False
    """Take the optimizer state (moments and their counts) of the run at init_from too. It must have the same optimizer.kind and
    precision.moments."""
    model: ModelConfig = ModelConfig()
    """The architecture."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; off unless lora.rank is set."""
    compute: ComputeConfig = ComputeConfig()
    """How the step is computed."""
    precision: PrecisionConfig = PrecisionConfig()
    """dtypes of parameters, activations, gradients and optimizer state."""
    mesh: MeshConfig = MeshConfig()
    """Devices per mesh axis, and sharding rules."""
    data: DataConfig = DataConfig()
    """Training data and batch."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation sets and when they are evaluated."""
    loss: LossConfig = LossConfig()
    """The training objective."""
    preference: PreferenceConfig = PreferenceConfig()
    """Preference pairs (DPO); off unless preference.loss is set."""
    distillation: DistillationConfig = DistillationConfig()
    """A teacher's predictions; off unless distillation.weight is set."""
    policy: PolicyConfig = PolicyConfig()
    """Policy updates on rollouts (GRPO); off unless policy.loss is set."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate as a function of the step."""
    trainer: TrainerConfig = TrainerConfig()
    """The training loop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved, and which are kept."""
    logging: LoggingConfig = LoggingConfig()
    """Where metrics are written."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Capture of XLA profiles."""
    corruption_check: CorruptionCheckConfig = CorruptionCheckConfig()
    """Detection of silent data corruption; off unless corruption_check.every is set."""
    stragglers: StragglersConfig = StragglersConfig()
    """Detection of slow ranks."""
    loss_spikes: LossSpikesConfig = LossSpikesConfig()
    """Detection of loss spikes, and what is done about them."""
    elastic: ElasticConfig = ElasticConfig()
    """Fewer nodes after failures, and spare nodes."""
    runtime: RuntimeConfig = RuntimeConfig()
    """The process and its devices."""

    @property
    def directory(self) -> Path:
        """The run directory, with the default resolved."""
        return self.run_dir or Path("runs") / self.name
