"""Evaluation during training that needs the model as a generator of text: tasks of lm-evaluation-harness, and samples.

Both use the parameters of the state where they are, with the sharding of models/generate.py and without a copy, and change nothing of
the run. Every process makes the same calls; process 0 records the results.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ridgeline.configs.schema import Config, SamplesConfig
from ridgeline.loaders.prompts import EncodedPrompt, encode_prompts, read_prompts
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer
from ridgeline.models.decoder import Decoder
from ridgeline.models.generate import Generation, Sampling, check_prompts, generate, generation_config
from ridgeline.observe.compilation import CompilerWatch
from ridgeline.observe.profiler import annotation
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.hooks import Recorder
from ridgeline.trainer.loop import Hook, StepEnd
from ridgeline.trainer.pretrained import ending_ids
from ridgeline.trainer.state import ModelSpec, Tree, model_spec
from ridgeline.trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from ridgeline.trainer.harness import TaskMetric, Tasks

SAMPLES_TAG = "samples"
"""Tag of the texts in TensorBoard."""


class TextModel:
    """The model of a run as a generator of text, and what it is asked for: opened before the run directory is written."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh) -> None:
        """Load tasks and prompts. Raises UserError: no harness, an unknown task, or tasks and prompts that do not fit the model."""
        self.config, self.mesh = config, mesh
        self.tasks = _open_tasks(config)
        self.prompts = _encoded(config.evaluation.samples, self.tokenizer, self.tokenizer_dir) if config.evaluation.samples.wanted else []
        if self.prompts:
            check_prompts(config.model, [prompt.ids for prompt in self.prompts], config.evaluation.samples.max_tokens)

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer of the data."""
        return self.config.data.train[0].path / "tokenizer"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data."""
        return load_tokenizer(self.tokenizer_dir)

    @cached_property
    def eos_ids(self) -> list[int]:
        """The ids that end a text."""
        return ending_ids(self.tokenizer, self.tokenizer_dir, self.config.model.vocab_size)

    @cached_property
    def _spec(self) -> ModelSpec:
        config = generation_config(self.config)
        return model_spec(config, Partitioner.of(self.mesh, config))

    def decoder(self, params: Tree) -> Decoder:
        """Return the module with the parameters of a state, which are not copied."""
        decoder: Decoder = self._spec.merge(params)
        return decoder


def _open_tasks(config: Config) -> Tasks | None:
    wanted = config.evaluation.tasks
    if not wanted.names:
        return None
    from ridgeline.trainer.harness import Tasks

    tasks = Tasks(wanted.names, wanted.directory)
    tasks.check_length(config.model.max_seq_len)
    return tasks


def _encoded(samples: SamplesConfig, tokenizer: Tokenizer, directory: Path) -> list[EncodedPrompt]:
    prompts = [*samples.prompts, *([] if samples.file is None else read_prompts(samples.file))]
    return encode_prompts(prompts, tokenizer, directory, chat=samples.chat)


@dataclass(eq=False)
class _OnTexts(Hook):
    """What both hooks share: when they are due, and how their time is recorded."""

    config: Config
    model: TextModel
    recorder: Recorder
    watchdog: Watchdog
    compiler: CompilerWatch

    def _due(self, end: StepEnd, every: int) -> bool:
        at_step = end.step == self.config.trainer.steps or (every > 0 and end.step % every == 0)
        return at_step and end.stopped_by is None

    @contextlib.contextmanager
    def _recorded(self, step: int) -> Iterator[dict[str, Any]]:
        """Account for a block as evaluation, compilations included, and yield the record of its phase."""
        recorder, quiet = self.recorder, self.compiler.quiet()
        phase = recorder.events.phase("evaluation", step=step)
        watched = self.watchdog.evaluation()
        with watched, annotation("ridge.evaluation"), recorder.timer.paused(), phase as record, quiet, jax.transfer_guard("allow"):
            yield record


