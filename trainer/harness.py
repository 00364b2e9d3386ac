"""Tasks of lm-evaluation-harness (extra `eval`) on a sharded model. Imports the harness: import this module only where tasks are used.

The harness asks for the log-likelihood of continuations, for that of whole texts, and for generated texts; `HarnessModel` computes them
with models/score.py and models/generate.py. Prompts, metrics and their standard errors are the harness's own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.configs.errors import UserError, nearest
from ridgeline.loaders.tokenizers import HuggingFaceTokenizer, Tokenizer
from ridgeline.models.decoder import Decoder
from ridgeline.models.generate import Sampling, generate
from ridgeline.models.score import score

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise UserError(f"tasks need lm-evaluation-harness ({error}); install it: pip install 'ridgeline[eval]'") from None

DEFAULT_NEW_TOKENS = 256
"""Largest number of new tokens of a task that sets none, as in the harness."""
BOOTSTRAP = 1000
"""Resamples of a standard error that has no formula, such as of a perplexity; computed in this process, so not the harness's 100,000."""
_NO_FORK = "DISABLE_MULTIPROC"
_FILES = ("*.yaml", "*.yml")


class HarnessModel(TemplateLM):
    """A decoder as a model of the harness. Every process of the mesh makes the same calls in the same order."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        batch_size: int,
        on_batch: Callable[[], object] = lambda: None,
        cast_once: bool = True,
    ) -> None:
        super().__init__()
        self._on_batch, self._cast_once = on_batch, cast_once
        self.decoder, self.ridgeline_tokenizer, self.eos_ids, self.batch_size = decoder, tokenizer, list(eos_ids), batch_size
        self.max_length = decoder.model.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.ridgeline_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that has no context."""
        return self.ridgeline_tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, in which the names of special tokens are those tokens. It begins with BOS where the model's texts do."""
        tokenizer = self.ridgeline_tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer):
            ids = tokenizer.encode_with_special_tokens(string)[0]
        else:
            (ids,) = tokenizer.encode_batch([string])
        begins = add_special_tokens is None and ids[:1] == [tokenizer.bos_id]
        return ids if begins or add_special_tokens is False else [*tokenizer.prefix, *ids]

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        """Score (texts, context ids, continuation ids); a context that is too long loses its beginning."""
        rows = [((context + continuation)[-(self.max_length + 1) :], len(continuation)) for _, context, continuation in requests]
        if too_long := next((count for _, count in rows if count > self.max_length), None):
            raise UserError(f"a task has a continuation of {too_long} tokens; model.max_seq_len is {self.max_length}")
        return [(found.nats, found.greedy) for found in score(self.decoder, rows, self.batch_size, self._on_batch)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows of the model's length."""
        windows = [
            [
                (None, *make_disjoint_window(pair))
                for pair in get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([window for of_request in windows for window in of_request]))
        return [sum(next(scores)[0] for _ in of_request) for of_request in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to a stop text; requests with the same settings share batches."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        texts = [""] * len(requests)
        for indices in groups.values():
            made = self._generate([requests[index].args[0] for index in indices], requests[indices[0]].args[1])
            for index, text in zip(indices, made, strict=True):
                texts[index] = text
        return texts

    def _generate(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), DEFAULT_NEW_TOKENS))
        tokenizer = self.ridgeline_tokenizer
        until = handle_stop_sequences(wanted.get("until"), eos=tokenizer.decode_all([tokenizer.eos_id]))
        new, sampled = _new_tokens(wanted, self.max_length), bool(wanted.get("do_sample"))
        prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-(self.max_length - new) :] for text in contexts]
        sampling = (
            Sampling(wanted.get("temperature", 1.0), wanted.get("top_k"), wanted.get("top_p")) if sampled else Sampling(temperature=0)
        )
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        results = generate(
            self.decoder,
            [prompts[index] for index in order],
            max_tokens=new,
            sampling=sampling,
            eos_ids=self.eos_ids,
            batch_size=self.batch_size,
            on_batch=self._on_batch,
            cast_once=self._cast_once,
        )
        texts = [""] * len(prompts)
        for index, result in zip(order, results, strict=True):
            texts[index] = postprocess_generated_text(tokenizer.decode(result.tokens), until, None)
        return texts


