"""Evaluation on named held-out sets: nats per token, perplexity and bits per byte over every token of a set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.loader import EvaluationSet, open_evaluation_set
from ridgeline.loaders.manifest import check_same_tokenizer, check_tokenizer, read_manifest
from ridgeline.loaders.tokenizers import Tokenizer
from ridgeline.models.preference import PreferenceSums
from ridgeline.observe.step_timer import evaluation_metrics, perplexity
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.state import ModelSpec, Tree
from ridgeline.trainer.step import Metrics, local_rows, make_evaluation_step, to_global

ProgressCallback = Callable[[str, int, int], None]
"""Arguments: set name, batches done, batches in total."""


@dataclass(frozen=True)
class SetResult:
    """The result of one set."""

    nats: float
    """Summed cross-entropy of the target tokens, weighted."""
    tokens: float
    """Number of target tokens (sum of weights)."""
    correct: float
    """Number of target tokens that were the model's top prediction."""
    text_bytes: int | None
    """Bytes of the text of the target tokens; None when only a part of the set was read, or the corpus did not record it."""
    gzip9_bytes: int | None
    """Summed gzip -9 size of the same text; None where the corpus did not record it."""
    duration_s: float
    """Wall time."""

    @property
    def loss(self) -> float:
        """Nats per counted token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """nats / ln 2 / bytes of the text of the target tokens."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """Bits per byte of gzip -9, applied to each document."""
        return 8 * self.gzip9_bytes / self.text_bytes if self.gzip9_bytes and self.text_bytes else None

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    def metrics(self, name: str) -> dict[str, float]:
        """Return the set's metrics under their documented names."""
        return evaluation_metrics(
            name,
            nats=self.nats,
            tokens=self.tokens,
            correct=self.correct,
            text_bytes=self.text_bytes,
            duration_s=self.duration_s,
        )

    def describe(self) -> str:
        """Return the results as one line of text."""
        text = f"loss {self.loss:.4f} nats/token, perplexity {self.perplexity:.2f}"
        if self.bits_per_byte is not None:
            text += f", {self.bits_per_byte:.3f} bits/byte"
        if self.bits_per_byte is not None and self.gzip_bits_per_byte is not None:
            text += f" (gzip -9 on the same files: {self.gzip_bits_per_byte:.3f})"
        return text


@dataclass(frozen=True)
class PairResult:
    """The result of one set of preference pairs."""

    sums: Mapping[str, float]
    """Fields of `models.preference.PreferenceSums`, summed over the pairs."""
    pairs: float
    """Number of pairs."""
    duration_s: float
    """Wall time."""

    @property
    def loss(self) -> float:
        """Mean preference loss of the pairs."""
        return self.sums["loss"] / self.pairs

    @property
    def accuracy(self) -> float:
        """Share of the pairs whose chosen side has the larger reward."""
        return self.sums["accuracy"] / self.pairs

    @property
    def margin(self) -> float:
        """Mean reward of the chosen sides minus that of the rejected ones."""
        return (self.sums["chosen_reward"] - self.sums["rejected_reward"]) / self.pairs

    def metrics(self, name: str) -> dict[str, float]:
        """Return the set's metrics under their documented names."""
        values = {"loss": self.loss, "reward_accuracy": self.accuracy, "reward_margin": self.margin, "pairs": self.pairs}
        return {f"eval/{name}/{key}": value for key, value in {**values, "duration_s": self.duration_s}.items()}

    def describe(self) -> str:
        """Return the results as one line of text."""
        return f"loss {self.loss:.4f}, {self.accuracy:.1%} of {self.pairs:,.0f} pairs ranked right, margin {self.margin:.4f}"


Result = SetResult | PairResult


