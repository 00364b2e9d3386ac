"""Saves that fail: full disks, read-only directories, kills. What was saved before stays, and the run goes on for a while."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.failures import CheckpointError

Make = Callable[..., Any]

PRELUDE = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.failures import CheckpointError
def state(seed, size_bytes):
    return {"w": jax.device_put(np.random.default_rng(seed).integers(1 << 32, size=(8, size_bytes // 32), dtype=np.uint32))}
directory = sys.argv[1]
"""


def run_child(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def good_steps(directory: Path) -> list[int]:
    steps = checkpoint_dirs.complete_steps(directory)
    assert all(integrity.verify(checkpoint_dirs.step_dir(directory, step)) == [] for step in steps)
    return steps


@contextlib.contextmanager
def small_disk(where: Path, size_bytes: int) -> Iterator[bool]:
    """A real file system of that size, where this process may mount one."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "ridge-test", str(where)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", where], check=True)


FULL_DISK = """
import resource, signal
said = []
saver = Checkpointer(directory, CheckpointConfig(max_failures=3), log=said.append)
saver.save(1, state(1, 4_000_000), {}); saver.wait()
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
trained = 0
for step in (2, 3):
    big = state(step, 9_000_000)
    saver.save(step, big, {})
    trained += 1
    try: saver.wait()
    except CheckpointError as error: print("too early", error)
print("failures", saver.failures, "trained", trained)
print("left", sorted(n for n in os.listdir(directory) if n.startswith("step")))
for line in said: print("said", line)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
saver.save(4, state(4, 4_000_000), {}); saver.close()
print("recovered", saver.latest_step(), saver.failures)
"""


def check_full_disk(child: subprocess.CompletedProcess[str], directory: Path) -> None:
    out = child.stdout
    assert child.returncode == 0, out + child.stderr
    assert "failures 2 trained 2" in out
    assert "left ['step_00000001']" in out
    warnings = [line for line in out.splitlines() if line.startswith("said")]
    assert len(warnings) == 2
    assert all("WARNING: saving step" in line and "the last good checkpoint is step 1" in line for line in warnings)
    assert "recovered 4 0" in out
    assert good_steps(directory) == [1, 4]
    assert "Traceback" not in child.stderr, "a failed save is one line"


def test_a_full_disk_warns_keeps_what_was_saved_and_the_next_save_that_fits_succeeds(tmp_path: Path) -> None:
    directory = tmp_path / "disk" / "checkpoints"
    with small_disk(tmp_path / "disk", 12_000_000) as mounted:
        # Without the right to mount, a limit on file sizes stands in for the full disk.
        child = run_child(FULL_DISK, directory, 0 if mounted else 5_000_000)
        check_full_disk(child, directory)
        assert child.stdout.count("No space left on device" if mounted else "File too large") >= 2, child.stdout


def test_a_file_size_limit_is_survived_like_a_full_disk(tmp_path: Path) -> None:
    child = run_child(FULL_DISK, tmp_path / "checkpoints", 5_000_000)
    check_full_disk(child, tmp_path / "checkpoints")
    assert child.stdout.count("File too large") >= 2, child.stdout


def test_after_max_failures_in_a_row_the_next_call_raises_and_nothing_good_is_lost(
    checkpointer: Make, make_state: Make, as_nobody: Make, tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o755)
    said: list[str] = []
    saver = checkpointer(said=said, max_failures=3)
    saver.save(1, make_state(), {}, block=True)
    saver.directory.chmod(0o555)
    with as_nobody():
        for step in (2, 3):
            report = saver.save(step, make_state(), {})
            assert not report.saved
            assert "Permission denied" in (report.error or "")
        with pytest.raises(CheckpointError, match=r"3 .*saves failed.*Permission denied"):
            saver.save(4, make_state(), {})
        with pytest.raises(CheckpointError, match=r"3 .*saves failed"):
            saver.save(5, make_state(), {})
    saver.directory.chmod(0o755)
    warnings = [line for line in said if line.startswith("WARNING: saving step")]
    assert [line.rpartition("; ")[2] for line in warnings] == ["training continues", "training continues", "training stops"]
    assert good_steps(saver.directory) == [1]


def test_a_success_in_between_starts_the_count_anew(checkpointer: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = checkpointer(max_failures=2)
    write_manifest, broken = integrity.write_manifest, [False]

    def sometimes(*arguments: Any) -> None:
        if broken[0]:
            raise OSError(5, "Input/output error")
        write_manifest(*arguments)

    monkeypatch.setattr(integrity, "write_manifest", sometimes)
    for step in range(1, 9):
        broken[0] = step % 2 == 0
        saver.save(step, make_state(), {}, block=True)
    with pytest.raises(CheckpointError, match=r"the last save failed: OSError: .*Input/output error"):
        saver.close()
    assert good_steps(saver.directory) == [5, 7]
    assert sorted(checkpoint_dirs.steps(saver.directory)) == [5, 7]


def test_a_deletion_that_fails_is_reported_and_does_not_fail_the_save(
    checkpointer: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Path, step: int) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(checkpoint_dirs, "delete", refuse)
    said: list[str] = []
    saver = checkpointer(said=said, keep_last=1)
    for step in (1, 2, 3):
        saver.save(step, make_state(), {}, block=True)
    saver.close()
    assert good_steps(saver.directory) == [1, 2, 3]
    assert "cannot delete the old checkpoint of step 1" in said[0]


KILLED = """
import signal, threading
from pathlib import Path
from ridgeline.trainer.checkpoint import integrity
from orbax.checkpoint._src.path import async_path
where = sys.argv[2]
def die(*arguments, **named): os.kill(os.getpid(), signal.SIGKILL)
async def die_async(*arguments, **named): die()
saver = Checkpointer(directory, CheckpointConfig())
saver.save(1, state(1, 1_000_000), {}); saver.wait()
if where == "sealing": integrity.write_manifest = die
elif where == "hashing": integrity.digest_files = die
elif where == "commit": async_path.rename = die_async
elif where == "retention":
    import shutil; shutil.rmtree = die
    saver.save(2, state(2, 1_000_000), {}); saver.wait()
elif where == "writing":
    async_path.rename = die_async  # at the latest there
    def watch():
        while not any(p.is_file() and p.stat().st_size for p in Path(directory).glob("step_00000002.orbax*/**/d/*")): pass
        die()
    threading.Thread(target=watch, daemon=True).start()
saver.save(3 if where == "retention" else 2, state(2, 50_000_000), {}); saver.wait()
print("not reached")
"""


@pytest.mark.parametrize("where", ["writing", "commit", "hashing", "sealing"])
def test_a_kill_during_a_save_leaves_the_step_before_usable(where: str, tmp_path: Path, checkpointer: Make) -> None:
    child = run_child(KILLED, tmp_path / "checkpoints", where)
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    assert len(os.listdir(tmp_path / "checkpoints")) == 3  # marker, step 1, and what is left of step 2
    said: list[str] = []
    resumed = checkpointer(said=said)
    assert resumed.latest_step() == 1
    assert good_steps(resumed.directory) == [1]
    assert "step_00000002 is incomplete" in said[0]
    check_restores(resumed, 1)


def test_a_kill_during_a_deletion_leaves_the_new_step_usable(tmp_path: Path, checkpointer: Make) -> None:
    child = run_child(KILLED, tmp_path / "checkpoints", "retention")
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    assert "step_00000001.deleting" in os.listdir(tmp_path / "checkpoints")
    resumed = checkpointer()
    assert resumed.latest_step() == 3
    assert good_steps(resumed.directory) == [2, 3]
    check_restores(resumed, 3)


def check_restores(saver: Checkpointer, step: int) -> None:
    import jax

    device = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), jax.sharding.PartitionSpec())
    shape = tuple(saver.read_metadata(step)["arrays"]["w"]["shape"])
    restored, metadata = saver.restore({"w": jax.ShapeDtypeStruct(shape, "uint32", sharding=device)})
    assert metadata["step"] == step
    assert restored["w"].shape == shape


def test_a_kill_while_the_marker_is_written_is_no_foreign_directory(tmp_path: Path, checkpointer: Make, make_state: Make) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ridge-checkpoints.json.tmp").write_text('{"form')
    saver = checkpointer(tmp_path / "checkpoints")
    assert saver.steps() == []
    saver.save(1, make_state(1), {}, block=True)
    assert saver.steps() == [1]
