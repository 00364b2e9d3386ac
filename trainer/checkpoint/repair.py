"""Repair the checkpoints of a run that is not running (`ridge checkpoint repair`).

In this order: seal steps whose manifest can be proven, clear what killed saves and deletions left, replace damaged and missing files by
copies with the recorded sha256, and set aside what no copy can repair, so that a restart begins at the newest good step. Nothing that may
be of use is deleted: files that are replaced are moved to step_N.bad-replaced.

A file is only accepted when its bytes match a sha256 that the save recorded. A damaged manifest is rebuilt from the files when its own
digest, or all of its entries, are still readable in it and match them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.rundir.files import make_directory, sync_directory, temporary
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.identity import misplaced, run_id
from ridgeline.trainer.checkpoint.integrity import MANIFEST, Damage, FileDigest, ManifestDamage
from ridgeline.trainer.checkpoint.seal import METADATA, DamagedError, read_metadata
from ridgeline.trainer.checkpoint.store import Store

Kind = Literal["cleared", "set aside", "sealed", "replaced", "moved", "restored"]
_SELF_DIGEST = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class Action:
    """One thing that a repair did, or would do."""

    kind: Kind
    """cleared: what a killed process left. sealed: the manifest was rebuilt or copied. replaced: a file, by a copy. moved: a file that
    does not belong there. restored: a step that was set aside is complete again."""
    name: str
    """The directory in `checkpoints`."""
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True)
class Lost:
    """A step that no copy can repair. It is set aside."""

    step: int
    damage: list[Damage]


@dataclass
class Report:
    """What a repair did, or would do, and what is lost."""

    actions: list[Action] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)


@dataclass
class _Finding:
    """What is wrong with one step directory, and where the right bytes are."""

    manifest: dict[str, FileDigest] | None
    sealed_by: str = ""
    """How the manifest was found, where the one in place is damaged; empty: it is in place."""
    copies: dict[str, _Copy] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    lost: list[Damage] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.sealed_by or self.copies or self.extra or self.lost)


@dataclass(frozen=True)
class _Copy:
    """A place that has the bytes of a file."""

    place: str
    write: Callable[[Path], bool]
    """Write the file to a path; return whether its sha256 is the recorded one."""


def repair(root: Path, sources: Sequence[Store] = (), *, dry_run: bool = False, delete: bool = False) -> Report:
    """Repair a checkpoint directory; the caller holds the lease of the run.

    Args:
      root: the checkpoint directory.
      sources: other places with copies of the same checkpoints.
      dry_run: change nothing.
      delete: delete files that were replaced or do not belong there, instead of moving them aside.

    Raises UserError for a directory that is not one of ours, or cannot be changed.
    """
    dirs.check_ours(root)
    report = Report()
    try:
        if root.is_dir():
            _Repair(root, sources, dry_run, delete, run_id(root), report).run()
    except OSError as error:
        raise UserError(f"cannot repair {error.filename or root}: {error.strerror or error}") from error
    return report


@dataclass
class _Repair:
    root: Path
    sources: Sequence[Store]
    dry_run: bool
    delete: bool
    run_id: str | None
    report: Report

    def run(self) -> None:
        sealed = self._seal_incomplete()
        for leftover in dirs.leftovers(self.root):
            if leftover.name in sealed:
                continue
            if self.dry_run:
                done = (
                    "would be set aside: it is incomplete"
                    if leftover.kind == "incomplete"
                    else "would be removed: left by a killed process"
                )
            else:
                done = dirs.clear(self.root, leftover) or "removed"
            self._did("set aside" if leftover.kind == "incomplete" else "cleared", leftover.name, done)
        complete = dirs.complete_steps(self.root)
        for step in complete:
            self._repair_step(step)
        taken = set(dirs.steps(self.root))
        for step, reason, name in dirs.aside(self.root):
            if not reason.startswith(dirs.NOT_DAMAGED) and step not in taken and self._repair_aside(step, name):
                taken.add(step)

    def _seal_incomplete(self) -> set[str]:
        """Seal steps without a manifest for which another place has one that their files match; return their names."""
        sealed = set()
        for leftover in dirs.leftovers(self.root):
            if leftover.kind != "incomplete":
                continue
            path = self.root / leftover.name
            finding = self._examine(path, _step_of(path))
            if finding.manifest is not None and not finding.lost:
                self._apply(path, finding)
                sealed.add(leftover.name)
        return sealed

    def _repair_step(self, step: int) -> None:
        path = dirs.step_dir(self.root, step)
        finding = self._examine(path, step)
        if finding.good:
            return
        if not finding.lost:
            self._apply(path, finding)
            return
        self.report.lost.append(Lost(step, finding.lost))
        what = f"{finding.lost[0]}" + (f" and {len(finding.lost) - 1} more" if len(finding.lost) > 1 else "")
        if self.dry_run:
            self._did("set aside", path.name, f"would be set aside: {what}")
        else:
            new = dirs.set_aside(self.root, step, finding.lost[0].reason)
            self._did("set aside", path.name, f"set aside as {new.name}: {what}")

    def _repair_aside(self, step: int, name: str) -> bool:
        """Repair a step that was set aside as damaged, if copies have all that is damaged, and make it complete again."""
        path = self.root / name
        finding = self._examine(path, step)
        if finding.lost or finding.manifest is None:
            return False
        self._apply(path, finding)
        self._did("restored", name, f"{'would be ' if self.dry_run else ''}renamed to {dirs.step_dir(self.root, step).name}: it is good")
        if not self.dry_run:
            os.rename(path, dirs.step_dir(self.root, step))
            sync_directory(self.root)
        return True

    def _examine(self, path: Path, step: int) -> _Finding:
        """Compare a step with its manifest, and look for the bytes of what is damaged. Changes nothing.

        A step behind a symbolic link is not repaired: it may be of another run.
        """
        finding = self._compare(path, step)
        return _Finding(None, lost=[Damage("link", path.name)]) if path.is_symlink() and not finding.good else finding

    def _compare(self, path: Path, step: int) -> _Finding:
        try:
            finding = _Finding(integrity.read_manifest(path))
        except ManifestDamage as error:
            finding = self._find_manifest(path, step, str(error))
        if finding.manifest is None:
            return finding
        manifest = finding.manifest
        listing = integrity.check_listing(path, manifest)
        if any(damage.reason == "unreadable" for damage in listing):
            finding.lost = listing
            return finding
        if finding.sealed_by:  # the unfinished manifest belongs to no manifest
            listing = [damage for damage in listing if damage.file != temporary(Path(MANIFEST)).name]
        bad = {damage.file for damage in listing}
        whole = [name for name in manifest if name not in bad]
        for damage in listing + integrity.check_digests(path, manifest, whole, threads=integrity.default_threads()):
            if damage.reason == "extra":
                finding.extra.append(damage.file)
            elif (copy := self._find(path, step, damage.file, manifest[damage.file])) is not None:
                finding.copies[damage.file] = copy
            else:
                finding.lost.append(damage)
        if not finding.lost and METADATA not in finding.copies:
            try:
                problem = misplaced(read_metadata(path), step, self.run_id)
            except DamagedError as error:
                problem = error.damage[0]
            finding.lost = [] if problem is None else [problem]
        return finding

    def _find(self, path: Path, step: int, name: str, entry: FileDigest) -> _Copy | None:
        """Return a place that has a file with the recorded sha256; None where there is none."""
        for other in self._siblings(path, step):
            file = other / name
            try:
                if file.stat().st_size == entry.size_bytes and integrity.sha256_file(file) == entry.sha256:
                    return _Copy(other.name, functools.partial(_copied, entry, file))
            except OSError:
                continue
        for store in self.sources:
            if (store.manifest(step) or {}).get(name) == entry:
                return _Copy(store.url, functools.partial(store.fetch, step, name, entry))
        return None

    def _find_manifest(self, path: Path, step: int, problem: str) -> _Finding:
        """Return the manifest of a step in whose place there is none, or a damaged one."""
        try:
            if (rebuilt := _rebuilt(path)) is not None:
                return _Finding(rebuilt, "rebuilt: its digest and its files match")
        except OSError:
            pass
        places = [path / temporary(Path(MANIFEST)).name, *(other / MANIFEST for other in self._siblings(path, step))]
        for place in places:
            try:
                found = integrity.parse_manifest(read_limited(place))
            except (UserError, ManifestDamage):
                continue
            if self._same_save(path, found):
                return _Finding(found, f"copied from {place.relative_to(self.root).as_posix()}")
        for store in self.sources:
            copy = store.manifest(step)
            if copy is not None and self._same_save(path, copy):
                return _Finding(copy, f"copied from {store.url}")
        return _Finding(None, lost=[Damage("manifest", MANIFEST, problem)])

    def _same_save(self, path: Path, manifest: dict[str, FileDigest]) -> bool:
        """Return whether most bytes of a step are those of a manifest: it is of the same save, and not of one that replaced it."""
        try:
            sizes = integrity.list_files(path)
            names = [name for name, entry in manifest.items() if sizes.get(name) == entry.size_bytes]
            wrong = {damage.file for damage in integrity.check_digests(path, manifest, names, threads=integrity.default_threads())}
        except OSError:
            return False
        matching = sum(manifest[name].size_bytes for name in names if name not in wrong)
        return 2 * matching >= sum(entry.size_bytes for entry in manifest.values())

    def _siblings(self, path: Path, step: int) -> list[Path]:
        """Return the other directories of the same step."""
        name = dirs.step_dir(self.root, step).name
        others = (other for other in sorted(self.root.glob(f"{name}*")) if other != path and other.is_dir())
        return [other for other in others if other.name == name or other.name.startswith(f"{name}.")]

    def _apply(self, path: Path, finding: _Finding) -> None:
        """Replace, move and seal what `_examine` found; the manifest last."""
        would = "would be " if self.dry_run else ""
        for name, copy in finding.copies.items():
            if not self.dry_run:
                self._replace(path, name, copy)
            self._did("replaced", path.name, f"{name} {would}replaced by the copy in {copy.place}")
        for name in finding.extra:
            if not self.dry_run:
                self._take_out(path, name)
            self._did("moved", path.name, f"{name} {would}{'deleted' if self.delete else 'moved aside'}: it is not in the manifest")
        if not finding.sealed_by:
            return
        if not self.dry_run:
            assert finding.manifest is not None
            for left in (MANIFEST, temporary(Path(MANIFEST)).name):
                if os.path.lexists(path / left):
                    self._take_out(path, left)
            integrity.sync_directories(path)
            integrity.write_manifest(path, finding.manifest)
        self._did("sealed", path.name, f"{MANIFEST} {would}{finding.sealed_by}")

    def _replace(self, path: Path, name: str, copy: _Copy) -> None:
        target, part = path / name, temporary(path / name)
        make_directory(part.parent)
        if os.path.lexists(part):
            dirs.remove(part)
        if not copy.write(part):
            part.unlink(missing_ok=True)
            raise UserError(f"{copy.place}: the copy of {path.name}/{name} is damaged; nothing was replaced by it")
        if os.path.lexists(target):
            self._take_out(path, name)
        os.replace(part, target)
        sync_directory(target.parent)

    def _take_out(self, path: Path, name: str) -> None:
        """Move a file of a step aside, or delete it."""
        if self.delete:
            dirs.remove(path / name)
            return
        step = dirs.step_dir(self.root, _step_of(path))
        place, number = step.with_name(f"{step.name}.bad-{dirs.REPLACED}"), 1
        while not (place / name).parent.resolve().is_relative_to(self.root.resolve()):  # a link leads elsewhere
            number += 1
            place = step.with_name(f"{step.name}.bad-{dirs.REPLACED}-{number}")
        aside, number = place / name, 1
        while os.path.lexists(aside):
            number += 1
            aside = aside.with_name(f"{Path(name).name}.{number}")
        make_directory(aside.parent)
        os.rename(path / name, aside)

    def _did(self, kind: Kind, name: str, detail: str) -> None:
        self.report.actions.append(Action(kind, name, detail))


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step_"))


def _copied(entry: FileDigest, source: Path, target: Path) -> bool:
    shutil.copyfile(source, target)
    return integrity.sha256_file(target, sync=True) == entry.sha256


def _rebuilt(path: Path) -> dict[str, FileDigest] | None:
    """Return the manifest of the files of a step if what is readable of its damaged manifest proves it; None otherwise. Raises OSError."""
    try:
        damaged = read_limited(path / MANIFEST)
    except UserError:
        return None
    sizes = integrity.list_files(path)
    sizes.pop(temporary(Path(MANIFEST)).name, None)
    digests = integrity.digest_files(path, sizes, threads=integrity.default_threads())
    files = {name: FileDigest(size, digests[name]) for name, size in sizes.items()}
    content = integrity.render_manifest(files)
    own = _SELF_DIGEST.findall(content)[-1]
    entries = content[: content.rindex(own)]
    return files if own in _SELF_DIGEST.findall(damaged) or damaged.startswith(entries) else None
