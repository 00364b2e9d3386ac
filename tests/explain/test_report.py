"""The report: what it says of runs, that it stands alone, and what it looks like in a real browser."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.explain.report.charts import Series, line_chart, short, stacked_bars, thinned, ticks
from ridgeline.explain.report.memory import memory_section
from ridgeline.explain.report.page import render, verdict
from ridgeline.explain.report.run import read_run
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.publish import publish
from ridgeline.planner.hardware import hardware
from ridgeline.rundir.analysis import Analysis
from ridgeline.rundir.analysis_memory import LiveBuffer, ProgramMemory
from ridgeline.rundir.device_state import DeviceState
from ridgeline.rundir.events import event_file
from tests.explain import xspace
from tests.explain.xspace import gpu, host, kernel, write
from tests.rundir.test_goodput import Script, healthy, killed_and_resumed

EMPTY = Analysis("capture", None, None, [], None, [], [], {}, {}, [], [], [], [], {}, [])


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


def test_many_runs_are_a_sentence_each_with_the_rest_folded(healthy_run, killed_run):
    runs = [read_run(healthy_run if number else killed_run, f"run {number}") for number in range(4)]
    page = render(runs)
    assert page.count("<summary>details of") == 4
    assert page.count("<summary>run ") == 3  # each against the first
    assert page.count("<details>") == page.count("</details>")
    opened = re.sub("<details>.*?</details>", "", page, flags=re.DOTALL)
    assert all(f"<h3>run {number}</h3>" in opened for number in range(4))
    assert opened.count("<table") < page.count("<table") / 4
    assert "<summary>details of" not in render(runs[:2])


def test_device_states_are_shown(healthy_run):
    run = read_run(healthy_run)
    assert "<h3>Devices</h3>" not in render([run])
    samples = [
        DeviceState("gpu:0", clock_mhz=mhz, rated_mhz=1980.0, reasons=("hardware thermal slowdown",)) for mhz in (900.0, 990.0, 1000.0)
    ]
    page = render([replace(run, facts=replace(run.facts, devices={"node-p00000/gpu:0": samples}))])
    assert "node-p00000/gpu:0 runs at 50% of its highest clock (hardware thermal slowdown)" in page
    assert '<td class="n">990</td>' in page
    assert "power W" not in page  # not offered


def test_the_verdict_has_the_outcome_and_the_first_action(healthy_run, killed_run):
    killed = read_run(killed_run)
    for fact in ("30 steps", "52s", "8 devices", "2 starts", "1.000 to 1.000", "58%", "gain at most 49%", "checkpoint.every_minutes=10"):
        assert fact in verdict(killed)
    assert killed.findings[0].rule == "steps lost to failures"
    assert killed.findings[0].title in verdict(killed)
    healthy = read_run(healthy_run)
    assert healthy.findings[0].rule == "start-up and compilation not amortised"
    assert healthy.findings[0].title in verdict(healthy)


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
            start.log.emit("step", step=step, loss=1.0, tokens=step * 10.0, tokens_per_s=10.0 / step_s, step_time_p50_s=step_s)
            with start.log.phase("evaluation", step=step) as record:
                record["results"] = {"held": 2.0 + 0.001 * (step % 2) - 0.1 * (name == "new"), name: 1.0}
        start.end_training()
        run_json(tmp_path / name, name)
    page = render([read_run(tmp_path / "old"), read_run(tmp_path / "new")])
    assert "Steps: faster by 50.0% (99 % interval" in page
    lead = re.search(r'against old</h2><p class="lead">(.*?)</p>', page.replace("\n", "")).group(1)
    assert lead.startswith("Validation loss (held, step 8): 1.9000 \u00b1 0.0012 against 2.0000 \u00b1 0.0012, lower. Steps: faster")
    first, second, *_ = re.findall("<tr>(.*?)</tr>", page[page.index("<h3>Changes</h3>") :], re.DOTALL)[1:]
    assert "validation loss (held, step 8)" in first and "-0.1000" in first
    assert "step time" in second


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"it has no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json is damaged"):
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


@pytest.fixture(scope="module")
def profiled_run(tmp_path_factory):
    """A run with a capture on four GPUs, a plan and an environment: everything the page can show."""
    path = tmp_path_factory.mktemp("c") / "third"
    start = Script(path, 1000.0)
    settings = [
        {"name": "--xla_gpu_x", "value": "true", "reason": "overlap", "chosen": "ridge"},
        {"name": "--xla_old", "value": "1", "reason": "", "chosen": "dropped"},
    ]
    start.log.emit("environment", settings=settings)
    start.begin_training(0)
    for step in range(1, 9):
        start.wait(1.0)
        start.log.emit(
            "step", step=step, loss=2.0, tokens=step * 10.0, tokens_per_s=20.0 + step % 2, step_time_p50_s=1e-4 + step % 2 * 1e-6
        )
    start.end_training()
    plan = {
        "memory_bytes": 3 * 2**30,
        "components": {"parameters": 2**30, "runtime_reserve": 2**31},
        "memory": [{"what": "arguments", "planned_bytes": 2**30, "compiled_bytes": 2**30, "agrees": True, "explanation": "as planned"}],
        "communication": [
            {"where": "mlp", "kind": "all-reduce", "axes": ["fsdp"], "planned_bytes": 2e6, "compiled_bytes": 4e6}
            | {"agrees": False, "difference_bytes": 2e6, "explanation": "more"}
        ],
        "step_s": 80e-6,
        "breakdown_s": {"compute": 50e-6, "hbm": 5e-6, "nvlink": 10e-6, "optimizer": 0.0, "bubble": 10e-6, "host_input": 5e-6},
        "cluster": "dgx-h100",
    }
    (path / "plan.json").write_text(json.dumps(plan))
    ops = [kernel("gemm", 100 * s, 100 * s + 60, "dot.1") for s in range(2)]
    talk = [kernel("ncclDevKernel_AllReduce", 100 * s + 50, 100 * s + 90, "all-reduce.1") for s in range(2)]
    planes = [gpu(n, {"Stream #1(Kernel)": ops, "Stream #2(Kernel)": talk}) for n in range(4)]
    talk = [xspace.event("MemoryAllocation", at, at, **allocated(at)) for at in (10, 20, 110)]
    planes.append(host({"python": [xspace.step(7, 0, 100), xspace.step(8, 100, 200)], "allocator": talk}))
    capture = path / "tensorboard" / "plugins" / "profile" / "steps0000007-0000008"
    write(capture / "node.xplane.pb", planes)
    (capture / "jit_train_step.hlo.txt").write_text((Path(__file__).parent / "trace_gpu.hlo.txt").read_text())
    run_json(path, "third", devices=4)
    found = find_capture(capture)
    publish(found, analyze(load_profile(found, hardware=hardware("h100-sxm"))))
    return path


def allocated(at):
    """The statistics of an allocation of 1 GB at a moment, with 2 GB allocated before the capture; its texts are hostile."""
    state = {"allocator_name": "GPU_0_<bfc>", "bytes_allocated": 10**9 * (3 + at // 20), "bytes_available": 70 * 10**9}
    return state | {"allocation_bytes": 10**9, "addr": at, "tf_op": "jit_<step>", "data_type": 14, "shape": "[8,<4>]"}


def rows_of(page, heading):
    """Rows of the first table after a heading, as lists of texts."""
    table = page.split(heading, 1)[1].split("<table>", 1)[1].split("</table>", 1)[0]
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in table.split("<tr>")[1:]]


def test_the_inside_of_a_step_sums_and_stands_under_the_roofline(profiled_run):
    page = render([read_run(profiled_run)])
    ledger = {row[0]: row[1:3] for row in rows_of(page, "<h2>Inside a step</h2>")}
    assert ledger["compute"] == ["60 us", "60.0%"]
    assert ledger["communication, exposed"] == ["30 us", "30.0%"]
    assert ledger["idle"] == ["10 us", "10.0%"]
    assert ledger["step"] == ["100 us", "100.0%"]
    assert ledger["(communication overlapped by compute)"] == ["10 us", "10.0%"]
    assert re.search(r'<polyline class="roof" points="[\d., ]+"', page)
    assert "there is no roof" not in page
    assert page.count("<circle cx") >= 2
    kind, axes, *_ = rows_of(page, "Communication, per step and device")[1]
    assert (kind, axes) == ("all-reduce", "?")  # pairs of four devices whose mesh is not known


def test_tables_by_shape_size_and_allocator_are_folded_and_escaped(profiled_run):
    page = render([read_run(profiled_run)])
    matmuls = rows_of(page, "<summary>Matmuls by shape, per step and device (1 shape)")
    assert matmuls[1][:5] == ["bf16", "1", "1024", "1024", "1024"]
    memory = page.split("<h3>Memory</h3>", 1)[1].split("<h3>Hosts</h3>")[0]
    assert "<summary>allocator GPU_0_&lt;bfc&gt;: 8 GB of 78 GB at 110 us</summary>" in memory
    assert memory.count("<svg") == 1 and memory.count("<details>") == memory.count("</details>")
    assert rows_of(memory, "<svg")[1] == ["node", "GPU_0_&lt;bfc&gt;", "8", "78"]
    assert ["jit_&lt;step&gt;", "bf16[8,&lt;4&gt;]", "3", "3"] in rows_of(memory, "78</td>")
    assert ["allocated before the capture", "", "", "5"] in rows_of(memory, "78</td>")
    assert "<step>" not in page and "<bfc>" not in page


def test_the_memory_of_a_program_is_drawn_over_its_schedule_with_its_peak():
    live = [LiveBuffer(f"fusion.{n}", "mlp", "forward", 1e9 * size) for n, size in enumerate((1, 5, 2))]
    one = {"module": "jit_<f>", "arguments_bytes": 2e9, "outputs_bytes": 0.5e9, "constants_bytes": 0.0, "temporaries_bytes": 6e9}
    program = ProgramMemory(**one, peak_bytes=7.5e9, peak_at=live[1], largest=live[1:2], timeline=live)
    page = "".join(memory_section(replace(EMPTY, memory=[program])))
    assert "<summary>jit_&lt;f&gt; has at most 7.5 GB in use per device at fusion.1 (mlp forward)</summary>" in page
    assert len(re.findall(r'polyline points="([^"]*)"', page)[0].split()) == 3
    assert rows_of(page, "<svg")[1] == ["jit_&lt;f&gt;", "2", "0.5", "6", "7.5", "fusion.1 (mlp forward)"]
    assert memory_section(EMPTY) == []


def test_the_plan_is_compared_term_by_term_with_the_largest_difference(profiled_run):
    page = render([read_run(profiled_run)])
    terms = {row[0]: row[1:] for row in rows_of(page, "<h3>Step time and bandwidth")[1:]}
    assert terms["exposed communication"][:3] == ["10 us", "30 us", "+200%"]
    assert terms["step"][:2] == ["80 us", "100 us"]
    assert "Largest difference: exposed communication: " in page
    assert rows_of(page, "<h3>Memory of a device</h3>")[1] == ["runtime reserve", "2,147.5"]
    assert rows_of(page, "<h3>Communication of a step</h3>")[1] == ["all-reduce over fsdp", "mlp", "2", "4", "more"]


def test_flags_are_shown_with_who_chose_them_and_compared(profiled_run, healthy_run):
    page = render([read_run(profiled_run)])
    assert rows_of(page, "XLA flags and environment settings")[1] == ["--xla_gpu_x", "true", "ridge", "overlap"]
    both = render([read_run(healthy_run, "plain"), read_run(profiled_run, "flagged")])
    differing = rows_of(both, "<h3>Differences</h3>")
    assert ["environment", "--xla_gpu_x", "not set", "true"] in differing
    assert ["machine", "count", "8", "4"] in differing
    assert not [row for row in differing if "xla_old" in row[1]]


def test_figures_of_two_runs_stand_side_by_side_with_spread_and_verdict(profiled_run, tmp_path):
    slow = tmp_path / "slow"
    shutil.copytree(profiled_run, slow)
    log = event_file(slow, 0)
    log.write_text(re.sub(r'"step_time_p50_s":([\d.e-]+)', lambda m: f'"step_time_p50_s":{1.9 * float(m[1])}', log.read_text()))
    page = render([read_run(profiled_run, "a"), read_run(slow, "b")])
    step_time = next(row for row in rows_of(page, "<h3>Changes</h3>") if row[0] == "step time")
    assert step_time[-1] == "slower"
    assert re.search(r"\(\u00b1\d+\.\d%\)", step_time[1])
    assert "Config, environment, packages, code and machine are the same" in page
    assert rows_of(page, "Step ledgers, as profiled")[1][:4] == ["compute", "60 us", "60 us", "+0 us"]


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "light"), (1400, "dark")])
def test_the_page_fits_its_window_and_follows_the_scheme(browser, profiled_run, killed_run, tmp_path, width, scheme):
    page = tmp_path / "report.html"
    page.write_text(render([read_run(profiled_run), read_run(killed_run)]))
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        paper, ink = browser.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        light = [sum(int(part) for part in re.findall(r"\d+", color)[:3]) for color in (paper, ink)]
        assert (light[0] > 700 and light[1] < 150) if scheme == "light" else (light[0] < 150 and light[1] > 600)
        assert browser.execute_script("return document.querySelectorAll('svg polyline').length") >= 8
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
        beyond = "return [...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert width < 700 or browser.execute_script(beyond) == 0  # paper does not scroll
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
