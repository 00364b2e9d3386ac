"""`ridge checkpoint repair | prune | copy`: what changes the checkpoints of a run. Refused while the run is live."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ridgeline.cli.options import FAILED_CHECK, Int32Range, json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_bytes, plural
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.lease import acquire, live_holder, this_process

_RUN = click.argument("run", type=click.Path(path_type=Path))
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")
_LEASE_S = 30.0


@contextlib.contextmanager
def stopped(run: RunDir, dry_run: bool = False) -> Iterator[None]:
    """Hold the lease of a run, so that no start of it writes meanwhile. Raises UserError while one is live."""
    if (holder := live_holder(run.path)) is not None:
        raise UserError(f"{run.path} is in use: {holder} is writing it; stop that start first (ridge cancel)")
    if dry_run:
        yield
        return
    try:
        lease = acquire(run.path, this_process(_LEASE_S), log=lambda line: print(line, file=sys.stderr))
    except OSError as error:
        raise UserError(f"cannot write {run.path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lease.release()


@click.command()
@_RUN
@click.option("--from", "sources", multiple=True, metavar="PLACE", help="Directory or URL with copies of these checkpoints; repeatable.")
@click.option("--delete", is_flag=True, help="Delete files that are replaced, instead of moving them aside.")
@_DRY_RUN
@json_option
def repair(run: Path, sources: tuple[str, ...], delete: bool, dry_run: bool, as_json: bool) -> int:
    """Repair the checkpoints of RUN, so that its next start begins at the newest good one.

    Clears what killed saves left, rebuilds damaged manifests that the files prove, replaces damaged files by copies with the recorded
    sha256 (from --from, and from checkpoint.copy_to of the run), and sets aside what cannot be repaired. Reads every file.
    Exits with code 1 when a checkpoint is lost.
    """
    from ridgeline.trainer.checkpoint import repair as repairs
    from ridgeline.trainer.checkpoint.listing import entries
    from ridgeline.trainer.checkpoint.store import Store

    directory = RunDir.open(run)
    root = directory.checkpoints
    given = dict.fromkeys(sources)
    if directory.config is not None and directory.config.checkpoint.copy_to is not None:
        given[directory.config.checkpoint.copy_to] = None
    with stopped(directory, dry_run):
        report = repairs.repair(root, [Store(place) for place in given], dry_run=dry_run, delete=delete)
    lost = {one.step for one in report.lost}
    resumes = max((entry.step for entry in entries(root) if entry.state == "complete" and entry.step not in lost), default=None)
    code = FAILED_CHECK if report.lost else 0
    if as_json:
        print_json(
            {
                "run": directory.name,
                "directory": str(root),
                "dry_run": dry_run,
                "actions": [vars(action) for action in report.actions],
                "lost": [{"step": one.step, "damage": [vars(item) for item in one.damage]} for one in report.lost],
                "resumes": resumes,
            }
        )
        return code
    for action in report.actions:
        print(action)
    for one in report.lost:
        print(f"lost: step {one.step}: {plural(len(one.damage), 'file')} that no copy has:")
        for item in one.damage:
            print(f"  {item}")
    if not report.actions:
        print(f"{directory.name}: nothing to repair")
    print("no complete checkpoint" if resumes is None else f"a restart begins at step {resumes}")
    return code


@click.command()
@_RUN
@click.option("--keep-last", type=Int32Range(min=1), help="Most recent checkpoints to keep [default: checkpoint.keep_last of RUN].")
@click.option("--keep-every", type=Int32Range(min=0), help="Keep multiples of this step [default: checkpoint.keep_every of RUN].")
@click.option("--keep-best", type=Int32Range(min=0), help="Keep those with the least loss [default: checkpoint.keep_best of RUN].")
@click.option("--set", "best_set", help="Evaluation set of --keep-best [default: checkpoint.best_set of RUN, or the first].")
@click.option("--keep", type=Int32Range(min=0), multiple=True, metavar="STEP", help="Keep this step; repeatable.")
@click.option("--keep-set-aside", type=Int32Range(min=0), help="Set-aside ones to keep [default: checkpoint.keep_set_aside of RUN].")
@_DRY_RUN
@json_option
def prune(
    run: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    best_set: str | None,
    keep: tuple[int, ...],
    keep_set_aside: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete the checkpoints of RUN that its retention policy, or another one, does not keep.

    The newest good checkpoint always stays: those that --keep-last counts are read and verified first.
    """
    from ridgeline.configs.schema import CheckpointConfig
    from ridgeline.trainer.checkpoint.prune import prune as pruned

    directory = RunDir.open(run)
    config = CheckpointConfig() if directory.config is None else directory.config.checkpoint
    options = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_best": keep_best,
        "best_set": best_set,
        "keep_set_aside": keep_set_aside,
    }
    config = config.model_copy(update={key: value for key, value in options.items() if value is not None})
    with stopped(directory, dry_run):
        found = pruned(directory.checkpoints, config, keep=keep, newest_proven=keep_last is not None, dry_run=dry_run)
    if as_json:
        deleted = [{"name": name, "size_bytes": size} for name, size in found.deleted.items()]
        print_json(
            {
                "run": directory.name,
                "directory": str(directory.checkpoints),
                "dry_run": dry_run,
                "deleted": deleted,
                "freed_bytes": found.freed_bytes,
                "kept": found.kept,
                "damaged": found.damaged,
            }
        )
        return
    for name, size in found.deleted.items():
        print(f"{'would delete' if dry_run else 'deleted'} {name} ({format_bytes(size)})")
    for step in found.damaged:
        print(f"step {step} is damaged, and not counted as kept: ridge checkpoint repair {run}")
    freed = f"{'would free' if dry_run else 'freed'} {format_bytes(found.freed_bytes)}"
    print(f"{directory.name}: {freed}; kept: {', '.join(map(str, found.kept)) or 'none'}")


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--step", type=Int32Range(min=0), help="Only this step [default: to a URL all complete ones, from a URL the newest].")
@json_option
def copy(source: str, target: str, step: int | None, as_json: bool) -> None:
    """Copy checkpoints of a run to a URL, or from a URL into a run directory. One of FROM and TO is a run directory, the other a URL.

    Every file is compared with the sha256 of the manifest where it arrives, and an interrupted copy continues. Into a directory without a
    run, run.json, config.yaml and the tokenizer are copied too: `ridge train` resumes there.
    """
    from ridgeline.loaders.remote import is_url
    from ridgeline.trainer.checkpoint.store import Store

    if is_url(source) == is_url(target):
        raise UserError("one of FROM and TO must be a run directory, the other a URL such as s3://bucket/run")
    store = Store(source if is_url(source) else target)
    try:
        results = _restore(store, Path(target), step) if is_url(source) else _send(RunDir.open(Path(source)), store, step)
    except OSError as error:
        raise UserError(f"cannot copy to {target}: {error.strerror or error}") from error
    if as_json:
        print_json({"from": source, "to": target, "checkpoints": results})
        return
    for result in results:
        sent = result["sent_bytes"]
        print(f"step {result['step']}: {'already there, verified' if not sent else f'copied and verified, {format_bytes(sent)}'}")
    if not results:
        print(f"{source}: no complete checkpoint")