def _new_tokens(settings: Mapping[str, Any], max_length: int) -> int:
    """Return the largest number of new tokens. Raises UserError when it leaves no room for a prompt."""
    new = int(normalize_gen_kwargs(dict(settings), DEFAULT_NEW_TOKENS)["max_gen_toks"])
    if new >= max_length:
        raise UserError(f"a task generates {new} tokens; model.max_seq_len is {max_length}")
    return new


@dataclass(frozen=True)
class TaskMetric:
    """One metric of a task or a group of tasks."""

    task: str
    metric: str
    """As the harness calls it, with its filter: `acc,none`."""
    value: float
    stderr: float | None
    samples: int | None
    """Number of samples; None for a group."""


class Tasks:
    """Tasks by name, with their data loaded."""

    def __init__(self, names: Sequence[str], directory: Path | None = None) -> None:
        """Load tasks of the harness, or of YAML files in `directory`. Raises UserError: an unknown task, or data that cannot be loaded."""
        if not names:
            raise UserError("no tasks are named")
        if directory is not None and not any(path for pattern in _FILES for path in directory.rglob(pattern)):
            raise UserError(f"{directory}: contains no task files ({', '.join(_FILES)})")
        with _quiet(), _own_randomness():
            manager = self._manager(names, directory)
            for name in names:
                if name not in manager.all_tasks:
                    close = nearest(name, manager.all_tasks)
                    raise UserError(f"unknown task '{name}'" + (f"; did you mean '{close}'?" if close else ""))
            try:
                self._loaded = manager.load(list(names))
            except Exception as error:  # a task file can name any data set and run any code
                raise UserError(f"task {', '.join(names)}: cannot be loaded ({_line(error)})") from error
        for name, task in self._loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                what = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "has images or sound"
                raise UserError(f"task {name} {what}: such tasks are not supported")
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    @staticmethod
    def _manager(names: Sequence[str], directory: Path | None) -> Any:
        if directory is not None:
            own = TaskManager(include_path=str(directory), include_defaults=False)  # the others take seconds to index
            if all(name in own.all_tasks for name in names):
                return own
        return TaskManager(include_path=None if directory is None else str(directory))

    def check_length(self, max_seq_len: int) -> None:
        """Raise UserError for a task that generates more tokens than a model of this length can."""
        with _quiet():
            for task in self._loaded["tasks"].values():
                if task.OUTPUT_TYPE == "generate_until":
                    _new_tokens(task.get_config("generation_kwargs") or {}, max_seq_len)

    def evaluate(self, model: HarnessModel, limit: int | None = None) -> list[TaskMetric]:
        """Return every metric of every task, each time with the same examples in the prompts. limit: samples per task; None: all."""
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        with _quiet(), _own_randomness(), _one_process():
            results = evaluate(lm=model, task_dict=self._loaded, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
        return _metrics(results)


def _metrics(results: Any) -> list[TaskMetric]:
    found = []
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            samples = results.get("n-samples", {}).get(task, {}).get("effective")
            found.append(TaskMetric(task, name, float(value), float(stderr) if isinstance(stderr, int | float) else None, samples))
    return found


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Give the harness its usual seeds, and the process its own state afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Keep the harness from forking this process, whose threads (JAX's) a fork would leave in any state, for each core of the machine."""
    before = os.environ.get(_NO_FORK)
    os.environ[_NO_FORK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_FORK]
        else:
            os.environ[_NO_FORK] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show only errors of the harness, and nothing of it in standard output, which is for results."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
