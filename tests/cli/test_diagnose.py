"""`ridge diagnose` on run directories."""

import json

import pytest

from ridgeline.cli.main import run as ridge
from ridgeline.explain.diagnosis.finding import TITLES
from ridgeline.rundir.events import EventLog, event_file


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def run_of(path, compile_s):
    clock = Clock()
    log = EventLog(event_file(path, 0), run="r", clock=clock, monotonic=clock)
    with log.phase("compile", program="train_step"):
        clock.now_s += compile_s
    with log.phase("train", start_step=0):
        clock.now_s += 100
        log.emit("step", step=40, loss=1.0, tokens=40e6, step_time_p50_s=2.5)
    log.close()
    (path / "run.json").write_text(json.dumps({"name": "r", "starts": [{"devices": {"count": 8}}]}))
    return str(path)


def test_findings_are_ranked_json(tmp_path, capsys):
    assert ridge(["diagnose", run_of(tmp_path / "run", 100.0), "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["rule"] == "start-up and compilation not amortised"
    assert finding["gain"] == pytest.approx(1.0)
    keys = {"rule", "confidence", "gain", "lens", "pattern", "evidence", "measure_next", "action", "next_bottleneck"}
    assert set(finding) == keys | {"overrides", "command"}


def test_a_finding_is_printed_with_evidence_action_and_the_next_bottleneck(tmp_path, capsys):
    assert ridge(["diagnose", run_of(tmp_path / "run", 100.0)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "1. ",
        TITLES["start-up and compilation not amortised"],
        "gain up to 2x",
        "evidence:",
        "action:",
        "next bottleneck:",
    ):
        assert part in shown


def test_a_run_without_findings(tmp_path, capsys):
    assert ridge(["diagnose", run_of(tmp_path / "run", 1.0)]) == 0
    assert capsys.readouterr().out.startswith("r: no findings (goodput 99.0%")


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert ridge(["diagnose", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
