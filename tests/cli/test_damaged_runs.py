"""Damaged run directories: every command that reads one answers, or refuses with lines that name the file (tests/cli/damaged.py)."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.launch.trials.failure import failure_reason
from ridgeline.launch.trials.sweep_file import load_sweep
from ridgeline.loaders.prepare_state import State
from ridgeline.loaders.shard_work import read_result
from ridgeline.rundir.bad_nodes import read_bad_nodes
from ridgeline.rundir.events import read_events
from ridgeline.rundir.jsonl import LineFile
from ridgeline.rundir.lease import Holder, live_holder
from ridgeline.rundir.provenance import source_state
from ridgeline.trainer.stop import last_write_s
from tests.cli import damaged


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("damaged") / "root"
    damaged.make_run(directory)
    damaged.make_others(directory)
    return directory


def test_the_undamaged_run_is_read_by_every_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    others = [command for group in damaged.other_commands(root).values() for command in group]
    for command in dict.fromkeys([*damaged.commands(root), *others]):
        code, errors = damaged.call(list(command))
        assert code == 0 or "A comparison changes one thing" in errors, (command, errors)  # the study has one scale


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_answered_or_refused_by_name(root: Path, seed: int) -> None:
    found = {str(case): damaged.problem(root, case) for case in itertools.islice(damaged.cases(root, seed), 30)}
    assert {case: what for case, what in found.items() if what is not None} == {}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("events", ["FIFO", "endless device", "huge"]),
        ("bench/0", ["endless device", "deep"]),
        ("run.json", ["deep mapping", "directory"]),
        ("sweep.json", ["FIFO", "deep", "noise", "endless device"]),
        ("failures/001", ["FIFO", "a list", "noise", "endless device"]),
        ("sweep/slurm", ["FIFO", "noise and newlines"]),
        ("sweep.yaml", ["FIFO", "deep", "noise"]),
        ("study.json", ["FIFO", "endless device", "deep mapping", "null"]),
        (".prepare/state", ["FIFO", "deep", "a list"]),
        (".hlo.txt", ["FIFO", "endless device"]),
        (".xplane.pb", ["FIFO", "endless device"]),
    ],
)
def test_what_is_no_file_of_limited_size_is_refused(root: Path, only: str, names: list[str]) -> None:
    """A FIFO would block, a device would fill the memory, a deep document the stack."""
    drawn = itertools.islice(damaged.cases(root, 0, only), 500)
    chosen = {case.damage: case for case in drawn if case.damage in names}
    assert sorted(chosen) == sorted(names)
    assert {name: damaged.problem(root, case) for name, case in chosen.items()} == dict.fromkeys(names)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('"kind":"step","step":-1', "step"),
        ('"kind":"step","step":1,"tokens":null', "tokens"),
        ('"kind":"step","step":1,"step_time_p50_s":-1', "step_time_p50_s"),
        ('"kind":"phase_start","phase":"lunch","id":0,"parent":null', "phase"),
        ('"kind":"phase_end","phase":"train","id":0,"duration_s":NaN,"outcome":"ok"', "duration_s"),
        ('"kind":"phase_total","phase":"train","parent":null,"duration_s":1e300,"count":1', "duration_s"),
        ('"kind":"device_state","devices":[{"device":"gpu:0","clock_mhz":[]}]', "devices"),
        ('"kind":"environment","settings":[{"value":"x"}]', "settings"),
    ],
)
def test_an_event_with_a_field_of_another_type_is_named_by_line_and_key(tmp_path: Path, line: str, key: str) -> None:
    own = '{"time":1.0,"mono":1.0,"run":"r","process":0,"restart":0,'
    (tmp_path / "events.jsonl").write_text(f'{own}"kind":"open"}}\n{own}{line}}}\n')
    with pytest.raises(UserError, match=rf"events\.jsonl:2: \w+ with a wrong '{key}'"):
        read_events(tmp_path / "events.jsonl")


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("bad_nodes", read_bad_nodes),
    ("job.log", lambda root: failure_reason(root / "job.log", 1)),
    ("lease/00000003/beat", live_holder),
    ("lease/00000003/holder.json", live_holder),
    ("events.jsonl", lambda root: last_write_s(root / "events.jsonl")),
    ("events.jsonl", lambda root: LineFile(root / "events.jsonl").close()),
    ("snapshot.json", source_state),
    (".prepare/state.json", lambda root: State(root, {"input_fingerprint": "x"}).finished()),
    ("finished-00000.json", lambda root: read_result(root / "finished-00000.json")),
]
"""File in a directory, and what reads it outside of the commands of the campaign: starts, jobs, preparations."""


def refused(work: Callable[[], object]) -> str | None:
    try:
        work()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("file", "read"), READERS, ids=[str(number) for number in range(len(READERS))])
def test_every_reader_refuses_or_passes_over_what_is_no_such_file(tmp_path: Path, file: str, read: Callable[[Path], object]) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.startswith("lease"):
        (path.parent / "beat").write_text("1")
        (path.parent / "holder.json").write_text(Holder(token="x", host="elsewhere", machine="another", pid=7).model_dump_json())
    damages = {name: apply for name, apply in (damaged.whole_file(random.Random(seed)) for seed in range(200)) if name != "missing"}
    assert len(damages) == 20
    for name, apply in damages.items():
        if os.path.lexists(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_text('{"described": {}}')
        apply(path)
        refusal = refused(lambda: read(tmp_path))
        assert refusal is None or ("\n" not in refusal and str(tmp_path) in refusal), name


def test_a_damaged_state_of_a_preparation_removes_nothing_else(tmp_path: Path) -> None:
    """--overwrite removes the sets that state.json names: only subdirectories of the output."""
    other, output = tmp_path / "other", tmp_path / "output"
    state = State(output, {"input_fingerprint": "x"})
    for place in (other, output / ".prepare"):
        place.mkdir(parents=True)
    (other / "manifest.json").write_text("{}")
    for names in (["../other"], [str(other)], "../other", [".."], [["x"]], {"x": 1}):
        (output / ".prepare/state.json").write_text(json.dumps({"described": {"sets": names}}))
        with state.claimed(overwrite=True):
            assert (other / "manifest.json").exists()


def test_a_grid_that_multiplies_is_refused_before_it_expands(tmp_path: Path) -> None:
    axes = "".join(f"  key{number}: {list(range(100))}\n" for number in range(30))
    (tmp_path / "sweep.yaml").write_text(f"name: x\nconfig: models/gpt2\ngrid:\n{axes}")
    with pytest.raises(UserError, match=r"sweep\.yaml:3: 1,000,.* points; at most 1,000 are allowed"):
        load_sweep(tmp_path / "sweep.yaml", {})
