"""Whether stopping fits into the grace period of a job: logged once, as soon as it is known."""

from pathlib import Path

import pytest

from ridgeline.rundir.events import EventLog
from ridgeline.trainer.stop import GracePeriod, last_write_s


def test_a_save_that_does_not_fit_is_reported_once():
    logged: list[str] = []
    grace = GracePeriod(30.0, logged.append)
    grace.step_s = 5.0
    grace.saved(20.0)
    assert logged == []
    grace.saved(26.0)
    grace.saved(40.0)
    assert len(logged) == 1
    assert all(figure in logged[0] for figure in ("31 s", "step 5.0 s", "save 26.0 s", "30 s of grace"))


def test_what_is_still_written_in_the_background_counts():
    logged: list[str] = []
    GracePeriod(30.0, logged.append, write_s=lambda: 45.0).saved(0.1)
    assert "45 s" in logged[0]


def test_an_unknown_grace_is_compared_with_nothing():
    logged: list[str] = []
    GracePeriod(None, logged.append).saved(1e9)
    assert logged == []


def test_a_later_start_warns_by_the_last_save_of_an_earlier_one(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl")
    assert last_write_s(log.path) is None
    log.emit("checkpoint_saved", step=1, size_bytes=8, total_s=12.0)
    log.emit("checkpoint_saved", step=2, size_bytes=8, total_s=50.0)
    log.emit("step", step=3)
    log.close()
    logged: list[str] = []
    write_s = last_write_s(log.path)
    assert write_s == 50.0
    GracePeriod(30.0, logged.append).saved(write_s)
    assert "50 s" in logged[0]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"checkpoint_saved","step":3',
        b'{"kind":"checkpoint_saved","step":3}',
        b'{"kind":"checkpoint_saved","total_s":"NaN"}',
        b'{"kind":"checkpoint_saved","total_s":null}',
        b'["kind":"checkpoint_saved"]',
        b'"kind":"checkpoint_saved"' + b"[" * 100_000,
        b'\xff\x00{"kind":"checkpoint_saved","total_s":1e999}',
        b'{"kind":"checkpoint_saved","total_s":-1}',
    ],
)
def test_a_damaged_line_ends_nothing(tmp_path: Path, line: bytes):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"checkpoint_saved","total_s":7.5}\n' + line + b"\n")
    assert last_write_s(path) == 7.5
    path.write_bytes(line)
    assert last_write_s(path) is None
    path.unlink()
    assert last_write_s(path) is None


def test_the_end_of_a_long_log_is_enough(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    filler = b'{"kind":"step","text":"' + b"x" * 1000 + b'"}\n'
    path.write_bytes(filler * 1500 + b'{"kind":"checkpoint_saved","total_s":7.5}\n' + filler * 20 + b'{"kind":"checkpoint_sa')
    assert last_write_s(path) == 7.5
