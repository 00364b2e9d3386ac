"""Saving and restoring on one process: bits, meshes, order of events, retention, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from orbax.checkpoint._src.path import async_path

from ridgeline.configs.errors import UserError
from ridgeline.rundir.events import EventLog
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity, payload
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer

Make = Callable[..., Any]


def test_restore_is_bitwise_what_was_saved(checkpointer: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make) -> None:
    state = make_state()
    checkpointer().save(7, state, {"data_position": 7}, block=True)
    restored, metadata = checkpointer().restore(abstract(state))
    assert_bitwise_equal(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, state)
    assert metadata["step"] == 7
    assert metadata["data_position"] == 7
    assert metadata["process_count"] == 1
    assert metadata["versions"]["jax"] == jax.__version__


def test_special_values_keep_their_bits(tmp_path: Path, abstract: Make, fsdp_mesh: Mesh, assert_bitwise_equal: Make) -> None:
    """A step with a NaN is never saved, but the bits of all others rest on a payload that changes none."""
    replicated = jax.sharding.NamedSharding(fsdp_mesh, jax.sharding.PartitionSpec())
    patterns = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0x80000000, 0x00000001, 0x7F800001], np.uint32)
    halves = np.array([0x7FC1, 0xFFFF, 0x7F80, 0x8000, 0x0001, 0x7F81], np.uint16)
    state = {
        "float": jax.device_put(patterns.view(np.float32), replicated),
        "half": jax.device_put(halves.view(jnp.bfloat16), replicated),
        "integer": jax.device_put(patterns.view(np.int32), replicated),
    }
    payload.save_async(tmp_path / "payload", state).result()
    assert_bitwise_equal(payload.load(tmp_path / "payload", abstract(state)), state)


def test_small_replicated_arrays_are_saved_without_compiling_a_program_for_every_part(tmp_path: Path, cube_mesh: Mesh) -> None:
    replicated = jax.sharding.NamedSharding(cube_mesh, jax.sharding.PartitionSpec())
    state = {str(size): jax.device_put(np.arange(size * 8.0), replicated) for size in (3, 5, 7)}
    compiled: list[str] = []

    def on_duration(name: str, duration_s: float, **_: Any) -> None:
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        payload.save_async(tmp_path / "payload", state).result()
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
    assert compiled == []


def test_eight_way_fsdp_restores_onto_a_two_by_two_by_two_mesh(
    checkpointer: Make, make_state: Make, abstract: Make, cube_mesh: Mesh, assert_bitwise_equal: Make
) -> None:
    state = make_state()
    checkpointer().save(1, state, {}, block=True)
    wanted = abstract(state, cube_mesh)
    restored, _ = checkpointer().restore(wanted)
    assert_bitwise_equal(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, wanted)
    back, _ = checkpointer().restore(abstract(state))
    assert_bitwise_equal(back, state)


def test_a_part_of_the_state_can_be_restored(checkpointer: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make) -> None:
    state = make_state()
    checkpointer().save(1, state, {}, block=True)
    restored, _ = checkpointer().restore({"params": abstract(state)["params"]}, partial=True)
    assert_bitwise_equal(restored, {"params": state["params"]})


def test_buffers_may_be_donated_as_soon_as_save_returns(
    checkpointer: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make
) -> None:
    arrays = {name: leaf for name, leaf in make_state(width=4096).items() if name != "key"}
    wanted, kept = abstract(arrays), jax.tree.map(lambda x: x.copy(), arrays)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: (x * 0 + 1).astype(x.dtype), state), donate_argnums=0)
    saver = checkpointer()
    saver.save(1, arrays, {})
    for _ in range(4):
        arrays = jax.block_until_ready(overwrite(arrays))
    saver.close()
    assert_bitwise_equal(saver.restore(wanted)[0], kept)


@pytest.mark.parametrize("stage", ["payload", "manifest"])
def test_training_continues_while_the_save_is_written(
    stage: str, checkpointer: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the payload, or the manifest, is held back until training has gone on: only the order of events is looked at."""
    order: list[str] = []
    may_commit, write_manifest, rename = threading.Event(), integrity.write_manifest, async_path.rename

    def gated_manifest(*arguments: Any) -> None:
        assert stage != "manifest" or may_commit.wait(60)
        write_manifest(*arguments)
        order.append("complete")

    async def gated_rename(*arguments: Any) -> None:
        assert stage != "payload" or await asyncio.to_thread(may_commit.wait, 60)
        await rename(*arguments)
        order.append("payload committed")

    monkeypatch.setattr(integrity, "write_manifest", gated_manifest)
    monkeypatch.setattr(async_path, "rename", gated_rename)
    saver, state = checkpointer(), make_state()
    report = saver.save(1, state, {})
    assert report.saved
    assert report.waited_s <= report.blocking_s
    jax.block_until_ready(jax.jit(lambda x: x @ x.T)(state["params"]["matrix"]))
    assert saver.latest_step() is None
    order.append("trained")
    may_commit.set()
    saver.close()
    order.append("closed")
    order_wanted = ["trained", "payload committed", "complete", "closed"]
    assert order == order_wanted if stage == "payload" else sorted(order, key=order_wanted.index) == order_wanted
    assert order.index("trained") < order.index("complete")
    assert saver.latest_step() == 1


