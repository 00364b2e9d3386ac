"""The run ledger, from logs written by the event log itself with a clock that moves only when told."""

import json
import math
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import EventLog, event_file, read_events
from ridgeline.rundir.goodput import CATEGORIES, Waiting, queue_waits, run_ledger


class Clock:
    def __init__(self, now_s):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


class Script:
    """Writes the log of one start, phase by phase."""

    def __init__(self, run_dir, wall_s, process=0):
        self.clock, self.mono = Clock(wall_s), Clock(wall_s % 77.0)  # the two clocks agree in nothing but their pace
        self.log = EventLog(event_file(run_dir, process), process, run="r", clock=self.clock, monotonic=self.mono)
        self.train = None

    def wait(self, duration_s):
        self.clock.now_s += duration_s
        self.mono.now_s += duration_s

    def phase(self, name, duration_s, **fields):
        with self.log.phase(name, **fields):
            self.wait(duration_s)

    def begin_training(self, start_step):
        self.train = self.log.phase("train", start_step=start_step)
        self.train.__enter__()

    def steps(self, first, last, step_s, wait_s=0.0):
        self.wait((last - first) * step_s)
        if wait_s:
            self.log.total("data_wait", wait_s, count=last - first, step=last)
        self.log.emit("step", step=last, loss=1.0, tokens=last * 100.0)

    def end_training(self):
        self.train.__exit__(None, None, None)

    def kill(self):
        self.log.close()


def ledger_of(run_dir, **kwargs):
    return run_ledger(read_events(event_file(run_dir, 0)), **kwargs)


def nonzero(ledger):
    return {name: round(seconds, 6) for name, seconds in ledger.seconds.items() if seconds > 1e-9}


def healthy(run_dir):
    start = Script(run_dir, 1000.0)
    start.log.total("launch", 3.0)
    start.phase("init", 2.0)
    start.phase("compile", 5.0)
    start.wait(0.5)
    start.begin_training(0)
    start.wait(1.0)
    start.log.total("first_step", 1.0)
    start.steps(1, 11, 1.0, wait_s=2.0)
    start.phase("evaluation", 4.0, step=11)
    start.steps(11, 21, 1.0, wait_s=0.5)
    start.phase("save", 0.25, step=21)
    start.end_training()
    start.phase("teardown", 0.75)


def test_every_second_of_a_run_has_one_category(tmp_path):
    healthy(tmp_path)
    ledger = ledger_of(tmp_path)
    assert nonzero(ledger) == {
        "startup": 6.0,
        "compile": 5.0,
        "productive": 17.5,
        "data_wait": 2.5,
        "evaluation": 4.0,
        "checkpoint": 0.25,
        "teardown": 0.75,
        "unexplained": 0.5,
    }
    assert ledger.wall_s == pytest.approx(36.5)
    assert ledger.goodput == pytest.approx(17.5 / 36.5)
    assert (ledger.steps, ledger.lost_steps, ledger.tokens, ledger.starts) == (21, 0, 2100.0, 1)


def killed_and_resumed(run_dir):
    """Saved at step 10, killed after step 25; a second start goes on from 10."""
    first = Script(run_dir, 1000.0)
    first.begin_training(0)
    first.steps(0, 10, 1.0)
    first.phase("save", 1.0, step=10)
    first.steps(10, 20, 1.0, wait_s=3.0)
    first.phase("evaluation", 2.0, step=20)
    first.steps(20, 25, 1.0)
    first.kill()
    second = Script(run_dir, 2000.0)
    second.phase("restore", 4.0)
    second.begin_training(10)
    second.steps(10, 30, 1.0)
    second.end_training()


def test_steps_done_again_are_lost_with_what_was_waited_and_evaluated_among_them(tmp_path):
    killed_and_resumed(tmp_path)
    ledger = ledger_of(tmp_path)
    assert nonzero(ledger) == {"productive": 30.0, "checkpoint": 1.0, "lost": 17.0, "restore": 4.0}
    assert (ledger.lost_steps, ledger.steps, ledger.starts) == (15, 30, 2)


def test_two_losses_of_the_same_steps_count_twice(tmp_path):
    killed_and_resumed(tmp_path)
    third = Script(tmp_path, 3000.0)
    third.begin_training(10)
    third.steps(10, 12, 1.0)
    third.end_training()
    ledger = ledger_of(tmp_path)
    assert ledger.lost_steps == 15 + 20
    assert nonzero(ledger) == {"productive": 12.0, "checkpoint": 1.0, "lost": 37.0, "restore": 4.0}


def test_a_start_from_nothing_after_a_kill_loses_everything_before(tmp_path):
    first = Script(tmp_path, 1000.0)
    first.begin_training(0)
    first.steps(0, 7, 1.0)
    first.kill()
    second = Script(tmp_path, 1100.0)
    second.begin_training(0)
    second.steps(0, 7, 1.0)
    second.end_training()
    assert nonzero(ledger_of(tmp_path)) == {"productive": 7.0, "lost": 7.0}


def test_time_in_the_queue_counts_and_time_between_starts_by_hand_does_not(tmp_path):
    killed_and_resumed(tmp_path)
    by_hand = ledger_of(tmp_path)
    queued = ledger_of(tmp_path, waits=[Waiting(940.0, 0), Waiting(0.0, 1)])
    assert by_hand.seconds["queue"] == 0
    end_of_first_s = 1000.0 + 28.0
    assert queued.seconds["queue"] == pytest.approx(60.0 + 2000.0 - end_of_first_s)
    assert queued.wall_s == pytest.approx(by_hand.wall_s + queued.seconds["queue"])


