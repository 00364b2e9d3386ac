"""Failures and checkpoint intervals: Young's optimum is one, rates add, published fleets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.failures import (
    DEFAULT_NODE_MTBF_HOURS,
    PUBLISHED_FAILURES_PER_NODE_DAY,
    checkpoint_plan,
    fleet_mtbf_s,
    goodput,
    overhead_fraction,
)


def test_rates_add():
    assert fleet_mtbf_s([(1, 100)]) == 360_000
    assert fleet_mtbf_s([(10, 100)]) == 36_000
    assert fleet_mtbf_s([(2, 100), (1, 50)]) == pytest.approx(3600 / (2 / 100 + 1 / 50))


def test_llama_3_saw_a_failure_every_2_8_hours():
    # 466 interruptions in 54 days on 16,384 GPUs, 8 to a node
    per_node_hours = 54 * 24 / 466 * 2048
    assert fleet_mtbf_s([(2048, per_node_hours)]) / 3600 == pytest.approx(2.78, abs=0.01)
    # the default is the median of the published rates, and within their range, of which this fleet is one
    rates = sorted(PUBLISHED_FAILURES_PER_NODE_DAY.values())
    assert rates[0] < 24 / DEFAULT_NODE_MTBF_HOURS < rates[-1]
    assert rates[0] <= 24 / per_node_hours <= rates[-1]


def test_young():
    plan = checkpoint_plan(save_s=60, mtbf_s=12 * 3600)
    assert plan.interval_s == pytest.approx(math.sqrt(2 * 60 * 43200))
    assert plan.overhead_fraction == pytest.approx(60 / plan.interval_s + plan.interval_s / (2 * 43200))


@given(st.floats(0.1, 1e4), st.floats(3, 1e4), st.floats(0.1, 10))
def test_no_other_interval_costs_less(save_s, mtbf_over_save, factor):
    mtbf = save_s * mtbf_over_save
    plan = checkpoint_plan(save_s=save_s, mtbf_s=mtbf)
    other = overhead_fraction(save_s=save_s, mtbf_s=mtbf, interval_s=plan.interval_s * factor)
    assert plan.overhead_fraction <= other * (1 + 1e-12)


@given(st.floats(1, 600), st.floats(3600, 1e7), st.floats(60, 1e5), st.floats(0, 3600))
def test_goodput_is_a_share_and_falls_with_restart_time(save_s, mtbf_s, interval_s, restart_s):
    value = goodput(save_s=save_s, mtbf_s=mtbf_s, interval_s=interval_s, restart_s=restart_s)
    assert 0 <= value < 1
    assert goodput(save_s=save_s, mtbf_s=mtbf_s, interval_s=interval_s, restart_s=restart_s + 60) <= value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoint_plan(save_s=0, mtbf_s=10), "save-s=0"),
        (lambda: checkpoint_plan(save_s=1, mtbf_s=-10), "mtbf-s=-10"),
        (lambda: checkpoint_plan(save_s=100, mtbf_s=100), "less than half the time between failures \\(50 s\\)"),
        (lambda: fleet_mtbf_s([]), "at least one COUNT:MTBF_HOURS"),
        (lambda: fleet_mtbf_s([(0, 100)]), "fleet count=0"),
        (lambda: fleet_mtbf_s([(1, 0)]), "fleet MTBF_HOURS=0"),
    ],
)
def test_nonsense_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
