"""The report: what it says of runs, that it stands alone, and what it looks like in a real browser."""

import json
import re

import pytest

from configs.errors import UserError
from perf.report.charts import Series, line_chart, short, stacked_bars, thinned, ticks
from perf.report.page import read_run, render, verdict
from tests.perf.test_goodput import Script, healthy, killed_and_resumed


def run_json(path, name, devices=8):
    start = {
        "devices": {"count": devices, "kind": "cpu"},
        "command": ["ridge", "train", "<x>"],
        "time": "2026-11-21",
        "packages": {"jax": "1"},
    }
    (path / "run.json").write_text(json.dumps({"name": name, "id": "abc", "starts": [start]}))
    return path


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("a") / "first"
    healthy(path)
    return run_json(path, "a <run>")


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("b") / "second"
    killed_and_resumed(path)
    return run_json(path, "b")


def test_the_verdict_says_how_it_went_and_what_to_do_first(healthy_run, killed_run):
    assert verdict(read_run(killed_run)) == (
        "30 steps in 52s on 8 device(s), 2 starts; loss 1.000 to 1.000. 58% of the time was steps that count. First to change: "
        "steps lost to failures, worth at most 49%: checkpoint.every=1, and checkpoint.every_minutes."
    )
    assert "start-up and compilation not amortised" in verdict(read_run(healthy_run))


def test_the_page_stands_alone_and_no_name_breaks_it(healthy_run):
    page = render([read_run(healthy_run, price_usd=36.0)])
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    for section in ("Curves", "Where the time went", "Timeline", "Inside a step", "Diagnosis", "Configuration and environment"):
        assert f"<h2>{section}</h2>" in page
    money = 36.5 / 3600 * 8 * 36.0
    assert f"{money:,.2f} USD" in page


def test_several_runs_are_compared_with_the_first(healthy_run, killed_run):
    page = render([read_run(healthy_run, "first"), read_run(killed_run, "second")])
    assert "<h2>second against first</h2>" in page
    row = re.search(r"<td>lost</td>(.*?)</tr>", page).group(1)
    assert re.findall(r">([^<>]+)<", row) == ["0.0", "17.0", "+17.0"]
    assert "too few log lines to compare" in page


def test_step_times_are_compared_under_the_noise_model(tmp_path):
    for name, step_s in (("old", 1.0), ("new", 0.5)):
        start = Script(tmp_path / name, 1000.0)
        start.begin_training(0)
        for step in range(1, 9):
            start.wait(step_s)
            start.log.emit("step", step=step, loss=1.0, tokens=step * 10.0, step_time_p50_s=step_s)
        start.end_training()
        run_json(tmp_path / name, name)
    page = render([read_run(tmp_path / "old"), read_run(tmp_path / "new")])
    assert "Steps: faster by 50.0% (99 % interval" in page


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"it has no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_run(tmp_path)
    run_json(tmp_path, "r")
    with pytest.raises(UserError, match="never started"):
        read_run(tmp_path)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 7.3), (-5, 5), (1e-6, 3e-6), (3, 3), (0, 0), (1e9, 5e9)])
def test_ticks_are_round_and_span_the_values(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 12
    step = found[1] - found[0]
    assert step > 0
    assert all(abs(tick / step - round(tick / step)) < 1e-6 for tick in found)
    assert found[0] <= low + step
    assert found[-1] >= high - step


def test_thinning_keeps_the_ends_of_every_spike():
    points = [(float(i), 100.0 if i == 777 else float(i % 7)) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 1300
    assert (777.0, 100.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_charts_leave_out_what_is_not_finite():
    chart = line_chart("t", "x", "y", [Series("s", [(0.0, 1.0), (1.0, float("nan")), (2.0, 3.0)])])
    assert "nan" not in chart
    assert line_chart("t", "x", "y", [Series("s", [])]) == ""
    assert [short(v) for v in (0, 1500, 2e6, 0.25, 0.0002)] == ["0", "1.5k", "2M", "0.25", "2e-04"]


def test_bars_are_in_proportion():
    widths = [
        float(w) for w in re.findall(r'<rect [^>]*width="([0-9.]+)" height="26"', stacked_bars("t", {"r": {"compute": 3.0, "idle": 1.0}}))
    ]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "light"), (1400, "dark")])
def test_the_page_fits_its_window_and_follows_the_scheme(browser, healthy_run, killed_run, tmp_path, width, scheme):
    page = tmp_path / "report.html"
    page.write_text(render([read_run(healthy_run), read_run(killed_run)]))
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        paper, ink = browser.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        light = [sum(int(part) for part in re.findall(r"\d+", colour)[:3]) for colour in (paper, ink)]
        assert (light[0] > 700 and light[1] < 150) if scheme == "light" else (light[0] < 150 and light[1] > 600)
        assert browser.execute_script("return document.querySelectorAll('svg polyline').length") >= 8
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
