"""Ridge points of links and memories."""

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.ridge import ridge_estimate
from ridgeline.planner.hardware import hardware


def test_h100_data_parallelism_needs_2200_tokens_per_gpu_inside_a_node():
    assert ridge_estimate(peak_flops=990e12, bandwidth=450e9, axis="data").threshold == 2200


def test_the_ridge_of_an_h100_against_its_memory():
    estimate = ridge_estimate(peak_flops=990e12, bandwidth=3.32e12)
    assert estimate.intensity == estimate.threshold == pytest.approx(298, abs=0.5)
    h100 = hardware("h100-sxm")
    real = ridge_estimate(peak_flops=h100.peak_flops["bfloat16"], bandwidth=h100.memory_bandwidth_bytes_per_s)
    assert real.intensity == pytest.approx(295, abs=1)


def test_both_directions_taken_for_one_halve_the_threshold():
    # in print: NVLink "900 GB/s" as per direction
    right = ridge_estimate(peak_flops=990e12, bandwidth=450e9, axis="data").threshold
    assert ridge_estimate(peak_flops=990e12, bandwidth=900e9, axis="data").threshold == right / 2


def test_experts_raise_the_threshold_and_few_devices_lower_it():
    estimate = ridge_estimate(peak_flops=990e12, bandwidth=450e9, axis="data", devices=2, experts=64, active_experts=8)
    assert estimate.threshold == 2200 / 2 * 8


def test_tensor_parallelism_is_bound_by_compute_below_f_over_the_ratio():
    # JAX scaling book: Y < F*W/C: F = 28672 on H100 NVLink: about 13
    assert ridge_estimate(peak_flops=990e12, bandwidth=450e9, axis="tensor", mlp_width=28672).threshold == pytest.approx(13.03, abs=0.01)


def test_both_axes_together_need_fewer_tokens():
    both = ridge_estimate(peak_flops=990e12, bandwidth=450e9, axis="data-tensor", mlp_width=28672)
    assert both.threshold == pytest.approx(4 * 2200**2 / 28672)
    assert both.threshold < 2200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"peak_flops": -1}, "peak-flops=-1"),
        ({"axis": "tenser"}, "unknown axis 'tenser'; did you mean 'tensor'"),
        ({"axis": "tensor"}, "needs mlp-width"),
        ({"axis": "tensor", "mlp_width": 0}, "mlp-width=0"),
        ({"axis": "data", "experts": 4, "active_experts": 8}, "active-experts=8: at most experts=4"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        ridge_estimate(**({"peak_flops": 990e12, "bandwidth": 450e9} | change))
