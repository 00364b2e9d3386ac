"""Reading checkpoints: list the steps of a run, verify one against its manifest, and load it onto a mesh. Nothing is renamed or deleted.

Every process reads payload. Process 0 lists, and the other processes receive its result over JAX's coordination service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.agreement import Agreement, PeerError
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity, payload
from ridgeline.trainer.checkpoint.identity import misplaced, run_id
from ridgeline.trainer.checkpoint.integrity import Damage
from ridgeline.trainer.checkpoint.seal import METADATA, DamagedError, check_digests, check_names, read_metadata
from ridgeline.trainer.failures import CheckpointError

State = Any
_LARGE_BYTES = 1 << 20
_MAX_TEXT = 600


class CheckpointReader:
    """Lists and restores the checkpoints of one run. All processes construct and call it in the same order.

    Args:
      directory: the run's checkpoint directory, on a filesystem shared by all processes.
      config: `verify` is used.
      log: receives warnings, one line each (process 0).
    """

    def __init__(self, directory: Path | str, config: CheckpointConfig, *, log: Callable[[str], None] | None = None) -> None:
        self.directory, self.config = Path(directory).absolute(), config
        self._log = log or logging.getLogger("ridgeline").warning
        self._agreement = Agreement("checkpoint")

    def steps(self) -> list[int]:
        """Return the complete steps in ascending order. Raises UserError for an unreadable directory, or one of something else."""
        return self._agreement.first(self._complete_steps)

    def latest_step(self) -> int | None:
        """Return the newest complete step whose metadata is its own, or None; its payload is not read. Raises UserError as `steps`."""

        def newest() -> int | None:
            self._complete_steps()
            return newest_step(self.directory)

        return self._agreement.first(newest)

    def has_checkpoints(self) -> bool:
        """Return whether there is a complete step, or one that was complete before it was found damaged.

        A run whose first save was interrupted has none and starts at step 0. A run with only damaged steps must not: `restore` raises.
        """
        return self._agreement.first(lambda: bool(self._complete_steps() or dirs.damaged_steps(self.directory)))

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Return metadata.json of a complete step. Raises UserError when it cannot be read."""

        def read() -> dict[str, Any]:
            dirs.check_complete(self.directory, step)
            try:
                return read_metadata(dirs.step_dir(self.directory, step))
            except DamagedError as error:
                raise UserError(f"checkpoint of step {step}: {error}") from None

        return self._agreement.first(read)

    def restore(self, abstract_state: State, step: int | None = None, *, partial: bool = False) -> tuple[State, dict[str, Any]]:
        """Restore the newest good step, or exactly `step`; return the state and its metadata. A damaged step is reported and skipped.

        Args:
          abstract_state: ShapeDtypeStructs with NamedShardings, on any mesh and number of processes.
          step: None: the newest good one.
          partial: `abstract_state` is a subset of what was saved.

        Raises:
          UserError: there is no good step; `step` is missing or damaged; the state does not fit (the step is then left in place).
          CheckpointError: Orbax cannot load an undamaged step.
        """
        problems = []
        for candidate in self._candidates(step):
            try:
                restored = self._restore_step(candidate, abstract_state, partial)
            except DamagedError as damaged:
                more = f" and {len(damaged.damage) - 1} more" if len(damaged.damage) > 1 else ""
                problem = f"checkpoint of step {candidate} is damaged: {damaged.damage[0]}{more}"
                problems.append(self._skip_damaged(candidate, damaged.damage[0], problem))
            else:
                self._restored(candidate)
                return restored
        others = f"; complete: {', '.join(map(str, self.steps())) or 'none'}" if step is not None else ""
        raise UserError(f"no good checkpoint in {self.directory}: " + "; ".join(problems) + others)

    def _complete_steps(self) -> list[int]:
        """Process 0: return the complete steps in ascending order."""
        dirs.check_ours(self.directory)
        return dirs.complete_steps(self.directory)

    def _skip_damaged(self, step: int, damage: Damage, problem: str) -> str:
        """Report a damaged step; return the problem for the error message."""
        if self._agreement.process == 0:
            self._log(f"WARNING: {problem}; skipped")
        return problem

    def _restored(self, step: int) -> None:
        """React to a restored step."""

    def _candidates(self, wanted: int | None) -> list[int]:
        """Return the complete steps, newest first, or only the wanted one. Raises UserError when there is none."""
        complete = self.steps()
        if wanted is not None:
            self._agreement.first(lambda: dirs.check_complete(self.directory, wanted))
        if not complete:
            damaged = self._agreement.first(lambda: dirs.damaged_steps(self.directory))
            aside = f", only damaged ones set aside earlier: {', '.join(damaged)}" if damaged else ""
            raise UserError(f"no checkpoint in {self.directory}{aside}")
        return [wanted] if wanted is not None else complete[::-1]

    def _restore_step(self, step: int, abstract_state: State, partial: bool) -> tuple[State, dict[str, Any]]:
        """Verify and load one step. Raises DamagedError.

        The small files are verified first: metadata.json and Orbax's indices can then be trusted. The large ones contain only numbers and
        are verified *while* they are loaded, so that the disk is read once; the state is returned only after they are verified. With
        several processes everything is verified before loading: a process that fails to load would leave the others waiting in Orbax.
        """
        path = dirs.step_dir(self.directory, step)
        manifest = check_names(path, self._agreement)
        small = [name for name, entry in manifest.items() if entry.size_bytes < _LARGE_BYTES or name == METADATA]
        large = [name for name in manifest if name not in set(small)] if self.config.verify else []
        check_digests(path, manifest, small if self.config.verify else [METADATA], self._agreement)
        metadata = self.read_metadata(step)
        if problem := misplaced(metadata, step, self._agreement.first(lambda: run_id(self.directory))):
            raise DamagedError([problem])
        payload.check_matches(metadata["arrays"], abstract_state, partial=partial, where=str(path))
        if self._agreement.count > 1:
            check_digests(path, manifest, large, self._agreement)
            return self._load(path, abstract_state), metadata
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-verify") as pool:
            verification = pool.submit(check_digests, path, manifest, large, self._agreement)
            try:
                state = self._load(path, abstract_state)
            finally:
                verification.result()  # damage explains a failed load, and is raised in its place
        return state, metadata

    def _load(self, path: Path, abstract_state: State) -> State:
        try:
            with jax.transfer_guard("allow"):
                return jax.block_until_ready(payload.load(path, abstract_state))
        except Exception as error:
            hint = "" if self.config.verify else "; with checkpoint.verify=true a damaged step is skipped"
            raise CheckpointError(f"{path} cannot be loaded: {error_text(error)}{hint}") from error


