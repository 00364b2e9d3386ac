"""Four real processes: what they save restores in one, what one saved restores in them, and what they must agree on they do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ridgeline.launch.cluster.network import free_port
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity
from tests.xla_flags import QUICK_XLA

Make = Callable[..., Any]
COUNT = 4


def values(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((16, 1000), np.float32), "step": np.asarray(np.int32(seed))}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What one process prepares, four find and leave behind."""
    from ridgeline.configs.schema import CheckpointConfig
    from ridgeline.trainer.checkpoint.checkpointer import Checkpointer

    root = tmp_path_factory.mktemp("four")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saver = Checkpointer(root / "from_one", CheckpointConfig(keep_last=5))
    for step in (5, 6):
        saver.save(step, {name: jax.device_put(x, device) for name, x in values(step).items()}, {}, block=True)
    shutil.copytree(root / "from_one", root / "damaged")
    flip_payload(checkpoint_dirs.step_dir(root / "damaged", 6))
    shutil.copytree(root / "damaged", root / "all_bad")
    flip_payload(checkpoint_dirs.step_dir(root / "all_bad", 5))
    shutil.copytree(root / "from_one", root / "restart")
    checkpoint_dirs.delete(root / "from_one", 6)
    return root, run_workers(root)


def flip_payload(step: Path) -> None:
    sizes = integrity.list_files(step)
    file = step / max(sizes, key=lambda name: sizes[name])
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def run_workers(root: Path) -> list[dict[str, Any]]:
    port = free_port()
    worker = Path(__file__).with_name("checkpoint_worker.py")
    environment = {**os.environ, "XLA_FLAGS": QUICK_XLA}
    children = [
        subprocess.Popen(
            [sys.executable, worker, str(process), str(COUNT), str(port), str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(COUNT)
    ]
    try:
        outputs = [child.communicate(timeout=240)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output[-4000:]
    lines = [next(line for line in output.splitlines() if line.startswith("FINDINGS ")) for output in outputs]
    return [json.loads(line.removeprefix("FINDINGS ")) for line in lines]


Four = tuple[Path, list[dict[str, Any]]]


def test_one_process_saves_and_four_restore(four: Four) -> None:
    assert [found["from_one"] for found in four[1]] == [[5, 1, True]] * COUNT


def test_four_processes_save_and_one_restores_on_another_mesh(four: Four, checkpointer: Make, cube_mesh: Mesh) -> None:
    root, findings = four
    assert all(found["report"] and found["trained"] and found["latest"] == 21 for found in findings)
    saver = checkpointer(root / "from_four")
    sharding = NamedSharding(cube_mesh, PartitionSpec(("data", "tensor"), "fsdp"))
    replicated = NamedSharding(cube_mesh, PartitionSpec())
    wanted = {
        "w": jax.ShapeDtypeStruct((16, 1000), np.float32, sharding=sharding),
        "step": jax.ShapeDtypeStruct((), np.int32, sharding=replicated),
    }
    restored, metadata = saver.restore(wanted)
    assert metadata["step"] == metadata["data_position"] == 21
    assert metadata["process_count"] == COUNT
    assert {name: x.tobytes() for name, x in values(21).items()} == {name: np.asarray(x).tobytes() for name, x in restored.items()}


def test_the_manifest_of_four_processes_covers_the_payload_of_each(four: Four) -> None:
    step = checkpoint_dirs.step_dir(four[0] / "from_four", 21)
    files = integrity.read_manifest(step)
    assert all(any(f"ocdbt.process_{process}/" in name for name in files) for process in range(COUNT))
    assert integrity.verify(step) == []
    assert checkpoint_dirs.complete_steps(step.parent) == [20, 21]


def test_damage_gets_the_same_verdict_in_every_process(four: Four) -> None:
    root, findings = four
    assert [found["damaged"] for found in findings] == [[5, True]] * COUNT
    assert checkpoint_dirs.steps(root / "damaged") == [5]
    assert (root / "damaged" / "step_00000006.bad-sha256").is_dir()


def test_nothing_good_is_refused_alike_in_every_process(four: Four) -> None:
    messages = {found["all_bad"] for found in four[1]}
    assert len(messages) == 1
    assert "step 6 is damaged" in messages.pop()


def test_a_save_that_fails_in_one_process_fails_in_all_and_the_next_works(four: Four) -> None:
    root, findings = four
    assert [found["failures"] for found in findings] == [1] * COUNT
    assert [found["again"] for found in findings] == [0] * COUNT
    assert [found["after_failure"] for found in findings] == [[0, 3]] * COUNT
    assert checkpoint_dirs.complete_steps(root / "one_fails") == [2, 3]
    assert all(integrity.verify(checkpoint_dirs.step_dir(root / "one_fails", step)) == [] for step in (2, 3))
    warnings = [line for line in findings[0]["said"] if "saving step 2 FAILED (1 in a row, 3 stop the run)" in line]
    assert len(warnings) == 1
    assert "process 2: " in warnings[0]
    assert "File too large" in warnings[0]


def test_a_state_that_is_not_finite_in_one_process_is_refused_alike_in_all(four: Four) -> None:
    root, findings = four
    assert {found["not_finite"] for found in findings} == {"the state of step 31 is not finite (w)"}
    assert [found["after_refusal"] for found in findings] == [[30, 32]] * COUNT
    assert checkpoint_dirs.steps(root / "not_finite") == [30, 32]


def test_a_restart_from_an_earlier_step_sets_the_later_ones_aside_in_all_processes(four: Four) -> None:
    root, findings = four
    assert [found["restarted"] for found in findings] == [[5]] * COUNT
    assert (root / "restart" / "step_00000006.bad-superseded").is_dir()


def test_only_process_zero_speaks(four: Four) -> None:
    assert [bool(found["said"]) for found in four[1]] == [True, False, False, False]


def test_minutes_are_decided_by_process_zero_alike_in_all_and_hardly_late(four: Four) -> None:
    due = four[1][0]["due"]
    assert all(found["due"] == due for found in four[1])
    assert len(due) >= 4
    gaps_s = np.diff([0, *due]) * 3.0
    assert (gaps_s >= 600).all()
    assert (gaps_s <= 600 * 1.05 + 3).all()
