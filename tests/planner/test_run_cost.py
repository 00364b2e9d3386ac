"""Time and money of runs: published figures, and mistakes that were printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.run_cost import run_cost
from ridgeline.planner.hardware import hardware

H100 = 990e12


def test_a_70b_run_takes_525_thousand_gpu_hours_and_two_million_dollars():
    run = run_cost(params=70e9, tokens=2e12, devices=1024, peak_flops=H100, mfu=0.45, price_per_hour_usd=4)
    assert run.device_hours == pytest.approx(525e3, rel=5e-3)
    assert run.cost_usd == pytest.approx(2.10e6, rel=5e-3)
    assert run.days == pytest.approx(525e3 / 1024 / 24, rel=5e-3)


def test_deepseek_v3_trained_at_21_7_percent():
    # 37e9 active parameters, 14.8e12 tokens, 2.79e6 H800-hours against the FP8 peak: JAX scaling book, chapter GPUs
    run = run_cost(params=37e9, tokens=14.8e12, devices=2048, peak_flops=1.513e15, device_hours=2.79e6)
    assert run.mfu == pytest.approx(0.217, abs=1e-3)


def test_7b_at_150_thousand_tokens_per_second_on_64_h100_is_9_95_percent():
    run = run_cost(params=7e9, devices=64, peak_flops=hardware("h100-sxm").peak_flops["bfloat16"], tokens_per_s=150e3)
    assert run.mfu == pytest.approx(0.0995, abs=1e-4)
    assert (run.seconds, run.cost_usd) == (None, None)


def test_fp8_throughput_is_measured_against_the_fp8_peak():
    # in print: "91 % MFU" from fp8 throughput over the bf16 peak
    h100 = hardware("h100-sxm").peak_flops
    rate = 0.455 * h100["float8"] * 8 / (6 * 8e9)
    assert run_cost(params=8e9, devices=8, peak_flops=h100["bfloat16"], tokens_per_s=rate).mfu == pytest.approx(0.91, abs=1e-3)
    assert run_cost(params=8e9, devices=8, peak_flops=h100["float8"], tokens_per_s=rate).mfu == pytest.approx(0.455, abs=1e-3)


def test_throughput_of_all_devices_against_the_peak_of_one_is_refused():
    with pytest.raises(UserError, match=r"above the peak of 1 device, 9.894e\+14 \(MFU 637%\): is the rate that of all devices"):
        run_cost(params=7e9, devices=1, peak_flops=989.4e12, tokens_per_s=150e3)


rates = st.floats(1e-3, 1)
sizes = st.floats(1e6, 1e13)


@given(sizes, sizes, st.integers(1, 100_000), rates)
def test_mfu_and_tokens_per_second_are_inverse(params, tokens, devices, mfu):
    forward = run_cost(params=params, tokens=tokens, devices=devices, peak_flops=H100, mfu=mfu, price_per_hour_usd=3.0)
    back = run_cost(params=params, tokens=tokens, devices=devices, peak_flops=H100, tokens_per_s=forward.tokens_per_s)
    assert back.mfu == pytest.approx(mfu)
    hours = run_cost(params=params, tokens=tokens, devices=devices, peak_flops=H100, device_hours=forward.device_hours)
    assert hours.tokens_per_s == pytest.approx(forward.tokens_per_s)
    assert forward.cost_usd == pytest.approx(3 * forward.seconds * devices / 3600)


def test_money_does_not_depend_on_the_number_of_devices():
    few, many = (run_cost(params=8e9, tokens=1e12, devices=n, peak_flops=H100, mfu=0.4, price_per_hour_usd=2) for n in (8, 512))
    assert few.cost_usd == pytest.approx(many.cost_usd)
    assert few.days == pytest.approx(64 * many.days)


def test_energy_counts_the_facility():
    run = run_cost(
        params=8e9, tokens=1e12, devices=8, peak_flops=H100, mfu=0.4, device_power_w=700, power_usage_effectiveness=1.2
    )  # fmt: skip
    assert run.energy_kwh == pytest.approx(run.device_hours * 0.84)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mfu": 45}, "mfu=45: must be greater than 0 and at most 1 \\(45 % is 0.45\\)"),
        ({"mfu": 0}, "mfu=0: must be greater than 0"),
        ({"mfu": -0.1}, "mfu=-0.1: must be greater than 0"),
        ({"params": 0}, "params=0: must be a finite number greater than 0"),
        ({"tokens": -1}, "tokens=-1: must be"),
        ({"devices": 0}, "devices=0: must be a whole number of at least 1"),
        ({"devices": 1.5}, "devices=1.5: must be a whole number"),
        ({"peak_flops": float("inf")}, "peak-flops=inf: must be a finite number"),
        ({"price_per_hour_usd": -2}, "price-per-hour=-2: must be"),
        ({"mfu": None}, "exactly one of mfu, tokens-per-s and device-hours; got none"),
        ({"tokens_per_s": 10.0}, "exactly one of .*; got mfu and tokens-per-s"),
        ({"mfu": None, "device_hours": 10.0, "tokens": None}, "device-hours needs? tokens"),
    ],
)
def test_nonsense_is_refused(changes, message):
    arguments = {"params": 7e9, "tokens": 1e12, "devices": 8, "peak_flops": H100, "mfu": 0.4}
    with pytest.raises(UserError, match=message):
        run_cost(**(arguments | changes))
