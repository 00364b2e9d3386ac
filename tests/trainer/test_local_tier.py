"""Local checkpoints: after the loss of a process or a node, a run of real processes resumes bitwise from the newest complete tier."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig, LocalCheckpointConfig
from ridgeline.launch.cluster.network import free_port
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import event_file, read_events
from ridgeline.rundir.goodput import run_ledger
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity, local_part
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.local_tier import LocalTier
from ridgeline.trainer.checkpoint.param_slices import open_array
from ridgeline.trainer.checkpoint.seal import METADATA, read_metadata
from tests.xla_flags import QUICK_XLA

Make = Callable[..., Any]
KILL_AT = 8
"""Local checkpoint after which a process is killed: there is one of step 6 in the run directory."""


def start(corpus: Path, kill_at: int, *roots: Path) -> list[subprocess.Popen[str]]:
    port, worker = free_port(), Path(__file__).with_name("local_tier_run.py")
    environment = {**os.environ, "XLA_FLAGS": QUICK_XLA}
    return [
        subprocess.Popen(
            [sys.executable, worker, str(process), str(port), corpus, str(kill_at), *roots],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]


def without_node(root: Path) -> None:
    shutil.rmtree(root / "node_1")


def without_nodes(root: Path) -> None:
    shutil.rmtree(root / "node_0")
    shutil.rmtree(root / "node_1")


def damaged(root: Path) -> None:
    """Every own part has a flipped bit; the copies on the other node are good."""
    rng = random.Random(0)
    for process in range(2):
        for path in root.glob(f"node_{process}/*/process_{process:05d}/step_*/*.bin"):
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)


VARIANTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "process": (lambda root: None, "local"),
    "node": (without_node, "neighbor"),
    "both": (without_nodes, "shared"),
    "damaged": (damaged, "neighbor"),
}
"""What is lost -> where the state is restored from."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An undisturbed run, and runs that continue after one whose process 1 was killed."""
    root = tmp_path_factory.mktemp("tiers")
    (root / "texts").mkdir()
    (root / "texts" / "0.txt").write_text("\n".join(f"line {number * number} of a text" for number in range(600)))
    prepare(PrepareSettings((root / "texts",), root / "corpus", "bytes", shards=1), workers=1)
    corpus = root / "corpus"
    children = start(corpus, KILL_AT, root / "killed")
    try:
        assert children[1].wait(120) == -signal.SIGKILL
    finally:
        for child in children:
            child.kill()
            child.communicate()
    for number, (name, (loss, _)) in enumerate(VARIANTS.items()):
        shutil.copytree(root / "killed", root / name)
        loss(root / name)
        file = root / name / "run" / "run.json"  # the same processes continue all copies: each start needs a number of its own
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | {"starts": record["starts"] * (1 + number)}))
    children = start(corpus, 0, *(root / name for name in VARIANTS), root / "whole")
    outputs = []
    try:
        outputs = [child.communicate(timeout=240)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output[-4000:]
    return {name: root / name for name in [*VARIANTS, "whole"]}


def final(root: Path) -> dict[str, bytes]:
    checkpoints = root / "run" / "checkpoints"
    newest = dirs.step_dir(checkpoints, dirs.complete_steps(checkpoints)[-1])
    return {name: np.asarray(open_array(newest, name).read().result()).tobytes() for name in read_metadata(newest)["arrays"]}


def restored(root: Path) -> dict[str, Any]:
    events = read_events(event_file(root / "run", 0))
    (found,) = [e.fields for e in events if e.kind == "phase_end" and e.fields["phase"] == "restore"]
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_the_run_resumes_bitwise_from_the_newest_complete_tier(runs: dict[str, Path], name: str) -> None:
    found = restored(runs[name])
    assert found["tier"] == VARIANTS[name][1]
    assert found["step"] == 6 if found["tier"] == "shared" else found["step"] >= KILL_AT
    reference = final(runs["whole"])
    assert len(reference) > 10 and final(runs[name]) == reference


def test_the_ledger_has_less_lost_work_than_with_one_tier(runs: dict[str, Path]) -> None:
    lost = {name: run_ledger(read_events(event_file(runs[name] / "run", 0))).lost_steps for name in ("process", "node", "both")}
    assert lost["process"] == lost["node"] < lost["both"]


def test_a_finished_run_leaves_nothing_on_the_nodes(runs: dict[str, Path]) -> None:
    assert not [path for root in runs.values() for path in root.glob("node_*/*/process_*")]


@pytest.fixture
def tier(tmp_path: Path, make_state: Make, abstract: Make) -> Make:
    """A checkpointer with a local tier on a directory of the given name; `said` and `events` collect what it reports."""

    def make(
        name: str,
        said: list[str] | None = None,
        events: list[tuple[str, dict[str, Any]]] | None = None,
        first_start: bool = True,
        **settings: Any,
    ) -> Checkpointer:
        config = LocalCheckpointConfig(directory=tmp_path / name, **settings)
        seen = [] if events is None else events
        local = LocalTier(
            config,
            "this-run",
            tmp_path / "run" / "checkpoints",
            abstract(make_state()),
            log=(said if said is not None else []).append,
            emit=lambda kind, **fields: seen.append((kind, fields)),
            first_start=first_start,
        )
        return Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig(), local=local)

    return make


