"""`ridge goodput` and `ridge timeline` on run directories, whole, killed and foreign."""

import json

import pytest

from ridgeline.cli.main import run as ridge
from ridgeline.rundir.events import EventLog, event_file


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def run_dir(tmp_path):
    """A run of 100 s on 8 devices: 20 s compile, 80 s of 40 steps."""
    path = tmp_path / "run"
    clock = Clock()
    log = EventLog(event_file(path, 0), run="r", clock=clock, monotonic=clock)
    with log.phase("compile"):
        clock.now_s += 20
    with log.phase("train", start_step=0):
        clock.now_s += 80
        log.emit("step", step=40, loss=1.0, tokens=40e6)
    log.close()
    (path / "run.json").write_text(json.dumps({"name": "r", "starts": [{"devices": {"count": 8}}]}))
    return path


def test_the_ledger_as_json_has_time_money_and_parts_that_sum(run_dir, capsys):
    assert ridge(["goodput", str(run_dir), "--price", "3.6", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["wall_s"] == pytest.approx(100.0)
    assert report["goodput"] == pytest.approx(0.8)
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_s"])
    assert report["device_hours"] == pytest.approx(800 / 3600)
    assert report["usd"] == pytest.approx(0.8)  # 8 devices x 100 s x 0.001 USD/s
    assert sum(report["usd_by_category"].values()) == pytest.approx(report["usd"])
    assert report["usd_per_billion_tokens"] == pytest.approx(0.8 / 0.04)


def test_the_table_names_goodput_and_every_category_that_took_time(run_dir, capsys):
    assert ridge(["goodput", str(run_dir), "--cluster", "dgx-h100"]) == 0
    shown = capsys.readouterr().out
    assert "goodput 80.0% of 1m40s on 8 devices" in shown
    assert [line.split()[0] for line in shown.splitlines()[2:4]] == ["compile", "productive"]


def test_the_phases_of_the_last_start_are_listed(tmp_path, capsys):
    clock = Clock()
    for _ in range(2):
        log = EventLog(event_file(tmp_path, 0), run="r", clock=clock, monotonic=clock)
        clock.now_s += 2
        log.total("launch", 1.0, ago_s=1.5)
        log.total("import", 1.5)
        with log.phase("init"):
            with log.phase("compile", program="init") as parts:
                clock.now_s += 4
                parts.update(source="compiled", trace_s=0.5, lower_s=0.25, compile_s=3.25)
            clock.now_s += 1
        with log.phase("compile", program="train_step") as parts:
            clock.now_s += 1
            parts.update(source="loaded", load_s=1.0)
        with log.phase("train", start_step=0):
            clock.now_s += 3
            log.total("first_step", 2.5)
            with log.phase("compile", program="evaluation_step") as parts:  # after the start
                clock.now_s += 7
                parts.update(source="compiled", compile_s=7.0)
        log.close()
    (tmp_path / "run.json").write_text(json.dumps({"name": "r", "starts": [{"devices": {"count": 1}}]}))
    assert ridge(["goodput", str(tmp_path), "--json"]) == 0
    startup = json.loads(capsys.readouterr().out)["startup"]
    parts = {"launch": 1.0, "import": 1.5, "init": 1.0, "trace": 0.5, "lower": 0.25, "compile": 3.25, "load": 1.0, "first_step": 2.5}
    assert startup == pytest.approx({**parts, "other": 0.5})
    assert ridge(["goodput", str(tmp_path)]) == 0
    assert "launch 1.0, import 1.5, init 1.0" in (shown := capsys.readouterr().out) and "11.5 s" in shown


def test_without_a_price_there_is_no_money(run_dir, capsys):
    assert ridge(["goodput", str(run_dir)]) == 0
    assert "USD" not in capsys.readouterr().out


def test_a_log_torn_in_its_last_line_is_accounted_for(run_dir, capsys):
    path = event_file(run_dir, 0)
    path.write_bytes(path.read_bytes()[:-9])
    assert ridge(["goodput", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wall_s"] == pytest.approx(100.0)


@pytest.mark.parametrize(("suffix", "begins"), [("svg", "<svg"), ("html", "<!doctype html>"), ("json", '{"traceEvents"')])
def test_the_timeline_is_written_in_each_format(run_dir, tmp_path, suffix, begins):
    assert ridge(["timeline", str(run_dir), "-o", str(tmp_path / f"t.{suffix}")]) == 0
    assert (tmp_path / f"t.{suffix}").read_text().startswith(begins)


@pytest.mark.parametrize("command", ["goodput", "timeline"])
def test_what_is_no_run_is_refused_in_one_line(command, tmp_path, run_dir, capsys):
    assert ridge([command, str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"ridge: error: {tmp_path}/nothing is not a run directory: it has no run.json\n"
    (run_dir / "run.json").write_text("{")
    assert ridge([command, str(run_dir)]) == 2
    assert "run.json is damaged" in capsys.readouterr().err


def test_a_run_that_never_started_and_an_unknown_format_are_refused(run_dir, tmp_path, capsys):
    assert ridge(["timeline", str(run_dir), "-o", "t.png"]) == 2
    assert "must end in .svg, .html, .json" in capsys.readouterr().err
    assert ridge(["timeline", str(run_dir), "-o", str(tmp_path / "no" / "t.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    event_file(run_dir, 0).unlink()
    assert ridge(["goodput", str(run_dir)]) == 2
    assert "has no events.jsonl" in capsys.readouterr().err
