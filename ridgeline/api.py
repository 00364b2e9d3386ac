"""The Python API. `import ridgeline` offers everything here; JAX is imported by the functions that compute, not before.

    import ridgeline

    config = ridgeline.load_config("configs/quickstart.yaml", {"trainer.steps": 100})
    result = ridgeline.train(config)
    result.metrics["train/loss"], result.evaluation["validation"].perplexity
    ridgeline.generate(result.directory, ["def "])

Errors are exceptions: `UserError` for everything that the caller can correct, and those that each function lists.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import Config
from ridgeline.launch.cuda_plugin import hide_unusable_cuda_plugin
from ridgeline.loaders.rollouts import Rollout
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.plan import Plan, make_plan
from ridgeline.planner.search import Limits
from ridgeline.rundir.directory import CONFIG_FILE, RunDir
from ridgeline.trainer.failures import CheckpointError, NumericalFailure

if TYPE_CHECKING:
    from ridgeline.launch.cluster import Cluster, Joined
    from ridgeline.launch.environment import Setting
    from ridgeline.loaders.prompts import Prompt
    from ridgeline.loaders.teacher import TeacherManifest
    from ridgeline.trainer.evaluation import ProgressCallback, Result, SetResult
    from ridgeline.trainer.harness import TaskMetric
    from ridgeline.trainer.nan_search import NanReport
    from ridgeline.trainer.policy import PolicyTrainer

hide_unusable_cuda_plugin()

__all__ = [
    "CheckpointError",
    "Config",
    "Evaluation",
    "Generation",
    "NumericalFailure",
    "Plan",
    "Rollout",
    "RunDir",
    "TaskEvaluation",
    "TrainResult",
    "TrainingStopped",
    "UserError",
    "evaluate",
    "evaluate_tasks",
    "find_nan",
    "generate",
    "load_config",
    "open_policy",
    "open_run",
    "plan",
    "train",
    "write_teacher",
]

DEFAULT_MAX_TOKENS = 200
"""Largest number of new tokens of `generate` by default, where the model's length allows it."""
LARGEST_HF_SEQ_LEN = 2048
"""Tokens per row of an evaluation of a Hugging Face model by default, where its length allows it."""


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended."""

    step: int
    """Steps taken in total, earlier starts included."""
    finished: bool
    """Whether the last step was reached; otherwise `trainer.stop_after_s` ended the run, and the same call resumes it."""
    metrics: dict[str, float]
    """The last value of every metric of the run (docs/METRICS.md)."""
    evaluation: dict[str, Result]
    """Set -> result of the last evaluation of this call; empty when there was none."""
    directory: Path
    """The run directory."""

    @property
    def run(self) -> RunDir:
        """The run directory, opened."""
        return RunDir.open(self.directory)


class TrainingStopped(Exception):
    """SIGINT (Ctrl-C) or SIGTERM stopped a call of `train`. The state is saved; the same call resumes the run."""

    def __init__(self, signal_name: str, step: int | None) -> None:
        super().__init__(f"stopped by {signal_name} " + ("before the first step" if step is None else f"at step {step}"))
        self.signal_name = signal_name
        self.step = step
        """Steps taken in total; None: stopped before the first step of this call, with nothing to save."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    sets: dict[str, SetResult]
    """Set -> loss, perplexity, bits per byte and more (trainer/evaluation.py)."""
    step: int | None
    """Of the checkpoint; None for a Hugging Face directory."""
    config_sha256: str | None = None
    """Digest of the run's config; None for a Hugging Face directory."""
    devices: str = ""
    """What computed it, in words."""
    notes: tuple[str, ...] = ()
    """Facts that a reader of the figures must know."""


@dataclass(frozen=True)
class TaskEvaluation:
    """The result of `evaluate_tasks`."""

    metrics: list[TaskMetric]
    """Every metric of every task (trainer/harness.py)."""
    step: int | None
    """Of the checkpoint; None for a Hugging Face directory."""
    config_sha256: str | None = None
    """Digest of the run's config; None for a Hugging Face directory."""
    devices: str = ""
    """What computed it, in words."""


