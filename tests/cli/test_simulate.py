"""`ridge simulate`: the JSON contract, the page for people, and bad input."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from ridgeline.cli import main as cli
from ridgeline.planner.campaign.model import CAUSES, Choice
from ridgeline.planner.campaign.trials import simulate
from tests.planner.campaigns import HOUR, campaign, failures

COMMAND = ["simulate", "models/llama-3.1-8b", "data.batch_size=256", "data.seq_len=4096", "--cluster", "dgx-h100"]
JOB = ["--nodes", "32", "--days", "20", "--trials", "40"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run([*COMMAND, *arguments]) == 0
    return capsys.readouterr().out


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(run(capsys, *JOB, *arguments, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run([*COMMAND, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *JOB, "--seed", "3", "--json")
    assert text == run(capsys, *JOB, "--seed", "3", "--json") != run(capsys, *JOB, "--seed", "4", "--json")
    found = json.loads(text)
    for key in ("days", "usd", "goodput"):
        assert found[key]["p10"] <= found[key]["p50"] <= found[key]["p90"]
        assert found[key]["mean_low"] < found[key]["mean"] < found[key]["mean_high"]
    assert found["days"]["p50"] > 20 > 0 < found["goodput"]["p50"] < 1
    assert set(found["lost_s"]) == set(CAUSES)
    assert sum(found["lost_s"].values()) + found["productive_s"] == pytest.approx(found["wall_s"])
    assert found["productive_s"] == pytest.approx(20 * 86400)
    assert found["interruptions"] == pytest.approx(sum(found["interruptions_by_kind"].values()))
    # 32 nodes for 20 days at 4.2 interruptions per 1,000 node-days
    assert found["interruptions"] == pytest.approx(2.7, rel=0.3)
    assert {"interval", "tier", "spares", "policy"} <= set(found["best"])
    assert found["best_same_tier"]["tier"] == "shared"
    assert found["tokens"] == pytest.approx(20 * 86400 / found["step_s"] * 256 * 4096)


def test_days_default_to_the_steps_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--nodes",
        "4",
        "--trials",
        "4",
        "--step-time",
        "10",
        "trainer.steps=8640",
        "--failure-scale",
        "0",
        "--no-stragglers",
        "--json",
    ]
    found = json.loads(run(capsys, *arguments))
    assert found["work_days"] == pytest.approx(1) and found["tokens"] == 8640 * 256 * 4096
    assert found["interruptions"] == 0 and found["mtbf_hours"] is None
    assert found["configured"]["interval"] == 5000  # checkpoint.every=500


def test_stated_times_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--interval",
        "20m",
        "--spares",
        "0",
        "--startup",
        "1h",
        "--compile",
        "0",
        "--requeue",
        "0",
        "--restore",
        "0",
        "--no-stragglers",
    ]
    found = simulated(capsys, *given, "--detection", "0", "--write", "0", "--save", "5", "--repair", "0")
    starts = found["interruptions"] + 1
    assert found["lost_s"]["startup"] == pytest.approx(starts * 3600, rel=0.02)
    assert found["choice"]["interval"] == 1200 and found["choice"]["spares"] == 0
    assert found["lost_s"]["checkpoint"] == pytest.approx(20 * 86400 / 1200 * 5, rel=0.05)
    assert found["lost_s"]["compile"] == found["lost_s"]["restore"] == found["lost_s"]["teardown"] == 0
    more = simulated(capsys, "--queue-wait", "2h", "--preemptions", "1", "--time-limit", "2-00:00:00")
    assert more["interruptions_by_kind"]["preemption"] == pytest.approx(20, rel=0.3)
    assert more["interruptions_by_kind"]["time_limit"] > 2
    assert more["lost_s"]["queue"] > 20 * 7200


def test_the_page_begins_with_three_sentences_and_names_what_the_trainer_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, *JOB)
    lines = page.splitlines()
    assert lines[2].startswith("20 days of steps on 32 nodes of dgx-h100 (256 devices) take ")
    assert lines[3].startswith("Costs $") and lines[4].startswith("Largest losses: ")
    for row in ("simulated ", "saves of CONFIG ", "best with its tier ", "best of all "):
        assert sum(line.startswith(row) for line in lines) == 1


def test_the_restart_limit_of_the_job_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, *JOB, "--failure-scale", "30")
    assert "a person submits the job again" in page and "set slurm.max_restarts=" in page
    assert "a person submits" not in run(capsys, *JOB, "--failure-scale", "30", "--cluster-set", "slurm.max_restarts=1000")


def test_a_campaign_that_is_never_done_has_no_days_and_no_cost(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--nodes", "32", "--days", "1", "--trials", "4", "--failure-scale", "5000", "--no-stragglers"]
    text = run(capsys, *job, "--json")
    found = json.loads(text)
    assert found["days"]["p50"] is found["usd"]["p90"] is found["best"]["days"]["p90"] is None
    assert found["goodput"]["p90"] < 0.2
    assert "Infinity" not in text and "NaN" not in text
    page = run(capsys, *job)
    assert "days of steps on 32 nodes of dgx-h100 (256 devices) are not done after " in page
    assert "inf" not in page.lower().replace("inference", "")


def test_many_spares_take_no_memory() -> None:
    tracemalloc.start()
    simulate(campaign(failures(HOUR * 50, "replace"), repair_s=20 * HOUR), [Choice(3600.0, 1_000_000)], trials=200, seed=0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 50e6


def test_a_number_of_nodes_without_a_layout_is_simulated_without_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--nodes", "125", "--days", "9", "--trials", "4", "--json"))
    assert found["layout"] is found["tokens"] is found["step_s"] is found["configured"] is None
    assert "no mesh divides" in found["no_layout"] and "ridge plan" in found["no_layout"] and found["days"]["p50"] > 9
    assert "No layout is planned" in run(capsys, "--nodes", "125", "--days", "9", "--trials", "4")


def test_without_a_price_there_is_no_money(capsys: pytest.CaptureFixture[str]) -> None:
    unpriced = ["--cluster-set", "price_per_device_hour_usd=null", "--cluster-set", "device=mi355x"]
    arguments = ["simulate", "quickstart", "--cluster", "dgx-h100", *unpriced, "--nodes", "1", "--days", "3", "--trials", "4"]
    assert cli.run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usd"] is None
    assert cli.run(arguments) == 0
    assert "device-hours (P90" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nodes", "2", "--days", "0"], "--days"),
        (["--nodes", "2", "--days", "nan"], "--days"),
        (["--nodes", "2", "--days", "inf"], "--days"),
        (["--nodes", "2", "--days", "1e9"], "are simulated: --days "),
        (["--nodes", "2", "--days", "1", "--repair", "1e12h"], "in repair at a time; at most 10,000 are simulated: --repair "),
        (["--nodes", "2", "--days", "1", "--repair", "1e300"], "are simulated: --repair "),
        (["--nodes", "2", "--days", "0.001", "--repair", "1e5d", "--failure-scale", "1000"], "are simulated: --repair "),
        (["--nodes", "2", "--days", "1", "--time-limit", "0"], "--time-limit"),
        (["--nodes", "2", "--days", "1", "--interval", "1m", "--write", "5m"], "--interval 60s: a save takes 300s"),
        (["--nodes", "0", "--days", "1"], "--nodes"),
        (["--days", "1"], "--nodes"),
        (["--nodes", "125"], "give --days or --step-time: no layout"),
        (["--nodes", "2", "--days", "1", "--fleet", "rsc-3"], "unknown fleet 'rsc-3'; did you mean 'rsc-"),
        (["--nodes", "2", "--days", "1", "--interval", "10 parsecs"], "--interval"),
        (["--nodes", "2", "--days", "1", "--interval", "0"], "greater than 0"),
        (["--nodes", "2", "--days", "1", "--tier", "tape"], "--tier"),
        (["--nodes", "2", "--days", "1", "--time-limit", "soon"], "--time-limit 'soon' is not a Slurm time"),
        (["--nodes", "9", "--days", "1", "--cluster-set", "nodes=8"], "--nodes 9: cluster 'dgx-h100' has only 8 nodes"),
        (["--nodes", "7", "--days", "1", "--spares", "2", "--cluster-set", "nodes=8"], "--spares 2: cluster 'dgx-h100' has 1 node"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str], error: str) -> None:
    assert error in refused(capsys, *arguments)
