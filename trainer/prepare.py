"""What a run builds from its config before anything is allocated or compiled: mesh, model, optimizer, and the functions to jit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.loaders.loader import read_manifests
from ridgeline.loaders.manifest import Manifest, TokenizerInfo, check_tokenizer, read_manifest
from ridgeline.loaders.overlap import Sample, overlap, sample
from ridgeline.loaders.shard_hashes import verify
from ridgeline.loaders.teacher import open_teacher
from ridgeline.models.parallelize import parallelize
from ridgeline.sharding.mesh import NodeOf, build_mesh, node_of
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.digests import StepDigests
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import ModelSpec, TrainState, abstract_gradient, abstract_state, init_program, model_spec
from ridgeline.trainer.step import make_evaluation_step, make_log_prob_step, make_train_step


@dataclass(frozen=True)
class Prepared:
    """The parts of a run that follow from its config and devices."""

    mesh: jax.sharding.Mesh
    partitioner: Partitioner
    attention: str
    """The attention backend of training, with `auto` resolved."""
    spec: ModelSpec
    abstract: TrainState
    """Shapes, dtypes and shardings of the state."""
    train_step: Any
    """jit of the step, state donated; not compiled yet."""
    evaluation_step: Any
    log_prob_step: Any
    """jit of the log-probabilities of rows by the reference of preference pairs."""
    make_state: Any
    """jit of () -> the state of step 0."""
    digests: StepDigests | None = None
    """The digests that the train step returns; None: none."""


def prepare(config: Config, devices: Sequence[jax.Device] | None = None, node: NodeOf = node_of) -> Prepared:
    """Build mesh, model and step functions of a config.

    devices: of the run, or of a topology to compile for (None: all); node: device -> its node.
    Raises UserError when the config does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    check_devices(config, len(devices))
    precision = config.compute.matmul_precision
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)
    mesh = build_mesh(config.mesh, devices, node)
    partitioner = Partitioner.of(mesh, config)
    attention = parallelize(config.model, config.compute, config.precision, partitioner).attention
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.trained_axes, partitioner, config.model.width_ratio)
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    abstract = abstract_state(config, spec, optimizer, partitioner)
    digests = None
    if config.corruption_check.every:
        check_repeatable(config, devices[0])
        digests = StepDigests.of(mesh, abstract, abstract_gradient(spec, partitioner))
    step = make_train_step(spec, config, optimizer, schedule, partitioner, digests)
    return Prepared(
        mesh=mesh,
        partitioner=partitioner,
        attention=attention.resolved(packed=config.data.document_masking).name,
        spec=spec,
        abstract=abstract,
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), None)),
        evaluation_step=jax.jit(make_evaluation_step(spec, config, partitioner)),
        log_prob_step=jax.jit(make_log_prob_step(spec, config, partitioner)),
        make_state=init_program(config, spec, optimizer, abstract),
        digests=digests,
    )


def check_repeatable(config: Config, device: jax.Device) -> None:
    """Raise UserError where a step repeated on the same device may differ, so that corruption_check would report healthy devices."""
    if device.platform == "gpu" and not config.runtime.deterministic:
        raise UserError("corruption_check.every: steps on GPUs are bitwise repeatable only with runtime.deterministic=true; set it")


def check_data(config: Config) -> TokenizerInfo:
    """Read all data manifests of the config, compare the shards with them, and return the tokenizer they share.

    Raises UserError: a corpus is missing, damaged, rewritten, made with another tokenizer, or its ids exceed the vocabulary.
    """
    if config.policy.loss is not None:
        raise UserError("policy.loss: updates read rollouts, not corpora; call ridgeline.open_policy from Python (docs/guides/rl.md)")
    manifests = read_manifests(config.data)
    manifests += [(path, read_manifest(path)) for path in config.evaluation.sets.values()]
    tokenizer = check_tokenizer(manifests, config.model.vocab_size)
    for path, manifest in manifests:
        verify(path, manifest)
    for source, (_, manifest) in zip(config.data.train, manifests, strict=False):
        teacher = open_teacher(source, manifest, config.data, config.distillation)
        if teacher is not None:
            verify(teacher.directory, teacher.manifest)
    return tokenizer