@dataclass(frozen=True)
class Generation:
    """One sampled text."""

    prompt: str
    """As given, or as the chat template writes it."""
    text: str
    """The new text, without the prompt."""
    tokens: int
    """Number of new tokens."""
    stopped_by: str
    """What ended it: `eos` or `length`."""
    step: int | None = None
    """Of the checkpoint; None for a Hugging Face directory."""
    config_sha256: str | None = None
    """Digest of the run's config; None for a Hugging Face directory."""
    devices: str = ""
    """What computed it, in words."""


def load_config(config: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Config:
    """Load a config file, or a shipped config by name (`models/gpt2`).

    overrides: {"trainer.steps": 200} or ["trainer.steps=200"].
    Raises UserError, with file and line or override, for every error that can be found without knowing the devices.
    """
    return load(config, _override_texts(overrides)).config


def _override_texts(overrides: Mapping[str, Any] | Iterable[str]) -> list[str]:
    if isinstance(overrides, str):
        raise UserError(f"overrides='{overrides}' must be a mapping or a list of strings, as in ['{overrides}']")
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)


def plan(
    config: Config,
    *,
    cluster: str | ClusterConfig,
    nodes: int | Sequence[int] = 1,
    objective: Literal["time", "cost", "efficiency"] = "time",
    budget_usd: float | None = None,
    deadline_days: float | None = None,
    tokens: float | None = None,
    top: int = 3,
    calibration: str | None = None,
) -> Plan:
    """Find the best layouts of a config on a cluster, without a GPU and without JAX (`ridge plan`).

    Args:
      cluster: name of a shipped cluster, a YAML file, or a cluster.
      nodes: node counts to compare.
      objective: time: earliest end; cost: least money; efficiency: most tokens/s per device.
      budget_usd, deadline_days: limits of the run, failures included.
      tokens: of the run; None: trainer.steps x batch size x sequence length.
      top: number of layouts in `Plan.best`.
      calibration: file of `ridge calibrate`; None: published rates.

    Raises UserError when nothing fits or nothing is within the limits.
    """
    return make_plan(
        config,
        cluster if isinstance(cluster, ClusterConfig) else load_cluster(cluster).config,
        load_calibration(calibration),
        [nodes] if isinstance(nodes, int) else nodes,
        tokens=tokens,
        objective=objective,
        limits=Limits(budget_usd, deadline_days),
        top=top,
    )


def train(config: Config, *, from_step: int | None = None) -> TrainResult:
    """Start a run in `config.directory`, or resume the one that is there, and train to its last step.

    Call it in the main thread, in each process of the run; processes find each other as under `ridge train`. Settings of the runtime
    (`runtime.platform`, `runtime.cpu_devices`) and of the environment apply only before JAX computes anything in this process.

    from_step: resume from the checkpoint of this step instead of the newest, and set later ones aside.

    If another start takes the run directory over meanwhile, this process ends at once (exit code 76), so that nothing more is written.

    Raises:
      UserError: bad input.
      TrainingStopped: SIGINT or SIGTERM; the state is saved.
      NumericalFailure: too many steps in a row were not finite; `.steps` are the saved steps.
      CheckpointError: checkpoints cannot be saved or loaded.
      ridgeline.launch.cluster.ClusterError, Preempted: the processes of the run could not connect.
    """
    from ridgeline.launch import cluster, environment
    from ridgeline.launch.slurm.state import job_has_ended
    from ridgeline.trainer.stop import Stop, StopRequested

    stop, link = Stop().install(), cluster.Link()
    try:
        here = cluster.describe(os.environ, flags=cluster.Flags(None, None, None), platform=config.runtime.platform)
        settings = environment.prepare(config, here)
        _check_virtual_devices(config)
        joined, link = cluster.join(here, config, stop=stop)
        stop.check()
        loading_s = time.monotonic()
        from ridgeline.explain.trace.background import start as start_analysis
        from ridgeline.trainer import run
        from ridgeline.trainer.checkpoint import directories

        outcome = run.train(
            config,
            command=sys.argv,
            before=[*joined.stretches, ("import", loading_s, time.monotonic())],
            facts=start_facts(here, joined, settings),
            stop=stop,
            analyze=start_analysis,
            from_step=from_step,
            link=link,
            job_ended=job_has_ended,
        )
    except StopRequested as request:
        raise TrainingStopped(request.signal.name, None) from None
    finally:
        link.close()
        stop.uninstall()
    if outcome is not None and outcome.stopped_by is not None:
        raise TrainingStopped(outcome.stopped_by.name, outcome.steps)
    metrics: dict[str, float] = {}
    for line in RunDir(config.directory).metrics:
        metrics.update(line)
    metrics = {name: value for name, value in metrics.items() if "/" in name}
    if outcome is None:  # complete before this call
        return TrainResult(directories.complete_steps(config.directory / "checkpoints")[-1], True, metrics, {}, config.directory)
    return TrainResult(outcome.steps, outcome.finished, metrics, outcome.evaluation, config.directory)


