"""Damaged run directories: every command that reads one answers, or refuses with lines that name the file (tests/cli/damaged.py)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.rundir.events import read_events
from tests.cli import damaged


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("damaged")
    damaged.make_run(directory)
    return directory


def test_the_undamaged_run_is_read_by_every_command(root: Path) -> None:
    for command in damaged.commands(root) + damaged.bench_commands(root):
        case = damaged.Case("run/run.json", "none", lambda path: None, command)
        assert damaged.problem(root, case) is None


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_answered_or_refused_by_name(root: Path, seed: int) -> None:
    found = {str(case): damaged.problem(root, case) for case in itertools.islice(damaged.cases(root, seed), 30)}
    assert {case: what for case, what in found.items() if what is not None} == {}


@pytest.mark.parametrize(
    ("only", "names"),
    [("events", ["FIFO", "endless device"]), ("bench/0", ["endless device", "deep"]), ("run.json", ["deep mapping", "directory"])],
)
def test_what_is_no_file_of_limited_size_is_refused(root: Path, only: str, names: list[str]) -> None:
    """A FIFO would block, a device would fill the memory, a deep document the stack."""
    drawn = itertools.islice(damaged.cases(root, 0, only), 2000)
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
