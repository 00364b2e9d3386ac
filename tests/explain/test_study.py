"""Studies as documents: figures from runs, the law and its forecast, where to stop and why, pictures; weak scaling; sweeps of a setting."""

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.explain.report.study import study_of
from ridgeline.explain.report.study_charts import charts
from ridgeline.explain.study.analysis import Point, analyze, stopping_point
from ridgeline.explain.study.document import markdown, read_study, study_runs, write_study
from ridgeline.explain.study.law import fit_law, forecast
from ridgeline.explain.study.measured import read_measured
from ridgeline.explain.study.scaling import Question, Scale, scales_of, scaling_study
from ridgeline.explain.study.sweep import Value, sweep_study
from tests.explain.made_runs import made_run

SCALES = (1, 2, 4, 8)
BATCH_TOKENS = 8 * 256


def strong_s(p):
    """Time of a step: 20 ms that do not shrink, 400 ms of work, 10 ms per doubling."""
    return 0.02 + 0.4 / p + 0.01 * math.log2(p)


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """Two repeats at each of four scales, measured; and why a fifth scale failed."""
    place = tmp_path_factory.mktemp("strong")
    runs = [
        read_measured(made_run(place / f"p{p}-{i}", devices=p, step_s=strong_s(p) * (1 + 0.01 * i), startup_s=20.0))
        for p in SCALES
        for i in (0, 1)
    ]
    return [*scales_of(runs), Scale(16, failures=["out of memory: 81 GiB"])]


@pytest.fixture(scope="module")
def study(strong):
    return scaling_study("toy", strong, Question(price_usd=2.0), where="nowhere")


def rows(study):
    return {row["devices"]: row for row in study["rows"]}


def test_rows_hold_speed_time_hours_and_money(study):
    row = rows(study)[4]
    rate = BATCH_TOKENS / (strong_s(4) * 1.005)
    assert row["tokens_per_s"] == pytest.approx(rate, rel=0.01)
    assert row["efficiency"] == pytest.approx(strong_s(1) / strong_s(4) / 4, rel=0.01)
    assert row["time_s"] == pytest.approx(20 + strong_s(4) * 1.005 * (4 * 3 + 36), rel=0.01)  # four slow ones first
    assert row["device_hours"] == pytest.approx(4 * row["time_s"] / 3600)
    assert row["usd"] == pytest.approx(2 * row["device_hours"])
    assert row["tokens_per_usd"] == pytest.approx(40 * BATCH_TOKENS / row["usd"])
    assert row["compile_s"] == pytest.approx(20.0)
    assert row["repeats"] == 2
    assert row["spread"] == pytest.approx(0.005, rel=0.1)


def test_a_failed_scale_is_a_row_with_its_reason(study):
    assert rows(study)[16]["failure"] == "out of memory: 81 GiB"
    assert "tokens_per_s" not in rows(study)[16]
    assert "16 devices did not run: out of memory: 81 GiB" in study["verdict"]


def test_the_law_separates_what_shrinks_from_what_does_not(study):
    assert study["step_law"]["work_s"] == pytest.approx(0.4, rel=0.1)
    assert study["law"]["fixed_s"] == pytest.approx(20 + 48 * 0.02, rel=0.1)
    ahead = study["next"]
    assert ahead["devices"] == 16
    true_rate = BATCH_TOKENS / (strong_s(16) * 1.005)
    assert ahead["tokens_per_s_low"] <= true_rate <= ahead["tokens_per_s_high"]
    assert ahead["tokens_per_s"] == pytest.approx(true_rate, rel=0.1)


def test_the_verdict_names_what_each_metric_favors_and_where_to_stop(study, strong):
    assert {name: found["devices"] for name, found in study["stop"].items()} == {"time": 4, "cost": 1, "efficiency": 2}
    words = " ".join(study["verdict"])
    assert study["verdict"][0].startswith("for time to solution, stop at 4 devices: going on to 8 would shorten the run by")
    assert "throughput and time to solution: 8 devices; throughput per device and tokens per device-hour: 1 device" in words
    assert "cost at 1 device, parallel efficiency at 2 devices" in words
    assert "not worth it for time" in words
    other = scaling_study("toy", strong, Question(objective="efficiency"))
    assert other["verdict"][0].startswith("for parallel efficiency, stop at 2 devices: at 4 the parallel efficiency falls to")