def start_warnings(config: Config) -> list[str]:
    """Return a line for each setting that is valid and probably a mistake. Raises CorpusError (read_manifest)."""
    lines = []
    if config.precision.params == "bfloat16" and not config.precision.stochastic_rounding:
        lines.append(
            "warning: precision.params=bfloat16 rounds small updates away; set precision.stochastic_rounding=true, or "
            "precision.params=float32"
        )
    lines += _random_start(config)
    train = read_manifests(config.data)
    shared = _SharedDocuments(COMPARISON_S / max(1, len(train) + len(config.evaluation.sets)))
    for name, path in config.evaluation.sets.items():
        manifest = read_manifest(path)
        for train_path, trained in train:
            reason = same_text(path, manifest, train_path, trained) or shared.between(path, manifest, train_path, trained)
            if reason is not None:
                lines.append(f"warning: evaluation.sets.{name} {reason}: its loss does not measure unseen text")
    return lines


def _random_start(config: Config) -> list[str]:
    """Return a warning where adapters or a preference loss, which adapt a trained model, start from random parameters."""
    settings = {"lora.rank": config.lora.rank, "preference.loss": config.preference.loss}
    wanted = [f"{key}={value}" for key, value in settings.items() if value is not None]
    if not wanted or config.init_from is not None:
        return []
    checkpoints = config.directory / "checkpoints"
    checkpoint_dirs.check_ours(checkpoints)
    if checkpoint_dirs.complete_steps(checkpoints):  # of this run, or an import
        return []
    return [f"warning: {' and '.join(wanted)} without init_from starts from random parameters; set init_from to a trained model"]


COMPARISON_S = 1.0
"""Longest time of the comparison of held-out sets with training corpora by content."""
SHARED, SHARED_DOCUMENTS = 0.05, 5
"""Documents of a held-out set that must be in a training corpus for a warning: this share of those sampled, and this number (or all)."""


class _SharedDocuments:
    """Compares corpora by the content of sampled documents; each corpus is sampled once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._samples = limit_s, dict[Path, Sample]()

    def between(self, path: Path, manifest: Manifest, train_path: Path, trained: Manifest) -> str | None:
        """Return how a held-out set shares documents with a training corpus; None: too few do."""
        other = self._sample(train_path, trained)
        found = overlap(self._sample(path, manifest), other)
        if found.share < SHARED or found.found < min(SHARED_DOCUMENTS, found.documents):
            return None
        part = "" if other.read_share >= 1 else f", of which {other.read_share:.1%} were read"
        sampled = f"{found.found:,} of {found.documents:,} sampled documents are in it{part}"
        return f"shares about {found.share:.0%} of its documents with the training corpus {train_path} ({sampled})"

    def _sample(self, path: Path, manifest: Manifest) -> Sample:
        if path.resolve() not in self._samples:
            self._samples[path.resolve()] = sample(path, manifest, self._limit_s)
        return self._samples[path.resolve()]


def same_text(path: Path, manifest: Manifest, train_path: Path, trained: Manifest) -> str | None:
    """Return how a held-out set shares text with a training corpus; None: no shared shards and no shared input files."""
    if path.resolve() == train_path.resolve():
        return f"is the training corpus {train_path}"
    hashes = {shard.sha256 for shard in trained.shards}
    shared = sum(shard.sha256 in hashes for shard in manifest.shards)
    if shared:
        return f"has {shared} of its {len(manifest.shards)} shards in the training corpus {train_path}"
    ours, theirs = manifest.parameters, trained.parameters
    split = bool(ours.get("holdouts")) and ours.get("holdouts") == theirs.get("holdouts")  # two sets of one preparation
    inputs = set(map(str, ours.get("inputs") or ())) & set(map(str, theirs.get("inputs") or ()))
    if inputs and not split:
        return f"was prepared from an input of the training corpus {train_path} ({min(inputs)}) without a holdout"
    return None


def data_seed(config: Config) -> int:
    """Return the seed of the data order."""
    return config.seed if config.data.seed is None else config.data.seed
