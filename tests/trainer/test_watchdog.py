"""The watchdog with a clock and an end of its own, and on a real process that is stuck in C."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridgeline.configs.schema import DeadlinesConfig
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
    dog.step(10.0 / DeadlinesConfig().step_factor)
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


def ended_by_watchdog(tmp_path, body, stacks="stacks", before=""):
    """Run a process with a watchdog of 0.2 s that then does `body`; return its end and its output."""
    code = f"""
import ctypes, os, pathlib, sys, threading, time
from ridgeline.trainer import watchdog
watchdog.WRITE_S, watchdog.NATIVE_S, watchdog.SURVEY_S = 1.0, 3.0, 1.0
{before}
log = lambda kind, **fields: pathlib.Path({str(tmp_path)!r}, "event").write_text(kind)
watchdog.Watchdog(0.2, pathlib.Path({str(tmp_path)!r}, {stacks!r}), 71, log, survey=lambda: print("surveyed", flush=True)).step(None, 3)
{body}
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_stacks_have_the_c_frames_of_all_threads(tmp_path):
    done = ended_by_watchdog(
        tmp_path, "threading.Thread(target=time.sleep, args=(600,), name='reader', daemon=True).start(); time.sleep(600)"
    )
    assert done.returncode == 71
    assert done.stdout == "surveyed\n"
    native = (tmp_path / "stacks").read_text().partition("native stacks:")[2]
    assert "nanosleep" in native
    assert '"reader"' in native
    assert '"MainThread"' in native


def test_files_on_a_file_system_that_hangs_do_not_hold_up_the_end(tmp_path):
    """Opening a named pipe that nobody reads blocks in the kernel, as a file of a server that is gone does."""
    for name in ("stacks", "event"):
        os.mkfifo(tmp_path / name)
    done = ended_by_watchdog(tmp_path, "time.sleep(600)")
    assert done.returncode == 71
    assert "surveyed" in done.stdout
    assert "hang: no progress" in done.stderr


def test_a_process_that_holds_the_lock_of_python_is_ended(tmp_path):
    done = ended_by_watchdog(tmp_path, "ctypes.PyDLL(None).sleep(600)", before="watchdog.FALLBACK_S = 0.5")
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "most recent call first" in done.stderr


def test_the_fallback_follows_every_limit_and_ends_nothing_once_closed(tmp_path):
    """Limits that grow, shrink and restart, together for longer than the fallback of each, and then the end of watching."""
    code = """
import os, pathlib, time
from ridgeline.trainer import watchdog
watchdog.FALLBACK_S = 0.5
dog = watchdog.Watchdog(0.6, pathlib.Path("unused"), 72, lambda *a, **f: None)
for limit in (0.6, 3.0, 0.6, 3.0, 0.6):
    with dog.phase("a phase", limit):
        time.sleep(limit / 2)
    for _ in range(5):
        dog.step(None)
        time.sleep(0.05)
dog.close()
time.sleep(2.5)
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