def test_a_long_run_amortises_what_a_short_one_cannot(strong):
    """The same measurements, asked about 1e9 tokens: start-up is nothing then, and more devices pay."""
    long = scaling_study("toy", strong, Question(tokens=1e9))
    assert long["stop"]["time"]["devices"] == 8
    free, unpriced = (scaling_study("toy", strong, Question(price_usd=price)) for price in (0.0, None))
    assert free["stop"] == unpriced["stop"]  # both compare device-hours
    row = rows(long)[8]
    overhead_s = 20 + 4 * 2 * strong_s(8)
    assert row["time_s"] == pytest.approx(1e9 / row["tokens_per_s"] + overhead_s, rel=0.001)
    assert row["tokens_per_usd"] is None


def test_differences_within_the_scatter_of_repeats_are_not_reported(tmp_path):
    speeds = {1: (0.10, 0.14), 2: (0.11, 0.12)}
    runs = [read_measured(made_run(tmp_path / f"{p}{t}", devices=p, step_s=t)) for p, both in speeds.items() for t in both]
    words = " ".join(scaling_study("noisy", scales_of(runs), Question())["verdict"])
    assert "1 to 2 devices" in words
    assert "cannot tell" in words
    once = scaling_study("once", scales_of(runs[::2]), Question())
    assert any("one run at some scales" in line for line in once["verdict"])


def test_one_scale_that_ran_is_shown_and_none_is_an_error(strong):
    single = scaling_study("toy", [strong[0], strong[-1]], Question())
    assert single["law"] is None
    assert single["verdict"][-1] == "one scale ran: there is nothing to compare it with"
    with pytest.raises(UserError, match="no scale of this study ran: 16 devices: out of memory"):
        scaling_study("toy", [strong[-1]], Question())


def test_pictures_and_page_show_every_scale_that_ran(study):
    drawn = charts(study)
    assert set(drawn) == {"throughput", "efficiency", "time", "cost"}
    for picture in drawn.values():
        ElementTree.fromstring(picture)
    dots = {name: picture.count("<circle") for name, picture in drawn.items()}
    assert dots == {"throughput": 5, "efficiency": 5, "time": 5, "cost": 4}  # the next doubling is a dot of its own
    assert "ideal" in drawn["throughput"] and "law" in drawn["time"]
    page = markdown(study, ["time.svg"])
    assert "| 16 |" in page and "out of memory" in page and "![time.svg](time.svg)" in page


def test_a_study_is_read_back_as_it_was_written(study, tmp_path):
    write_study(study, tmp_path / "study", charts(study))
    assert read_study(tmp_path / "study") == study
    assert [run.name for run in study_runs(study, tmp_path)] == [f"p{p}-{i}" for p in SCALES for i in (0, 1)]
    assert read_study(tmp_path) is None
    for damage in ('{"kind": "scaling"}', "[", json.dumps(study | {"price_usd": "2"}), json.dumps(study | {"rows": [{}]})):
        (tmp_path / "study" / "study.json").write_text(damage)
        with pytest.raises(UserError, match=r"study.json is damaged: "):
            read_study(tmp_path / "study")


def test_a_report_finds_the_study_in_several_runs(strong, tmp_path):
    paths = [run.path for scale in strong[:4] for run in scale.runs]
    assert [row["devices"] for row in study_of(paths)["rows"]] == list(SCALES)
    assert study_of([paths[0], made_run(tmp_path / "else", overrides=["optimizer.learning_rate=1e-3"])]) is None


# --- weak scaling ----------------------------------------------------------------------------------------------------


def test_weak_scaling_compares_time_and_money_per_token(tmp_path):
    """Every device does the same work, in 10 % of a step more per doubling."""
    runs = [
        read_measured(made_run(tmp_path / str(p), devices=p, step_s=0.1 * (1 + 0.1 * math.log2(p)), overrides=[f"data.batch_size={8 * p}"]))
        for p in SCALES
    ]
    weak = scaling_study("weak", scales_of(runs), Question(weak=True))
    assert rows(weak)[8]["efficiency"] == pytest.approx(1 / 1.3, rel=0.01)
    assert weak["law"]["work_s"] == 0
    assert weak["step_law"]["fixed_s"] == pytest.approx(0.1, rel=0.02)
    assert weak["step_law"]["sync_s"] == pytest.approx(0.01, rel=0.1)
    assert weak["stop"]["time"]["devices"] == 8
    assert weak["stop"]["efficiency"]["devices"] == 4
    assert weak["next"]["tokens_per_s"] == pytest.approx(16 * BATCH_TOKENS / 0.14, rel=0.05)
    assert weak["verdict"][0].startswith("for time per token, stop at 8 devices:")
    assert charts(weak)["time"]
    assert study_of([run.path for run in runs])["mode"] == "weak"


