"""What training shows: a live line on a real (pseudo) terminal, plain lines elsewhere, and the same lines in train.log."""

import io
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.format import format_count, format_duration, format_seconds
from ridgeline.observe.progress import FIGURES, PlainProgress, build_progress, fitted
from tests.terminal import on_terminal

METRICS = {
    "train/loss": 3.25,
    "train_speed/tokens_per_s": 12345.0,
    "train_speed/step_time_mean_s": 0.0201,
    "train_speed/mfu": 0.412,
    "train/skipped_steps": 0.0,
    "train_memory/peak_bytes": 1e9,
}
USUAL = {"train/grad_norm": 1.234, "train/learning_rate": 2e-3}


def plain(total_steps, times):
    stream = io.StringIO()
    return PlainProgress(total_steps, lambda line: print(line, file=stream), clock=iter(times).__next__), stream


def test_each_log_step_is_one_line_with_loss_speed_and_time_left():
    progress, stream = plain(100, [0.0, 10.0])
    progress.start(0)
    progress.update(10, METRICS)
    progress.advance(11)
    progress.update(20, METRICS)
    progress.note("step 20: saved")
    progress.close()
    first, second, note = stream.getvalue().splitlines()
    assert first == "step 10/100  loss 3.2500  12.3k tokens/s  step 20.1 ms  MFU 41.2%"
    assert second == first.replace("10/100", "20/100") + "  eta 1m20s"
    assert note == "step 20: saved"


@pytest.mark.parametrize("lost", ["reader", "disk"])
def test_output_that_is_lost_ends_no_run(tmp_path, lost):
    if lost == "disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    stream = os.fdopen(writing, "w")
    progress = build_progress(100, stream=stream)
    progress.keep(tmp_path / "train.log")
    for step in range(10, 60, 10):
        progress.update(step, METRICS)
    with progress.phase("compiling"):
        progress.note("step 50: saved")
    progress.close()
    assert [line.split("  ")[1] for line in (tmp_path / "train.log").read_text().splitlines()][-2] == "step 50: saved"
    if lost == "reader":
        print("what others print is lost too", file=stream, flush=True)
        stream.close()
    else:
        os.dup2(os.open(tmp_path / "room", os.O_WRONLY | os.O_CREAT), stream.fileno())
        stream.close()


def test_time_left_after_a_resume_counts_only_this_starts_pace():
    progress, stream = plain(1000, [0.0, 5.0])
    progress.start(900)
    progress.update(910, {})
    progress.update(920, {})
    assert stream.getvalue().splitlines()[-1] == "step 920/1000  eta 40s"


def test_skipped_steps_show_when_there_are_any():
    progress, stream = plain(10, [0.0])
    progress.update(1, {"train/skipped_steps": 2.0})
    assert stream.getvalue() == "step 1/10  skipped 2\n"


def test_a_file_gets_plain_lines_and_other_processes_nothing(capsys):
    stream = io.StringIO()
    for process in (0, 1):
        progress = build_progress(10, process=process, stream=stream)
        progress.start(0)
        progress.update(1, METRICS)
        progress.note("x")
        with progress.phase("compiling"):
            pass
        progress.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()][:3] == ["step 1/10", "x", "compiling ..."]
    assert len(stream.getvalue().splitlines()) == 4
    assert capsys.readouterr().out == ""


TRAINING = """
import sys, time
from ridgeline.observe.progress import build_progress
from tests.observe.test_progress import METRICS, USUAL
progress = build_progress(100_000)
with progress.phase("compiling the train step"):
    time.sleep(0.3)
progress.start(40)
progress.update(50, METRICS)
progress.note("step 50: saved [not markup]")
progress.update(60, METRICS | USUAL)
progress.note("word " * 20 + "/path" * 30)
progress.advance(61)
progress.close()
progress.close()
"""


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_terminal_shows_what_is_compiled_then_a_bar_with_the_step_and_every_log_step_in_its_scrollback(columns):
    shown = on_terminal(["-c", TRAINING], columns)
    assert shown.code == 0, shown.lines
    assert any(re.fullmatch(r". +compiling the train step +0s", frame) for frame in shown.frames)
    compiled, first, note, second, *words, bar = [line for line in shown.lines if line]
    assert set("".join(words).replace("word", "").split()) == {"/path" * 30}
    assert re.fullmatch(r"compiling the train step: done in 3\d\d ms", compiled)
    assert note == "step 50: saved [not markup]"
    assert first.startswith("step 50/100000  loss 3.2500")
    assert second.startswith("step 60/100000  loss 3.2500")
    assert all(len(line) <= columns for line in (first, second, bar))
    assert re.match(r"\S{8,} +61/100000  loss 3.2500", bar)
    assert "eta " in bar
    assert ("grad 1.23  lr 2.00e-03" in bar) == (columns == 200)


@given(st.sets(st.sampled_from(sorted({metric for _, metric, _ in FIGURES.values()}))), st.integers(0, 200))
@settings(max_examples=30)
def test_a_line_has_the_most_important_figures_that_fit(metrics, width):
    values = dict.fromkeys(metrics, 1.0)
    every, line = fitted(values, None), fitted(values, width)
    parts = line.split("  ")
    assert len(line) <= width
    assert line == "  ".join(part for part in every.split("  ") if part in parts)
    assert fitted(values, len(every)) == every
    if "train/loss" in metrics and "train/skipped_steps" not in metrics and width >= 11:
        assert "loss 1.0000" in line


def test_the_log_file_has_all_lines_of_all_starts(tmp_path):
    for start in (1, 2):
        progress = build_progress(10, stream=io.StringIO())
        progress.note("2 processes")  # before the run directory is open
        progress.keep(tmp_path / "train.log")
        progress.record(f"start {start}")
        with progress.phase("compiling"), progress.phase("waiting", live_only=True):
            pass
        progress.update(1, {"train/loss": 3.25})
        progress.close()
    lines = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line) for line in (tmp_path / "train.log").read_text().splitlines()]
    assert [line for line in lines if line.startswith("start")] == ["start 1", "start 2"]
    assert lines[:3] == ["2 processes", "start 1", "compiling ..."]
    assert lines[4:7] == ["step 1/10  loss 3.2500", "2 processes", "start 2"]


@pytest.mark.parametrize("path", ["/dev/full", "/proc/train.log"])
def test_a_log_file_that_cannot_be_written_ends_nothing(path, caplog):
    shown = io.StringIO()
    progress = build_progress(10, stream=shown)
    progress.note("before")
    progress.keep(Path(path))
    progress.note("after")
    progress.record("also after")
    progress.close()
    assert [line for line in shown.getvalue().splitlines() if "train.log" not in line] == ["before", "after"]
    assert len(caplog.records) + shown.getvalue().count("no train.log") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.4, "999"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (4.56e6, "4.56M"),
        (7.24e9, "7.24B"),
        (1.5e13, "15T"),
        (1e16, "10000T"),
    ],
)
def test_counts_have_three_figures(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(("value_s", "text"), [(0.00085, "850 us"), (0.0123, "12.3 ms"), (0.99951, "1 s"), (4.561, "4.56 s")])
def test_short_times(value_s, text):
    assert format_seconds(value_s) == text


@pytest.mark.parametrize(("value_s", "text"), [(0.2, "0s"), (59.7, "1m00s"), (192, "3m12s"), (7500, "2h05m"), (3600 * 76, "3d04h")])
def test_long_times(value_s, text):
    assert format_duration(value_s) == text
