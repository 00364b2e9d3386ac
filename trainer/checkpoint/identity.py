"""What a checkpoint is bound to: its step, its run, the config, the corpora and the tokenizer. All are in metadata.json, which the seal
covers; a load compares them with the place where the checkpoint is found.

Checkpoints of earlier versions have only the step, the tokenizer and the digest of the config: what is absent is not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ridgeline.configs.diff import classify_changes
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.manifest import read_manifest
from ridgeline.loaders.teacher import read_teacher
from ridgeline.rundir.directory import CONFIG_FILE, RunDir
from ridgeline.trainer.checkpoint.integrity import Damage, sha256_file

RUN = "run"
_CONFIG, _CORPORA, _FILES = "config", "corpora", "tokenizer_files"
_FIXED = ("model.", "lora.")
"""Keys that define what the checkpoint has."""
_USED = (*_FIXED, "precision.", "data.", "evaluation.", "compute.")
"""Keys that commands which read a checkpoint use."""
_MAX_NAMED = 3


def describe(config: Config, run: str, tokenizer_sha256: str | None, tokenizer: Path, corpora: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of metadata.json.

    Args:
      config: of this start.
      run: id of the run.
      tokenizer_sha256: of the corpora (TokenizerInfo); None: not known.
      tokenizer: directory of the run's copy.
      corpora: `corpora_of` the config.
    """
    return {
        RUN: run,
        _CONFIG: config.model_dump(mode="json"),
        "config_sha256": hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
        _CORPORA: dict(corpora),
        "tokenizer": tokenizer_sha256,
        _FILES: files_of(tokenizer),
    }


def corpora_of(config: Config) -> dict[str, str]:
    """Return path -> identity of the training corpora and of teachers' predictions. Raises UserError as their readers."""
    corpora = {str(source.path): read_manifest(source.path).sha256 for source in config.data.train}
    if config.distillation.weight is None:
        return corpora
    return corpora | {str(source.teacher): read_teacher(source.teacher).sha256 for source in config.data.train if source.teacher}


def files_of(tokenizer: Path) -> dict[str, str]:
    """Return name -> sha256 of the files of a tokenizer; {} without a directory. Raises OSError."""
    return {path.name: sha256_file(path) for path in sorted(tokenizer.iterdir()) if path.is_file()} if tokenizer.is_dir() else {}


def run_id(checkpoints: Path) -> str | None:
    """Return the id of the run that a checkpoint directory belongs to; None where no run.json has one."""
    run = RunDir(checkpoints.parent)
    try:
        return (run.record.id or None) if run.exists else None
    except UserError:
        return None


def misplaced(metadata: Mapping[str, Any], step: int, run: str | None) -> Damage | None:
    """Return in which way the checkpoint of `step` of a run is another one; None when it is not, or not known."""
    if metadata.get("step") != step:
        return Damage("identity", "metadata.json", f"it is the checkpoint of step {metadata.get('step')}")
    if run is not None and metadata.get(RUN, run) != run:
        why = f"it is of the run {metadata[RUN]}, not {run}; init_from=RUN_DIR starts from another run"
        return Damage("identity", "metadata.json", why)
    return None


def sealed_config(metadata: Mapping[str, Any]) -> Config | None:
    """Return the config that the checkpoint was saved with; None where it has none that this version reads."""
    try:
        return Config.model_validate(metadata[_CONFIG])
    except (KeyError, TypeError, UserError, ValidationError):
        return None


def check_config(config: Config, metadata: Mapping[str, Any], run_dir: Path) -> str | None:
    """Compare config.yaml of a run with the config that a checkpoint of it was saved with; return a note, or None.

    Raises UserError when the model differs in a way that a resume does not allow: config.yaml was changed after the fact.
    """
    where = f"{run_dir / CONFIG_FILE} differs from the config that the checkpoint of step {metadata['step']} was saved with"
    sealed = sealed_config(metadata)
    if sealed is None:
        return f"{run_dir}: the checkpoint of step {metadata['step']} does not contain its config: {CONFIG_FILE} is used unchecked"
    changes = [c for c in classify_changes(sealed.model_dump(mode="json"), config.model_dump(mode="json")) if c.key.startswith(_USED)]
    wrong = [change for change in changes if change.key.startswith(_FIXED) and not change.allowed]
    named = ", ".join(f"{c.key}: {c.old!r} -> {c.new!r}" for c in (wrong or changes)[:_MAX_NAMED])
    named += f" and {len(wrong or changes) - _MAX_NAMED} more" if len(wrong or changes) > _MAX_NAMED else ""
    if wrong:
        raise UserError(f"{where} ({named}): change it back")
    return f"{where} ({named}): {CONFIG_FILE} is used" if changes else None


def replaced_corpora(metadata: Mapping[str, Any], corpora: Mapping[str, str]) -> list[str]:
    """Return the paths at which another corpus is found than the checkpoint was trained on."""
    stored = metadata.get(_CORPORA, {})
    return [path for path, sha256 in corpora.items() if stored.get(path, sha256) != sha256]


def damaged_tokenizer(metadata: Mapping[str, Any], tokenizer: Path) -> list[str]:
    """Return the names of the files of a run's tokenizer that are not those of the checkpoint."""
    stored = metadata.get(_FILES, {})
    try:
        found = files_of(tokenizer)
    except OSError:
        return sorted(stored)
    return sorted(name for name, sha256 in stored.items() if found.get(name) != sha256)


def check_tokenizer_files(metadata: Mapping[str, Any], tokenizer: Path) -> None:
    """Raise UserError when the files of a run's tokenizer are not those of the checkpoint."""
    if names := damaged_tokenizer(metadata, tokenizer):
        raise UserError(
            f"{tokenizer / names[0]} is missing or damaged: it is not the file that the checkpoint of step {metadata['step']} was saved "
            "with; copy it again from the tokenizer of the corpus, or start the run again"
        )
