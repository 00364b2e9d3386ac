"""Delete the checkpoints that retention no longer keeps, of a run that is not running (`ridge checkpoint prune`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.listing import verify
from ridgeline.trainer.checkpoint.retention import retention
from ridgeline.trainer.checkpoint.seal import is_finite_verified


@dataclass(frozen=True)
class Pruned:
    """What was deleted, or would be."""

    deleted: dict[str, int]
    """Directory name -> bytes."""
    kept: list[int]
    """Complete steps that stay."""
    damaged: list[int]
    """Newest steps that are damaged: they do not count as kept (`ridge checkpoint repair`)."""

    @property
    def freed_bytes(self) -> int:
        """Bytes of what was deleted."""
        return sum(self.deleted.values())


def prune(
    root: Path, config: CheckpointConfig, *, keep: Collection[int] = (), newest_proven: bool = False, dry_run: bool = False
) -> Pruned:
    """Delete what a run with this config would delete after a save; the caller holds the lease of the run.

    The steps that `keep_last` counts are read and verified first: without as many good ones, nothing is deleted.

    Args:
      root: the checkpoint directory.
      config: the retention keys are used.
      keep: steps that stay besides.
      newest_proven: as in `retention.steps_to_delete`.
      dry_run: change nothing.

    Raises UserError for a directory that is not one of ours, a step in `keep` that is not there, or one that cannot be deleted.
    """
    dirs.check_ours(root)
    for step in keep:
        dirs.check_complete(root, step)
    good: list[int] = []
    damaged: list[int] = []
    wanted = config.keep_last if newest_proven else max(config.keep_last, 2)
    try:
        for step in reversed(dirs.complete_steps(root)):
            if len(good) == wanted:
                break
            if verify(root, step):
                damaged.append(step)
            elif is_finite_verified(dirs.step_dir(root, step)):
                good.append(step)
        old = retention(root, config, good, newest_proven=newest_proven)
        steps = [step for step in old.steps if step not in keep]
        names = [dirs.step_dir(root, step).name for step in steps] + old.expired
        deleted = {name: _size_bytes(root / name) for name in names}
        if not dry_run:
            for step in steps:
                dirs.delete(root, step)
            for name in old.expired:
                dirs.remove(root / name)
        kept = [step for step in dirs.complete_steps(root) if step not in steps]
    except OSError as error:
        raise UserError(f"cannot prune {error.filename or root}: {error.strerror or error}") from error
    return Pruned(deleted, kept, sorted(damaged))


def _size_bytes(path: Path) -> int:
    try:
        return sum(integrity.list_files(path).values())
    except OSError:
        return 0
