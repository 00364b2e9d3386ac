"""What an analysis leaves behind: JSON, figures, TensorBoard; and that a captured profile is analyzed by itself."""

import io
import json
import struct
import subprocess
import sys

import pytest
from PIL import Image

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ProfilerConfig
from ridgeline.explain.trace import background
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.figures import PARTS, breakdown, roofline
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.publish import publish
from ridgeline.observe.profiler import Profiler
from ridgeline.planner.hardware import hardware
from ridgeline.rundir.analysis import read_analysis
from ridgeline.rundir.analysis_times import DeviceTotal
from ridgeline.rundir.directory import RunDir
from tests.explain.xspace import gpu, host, kernel, step, write


@pytest.fixture
def run(tmp_path):
    """A run with a capture of steps 7 and 8: 60 us of computing, 30 of exposed communication, 10 idle each."""
    (tmp_path / "run.json").write_text("{}")
    ops = [kernel("gemm", 100 * s, 100 * s + 60, "dot.1") for s in range(2)]
    talk = [kernel("ncclDevKernel_AllReduce", 100 * s + 50, 100 * s + 90, "all-reduce.1") for s in range(2)]
    planes = [
        gpu(0, {"Stream #1(Kernel)": ops, "Stream #2(Kernel)": talk}),
        host({"python": [step(7, 0, 100), step(8, 100, 200)]}),
    ]
    write(tmp_path / "tensorboard" / "plugins" / "profile" / "steps0000007-0000008" / "node.xplane.pb", planes)
    return tmp_path


def analyze_and_publish(run):
    capture = find_capture(run)
    publish(capture, analyze(load_profile(capture)))


def test_results_lie_beside_the_profile_and_in_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    analyze_and_publish(run)
    directory = run / "tensorboard" / "plugins" / "profile" / "steps0000007-0000008"
    assert sorted(p.name for p in directory.iterdir()) == ["analysis.json", "breakdown.png", "node.xplane.pb"]
    report = json.loads((directory / "analysis.json").read_text())
    assert [s["step"] for s in report["steps"]] == [7, 8]
    read = EventAccumulator(str(run / "tensorboard" / "steps")).Reload()
    scalars = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert scalars["train_step_ledger/compute_s"] == [(7, pytest.approx(60e-6)), (8, pytest.approx(60e-6))]
    assert [value for _, value in scalars["train_step_ledger/exposed_communication_s"]] == pytest.approx([30e-6, 30e-6])
    assert [value for _, value in scalars["train_step_ledger/overlapped_communication_s"]] == pytest.approx([10e-6, 10e-6])
    assert [value for _, value in scalars["train_step_ledger/idle_s"]] == pytest.approx([10e-6, 10e-6])
    (image,) = read.Images("train_step_ledger/breakdown")
    assert (image.step, struct.unpack(">II", image.encoded_image_string[16:24])) == (8, (image.width, image.height))


def test_diagnosis_finds_the_analysis_of_a_run(run):
    from ridgeline.explain.diagnosis.facts import read_facts
    from ridgeline.rundir.events import EventLog, event_file

    log = EventLog(event_file(run, 0), run="r")
    with log.phase("train"):
        pass
    log.close()
    analyze_and_publish(run)
    assert read_facts(RunDir(run)).every_device(lambda device: device.exposed_communication_s) == pytest.approx(0.3)


def test_the_written_analysis_is_read_back_and_a_damaged_one_is_one_line(run):
    capture = find_capture(run)
    analysis = analyze(load_profile(capture))
    publish(capture, analysis)
    file = capture.directory / "analysis.json"
    assert read_analysis(file) == analysis
    content = json.loads(file.read_text())
    content["devices"][0]["compute_s"] = "long"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"analysis\.json is damaged: devices\.0\.compute_s: must be") as error:
        read_analysis(file)
    assert "\n" not in str(error.value)
    del content["steps"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="damaged"):
        read_analysis(file)


def test_bars_are_as_long_as_their_parts(run):
    times = {"total_s": 1.0, "compute_s": 0.5, "exposed_communication_s": 0.3, "exposed_copy_s": 0.0, "idle_s": 0.2}
    rest = {"communication_s": 0.3, "overlapped_communication_s": 0.0, "idle_by_cause": {"other": 0.2}, "residual_s": 0.0}
    device = DeviceTotal(device="a", steps=1, assignment="time", **times, **rest)
    image = Image.open(io.BytesIO(breakdown([device]))).convert("RGB")
    counts = {color: 0 for _, color in PARTS.values()}
    for x in range(image.width):
        color = "#{:02x}{:02x}{:02x}".format(*image.getpixel((x, 41)))
        if color in counts:
            counts[color] += 1
    lengths = [counts[color] for _, color in PARTS.values()]
    assert lengths[0] / sum(lengths) == pytest.approx(0.5, abs=0.01)
    assert lengths[1] / sum(lengths) == pytest.approx(0.3, abs=0.01)
    assert lengths[2] <= 1


def test_the_roofline_needs_flops_and_gets_a_roof_from_the_datasheet(tmp_path, request):
    hlo = (request.path.parent / "trace_gpu.hlo.txt").read_text()
    planes = [gpu(n, {"Stream #1(Kernel)": [kernel("gemm", 0, 10, "dot.1"), kernel("gemm", 10, 30, "dot.2")]}) for n in range(4)]
    write(tmp_path / "node.xplane.pb", planes)
    assert roofline(analyze(load_profile(find_capture(tmp_path)))) is None
    (tmp_path / "jit_train_step.hlo.txt").write_text(hlo)
    bare = roofline(analyze(load_profile(find_capture(tmp_path))))
    roofed = roofline(analyze(load_profile(find_capture(tmp_path), hardware=hardware("h100-sxm"))))
    assert bare is not None
    assert roofed is not None
    assert bare != roofed


def test_a_captured_profile_is_analysed_by_itself(tmp_path, run_steps):
    profiler = Profiler(ProfilerConfig(start_step=1, num_steps=2), tmp_path, analyze=background.start)
    (directory,) = run_steps(profiler, 4)  # its close waits for the analysis
    report = json.loads((directory / "analysis.json").read_text())
    assert [s["step"] for s in report["steps"]] == [1, 2]
    assert report["devices"][0]["compute_s"] > 0


def test_the_analysis_waits_for_the_traces_of_the_other_processes(tmp_path):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        (tmp_path / f"h-p{len(waits):05d}.xplane.pb").touch()

    assert background.wait_for_traces(tmp_path, 3, clock=lambda: 0.0, sleep=sleep) == 3
    assert len(waits) == 3
    now = iter([0.0, 1.0, background.ARRIVAL_S + 1])
    assert background.wait_for_traces(tmp_path, 4, clock=lambda: next(now), sleep=lambda _: None) == 3


def test_a_failed_analysis_is_one_line_and_no_file(tmp_path):
    (tmp_path / "node.xplane.pb").write_bytes(b"hello, world")
    command = [sys.executable, "-m", "ridgeline.explain.trace.background", str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("no analysis of the profile: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "analysis.json").exists()


def test_a_place_that_cannot_be_written_is_named(run):
    (run / "tensorboard" / "steps").write_text("in the way")
    with pytest.raises(UserError, match="cannot write the analysis to"):
        analyze_and_publish(run)
