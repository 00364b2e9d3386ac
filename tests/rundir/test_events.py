"""The event log: nothing written is lost, and nothing a killed writer left behind is in the way."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.rundir.events import PHASES, EventLog, event_file, event_files, read_events


class Clock:
    """Advances by one second per reading."""

    def __init__(self, start_s=1000.0):
        self.now_s = start_s

    def __call__(self):
        self.now_s += 1
        return self.now_s


def kinds(path):
    return [event.kind for event in read_events(path)]


def test_an_event_carries_both_clocks_the_run_and_its_fields(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", 3, run="abc", restart=2, clock=lambda: 1000.5, monotonic=lambda: 7.25)
    log.emit("step", step=5, loss=1.5, name="x", where=tmp_path)
    opened, event = read_events(log.path)
    assert opened.kind == "open"
    assert opened.fields["pid"] == os.getpid()
    assert (event.kind, event.time_s, event.mono_s, event.run, event.process, event.restart) == ("step", 1000.5, 7.25, "abc", 3, 2)
    assert event.fields == {"step": 5, "loss": 1.5, "name": "x", "where": str(tmp_path)}


def test_values_json_lacks_are_written_as_strict_json(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(
        "step",
        loss=float("nan"),
        up=float("inf"),
        nested=[{"x": -float("inf")}],
        half=np.float32(0.5),
        count=np.int64(3),
        nan=np.float32("nan"),
    )
    text = log.path.read_text().splitlines()[-1]
    fields = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert fields["loss"] == fields["nan"] == "NaN"
    assert fields["up"] == "Infinity"
    assert fields["nested"] == [{"x": "-Infinity"}]
    assert (fields["half"], fields["count"]) == (0.5, 3)


def test_a_fields_name_may_not_shadow_the_logs_own(tmp_path):
    with pytest.raises(AssertionError, match="process"):
        EventLog(tmp_path / "events.jsonl").emit("step", process=1)


def test_a_cut_at_any_byte_loses_only_the_last_line_and_the_log_continues(tmp_path):
    whole = tmp_path / "events.jsonl"
    log = EventLog(whole)
    for step in range(3):
        log.emit("step", step=step)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        complete = sum(end <= size for end in ends)
        assert len(read_events(cut)) == complete
        again = EventLog(cut)
        again.emit("resumed")
        again.close()
        events = read_events(cut)
        assert len(events) == complete + 2
        assert events[-1].restart == (1 if complete else 0)
        assert events[-2].fields["torn_bytes"] == size - max([end for end in ends if end <= size], default=0)


def test_a_killed_writer_leaves_a_readable_log(tmp_path):
    path = tmp_path / "events.jsonl"
    code = "import sys; from ridgeline.rundir.events import EventLog\nlog = EventLog(sys.argv[1])\n"
    code += "while True: log.emit('step', step=1, x='y' * 300)"
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists() or path.stat().st_size < 100_000:
        assert writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    before = kinds(path)
    assert len(before) > 200
    EventLog(path).emit("again")
    assert kinds(path) == [*before, "open", "again"]


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("step")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + lines[1])
    with pytest.raises(UserError, match=r"events\.jsonl:2: unreadable line"):
        read_events(path)
    path.write_text('{"kind":"step"}\n')
    with pytest.raises(UserError, match=r"events\.jsonl:1: event without"):
        read_events(path)
    with pytest.raises(UserError, match=r"events\.jsonl:1: not an event"):
        EventLog(path)


def test_an_unwritable_or_missing_log_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        EventLog(tmp_path / "file" / "events.jsonl")
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read"):
        read_events(tmp_path / "none.jsonl")


def test_restarts_count_up_and_can_be_given(tmp_path):
    path = tmp_path / "events.jsonl"
    assert [EventLog(path).restart for _ in range(3)] == [0, 1, 2]
    assert EventLog(tmp_path / "events.1.jsonl", 1, restart=2).restart == 2


def test_phases_nest_and_end_with_their_outcome(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", monotonic=Clock())
    with log.phase("train", step=1):
        with log.phase("save") as result:
            result["bytes"] = 10
        log.total("data_wait", 0.5, count=7)
    with pytest.raises(ZeroDivisionError), log.phase("evaluation"):
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), log.phase("restore"):
        raise KeyboardInterrupt
    events = read_events(log.path)[1:]
    train, save, save_end, wait, train_end, _, failed, _, interrupted = (e.fields for e in events)
    assert [e.kind for e in events[:5]] == ["phase_start", "phase_start", "phase_end", "phase_total", "phase_end"]
    assert train == {"phase": "train", "id": train["id"], "parent": None, "step": 1}
    assert save["parent"] == wait["parent"] == train["id"]
    assert (save_end["id"], save_end["outcome"], save_end["bytes"], save_end["duration_s"]) == (save["id"], "ok", 10, 1.0)
    assert (wait["phase"], wait["duration_s"], wait["count"]) == ("data_wait", 0.5, 7)
    assert train_end["outcome"] == "ok"
    assert (failed["outcome"], failed["error"]) == ("error", "ZeroDivisionError")
    assert (interrupted["outcome"], interrupted["error"]) == ("interrupted", "KeyboardInterrupt")


def test_only_the_closed_set_of_phases_exists(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for name in PHASES:
        with log.phase(name):
            pass
    with pytest.raises(AssertionError, match="coffee"), log.phase("coffee"):
        pass
    with pytest.raises(AssertionError, match="coffee"):
        log.total("coffee", 1.0)


def test_threads_write_whole_lines_and_nest_apart(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")

    def work():
        for _ in range(200):
            with log.phase("save"):
                pass

    with log.phase("train"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    starts = [e.fields for e in read_events(log.path) if e.kind == "phase_start"]
    assert len(starts) == 801
    assert len({s["id"] for s in starts}) == 801
    assert {s["parent"] for s in starts} == {None}


def test_a_signal_handler_may_log_while_its_thread_writes_a_line(tmp_path):
    """Handlers run in the main thread between two of its operations, so also within `append`; Ctrl-C once hung a run there."""
    program = f"""
