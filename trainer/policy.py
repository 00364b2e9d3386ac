"""Policy updates from Python: rollouts with rewards go in, and safetensors of the newest weights come out for an inference server.

One process with all devices of its mesh. The run directory is that of a training run: config, checkpoints, metrics, TensorBoard.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import jax
import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.hf_files import copy_tokenizer, special_ids, write_tokenizer
from ridgeline.loaders.rollouts import Rollout
from ridgeline.loaders.tokenizers import Tokenizer
from ridgeline.models.generate import Sampling, generate
from ridgeline.models.huggingface.convert import CONFIG_NAME, export_weights, hf_config
from ridgeline.models.huggingface.peft import merged
from ridgeline.models.policy import ADVANTAGES, METRICS, OLD, REFERENCE, advantages, token_shares
from ridgeline.observe.writers import build_writers
from ridgeline.rundir.events import EventLog, event_file
from ridgeline.rundir.files import sync_directory
from ridgeline.trainer.checkpoint import identity, integrity
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.failures import NumericalFailure
from ridgeline.trainer.prepare import prepare
from ridgeline.trainer.pretrained import ending_ids, open_source, start_from
from ridgeline.trainer.start import check_restored, keep_tokenizer, start_run
from ridgeline.trainer.state import Tree
from ridgeline.trainer.step import Batch, make_token_log_prob_step, to_global
from ridgeline.trainer.text_evaluation import TextModel

LATEST = "latest"
"""Name of the link to the newest version of exported weights."""
_UPDATES = "updates"
"""Key of the number of updates in the metadata of checkpoints."""


class PolicyTrainer:
    """A run of policy updates. Use it as a context manager: leaving it saves the state and releases the run directory."""

    def __init__(
        self,
        config: Config,
        *,
        command: Sequence[str] = (),
        log: Callable[[str], None] = lambda line: None,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        """Start the run in `config.directory` from `init_from`, or resume it from its newest good checkpoint.

        command: as typed, recorded in the run directory; log: receives notes; devices: None: all. Raises UserError, CheckpointError.
        """
        if config.policy.loss is None or config.init_from is None:
            raise UserError("policy.loss: there are no policy updates; set policy.loss, such as policy.loss=grpo, and init_from")
        if jax.process_count() > 1:
            raise UserError("policy updates run in one process, with all devices of one node; start one process")
        self.config = config
        source = open_source(config.init_from)
        self._tokenizer, self._files = source.tokenizer, source.tokenizer_dir
        sha256 = "" if self._tokenizer is None else self._tokenizer.sha256
        self._sha256 = sha256
        self._parts = parts = prepare(config, devices)
        self._texts = TextModel(config, parts.mesh)
        self._log_probs = jax.jit(make_token_log_prob_step(parts.spec, config, parts.partitioner))
        self._run = run = start_run(config, command=command, log=log)
        try:
            self._events = EventLog(event_file(run.path, 0), 0, run=run.id, restart=run.restart, guard=run.lease.check_log)
            self._checkpointer = Checkpointer(run.checkpoints, config.checkpoint, events=self._events, log=log, guard=run.lease.check)
            resumed = self._checkpointer.has_checkpoints()
            self._reference: Tree | None = None
            if not resumed or config.policy.kl:
                first = start_from(config.init_from, config.model, sha256, parts.spec, parts.make_state(), config.lora)
                # A copy: the step donates the state.
                self._reference = jax.tree.map(lambda leaf: leaf.copy(), first.params) if config.policy.kl else None
                self.state = first
            self.updates = 0
            """Updates so far, those before a resume included."""
            if resumed:
                self.state, metadata = self._checkpointer.restore(parts.abstract)
                check_restored(metadata, config, {}, log)
                self.updates = int(metadata[_UPDATES])
            elif source.hf is not None:
                copy_tokenizer(source.files_dir, run.tokenizer, source.hf.config)
            elif self._files is not None:
                keep_tokenizer(self._files, run, None, log)
            self._writer = build_writers(
                config.logging,
                run.path,
                name=config.name,
                run=run.id,
                config=config.model_dump(mode="json"),
                restart=run.restart,
                resume_step=self.step or None,
                guard=run.lease.check_log,
            )
        except BaseException:
            run.lease.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.save()
            self._checkpointer.close()
        finally:
            self._writer.close()
            self._events.close()
            self._run.lease.release()

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return int(jax.device_get(self.state.step))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises UserError when `init_from` has none."""
        if self._tokenizer is None:
            raise UserError(f"{self.config.init_from} has no tokenizer")
        return self._tokenizer

    def sample(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 1.0, seed: int = 0) -> list[list[int]]:
        """Sample a completion of each prompt (token ids) with the newest weights; one that ended has its end-of-sequence token.

        For small models and tests: an inference server samples faster. Log-probabilities of an update are at temperature 1.
        """
        eos_ids = ending_ids(self.tokenizer, self._files, self.config.model.vocab_size)
        made = generate(
            self._texts.decoder(self.state.params),
            prompts,
            max_tokens=max_tokens,
            sampling=Sampling(temperature),
            eos_ids=eos_ids,
            seed=seed,
            cast_once=False,
        )
        return [[*one.tokens, *([self.tokenizer.eos_id] if one.stopped_by == "eos" else [])] for one in made]

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Train on rollouts: policy.epochs passes in batches of data.batch_size. Return the metrics, means over the steps.

        The checkpoint cadence counts steps; a save follows the whole update. Raises UserError: rollouts that do not fit the config, or no
        steps are left; NumericalFailure: trainer.max_bad_steps updates in a row were skipped.
        """
        config, first = self.config, self.step
        batches = [to_global(rows, self._parts.partitioner) for rows in self._rows(rollouts)]
        steps = len(batches) * config.policy.epochs
        if first + steps > config.trainer.steps:
            raise UserError(f"trainer.steps={config.trainer.steps}: an update takes {steps} steps after step {first}; raise trainer.steps")
        for batch in batches:
            self._add_log_probs(batch)
        found = []
        for _ in range(config.policy.epochs):
            for batch in batches:
                self.state, metrics = self._parts.train_step(self.state, batch)
                found.append(metrics)
        values = [{name: float(value) for name, value in one.items()} for one in jax.device_get(found)]
        self.updates += 1
        rewards = np.array([one.reward for one in rollouts])
        means = {name: float(np.mean([one[name] for one in values])) for name in values[0]}
        logged = {
            **{f"train/{name}": means[name] for name in ("loss", "grad_norm")},
            "train/learning_rate": values[-1]["learning_rate"],
            "train/skipped_steps": values[-1]["skipped"],
            **{f"train_{name}": value for name, value in means.items() if name.startswith(METRICS)},
            "train_policy/reward": float(rewards.mean()),
            "train_policy/reward_std": float(rewards.std()),
            "train_policy/completion_tokens": float(np.mean([len(one.completion) for one in rollouts])),
        }
        self._writer.write(first + steps, logged)
        bad = int(values[-1]["bad_in_a_row"])
        if bad >= config.trainer.max_bad_steps:
            raise NumericalFailure(f"the updates of {bad} steps in a row were skipped (not finite, or above optimizer.skip_norm)")
        if any(self._checkpointer.should_save(step) for step in range(first + 1, first + steps + 1)) and not bad:
            self.save()
        return logged

    def save(self) -> None:
        """Save the state as a checkpoint, from which the same run resumes bitwise. Nothing after a step whose update was skipped."""
        if int(jax.device_get(self.state.bad_in_a_row)) or not self.updates:
            return
        config, run, step = self.config, self._run, self.step
        bound = identity.describe(config, run.id, self._sha256 or None, run.tokenizer, {})
        metadata = {"kind": "train", "data_position": step, "mesh": config.mesh.sizes, _UPDATES: self.updates, **bound}
        self._checkpointer.save(step, self.state, metadata)

    def export(self, directory: Path | str, *, keep: int = 2) -> Path:
        """Write the weights as the Hugging Face directory DIRECTORY/vNNNNNN (number of updates) and point the link DIRECTORY/latest to it.

        A reader of `latest` finds a complete version: the link is replaced after all files are on disk. Adapters are added to the weights.
        The newest `keep` versions stay. Returns the new version. Raises UserError.
        """
        config, directory = self.config, Path(directory)
        if keep < 1:
            raise UserError(f"keep={keep} must be at least 1")
        target = directory / f"v{self.updates:06d}"
        scratch = directory / f".v{self.updates:06d}.partial"
        dtype = config.precision.compute if config.lora.rank is not None else config.precision.params
        description = hf_config(config.model, dtype, special_ids(self._tokenizer, self._files))
        description["ridgeline"] = {"run": config.name, "step": self.step, "update": self.updates}
        read = partial(_read, self.state.params)
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            export_weights(config.model, merged(read, config.model, config.lora) if config.lora.rank is not None else read, scratch, dtype)
            (scratch / CONFIG_NAME).write_text(json.dumps(description, indent=2) + "\n")
            if self._files is not None:
                write_tokenizer(self._tokenizer, self._files, scratch)
            integrity.digest_files(scratch, integrity.list_files(scratch), threads=4, sync=True)
            if not target.exists():  # else: of a run that was killed after it and resumed from an earlier step, or the same weights
                os.rename(scratch, target)
            else:
                old = directory / f".v{self.updates:06d}.old"
                shutil.rmtree(old, ignore_errors=True)
                os.rename(target, old)
                os.rename(scratch, target)
                shutil.rmtree(old)
            link = directory / f".{LATEST}.new"
            link.unlink(missing_ok=True)
            link.symlink_to(target.name)
            os.replace(link, directory / LATEST)
            sync_directory(directory)
            versions = sorted(path for path in directory.iterdir() if re.fullmatch(r"v\d{6,}", path.name))
            for stale in [path for path in versions if path != target][: max(0, len(versions) - keep)]:
                shutil.rmtree(stale)
        except OSError as error:
            raise UserError(f"cannot write {directory}: {error.strerror or error}") from error
        return target

    def _rows(self, rollouts: Sequence[Rollout]) -> list[dict[str, np.ndarray]]:
        """Return the batches of rollouts, one per row. Raises UserError."""
        config = self.config
        rows, length, vocab = config.data.batch_size, config.data.seq_len, config.model.vocab_size
        if not rollouts or len(rollouts) % rows:
            raise UserError(f"{len(rollouts)} rollouts must be a multiple of data.batch_size={rows}")
        given = [one.log_probs is not None for one in rollouts]
        if any(given) and not all(given):
            raise UserError("rollouts: log_probs must be given for all rollouts or for none")
        shape = (len(rollouts), length)
        arrays: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
        mask, old = np.zeros(shape, bool), np.zeros(shape, np.float32)
        for row, one in enumerate(rollouts):
            ids, begin = np.array([*one.prompt, *one.completion], np.int64), len(one.prompt) - 1
            if begin < 0 or not one.completion:
                raise UserError(f"rollouts[{row}]: prompt and completion must have at least 1 token each")
            if len(ids) > length + 1:
                raise UserError(f"rollouts[{row}]: {len(ids)} tokens are more than data.seq_len + 1 = {length + 1}")
            if ids.min() < 0 or ids.max() >= vocab:
                raise UserError(f"rollouts[{row}]: token ids must be in 0..{vocab - 1}")
            if not np.isfinite(one.reward):
                raise UserError(f"rollouts[{row}]: the reward must be finite, got {one.reward}")
            limit = config.policy.max_completion
            if limit is not None and len(one.completion) > limit:
                raise UserError(f"rollouts[{row}]: {len(one.completion)} tokens are more than policy.max_completion={limit}")
            end = len(ids) - 1
            arrays["tokens"][row, :end], arrays["targets"][row, :end] = ids[:-1], ids[1:]
            arrays["segment_ids"][row, :end], arrays["positions"][row, :end] = 1, np.arange(end)
            mask[row, begin:end] = True
            if one.log_probs is not None:
                values = np.asarray(one.log_probs, np.float32)
                if values.shape != (len(one.completion),) or not np.isfinite(values).all():
                    raise UserError(f"rollouts[{row}]: log_probs must be {len(one.completion)} finite numbers, one per token")
                old[row, begin:end] = values
        advantages_N = advantages(
            np.array([one.reward for one in rollouts]), np.array([str(one.group) for one in rollouts]), config.policy.scale_rewards
        )
        arrays[ADVANTAGES] = np.where(mask, advantages_N[:, None], 0).astype(np.float32)
        if all(given):
            arrays[OLD] = old
        made = []
        for begin in range(0, len(rollouts), rows):
            part = slice(begin, begin + rows)
            made.append({name: x[part] for name, x in arrays.items()} | {"weights": token_shares(config.policy, mask[part])})
        return made

    def _add_log_probs(self, batch: Batch) -> None:
        """Add the log-probabilities before the update, where they are not given, and those of the reference."""
        if OLD not in batch:
            batch[OLD] = self._log_probs(self.state.params, batch)
        if self._reference is not None:
            batch[REFERENCE] = self._log_probs(self._reference, batch)


def _read(params: Tree, path: str, layer: int | None) -> np.ndarray:
    """Return a parameter by its dotted path, or one layer of it, on the host."""
    for name in path.split("."):
        params = params[int(name)] if isinstance(params, list) else params[name]
    return np.asarray(jax.device_get(params if layer is None else params[layer]))