@pytest.mark.parametrize("last", ["teardown", "closed", "compile", "train"])
def test_the_time_until_the_job_script_saw_the_end_belongs_to_how_the_start_ended(tmp_path, last):
    """Processes that close take time to end; of a killed start in its loop the time is lost, and before it nothing is known."""
    first = Script(tmp_path, 1000.0)
    first.phase("compile", 5.0)
    if last != "compile":
        first.begin_training(0)
        first.steps(0, 4, 1.0)
    if last in ("teardown", "closed"):
        first.end_training()
        first.phase("teardown", 1.0)
    if last == "closed":  # the last event of a process comes a little after its last phase
        first.wait(0.01)
        first.log.emit("stopped_early", signal="SIGTERM")
    first.kill()
    end_s = first.clock.now_s
    second = Script(tmp_path, 1100.0)
    second.begin_training(0)
    second.steps(0, 7, 1.0)
    second.end_training()
    before = ledger_of(tmp_path).seconds
    after = ledger_of(tmp_path, waits=[Waiting(end_s + 3.0, 1, end_s + 20.0, end_s + 3.0)]).seconds
    category = {"teardown": "teardown", "closed": "teardown", "compile": "unexplained", "train": "lost"}[last]
    assert after[category] == pytest.approx(before[category] + 3.0)
    assert after["queue"] == pytest.approx(17.0)


def test_a_start_that_was_killed_after_its_first_event_waited_too(tmp_path):
    first = Script(tmp_path, 1000.0)
    first.kill()
    second = Script(tmp_path, 1100.0)
    second.phase("compile", 5.0)
    ledger = ledger_of(tmp_path, waits=[Waiting(940.0, 0), Waiting(1010.0, 1, 1090.0, 1010.0)])
    assert nonzero(ledger) == {"queue": 60.0 + 80.0, "startup": 10.0, "unexplained": 10.0, "compile": 5.0}
    assert ledger.wall_s == pytest.approx(165.0)


def test_queue_and_preflight_are_read_from_the_records_of_the_jobs(tmp_path):
    killed_and_resumed(tmp_path)  # starts at 1000 and 2000, the first until 1028
    (tmp_path / "slurm").mkdir()
    submitted = datetime.fromtimestamp(900.0, UTC).isoformat()
    (tmp_path / "slurm/jobs.jsonl").write_text(json.dumps({"job": "7", "time": submitted}) + "\n")
    attempts = [{"job": 7, "begin": 990, "end": 1040, "exit_code": 137}, {"job": 7, "begin": 1995, "end": 2030, "exit_code": 0}]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(attempt) + "\n" for attempt in attempts))
    events = read_events(event_file(tmp_path, 0))
    alone, ledger = run_ledger(events), run_ledger(events, queue_waits(RunDir(tmp_path), events))
    assert ledger.seconds["queue"] == pytest.approx((990 - 900) + (1995 - 1040))
    assert ledger.seconds["startup"] - alone.seconds["startup"] == pytest.approx((1000 - 990) + (2000 - 1995))
    assert ledger.seconds["lost"] - alone.seconds["lost"] == pytest.approx(1040 - 1028)  # killed 12 s after its last event
    assert ledger.wall_s == pytest.approx(2024 - 900)  # no second is missing
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s)
    assert queue_waits(RunDir(tmp_path / "elsewhere"), events) == []


def test_a_hang_is_cut_out_of_what_it_hung_in(tmp_path):
    start = Script(tmp_path, 1000.0)
    start.begin_training(0)
    start.steps(0, 10, 1.0)
    start.wait(60.0)
    start.log.emit("hang", silent_s=55.0)
    start.kill()
    assert nonzero(ledger_of(tmp_path)) == {"productive": 15.0, "hang": 55.0}


def test_goodput_over_time_ends_at_the_goodput(tmp_path):
    healthy(tmp_path)
    ledger = ledger_of(tmp_path)
    curve = ledger.over_time(73)
    assert curve[-1] == pytest.approx((ledger.wall_s, ledger.goodput))
    assert all(0 <= share <= 1 for _, share in curve)
    assert curve[5][1] == 0.0  # 3 s in: nothing but start-up yet
    at_20_s = {round(t, 6): g for t, g in curve}[20.0]
    # launch 3, init 2, compile 5, gap .5, first step 1: the steps began at 11.5; their 2 s of waiting are booked at the window's end
    assert at_20_s == pytest.approx(8.0 / 20.0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), scenario=st.sampled_from([healthy, killed_and_resumed]))
def test_a_log_cut_at_any_byte_still_sums_to_its_wall_time(tmp_path_factory, cut, scenario):
    run_dir = tmp_path_factory.mktemp("run")
    scenario(run_dir)
    path = event_file(run_dir, 0)
    data = path.read_bytes()
    first_line = data.index(b"\n") + 1
    path.write_bytes(data[: max(first_line, math.floor(cut * len(data)))])
    events = read_events(path)
    ledger = run_ledger(events)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s)
    assert set(ledger.seconds) == set(CATEGORIES)
    assert min(ledger.seconds.values()) >= 0
    for left, right in zip(ledger.stretches, ledger.stretches[1:], strict=False):
        assert left.end_s <= right.start_s + 1e-6


def test_other_processes_do_not_add_to_the_wall_time(tmp_path):
    healthy(tmp_path)
    alone = ledger_of(tmp_path)
    other = Script(tmp_path, 1001.0, process=1)
    other.phase("compile", 20.0)
    both = run_ledger(read_events([event_file(tmp_path, 0), event_file(tmp_path, 1)]))
    assert both.seconds == alone.seconds


def test_a_run_without_events_of_process_0_is_refused():
    with pytest.raises(UserError, match="no events of process 0"):
        run_ledger([])
