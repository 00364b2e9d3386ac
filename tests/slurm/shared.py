"""Resources shared by the workers of a test session: a directory, and results that the first user computes for all."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Shared:
    """A directory of this session, shared by all its workers."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        base = factory.getbasetemp()  # of this worker, inside the session's
        self.directory = (base.parent if worker() is not None else base) / "shared"
        self.directory.mkdir(exist_ok=True)
        self._factory = factory

    def path(self, name: str) -> Path:
        """Return the directory of that name, created if missing."""
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return path

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a lock between workers for a with block."""
        with (self.directory / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def once(self, name: str, make: Callable[[Path], Path]) -> Path:
        """Return what `make` returns for an empty directory: the first worker calls it, the others wait; if it fails, the next tries."""
        with self.lock(name):
            made = self.directory / f"{name}.made"
            if not made.exists():
                made.write_text(str(make(self._factory.mktemp(name))))
            return Path(made.read_text())


def worker() -> int | None:
    """Return the index of this worker; None without workers."""
    name = os.environ.get("PYTEST_XDIST_WORKER")
    return None if name is None else int(name.removeprefix("gw"))


def workers() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
