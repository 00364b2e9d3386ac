"""`ridge checkpoint list | verify`: every kind of directory, and every kind of damage is found, with nothing changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import main as cli
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint.seal import seal

RUN = {"format": 1, "name": "run", "id": "this-run", "starts": []}
PAYLOAD = bytes(range(256)) * 40


def make_run(directory: Path) -> Path:
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(RUN))
    return directory


def save(root: Path, step: int, **metadata: Any) -> Path:
    """Seal a checkpoint as the trainer does, with two files in place of Orbax's."""
    path = dirs.step_dir(root, step)
    (path / "d").mkdir(parents=True)
    (path / "d" / "0").write_bytes(PAYLOAD)
    (path / "manifest.ocdbt").write_bytes(b"ocdbt")
    seal(path, {"step": step, "finite": True} | metadata, Agreement(f"test-{step}-{path.parent.parent.name}"))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 10, 20 and 30."""
    directory = make_run(tmp_path / "run")
    dirs.create(directory / "checkpoints")
    for step in (10, 20, 30):
        save(directory / "checkpoints", step)
    return directory


def called(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    assert cli.run(["checkpoint", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out if code != 2 else captured.err


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_all_kinds_of_directories_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoints"
    dirs.set_aside(root, 10, "sha256")
    (dirs.step_dir(root, 40) / "d").mkdir(parents=True)
    (root / "step_00000050.orbax-checkpoint-tmp").mkdir()
    (root / "step_00000005.deleting").mkdir()
    before = snapshot(root)
    found = json.loads(called(capsys, "list", run, "--json"))
    states = {entry["name"]: (entry["state"], entry["reason"]) for entry in found["checkpoints"]}
    assert states == {
        "step_00000005.deleting": ("being deleted", ""),
        "step_00000010.bad-sha256": ("set aside", "sha256"),
        "step_00000020": ("complete", ""),
        "step_00000030": ("complete", ""),
        "step_00000040": ("incomplete", ""),
        "step_00000050.orbax-checkpoint-tmp": ("being written", ""),
    }
    newest = next(entry for entry in found["checkpoints"] if entry["resumes"])
    assert newest["step"] == 30 and newest["finite"] is True
    assert newest["size_bytes"] == sum(len(content) for name, content in before.items() if name.startswith("step_00000030/")) - len(
        before["step_00000030/integrity.json"]
    )
    page = called(capsys, "list", run)
    assert sum("a restart begins here" in line for line in page.splitlines()) == 1 and "sha256" in page
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("damage", "reason", "file"),
    [
        (lambda path: (path / "d" / "0").write_bytes(PAYLOAD[:-1] + b"x"), "sha256", "d/0"),
        (lambda path: (path / "d" / "0").write_bytes(PAYLOAD[:-1]), "size", "d/0"),
        (lambda path: (path / "d" / "0").unlink(), "missing", "d/0"),
        (lambda path: (path / "d" / "1").write_bytes(b""), "extra", "d/1"),
        (lambda path: (path / "integrity.json").write_text("{}"), "manifest", "integrity.json"),
    ],
)
def test_damage_is_found(run: Path, capsys: pytest.CaptureFixture[str], damage: Any, reason: str, file: str) -> None:
    root = run / "checkpoints"
    assert json.loads(called(capsys, "verify", run, "--json"))["good"] is True
    damage(dirs.step_dir(root, 20))
    before = snapshot(root)
    found = json.loads(called(capsys, "verify", run, "--json", code=1))
    assert found["good"] is False
    assert {entry["step"]: entry["good"] for entry in found["checkpoints"]} == {10: True, 20: False, 30: True}
    (only,) = found["checkpoints"][1]["damage"]
    assert (only["reason"], only["file"]) == (reason, file)
    page = called(capsys, "verify", run, code=1)
    assert "step 10: good" in page and "step 20: damaged" in page and file in page
    called(capsys, "verify", run, "--step", "30")
    called(capsys, "verify", run, "--step", "20", code=1)
    assert snapshot(root) == before


def test_a_checkpoint_of_another_step_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoints"
    dirs.step_dir(root, 30).rename(dirs.step_dir(root, 31))
    assert "it is the checkpoint of step 30" in called(capsys, "verify", run, code=1)


def test_a_checkpoint_of_another_run_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run / "checkpoints", 40, run="another-run")
    assert "it is of the run another-run" in called(capsys, "verify", run, code=1)


def test_bad_input_is_one_clear_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no complete checkpoint of step 7 (complete: 10, 20, 30)" in called(capsys, "verify", run, "--step", "7", code=2)
    assert "is not a run directory" in called(capsys, "list", tmp_path, code=2)
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    (run / "checkpoints" / "notes.txt").write_text("")
    assert "is not a checkpoint directory of ridge" in called(capsys, "list", run, code=2)


def test_a_run_without_checkpoints_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    assert "no checkpoints" in called(capsys, "list", tmp_path / "run")
    assert json.loads(called(capsys, "verify", tmp_path / "run", "--json")) | {"directory": ""} == {
        "run": "run",
        "directory": "",
        "good": True,
        "checkpoints": [],
    }
