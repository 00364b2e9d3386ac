"""Which GPUs a process takes: variables as a real Slurm 22.05 with four (synthetic) GPUs per node sets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster.devices import LocalDevices, choose, gpus_present


def chosen(
    visible: str | None, *, present: int | None = 4, on_node: int | None = 4, tasks: int | None = 4, task: int | None = 2
) -> LocalDevices:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return choose(env, present=present, on_node=on_node, local_processes=tasks, local_process=task)


@pytest.mark.parametrize(
    ("visible", "options", "ids"),
    [
        pytest.param("2", {}, (0,), id="--gpus-per-task=1: the id counts among the visible"),
        pytest.param("2,3", {"tasks": 2, "task": 1}, (0, 1), id="--gpus-per-task=2"),
        pytest.param("0,1,2,3", {"tasks": 1, "task": 0}, (0, 1, 2, 3), id="one task per node takes all"),
        pytest.param("0,1,2,3", {}, (2,), id="--gres=gpu:4, four tasks: all see all"),
        pytest.param("0,1,2,3", {"tasks": 2, "task": 1}, (2, 3), id="two tasks share four"),
        pytest.param("0,1", {"on_node": 2, "tasks": 1, "task": 0}, (0, 1), id="part of a node"),
        pytest.param("0,1", {"on_node": 2, "tasks": 2, "task": 1}, (1,), id="a step on two of the job's four"),
        pytest.param(None, {}, (2,), id="nothing shown, whole node"),
        pytest.param("GPU-aa,GPU-bb", {"present": 2, "on_node": 2, "tasks": 2, "task": 0}, (0,), id="by UUID"),
        pytest.param("3", {"present": 1, "on_node": 4}, (0,), id="cgroups show each task its own GPU only"),
        pytest.param(None, {"on_node": None, "tasks": None, "task": None}, (0, 1, 2, 3), id="no launcher"),
        pytest.param("1", {"on_node": None, "tasks": 4, "task": 1}, (0,), id="mpirun with a binding wrapper"),
    ],
)
def test_a_task_takes_its_own_gpus(visible: str | None, options: dict, ids: tuple[int, ...]) -> None:
    found = chosen(visible, **options)
    assert (found.ids, found.error) == (ids, None)


def test_tasks_of_a_node_share_its_gpus_without_overlap() -> None:
    taken = [chosen("0,1,2,3", tasks=2, task=task).ids or () for task in range(2)]
    assert sorted(sum(taken, ())) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("visible", "options", "code", "message"),
    [
        (None, {"present": 3}, exit_codes.BAD_NODE, "shows 3 GPUs, the allocation has 4"),
        (None, {"present": None}, exit_codes.BAD_NODE, "driver"),
        ("0", {"tasks": 1, "task": 0}, exit_codes.USAGE, "1 of its 4 allocated GPUs"),
        ("0,1,2,3", {"tasks": 3, "task": 0}, exit_codes.USAGE, "3 tasks on this node cannot share 4 GPUs"),
        ("0", {"present": 1, "on_node": 1, "tasks": 2, "task": 0}, exit_codes.USAGE, "2 tasks on this node cannot share 1 GPU"),
        (None, {"present": 8}, exit_codes.USAGE, "which 4 of this node's 8 GPUs"),
    ],
)
def test_contradictory_devices_are_an_error(visible: str | None, options: dict, code: int, message: str) -> None:
    found = chosen(visible, **options)
    assert found.error is not None
    assert found.error[0] == code
    assert message in found.error[1]


def test_gpus_are_counted_from_the_drivers_files(tmp_path: Path) -> None:
    for name in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / "proc" / name).mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert gpus_present(tmp_path / "proc", tmp_path / "dev") == 2
    assert gpus_present(tmp_path / "none", tmp_path / "dev") == 3
    assert gpus_present(tmp_path / "none", tmp_path / "none") is None
