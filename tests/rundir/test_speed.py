"""The speed of a run is one number, wherever it is shown."""

import random

import pytest

from ridgeline.explain.diagnosis.facts import read_facts
from ridgeline.explain.report.run import read_run
from ridgeline.explain.study.measured import read_measured
from ridgeline.explain.summary import format_summary, summarize
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import Event, EventLog, event_file, read_events
from ridgeline.rundir.noise import compare_losses, curve_noise
from ridgeline.rundir.progress import run_progress
from ridgeline.rundir.speed import log_lines, run_speed, windows
from tests.explain.made_runs import made_run


def drawn_starts(seed):
    """(start, step, seconds per step) of the log lines of a run of several starts, and the tokens of a step in each start."""
    draw = random.Random(seed)
    lines, step, tokens = [], 0, []
    for start in range(draw.randint(1, 4)):
        tokens.append(draw.choice((256, 1024)))
        every = draw.randint(1, 5)
        step = max(0, step - draw.randint(0, 3) * every) // every * every  # back to a checkpoint
        for _ in range(draw.randint(1, 6)):
            step += every
            lines.append((start, step, draw.uniform(0.1, 2.0) * (10 if not draw.randint(0, 9) else 1)))
    return lines, tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_speed_is_all_tokens_over_all_step_time_without_the_first_window_of_each_start(seed, tmp_path):
    lines, tokens = drawn_starts(seed)
    path = tmp_path / "events.jsonl"
    counted_tokens = counted_s = 0.0
    previous = {}
    for start in range(len(tokens)):
        log = EventLog(path, run="r", restart=start)
        for at, step, step_s in lines:
            if at == start:
                log.emit("step", step=step, tokens_per_s=tokens[start] / step_s, step_time_mean_s=step_s, step_time_p50_s=step_s)
                if start in previous:
                    counted_tokens += tokens[start] * (step - previous[start])
                    counted_s += step_s * (step - previous[start])
                previous[start] = step
        log.close()
    speed = run_speed(windows(log_lines(read_events(path))))
    if counted_s:
        assert speed is not None and speed.tokens_per_s == pytest.approx(counted_tokens / counted_s)
        assert speed.mfu is None
    else:
        assert windows(log_lines(read_events(path)), only_warmup=False) == []


def test_console_report_study_and_tables_show_one_speed(tmp_path):
    path = made_run(tmp_path / "run", noise=(0.0, 0.4, -0.3, 0.1), steps=36)
    events = read_events(event_file(path, 0))
    speed = run_speed(windows(log_lines(events)))
    shown = (
        summarize(events).speed.tokens_per_s,
        read_facts(RunDir(path)).speed.tokens_per_s,
        read_run(path).facts.speed.tokens_per_s,
        read_measured(path).tokens_per_s,
        run_progress(path).tokens_per_s,
    )
    assert shown == (speed.tokens_per_s,) * 5
    assert f"speed: {speed.tokens_per_s / 1e3:.1f}k tokens/s" in format_summary(summarize(events))


def test_damaged_values_of_a_log_line_are_left_out():
    fields = {"step": 1, "loss": "NaN", "tokens_per_s": None, "step_time_mean_s": "fast", "mfu": [1], "data_wait_s": True}
    (line,) = log_lines([Event("step", 0.0, 0.0, "r", 0, 0, fields)])
    assert set(line) == {"step", "loss", "restart"}
    assert windows([line]) == []


@pytest.mark.parametrize("sigma", [0.001, 0.02])
def test_the_noise_of_a_loss_curve_is_the_scatter_around_its_trend(sigma):
    draw = random.Random(3)
    found = [curve_noise([2 + 3 * (step + 20) ** -0.5 + draw.gauss(0, sigma) for step in range(40)]) for _ in range(200)]
    assert sorted(found)[100] == pytest.approx(sigma, rel=0.25)
    assert curve_noise([1.0] * 4) is None


def test_losses_differ_only_outside_of_their_noise():
    """Of curves with the same end fewer than 5 % are told apart, although the noise is itself an estimate; ten times it is."""
    draw = random.Random(1)

    def curve(end):
        return [end + 1 / (step + 5) + draw.gauss(0, 0.01) for step in range(20)]

    def verdict(one, other):
        return compare_losses(one[-1], other[-1], (curve_noise(one), curve_noise(other)))

    alike = [verdict(curve(2.0), curve(2.0)) for _ in range(400)]
    assert alike.count("cannot tell") > 0.95 * len(alike)
    assert all(verdict(curve(2.0), curve(1.9)) == "lower" for _ in range(20))
    assert compare_losses(2.0, 1.0, (None, 0.01)) == "cannot tell"
