"""The run directory: what it records, and whose it is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import CheckpointConfig, Config
from ridgeline.rundir import files
from ridgeline.rundir.lease import current_holder
from ridgeline.trainer import start as starting
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.start import StartedRun, start_run

Make = Callable[..., Any]


def config(path: Path, name: str = "mine", **sections: Any) -> Config:
    return Config(name=name, run_dir=path, **sections)


def start(conf: Config, said: list[str] | None = None) -> StartedRun:
    lines = said if said is not None else []
    started = start_run(conf, command=["ridge", "train", "x.yaml"], log=lines.append, now=lambda: datetime(2026, 1, 2, 3, tzinfo=UTC))
    started.lease.release()
    return started


def refusal(conf: Config) -> str:
    with pytest.raises(UserError) as error:
        start(conf)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_first_start_records_what_the_run_is_and_came_from(tmp_path: Path) -> None:
    conf = config(tmp_path / "runs" / "mine", model={"embed_dim": 128})
    opened = start(conf)
    assert opened.restart == 0
    assert opened.path == tmp_path / "runs" / "mine"
    assert from_resolved(opened.path / "config.yaml") == conf
    run = json.loads((opened.path / "run.json").read_text())
    assert run["name"] == "mine"
    assert run["id"] == opened.id
    (first,) = run["starts"]
    assert first["time"] == "2026-01-02T03:00:00+00:00"
    assert first["command"] == ["ridge", "train", "x.yaml"]
    assert first["packages"]["jax"] == jax.__version__
    assert first["devices"] == {"platform": "cpu", "kind": jax.devices()[0].device_kind, "count": 8}
    assert first["processes"] == 1
    assert first["pid"] == os.getpid()


def test_a_restart_adds_an_entry_and_keeps_the_id(tmp_path: Path) -> None:
    first, second = start(config(tmp_path / "run")), start(config(tmp_path / "run"))
    assert (first.restart, second.restart) == (0, 1)
    assert first.id == second.id
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["starts"]) == 2
    assert not list((tmp_path / "run").glob("config.*.yaml"))


def test_a_changed_config_is_listed_and_the_one_before_is_kept(tmp_path: Path, make_state: Make) -> None:
    before, after = config(tmp_path / "run"), config(tmp_path / "run", trainer={"steps": 7})
    opened = start(before)
    Checkpointer(opened.checkpoints, CheckpointConfig()).save(1, make_state(), {}, block=True)
    said: list[str] = []
    start(after, said)
    assert len(said) == 1 and "trainer.steps: 1000 -> 7" in said[0]
    assert from_resolved(tmp_path / "run" / "config.yaml") == after
    assert from_resolved(tmp_path / "run" / "config.0.yaml") == before


def test_a_change_that_makes_the_checkpoint_wrong_is_refused_and_nothing_is_written(tmp_path: Path, make_state: Make) -> None:
    opened = start(config(tmp_path / "run"))
    Checkpointer(opened.checkpoints, CheckpointConfig()).save(1, make_state(), {}, block=True)
    before = {path.name: path.read_bytes() for path in opened.path.iterdir() if path.is_file()}
    assert "model.embed_dim: 256 -> 512" in refusal(config(tmp_path / "run", model={"embed_dim": 512}))
    assert {path.name: path.read_bytes() for path in opened.path.iterdir() if path.is_file()} == before


def test_without_a_checkpoint_yet_anything_may_change(tmp_path: Path) -> None:
    start(config(tmp_path / "run"))
    assert start(config(tmp_path / "run", model={"embed_dim": 512})).restart == 1


def test_the_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    start(config(tmp_path / "run", name="theirs"))
    assert "belongs to the run 'theirs', not 'mine'" in refusal(config(tmp_path / "run"))


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    assert "is not a run directory of ridge and not empty (it holds chapter1.tex)" in refusal(config(tmp_path / "thesis"))
    assert os.listdir(tmp_path / "thesis") == ["chapter1.tex"]


@pytest.mark.parametrize("operation", ["write_atomically", "os.replace"])
@pytest.mark.parametrize("restart", [0, 1])
def test_a_start_killed_at_any_write_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: int, operation: str) -> None:
    """Killed before a file is written, or between its temporary file and the rename."""
    place, name = (os, "replace") if operation == "os.replace" else (files, "write_atomically")
    conf, write = config(tmp_path / "run"), getattr(place, name)
    for _ in range(restart):
        start(conf)
    changed = config(tmp_path / "run", model={"embed_dim": 128})
    written: list[str] = []

    def killed_before(count: int) -> Callable[[Path, Any], None]:
        def until(path: Path, data: Any) -> None:
            written.append(Path(path).name.removesuffix(".tmp"))
            if len(written) == count:
                raise KeyboardInterrupt
            write(path, data)

        return until

    for count in range(1, 10):
        written.clear()
        monkeypatch.setattr(place, name, killed_before(count))
        try:
            assert start(changed).restart == restart
            break
        except KeyboardInterrupt:
            pass
    assert count > 2 and "run.json" in written
    assert from_resolved(tmp_path / "run" / "config.yaml") == changed


def test_what_a_killed_start_left_half_written_is_removed_and_a_users_file_is_not(tmp_path: Path) -> None:
    start(config(tmp_path / "run"))
    ours = ("run.json", "config.yaml", "config.3.yaml", "git.diff", "git.12.diff", "plan.json", "compile.json")
    for name in (*ours, "notes", "config.mine.yaml"):
        (tmp_path / "run" / f"{name}.tmp").write_text('{"half')
    start(config(tmp_path / "run"))
    assert sorted(path.name for path in (tmp_path / "run").glob("*.tmp")) == ["config.mine.yaml.tmp", "notes.tmp"]


def test_a_start_that_is_refused_gives_the_lease_back(tmp_path: Path) -> None:
    start(config(tmp_path / "run"))
    (tmp_path / "run" / "run.json").write_text("{")
    for _ in range(2):
        assert "run.json is damaged" in refusal(config(tmp_path / "run"))
    assert current_holder(tmp_path / "run") is None


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    assert start(config(tmp_path)).restart == 0


def test_unwritable_output_is_one_line(tmp_path: Path, as_nobody: Make) -> None:
    (tmp_path / "file").write_text("in the way")
    assert refusal(config(tmp_path / "file" / "run")).endswith("Not a directory")
    assert refusal(config(tmp_path / "file")).startswith("cannot write the run directory")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    with as_nobody():
        assert refusal(config(locked / "run")).endswith("Permission denied")


def test_a_damaged_run_json_is_refused(tmp_path: Path) -> None:
    start(config(tmp_path / "run"))
    for text in ('{"name": "mi', "[]", '{"name": "mine"}', ""):
        (tmp_path / "run" / "run.json").write_text(text)
        assert "run.json is damaged" in refusal(config(tmp_path / "run"))


def test_commit_and_uncommitted_changes_of_the_source_tree_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(["git", *identity, *arguments], cwd=source, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (source / "code.py").write_text("old = 1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    monkeypatch.setattr(starting, "_SOURCE_TREE", source)

    def recorded() -> dict[str, Any]:
        start(config(tmp_path / "run"))
        return json.loads((tmp_path / "run" / "run.json").read_text())["starts"][-1]["git"]

    assert recorded() == {"commit": commit, "dirty": False, "diff": None, "untracked": []}
    (source / "code.py").write_text("new = 2\n")
    (source / "extra.py").write_text("")
    assert recorded() == {"commit": commit, "dirty": True, "diff": "git.1.diff", "untracked": ["extra.py"]}
    patch = tmp_path / "run" / "git.1.diff"
    git("stash", "-q")
    git("apply", str(patch))
    assert (source / "code.py").read_text() == "new = 2\n"


def test_a_source_tree_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_SOURCE_TREE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    start(config(tmp_path / "run"))
    git = json.loads((tmp_path / "run" / "run.json").read_text())["starts"][0]["git"]
    assert git["commit"] is None
    assert "not a git repository" in git["why"]