def start_facts(here: Cluster, joined: Joined, settings: Sequence[Setting]) -> dict[str, dict[str, Any]]:
    """Return the events of a start: how the processes were found and connected, and the settings of the environment."""
    return {
        "cluster": {"described": asdict(here), "joined": asdict(joined)},
        "environment": {"settings": [asdict(setting) for setting in settings]},
    }


def _check_virtual_devices(config: Config) -> None:
    """Raise UserError when runtime.cpu_devices can no longer be set, because JAX has its devices."""
    jax = sys.modules.get("jax")
    if jax is None or config.runtime.cpu_devices == 1 or not jax._src.xla_bridge.backends_are_initialized():
        return
    if len(jax.devices()) != config.runtime.cpu_devices:
        raise UserError(
            f"runtime.cpu_devices={config.runtime.cpu_devices}: JAX already has {len(jax.devices())} devices in this process; "
            "start a new process"
        )


def open_policy(config: Config) -> PolicyTrainer:
    """Start a run of policy updates (`policy.loss`) in `config.directory`, or resume the one that is there; docs/guides/rl.md.

        with ridgeline.open_policy(config) as policy:
            policy.update([ridgeline.Rollout(prompt, completion, reward, group), ...])
            policy.export("weights")  # for the inference server

    Raises UserError: bad input; CheckpointError: checkpoints cannot be loaded.
    """
    from ridgeline.trainer.policy import PolicyTrainer

    _use_virtual_devices(config)
    return PolicyTrainer(config, command=sys.argv, log=lambda line: print(line, file=sys.stderr))


def open_run(path: str | Path) -> RunDir:
    """Open a run directory: its config, metrics, events, plan and more, each read at first use.

    Raises UserError when `path` is no run directory, and later for each file that is damaged.
    """
    return RunDir.open(Path(path))