def settle(checkpointer: Checkpointer) -> None:
    assert checkpointer._local is not None and checkpointer._local._thread is not None
    checkpointer._local._thread.join()


def test_every_dtype_and_sharding_restores_bitwise(tier: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make) -> None:
    first = tier("disk", keep=2)
    first.begin(0)
    for step in (1, 2, 3):
        assert first.save_local(step, make_state(step), {"data_position": step, "run": "this-run"})
        settle(first)
    second = tier("disk")
    assert second.has_local()
    state, metadata = second.restore(abstract(make_state()))
    assert_bitwise_equal(state, make_state(3))
    assert (metadata["step"], metadata["data_position"], second.restored_from) == (3, 3, "local")
    assert "arrays" in metadata and not any(key.startswith("local_") or key == "shards" for key in metadata)


def test_the_newer_tier_is_restored_and_an_older_local_step_is_not(
    tier: Make, make_state: Make, abstract: Make, assert_bitwise_equal: Make
) -> None:
    first = tier("disk")
    first.begin(0)
    first.save_local(3, make_state(3), {})
    settle(first)
    first.save(4, make_state(4), {}, block=True)
    second = tier("disk")
    state, metadata = second.restore(abstract(make_state()))
    assert (metadata["step"], second.restored_from) == (4, "shared")
    assert_bitwise_equal(state, make_state(4))
    second.begin(4)
    second.save_local(5, make_state(5), {})
    settle(second)
    assert tier("disk").restore(abstract(make_state()))[1]["step"] == 5
    # an explicit step wins, and ends the course to which step 5 belonged
    third = tier("disk")
    assert third.restore(abstract(make_state()), 4)[1]["step"] == 4
    third.set_later_aside(4)
    assert not tier("disk").has_local()


def test_a_node_that_was_away_does_not_bring_back_what_was_given_up(tier: Make, make_state: Make) -> None:
    first = tier("away")
    first.begin(0)
    first.save_local(7, make_state(7), {})
    settle(first)
    assert tier("away").has_local()
    second = tier("other")  # the node is replaced: the run begins again at step 0, and then again at step 5
    assert not second.has_local()
    second.begin(0)
    assert not tier("away").has_local()
    (second.directory / "lineage.json").write_text("{")
    assert not tier("away").has_local()


@pytest.mark.parametrize("seed", range(8))
def test_random_damage_never_restores(
    tier: Make, tmp_path: Path, make_state: Make, abstract: Make, assert_bitwise_equal: Make, seed: int
) -> None:
    rng = random.Random(seed)
    first = tier("disk")
    first.begin(0)
    first.save(1, make_state(1), {}, block=True)
    first.save_local(2, make_state(2), {})
    settle(first)
    path = rng.choice([file for file in sorted((tmp_path / "disk" / "this-run").rglob("*")) if file.is_file()])
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "remove"])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content if kind == "flip" else content[:-1])
    if kind == "remove":
        path.unlink()
    state, metadata = tier("disk").restore(abstract(make_state()))
    assert metadata["step"] == 1
    assert_bitwise_equal(state, make_state(1))


