"""`ridge checkpoint repair | prune`: after random damage, what is left is good, and what is lost is named."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import main as cli
from ridgeline.rundir.lease import acquire, this_process
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.seal import seal

RUN = {"format": 1, "name": "run", "id": "this-run", "starts": []}
STEPS = (10, 20, 30)


def save(root: Path, step: int, **metadata: Any) -> Path:
    """Seal a checkpoint as the trainer does, with files of random bytes in place of Orbax's."""
    path, rng = dirs.step_dir(root, step), random.Random(step)
    (path / "d").mkdir(parents=True)
    for name, size in (("d/0", 5000), ("d/1", 3000), ("manifest.ocdbt", 200)):
        (path / name).write_bytes(rng.randbytes(size))
    seal(path, {"step": step, "finite": True, "run": "this-run"} | metadata, Agreement("test"))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 10, 20 and 30, beside a copy of it."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(RUN))
    dirs.create(directory / "checkpoints")
    for step in STEPS:
        save(directory / "checkpoints", step)
    shutil.copytree(directory, tmp_path / "copy")
    return directory


def called(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int | None = 0) -> Any:
    found = cli.run(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code is None or found == code, captured.err
    if code == 2:
        return captured.err
    return json.loads(captured.out) if "--json" in arguments else captured.out


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def some_file(path: Path, rng: random.Random) -> Path:
    return path / rng.choice(sorted(integrity.list_files(path)))


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": lambda path, rng: flip(some_file(path, rng), rng),
    "truncate": lambda path, rng: os.truncate(some_file(path, rng), rng.randrange(100)),
    "remove": lambda path, rng: some_file(path, rng).unlink(),
    "add": lambda path, rng: (path / f"extra.{rng.randrange(9)}").write_bytes(b"x"),
    "manifest": lambda path, rng: flip(path / "integrity.json", rng),
    "cut manifest": lambda path, rng: os.truncate(path / "integrity.json", rng.randrange(900)),
    "unsealed": lambda path, rng: (path / "integrity.json").unlink(),
    "killed at the seal": lambda path, rng: (path / "integrity.json").rename(path / "integrity.json.tmp"),
    "killed deletion": lambda path, rng: path.rename(path.with_name(path.name + ".deleting")),
    "killed save": lambda path, rng: path.rename(path.with_name(path.name + ".orbax-checkpoint-tmp")),
    "misnamed": lambda path, rng: path.rename(dirs.step_dir(path.parent, 90)),
    "all": lambda path, rng: [flip(path / name, rng) for name in integrity.list_files(path)],
}
"""Damage of one step. The first five are repaired from a copy, whatever they hit."""


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_repaired_or_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng, root = random.Random(seed), run / "checkpoints"
    original = snapshot(root)
    hit = {step: rng.choice(list(DAMAGE)) for step in STEPS if rng.random() < 0.7}
    for step, kind in hit.items():
        DAMAGE[kind](dirs.step_dir(root, step), rng)
    (root / "ridge-checkpoints.json.tmp").write_bytes(b"")
    damaged = snapshot(root)
    with_copy = bool(seed % 2)
    options = ["--from", str(tmp_path / "copy")] if with_copy else []
    planned = called(capsys, "repair", run, "--dry-run", "--json", *options, code=None)
    assert snapshot(root) == damaged  # a dry run changes nothing
    report = called(capsys, "repair", run, "--json", *options, code=None)
    assert [entry["step"] for entry in planned["lost"]] == [entry["step"] for entry in report["lost"]]
    assert planned["resumes"] == report["resumes"] or "killed at the seal" in hit.values() or "unsealed" in hit.values()
    verified = called(capsys, "verify", run, "--json")  # exit code 0: everything that is left is good
    left = {entry["step"] for entry in verified["checkpoints"]}
    # what is left has the bytes it was saved with
    for step in left:
        name = dirs.step_dir(root, step).name
        kept = {path: content for path, content in original.items() if path.startswith(f"{name}/")}
        assert {path: content for path, content in snapshot(root).items() if path.startswith(f"{name}/")} == kept
    # no step goes without a word
    told = {entry["step"] for entry in report["lost"]}
    told |= {
        int(action["name"][5:13])
        for action in report["actions"]
        if action["kind"] in ("set aside", "cleared") and "step_" in action["name"]
    }
    assert set(STEPS) - left <= told | {step for step, kind in hit.items() if kind == "misnamed"}
    assert report["resumes"] == max(left, default=None)
    if with_copy:
        assert {step for step, kind in hit.items() if list(DAMAGE).index(kind) < 5} | (set(STEPS) - hit.keys()) <= left
    else:
        assert {step for step, kind in hit.items() if kind in ("add", "killed at the seal")} | (set(STEPS) - hit.keys()) <= left
    again = called(capsys, "repair", run, "--json", *options, code=None)
    assert not again["lost"]
    assert not again["actions"]
    # nothing but leftovers of killed processes was deleted
    if not {"killed deletion", "killed save"} & set(hit.values()):
        lost_bytes = set(damaged.values()) - set(snapshot(root).values()) - {b""}
        assert not lost_bytes


