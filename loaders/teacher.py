"""A teacher's most likely tokens at every position of a corpus, as `ridge data teacher` stores them and the loader reads them.

A directory has files of fixed-size records and teacher.json, which is written last: a directory with it is complete. A record has the
prediction at one position: K token ids (uint16 or uint32), most likely first, and K + 1 log-probabilities (float16, bfloat16 or
float32), of which the last is that of all other tokens. Record i * T + t is of token t of row i, in the rows of T tokens that training
reads (loaders/rows.py), so files are mapped into memory and a row is one contiguous read. All numbers are little-endian.

Legend: N rows, T tokens per row, K stored tokens, k used ones, E = k or k + 1 log-probabilities.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.schema import DataConfig, DataSource
from ridgeline.configs.tuning_schema import DistillationConfig
from ridgeline.loaders.manifest import CorpusError, Count, Digest, Manifest
from ridgeline.loaders.token_reader import check_size
from ridgeline.loaders.token_record import token_dtype
from ridgeline.rundir.files import first_problem, make_directory, temporary, write_atomically

TEACHER_NAME = "teacher.json"
FORMAT, VERSION = "ridgeline-teacher", 1
FILE_BYTES = 256_000_000
"""Approximate size of a file: what an interruption loses at most."""
DTYPES = ("float16", "bfloat16", "float32")
"""Types of stored log-probabilities."""
_PROGRESS = "progress.json"
_AS_STORED = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}


@dataclass(frozen=True)
class Predictions:
    """What is stored, apart from the files."""

    corpus: Digest
    """Digest of the corpus's manifest."""
    model: Digest
    """Digest of the teacher's parameters."""
    rows: Annotated[Count, Field(ge=1)]
    seq_len: Annotated[int, Field(ge=1, lt=1 << 31)]
    """Tokens per row (T)."""
    document_masking: bool
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    """Ids that the probabilities are over: those of the tokenizer."""
    top_k: Annotated[int, Field(ge=1, lt=1 << 31)]
    """Stored tokens per position (K)."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The teacher's logits were divided by it."""
    dtype: Annotated[str, Field(pattern="^(float16|bfloat16|float32)$")]
    """Type of the log-probabilities."""

    @property
    def record(self) -> np.dtype:
        """The dtype of the prediction at one position; bfloat16 as uint16."""
        values = np.dtype(_AS_STORED[self.dtype])
        return np.dtype([("ids", token_dtype(self.vocab_size), (self.top_k,)), ("log_probs", values, (self.top_k + 1,))])

    @property
    def rows_per_file(self) -> int:
        """Rows of each file but the last."""
        return max(1, FILE_BYTES // (self.seq_len * self.record.itemsize))

    @property
    def num_files(self) -> int:
        """Number of files."""
        return -(-self.rows // self.rows_per_file)

    def rows_of(self, number: int) -> range:
        """Return the rows of a file."""
        first = number * self.rows_per_file
        return range(first, min(first + self.rows_per_file, self.rows))


@dataclass(frozen=True)
class PredictionFile:
    """One file."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]{1,255}$")]
    bytes: Annotated[Count, Field(ge=1)]
    sha256: Digest


@dataclass(frozen=True)
class TeacherManifest:
    """The content of teacher.json."""

    predictions: Predictions
    shards: tuple[PredictionFile, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the content, including its digest."""
        content = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(asdict(self)))}
        return {**content, "sha256": _digest(content)}

    @property
    def sha256(self) -> str:
        """Digest of the content, which covers that of every file."""
        return str(self.to_json()["sha256"])

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(shard.bytes for shard in self.shards)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_teacher(directory: Path) -> TeacherManifest:
    """Read teacher.json. Raises CorpusError when it is missing, damaged or of another version, or the directory is not complete."""
    path = Path(directory) / TEACHER_NAME
    if not path.is_file():
        unfinished = " (it is not finished: run `ridge data teacher` again)" if (path.parent / _PROGRESS).is_file() else ""
        raise CorpusError(f"no teacher's predictions in {directory}: it has no {TEACHER_NAME}{unfinished}")
    try:
        content = json.loads(read_limited(path))
        stored = content.pop("sha256", None)
    except (ValueError, AttributeError, RecursionError):
        raise CorpusError(f"{path} is damaged: it is no JSON object") from None
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CorpusError(f"{path} is not of format {FORMAT}, version {VERSION}")
    if stored != _digest(content):
        raise CorpusError(f"{path} was modified after it was written (the digest does not match)")
    try:
        known = {key: content.get(key) for key in ("predictions", "shards")}
        manifest = TypeAdapter(TeacherManifest).validate_json(json.dumps(known), strict=True)
    except ValidationError as error:
        raise CorpusError(f"{path} is damaged: {first_problem(error)}") from None
    found = manifest.predictions
    sizes = [len(found.rows_of(number)) * found.seq_len * found.record.itemsize for number in range(found.num_files)]
    if [shard.bytes for shard in manifest.shards] != sizes:
        raise CorpusError(f"{path} is damaged: its files do not have the size of its rows")
    return manifest


