"""Runs on a text with a stretch of unusual bytes: what loss_spikes.policy does about it, resumed and in two processes too."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.launch.cluster.network import free_port
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.directory import read_metrics
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.goodput import run_ledger
from ridgeline.rundir.loss_spikes import EVENT
from ridgeline.rundir.skipped_batches import read_skipped_batches
from ridgeline.trainer.failures import NumericalFailure
from ridgeline.trainer.loss_spikes import ROLLBACK
from ridgeline.trainer.run import train
from tests.sampling import drawn
from tests.trainer.test_run import LENGTH, ROOT, ROWS, command, environment, make_config, payload

STEPS, BAD = 72, 48
"""Steps of a run; first batch of unusual bytes. The bad batches end before the last checkpoint, and begin after the second."""


def prepare_spiky_text(directory: Path, batch: int) -> Path:
    """Prepare a text for batches of so many bytes: repeated words, then four batches of control characters that occur nowhere else, then
    words; return the directory of the corpus `train`."""
    draw = random.Random(3)
    words = ["gradient ", "update ", "loss ", "batch ", "token "]

    def text(batches: int) -> str:
        return "".join(draw.choice(words) for _ in range(batches * batch))[: batches * batch]

    odd = "".join(chr(draw.randint(1, 8)) for _ in range(4 * batch))
    (directory / "text.txt").write_text(text(BAD) + odd + text(60))
    prepare(PrepareSettings((directory / "text.txt",), directory / "sets" / "train", "bytes", shards=1), workers=1)
    return directory / "sets"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_spiky_text(tmp_path_factory.mktemp("spiky"), ROWS * LENGTH)


def spiky(corpus: Path, run_dir: Path, policy: str, /, **sections: Any) -> Config:
    own: dict[str, Any] = {
        "data": {"shuffle": False},
        "evaluation": {"every": 0, "sets": {}},
        "optimizer": {"learning_rate": 5e-3},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "trainer": {"steps": STEPS},
        "checkpoint": {"every": 20},
        "loss_spikes": {"policy": policy, "window": 32, "sigmas": 1.5},
    }
    merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    return make_config(corpus, run_dir, **merged)


def run(config: Config) -> tuple[dict[int, float], list[Event]]:
    """Train; return step -> loss as a reader of metrics.jsonl finds them, and the events of process 0."""
    train(config, command=["test"])
    found = {r["step"]: r["train/loss"] for r in read_metrics(config.directory / "metrics.jsonl") if "train/loss" in r}
    return found, read_events(event_file(config.directory, 0))


def assert_same_state(one: Config, other: Config) -> None:
    expected, found = payload(one), payload(other)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)


@pytest.fixture(scope="module")
def rolled_back(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[int, float], list[Event]]:
    config = spiky(corpus, tmp_path_factory.mktemp("rollback") / "run", "rollback")
    return config, *run(config)


def test_a_run_goes_back_before_a_spike_and_leaves_its_batches_out(
    corpus: Path, tmp_path: Path, rolled_back: tuple[Config, dict[int, float], list[Event]]
) -> None:
    config, losses, events = rolled_back
    [left_out] = read_skipped_batches(config.directory).ranges
    [back] = [event for event in events if event.kind == ROLLBACK]
    assert (left_out.first, left_out.end) == (back.fields["first_batch"], back.fields["end_batch"])
    assert BAD - 2 <= left_out.first <= BAD and BAD + 3 <= left_out.end <= BAD + 5
    assert left_out.spike_step == left_out.first + 2
    later = [event for event in events if event.restart == 1]
    assert [event.fields["start_step"] for event in later if event.kind == "phase_start" and event.fields.get("start_step")] == [40]
    assert any(event.kind == EVENT for event in events) and not any(event.kind == EVENT for event in later)
    assert run_ledger(events).lost_steps == left_out.end - 40
    # the run that leaves them out from its first step on
    straight = spiky(corpus, tmp_path / "straight", "rollback")
    train(straight.model_copy(update={"trainer": straight.trainer.model_copy(update={"stop_after_s": 1e-9})}), command=["test"])
    shutil.copy(config.directory / "skipped_batches.json", straight.directory)
    expected, _ = run(straight)
    assert expected == losses
    assert_same_state(straight, config)
    # and not the one with them
    warned, events = run(spiky(corpus, tmp_path / "warned", "warn"))
    assert {step for step in losses if losses[step] != warned[step]} == set(range(left_out.first + 1, STEPS + 1))
    assert any(event.kind == EVENT for event in events) and not any(event.kind == ROLLBACK for event in events)


def test_a_run_with_local_checkpoints_and_corruption_checks_goes_back_alike(
    corpus: Path, tmp_path: Path, rolled_back: tuple[Config, dict[int, float], list[Event]]
) -> None:
    """It goes on from the newest checkpoint of either kind before the spike: those of the spike are set aside."""
    config, losses, _ = rolled_back
    local = {"directory": str(tmp_path / "local"), "every": 3, "keep": 4}
    both = spiky(corpus, tmp_path / "run", "rollback", checkpoint={"local": local}, corruption_check={"every": 16})
    found, events = run(both)
    assert found == losses
    assert_same_state(config, both)
    [begun] = [event.fields["start_step"] for event in events if event.restart == 1 and event.fields.get("start_step")]
    assert begun in (40, 42, 45)  # a local save that is due while another is written is left out
    assert not any(event.kind == "corruption" for event in events)


@pytest.mark.parametrize("policy", drawn(["rollback", "skip"], 1))
def test_a_run_that_is_stopped_within_a_spike_goes_on_as_without_the_stop(
    corpus: Path, tmp_path: Path, rolled_back: tuple[Config, dict[int, float], list[Event]], policy: str
) -> None:
    if policy == "rollback":
        config, losses, _ = rolled_back
    else:
        config = spiky(corpus, tmp_path / "whole", policy)
        losses, events = run(config)
        skipped = [event.fields["batch"] for event in events if event.kind == "skipped_step"]
        assert len(skipped) >= 4 and min(skipped) >= BAD - 1 and max(skipped) <= BAD + 4
        assert not (config.directory / "skipped_batches.json").exists()
    stopped = spiky(corpus, tmp_path / "stopped", policy)
    for steps in (BAD - 5, BAD + 2):
        run(spiky(corpus, tmp_path / "stopped", policy, trainer={"steps": steps}))
    assert run(stopped)[0] == losses
    assert_same_state(config, stopped)


def test_a_run_that_changed_its_mesh_goes_back_to_a_checkpoint_of_the_earlier_mesh(
    corpus: Path, tmp_path: Path, rolled_back: tuple[Config, dict[int, float], list[Event]]
) -> None:
    """And goes on from there with the mesh that it has; a later start on a third mesh leaves the batches out too."""
    config, losses, _ = rolled_back
    meshes: list[dict[str, Any]] = [{"mesh": {"data": 8}}, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, {"mesh": {"data": 2, "fsdp": 4}}]
    found: dict[int, float] = {}
    for steps, mesh in zip((BAD - 5, STEPS - 8, STEPS), meshes, strict=True):
        found, events = run(spiky(corpus, tmp_path / "run", "rollback", trainer={"steps": steps}, **mesh))
    [back] = [event for event in events if event.kind == ROLLBACK]
    begun = [event.fields["start_step"] for event in events if event.kind == "phase_start" and event.fields["phase"] == "train"]
    assert (back.restart, begun) == (1, [0, BAD - 5, BAD - 5, STEPS - 8])
    assert read_skipped_batches(tmp_path / "run") == read_skipped_batches(config.directory)
    assert found.keys() == losses.keys()
    np.testing.assert_allclose([found[step] for step in losses], list(losses.values()), rtol=1e-4)


def test_a_run_ends_where_spikes_go_on_after_the_last_rollback(corpus: Path, tmp_path: Path) -> None:
    """The stretch is longer than what one rollback leaves out; the state before it stays."""
    config = spiky(corpus, tmp_path / "run", "rollback", loss_spikes={"max_rollbacks": 1, "skip_before": 0, "min_rise": 0.3})
    skips = {"ranges": [{"first": 0, "end": 1, "spike_step": 2}]}
    halting = config.model_copy(update={"trainer": config.trainer.model_copy(update={"stop_after_s": 1e-9})})
    train(halting, command=["test"])
    (config.directory / "skipped_batches.json").write_text(json.dumps(skips))
    with pytest.raises(NumericalFailure, match=r"a loss spike from step \d+ on, after 1 rollbacks") as failure:
        run(config)
    assert failure.value.steps == [20, 40]
    (config.directory / "skipped_batches.json").write_text('{"ranges": [{"first": -1}]}')
    with pytest.raises(UserError, match=r"skipped_batches.json is damaged: ranges.0.first: must be greater than or equal to 0"):
        run(config)


def test_two_processes_go_back_together(corpus: Path, tmp_path: Path, rolled_back: tuple[Config, dict[int, float], list[Event]]) -> None:
    _, losses, _ = rolled_back
    config = spiky(corpus, tmp_path / "run", "rollback", runtime={"platform": "cpu", "cpu_devices": 1})
    words = command(config, tmp_path, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2")
    processes = [
        subprocess.Popen(
            [*words, "--process", str(index)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT
        )
        for index in range(2)
    ]
    output = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    [left_out] = read_skipped_batches(config.directory).ranges
    for index in range(2):
        events = read_events(event_file(config.directory, index))
        [back] = [event for event in events if event.kind == ROLLBACK]
        assert (back.fields["first_batch"], back.fields["end_batch"]) == (left_out.first, left_out.end)
    found = {r["step"]: r["train/loss"] for r in read_metrics(config.directory / "metrics.jsonl") if "train/loss" in r}
    assert found.keys() == losses.keys()
    for step, loss in losses.items():
        assert found[step] == pytest.approx(loss, rel=1e-4), step


@pytest.mark.parametrize(
    ("sections", "keys", "message"),
    [
        ({"checkpoint": {"every": 0}}, ("loss_spikes.policy", "checkpoint.every"), "rollback needs checkpoints"),
        ({"checkpoint": {"every": 2}}, ("checkpoint.every", "loss_spikes.policy", "checkpoint.keep_last"), "must be at least 3 with"),
        ({"checkpoint": {"every": 50}, "loss_spikes": {"skip_before": 100}}, ("checkpoint.every",), "must be at least 102 with"),
        ({"policy": {"loss": "grpo"}}, ("loss_spikes.policy", "policy.loss"), "policy updates are not judged"),
    ],
    ids=str,
)
def test_settings_with_which_a_run_could_not_go_back_are_refused(
    tmp_path: Path, sections: dict[str, Any], keys: tuple[str, ...], message: str
) -> None:
    problems = check_config(spiky(tmp_path, tmp_path / "run", "rollback", **sections))
    assert any(problem.keys[: len(keys)] == keys and message in problem.message for problem in problems), problems
    kept = {"checkpoint": {"every": 51, "keep_last": 3}, "loss_spikes": {"skip_before": 100}}
    assert not check_config(spiky(tmp_path, tmp_path / "run", "rollback", **kept))
