"""The state of a preparation on disk: its settings, its finished shards, and its locks.

OUTPUT/.prepare has `state.json` (settings and a fingerprint of the input), a copy of the tokenizer, one result per finished shard, and
locks. When the corpus is complete only `state.json` is kept: with it the same command returns without work.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import read_object
from ridgeline.loaders.manifest import MANIFEST_NAME
from ridgeline.loaders.records import SET_NAME
from ridgeline.rundir.files import refuse_link, temporary, write_atomically

STATE_DIRECTORY = ".prepare"
BAD_RECORDS_FILE = "bad_records.jsonl"
SHARD_SUFFIX = ".array_record"


@dataclass(frozen=True)
class State:
    """The state directory of one output. `described` has everything that determines the output; its `sets` are subdirectories."""

    output: Path
    described: Mapping[str, Any]

    @property
    def work(self) -> Path:
        """The state directory."""
        return self.output / STATE_DIRECTORY

    @property
    def tokenizer(self) -> Path:
        """The copy that workers load, so that changing the original during the run has no effect."""
        return self.work / "tokenizer"

    def finished(self) -> dict[str, Any] | None:
        """Return the summary of a finished preparation with the same settings and input, else None.

        Raises UserError when the output contains anything else.
        """
        earlier = self._earlier()
        if earlier is not None:
            self._compare(earlier)
            return earlier.get("finished")
        self._refuse_other_files()
        return None

    @contextlib.contextmanager
    def claimed(self, overwrite: bool, slice_name: str | None = None) -> Iterator[None]:
        """Lock the output for writing: exclusively, or one slice of it; `overwrite` clears it first.

        Raises UserError when another process has the lock, or when the output contains something else.
        """
        refuse_link(self.work)
        if not (self.work / "state.json").exists() and not overwrite:
            self._refuse_other_files()
        self.work.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self._lock(stack, "lock", fcntl.LOCK_SH if slice_name else fcntl.LOCK_EX)
            if slice_name:
                self._lock(stack, f"lock-{slice_name}", fcntl.LOCK_EX)
            if overwrite:
                self._clear()
            self._create({"described": self.described})
            yield

    def _lock(self, stack: contextlib.ExitStack, name: str, kind: int) -> None:
        stream = stack.enter_context((self.work / name).open("a"))
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"another process is preparing {self.output}") from None
            raise UserError(f"{self.work} cannot be locked: {error.strerror}") from error

    def _refuse_other_files(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"{self.output} is a file; --output must be a directory")
        if self.output.is_dir() and any(path.name != STATE_DIRECTORY for path in self.output.iterdir()):
            what = "another corpus" if list(self.output.glob(f"**/{MANIFEST_NAME}")) else "other files"
            raise UserError(f"{self.output} contains {what}; choose another --output or add --overwrite")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the corpus complete and remove the state of the unfinished preparation."""
        write_atomically(self.work / "state.json", _dump({"described": self.described, "finished": summary}).encode())
        for path in self.work.iterdir():
            if path.name != "state.json" and not path.name.startswith("lock"):
                _remove(path)

    def discard(self) -> None:
        """Remove an unfinished preparation that cannot be completed."""
        self._clear()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.work)
            self.output.rmdir()

    def _clear(self) -> None:
        """Remove a preparation, finished or not, and nothing else. Raises UserError when the output contains other files."""
        known = {MANIFEST_NAME, "tokenizer", BAD_RECORDS_FILE, STATE_DIRECTORY}
        known |= {temporary(Path(name)).name for name in (MANIFEST_NAME, BAD_RECORDS_FILE)}  # left by a killed run
        try:
            earlier = self._earlier() or {}
        except UserError:  # --overwrite is the way out of it
            earlier = {}
        names = earlier.get("described", {}).get("sets")
        # Only subdirectories created by this command: OUTPUT may be a folder of other corpora by mistake.
        sets = {self.output / name for name in (names if isinstance(names, list) else []) if self._is_set(name)}
        for directory in {self.output, *sets}:
            others = sorted(p.name for p in directory.iterdir() if p.name not in known and p.suffix != SHARD_SUFFIX and p not in sets)
            if others:
                raise UserError(
                    f"{directory} contains files that do not belong to a corpus ({', '.join(others[:3])}); choose another --output"
                )
        for directory in {self.output, *sets}:
            (directory / MANIFEST_NAME).unlink(missing_ok=True)  # first: without it the rest is no corpus
        for directory in sets - {self.output}:
            shutil.rmtree(directory)
        for path in [*self.output.iterdir(), *self.work.iterdir()]:
            if path != self.work and not path.name.startswith("lock"):
                _remove(path)

    def _is_set(self, name: object) -> bool:
        """Return whether a name in state.json, which may be damaged, is that of a subdirectory."""
        return (
            isinstance(name, str)
            and SET_NAME.fullmatch(name) is not None
            and (self.output / name).is_dir()
            and not (self.output / name).is_symlink()
        )

    def _earlier(self) -> dict[str, Any] | None:
        path = self.work / "state.json"
        if not path.exists():
            return None
        try:
            found = read_object(path)
            if not isinstance(found.get("described"), dict) or not isinstance(found.get("finished", {}), dict):
                raise UserError(f"{path} is damaged")
        except UserError as error:
            raise UserError(f"{error}; add --overwrite to start again") from None
        return found

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        before, now = earlier["described"], json.loads(json.dumps(self.described))
        for key in now:
            if before.get(key) != now[key] and key != "input_fingerprint":
                raise UserError(
                    f"{self.output} was started with {key} {_short(before.get(key))}, now {_short(now[key])};"
                    " use the same settings, another --output, or --overwrite"
                )
        if before.get("input_fingerprint") != now["input_fingerprint"]:
            raise UserError(
                f"{self.output} was started with other input (a file was changed, added or removed since); add --overwrite to start again"
            )

    def _create(self, content: Mapping[str, Any]) -> None:
        """Create state.json. If another slice has created it, it must have the same content."""
        partial = self.work / f"state.{os.getpid()}"
        partial.write_text(_dump(content), encoding="utf-8")
        try:
            os.link(partial, self.work / "state.json")
        except FileExistsError:
            earlier = self._earlier()
            assert earlier is not None
            self._compare(earlier)
        finally:
            partial.unlink()


def recorded(output: Path) -> dict[str, Any]:
    """Return what an earlier preparation in `output` described; empty when there is none or it is damaged."""
    try:
        return (State(output, {})._earlier() or {}).get("described", {})
    except UserError:
        return {}  # reported when the settings are compared


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
