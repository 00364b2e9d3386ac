"""A hundred damages: Orbax loads flipped bits as other numbers; the manifest catches every one."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.records import RunRecord
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity, payload
from ridgeline.trainer.checkpoint.param_slices import ParamReader
from ridgeline.trainer.checkpoint.reader import CheckpointReader
from ridgeline.trainer.failures import CheckpointError

Make = Callable[..., Any]
KINDS = ["flip"] * 60 + ["truncate"] * 20 + ["delete"] * 20


def all_files(step: Path) -> list[Path]:
    return sorted(step / name for name in [*integrity.list_files(step), integrity.MANIFEST])


def damage(step: Path, kind: str, rng: random.Random) -> str:
    """Damage one file, chosen alike among files when the damage is structural and by size when it is a flipped bit."""
    files = [file for file in all_files(step) if kind == "delete" or file.stat().st_size]
    file = rng.choices(files, [file.stat().st_size for file in files])[0] if kind == "flip" and rng.random() < 0.5 else rng.choice(files)
    size = file.stat().st_size
    if kind == "delete":
        file.unlink()
        return f"delete {file}"
    if kind == "truncate":
        length = rng.randrange(size)
        os.truncate(file, length)
        return f"truncate {file} to {length}"
    bit = rng.randrange(8 * size)
    flip(file, bit)
    return f"flip bit {bit} of {file}"


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.fixture
def saved(checkpointer: Make, make_state: Make) -> tuple[Path, Any]:
    """A directory with the good steps 1 and 2, and the state of step 2."""
    saver = checkpointer()
    saver.save(1, make_state(1), {}, block=True)
    state = make_state(2)
    saver.save(2, state, {}, block=True)
    return saver.directory, state


def test_a_hundred_of_a_hundred_damages_are_caught_set_aside_and_passed_over(
    saved: tuple[Path, Any], checkpointer: Make, abstract: Make, tmp_path: Path
) -> None:
    good, state = saved
    rng = random.Random(20260101)
    caught = 0
    for number, kind in enumerate(KINDS):
        directory = tmp_path / f"damaged-{number}"
        shutil.copytree(good, directory)
        what = damage(checkpoint_dirs.step_dir(directory, 2), kind, rng)
        said: list[str] = []
        _, metadata = checkpointer(directory, said=said).restore(abstract(state))
        assert metadata["step"] == 1, what
        (line,) = said
        assert "step 2" in line or "step_00000002" in line, line
        assert checkpoint_dirs.steps(directory) == [1], what
        assert [name for name in os.listdir(directory) if name.startswith("step_00000002.bad-")], what
        caught += 1
        shutil.rmtree(directory)
    assert caught == 100


def test_orbax_alone_loads_flipped_bits_silently(checkpointer: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make) -> None:
    """The reason for the manifest: flips anywhere in the files that hold the numbers, most of them loaded without an error."""
    saver, state = checkpointer(), {"matrix": make_state(width=1024)["params"]["matrix"]}
    saver.save(1, state, {}, block=True)
    step = checkpoint_dirs.step_dir(saver.directory, 1)
    data = sorted((file for file in all_files(step) if file.parent.name == "d"), key=lambda file: file.stat().st_size)[-1]
    assert data.stat().st_size >= state["matrix"].nbytes
    rng = random.Random(1)
    silently_wrong = caught = 0
    for _ in range(100):
        bit = rng.randrange(8 * data.stat().st_size)
        flip(data, bit)
        try:
            loaded = payload.load(step, abstract(state))
            silently_wrong += np.asarray(loaded["matrix"]).tobytes() != np.asarray(state["matrix"]).tobytes()
        except Exception:  # any error is one that Orbax did notice
            pass
        caught += bool(integrity.verify(step))
        flip(data, bit)
    assert integrity.verify(step) == []
    assert caught == 100
    print(f"Orbax loaded {silently_wrong} of 100 flipped bits as other numbers")
    assert silently_wrong >= 90


def test_orbax_also_does_so_with_its_own_settings(tmp_path: Path, make_state: Make, abstract: Make) -> None:
    """Not an effect of ours: the same with ocp.save and ocp.load as they come (compressed payload)."""
    state = {"matrix": make_state(width=1024)["params"]["matrix"]}
    ocp.save(tmp_path / "plain", state)
    data = sorted((file for file in (tmp_path / "plain").rglob("d/*")), key=lambda file: file.stat().st_size)[-1]
    rng = random.Random(2)
    silently_wrong = 0
    for _ in range(20):
        bit = rng.randrange(8 * data.stat().st_size)
        flip(data, bit)
        try:
            loaded = ocp.load(tmp_path / "plain", abstract(state))
            silently_wrong += np.asarray(loaded["matrix"]).tobytes() != np.asarray(state["matrix"]).tobytes()
        except Exception:  # any error is one that Orbax did notice
            pass
        flip(data, bit)
    print(f"plain Orbax loaded {silently_wrong} of 20 flipped bits as other numbers")
    assert silently_wrong >= 10


def replace_by(make: Callable[[Path], Any], name: str = "metadata.json") -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        (step / name).unlink()
        make(step / name)

    return damage


def replace_step(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        shutil.rmtree(step)
        make(step)

    return damage


def extra(name: bytes) -> Callable[[Path], None]:
    return lambda step: Path(os.fsdecode(os.fsencode(step) + b"/" + name)).write_text("?")


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "no permission for the step": lambda step: step.chmod(0),
    "no permission for the manifest": lambda step: (step / integrity.MANIFEST).chmod(0),
    "no permission for the metadata": lambda step: (step / "metadata.json").chmod(0),
    "no permission for the payload": lambda step: (step / "state").chmod(0),
    "a FIFO for the metadata": replace_by(os.mkfifo),
    "a FIFO for the manifest": replace_by(os.mkfifo, integrity.MANIFEST),
    "a FIFO for a payload file": replace_by(os.mkfifo, "state/manifest.ocdbt"),
    "one more FIFO": lambda step: os.mkfifo(step / "state" / "fifo"),
    "a directory for the metadata": replace_by(Path.mkdir),
    "a directory for the manifest": replace_by(Path.mkdir, integrity.MANIFEST),
    "a link to itself for the manifest": replace_by(lambda path: path.symlink_to(path), integrity.MANIFEST),
    "a link to nothing for the metadata": replace_by(lambda path: path.symlink_to("nothing")),
    "an endless file for the manifest": replace_by(lambda path: path.symlink_to("/dev/zero"), integrity.MANIFEST),
    "a nested manifest": lambda step: (step / integrity.MANIFEST).write_text("[" * 200_000),
    "a manifest in a subdirectory": lambda step: shutil.copy(step / integrity.MANIFEST, step / "state"),
    "a name that is no text": extra(b"\xff\n\x1b[31m"),
    "a link to itself for the step": replace_step(lambda path: path.symlink_to(path)),
    "a file for the step": replace_step(lambda path: path.write_text("?")),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_step_that_cannot_be_read_is_damage_like_any_other(
    what: str, saved: tuple[Path, Any], checkpointer: Make, abstract: Make, as_nobody: Make
) -> None:
    directory, state = saved
    with tempfile.TemporaryDirectory() as place:  # another user cannot read pytest's directories
        os.chmod(place, 0o755)
        where = Path(place) / "checkpoints"
        shutil.copytree(directory, where)
        where.chmod(0o777)
        UNREADABLE[what](checkpoint_dirs.step_dir(where, 2))
        with as_nobody():
            seen: list[str] = []
            reader = CheckpointReader(where, CheckpointConfig(), log=seen.append)
            assert reader.latest_step() in (1, 2), "it does not read the payload"
            assert reader.restore(abstract(state))[1]["step"] == 1
            said: list[str] = []
            saver = checkpointer(where, said=said)
            assert saver.restore(abstract(state))[1]["step"] == 1
        assert len(said) == 1 and all(char.isprintable() for line in said + seen for char in line), said
        assert checkpoint_dirs.steps(where) == [1]
        for entry in where.iterdir():
            if not entry.is_symlink():
                entry.chmod(0o755)


@pytest.mark.parametrize(
    "name", ["step_99999999999999999999", "step_\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663", "step_000000002", "step_2\n"]
)
def test_what_only_looks_like_a_step_is_left_alone(name: str, saved: tuple[Path, Any], checkpointer: Make, abstract: Make) -> None:
    directory, state = saved
    shutil.copytree(checkpoint_dirs.step_dir(directory, 2), directory / name)
    assert checkpointer().restore(abstract(state))[1]["step"] == 2
    assert name in os.listdir(directory)


def test_a_step_of_another_number_or_run_is_not_loaded_by_its_name(
    checkpointer: Make, make_state: Make, abstract: Make, tmp_path: Path
) -> None:
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        RunDir(tmp_path / run).write_record(RunRecord(name=run, id=run))
        saver = checkpointer(tmp_path / run / "checkpoints")
        for step in (1, 2):
            saver.save(step, make_state(step), {"run": run}, block=True)
    one, two = tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints"
    wanted = abstract(make_state(2))
    shutil.copytree(checkpoint_dirs.step_dir(one, 1), checkpoint_dirs.step_dir(one, 90))
    shutil.copytree(checkpoint_dirs.step_dir(two, 2), checkpoint_dirs.step_dir(one, 80))
    os.rename(checkpoint_dirs.step_dir(one, 2), checkpoint_dirs.step_dir(one, 70))
    shutil.copytree(checkpoint_dirs.step_dir(two, 2), checkpoint_dirs.step_dir(one, 2))
    assert CheckpointReader(one, CheckpointConfig()).restore(wanted)[1]["step"] == 1
    with pytest.raises(UserError, match=r"step 2: metadata\.json belongs elsewhere"):
        ParamReader(one, 2)
    assert ParamReader(one).step == 1
    said: list[str] = []
    saver = checkpointer(one, said=said)
    assert saver.latest_step() == 1, "the run is not complete at step 90"
    assert saver.restore(wanted)[1]["step"] == 1
    assert [line.split("metadata.json belongs elsewhere (")[1].split(";")[0].split(")")[0] for line in said] == [
        "it is the checkpoint of step 1",
        "it is the checkpoint of step 2",
        "it is the checkpoint of step 2",
        "it is of the run two, not one",
    ]
    assert checkpoint_dirs.steps(one) == [1]


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_damage_in_every_single_file_is_caught(saved: tuple[Path, Any], kind: str, tmp_path: Path) -> None:
    step = checkpoint_dirs.step_dir(saved[0], 2)
    for file in all_files(step):
        content = file.read_bytes()
        if kind == "delete":
            file.unlink()
        elif content:
            file.write_bytes(content[:-1] if kind == "truncate" else bytes([content[0] ^ 128]) + content[1:])
        else:
            continue
        assert integrity.verify(step), f"{kind} {file}"
        file.write_bytes(content)
    assert integrity.verify(step) == []


def test_when_every_step_is_bad_the_error_names_what_is_wrong_with_each(
    saved: tuple[Path, Any], checkpointer: Make, abstract: Make
) -> None:
    directory, state = saved
    (checkpoint_dirs.step_dir(directory, 1) / "metadata.json").unlink()
    (checkpoint_dirs.step_dir(directory, 2) / integrity.MANIFEST).write_text("{")
    reader = checkpointer()
    assert reader.has_checkpoints()
    with pytest.raises(UserError) as error:
        reader.restore(abstract(state))
    assert "checkpoint of step 2 is damaged: integrity.json is damaged" in str(error.value)
    assert "checkpoint of step 1 is damaged: metadata.json is missing" in str(error.value)
    assert "\n" not in str(error.value)
    # Started again, the run must not begin from nothing: there was something, and the user has to decide.
    again = checkpointer()
    assert again.has_checkpoints()
    with pytest.raises(UserError, match=r"only damaged ones set aside earlier: step_00000001\.bad-missing, step_00000002\.bad-manifest"):
        again.restore(abstract(state))


def test_a_damaged_step_requested_by_number_is_refused_rather_than_replaced(
    saved: tuple[Path, Any], checkpointer: Make, abstract: Make
) -> None:
    directory, state = saved
    (checkpoint_dirs.step_dir(directory, 2) / "metadata.json").unlink()
    with pytest.raises(UserError, match="checkpoint of step 2 is damaged"):
        checkpointer().restore(abstract(state), step=2)
    assert checkpoint_dirs.complete_steps(directory) == [1]


def test_an_incomplete_step_is_set_aside_and_does_not_stop_a_fresh_start(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver, state = checkpointer(), make_state()
    saver.save(1, state, {}, block=True)
    (checkpoint_dirs.step_dir(saver.directory, 1) / integrity.MANIFEST).unlink()
    said: list[str] = []
    assert not checkpointer(said=said).has_checkpoints()
    assert "step_00000001 is incomplete" in said[0]
    assert "step_00000001.bad-incomplete" in os.listdir(saver.directory)


def test_a_reader_skips_damage_without_touching_anything(saved: tuple[Path, Any], checkpointer: Make, abstract: Make) -> None:
    directory, state = saved
    (checkpoint_dirs.step_dir(directory, 2) / "metadata.json").unlink()
    before, said = sorted(os.listdir(directory)), list[str]()
    assert CheckpointReader(directory, CheckpointConfig(), log=said.append).restore(abstract(state))[1]["step"] == 1
    assert sorted(os.listdir(directory)) == before
    assert "step 2 is damaged" in said[0]


def test_without_verification_names_and_sizes_are_still_compared(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver, state = checkpointer(), make_state(width=1024)
    for number in (1, 2):
        saver.save(number, state, {}, block=True)
    step = checkpoint_dirs.step_dir(saver.directory, 2)
    data = max(all_files(step), key=lambda file: file.stat().st_size)
    flip(data, 4 * data.stat().st_size)
    assert checkpointer(verify=False).restore(abstract(state))[1]["step"] == 2
    os.truncate(data, data.stat().st_size - 1)
    assert checkpointer(verify=False).restore(abstract(state))[1]["step"] == 1


def test_what_orbax_cannot_read_is_one_line(saved: tuple[Path, Any], checkpointer: Make, abstract: Make) -> None:
    directory, state = saved
    manifest = checkpoint_dirs.step_dir(directory, 2) / "state" / "manifest.ocdbt"
    flip(manifest, 8 * (manifest.stat().st_size // 2))
    with pytest.raises(CheckpointError) as error:
        checkpointer(verify=False).restore(abstract(state))
    assert "step_00000002 cannot be loaded" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800


def test_two_steps_set_aside_for_one_reason_get_different_names(tmp_path: Path) -> None:
    for _ in range(3):
        checkpoint_dirs.step_dir(tmp_path, 5).mkdir()
        checkpoint_dirs.set_aside(tmp_path, 5, "sha256")
    names = sorted(os.listdir(tmp_path))
    assert names == ["step_00000005.bad-sha256", "step_00000005.bad-sha256-2", "step_00000005.bad-sha256-3"]
