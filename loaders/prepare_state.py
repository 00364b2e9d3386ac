"""The state of a preparation on disk: what is being made, which shards are done, and who may write.

OUTPUT/.prepare holds `state.json` (settings and a fingerprint of the input), a copy of the tokenizer, one result per finished shard and
locks. When the corpus is complete only `state.json` stays: it lets the same command answer at once.
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

STATE_DIRECTORY = ".prepare"
BAD_RECORDS_FILE = "bad_records.jsonl"
SHARD_SUFFIX = ".array_record"


@dataclass(frozen=True)
class State:
    """The state directory of one output. `described` is everything that decides the output's bytes; `sets` in it names subdirectories."""

    output: Path
    described: Mapping[str, Any]

    @property
    def work(self) -> Path:
        """The state directory."""
        return self.output / STATE_DIRECTORY

    @property
    def tokenizer(self) -> Path:
        """The copy that workers load: a change of the original during the run does not matter."""
        return self.work / "tokenizer"

    def finished(self) -> dict[str, Any] | None:
        """Return the summary of a finished preparation with the same settings and input, else None.

        Raises UserError when the output holds anything but the same preparation.
        """
        earlier = self._earlier()
        if earlier is not None:
            self._compare(earlier)
            return earlier.get("finished")
        self._refuse_foreign()
        return None

    @contextlib.contextmanager
    def claimed(self, overwrite: bool, slice_name: str | None = None) -> Iterator[None]:
        """Hold the output for writing: alone, or one slice of it beside other slices; `overwrite` clears it first.

        Raises UserError when another process holds it, or when it holds something else.
        """
        if not (self.work / "state.json").exists() and not overwrite:
            self._refuse_foreign()
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

    def _refuse_foreign(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"{self.output} is a file; --output must be a directory")
        if self.output.is_dir() and any(path.name != STATE_DIRECTORY for path in self.output.iterdir()):
            what = "another corpus" if list(self.output.glob("**/manifest.json")) else "other files"
            raise UserError(f"{self.output} holds {what}; choose another --output or give --overwrite")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the corpus complete and remove what only an unfinished one needs."""
        write_atomically(self.work / "state.json", _dump({"described": self.described, "finished": summary}))
        for path in self.work.iterdir():
            if path.name != "state.json" and not path.name.startswith("lock"):
                _remove(path)

    def discard(self) -> None:
        """Undo an unfinished preparation that cannot be completed."""
        self._clear()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.work)
            self.output.rmdir()

    def _clear(self) -> None:
        """Remove a preparation, finished or not, and nothing else. Raises UserError when the output holds foreign files."""
        known = {"manifest.json", "tokenizer", BAD_RECORDS_FILE, STATE_DIRECTORY}
        earlier = self._earlier() or {"described": {"sets": []}}
        # Only subdirectories that this command made: OUTPUT may be a folder of other corpora by mistake.
        sets = {path for name in earlier["described"]["sets"] if name and (path := self.output / name).is_dir()}
        for directory in {self.output, *sets}:
            foreign = sorted(p.name for p in directory.iterdir() if p.name not in known and p.suffix != SHARD_SUFFIX and p not in sets)
            if foreign:
                raise UserError(f"{directory} holds files that are not a corpus's ({', '.join(foreign[:3])}); choose another --output")
        for directory in {self.output, *sets}:
            (directory / "manifest.json").unlink(missing_ok=True)  # first: what is left is no corpus
        for directory in sets - {self.output}:
            shutil.rmtree(directory)
        for path in [*self.output.iterdir(), *self.work.iterdir()]:
            if path != self.work and not path.name.startswith("lock"):
                _remove(path)

    def _earlier(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.work / "state.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.work / 'state.json'} cannot be read ({error}); give --overwrite to start anew") from error

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        before, now = earlier["described"], json.loads(json.dumps(self.described))
        for key in now:
            if before.get(key) != now[key] and key != "input_fingerprint":
                raise UserError(
                    f"{self.output} was begun with {key} {_short(before.get(key))}, now {_short(now[key])};"
                    " give the same settings, another --output, or --overwrite"
                )
        if before.get("input_fingerprint") != now["input_fingerprint"]:
            raise UserError(
                f"{self.output} was begun when the input was another (a file was changed, added or removed since);"
                " give --overwrite to start anew"
            )

    def _create(self, content: Mapping[str, Any]) -> None:
        """Create state.json unless another slice was faster; then it must say the same."""
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


def write_atomically(path: Path, content: str) -> None:
    """Write a text file so that it is either whole or not there."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


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