def _send(run: RunDir, store: object, step: int | None) -> list[dict[str, int]]:
    """Copy steps to a store. Works while the run is live: complete steps do not change."""
    from ridgeline.trainer.checkpoint import directories as dirs
    from ridgeline.trainer.checkpoint.store import Store

    assert isinstance(store, Store)
    root = run.checkpoints
    dirs.check_ours(root)
    store.refuse_within(run.path)
    if step is not None:
        dirs.check_complete(root, step)
    store.claim(run.record.id)
    store.keep_run(run.path)
    copied = [store.copy(root, one) for one in ([step] if step is not None else dirs.complete_steps(root))]
    return [{"step": one.step, "sent_bytes": one.size_bytes} for one in copied]


def _restore(store: object, path: Path, step: int | None) -> list[dict[str, int]]:
    """Copy one step into a run directory, which is made if there is none."""
    from ridgeline.trainer.checkpoint import directories as dirs
    from ridgeline.trainer.checkpoint.store import Store

    assert isinstance(store, Store)
    complete = store.steps()
    if step is None and not complete:
        raise UserError(f"{store.url} has no complete checkpoint")
    chosen = complete[-1] if step is None else step
    run = RunDir(path)
    if not run.exists:
        path.mkdir(parents=True, exist_ok=True)
        if foreign := run.foreign_entries():
            raise UserError(f"{path} is not a run directory of ridge and not empty (it holds {', '.join(foreign[:3])}): choose another one")
        store.restore_run(path)
    elif store.owner() not in (None, run.record.id):
        raise UserError(f"{store.url} has the checkpoints of another run ({store.owner()}, not {run.record.id})")
    with stopped(RunDir(path)):
        if chosen in dirs.complete_steps(run.checkpoints):
            raise UserError(f"{path} has a checkpoint of step {chosen}: `ridge checkpoint repair {path} --from {store.url}` repairs it")
        store.restore(run.checkpoints, chosen)
    return [{"step": chosen, "sent_bytes": sum(entry.size_bytes for entry in (store.manifest(chosen) or {}).values())}]
