"""The watchdog with a clock and an end of its own, and on a real process that is stuck in C."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridgeline.planner.policy import USUAL_STEPS
from ridgeline.trainer.watchdog import Watchdog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def watched(tmp_path):
    events, codes, ended = [], [], threading.Event()

    def make(least_s):
        def end(code):
            codes.append(code)
            ended.set()

        return Watchdog(least_s, tmp_path / "stacks.0.txt", 71, lambda kind, **fields: events.append((kind, fields)), end=end)

    return make, events, codes, ended, tmp_path / "stacks.0.txt"


def test_a_step_that_never_ends_ends_the_process_with_stacks_and_an_event(watched):
    make, events, codes, ended, stacks = watched
    make(0.05).step(None)
    assert ended.wait(30)
    assert codes == [71]
    ((kind, fields),) = events
    assert kind == "hang"
    assert fields["phase"] == "a step"
    assert fields["silent_s"] >= 0.05
    assert "test_watchdog.py" in stacks.read_text()  # where this thread stands


def test_nothing_is_watched_before_the_first_bound_or_when_off(watched):
    make, _, codes, ended, _ = watched
    make(None).step(None)
    make(0.01)
    assert not ended.wait(0.3)
    assert codes == []


def test_a_step_may_take_many_usual_ones(watched):
    make, _, _, ended, _ = watched
    dog = make(0.01)
    dog.step(10.0 / USUAL_STEPS)
    assert not ended.wait(0.3)
    dog.step(0.001)  # a shorter bound takes effect although the thread waits for a longer one
    assert ended.wait(30)


def test_phases_have_bounds_of_their_own_and_the_steps_start_anew_after_them(watched):
    make, events, _, ended, _ = watched
    dog = make(0.2)
    dog.step(None)
    with dog.phase("evaluation", 60.0):
        assert not ended.wait(0.5)
    with dog.phase("save", 0.05):
        assert ended.wait(30)
    assert events[0][1]["phase"] == "save"


def test_a_closed_watchdog_does_nothing(watched):
    make, _, _, ended, _ = watched
    dog = make(0.05)
    dog.step(None)
    dog.close()
    assert not ended.wait(0.3)


def test_a_process_stuck_outside_python_is_ended(tmp_path):
    code = f"""
import json, pathlib, sys, time
from ridgeline.trainer.watchdog import Watchdog
log = lambda kind, **fields: pathlib.Path({str(tmp_path)!r}, "event").write_text(json.dumps([kind, fields]))
Watchdog(0.2, pathlib.Path({str(tmp_path)!r}, "stacks"), 71, log).step(None)
time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 71
    assert "hang: no progress" in done.stderr
    assert json.loads((tmp_path / "event").read_text())[0] == "hang"
    assert "Thread" in (tmp_path / "stacks").read_text()
