"""A kill between every two file operations of a start, a restore, a save and the retention: the next start goes on from the right step.

The operations are those that Python reports as audit events (opening for writing, renaming, creating, removing), Orbax's included. Before
each one the run directory is copied: that is what a kill at this moment leaves. For a file that is opened, a second copy has it empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ridgeline.configs.schema import Config
from ridgeline.rundir import lease as leases
from ridgeline.rundir.events import EventLog, event_file
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.start import StartedRun, keep_tokenizer, start_run

CHANGES = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"})


def digest(root: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        found.update(f"{path.relative_to(root)}\0".encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless another thread has removed it since it was listed (a lock of a library's save)."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


class Camera:
    """Copies a directory before each change of it."""

    def __init__(self) -> None:
        self.images: list[Path] = []
        self._root, self._target, self._seen = Path(), Path(), set[str]()
        self._running, self._lock = False, threading.RLock()
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def watch(self, root: Path, target: Path) -> Iterator[None]:
        target.mkdir()
        self._root, self._target, self.images, self._seen, self._running = root, target, [], set(), True
        try:
            yield
        finally:
            self._running = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._running or event not in CHANGES or isinstance(arguments[0], int):
            return
        path = os.fsdecode(arguments[0])
        writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if not writes or (os.path.isabs(path) and not path.startswith(str(self._root))):
            return
        with self._lock:
            if not self._running:
                return
            self._running = False  # the copy itself is not watched
            try:
                image = self._take()
                if image is not None and event == "open" and os.path.isabs(path) and arguments[2] & (os.O_TRUNC | os.O_CREAT):
                    self._take(empty=Path(path).relative_to(self._root))
            finally:
                self._running = True

    def _take(self, empty: Path | None = None) -> Path | None:
        image = self._target / f"{len(self.images):03d}" / self._root.name
        if self._root.exists():
            shutil.copytree(self._root, image, copy_function=copy_if_there)
        else:
            image.parent.mkdir()
        if empty is not None:
            (image / empty).parent.mkdir(parents=True, exist_ok=True)
            (image / empty).write_bytes(b"")
        if (content := digest(image)) in self._seen:
            shutil.rmtree(image.parent)
            return None
        self._seen.add(content)
        self.images.append(image)
        return image


@pytest.fixture(scope="module")
def camera() -> Camera:
    return Camera()


def state(step: int) -> dict[str, jax.Array]:
    return {"w": jax.device_put(np.random.default_rng(step).standard_normal(8, np.float32), jax.devices()[0])}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
KEPT = {"keep_last": 1}


def begin(config: Config, pid: int) -> StartedRun:
    """Start the run as another process would; its lease is looked at by no thread."""
    patched = leases.this_process
    leases_of = lambda timeout_s: patched(timeout_s, env={}).model_copy(update={"pid": pid})  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.trainer.start.this_process", leases_of)
        patch.setattr(leases.Lease, "_keep", lambda self, period_s: None)
        patch.setattr("ridgeline.trainer.start._SOURCE_TREE", config.directory.parent)  # what run.json records takes most of the time
        patch.setattr("ridgeline.trainer.start.packages", dict)
        return start_run(config, command=["test"], log=lambda line: None)


def life(config: Config, tokenizer: Path, pid: int, said: list[str], saves: bool = True) -> int:
    """One start: it restores the newest step and saves the next one, which deletes older ones. Returns the restored one."""
    run = begin(config, pid)
    events = EventLog(event_file(run.path, 0), run=run.id, restart=run.restart)
    saver = Checkpointer(run.checkpoints, config.checkpoint, events=events, log=said.append)
    newest = 0
    if saver.has_checkpoints():
        restored, metadata = saver.restore(ABSTRACT)
        newest = int(metadata["step"])
        assert np.asarray(restored["w"]).tobytes() == np.asarray(state(newest)["w"]).tobytes()
    keep_tokenizer(tokenizer, run, None, said.append)
    if saves:
        saver.save(newest + 1, state(newest + 1), {"run": run.id}, block=True)
        saver.close()
    events.close()
    run.lease.release()
    return newest


@pytest.mark.parametrize("begun", [0, 2])
def test_a_start_continues_after_a_kill_between_any_two_file_operations(tmp_path: Path, camera: Camera, begun: int) -> None:
    tokenizer, gone, root = tmp_path / "tokenizer", 2**22 + 1, tmp_path / "run"  # a PID that no process has
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    for _ in range(begun):
        life(configured(root), tokenizer, gone, [])
    with camera.watch(root, tmp_path / "images"):
        assert life(configured(root), tokenizer, gone, []) == begun
    assert len(camera.images) > 30  # the operations were seen; their number depends on the order of threads
    seen: set[str] = set()
    for number, image in enumerate(camera.images):
        said: list[str] = []
        checkpoints = digest(image / "checkpoints")
        if checkpoints in seen:  # only other files differ
            run = begin(configured(image), gone)
            keep_tokenizer(tokenizer, run, None, said.append)
            run.lease.release()
        else:
            assert life(configured(image), tokenizer, gone, said, saves=number % 8 == 0) in (begun, begun + 1), image
            check_clean(image)
        seen.add(checkpoints)
        assert all("\n" not in line for line in said)


def configured(run_dir: Path) -> Config:
    return Config(name="killed", run_dir=run_dir, checkpoint=KEPT)


def check_clean(run: Path) -> None:
    """All steps are good, and nothing temporary is left."""
    names = sorted(os.listdir(run / "checkpoints")) if (run / "checkpoints").exists() else []
    for step in checkpoint_dirs.steps(run / "checkpoints"):
        assert integrity.verify(checkpoint_dirs.step_dir(run / "checkpoints", step)) == [], (run, step)
    aside = [name for name in names if ".bad-" in name]
    assert len(aside) <= 1 and all(name.endswith(".bad-incomplete") for name in aside), (run, names)
    left = [
        path for path in run.rglob("*") if path.name.endswith((".tmp", ".deleting", ".new", ".old")) or "orbax-checkpoint-tmp" in path.name
    ]
    assert not [path for path in left if not any(part.endswith(".bad-incomplete") for part in path.parts)], (run, left)
    assert (run / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert len(os.listdir(run / "lease")) == 1