class Evaluator:
    """Evaluates the sets of a config."""

    def __init__(
        self,
        config: Config,
        partitioner: Partitioner,
        step: Callable[[Tree, Any], Metrics],
        sets: Mapping[str, Path] | None = None,
        pairs: Mapping[Path, PairSource] | None = None,
        pair_step: Callable[[Tree, Any], Metrics] | None = None,
    ) -> None:
        """`sets`: name -> directory; None: those of the config. `pairs`: directory -> source, for those with preference pairs, whose
        batches `pair_step` receives."""
        self._partitioner = partitioner
        self._step, self._pair_step = step, pair_step or step
        self.batch_size = evaluation_rows(config)
        rows = local_rows(self.batch_size, partitioner)
        self.sets: dict[str, EvaluationSet] = {
            name: open_evaluation_set(
                path,
                seq_len=config.data.seq_len,
                batch_size=self.batch_size,
                rows=rows,
                document_masking=config.data.document_masking,
                pairs=(pairs or {}).get(path),
            )
            for name, path in (config.evaluation.sets if sets is None else sets).items()
        }

    def evaluate(
        self,
        params: Tree,
        *,
        max_batches: int | None = None,
        progress: ProgressCallback | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> dict[str, Result] | None:
        """Evaluate every set with these parameters.

        Args:
          params: parameters of the model.
          max_batches: limit per set; a partially read set has no bits per byte.
          progress: called after each batch.
          stopping: polled before each batch, in every process. Once it returns true the evaluation ends and returns None.
        """
        results: dict[str, Result] = {}
        for name, held_out in self.sets.items():
            result = self._one(name, held_out, params, max_batches, progress, stopping)
            if result is None:
                return None
            results[name] = result
        return results

    def _one(
        self,
        name: str,
        held_out: EvaluationSet,
        params: Tree,
        max_batches: int | None,
        progress: ProgressCallback | None,
        stopping: Callable[[], bool],
    ) -> Result | None:
        count = held_out.num_batches if max_batches is None else min(max_batches, held_out.num_batches)
        start_s = time.monotonic()
        pending: list[Metrics] = []
        names = (*PreferenceSums._fields, "pairs") if held_out.pairs else ("nats", "weight", "correct")
        totals = dict.fromkeys(names, 0.0)
        step = self._pair_step if held_out.pairs else self._step
        for index, batch in enumerate(_take(held_out, count)):
            if stopping():
                return None
            pending.append(step(params, to_global(batch, self._partitioner)))
            if len(pending) > 2:  # two batches stay in flight; sums are in float64 on the host
                _add(totals, pending.pop(0))
            if progress is not None:
                progress(name, index + 1, count)
        for metrics in pending:
            _add(totals, metrics)
        if held_out.pairs:
            return PairResult(totals, totals["pairs"], time.monotonic() - start_s)
        whole = count == held_out.num_batches
        return SetResult(
            nats=totals["nats"],
            tokens=totals["weight"],
            correct=totals["correct"],
            text_bytes=held_out.text_bytes if whole else None,
            gzip9_bytes=held_out.gzip9_bytes if whole else None,
            duration_s=time.monotonic() - start_s,
        )


def evaluate_model(
    config: Config,
    spec: ModelSpec,
    partitioner: Partitioner,
    params: Tree,
    sets: Mapping[str, Path],
    *,
    tokenizer: Tokenizer | None,
    progress: ProgressCallback | None = None,
) -> dict[str, SetResult]:
    """Evaluate parameters on whole sets, outside a run. `config`: from `evaluation_config`; tokenizer: of the model, None: unknown.

    Raises UserError: a set is missing, damaged, or made with another tokenizer, or its ids exceed the vocabulary.
    """
    for path in sets.values():
        if read_manifest(path).has_pairs:
            raise UserError(
                f"{path} has preference pairs, which only training evaluates (evaluation.sets); name sets of text: --set NAME=DIR"
            )
        of_set = check_tokenizer([(path, read_manifest(path))], config.model.vocab_size)
        check_same_tokenizer(None if tokenizer is None else tokenizer.sha256, of_set.sha256, "the model")
    step = jax.jit(make_evaluation_step(spec, config, partitioner))
    results = Evaluator(config, partitioner, step, sets).evaluate(params, progress=progress)
    assert results is not None, "no stop function"
    return {name: result for name, result in results.items() if isinstance(result, SetResult)}


def evaluation_config(config: Config, *, seq_len: int, rows: int) -> Config:
    """Return the config of an evaluation outside a run: `rows` rows of `seq_len` tokens at a time.

    Raises UserError for rows longer than the model allows.
    """
    if seq_len > config.model.max_seq_len:
        raise UserError(f"rows of {seq_len} tokens are longer than model.max_seq_len={config.model.max_seq_len}")
    changes = {
        "data": config.data.model_copy(update={"seq_len": seq_len, "batch_size": rows}),
        "evaluation": config.evaluation.model_copy(update={"batch_size": rows}),
        "trainer": config.trainer.model_copy(update={"accumulation": 1}),
    }
    return config.model_copy(update=changes)


def evaluation_rows(config: Config) -> int:
    """Return the rows per evaluation step."""
    return config.evaluation.batch_size or max(1, config.data.batch_size // config.trainer.accumulation)


def other_beginnings(tokenizer: Tokenizer | None, sets: Mapping[str, Path]) -> list[str]:
    """Return a note for each set whose documents begin otherwise than the model's texts, with or without BOS."""
    if tokenizer is None:
        return []
    how = {True: "begin with BOS", False: "do not begin with BOS"}
    return [
        f"note: documents of set '{name}' {how[not tokenizer.add_bos]}, the model's {how[tokenizer.add_bos]}: "
        f"prepare it with {'--bos' if tokenizer.add_bos else '--no-bos'} for the loss of the model's own texts"
        for name, path in sets.items()
        if read_manifest(path).tokenizer.add_bos != tokenizer.add_bos
    ]


def _take(batches: Iterable[dict[str, np.ndarray]], count: int) -> Iterable[dict[str, np.ndarray]]:
    for index, batch in enumerate(batches):
        if index >= count:
            return
        yield batch


def _add(totals: dict[str, float], metrics: Metrics) -> None:
    for name, value in jax.device_get(metrics).items():
        totals[name] += float(value)
