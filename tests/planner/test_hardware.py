"""The hardware catalog: what is known, and that nothing else is."""

import re

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.planner.hardware import GpuProgram, catalog, check_block_scaled, find_hardware, hardware, matmul_dtype, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tfloat32", 156e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "float8", 1978.9e12),
        ("NVIDIA H100 64GB HBM2", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA B200", "bfloat16", 2.25e15),
        ("NVIDIA GB200", "bfloat16", 2.5e15),
        ("NVIDIA B300 SXM6 AC", "float8", 4.5e15),
        ("NVIDIA GB300", "float4", 15e15),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
        ("AMD Instinct MI355X", "float8", 5033.2e12),
    ],
)
def test_datasheet_peaks_are_dense(device_kind, dtype, peak):
    assert peak_flops(device_kind, dtype) == peak


@pytest.mark.parametrize(
    "device_kind",
    ["cpu", "", "NVIDIA A100", "NVIDIA A100-SXM-64GB", "NVIDIA H100", "NVIDIA H800", "NVIDIA H2000", "NVIDIA GeForce RTX 4090", "TPU v5p"],
)
def test_an_unlisted_device_is_unknown_and_not_its_nearest_relative(device_kind):
    assert find_hardware(device_kind) is None
    assert peak_flops(device_kind, "bfloat16") is None


@pytest.mark.parametrize(("name", "flops_per_clock"), [("mi300x", 4096), ("mi355x", 8192)])
def test_peaks_of_amd_are_units_times_clock(name, flops_per_clock):
    h = hardware(name)
    assert h.peak_flops["float8"] == pytest.approx(flops_per_clock * h.cores * h.clock_hz, rel=1e-3)


def test_a_dtype_the_hardware_lacks_has_no_peak():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None


GPUS = [h for h in catalog() if h.tensor_cores]


def test_every_entry_has_sources_and_kinds_no_other_has():
    names = [h.name for h in catalog()]
    assert len(names) == len(set(names)) == 17
    plain = [re.sub(r"e\?$", "", kind) for h in catalog() for kind in h.kinds]
    assert len(plain) == len(set(plain))
    for h in GPUS:
        assert h.source.startswith(("NVIDIA", "As h100-sxm", "AMD"))
        assert h.peak_flops["float32"] < h.peak_flops["bfloat16"] == h.peak_flops["float16"]
        if h.name != "mi355x":  # it has no TF32
            assert h.peak_flops["float32"] < h.peak_flops["tfloat32"]
            assert h.peak_flops["bfloat16"] == pytest.approx(2 * h.peak_flops["tfloat32"], rel=2e-3)
        if "float8" in h.peak_flops:
            assert h.peak_flops["float8"] == pytest.approx(2 * h.peak_flops["bfloat16"], rel=2e-3)
        assert {"memory", "links", "power", "price"} <= h.sources.keys()
        assert h.price_per_hour_usd is not None or h.sources["price"] == "No list found"
    for kind in plain:  # each matches exactly its own entry
        assert find_hardware(kind) is not None


def test_the_cpu_entry_is_for_plans_and_recognizes_no_machine():
    assert hardware("cpu").kinds == ()
    assert find_hardware("cpu") is None


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="unknown device 'h100-sxn'; did you mean 'h100-sxm'"):
        hardware("h100-sxn")


@pytest.mark.parametrize(
    ("name", "label_gb", "memory_tb_per_s"),
    [
        ("a100-40gb", 40, 1.555),
        ("a100-80gb", 80, 2.039),
        ("h100-sxm", 80, 3.35),
        ("h200-sxm", 141, 4.8),
        ("b200", 180, 7.7),
        ("gb200", 186, 8),
        ("mi300x", 192, 5.3),
        ("mi355x", 288, 8),
    ],
)
def test_memory_is_what_the_driver_reports(name, label_gb, memory_tb_per_s):
    h = hardware(name)
    assert 0.95 * label_gb * 2**30 <= h.memory_bytes <= 1.07 * label_gb * 2**30
    assert h.memory_bandwidth_bytes_per_s == pytest.approx(memory_tb_per_s * 1e12, rel=0.02)


@pytest.mark.parametrize(
    ("name", "printed_both_directions"),
    [("a100-80gb", 600e9), ("h100-sxm", 900e9), ("h200-sxm", 900e9), ("b200", 1800e9), ("mi300x", 896e9), ("mi355x", 1075.2e9)],
)
def test_nvlink_is_of_one_direction(name, printed_both_directions):
    # "900 GB/s" of an H100 adds both directions: the mistake doubles every communication estimate
    assert hardware(name).link_bandwidth_bytes_per_s == printed_both_directions / 2


def test_pcie_5_moves_64_gigabytes_per_second_in_one_direction():
    assert {hardware(name).host_bandwidth_bytes_per_s for name in ("h100-sxm", "h200-sxm", "b200")} == {64e9}


def test_a_hop_over_nvlink_is_shorter_than_over_pcie():
    assert all(0 < h.link_latency_s < h.host_latency_s < 1e-5 for h in catalog())


def test_the_ridge_of_an_h100_is_295_flops_per_byte():
    h = hardware("h100-sxm")
    assert h.peak_flops["bfloat16"] / h.memory_bandwidth_bytes_per_s == pytest.approx(295, abs=3)


def test_float32_matmuls_run_in_tf32_by_default():
    assert matmul_dtype("float32", "default") == "tfloat32"
    assert matmul_dtype("float32", "high") == "tfloat32"
    assert matmul_dtype("float32", "highest") == "float32"
    assert matmul_dtype("bfloat16", "highest") == "bfloat16"


def test_programs_differ_between_generations():
    assert {device.generation for device in catalog() if not device.program.adds_bfloat16} == {"ampere"}
    assert {device.generation for device in catalog() if not device.program.transposes_float8} == {"blackwell"}
    assert {device.name for device in catalog() if device.target and not device.program.repeats_activation} == {"b200", "b300"}
    assert all(device.program.cores == device.cores for device in catalog() if device.target)
    assert hardware("h100-sxm").program == hardware("mi300x").program == GpuProgram()


def test_xla_has_measured_matmuls_for_hopper_and_the_b200():
    measured = {device.name for device in catalog() if device.target and device.program.measured_matmuls}
    assert measured == {device.name for device in catalog() if device.generation == "hopper"} | {"b200"}


def test_block_scaled_products_are_planned_only_where_there_are_kernels():
    check_block_scaled(hardware("b200"), "mxfp8")
    with pytest.raises(
        UserError, match=r"precision.matmul=nvfp4: h100-sxm has no block-scaled tensor cores \(b200, .* have\); use precision.matmul=fp8"
    ):
        check_block_scaled(hardware("h100-sxm"), "nvfp4")
