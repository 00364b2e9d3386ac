"""Running a teacher over a corpus to store its predictions for distillation (loaders/teacher.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.loader import EvaluationSet
from ridgeline.loaders.manifest import check_same_tokenizer, check_tokenizer, read_manifest
from ridgeline.loaders.rows import RowSource
from ridgeline.loaders.shard_hashes import verify
from ridgeline.loaders.teacher import Predictions, TeacherManifest, TeacherWriter
from ridgeline.models.distillation import Teacher
from ridgeline.models.generate import generation_config
from ridgeline.trainer.evaluation import evaluation_config
from ridgeline.trainer.pretrained import LoadedModel
from ridgeline.trainer.reference import digest_params
from ridgeline.trainer.step import make_top_prediction_step, to_global

IN_FLIGHT = 2
"""Batches that are computed while the one before is written."""


@dataclass(frozen=True)
class TeacherSettings:
    """What is stored, and which part of it."""

    corpus: Path
    output: Path
    top_k: int = 64
    temperature: float = 1.0
    dtype: str = "float16"
    document_masking: bool = True
    slice: tuple[int, int] = (0, 1)
    """(I, N): only every N-th file from I on; (0, 1): all, and teacher.json."""
    overwrite: bool = False


def teacher_config(config: Config, *, seq_len: int, rows: int, document_masking: bool) -> Config:
    """Return the config of a teacher: as that of an evaluation, without pipeline stages and shards of the sequence."""
    config = evaluation_config(generation_config(config), seq_len=seq_len, rows=rows)
    return config.model_copy(update={"data": config.data.model_copy(update={"document_masking": document_masking})})


def row_length(corpus: Path, seq_len: int | None) -> int:
    """Return the tokens per row of a corpus: `seq_len`, or the length of its packed rows. Raises UserError, CorpusError."""
    packed = read_manifest(corpus).pack_length
    if seq_len is None and packed is None:
        raise UserError(f"{corpus} has no packed rows: give the data.seq_len that the student is trained with (--seq-len)")
    return seq_len or packed or 0


def write_predictions(
    teacher: LoadedModel, settings: TeacherSettings, *, progress: Callable[[str, int, int], None] | None = None
) -> TeacherManifest | None:
    """Store the teacher's predictions at every position of a corpus; return the manifest, or None after a slice.

    teacher: loaded with `teacher_config`, whose rows per step are used. progress: receives (name, rows done, rows in total).
    Raises UserError: the corpus does not fit the teacher, the directory has something else, or the logits are not finite.
    """
    config, partitioner, manifest = teacher.config, teacher.partitioner, read_manifest(settings.corpus)
    if manifest.has_pairs:
        raise UserError(f"{settings.corpus} has preference pairs, which have no teacher")
    tokenizer = check_tokenizer([(settings.corpus, manifest)], config.model.vocab_size)
    check_same_tokenizer(None if teacher.source.tokenizer is None else teacher.source.tokenizer.sha256, tokenizer.sha256, "the teacher")
    if settings.top_k > tokenizer.vocab_size:
        raise UserError(f"--top-k must be at most {tokenizer.vocab_size}, the ids of the tokenizer; got {settings.top_k}")
    verify(settings.corpus, manifest)
    source = RowSource(settings.corpus, config.data.seq_len, document_masking=settings.document_masking, manifest=manifest)
    predictions = Predictions(
        corpus=manifest.sha256,
        model=digest_params(teacher.params),
        rows=source.num_rows,
        seq_len=config.data.seq_len,
        document_masking=settings.document_masking,
        vocab_size=tokenizer.vocab_size,
        top_k=settings.top_k,
        temperature=settings.temperature,
        dtype=settings.dtype,
    )
    writer = TeacherWriter(settings.output, predictions, overwrite=settings.overwrite)
    batch_size = config.data.batch_size
    step = jax.jit(
        make_top_prediction_step(
            teacher.spec, config, partitioner, count=settings.top_k, temperature=settings.temperature, vocab_size=tokenizer.vocab_size
        )
    )
    numbers = writer.missing(*settings.slice)
    total, done = sum(len(predictions.rows_of(number)) for number in numbers), 0

    def blocks(rows: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal done
        pending: deque[tuple[int, Teacher]] = deque()
        starts = range(rows.start, rows.stop, batch_size)
        for start in [*starts, *[None] * IN_FLIGHT]:
            if start is not None:
                batch = EvaluationSet(source, batch_size, np.arange(batch_size) + start).batch(0)
                pending.append((min(batch_size, rows.stop - start), step(teacher.params, to_global(batch, partitioner))))
            if start is None or len(pending) > IN_FLIGHT:
                if not pending:
                    return
                count, found = pending.popleft()
                ids, values = jax.device_get(found)
                if not np.isfinite(values[:count, :, 0]).all():
                    raise UserError(f"{teacher.source.path}: logits that are not finite in {settings.corpus}")
                yield ids[:count], values[:count]
                done += count
                if progress is not None:
                    progress(str(settings.corpus), done, total)

    for number in numbers:
        writer.write(number, blocks(predictions.rows_of(number)))
    return None if settings.slice != (0, 1) else writer.finish()
