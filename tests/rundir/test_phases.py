"""Phases and the run summary, from logs written by the event log itself."""

import pytest

from ridgeline.explain.summary import format_summary, summarize
from ridgeline.rundir.events import EventLog, event_file, read_events
from ridgeline.rundir.phases import phases


class Clock:
    """Advances only when told."""

    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def write_start(run_dir, wall_s, *, killed_at=None):
    """One start of a run: launch 3 s, init 2 s, train 20 s with 4 s of evaluation and 1 s of waiting, 1 s no phase covers."""
    clock = Clock(wall_s)
    log = EventLog(event_file(run_dir, 0), run="r", clock=clock, monotonic=clock)
    log.total("launch", 3.0)
    with log.phase("init"):
        clock.now_s += 2
    clock.now_s += 1
    train = log.phase("train")
    train.__enter__()
    for step in (10, 20):
        clock.now_s += 8
        log.total("data_wait", 0.5, count=10)
        speed = {"step_time_mean_s": 0.1 / step, "step_time_p50_s": 0.1 / step, "tokens_per_s": 1000.0 * step, "mfu": 0.01 * step}
        log.emit("step", step=step, loss=4.0 - step / 10, tokens=step * 1000.0, **speed)
        if killed_at == step:
            log.close()  # nothing is written any more, as after SIGKILL
            return
    with log.phase("evaluation"):
        clock.now_s += 4
    train.__exit__(None, None, None)


def test_phases_have_parents_own_time_and_an_outcome(tmp_path):
    write_start(tmp_path, 1000.0)
    found = {p.name: p for p in phases(read_events(event_file(tmp_path, 0)))}
    assert found["launch"].start_s == 997.0
    assert (found["train"].duration_s, found["train"].own_s, found["train"].outcome) == (20.0, 15.0, "ok")
    assert found["evaluation"].parent is found["train"]
    assert (found["data_wait"].count, found["data_wait"].parent) == (10, found["train"])


def test_a_phase_cut_by_a_kill_ends_at_the_last_event(tmp_path):
    write_start(tmp_path, 1000.0, killed_at=10)
    (train,) = (p for p in phases(read_events(event_file(tmp_path, 0))) if p.name == "train")
    assert (train.duration_s, train.outcome) == (8.0, "cut")


def test_the_summarys_times_sum_to_the_wall_time_over_restarts(tmp_path):
    write_start(tmp_path, 1000.0, killed_at=10)
    write_start(tmp_path, 2000.0)
    summary = summarize(read_events(event_file(tmp_path, 0)))
    assert summary.starts == 2
    assert summary.wall_s == pytest.approx((3 + 2 + 1 + 8) + (3 + 2 + 1 + 20))
    assert sum(summary.seconds.values()) == pytest.approx(summary.wall_s)
    assert summary.seconds == pytest.approx({"launch": 6, "init": 4, "train": 7.5 + 15, "data_wait": 1.5, "evaluation": 4, "other": 2})
    assert summary.counts["data_wait"] == 30
    assert (summary.last_step, summary.tokens, summary.losses) == (20, 20_000.0, (3.0, 2.0))
    assert summary.speed.tokens_per_s == pytest.approx(20_000)  # without the first window of each start


def test_the_summary_reads_well(tmp_path):
    write_start(tmp_path, 1000.0)
    text = format_summary(summarize(read_events(event_file(tmp_path, 0))))
    assert text.splitlines()[:3] == [
        "26s, 20 steps, 20k tokens",
        "speed: 20k tokens/s of step time, MFU 20.0%",
        "training loss: 3.0000 -> 2.0000",
    ]
    assert "  train            15.0 s  57.7%  #######################" in text.splitlines()


def test_an_unknown_device_shows_mfu_as_not_available(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("step", step=1, loss=2.0, tokens=10.0, tokens_per_s=5.0, step_time_p50_s=2.0)
    assert "MFU n/a" in format_summary(summarize(read_events(log.path)))


def test_a_run_without_steps_still_has_a_summary(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with log.phase("init"):
        pass
    assert "0 steps" in format_summary(summarize(read_events(log.path)))
