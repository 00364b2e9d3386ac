"""Metric names, the step timer and evaluation metrics."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.observe.step_timer import StepTimer, evaluation_metrics, memory_metrics, perplexity
from ridgeline.rundir.metrics import METRICS, metric, metrics_table
from ridgeline.rundir.noise import percentile


class Clock:
    """A clock the test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def timer(clock, **kwargs):
    settings = {"tokens_per_step": 1000, "num_devices": 4, "flops_per_token": 2e9, "peak_flops": 1e13}
    return StepTimer(**(settings | kwargs), clock=clock)


def test_the_documented_table_is_the_one_in_the_code():
    assert (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text() == metrics_table()


def test_every_name_is_found_and_a_set_name_stands_for_any_set():
    for name in METRICS:
        assert metric(name) is METRICS[name]
    assert metric("eval/my-set.2/loss") is METRICS["eval/<set>/loss"]
    for name in ("train/lost", "loss", "eval/a/b/loss", "eval/x/lost"):
        with pytest.raises(AssertionError, match=name):
            metric(name)


def test_the_step_times_of_a_window_give_speed_and_mfu():
    clock = Clock()
    steps = timer(clock)
    clock.now_s += 50  # compilation
    steps.start()
    durations = [1.0, 2.0, 1.5, 3.5]
    for duration_s in durations:
        steps.waited(0.25)
        clock.now_s += duration_s
        steps.step()
    assert steps.window_steps == 4
    assert steps.window_data_wait_s == pytest.approx(1.0)
    report = steps.report()
    assert report["train_speed/step_time_mean_s"] == pytest.approx(2.0)
    assert report["train_speed/step_time_p50_s"] == pytest.approx(np.percentile(durations, 50))
    assert report["train_speed/step_time_p95_s"] == pytest.approx(np.percentile(durations, 95))
    assert report["train_speed/step_time_max_s"] == pytest.approx(3.5)
    assert report["train_speed/data_wait_s"] == pytest.approx(0.25)
    assert report["train_speed/data_wait_fraction"] == pytest.approx(1 / 8)
    assert report["train_speed/tokens_per_s"] == pytest.approx(500)
    assert report["train_speed/tokens_per_s_per_device"] == pytest.approx(125)
    assert report["train_speed/tflop_per_s_per_device"] == pytest.approx(0.25)
    assert report["train_speed/mfu"] == pytest.approx(0.25e12 / 1e13)
    assert all(metric(name) for name in report)


def test_a_window_holds_only_its_own_steps():
    clock = Clock()
    steps = timer(clock)
    for duration_s in (4.0, 1.0):
        clock.now_s += duration_s
        steps.step()
        last = steps.report()
    assert last["train_speed/step_time_mean_s"] == pytest.approx(1.0)
    assert last["train_speed/data_wait_s"] == 0
    assert steps.report() == {}


def test_paused_time_belongs_to_no_step():
    clock = Clock()
    steps = timer(clock)
    clock.now_s += 1
    with steps.paused():
        clock.now_s += 30
        with steps.paused():
            clock.now_s += 30
    clock.now_s += 1
    assert steps.step() == pytest.approx(2.0)
    clock.now_s += 1.5
    assert steps.step() == pytest.approx(1.5)
    with steps.paused(), pytest.raises(AssertionError, match="inside a pause"):
        steps.step()


def test_a_pause_ends_when_its_block_raises():
    clock = Clock()
    steps = timer(clock)

    def fail():
        clock.now_s += 5
        raise RuntimeError

    with pytest.raises(RuntimeError), steps.paused():
        fail()
    clock.now_s += 1
    assert steps.step() == pytest.approx(1.0)


def test_beginning_a_step_anew_keeps_the_window():
    clock = Clock()
    steps = timer(clock)
    clock.now_s += 2
    steps.step()
    clock.now_s += 60
    steps.begin_step()
    clock.now_s += 4
    steps.step()
    assert steps.report()["train_speed/step_time_mean_s"] == pytest.approx(3.0)


def test_a_run_in_fp8_is_held_against_both_peaks():
    clock = Clock()
    steps = timer(clock, float8_peak_flops=4e13)
    clock.now_s += 2.0
    steps.step()
    report = steps.report()
    assert report["train_speed/mfu"] == pytest.approx(4 * report["train_speed/mfu_float8"])
    assert report["train_speed/mfu"] == pytest.approx(0.25e12 / 1e13)


def test_an_unknown_device_has_no_mfu_and_unknown_flops_no_tflops():
    clock = Clock()
    for kwargs, absent in (
        ({"peak_flops": None}, {"train_speed/mfu", "train_speed/mfu_float8"}),
        ({"flops_per_token": None}, {"train_speed/mfu", "train_speed/mfu_float8", "train_speed/tflop_per_s_per_device"}),
    ):
        steps = timer(clock, **kwargs)
        clock.now_s += 1
        steps.step()
        assert {n for n in METRICS if n.startswith("train_speed/")} - steps.report().keys() == absent


def test_published_utilization_is_reproduced():
    # 7e9 parameters at 150k tokens/s on 64 H100, 6 FLOPs per parameter and token: 9.95 %
    clock = Clock()
    steps = timer(clock, tokens_per_step=150_000, num_devices=64, flops_per_token=6 * 7e9, peak_flops=989.4e12)
    clock.now_s += 1
    steps.step()
    assert steps.report()["train_speed/mfu"] == pytest.approx(0.0995, abs=5e-5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, 100 * share), rel=1e-9, abs=1e-9)


def test_evaluation_metrics_of_uniform_bytes():
    values = evaluation_metrics("val", nats=100 * math.log(256), tokens=100, correct=25, text_bytes=100, duration_s=2.0)
    assert values["eval/val/loss"] == pytest.approx(math.log(256))
    assert values["eval/val/perplexity"] == pytest.approx(256)
    assert values["eval/val/bits_per_byte"] == pytest.approx(8)
    assert values["eval/val/accuracy"] == 0.25
    assert values["eval/val/tokens"] == 100
    assert values["eval/val/duration_s"] == 2.0
    assert all(metric(name) for name in values)
    assert "eval/val/bits_per_byte" not in evaluation_metrics("val", nats=1.0, tokens=1)
    with pytest.raises(AssertionError, match="no target tokens"):
        evaluation_metrics("val", nats=0.0, tokens=0)


def test_perplexity_of_an_absurd_loss_is_infinite_and_of_nan_nan():
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_memory_is_the_worst_local_device_and_absent_where_not_reported():
    stats = [{"peak_bytes_in_use": 5, "bytes_limit": 9}, {"peak_bytes_in_use": 7, "bytes_limit": 8}]
    assert memory_metrics(stats) == {"train_memory/peak_bytes": 7.0, "train_memory/limit_bytes": 8.0}
    assert memory_metrics([None, None]) == {}