def test_saving_and_restoring_work_under_the_loops_transfer_guard(
    checkpointer: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make
) -> None:
    state = make_state()
    wanted = abstract(state)
    saver = checkpointer()
    with jax.transfer_guard("disallow"):
        assert saver.save(1, state, {}).saved
        saver.wait()
        restored, _ = saver.restore(wanted)
    assert_bitwise_equal(restored, state)


def test_a_second_save_waits_for_the_first(checkpointer: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: list[int] = []
    start, finish = Checkpointer._start, Checkpointer._finish

    def starting(self: Checkpointer, pending: Any, state: Any) -> None:
        assert not in_flight
        in_flight.append(pending.step)
        start(self, pending, state)

    def finishing(self: Checkpointer, pending: Any) -> None:
        finish(self, pending)
        in_flight.remove(pending.step)

    monkeypatch.setattr(Checkpointer, "_start", starting)
    monkeypatch.setattr(Checkpointer, "_finish", finishing)
    saver, state = checkpointer(keep_last=9), make_state()
    for step in range(1, 6):
        saver.save(step, state, {})
    saver.close()
    assert checkpoint_dirs.complete_steps(saver.directory) == [1, 2, 3, 4, 5]


def test_synchronous_saves_are_complete_when_save_returns(checkpointer: Make, make_state: Make) -> None:
    saver = checkpointer(asynchronous=False)
    saver.save(3, make_state(), {})
    assert saver.latest_step() == 3
    assert integrity.verify(checkpoint_dirs.step_dir(saver.directory, 3)) == []


def test_retention_keeps_the_last_two_and_every_fourth(checkpointer: Make, make_state: Make) -> None:
    saver, state = checkpointer(keep_last=2, keep_every=4), make_state()
    for step in range(1, 12):
        saver.save(step, state, {})
    saver.close()
    assert checkpoint_dirs.complete_steps(saver.directory) == [4, 8, 10, 11]
    assert sorted(os.listdir(saver.directory)) == [checkpoint_dirs.MARKER, *(f"step_{s:08d}" for s in (4, 8, 10, 11))]


def test_the_old_step_is_deleted_only_after_the_new_one_is_complete(
    checkpointer: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, seen = checkpoint_dirs.delete, []

    def watched(root: Path, step: int) -> None:
        newest = checkpoint_dirs.complete_steps(root)[-1]
        seen.append((step, newest, integrity.verify(checkpoint_dirs.step_dir(root, newest))))
        delete(root, step)

    monkeypatch.setattr(checkpoint_dirs, "delete", watched)
    saver, state = checkpointer(keep_last=1), make_state()
    for step in (1, 2, 3):
        saver.save(step, state, {})
    saver.close()
    assert seen == [(1, 2, [])], "3 is complete, but nothing shows yet that training goes on from it: 2 stays"
    assert checkpoint_dirs.complete_steps(saver.directory) == [2, 3]


def test_an_interrupted_deletion_is_finished_at_the_next_start(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver, state = checkpointer(), make_state()
    for step in (1, 2):
        saver.save(step, state, {}, block=True)
    first = checkpoint_dirs.step_dir(saver.directory, 1)
    os.rename(first, f"{first}.deleting")
    (Path(f"{first}.deleting") / "metadata.json").unlink()
    said: list[str] = []
    assert checkpointer(said=said).restore(abstract(state))[1]["step"] == 2
    assert sorted(os.listdir(saver.directory)) == [checkpoint_dirs.MARKER, "step_00000002"]
    assert len(said) == 1
    assert "finished the interrupted deletion of step_00000001" in said[0]


def test_saving_the_restored_or_just_saved_step_again_writes_nothing(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver, state = checkpointer(), make_state()
    assert saver.save(5, state, {}, block=True).saved
    assert not saver.save(5, state, {}, block=True).saved
    resumed = checkpointer()
    resumed.restore(abstract(state))
    assert not resumed.save(5, state, {}, block=True).saved


def test_saving_after_restoring_an_earlier_step_sets_the_later_ones_aside(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver = checkpointer(keep_last=5)
    for step in (10, 20, 30):
        saver.save(step, make_state(step), {}, block=True)
    said: list[str] = []
    branch = checkpointer(said=said, keep_last=5)
    branch.restore(abstract(make_state()), step=10)
    branch.save(20, make_state(99), {}, block=True)
    assert checkpoint_dirs.complete_steps(saver.directory) == [10, 20]
    assert {"step_00000020.bad-superseded", "step_00000030.bad-superseded"} <= set(os.listdir(saver.directory))
    assert len(said) == 2


def test_steps_set_aside_expire_with_the_saves_that_follow(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver = checkpointer(keep_last=9)
    for step in range(1, 8):
        saver.save(step, make_state(step), {}, block=True)
    branch = checkpointer(keep_last=9, keep_set_aside=2)
    branch.restore(abstract(make_state()), step=1)
    for step in (7, 4, 2, 3, 6, 5):  # in this order: the newest are 6 and 5
        checkpoint_dirs.set_aside(saver.directory, step, "sha256")
        time.sleep(0.02)  # the clock of a file system has steps of some milliseconds
    branch.save(2, make_state(99), {}, block=True)
    names = sorted(os.listdir(saver.directory))
    assert names == [checkpoint_dirs.MARKER, "step_00000001", "step_00000002", "step_00000005.bad-sha256", "step_00000006.bad-sha256"]


def test_everything_is_on_disk_before_a_step_counts(checkpointer: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and directories of a step, and the directories above it that the save created, are synced before the manifest."""
    fsync, synced = os.fsync, set[str]()

    def recording(number: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    write_manifest, missing = integrity.write_manifest, list[str]()

    def check(root: Path, files: Any) -> None:
        wanted = [root, *root.rglob("*"), root.parent, root.parent.parent]
        missing.extend(str(path) for path in wanted if str(path) not in synced and f"{path}.tmp" not in synced)
        write_manifest(root, files)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(integrity, "write_manifest", check)
    saver = checkpointer()
    saver.save(1, make_state(), {}, block=True)
    assert missing == []
    step = checkpoint_dirs.step_dir(saver.directory, 1)
    assert {f"{step}/{integrity.MANIFEST}.tmp", str(step)} <= synced


def test_metadata_can_be_read_without_the_state(checkpointer: Make, make_state: Make) -> None:
    saver = checkpointer()
    saver.save(4, make_state(), {"config_hash": "abc", "mesh": {"fsdp": 8}}, block=True)
    metadata = checkpointer().read_metadata(4)
    assert metadata["config_hash"] == "abc"
    assert metadata["mesh"] == {"fsdp": 8}
    assert metadata["arrays"]["params.half"] == {"shape": [16, 4], "dtype": "bfloat16"}


def test_events_tell_saves_and_deletions(checkpointer: Make, make_state: Make, tmp_path: Path) -> None:
    saver = checkpointer(events=EventLog(tmp_path / "events.jsonl"), keep_last=1)
    for step in (1, 2, 3):
        saver.save(step, make_state(), {}, block=True)
    saver.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [(event["kind"], event["step"]) for event in events if event["kind"].startswith("checkpoint_")]
    assert told == [("checkpoint_saved", 1), ("checkpoint_saved", 2), ("checkpoint_deleted", 1), ("checkpoint_saved", 3)]
    size_bytes = [event["size_bytes"] for event in events if event["kind"] == "checkpoint_saved"][-1]
    assert size_bytes == sum(integrity.list_files(checkpoint_dirs.step_dir(saver.directory, 3)).values())


def test_should_save_follows_steps_minutes_and_the_end(checkpointer: Make) -> None:
    now_s = [0.0]
    saver = checkpointer(clock=lambda: now_s[0], every=10, every_minutes=1)
    assert [step for step in range(1, 21) if saver.should_save(step)] == [10, 20]
    now_s[0] = 61.0
    assert saver.should_save(21)
    now_s[0] = 0.0
    assert saver.should_save(22, last=True)


# -- refusals -----------------------------------------------------------------------------------------------------------------------


def refused(saver: Checkpointer, wanted: Any, **arguments: Any) -> str:
    with pytest.raises(UserError) as error:
        saver.restore(wanted, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_state_of_another_shape_dtype_or_tree_is_refused_by_name_and_the_step_stays(
    checkpointer: Make, make_state: Make, abstract: Make
) -> None:
    saver, state = checkpointer(), make_state()
    saver.save(1, state, {}, block=True)
    wanted = abstract(state)
    leaf = wanted["params"]["matrix"]
    wanted["params"]["matrix"] = jax.ShapeDtypeStruct((32, 16), leaf.dtype, sharding=leaf.sharding)
    assert "params.matrix is float32[64,16] in the checkpoint, float32[32,16] in the config" in refused(saver, wanted)
    wanted["params"]["matrix"] = jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)
    assert "params.matrix is float32[64,16] in the checkpoint, bfloat16[64,16] in the config" in refused(saver, wanted)
    wanted["params"]["fresh"] = wanted["params"].pop("matrix")
    text = refused(saver, wanted)
    assert "params.fresh is missing in the checkpoint" in text
    assert "params.matrix is only in the checkpoint" in text
    assert saver.latest_step() == 1


def test_many_differences_are_summed_up(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver, state = checkpointer(), {f"w{i}": make_state()["step"] for i in range(20)}
    saver.save(1, state, {}, block=True)
    wanted = {f"v{i}": leaf for i, leaf in enumerate(abstract(state).values())}
    assert refused(saver, wanted).endswith("and 35 more")


def test_nothing_to_restore_is_refused_and_differs_from_a_fresh_run(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver = checkpointer()
    assert not saver.has_checkpoints()
    assert saver.latest_step() is None
    assert refused(saver, abstract(make_state())).startswith("no checkpoint in ")


def test_a_step_that_does_not_exist_is_refused_with_those_that_do(checkpointer: Make, make_state: Make, abstract: Make) -> None:
    saver, state = checkpointer(), make_state()
    for step in (1, 2):
        saver.save(step, state, {}, block=True)
    assert refused(saver, abstract(state), step=9).endswith("has no complete checkpoint of step 9 (complete: 1, 2)")


def test_a_foreign_directory_is_refused_and_left_alone(checkpointer: Make, make_state: Make, abstract: Make, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "step_00000100").mkdir(parents=True)
    (foreign / "model.safetensors").write_text("theirs")
    assert "is not a checkpoint directory of ridge" in refused(checkpointer(foreign), abstract(make_state()))
    with pytest.raises(UserError, match="is not a checkpoint directory of ridge"):
        checkpointer(foreign).has_checkpoints()
    said: list[str] = []
    report = checkpointer(foreign, said=said).save(1, make_state(), {}, block=True)
    assert "is not a checkpoint directory of ridge" in (report.error or "")
    assert sorted(os.listdir(foreign)) == ["model.safetensors", "step_00000100"]


def test_an_unreadable_directory_is_refused(checkpointer: Make, make_state: Make, abstract: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert refused(checkpointer(tmp_path / "file"), abstract(make_state())).endswith("cannot be read: Not a directory")


def test_a_directory_without_permission_is_refused(
    checkpointer: Make, make_state: Make, abstract: Make, tmp_path: Path, as_nobody: Make
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    with as_nobody():
        assert refused(checkpointer(locked), abstract(make_state())).endswith("cannot be read: Permission denied")
