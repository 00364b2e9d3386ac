"""The hardware catalogue: what is known, and that nothing else is."""

import re

import pytest

from planner.hardware import catalogue, find_hardware, matmul_dtype, peak_flops


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


def test_a_dtype_the_hardware_lacks_has_no_peak():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None


def test_every_entry_has_a_source_and_kinds_no_other_has():
    names = [h.name for h in catalogue()]
    assert len(names) == len(set(names)) == 13
    plain = [re.sub(r"e\?$", "", kind) for h in catalogue() for kind in h.kinds]
    assert len(plain) == len(set(plain))
    for h in catalogue():
        assert h.source.startswith(("NVIDIA", "As h100-sxm"))
        assert h.peak_flops["float32"] < h.peak_flops["tfloat32"] < h.peak_flops["bfloat16"] == h.peak_flops["float16"]
        assert h.peak_flops["bfloat16"] == pytest.approx(2 * h.peak_flops["tfloat32"], rel=2e-3)
        if "float8" in h.peak_flops:
            assert h.peak_flops["float8"] == pytest.approx(2 * h.peak_flops["bfloat16"], rel=2e-3)
    for kind in plain:  # each matches exactly its own entry
        assert find_hardware(kind) is not None


def test_float32_matmuls_run_in_tf32_unless_told_otherwise():
    assert matmul_dtype("float32", "default") == "tfloat32"
    assert matmul_dtype("float32", "high") == "tfloat32"
    assert matmul_dtype("float32", "highest") == "float32"
    assert matmul_dtype("bfloat16", "highest") == "bfloat16"