class TeacherReader:
    """Reads the predictions of rows. Safe to use from several threads. Picklable: files are mapped on first use."""

    def __init__(self, directory: Path, distillation: DistillationConfig) -> None:
        """Check the size of every file. Raises CorpusError."""
        self.directory, self._settings = Path(directory), distillation
        self.manifest = read_teacher(directory)
        for shard in self.manifest.shards:
            check_size(self.directory / shard.name, shard)
        self._files: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "distillation": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return `teacher_ids` int32 [N, T, k] and `teacher_log_probs` float32 [N, T, E] of rows by index [N]."""
        found, settings = self.manifest.predictions, self._settings
        records = np.stack([self._file(int(row) // found.rows_per_file)[int(row) % found.rows_per_file] for row in rows])
        values = np.ascontiguousarray(records["log_probs"])
        if found.dtype == "bfloat16":
            values = values.view(ml_dtypes.bfloat16)
        values, k = values.astype(np.float32), settings.top_k
        if settings.rest == "renormalize":
            values = values[..., :k] * np.float32(found.temperature / settings.temperature)
        elif k < found.top_k:  # the tokens that are not used are among the others
            values = np.concatenate([values[..., :k], np.logaddexp.reduce(values[..., k:], axis=-1, keepdims=True)], axis=-1)
        return {"teacher_ids": records["ids"][..., :k].astype(np.int32), "teacher_log_probs": values}

    def _file(self, number: int) -> np.ndarray:
        """Return a file's records [rows, T]."""
        file = self._files.get(number)
        if file is None:
            found, path = self.manifest.predictions, self.directory / self.manifest.shards[number].name
            shape = (len(found.rows_of(number)), found.seq_len)
            try:
                file = self._files[number] = np.memmap(path, found.record, "r", shape=shape)
            except (OSError, ValueError) as error:
                raise CorpusError(f"cannot read {path}: {error}") from None
        return file


def open_teacher(source: DataSource, corpus: Manifest, data: DataConfig, distillation: DistillationConfig) -> TeacherReader | None:
    """Open the predictions of a corpus that `distillation` uses; None without distillation.

    Raises CorpusError: missing or damaged. Raises UserError: of another corpus, other rows, too few tokens or another temperature.
    """
    if distillation.weight is None:
        return None
    assert source.teacher is not None  # configs/tuning_rules.py
    reader = TeacherReader(source.teacher, distillation)
    found, where = reader.manifest.predictions, str(source.teacher)
    if found.corpus != corpus.sha256:
        raise UserError(f"{where} has the predictions of another corpus than {source.path}: run `ridge data teacher` for it")
    if (found.seq_len, found.document_masking) != (data.seq_len, data.document_masking):
        made = f"data.seq_len={found.seq_len} data.document_masking={str(found.document_masking).lower()}"
        raise UserError(f"{where} has the predictions of other rows, those of {made}: set these, or run `ridge data teacher` again")
    if distillation.top_k > found.top_k:
        raise UserError(f"distillation.top_k must be at most {found.top_k}, the tokens in {where}; got {distillation.top_k}")
    if distillation.rest == "bucket" and found.temperature != distillation.temperature:
        raise UserError(
            f"distillation.temperature must be {found.temperature:g}, that of {where}, where distillation.rest=bucket; "
            f"got {distillation.temperature:g}"
        )
    return reader


