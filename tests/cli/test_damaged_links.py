"""Links in a run directory that lead outside: no command writes or deletes where they lead (tests/cli/damaged_links.py)."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.loaders.prepare_state import State
from ridgeline.rundir.files import write_atomically
from ridgeline.rundir.jsonl import LineFile
from tests.cli import damaged, damaged_links
from tests.cli.damaged_links import CAPTURE, Case
from tests.sampling import drawn


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("links") / "root"
    damaged.make_run(directory)
    return directory


def test_no_command_writes_through_a_link(root: Path) -> None:
    drawn = itertools.islice(damaged_links.cases(root, 0, training=False), 30)
    found = {str(case): damaged_links.problem(root, case) for case in drawn}
    assert {case: what for case, what in found.items() if what is not None} == {}


@pytest.mark.parametrize(
    "moved",
    [
        *(
            "checkpoints/step_00000008",
            "checkpoints/step_00000004",
            "checkpoints/step_00000008/state",
            "lease",
            "slurm",
            "slurm/1",
            CAPTURE,
        ),
        *("tensorboard/plugins", "tensorboard/plugins/profile"),
    ],
)
def test_every_command_leaves_what_a_directory_was_replaced_by(root: Path, moved: str) -> None:
    for command in damaged_links.commands(root):
        assert damaged_links.problem(root, Case((moved,), (), "damaged with a copy", command)) is None, command


@pytest.mark.parametrize("moved", drawn(["tensorboard/plugins", "tensorboard/plugins/profile"], 1))
def test_a_training_moves_no_capture_elsewhere(root: Path, moved: str) -> None:
    assert damaged_links.problem(root, Case((moved,), (("tensorboard/steps", "directory"),), "good", damaged_links.train(root))) is None


@pytest.mark.parametrize("place", drawn(["checkpoints", "tensorboard"], 1))
def test_checkpoints_and_tensorboard_may_be_links_of_the_user(root: Path, place: str) -> None:
    """To a larger file system: a run goes on there."""
    damaged_links.make(root, Case((place,), (), "good", ()))
    code, errors, raised = damaged_links.trained(list(damaged_links.train(root)))
    assert (code, raised) == (0, None), errors
    assert (root / "linked" / place).is_symlink()
    assert {path.name for path in (root / "victim" / f"0-{place}").iterdir()} - {path.name for path in (root / "run" / place).iterdir()}
    assert (root / "linked/checkpoints/step_00000010/integrity.json").is_file()


def test_a_training_takes_no_lease_elsewhere(root: Path) -> None:
    assert damaged_links.problem(root, Case(("lease",), (), "good", damaged_links.train(root))) is None


def test_a_refused_start_leaves_no_thread_that_writes(root: Path) -> None:
    """A thread that still plans while the process exits writes after the lease is given back, and may abort the exit."""
    damaged_links.make(root, Case(("metrics.jsonl",), (), "good", ()))
    code, errors, raised = damaged.guarded(list(damaged_links.train(root)))
    alive = [thread.name for thread in threading.enumerate() if thread.name == "plan"]
    assert (code, raised, alive) == (2, None, [])
    assert "metrics.jsonl is a symbolic link" in errors
    assert (root / "victim/0-metrics.jsonl").read_bytes() == (root / "run/metrics.jsonl").read_bytes()


def test_a_training_writes_nothing_through_links_where_it_keeps_scratch_files(root: Path) -> None:
    """Of everything that can stand in the way without stopping it, at once."""
    linked = tuple((name, "directory" if "tmp" not in name else "file") for name in damaged_links.ABSENT if not name.startswith("lease"))
    moved = ("run.json", "config.yaml", "train.log", "plan.json", "compile.json")
    assert damaged_links.problem(root, Case(moved, linked, "good", damaged_links.train(root))) is None
    assert (root / "linked/checkpoints/step_00000010/integrity.json").is_file()
    assert not (root / "linked/config.yaml").is_symlink()


def test_a_line_file_neither_cuts_nor_appends_behind_a_link(tmp_path: Path) -> None:
    victim, log = tmp_path / "victim", tmp_path / "log"
    victim.write_text("no newline")
    log.symlink_to(victim)
    with pytest.raises(UserError, match=r"log is a symbolic link to .*victim: nothing is written through it"):
        LineFile(log)
    assert victim.read_text() == "no newline"


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_a_file_and_its_temporary_are_replaced_not_written_through(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    if kind == "file":
        victim.write_text("mine")
    for name in ("run.json", "run.json.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "run.json", b"{}")
    assert (tmp_path / "run.json").read_bytes() == b"{}"
    assert not (tmp_path / "run.json").is_symlink()
    assert victim.exists() == (kind == "file")
    assert kind == "nothing" or victim.read_text() == "mine"


@pytest.mark.parametrize("place", [".prepare", "held"])
def test_a_preparation_clears_no_directory_behind_a_link(tmp_path: Path, place: str) -> None:
    """--overwrite removes what a corpus consists of, also where only its name is right."""
    victim, output = tmp_path / "victim", tmp_path / "output"
    (victim / "tokenizer").mkdir(parents=True)
    (victim / "manifest.json").write_text("{}")
    output.mkdir()
    if place != ".prepare":
        (output / ".prepare").mkdir()
        (output / ".prepare/state.json").write_text('{"described": {"sets": ["held"]}}')
    (output / place).symlink_to(victim)
    with pytest.raises(UserError, match=place), State(output, {"input_fingerprint": "x"}).claimed(overwrite=True):
        pass
    assert sorted(path.name for path in victim.iterdir()) == ["manifest.json", "tokenizer"]