def test_a_save_that_is_due_while_one_is_written_is_skipped(tier: Make, make_state: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    written, events = threading.Event(), list[tuple[str, dict[str, Any]]]()
    write = local_part.write

    def slow(*arguments: Any) -> int:
        assert written.wait(60)
        return write(*arguments)

    monkeypatch.setattr(local_part, "write", slow)
    saver = tier("disk", events=events)
    saver.begin(0)
    assert saver.save_local(1, make_state(1), {})
    assert not saver.save_local(2, make_state(2), {})
    written.set()
    settle(saver)
    assert saver.save_local(3, make_state(3), {})
    settle(saver)
    assert [(kind.removeprefix("local_checkpoint_"), fields["step"]) for kind, fields in events] == [
        ("skipped", 2),
        ("saved", 1),
        ("saved", 3),
    ]


def test_a_disk_that_fails_is_reported_and_training_goes_on(tier: Make, tmp_path: Path, make_state: Make) -> None:
    said: list[str] = []
    events: list[tuple[str, dict[str, Any]]] = []
    saver = tier("disk", said=said, events=events)
    saver.begin(0)
    saver.save_local(1, make_state(1), {})
    settle(saver)
    place = tmp_path / "disk" / "this-run" / "process_00000"
    place.rename(place.with_name("away"))
    place.write_text("")
    saver.save_local(2, make_state(2), {})
    settle(saver)
    assert [kind for kind, _ in events] == ["local_checkpoint_saved", "local_checkpoint_failed"]
    assert len(said) == 1 and "FAILED" in said[0] and "training continues" in said[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        tier("file")


@pytest.mark.parametrize(
    "change", [{"local_process": "0"}, {"local_process": None}, {"step": [1]}, {"step": -1}, {"local_process": 10**400}]
)
def test_a_sealed_part_with_other_values_is_not_offered(tier: Make, tmp_path: Path, make_state: Make, change: dict[str, Any]) -> None:
    saver = tier("disk")
    saver.begin(0)
    saver.save_local(1, make_state(1), {})
    settle(saver)
    (part,) = (tmp_path / "disk" / "this-run").glob("process_*/step_*")
    metadata = json.loads((part / METADATA).read_text())
    (part / METADATA).write_text(json.dumps(metadata | change))
    files = integrity.read_manifest(part)
    entry = {"size_bytes": (part / METADATA).stat().st_size, "sha256": integrity.sha256_file(part / METADATA)}
    integrity.write_manifest(part, files | {METADATA: dataclasses.replace(files[METADATA], **entry)})
    assert not tier("disk").has_local()


@pytest.mark.parametrize("failing", ["this-run", "this-run/process_00000"])
def test_a_node_whose_disk_cannot_be_read_offers_nothing(
    tier: Make, tmp_path: Path, make_state: Make, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    saver = tier("disk")
    saver.begin(0)
    saver.save_local(1, make_state(1), {})
    settle(saver)
    fresh, scandir = tier("disk"), os.scandir

    def fail(path: Any = ".") -> Any:
        if Path(path) == tmp_path / "disk" / failing:
            raise OSError(5, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    assert not fresh.has_local()


def test_a_later_start_goes_on_without_a_tier_that_cannot_be_written(tier: Make, make_state: Make, tmp_path: Path) -> None:
    first = tier("disk")
    first.begin(0)
    first.save_local(1, make_state(1), {})
    settle(first)
    (tmp_path / "disk").rename(tmp_path / "away")
    (tmp_path / "disk").write_text("")
    said: list[str] = []
    later = tier("disk", said=said, first_start=False)
    assert len(said) == 1 and "cannot write" in said[0] and said[0].endswith("training continues without local checkpoints")
    assert not later.has_local()
    assert not later.local_due(1)
    later.begin(0)
    later.close()
    (tmp_path / "disk").unlink()
    (tmp_path / "away").rename(tmp_path / "disk")
    assert not tier("disk", first_start=False).has_local(), "training began again at step 0: the local step no longer counts"


def test_other_shardings_have_other_layouts(make_state: Make, abstract: Make) -> None:
    state, mesh = make_state(), jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    digests = {
        local_part.layout(abstract(state)),
        local_part.layout(abstract(state, mesh)),
        local_part.layout(abstract(make_state(width=8))),
    }
    assert len(digests) == 3
    assert local_part.layout(abstract(make_state(1))) == local_part.layout(abstract(state))
