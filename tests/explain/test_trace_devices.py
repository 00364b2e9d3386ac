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
from tests.explain.xspace import Plane, event, gpu, host, kernel, metadata, step, text, write

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


TPU_HLO = """HloModule jit_train_step, is_scheduled=true, num_partitions=2

ENTRY %main (p: bf16[64,64]) -> bf16[128,64] {
  %p = bf16[64,64] parameter(0)
  %dot.1 = bf16[64,64] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp(mlp)/dot" source_file="mlp.py" source_line=7}
  ROOT %all-gather.1 = bf16[128,64] all-gather(%dot.1), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true
}
"""  # noqa: E501
OTHER_HLO = TPU_HLO.replace("64,64", "32,32").replace("128,64", "64,32")


def tpu(ordinal, peak=True):
    """Three steps of 100 us: 60 of a matmul inside a loop, 20 of an all-gather; after each a short program of the same name."""
    text = {
        name: f"%{name} = bf16[64,64]{{1,0:T(8,128)}} {name.split('.')[0]}(bf16[64,64] %p)" for name in ("dot.1", "all-gather.1", "while.3")
    }
    ops, modules = [], []
    for s in range(3):
        at = 100 * s
        ops += [event(text["while.3"], at, at + 60), event(text["dot.1"], at, at + 60), event(text["all-gather.1"], at + 60, at + 80)]
        ops.append(event(text["dot.1"], at + 90, at + 92))
        modules += [event("jit_train_step(7)", at, at + 80, run_id=2 * s), event("jit_train_step(9)", at + 90, at + 92, run_id=2 * s + 1)]
    facts = {"device_type_string": "TPU v5 lite", "peak_teraflops_per_second": 197.0, "peak_hbm_bw_gigabytes_per_second": 819.0}
    lines = {"Steps": [event(str(s), 100 * s, 100 * s + 92) for s in range(3)], "XLA Modules": modules, "XLA Ops": ops}
    lines["Async XLA Ops"] = [event("copy-start.1", 0, 90)]
    return Plane(f"/device:TPU:{ordinal}", lines, facts if peak else {})


@pytest.mark.parametrize("with_cpu_work", [False, True])
def test_a_capture_of_tpus_is_read_from_its_operations_and_modules(tmp_path, capsys, with_cpu_work):
    """Lines and statistics as in captures of libtpu: an operation is named by the text of its instruction."""
    cpu = [event("dot.1", 0, 5, hlo_op="dot.1", hlo_module="jit_f", device_ordinal=0)] if with_cpu_work else []
    sparse = Plane("/device:TPU:0 SparseCore 0", {"XLA Ops": [event("%fusion.1 = f32[8] fusion()", 0, 400)]})
    marks = host({"python": [step(s, 100 * s, 100 * s + 95) for s in range(3)], "tf/1": cpu})
    file = write(tmp_path / "tpu.xplane.pb", [tpu(0), tpu(1), sparse, marks, metadata({7: TPU_HLO, 9: OTHER_HLO})])
    profile = load_profile(find_capture(file))
    found = analyze(profile)
    assert (found.device_kind, [d.device for d in found.devices]) == ("TPU v5 lite", ["tpu/tpu:0", "tpu/tpu:1"])
    assert [s.step for s in found.steps] == [0, 1, 2]
    assert found.summary["compute_s"].p50 == pytest.approx(62e-6)
    assert found.summary["exposed_communication_s"].p50 == pytest.approx(20e-6)
    works = {(op.op, op.time_s): op for op in found.operations}
    longest, short = (works["dot.1", time_s] for time_s in sorted((t for _, t in works), reverse=True))
    assert (longest.flops, longest.source, longest.phase) == (2.0 * 64**3, "mlp.py:7", "forward")
    assert (short.flops, longest.time_s, short.time_s) == (2.0 * 32**3, pytest.approx(60e-6), pytest.approx(2e-6))
    assert longest.ceiling_s == pytest.approx(max(2 * 64**3 / 197e12, 3 * 2 * 64**2 / 819e9))
    assert ridge(["analyze", str(file)]) == 0
    assert "TPU v5 lite" in capsys.readouterr().out


def test_a_capture_of_tpus_without_statistics_or_annotations_has_executions_as_steps(tmp_path):
    bare = tpu(0, peak=False)
    bare.lines["XLA Modules"] = [event(name, start, end) for name, start, end, _ in bare.lines["XLA Modules"]]
    found = analyze(load_profile(find_capture(write(tmp_path / "tpu.xplane.pb", [bare, host({})]))))
    assert (found.unit, found.main_program, len(found.steps)) == ("execution", "jit_train_step", 3)
    assert found.summary["compute_s"].p50 == pytest.approx(62e-6)


def test_a_capture_of_unknown_devices_is_refused_in_one_line(tmp_path, capsys):
    planes = [Plane("/device:NPU:0", {"XLA Ops": [event("%fusion.1 = f32[8]", 0, 10)]}), host({"python": [step(0, 0, 10)]})]
    file = write(tmp_path / "npu.xplane.pb", planes)
    with pytest.raises(UserError, match=r"is a capture of NPU devices; ridge analyzes GPUs, TPUs and XLA's CPU backend only"):
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
