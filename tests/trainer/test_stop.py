"""Requests to stop: in one process, and agreed on between several (threads on one store stand for processes; real ones: tests/slurm)."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ridgeline.trainer.stop import Stop, StopRequested, in_thread

ROOT = Path(__file__).parents[2]


class Store:
    """The coordination service's key-value store, in memory."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise ValueError(f"{key} exists")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise TimeoutError(key)
            return self.values[key]


@pytest.fixture
def stop():
    installed = Stop(log=lambda text: None).install()
    yield installed
    installed.uninstall()


def kill_self(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_a_signal_is_noted_and_polls_tell_it(stop):
    assert stop.agreed() is None
    kill_self()
    assert (stop(), stop.agreed(), stop.requested) == (True, signal.SIGTERM, signal.SIGTERM)
    kill_self()  # a second SIGTERM changes nothing
    assert stop.agreed() == signal.SIGTERM


def test_a_second_ctrl_c_interrupts_at_once(stop):
    kill_self(signal.SIGINT)
    assert stop.agreed() == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        kill_self(signal.SIGINT)


def test_where_nothing_needs_saving_a_signal_ends_a_wait(stop):
    threading.Timer(0.2, kill_self).start()
    with pytest.raises(StopRequested) as raised, stop.raising():
        threading.Event().wait(60)
    assert raised.value.signal == signal.SIGTERM


def test_a_signal_ends_work_that_never_returns_to_python(stop):
    """As a compiler, or a wait for another process: in C, where no handler of Python runs."""
    threading.Timer(0.5, kill_self).start()
    begin = time.monotonic()
    with pytest.raises(StopRequested), stop.raising():
        in_thread(lambda: ctypes.CDLL(None).sleep(60))
    assert time.monotonic() - begin < 30


def test_work_in_a_thread_gives_its_result_or_its_error():
    assert in_thread(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(KeyError):
        in_thread(lambda: {}["missing"])


def test_an_earlier_request_ends_the_next_phase_before_it_begins(stop):
    kill_self()
    with pytest.raises(StopRequested), stop.raising():
        pytest.fail("began")


def test_nothing_on_the_way_swallows_the_request(stop):
    def careless():
        try:
            kill_self()
            threading.Event().wait(60)
        except Exception:
            pytest.fail("swallowed")

    with pytest.raises(StopRequested), stop.raising():
        careless()


def test_a_signal_after_the_block_raises_nothing(stop):
    with stop.raising():
        pass
    kill_self()
    assert stop()


@pytest.mark.parametrize("seed", range(5))
def test_all_processes_stop_at_the_same_poll(seed):
    """Four processes poll at their own pace, one is asked in between: all see the stop at one poll, which none had reached before."""
    store, stops, asked_at = Store(), [Stop(log=lambda text: None) for _ in range(4)], {}
    stopped: dict[int, int] = {}

    def run(process):
        for poll in range(1, 2000):
            time.sleep(0.0005 * ((process * 7 + seed + poll) % 5))
            if process == 2 and poll == 20 + seed:
                asked_at.update({p: s._polls for p, s in enumerate(stops)})
                stops[2].requested = signal.SIGTERM
                os.write(stops[2]._pipe[1], b"!")
            if stops[process].agreed() is not None:
                stopped[process] = poll
                return

    for process, one in enumerate(stops):
        one.share(store, process, 4, "test")
        if process != 2:
            one.requested = signal.SIGTERM  # keeps the listener from signaling this test's own process
    threads = [threading.Thread(target=run, args=(process,)) for process in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stopped) == 4
    assert len(set(stopped.values())) == 1, stopped
    assert min(stopped.values()) > max(asked_at.values())


def test_a_request_that_came_before_sharing_is_sent():
    store, first, second = Store(), Stop(log=lambda text: None), Stop(log=lambda text: None)
    first.requested = second.requested = signal.SIGTERM
    for process, one in enumerate((first, second)):
        one.share(store, process, 2, "test")
    for _ in range(1000):
        if first.agreed() is not None and second.agreed() is not None:
            return
        time.sleep(0.005)
    pytest.fail("never agreed")


@pytest.mark.parametrize("leaver", [None, 0, 2])
def test_all_processes_begin_or_none(leaver):
    """One is asked while it still compiles, and leaves; the others, which had not heard of it, do not go on without it."""
    store, stops, outcomes = Store(), [Stop(log=lambda text: None) for _ in range(3)], {}
    for process, one in enumerate(stops):
        one.share(store, process, 3, "test")

    def run(process):
        if process == leaver:
            stops[process].abandon()
            outcomes[process] = "left"
            return
        try:
            stops[process].begin_together()
            outcomes[process] = "began"
        except StopRequested:
            outcomes[process] = "stopped"

    threads = [threading.Thread(target=run, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {process: "began" if leaver is None else "left" if process == leaver else "stopped" for process in range(3)}
    for one in stops:
        one.unshare()


def test_the_messages_of_a_begin_and_a_stop_grow_with_the_number_of_processes_not_its_square():
    count = 40
    store, stops, read = Store(), [Stop(log=lambda text: None) for _ in range(count)], []
    get = store.blocking_key_value_get
    store.blocking_key_value_get = lambda key, timeout_in_ms: read.append(key) or get(key, timeout_in_ms)
    for process, one in enumerate(stops):
        one.share(store, process, count, "test")
    threads = [threading.Thread(target=one.begin_together) for one in stops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for one in stops:
        one.requested = signal.SIGTERM  # so that no listener signals this process
    store.key_value_set("ridge/stop/test/asked", "SIGTERM")
    waiting = time.monotonic()
    while not all(one.agreed() for one in stops):
        assert time.monotonic() - waiting < 60
        time.sleep(0.005)
    assert len(read) <= 6 * count
    for one in stops:
        one.unshare()


def test_a_single_process_with_a_request_does_not_begin(stop):
    stop.begin_together()
    kill_self()
    with pytest.raises(StopRequested):
        stop.begin_together()


def test_the_end_of_a_run_ends_the_listeners_without_a_request():
    store, stops = Store(), [Stop(log=lambda text: None) for _ in range(2)]
    for process, one in enumerate(stops):
        one.share(store, process, 2, "test")
    for one in stops:
        one.unshare()
    assert [one.requested for one in stops] == [None, None]
    assert not [thread for thread in threading.enumerate() if thread.name == "stop-listen"]


def test_the_module_needs_no_jax():
    code = "import sys, ridgeline.trainer.stop; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
