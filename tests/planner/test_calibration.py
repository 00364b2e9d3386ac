"""Efficiency factors: published points are met, nothing exceeds a datasheet, a machine's own file wins where it speaks."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.calibration import Curve, explained_share, intensity_flops_per_byte, load_calibration
from ridgeline.planner.hardware import catalog, hardware

SHIPPED = load_calibration()
MEASURED = [point for point in SHIPPED.file.matmul if point.tflop_per_s is not None]


def test_measured_shapes_are_reproduced():
    for point in MEASURED:
        rate = SHIPPED.matmul_flops_per_s(hardware(point.device), point.dtype, point.m, point.n, point.k)
        assert rate == pytest.approx(point.tflop_per_s * 1e12), point


def test_the_h200_reaches_790_of_989_teraflops():
    assert SHIPPED.matmul_flops_per_s(hardware("h200-sxm"), "bfloat16", 8192, 8192, 8192) == 790e12


dims = st.integers(1, 100_000)
gpus = st.sampled_from([h for h in catalog() if h.tensor_cores])


@given(gpus, st.sampled_from(["bfloat16", "tfloat32", "float32"]), dims, dims, dims)
def test_no_matmul_exceeds_compute_or_memory_peak(device, dtype, m, n, k):
    assume(dtype in device.peak_flops)
    rate = SHIPPED.matmul_flops_per_s(device, dtype, m, n, k)
    assert 0 < rate <= device.peak_flops[dtype]
    assert rate <= intensity_flops_per_byte(dtype, m, n, k) * device.memory_bandwidth_bytes_per_s


@given(gpus, dims, dims, dims, st.sampled_from([2, 4]))
def test_a_matmul_twice_as_deep_does_not_run_slower(device, m, n, k, factor):
    # same output tiles, more work in each: only the interpolation between measured shapes may move it, by a few percent
    shallow, deep = (SHIPPED.matmul_flops_per_s(device, "bfloat16", m, n, depth) for depth in (k, k * factor))
    assert deep >= 0.85 * shallow


def test_thin_and_tiny_matmuls_waste_the_device():
    h100 = hardware("h100-sxm")
    share = lambda *shape: SHIPPED.matmul_flops_per_s(h100, "bfloat16", *shape) / h100.peak_flops["bfloat16"]  # noqa: E731
    assert share(8192, 8192, 8192) > 0.75
    assert share(8, 8192, 8192) < 0.02  # bound by reading the weights
    assert share(256, 256, 256) < 0.05  # two tiles for 132 cores
    assert share(128 * 132, 256, 4096) > share(128 * 133, 256, 4096)  # one tile more than cores: a second wave, nearly empty


def test_a_cpu_has_no_tiles():
    assert explained_share(hardware("cpu"), 1e11, 1e10, "float32", (333, 777, 555)) == 1.0


def test_attention_follows_the_sequence_length_and_the_head():
    h100 = hardware("h100-sxm")
    rate = lambda t, h: SHIPPED.attention_flops_per_s(h100, "bfloat16", t, h)  # noqa: E731
    assert rate(2048, 128) == pytest.approx(0.433 * 989.4e12)
    assert rate(512, 128) < rate(1024, 128) < rate(4096, 128)
    assert rate(4096, 64) < rate(4096, 128)
    assert rate(10**6, 128) == rate(16384, 128)


def test_memory_is_a_share_of_the_peak():
    assert SHIPPED.memory_bytes_per_s(hardware("h200-sxm")) == pytest.approx(0.84 * 4.8e12)


def test_every_entry_names_its_source():
    assert len(SHIPPED.sources) > 15
    assert all(len(source) > 20 for source in SHIPPED.sources)


@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-6, 1)), min_size=1, max_size=8, unique_by=lambda p: round(p[0])),
    st.floats(0.1, 1e13),
)
def test_a_curve_meets_its_points_and_stays_between_them(points, size):
    curve = Curve.through(points)
    for at, value in points:
        assert curve.at(at) == pytest.approx(value)
    values = [value for _, value in points]
    assert min(values) * (1 - 1e-9) <= curve.at(size) <= max(values) * (1 + 1e-9)


OWN = """
name: ours
matmul:
- {device: h100-sxm, dtype: bfloat16, m: 4096, n: 4096, k: 4096, tflop_per_s: 600, source: here}
links:
- {kind: network, measured: [[1000000, 5.0], [100000000, 60.0]], source: here}
host: {input_tokens_per_s: 1.0e6}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


def test_a_file_wins_where_it_speaks_and_only_there(own):
    calibration = load_calibration(own)
    assert calibration.name == "ours"
    h100, h200 = hardware("h100-sxm"), hardware("h200-sxm")
    assert calibration.matmul_flops_per_s(h100, "bfloat16", 4096, 4096, 4096) == 600e12
    assert calibration.matmul_flops_per_s(h100, "bfloat16", 2048, 2048, 13312) < 700e12  # the published point is gone
    assert calibration.matmul_flops_per_s(h200, "bfloat16", 8192, 8192, 8192) == 790e12
    assert calibration.memory_bytes_per_s(h100) == SHIPPED.memory_bytes_per_s(h100)
    curve = calibration.link_curve("network", "h100-sxm", 50e9)
    assert curve.at(1e6) == pytest.approx(0.1)
    assert curve.at(1e9) == 1.0  # 60 GB/s of a link of 50 count as 50
    assert calibration.link_curve("nvlink", "h100-sxm", 450e9) == SHIPPED.link_curve("nvlink", "h100-sxm", 450e9)
    assert calibration.file.host.input_tokens_per_s == 1e6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matmull: []", "matmull: unknown key; did you mean 'matmul'"),
        ("matmul: [{device: b200, dtype: bfloat16, m: 1, n: 1, source: x, share: 0.5}]", "matmul.0.k: required, but missing"),
        ("matmul: [{device: b200, dtype: bfloat16, m: 1, n: 1, k: 0, source: x, share: 0.5}]", "matmul.0.k: must be at least 1"),
        ("memory: [{device: b200, source: x}]", "give either share or gb_per_s"),
        ("memory: [{gb_per_s: 5.0, source: x}]", "memory.0: .*share"),
        ("memory: [{share: 1.5, source: x}]", "memory.0.share: must be at most 1"),
        ("links: [{kind: nvlink, points: [], source: x}]", "links.0: .*points.* or measured"),
        ("links: [{kind: nvlink, points: [[1.0, 0.5], [1.0, 0.6]], source: x}]", "links.0: .*twice"),
        ("links: [{kind: nvlink, points: [[1.0, 1.5]], source: x}]", "links.0: .*above 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_calibration(path)
    assert str(caught.value).startswith(f"{path}:1:")


def test_unknown_rates_are_refused():
    with pytest.raises(UserError, match=r"a100-80gb has no peak for float8 in the hardware catalog \(it has: float32"):
        SHIPPED.matmul_flops_per_s(hardware("a100-80gb"), "float8", 8, 8, 8)
    with pytest.raises(UserError, match=r"calibration 'no/such.yaml' not found \(ridge calibrate --output FILE writes one\)"):
        load_calibration("no/such.yaml")