import signal, sys
from pathlib import Path
from ridgeline.rundir.jsonl import LineFile
file, handled = LineFile(Path({str(tmp_path / "log")!r})), 0
def handle(number, frame):
    global handled
    handled += 1
    file.append(b"handler\\n")
    if handled < 300:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0002)
written = 0
while handled < 300:
    written += file.append(b"main\\n")
print(written, handled)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [lines.count("main"), lines.count("handler")] == [int(count) for count in done.stdout.split()]


def test_a_full_disk_drops_whole_lines_warns_once_and_recovers(tmp_path, caplog):
    log = EventLog(tmp_path / "events.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 250, hard))  # the next line fits, the second in part
        try:
            for step in range(5):
                log.emit("step", step=step, note="x" * 60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.emit("step", step=5)
    log.emit("step", step=6)
    events = read_events(log.path)
    assert [e.kind for e in events] == ["open", "step", "dropped", "step", "step"]
    assert events[2].fields == {"count": 4}
    assert [e.fields["step"] for e in events if e.kind == "step"] == [0, 5, 6]
    assert len([r for r in caplog.records if "lines are dropped" in r.message]) == 1


def test_logs_of_several_processes_merge_by_time_keeping_each_order(tmp_path):
    times = {0: iter([10.0, 12.0, 11.0, 14.0]), 1: iter([10.5, 11.5, 13.0, 15.0])}
    for process in (1, 0):
        log = EventLog(event_file(tmp_path, process), process, clock=lambda p=process: next(times[p]))
        for step in range(3):
            log.emit("step", step=step)
    (tmp_path / "events.backup.jsonl").write_text("not ours\n")
    files = event_files(tmp_path)
    assert [f.name for f in files] == ["events.jsonl", "events.1.jsonl"]
    merged = read_events(files)
    assert [(e.process, e.time_s) for e in merged][:3] == [(0, 10.0), (1, 10.5), (1, 11.5)]
    for process in (0, 1):  # process 0's clock stepped back at its third event
        assert [e.fields["step"] for e in merged if e.process == process and e.kind == "step"] == [0, 1, 2]


def test_an_event_after_close_is_ignored(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.close()
    log.emit("late")
    assert kinds(log.path) == ["open"]