def newest_step(checkpoints: Path) -> int | None:
    """Return the newest complete step whose metadata is undamaged and its own, or None; payload is not read.

    Process 0. Raises UserError for an unreadable directory, or one of something else.
    """
    dirs.check_ours(checkpoints)
    run = run_id(checkpoints)
    for step in reversed(dirs.complete_steps(checkpoints)):
        try:
            _sealed_metadata(checkpoints, step, run)
        except DamagedError:
            continue
        return step
    return None


def check_startable(checkpoints: Path, wanted: int | None = None) -> dict[str, Any] | None:
    """Return the metadata of the step that a start would restore, by all but the payload; None for a run without checkpoints.

    Process 0; nothing is changed. wanted: the step to restore; None: the newest good one. Raises UserError as `restore`, with the damage of
    each step, where no step is good.
    """
    dirs.check_ours(checkpoints)
    complete, run, problems = dirs.complete_steps(checkpoints), run_id(checkpoints), []
    for step in [wanted] if wanted is not None else complete[::-1]:
        try:
            return _sealed_metadata(checkpoints, step, run, listing=True)
        except DamagedError as error:
            problems.append(f"checkpoint of step {step} is damaged: {error}")
    if not problems and (aside := dirs.damaged_steps(checkpoints)):
        problems.append(f"only damaged ones set aside earlier: {', '.join(aside)}")
    if problems:
        raise UserError(f"no good checkpoint in {checkpoints}: {'; '.join(problems)}")
    return None


def _sealed_metadata(checkpoints: Path, step: int, run: str | None, *, listing: bool = False) -> dict[str, Any]:
    """Return the verified metadata.json of a step. listing: compare the names and sizes of all files, too. Raises DamagedError."""
    path = dirs.step_dir(checkpoints, step)
    try:
        manifest = integrity.read_manifest(path)
    except integrity.ManifestDamage as error:
        raise DamagedError([Damage("manifest", integrity.MANIFEST, str(error))]) from None
    damage = integrity.check_listing(path, manifest) if listing else []
    if METADATA not in manifest:
        damage.append(Damage("missing", METADATA))
    damage = damage or integrity.check_digests(path, manifest, [METADATA], threads=1)
    if damage:
        raise DamagedError(damage)
    metadata = read_metadata(path)
    if problem := misplaced(metadata, step, run):
        raise DamagedError([problem])
    return metadata


def error_text(error: BaseException) -> str:
    """Return an error as one line, without the pages of settings that TensorStore adds."""
    text = " ".join(str(error).split("[tensorstore_spec")[0].split())
    name = "" if isinstance(error, PeerError | UserError) else f"{type(error).__name__}: "
    return name + (text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ...")
