"""Which process a hang report names, on drawn positions."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from ridgeline.trainer.hang_report import FRAMES, Position, python_frames, read_position, report_text, suspects

WAITING = ["ridgeline/trainer/loop.py:150 run", "ridgeline/trainer/loop.py:240 _read_pending", "jax/_src/api.py:2900 device_get"]
LOADING = ["ridgeline/trainer/loop.py:150 run", "ridgeline/trainer/loop.py:225 _next_batch", "grain/_src/python/pool.py:10 get"]
HLO = """HloModule jit_train_step, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %reduced = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
}
"""


def position(step: int, frames: list[str]) -> Position:
    return Position(step=step, phase="a step", silent_s=31.5, threads={"MainThread": frames})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fault", ["silent", "behind", "loading"])
def test_the_process_that_differs_is_named(fault: str, seed: int) -> None:
    draw = random.Random(f"{seed}{fault}")
    count, step = draw.randint(2, 40), draw.randint(0, 10**6)
    positions: dict[int, Position | None] = {process: position(step, WAITING) for process in range(count)}
    names = {process: f"process {process} (node{process // 4})" for process in range(count)}
    guilty = sorted(draw.sample(range(count), draw.randint(1, max(1, (count - 1) // 3))))
    for process in guilty:
        late = draw.randint(0, 1)
        positions[process] = {"silent": None, "behind": position(step - 1, WAITING), "loading": position(step - late, LOADING)}[fault]
    assert suspects(positions)[0] == guilty
    text = report_text(positions, names, HLO, {"data": 2})
    first, collective = text.splitlines()[:2]
    assert first.startswith(f"suspect: {names[guilty[0]]}")
    assert collective.startswith("the first collective of a step is all-reduce reduced over data, 16 B; ")
    assert text.count(WAITING[-1]) == (2 if fault == "behind" else 1)  # equal stacks once
    if fault == "loading":
        assert LOADING[-1] in text


SAVING = ["ridgeline/trainer/hooks.py:300 on_state", "ridgeline/trainer/checkpoint/checkpointer.py:150 wait"]
FILES = ["pwrite64 of /shared/checkpoints/12/data", "openat of /shared/checkpoints/12/seal"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fault", ["late", "file", "worker"])
def test_what_it_waits_for_is_named_with_the_process(fault: str, seed: int) -> None:
    draw = random.Random(f"{seed}{fault}")
    count, step = draw.randint(2, 40), draw.randint(1, 10**6)
    others = position(step, SAVING if fault == "file" else WAITING).model_copy(update={"begun": step + draw.randint(1, 2)})
    positions: dict[int, Position | None] = dict.fromkeys(range(count), others)
    names = {process: f"process {process} (node{process // 4})" for process in range(count)}
    guilty = sorted(draw.sample(range(count), draw.randint(1, max(1, (count - 1) // 3))))
    worker = "loader worker 3 (pid 77), which is stopped"
    different: dict[str, dict[str, Any]] = {
        "late": {"begun": step},
        "file": {"files": FILES},
        "worker": {"begun": step, "worker": worker, "threads": {"MainThread": LOADING}},
    }
    for process in guilty:
        positions[process] = others.model_copy(update=different[fault])
    assert suspects(positions)[0] == guilty
    first, collective, *rest = report_text(positions, names, HLO, {"data": 2}).splitlines()
    assert first.startswith(f"suspect: {names[guilty[0]]}")
    assert first.endswith(
        {"late": f"({others.begun})", "file": f", and waits for {'; '.join(FILES)}", "worker": f" waits for {worker}"}[fault]
    )
    assert collective.endswith("" if fault == "file" else f"; in step {step + 1} not reached by {first_list(guilty, names)}")
    assert [line.strip() for line in rest if line.startswith("  waits for ")] == {
        "late": [],
        "file": [f"waits for {name}" for name in FILES],
        "worker": [f"waits for {worker}"],
    }[fault]


def first_list(guilty: list[int], names: dict[int, str]) -> str:
    return ", ".join(names[process] for process in guilty[:16])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_file_that_all_wait_for_is_the_suspect(count: int) -> None:
    """A file system that all use, or the one of a process that is alone."""
    stuck = position(4, LOADING).model_copy(update={"files": FILES[:1]})
    names = {process: f"process {process}" for process in range(count)}
    first = report_text(dict.fromkeys(range(count), stuck), names, HLO, {"data": 2}).splitlines()[0]
    assert first == f"suspect: {FILES[0]}, for which {', '.join(names.values())} wait{'s' if count == 1 else ''}"


def test_a_slow_write_is_not_named_before_a_process_that_is_behind() -> None:
    """A save in the background is slow in one process, and another one does not come to the step."""
    writes = position(4, WAITING).model_copy(update={"files": FILES, "begun": 6})
    late = position(4, WAITING).model_copy(update={"begun": 5})
    assert suspects({0: writes, 1: late, 2: writes})[0] == [1]
    assert suspects({0: writes, 1: position(4, LOADING).model_copy(update={"begun": 6})})[0] == [1]


TWO = HLO.replace(
    "ROOT %reduced",
    "%gathered = f32[8]{0} all-gather(%x), channel_id=2, replica_groups={{0,1}}, dimensions={0}\n  ROOT %reduced",
)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("all-reduce reduced", "all-reduce reduced over data, 16 B (number 2 of 2 of the step)"),
        ("all-gather gathered", "all-gather gathered over data, 32 B (number 1 of 2 of the step)"),
        ("all-gather", "all-gather gathered over data, 32 B (number 1 of 2 of the step)"),
        ("all-reduce of.evaluation", "all-reduce of.evaluation, which is not of the step"),
    ],
)
def test_the_collective_that_stacks_tell_is_described_with_those_that_are_not_in_it(read: str, said: str, late: bool) -> None:
    waits = position(4, WAITING).model_copy(update={"begun": 6, "collective": read})
    other = position(4, WAITING).model_copy(update={"begun": 5 if late else 6})
    names = {process: f"process {process}" for process in range(4)}
    first, second, *_ = report_text({0: waits, 1: other, 2: waits, 3: None if late else waits}, names, TWO, {"data": 2}).splitlines()
    if late:
        assert first.startswith("suspect: process 3, which does not answer")
        assert second == f"process 0, process 2 wait in {said}; not reached by process 1, which has not begun step 6; unknown of process 3"
    else:
        assert first == "suspect: process 1, which is in no collective, unlike the others"
        assert second == f"process 0, process 2, process 3 wait in {said}; process 1 is not in it"


def test_processes_in_different_collectives_have_a_line_each_and_none_is_suspect() -> None:
    both = {
        process: position(4, WAITING).model_copy(update={"begun": 6, "collective": name})
        for process, name in enumerate(("all-gather gathered", "all-reduce reduced"))
    }
    first, *lines = report_text(both, {0: "a", 1: "b"}, TWO, {"data": 2}).splitlines()[:3]
    assert first.startswith("suspect: none")
    assert lines == [
        "a waits in all-gather gathered over data, 32 B (number 1 of 2 of the step); b is not in it",
        "b waits in all-reduce reduced over data, 16 B (number 2 of 2 of the step); a is not in it",
    ]


def test_candidates_are_named_where_only_the_kind_is_known() -> None:
    several = HLO.replace(
        "ROOT %reduced",
        "".join(
            f"%other.{n} = f32[4]{{0}} all-reduce(%x), channel_id={n}, replica_groups={{{{0,1}}}}, to_apply=%add\n  " for n in range(2, 8)
        )
        + "ROOT %reduced",
    )
    waits = position(4, WAITING).model_copy(update={"begun": 6, "collective": "all-reduce"})
    second = report_text({0: waits, 1: waits}, {0: "a", 1: "b"}, several, {"data": 2}).splitlines()[1]
    named = "; ".join(f"all-reduce other.{n} over data, 16 B" for n in range(2, 6))
    assert second == f"a, b wait in all-reduce, one of 7 of the step: {named} and 3 more"


def test_nobody_is_named_where_all_do_the_same() -> None:
    for frames in (WAITING, LOADING):
        assert suspects({process: position(4, frames) for process in range(5)}) == ([], "")


def test_positions_of_this_process_have_its_frames_and_anything_else_is_refused() -> None:
    ready, go = threading.Event(), threading.Event()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            ready.set()
            go.wait()

    thread = threading.Thread(target=deep, args=(50,))
    thread.start()
    ready.wait()
    found = python_frames()
    go.set()
    thread.join()
    assert next(iter(found)) == "MainThread"
    assert all(len(frames) <= FRAMES for frames in found.values())
    good = Position(step=3, phase="a step", silent_s=1.0, threads=found).model_dump()
    assert read_position(good) == Position(**good)
    hostile: list[Any] = [
        None,
        3,
        [],
        {},
        {**good, "step": "3"},
        {**good, "more": 1},
        {**good, "threads": {"a": ["x"] * 1000}},
        {**good, "phase": "x" * 999},
    ]
    assert [read_position(value) for value in hostile] == [None] * len(hostile)