def evaluate(
    model: str | Path,
    sets: Mapping[str, str | Path] | None = None,
    *,
    step: int | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Compute loss, perplexity and bits per byte of a run or a Hugging Face directory on whole prepared corpora.

    The model is sharded over all devices that the config's mesh names, or over the largest smaller mesh that this process has. The mesh
    of a Hugging Face directory is mesh.fsdp=-1: all devices.

    Args:
      model: run directory, or Hugging Face directory.
      sets: name -> directory of a prepared corpus; None: the run's evaluation sets.
      step: checkpoint of the run; None: the newest valid one.
      seq_len: tokens per row; None: the run's; for a Hugging Face model its maximum, up to 2,048.
      batch_size: rows per step, rounded up to a multiple of the devices that share the batch; None: the run's, or 8.
      overrides: another mesh than the run's, as in `load_config`: {"mesh.tensor": 8, "mesh.fsdp": 1}.
      progress: receives the progress (trainer.evaluation).

    Raises UserError: no model or checkpoint, no sets, or a set that does not fit the model.
    """
    from ridgeline.models.generate import ANY_BATCH
    from ridgeline.trainer.evaluation import evaluate_model, evaluation_config, evaluation_rows, other_beginnings
    from ridgeline.trainer.pretrained import load_model

    def adapt(config: Config) -> Config:
        _use_virtual_devices(config)
        own = config.data.seq_len if (Path(model) / CONFIG_FILE).is_file() else min(config.model.max_seq_len, LARGEST_HF_SEQ_LEN)
        return evaluation_config(config, seq_len=seq_len or own, rows=ANY_BATCH)

    loaded = load_model(Path(model), step=step, adapt=adapt, mesh=_override_texts(overrides))
    shards, rows = loaded.partitioner.axis_size("batch"), batch_size or evaluation_rows(loaded.source.config)
    config = evaluation_config(loaded.config, seq_len=loaded.config.data.seq_len, rows=-(-rows // shards) * shards)
    wanted = {name: Path(path) for name, path in (sets or {}).items()} or loaded.config.evaluation.sets
    if not wanted:
        raise UserError(f"{model} has no evaluation sets; name some: --set NAME=DIR, or evaluate(model, {{NAME: DIR}})")
    tokenizer = loaded.source.tokenizer
    results = evaluate_model(config, loaded.spec, loaded.partitioner, loaded.params, wanted, tokenizer=tokenizer, progress=progress)
    notes = tuple(other_beginnings(tokenizer, wanted))
    return Evaluation(results, loaded.step, loaded.source.config_sha256, loaded.devices, notes)


def evaluate_tasks(
    model: str | Path,
    tasks: Sequence[str],
    *,
    tasks_dir: str | Path | None = None,
    limit: int | None = None,
    step: int | None = None,
    batch_size: int | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> TaskEvaluation:
    """Evaluate a run or a Hugging Face directory on tasks of lm-evaluation-harness (extra `eval`), on the devices of `generate`.

    Args:
      model: run directory, or Hugging Face directory.
      tasks: names of tasks or groups of the harness.
      tasks_dir: directory with task files of your own.
      limit: samples per task; None: all.
      step: checkpoint of the run; None: the newest valid one.
      batch_size: rows at a time; None: 32.
      overrides: another mesh than the run's, as in `evaluate`.

    Raises UserError: no harness, an unknown task, data that cannot be loaded, no model, checkpoint or tokenizer.
    """
    from ridgeline.models.generate import BATCH_SIZE, generation_config
    from ridgeline.trainer.harness import HarnessModel, Tasks
    from ridgeline.trainer.pretrained import load_model

    if isinstance(tasks, str):
        raise UserError("tasks must be a list of strings")
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")

    def adapt(config: Config) -> Config:
        _use_virtual_devices(config)
        return generation_config(config)

    wanted = Tasks(tasks, None if tasks_dir is None else Path(tasks_dir))
    loaded = load_model(Path(model), step=step, adapt=adapt, mesh=_override_texts(overrides))
    rows = BATCH_SIZE if batch_size is None else batch_size
    metrics = wanted.evaluate(HarnessModel(loaded.decoder, loaded.tokenizer, loaded.eos_ids, rows), limit)
    return TaskEvaluation(metrics, loaded.step, loaded.source.config_sha256, loaded.devices)


def write_teacher(
    model: str | Path,
    corpus: str | Path,
    output: str | Path,
    *,
    seq_len: int | None = None,
    top_k: int = 64,
    temperature: float = 1.0,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
    document_masking: bool = True,
    step: int | None = None,
    batch_size: int | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    slice: tuple[int, int] = (0, 1),
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> TeacherManifest | None:
    """Store the predictions of a teacher at every position of a prepared corpus, for distillation (docs/guides/distillation.md).

    It runs on the devices that `generate` would use. An interrupted call continues with the next file of about 256 MB when it is repeated.

    Args:
      model: run directory, or Hugging Face directory, with the corpus's tokenizer.
      corpus: prepared corpus.
      output: directory of the predictions, for data.train[].teacher of the student.
      seq_len: data.seq_len of the student; None: the length of packed rows.
      top_k: tokens per position.
      temperature: distillation.temperature of the student.
      dtype: of the log-probabilities.
      document_masking: data.document_masking of the student.
      step: checkpoint of the run; None: the newest valid one.
      batch_size: rows at a time, rounded up to fit the mesh; None: the run's, or 8.
      overrides: another mesh than the run's, as in `evaluate`.
      slice: (I, N): write only every N-th file from I on; then call without it.
      overwrite: replace predictions of another model, corpus or settings.
      progress: receives (corpus, rows done, rows in total).

    Returns what teacher.json contains; None after a slice. Raises UserError: no model or checkpoint, or a corpus that does not fit it.
    """
    from ridgeline.models.generate import ANY_BATCH
    from ridgeline.trainer.evaluation import evaluation_rows
    from ridgeline.trainer.pretrained import load_model
    from ridgeline.trainer.teacher import TeacherSettings, row_length, teacher_config, write_predictions

    settings = TeacherSettings(Path(corpus), Path(output), top_k, temperature, dtype, document_masking, slice, overwrite)
    length = row_length(settings.corpus, seq_len)

    def adapt(config: Config) -> Config:
        _use_virtual_devices(config)
        return teacher_config(config, seq_len=length, rows=ANY_BATCH, document_masking=document_masking)

    loaded = load_model(Path(model), step=step, adapt=adapt, mesh=_override_texts(overrides))
    shards, rows = loaded.partitioner.axis_size("batch"), batch_size or evaluation_rows(loaded.source.config)
    config = teacher_config(loaded.config, seq_len=length, rows=-(-rows // shards) * shards, document_masking=document_masking)
    return write_predictions(replace(loaded, config=config), settings, progress=progress)


def find_nan(
    run: str | Path,
    step: int | None = None,
    *,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    log: Callable[[str], None] = lambda line: None,
) -> NanReport:
    """Find the layer and the operation that first gave NaN or infinity in a step of a run, by running the step again.

    Args:
      run: run directory.
      step: the step, from 1 on; None: the first one whose loss or gradient norm was not finite.
      overrides: another mesh than the run's, as in `evaluate`.
      log: receives progress, a line at a time.

    Raises UserError: every step was finite, a damaged checkpoint, changed data, a loss that is not of tokens.
    """
    from ridgeline.configs.load import from_resolved
    from ridgeline.trainer.nan_search import find_nan, first_bad_step

    directory = RunDir.open(Path(run))
    _use_virtual_devices(from_resolved(directory.path / CONFIG_FILE))
    found = first_bad_step(directory.events) if step is None else step
    if found is None:
        raise UserError(f"{run}: loss and gradients of every step were finite; name a step with --step")
    return find_nan(directory.path, found, mesh=_override_texts(overrides), log=log)


def _use_virtual_devices(config: Config) -> None:
    """Create the virtual CPU devices of the config (runtime.cpu_devices), unless JAX has its devices or the environment sets them."""
    import jax

    if config.runtime.cpu_devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.runtime.cpu_devices)


def generate(
    model: str | Path,
    prompts: Sequence[Prompt] = ("",),
    *,
    chat: bool = False,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    step: int | None = None,
    batch_size: int | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> list[Generation]:
    """Sample a continuation of each prompt from a run or a Hugging Face directory, on the devices that `evaluate` would use.

    Devices of mesh.pipeline and mesh.context become devices of mesh.fsdp.

    Args:
      model: run directory, or Hugging Face directory.
      prompts: texts to continue; "": the start of a document. With `chat` also conversations: lists of {"role": ..., "content": ...}.
      chat: write each prompt with the tokenizer's chat template; a text is one message of the user.
      max_tokens: largest number of new tokens; None: 200, or what the model's length allows.
      temperature: 0: always the most likely token.
      top_k, top_p: sample from the k most likely tokens; from the most likely tokens whose probabilities sum to p.
      seed: random seed, 0 to 2**32 - 1.
      step: checkpoint of the run; None: the newest valid one.
      batch_size: prompts at a time; None: 32.
      overrides: another mesh than the run's, as in `evaluate`.

    Raises UserError: no model, checkpoint, tokenizer or chat template, or a value out of its range.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"seed {seed} must be in 0..{2**32 - 1}")
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of strings")
    from ridgeline.loaders.prompts import encode_prompts
    from ridgeline.models.generate import BATCH_SIZE, Sampling, generation_config
    from ridgeline.models.generate import generate as sample
    from ridgeline.trainer.pretrained import load_model

    sampling = Sampling(temperature, top_k, top_p)

    def adapt(config: Config) -> Config:
        _use_virtual_devices(config)
        return generation_config(config)

    loaded = load_model(Path(model), step=step, adapt=adapt, mesh=_override_texts(overrides))
    tokenizer = loaded.tokenizer
    encoded = encode_prompts(prompts, tokenizer, loaded.source.tokenizer_dir, chat=chat)
    room = loaded.model.max_seq_len - max((len(prompt.ids) for prompt in encoded), default=0)
    results = sample(
        loaded.decoder,
        [prompt.ids for prompt in encoded],
        max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)) if max_tokens is None else max_tokens,
        sampling=sampling,
        eos_ids=loaded.eos_ids,
        seed=seed,
        batch_size=BATCH_SIZE if batch_size is None else batch_size,
    )
    made_with = (loaded.step, loaded.source.config_sha256, loaded.devices)
    return [
        Generation(prompt.text, tokenizer.decode(result.tokens), len(result.tokens), result.stopped_by, *made_with)
        for prompt, result in zip(encoded, results, strict=True)
    ]