class TeacherWriter:
    """Writes the predictions of a corpus file by file; finished files stay when it is interrupted."""

    def __init__(self, directory: Path, predictions: Predictions, *, overwrite: bool = False) -> None:
        """Begin or continue. `overwrite`: delete what was written with other settings. Raises UserError where the directory has other
        content."""
        self.directory, self.predictions = Path(directory), predictions
        wanted = json.loads(json.dumps(asdict(predictions)))
        for name, key in ((TEACHER_NAME, "predictions"), (_PROGRESS, None)):
            path = self.directory / name
            if not path.is_file():
                continue
            try:
                content = json.loads(read_limited(path))
                stored = content if key is None else content[key]
            except (ValueError, KeyError, TypeError):
                stored = None
            if stored != wanted and not overwrite:
                raise UserError(f"{directory} has predictions of another model, corpus or settings; replace them with --overwrite")
            if stored != wanted:
                path.unlink()
                for old in self.directory.glob("predictions-*"):
                    old.unlink()
        if not self.complete:
            make_directory(self.directory)
            write_atomically(self.directory / _PROGRESS, json.dumps(wanted).encode())

    @property
    def complete(self) -> bool:
        """Whether teacher.json is written."""
        return (self.directory / TEACHER_NAME).is_file()

    def missing(self, index: int = 0, count: int = 1) -> list[int]:
        """Return the numbers of the files that are not written, of every count-th file from `index` on."""
        return [] if self.complete else [n for n in range(index, self.predictions.num_files, count) if self._read(n) is None]

    def write(self, number: int, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write a file. blocks: ids [n, T, K] and float32 log-probabilities [n, T, K + 1] of its rows, in order. Raises OSError."""
        name, digest, size = _name(number), hashlib.sha256(), 0
        written = temporary(self.directory / name)
        with written.open("wb") as file:
            for ids, values in blocks:
                records = np.empty(ids.shape[:2], self.predictions.record)
                records["ids"], records["log_probs"] = ids, self._stored(values)
                content = records.tobytes()
                digest.update(content)
                size += file.write(content)
            file.flush()
            os.fsync(file.fileno())
        assert size == len(self.predictions.rows_of(number)) * self.predictions.seq_len * self.predictions.record.itemsize, size
        written.replace(self.directory / name)
        sidecar = json.dumps(asdict(PredictionFile(name, size, digest.hexdigest())))
        write_atomically(self._sidecar(number), sidecar.encode())

    def finish(self) -> TeacherManifest:
        """Write teacher.json when all files are written; return it."""
        if self.complete:
            return read_teacher(self.directory)
        files = [self._read(number) for number in range(self.predictions.num_files)]
        assert all(file is not None for file in files), "files are missing"
        manifest = TeacherManifest(self.predictions, tuple(file for file in files if file is not None))
        write_atomically(self.directory / TEACHER_NAME, (json.dumps(manifest.to_json(), indent=1) + "\n").encode())
        for number in range(len(files)):
            self._sidecar(number).unlink(missing_ok=True)
        (self.directory / _PROGRESS).unlink(missing_ok=True)
        return manifest

    def _stored(self, values: np.ndarray) -> np.ndarray:
        if self.predictions.dtype == "bfloat16":
            return np.ascontiguousarray(values.astype(ml_dtypes.bfloat16)).view("<u2")
        with np.errstate(over="ignore"):  # below the range of float16: probability 0
            return values.astype(_AS_STORED[self.predictions.dtype])

    def _sidecar(self, number: int) -> Path:
        return self.directory / f"{_name(number)}.json"

    def _read(self, number: int) -> PredictionFile | None:
        """Return the entry of a file that is written; None where it is not."""
        try:
            file = PredictionFile(**json.loads(read_limited(self._sidecar(number))))
            check_size(self.directory / file.name, file)
        except (UserError, ValueError, TypeError):
            return None
        return file


def _name(number: int) -> str:
    return f"predictions-{number:05d}.bin"