class TaskEvaluation(_OnTexts):
    """Evaluates on tasks every evaluation.tasks.every steps, and after the last step."""

    def due(self, end: StepEnd) -> bool:
        """Return whether to evaluate after this step; never at a stop."""
        return self.model.tasks is not None and self._due(end, self.config.evaluation.tasks.every)

    def on_state(self, end: StepEnd) -> None:
        """Evaluate all tasks and write their metrics."""
        wanted, model, tasks, step = self.config.evaluation.tasks, self.model, self.model.tasks, end.step
        if end.stopped_by is not None or tasks is None:
            return
        from ridgeline.trainer.harness import HarnessModel

        with self._recorded(step) as record:
            decoder = model.decoder(end.state.params)
            alive = self.watchdog.evaluation_batch
            adapter = HarnessModel(decoder, model.tokenizer, model.eos_ids, wanted.batch_size, alive, cast_once=False)
            found = tasks.evaluate(adapter, wanted.limit)
            record["tasks"] = {f"{one.task} {one.metric}": one.value for one in found}
        self.recorder.writer.write(step, task_metrics(found))
        self.recorder.writer.flush()
        for one in found:
            error = "" if one.stderr is None else f" (standard error {one.stderr:.4f})"
            self.recorder.progress.note(f"step {step}: {one.task} {one.metric} {one.value:.4f}{error}")


def task_metrics(found: list[TaskMetric]) -> dict[str, float]:
    """Return the metrics of tasks under their documented names."""
    values: dict[str, float] = {}
    for one in found:
        metric, _, filtered = one.metric.partition(",")
        name = f"task/{one.task}/{metric}" + ("" if filtered == "none" else f"_{filtered}")
        values[name] = one.value
        if one.stderr is not None:
            values[f"{name}_stderr"] = one.stderr
    return values


class Sampler(_OnTexts):
    """Continues prompts every evaluation.samples.every steps, and after the last step."""

    def due(self, end: StepEnd) -> bool:
        """Return whether to sample after this step; never at a stop."""
        return bool(self.model.prompts) and self._due(end, self.config.evaluation.samples.every)

    def on_state(self, end: StepEnd) -> None:
        """Sample and write the texts."""
        if end.stopped_by is not None or not self.model.prompts:
            return
        wanted, model, step, start_s = self.config.evaluation.samples, self.model, end.step, time.monotonic()
        with self._recorded(step) as record:
            made = generate(
                model.decoder(end.state.params),
                [prompt.ids for prompt in model.prompts],
                max_tokens=wanted.max_tokens,
                sampling=Sampling(wanted.temperature, wanted.top_k, wanted.top_p),
                eos_ids=model.eos_ids,
                seed=wanted.seed,
                on_batch=self.watchdog.evaluation_batch,
                cast_once=False,
            )
            texts = [model.tokenizer.decode(one.tokens) for one in made]
            record["samples"] = [
                {"prompt": prompt.text, "text": text, "stopped_by": one.stopped_by}
                for prompt, text, one in zip(model.prompts, texts, made, strict=True)
            ]
        self.recorder.writer.text(SAMPLES_TAG, samples_table(model.prompts, texts, made), step)
        self.recorder.writer.write(
            step,
            {
                "samples/tokens": sum(len(one.tokens) for one in made) / len(made),
                "samples/ended": sum(one.stopped_by == "eos" for one in made) / len(made),
                "samples/duration_s": time.monotonic() - start_s,
            },
        )
        self.recorder.writer.flush()
        self.recorder.progress.note(f"step {step}: {len(made)} sample{'s' if len(made) > 1 else ''} written")


def samples_table(prompts: list[EncodedPrompt], texts: list[str], made: list[Generation]) -> str:
    """Return samples as a Markdown table."""
    lines = ["| prompt | text | tokens | stopped by |", "|---|---|---|---|"]
    for prompt, text, one in zip(prompts, texts, made, strict=True):
        lines.append(f"| {_cell(prompt.text)} | {_cell(text)} | {len(one.tokens)} | {one.stopped_by} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    shown = text.replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    return shown.replace("\n", "<br>")