def test_a_flipped_bit_of_the_manifest_is_repaired_without_a_copy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rng = dirs.step_dir(run / "checkpoints", 30), random.Random(0)
    intact = (path / "integrity.json").read_bytes()
    for _ in range(25):
        (path / "integrity.json").write_bytes(intact)
        flip(path / "integrity.json", rng)
        report = called(capsys, "repair", run, "--json", "--delete")
        assert [action["kind"] for action in report["actions"]] == ["sealed"]
        assert (path / "integrity.json").read_bytes() == intact


def test_a_set_aside_step_comes_back_with_a_copy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoints"
    flip(dirs.step_dir(root, 30) / "d" / "0", random.Random(1))
    report = called(capsys, "repair", run, "--json", code=1)
    assert report["resumes"] == 20 and [item["file"] for item in report["lost"][0]["damage"]] == ["d/0"]
    report = called(capsys, "repair", run, "--json", "--from", tmp_path / "copy")
    assert [action["kind"] for action in report["actions"]] == ["replaced", "restored"]
    assert report["resumes"] == 30
    assert called(capsys, "verify", run, "--json")["good"]


def test_a_damaged_copy_repairs_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (run, tmp_path / "copy"):
        flip(dirs.step_dir(place / "checkpoints", 30) / "d" / "0", random.Random(1))
    assert "is damaged; nothing was replaced" in called(capsys, "repair", run, "--from", tmp_path / "copy", code=2)
    assert called(capsys, "repair", run, "--json", code=1)["resumes"] == 20


def test_a_live_run_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lease = acquire(run, this_process(30.0), log=print)
    try:
        before = snapshot(run / "checkpoints")
        for command in ("repair", "prune"):
            for options in ([], ["--dry-run"]):
                assert "is in use" in called(capsys, command, run, *options, code=2)
        assert snapshot(run / "checkpoints") == before
    finally:
        lease.release()
    called(capsys, "repair", run)


@pytest.mark.parametrize("seed", range(12))
def test_prune_keeps_what_the_policy_says_and_never_the_damaged_instead_of_the_good(
    run: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng, root = random.Random(seed), run / "checkpoints"
    losses = {step: rng.random() for step in (40, 50, 60)}
    for step, loss in losses.items():
        save(root, step, evaluation={"held": loss, "other": -loss})
    dirs.set_aside(root, 10, "sha256")
    steps = [20, 30, 40, 50, 60]
    bad = rng.sample(steps, rng.randrange(3))
    for step in bad:
        flip(dirs.step_dir(root, step) / "d" / "0", rng)
    last, best, name = rng.randrange(1, 4), rng.randrange(3), rng.choice(["held", "other"])
    options = ["--keep-last", last, "--keep-every", 20, "--keep-best", best, "--set", name, "--keep-set-aside", rng.randrange(2)]
    options = list(map(str, options))
    before = snapshot(root)
    planned = called(capsys, "prune", run, "--dry-run", "--json", *options)
    assert snapshot(root) == before
    pruned = called(capsys, "prune", run, "--json", *options)
    assert pruned["deleted"] == planned["deleted"] and pruned["freed_bytes"] == planned["freed_bytes"]
    good = [step for step in steps if step not in bad][-last:]
    sign = 1 if name == "held" else -1
    kept = (
        set(good)
        | {step for step in steps if step % 20 == 0 or step > good[0]}
        | set(sorted(losses, key=lambda s: sign * losses[s])[:best])
    )
    if len(good) < last:
        kept = set(steps)
    assert set(pruned["kept"]) == set(dirs.complete_steps(root)) == kept
    gone = [content for path, content in before.items() if not (root / path).exists() and not path.endswith("integrity.json")]
    assert pruned["freed_bytes"] == sum(map(len, gone))