def test_in_weak_scaling_cost_is_that_of_a_token():
    study = analyze([Point(p, 100.0 * (1 + 0.2 * math.log2(p)), 10.0 * p, work=1000.0 * p) for p in SCALES])
    assert study.weak
    assert study.rows[3].cost == pytest.approx(8 * 160 / 3600)
    assert study.rows[3].unit_cost == pytest.approx(1.6 * study.rows[0].unit_cost)
    assert stopping_point(study, "cost")[0] == 1
    assert stopping_point(study, "time")[0] == 8


def test_work_known_at_some_scales_only_is_refused():
    with pytest.raises(UserError, match="the work of some scales is known"):
        analyze([Point(1, 1.0, work=1.0), Point(2, 1.0)])


# --- forecasts -------------------------------------------------------------------------------------------------------


def test_a_forecast_is_wider_when_times_scatter_more_and_a_function_of_the_figures():
    times_s = [strong_s(p) for p in SCALES]
    law = fit_law(SCALES, times_s)
    quiet, noisy = (forecast(law, SCALES, times_s, [spread] * 4, 16) for spread in (0.0, 0.1))
    assert quiet.low_s <= strong_s(16) <= quiet.high_s
    assert noisy.high_s - noisy.low_s > 2 * (quiet.high_s - quiet.low_s)
    assert forecast(law, SCALES, times_s, [0.1] * 4, 16) == noisy


def test_a_forecast_covers_the_truth_as_often_as_stated():
    import numpy as np

    rng = np.random.default_rng(7)
    covered = 0
    for draw in range(20):
        times_s = [strong_s(p) * math.exp(0.03 * rng.standard_normal()) for p in SCALES]
        ahead = forecast(fit_law(SCALES, times_s), SCALES, times_s, [0.03] * 4, 16, seed=draw)
        covered += ahead.low_s <= strong_s(16) <= ahead.high_s
    assert covered >= 14


# --- sweeps ----------------------------------------------------------------------------------------------------------


def sweep(tmp_path, speeds, objective="time", key="data.batch_size"):
    """speeds: value -> (step time, GiB)."""
    values = []
    for value, (step_s, gib) in speeds.items():
        overrides = [f"{key}={value}"]
        run = made_run(tmp_path / f"{key}-{value}", step_s=step_s, overrides=overrides)
        (run / "plan.json").write_text(f'{{"compiled": {{"argument_bytes": {int(gib * 2**30)}, "temp_bytes": 0}}}}')
        values.append(Value(value, [read_measured(run)]))
    return sweep_study("toy", key, [*values, Value("bad", failures=["does not divide"])], objective)


def test_a_batch_sweep_reports_where_throughput_flattens_and_what_to_choose(tmp_path):
    found = sweep(tmp_path, {8: (0.1, 1.0), 16: (0.11, 2.0), 32: (0.2, 4.0), 64: (0.4, 8.0), 128: (0.8, 16.0)})
    assert found["rows"][1]["gain_per_doubling"] == pytest.approx(2 * 0.1 / 0.11 - 1, rel=0.01)
    assert found["rows"][1]["memory_change"] == pytest.approx(1.0)
    assert found["flat_from"] == 32
    assert found["choice"]["time"] == {"value": 32, "why": "most tokens/s"}
    assert found["choice"]["memory"]["value"] == 16
    assert "data.batch_size=bad did not run: does not divide" in found["verdict"]


def test_a_sweep_that_still_grows_recommends_larger_values(tmp_path):
    found = sweep(tmp_path, {8: (0.1, 1.0), 32: (0.1, 4.0)})
    assert found["flat_from"] is None
    assert found["rows"][1]["gain_per_doubling"] == pytest.approx(1.0, rel=0.01)
    assert any("still grows at 32: +100% per doubling" in line for line in found["verdict"])


def test_a_sweep_of_words_has_no_doublings(tmp_path):
    found = sweep(tmp_path, {"none": (0.1, 10.0), "full": (0.13, 4.0)}, "memory", "compute.remat.policy")
    assert found["rows"][1]["gain_per_doubling"] is None
    assert found["choice"]["memory"]["value"] == "none"
    assert sweep(tmp_path / "near", {"none": (0.1, 10.0), "full": (0.105, 4.0)}, "memory", "compute.remat.policy")["choice"]["memory"] == {
        "value": "full",
        "why": "95% of the tokens/s of none with 60% less memory",
    }
