"""What a run saves and keeps when steps are not finite: the real loop and checkpointer around a step whose outcome a test chooses."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ridgeline.configs.schema import Config
from ridgeline.observe.step_timer import StepTimer
from ridgeline.rundir.events import EventLog
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.seal import METADATA
from ridgeline.trainer.failures import NumericalFailure
from ridgeline.trainer.hooks import Heartbeat, MetricLog, NonFiniteSteps, Recorder, Saving
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.stop import GracePeriod, Stop
from ridgeline.trainer.watchdog import Watchdog

KINDS = (np.nan, np.inf, -np.inf)


@dataclass
class Plan:
    """What happens in a run: steps from 1 on."""

    steps: int
    every: int = 2
    keep_last: int = 2
    bad: frozenset[int] = frozenset()
    """Steps whose loss is not finite; their update is skipped."""
    large: frozenset[int] = frozenset()
    """Steps above optimizer.skip_norm; their update is skipped, the state is sound."""
    poison: tuple[int, str, float] | None = None
    """Step, leaf and value: the state is not finite from there on, though losses are."""
    stop_at: int | None = None
    """SIGTERM comes during this step."""
    time_up_at: int | None = None
    """The time limit passes during this step."""
    max_bad_steps: int = 4


@dataclass
class Run:
    """One directory, and what starts of the loop in it leave."""

    directory: Path
    mesh: Any
    notes: list[str] = field(default_factory=list)

    def state(self, values: dict[str, float], step: int, in_a_row: int) -> Any:
        sharded, replicated = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
        arrays = {name: np.full((8, 2), 1.0 + step, np.float32) for name in ("w", "mu")}
        for name, value in values.items():
            arrays[name][step % 8, 1] = value
        return SimpleState(
            {"w": jax.device_put(arrays["w"], sharded)},
            {"mu": jax.device_put(arrays["mu"], sharded)},
            jax.device_put(np.int32(in_a_row), replicated),
        )

    def start(self, plan: Plan, from_step: int = 0) -> Any:
        """Train by the plan from a step on; return the loop's outcome. Raises NumericalFailure."""
        now_s, stop, in_a_row, step = [0.0], Stop(log=lambda text: None), [0], [from_step]

        def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
            step[0] += 1
            bad = step[0] in plan.bad
            in_a_row[0] = (in_a_row[0] + 1) * (bad or step[0] in plan.large)
            poisoned = plan.poison is not None and step[0] >= plan.poison[0]
            values = {plan.poison[1]: plan.poison[2]} if plan.poison is not None and poisoned else {}
            if step[0] == plan.stop_at:
                stop.requested = signal.SIGTERM
            if step[0] == plan.time_up_at:
                now_s[0] = 1e6
            names = ("accuracy", "learning_rate", "weight", "skipped")
            metrics = {"loss": np.nan if bad else 1.0, "grad_norm": 1.0, "bad_in_a_row": in_a_row[0], **dict.fromkeys(names, 0.0)}
            return self.state(values, step[0], in_a_row[0]), metrics

        config = Config.model_validate(
            {
                "trainer": {"steps": plan.steps, "max_bad_steps": plan.max_bad_steps, "log_every": 1000, "stop_after_s": 1e5},
                "checkpoint": {"every": plan.every, "keep_last": plan.keep_last},
            }
        )
        events = EventLog(self.directory / "events.jsonl")
        quiet: Any = SimpleNamespace(start=nothing, advance=nothing, update=nothing, note=self.notes.append, write=nothing, flush=nothing)
        checkpointer = Checkpointer(self.directory / "checkpoints", config.checkpoint, events=events, log=self.notes.append)
        timer = StepTimer(tokens_per_step=1, num_devices=1, flops_per_token=1.0, peak_flops=None)
        recorder = Recorder(events, quiet, quiet, timer)
        watchdog = Watchdog(None, self.directory / "stacks.txt", 71, events.emit)
        nonfinite = NonFiniteSteps(plan.max_bad_steps, recorder)
        saving = Saving(config, checkpointer, lambda step: {}, nonfinite, recorder, watchdog, GracePeriod(None, nothing))
        loop = Loop(
            config=config.trainer,
            train_step=train_step,
            param_norm=lambda params: np.float32(1),  # type: ignore[arg-type, return-value]
            put=lambda rows: rows,  # type: ignore[arg-type, return-value]
            loader=[{}] * (plan.steps + 1),  # type: ignore[arg-type]
            stop=stop,
            events=events,
            timer=timer,
            hooks=[Heartbeat(watchdog, quiet), nonfinite, MetricLog(config, recorder), saving],
            clock=lambda: now_s[0],
        )
        try:
            return loop.run(self.state({}, from_step, 0), from_step)
        finally:
            checkpointer.close()
            events.close()

    def kept(self) -> list[int]:
        return checkpoint_dirs.complete_steps(self.directory / "checkpoints")

    def saved(self) -> list[int]:
        events = map(json.loads, (self.directory / "events.jsonl").read_text().splitlines())
        return [event["step"] for event in events if event["kind"] == "checkpoint_saved"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SimpleState:
    """The parts of TrainState that matter here."""

    params: Any
    opt_state: Any
    bad_in_a_row: Any


def nothing(*arguments: Any, **named: Any) -> None:
    pass


@pytest.fixture
def run(tmp_path: Path, fsdp_mesh: Any) -> Run:
    return Run(tmp_path, fsdp_mesh)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_goes_wrong_only_good_steps_are_saved_and_one_that_trains_is_kept(seed: int, run: Run) -> None:
    draw = random.Random(seed)
    steps = 14
    first_bad = draw.randint(3, 10)
    length = draw.choice([1, 2, 3, 99])
    bad = frozenset(range(first_bad, min(first_bad + length, steps + 1))) | {draw.randint(1, steps) for _ in range(draw.randint(0, 2))}
    poison = (draw.randint(3, steps), draw.choice(["w", "mu"]), draw.choice(KINDS)) if draw.random() < 0.6 else None
    plan = Plan(steps, every=draw.randint(1, 4), keep_last=draw.randint(1, 3), bad=bad, poison=poison)
    poisoned_from = poison[0] if poison is not None else steps + 1
    fatal = [step for step in range(4, steps + 1) if {step, step - 1, step - 2, step - 3} <= bad]
    if poison is not None or fatal or steps in bad:
        with pytest.raises(NumericalFailure):
            run.start(plan)
    else:
        run.start(plan)
    assert run.saved() and not set(run.saved()) & bad
    assert max(run.saved()) < poisoned_from
    assert run.kept() and max(run.kept()) == max(run.saved())
    assert all(not integrity.verify(checkpoint_dirs.step_dir(run.directory / "checkpoints", step)) for step in run.kept())
    tried = [step for step in run.saved() if step < max(set(range(1, max(run.saved()) + 1)) - bad)]
    assert not tried or set(tried) & set(run.kept()), "a step from which a finite one was made is never deleted for one without"


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_a_step_that_gives_no_finite_step_does_not_displace_the_one_before(keep_last: int, run: Run) -> None:
    """An update may leave finite parameters that give no finite loss: only the next step shows it."""
    with pytest.raises(NumericalFailure, match=r"4 non-finite steps in a row \(steps 7 to 10\)"):
        run.start(Plan(20, every=1, keep_last=keep_last, bad=frozenset(range(7, 99))))
    assert run.kept() == list(range(7 - max(keep_last, 2), 7))


def test_a_save_due_within_a_streak_follows_the_next_finite_step(run: Run) -> None:
    run.start(Plan(9, every=4, keep_last=9, bad=frozenset({4, 5})))
    assert run.kept() == [6, 8, 9]
    (note,) = [note for note in run.notes if "not saved" in note]
    assert note.startswith("step 4: ") and "next finite step" in note


@pytest.mark.parametrize("how", ["stop_at", "time_up_at"])
def test_a_stop_within_a_streak_keeps_the_last_good_step_and_prints_it(how: str, run: Run) -> None:
    outcome = run.start(Plan(30, every=4, bad=frozenset({10, 11, 12}), **{how: 11}))
    assert outcome.steps == 11
    assert run.kept() == [4, 8]
    note = run.notes[-1]
    assert note.startswith("step 11: not saved") and "steps 10 to 11" in note and note.endswith("the newest checkpoint is step 8")


@pytest.mark.parametrize("how", ["stop_at", "time_up_at"])
def test_a_stop_with_a_state_that_is_not_finite_is_a_numerical_failure(how: str, run: Run) -> None:
    with pytest.raises(NumericalFailure, match=r"the state of step 6 is not finite \(params\.w\)"):
        run.start(Plan(30, every=4, poison=(6, "w", np.nan), **{how: 6}))
    assert run.kept() == [4]


def test_a_run_that_ends_in_a_streak_fails_and_keeps_the_step_before(run: Run) -> None:
    with pytest.raises(NumericalFailure, match=r"the run ends in non-finite steps \(steps 9 to 10\)"):
        run.start(Plan(10, every=4, bad=frozenset({9, 10})))
    assert run.kept() == [4, 8]


def remove_verification(run: Run, step: int) -> None:
    """Make a checkpoint what an earlier version wrote: sealed, not verified to be finite."""
    path = checkpoint_dirs.step_dir(run.directory / "checkpoints", step)
    metadata = json.loads((path / METADATA).read_bytes())
    del metadata["finite"]
    (path / METADATA).write_text(json.dumps(metadata))
    sizes = integrity.list_files(path)
    digests = integrity.digest_files(path, sizes, threads=1)
    integrity.write_manifest(path, {name: integrity.FileDigest(sizes[name], digests[name]) for name in sizes})


def test_a_checkpoint_of_an_earlier_version_restores_and_goes_when_enough_verified_ones_follow(run: Run) -> None:
    run.start(Plan(4))
    for step in (2, 4):
        remove_verification(run, step)
    checkpointer = Checkpointer(run.directory / "checkpoints", Config().checkpoint)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state({}, 4, 0))
    state, metadata = checkpointer.restore(wanted)
    assert metadata["step"] == 4 and float(state.params["w"][0, 0]) == 5.0
    run.start(Plan(6), from_step=4)
    assert run.kept() == [2, 4, 6], "one verified step is not enough to delete any"
    run.start(Plan(8), from_step=6)
    assert run.kept() == [6, 8]


def test_a_state_after_steps_above_the_norm_limit_is_saved_and_too_many_end_the_run(run: Run) -> None:
    with pytest.raises(NumericalFailure, match=r"the updates of 4 steps in a row were skipped \(up to step 8\)"):
        run.start(Plan(steps=9, every=2, large=frozenset({2, 5, 6, 7, 8})))
    assert run.saved() == [2, 4, 6]
