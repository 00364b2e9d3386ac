"""Whole runs that are stuck in one phase: the watchdog ends them by the deadline of that phase, and names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.configs.schema import Config
from ridgeline.launch.exit_codes import HANG
from ridgeline.rundir.events import event_file, read_events
from ridgeline.trainer import evaluation, run, watchdog
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.run import train
from tests.sampling import drawn
from tests.slurm.jobs import prepare_corpus

pytestmark = pytest.mark.usefixtures("quick_compile")
SHORT_S, LONG_S = 1.0, 3600.0


class Alone:
    """The link of a process without others. The watchdog's end lets what is stuck go on, with an error."""

    names: dict[int, str] = {}

    def __init__(self) -> None:
        self.ended, self.codes = threading.Event(), list[int]()
        self.record: Any = None
        self.position: Any = None
        self.stacks: Any = None
        self.report: Any = None

    def survey(self, process: int) -> None:
        self.report({process: self.position()})

    def exit(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()

    def stuck(self, *arguments: Any, **named: Any) -> Any:
        assert self.ended.wait(60), "not ended by the watchdog"
        raise RuntimeError("was stuck")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def stuck_step(link: Alone, patch: pytest.MonkeyPatch) -> None:
    """The fourth step is stuck; it has no deadline of its own before there is a median."""
    before = Loop._before_step

    def before_step(loop: Loop, step: int) -> None:
        before(loop, step)
        if step == 3:
            link.stuck()

    patch.setattr(Loop, "_before_step", before_step)


def stuck_wait(link: Alone, patch: pytest.MonkeyPatch) -> None:
    """The first save never ends in the background, and the second one waits for it."""

    def finish(checkpointer: Checkpointer, pending: Any) -> None:
        link.ended.wait(60)
        pending.error = "was stuck"

    patch.setattr(Checkpointer, "_finish", finish)


PHASES: dict[str, tuple[str, dict[str, float], Callable[[Alone, pytest.MonkeyPatch], None]]] = {
    "startup": ("start-up", {"startup_s": SHORT_S}, lambda link, patch: patch.setattr(run._Session, "_first_state", link.stuck)),
    "compile": ("compile", {"compile_s": SHORT_S}, lambda link, patch: patch.setattr(run._Session, "_compile", link.stuck)),
    "step": ("a step", {}, stuck_step),
    "evaluation": (
        "evaluation",
        {"evaluation_s": SHORT_S},
        lambda link, patch: patch.setattr(evaluation.EvaluationSet, "batch", link.stuck),
    ),
    "save": ("save", {"save_s": SHORT_S}, lambda link, patch: patch.setattr(Checkpointer, "_start", link.stuck)),
    "wait for the save before": ("save", {"save_s": SHORT_S}, stuck_wait),
}
"""Phase -> its name in the report, the deadline that is short, and what makes a run stuck there."""


@pytest.fixture(autouse=True)
def quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C frames of py-spy take a second; tests/trainer/test_watchdog.py has them."""
    monkeypatch.setattr(watchdog, "native_stacks", lambda: "not read")


@pytest.mark.parametrize("phase", drawn(list(PHASES), 3))
def test_a_run_that_is_stuck_ends_by_the_deadline_of_its_phase(
    phase: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, deadlines, make_stuck = PHASES[phase]
    others = dict.fromkeys(("startup_s", "compile_s", "evaluation_s", "save_s"), LONG_S)
    config = Config.model_validate(
        {
            "name": "small",
            "run_dir": str(tmp_path / "run"),
            "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 32},
            "precision": {"compute": "float32"},
            "data": {"train": [{"path": str(corpus / "train")}], "seq_len": 32, "batch_size": 8},
            "evaluation": {"sets": {"held": str(corpus / "held")}, "every": 2, "max_batches": 2},
            "trainer": {
                "steps": 6,
                "log_every": 1,
                "hang_timeout_s": SHORT_S if phase == "step" else LONG_S,
                "deadlines": {**others, **deadlines, "step_factor": 1.0 if phase == "step" else 1000.0},
            },
            "checkpoint": {"every": 2},
            "logging": {"tensorboard": False},
        }
    )
    link = Alone()
    make_stuck(link, monkeypatch)
    with pytest.raises(Exception, match="was stuck"):
        train(config, command=["test"], link=link)
    assert link.codes == [HANG]
    hangs = [event.fields for event in read_events(event_file(tmp_path / "run", 0)) if event.kind == "hang"]
    assert [hang["phase"] for hang in hangs] == [name]
    assert SHORT_S <= hangs[0]["silent_s"] < LONG_S
    assert (tmp_path / "run" / "hang.0.txt").exists()
