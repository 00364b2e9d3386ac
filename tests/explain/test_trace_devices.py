"""What a capture contains of its devices: facts for ceilings, AMD devices without a name, devices that are not analyzed, dropped events."""

import pytest
from jax.profiler import ProfileData

from ridgeline.cli.main import run as ridge
from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.figures import roofline
from ridgeline.explain.trace.load import load_profile
from ridgeline.planner.hardware import catalog, find_by_size, hardware
from tests.explain.xspace import Plane, event, gpu, host, kernel, step, text, write

STREAM = "Stream #1(Kernel)"
HLO = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (p: f32[1048576]) -> f32[1048576] {
  %p = f32[1048576]{0} parameter(0)
  ROOT %negate.1 = f32[1048576]{0} negate(%p)
}
"""
MOVED_BYTES = 2 * 4 * 2**20


def capture(tmp_path, **facts):
    (tmp_path / "jit_train_step.hlo.txt").write_text(HLO)
    return find_capture(write(tmp_path / "node.xplane.pb", [gpu(0, {STREAM: [kernel("neg", 0, 100, "negate.1")]}, **facts)]))


def test_facts_of_an_unlisted_device_give_the_ceiling_of_what_memory_limits(tmp_path):
    facts = {"device_vendor": "Nvidia", "gpu_device_name": "NVIDIA X900", "core_count": 200, "clock_rate": 1_900_000}
    facts |= {"memory_size": 300 * 10**9, "memory_bandwidth": 4 * 10**12, "compute_cap_major": 12, "compute_cap_minor": 1}
    analysis = analyze(load_profile(capture(tmp_path, **facts)))
    found = analysis.device_facts
    assert (found.vendor, found.model, found.cores, found.clock_hz) == ("Nvidia", "NVIDIA X900", 200, 1.9e9)
    assert (found.memory_bytes, found.memory_bandwidth_bytes_per_s, found.compute_capability) == (300 * 10**9, 4e12, "12.1")
    assert analysis.hardware is None
    assert analysis.operations[0].ceiling_s == pytest.approx(MOVED_BYTES / 4e12)
    assert "ceilings use the memory bandwidth in the trace (4,000 GB/s)" in " ".join(analysis.notes)
    assert roofline(analysis) is None  # no FLOPs


def test_without_facts_there_is_no_ceiling(tmp_path):
    analysis = analyze(load_profile(capture(tmp_path)))
    assert (analysis.device_facts, analysis.operations[0].ceiling_s) == (None, None)


@pytest.mark.parametrize("model", ["gfx942", None])
def test_amd_devices_are_recognized_by_their_size_as_rocm_records_no_name(tmp_path, model):
    facts = {"device_vendor": "AMD", "core_count": 304, "memory_size": 206141652992, "memory_bandwidth": 53248 * 10**8}
    analysis = analyze(load_profile(capture(tmp_path, **facts, **({"gpu_device_name": model} if model else {}))))
    assert analysis.hardware == "mi300x"
    assert analysis.operations[0].ceiling_s == pytest.approx(MOVED_BYTES / hardware("mi300x").memory_bandwidth_bytes_per_s)


def test_the_size_finds_every_amd_entry_and_no_relative():
    amd = [h for h in catalog() if any(kind.startswith("AMD") for kind in h.kinds)]
    assert [h.name for h in amd] == ["mi300x", "mi355x"]
    for h in amd:
        assert find_by_size("AMD", h.cores, h.memory_bytes) == h
        assert find_by_size("NVIDIA", h.cores, h.memory_bytes) is None
        assert find_by_size("AMD", h.cores, round(1.33 * h.memory_bytes)) is None  # as the MI325X to the MI300X
        assert find_by_size("AMD", h.cores // 8, h.memory_bytes // 8) is None  # a partition
    assert find_by_size("AMD", None, None) is None


@pytest.mark.parametrize("with_cpu_work", [False, True])
def test_a_capture_of_tpus_is_refused_with_the_reason(tmp_path, capsys, with_cpu_work):
    ops = [event("dot.1", 0, 5, hlo_op="dot.1", hlo_module="jit_f", device_ordinal=0)] if with_cpu_work else []
    planes = [Plane("/device:TPU:0", {"XLA Ops": [event("%fusion.1 = f32[8]", 0, 10)]}), host({"python": [step(0, 0, 10)], "tf/1": ops})]
    file = write(tmp_path / "tpu.xplane.pb", planes)
    with pytest.raises(UserError, match=r"is a capture of TPU devices; ridge analyzes GPUs and XLA's CPU backend only: use xprof"):
        load_profile(find_capture(file))
    assert ridge(["analyze", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_errors_and_warnings_of_the_profiler_are_shown(tmp_path, capsys):
    planes = text([gpu(0, {STREAM: [kernel("gemm", 0, 10)]})])
    problems = 'errors: "CUPTI buffers are full: 512 events dropped" warnings: "no permission" warnings: "no permission"'
    file = tmp_path / "node.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(f"{planes} {problems}"))
    assert ridge(["analyze", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "note: node: the profiler reports: CUPTI buffers are full: 512 events dropped" in shown
    assert shown.count("no permission") == 1
