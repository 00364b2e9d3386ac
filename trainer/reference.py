"""Log-probabilities of preference pairs by the model before training, computed once and kept in the run directory.

reference.npz has a JSON text `facts` (format, data.seq_len, digest of the starting parameters) and for each corpus, by the digest of its
manifest, the log-probabilities float32 [pairs, 2] of the counted tokens of the chosen and the rejected side.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.loader import EvaluationSet
from ridgeline.loaders.manifest import read_manifest
from ridgeline.rundir.directory import REFERENCE_FILE
from ridgeline.rundir.files import write_atomically
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.checkpoint.integrity import sha256_file
from ridgeline.trainer.evaluation import evaluation_rows
from ridgeline.trainer.state import Tree
from ridgeline.trainer.step import local_rows, to_global

FORMAT = 1
METADATA = "reference"
"""Key of the digest of the file in the metadata of checkpoints."""


def check_pairs(config: Config) -> None:
    """Raise UserError where a training corpus has preference pairs and `preference.loss` is null, or the other way around."""
    for source in config.data.train:
        if read_manifest(source.path).has_pairs == (config.preference.loss is not None):
            continue
        if config.preference.loss is None:
            raise UserError(f"data.train: {source.path} has preference pairs; set preference.loss=dpo (next-token training reads no pairs)")
        raise UserError(f"data.train: {source.path} has no preference pairs, which preference.loss={config.preference.loss} needs")
    for name, path in config.evaluation.sets.items():
        if config.preference.loss is None and read_manifest(path).has_pairs:
            raise UserError(f"evaluation.sets.{name}: {path} has preference pairs; set preference.loss=dpo, or remove the set")


def open_pairs(config: Config, log: Callable[[str], None]) -> dict[Path, PairSource]:
    """Return path -> source of the corpora and evaluation sets with pairs; {} without `preference.loss`.

    log: receives a line per corpus with pairs that are longer than a row. Raises UserError, CorpusError.
    """
    if config.preference.loss is None:
        return {}
    paths = [source.path for source in config.data.train]
    paths += [path for path in config.evaluation.sets.values() if read_manifest(path).has_pairs]
    found = {path: PairSource(path, config.data.seq_len) for path in paths}
    for path, source in found.items():
        if source.too_long:
            pairs = source.too_long + source.num_pairs
            log(f"{path}: {source.too_long:,} of {pairs:,} pairs are left out: a side is longer than data.seq_len={config.data.seq_len}")
    return found


def compute(
    config: Config,
    partitioner: Partitioner,
    log_probs: Callable[[Tree, Any], jax.Array],
    params: Tree,
    pairs: Mapping[Path, PairSource],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Set `reference` of the sources. All processes call it.

    Args:
      config: of the run.
      partitioner: of its mesh.
      log_probs: compiled `make_log_prob_step`.
      params: parameters before training.
      pairs: from `open_pairs`.
      progress: called after each batch.

    Raises UserError for a log-probability that is not finite.
    """
    batch_size = evaluation_rows(config)
    rows = local_rows(batch_size, partitioner)
    for path, source in pairs.items():
        pending, found = list[jax.Array](), list[np.ndarray]()
        for batch in EvaluationSet(source, batch_size, rows):
            pending.append(log_probs(params, to_global(batch, partitioner)))
            if len(pending) > 2:
                found.append(jax.device_get(pending.pop(0)))
            progress()
        found += jax.device_get(pending)
        values = np.concatenate(found)[: source.num_rows].reshape(-1, 2)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if bad.size:
            raise UserError(
                f"{path}: the starting parameters give {bad.size:,} of {len(values):,} pairs a log-probability that is not finite"
            )
        source.reference = values


def digest_params(params: Tree) -> str:
    """Return a digest of the values of parameters, the same on every mesh. All processes call it."""

    def checksum(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.uint32(1)
        for dim, size in enumerate(leaf.shape):
            place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim) * 2 + jnp.uint32(size)
        mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B) * (place | 1)
        return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)

    sums = jax.device_get(jax.jit(lambda tree: [checksum(leaf) for leaf in jax.tree.leaves(tree)])(params))
    return hashlib.sha256(json.dumps([int(value) for value in sums]).encode()).hexdigest()


def write(run: Path, config: Config, weights: str, pairs: Mapping[Path, PairSource]) -> None:
    """Write the references of the sources into a run directory, atomically. `weights`: `digest_params`. Raises OSError."""
    content = io.BytesIO()
    facts = {"format": FORMAT, "seq_len": config.data.seq_len, "weights": weights}
    arrays: dict[str, Any] = {source.manifest.sha256: source.reference for source in pairs.values()}
    np.savez(content, facts=np.array(json.dumps(facts)), **arrays)
    write_atomically(run / REFERENCE_FILE, content.getvalue())


def read(run: Path, config: Config, pairs: Mapping[Path, PairSource], *, weights: str | None = None, sha256: str | None = None) -> None:
    """Set `reference` of the sources from the file in a run directory.

    Args:
      run: directory of the run.
      config: of this start.
      pairs: from `open_pairs`.
      weights: `digest_params` of the starting parameters; None: training has begun, they are not known.
      sha256: of the file, from the checkpoint that the start continues from; None: not known.

    Raises UserError: it is missing, damaged, or of other data, rows or parameters.
    """
    file = run / REFERENCE_FILE
    again = "start a new run, whose reference is computed from its starting parameters"
    if not file.is_file():
        raise UserError(f"{file} is missing: the reference is the model before training, which has begun; restore the file, or {again}")
    if sha256 is not None and sha256_file(file) != sha256:
        raise UserError(f"{file} is not the file that the checkpoint was trained with; restore it, or {again}")
    try:
        with np.load(file, allow_pickle=False) as content:
            stored = {name: content[name] for name in content.files}
        facts = dict(json.loads(str(stored.pop("facts"))))
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}); restore it, or {again}") from None
    expected = {"format": FORMAT, "seq_len": config.data.seq_len, **({} if weights is None else {"weights": weights})}
    for key, value in expected.items():
        if facts.get(key) != value:
            raise UserError(f"{file} is of {key}={facts.get(key)}, not {value}; change it back, or {again}")
    for path, source in pairs.items():
        values = stored.get(source.manifest.sha256)
        if values is None or values.shape != (source.num_pairs, 2) or values.dtype != np.float32:
            raise UserError(f"{file} has no log-probabilities of {path}: it was added or replaced; change it back, or {again}")
        source.reference = values
