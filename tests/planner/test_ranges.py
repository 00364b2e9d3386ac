"""Ranges: those of the class where published runs validate it, wider where none do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.planner.hardware import hardware, hardware_names
from ridgeline.planner.ranges import Range, step_range
from ridgeline.planner.software import software, software_names
from ridgeline.planner.stragglers import slowest_over_mean

MATMULS = ("compute", "fp8", "fp8_delayed", "mxfp8", "nvfp4")


def of(device, name="ridgeline", *overrides):
    config = load("models/llama-3.1-8b", ["data.seq_len=4096", "precision.compute=bfloat16", *overrides]).config
    return step_range(config, hardware(device), software(name))


def test_maxtext_like_software_on_hopper_is_validated_to_five_percent():
    assert of("h100-sxm").share == of("h100-sxm", "maxtext").share == 0.05


@pytest.mark.parametrize("overrides", [("precision.matmul=fp8",), ("data.seq_len=65536",), ("precision.compute=float32",)])
def test_what_fewer_runs_validate_has_a_wider_range(overrides):
    assert of("h100-sxm", "ridgeline", *overrides).share > of("h100-sxm").share
    assert of("a100-80gb").share > of("h100-sxm").share and of("b200").share > of("h100-sxm").share


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(hardware_names()), st.sampled_from(software_names()), st.sampled_from(MATMULS), st.sampled_from([1024, 16384, 131072])
)
def test_every_prediction_has_a_range_and_says_where_it_is_from(device, name, matmul, seq_len):
    found = of(device, name, f"precision.matmul={matmul}", f"data.seq_len={seq_len}")
    assert 0.01 <= found.share < 1 and "held-out published runs" in found.basis


@given(st.floats(0.01, 0.9), st.floats(1e-3, 1e6))
def test_times_and_rates_have_the_same_range(share, value):
    (short, long), (low, high) = Range(share, "").around(value), Range(share, "").around_rate(1 / value)
    assert short < value < long and low == pytest.approx(1 / long) and high == pytest.approx(1 / short)


def test_a_step_waits_for_the_slowest_device():
    assert slowest_over_mean(1) == 1
    losses = [slowest_over_mean(2**n) for n in range(12)]
    assert losses == sorted(losses) and 1.02 < losses[3] < 1.03 and 1.04 < losses[9] < 1.05


def test_an_unknown_software_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="unknown software 'megatrn'; did you mean 'megatron'"):
        software("megatrn")
