"""What the terminal shows: a bar on a real (pseudo) terminal, plain lines elsewhere."""

import contextlib
import io
import os
import pty
import threading

import pytest

from ridgeline.configs.format import format_count, format_duration, format_seconds
from ridgeline.observe.progress import PlainProgress, RichProgress, SilentProgress, build_progress

METRICS = {
    "train/loss": 3.25,
    "train_speed/tokens_per_s": 12345.0,
    "train_speed/step_time_mean_s": 0.0201,
    "train_speed/mfu": 0.412,
    "train/skipped_steps": 0.0,
    "train_memory/peak_bytes": 1e9,
}


def plain(total_steps, times):
    stream = io.StringIO()
    return PlainProgress(total_steps, stream, clock=iter(times).__next__), stream


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
    assert isinstance(build_progress(10, stream=io.StringIO()), PlainProgress)
    silent = build_progress(10, process=1)
    assert isinstance(silent, SilentProgress)
    silent.start(0)
    silent.update(1, METRICS)
    silent.note("x")
    silent.close()
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_live_bar_with_the_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = pty.openpty()
    chunks = []

    def read():  # at its own pace: a terminal's buffer is small
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(master, 4096):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream:
        progress = build_progress(100, stream=stream)
        assert isinstance(progress, RichProgress)
        progress.start(40)
        progress.update(50, METRICS)
        progress.note("step 50: saved [not markup]")
        progress.update(60, METRICS)
        progress.close()
        progress.close()
    reader.join()
    os.close(master)
    shown = b"".join(chunks).decode()
    for text in ("60/100", "loss 3.2500", "12.3k tokens/s", "eta ", "step 50: saved [not markup]"):
        assert text in shown
    assert "\x1b[" in shown


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
