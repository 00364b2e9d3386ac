"""From a step to money, failures and the scaling table."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.economics import estimate_run, state_bytes
from ridgeline.planner.hardware import hardware
from ridgeline.planner.layouts import Layout, dividing_nodes
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.parameters import count_parameters
from ridgeline.planner.plan import make_plan
from ridgeline.planner.policy import LEAST_INTERVAL_S
from ridgeline.planner.scaling import WORTHWHILE, ScalePoint, scaling_table, stopping_scale, worth_until
from ridgeline.planner.search import Limits, search
from tests.planner.clusters import CALIBRATION, cluster, config

TOKENS = 1e11


def run(layout=None, made=None, step_s=1.0, tokens=TOKENS, nodes=1, model=None):
    layout, made = layout or Layout(1, 8, 1), made or cluster()
    chosen = layout.apply(model or config())
    return estimate_run(chosen, LocalSizes.of(chosen, layout.sizes), step_s, made, hardware(made.device), tokens, nodes)


def test_days_hours_and_money_follow_from_the_step():
    made = run(tokens=128 * 4096 * 3600, step_s=2.0)
    assert made.steps == 3600
    assert made.days == pytest.approx(2 / 24)
    assert made.device_hours == pytest.approx(16)
    assert made.cost_usd == pytest.approx(48.0)
    assert made.device_energy_kwh == pytest.approx(made.wall_device_hours * 0.7)
    assert made.energy_kwh == pytest.approx(made.wall_device_hours * 0.7 * 1.2)


def test_failures_and_saves_only_add():
    made = run(tokens=1e12, step_s=30.0, nodes=64)
    assert 0 < made.goodput < 1
    assert made.wall_days == pytest.approx(made.days / made.goodput)
    assert made.wall_cost_usd > made.cost_usd
    assert made.expected_failures == pytest.approx(made.wall_days * 24 / made.mtbf_hours)
    assert made.mtbf_hours == pytest.approx(run(nodes=1).mtbf_hours / 64)


@given(st.integers(1, 500))
def test_more_nodes_fail_more_often_and_are_saved_no_less_often(nodes):
    few, many = run(nodes=nodes), run(nodes=2 * nodes)
    assert many.mtbf_hours < few.mtbf_hours
    assert LEAST_INTERVAL_S <= many.checkpoint_interval_s <= few.checkpoint_interval_s
    assert many.goodput <= few.goodput


def test_storage_of_a_scalable_unit_grows_with_the_job_beyond_it():
    slow = {"read_gb_per_s": 0.1, "write_gb_per_s": 0.05}
    unit, whole = (cluster(storage=slow | more) for more in ({"nodes": 32}, {}))
    for nodes, factor in ((1, 1), (32, 1), (48, 1.5), (320, 10)):
        for rate in ("read_bytes_per_s", "write_bytes_per_s"):
            assert getattr(unit.storage, rate)(nodes) == pytest.approx(factor * getattr(whole.storage, rate)(nodes))
    assert run(made=unit, nodes=8) == run(made=whole, nodes=8)
    assert run(made=unit, nodes=320).goodput > run(made=whole, nodes=320).goodput


def test_a_checkpoint_is_parameters_and_moments():
    assert state_bytes(config()) == 12 * count_parameters(config().model).total


def test_a_cluster_without_a_price_has_the_catalogs():
    assert run(made=cluster(price_per_device_hour_usd=None)).cost_usd == pytest.approx(
        run().device_hours * hardware("h100-sxm").price_per_hour_usd
    )


def test_parallel_efficiency_is_throughput_per_device_against_the_smallest_that_works():
    scales = search(config("models/llama-3.1-70b", rows=64), cluster(), CALIBRATION, [1, 4, 8, 16], TOKENS)
    rows = scaling_table(scales, Limits())
    assert rows[0].best is None and "more than the" in rows[0].outside  # one node cannot hold it
    assert rows[1].efficiency == 1 and rows[1].marginal_efficiency is None
    for row in rows[2:]:
        assert row.efficiency == pytest.approx(row.best.step.tokens_per_s_per_device / rows[1].best.step.tokens_per_s_per_device)
        assert row.marginal_efficiency <= 1.5


def test_time_stops_being_worth_it_where_a_doubling_gains_too_little():
    """A fixed batch of 64 rows: one row per device at 8 nodes; beyond, rows must be cut over tensor."""
    scales = search(config(rows=64, length=2048), cluster(), CALIBRATION, [1, 2, 4, 8, 16, 32], TOKENS)
    rows = scaling_table(scales, Limits())
    good, why = worth_until(rows, "time")
    beyond = [row for row in rows if row.nodes > good and row.best is not None]
    assert good < 32 and str(good) in why
    days = {row.nodes: row.best.run.wall_days for row in rows if row.best is not None}
    assert days[beyond[0].nodes] > days[good] * (1 - WORTHWHILE)
    kept = [nodes for nodes in days if nodes <= good]
    assert all(days[after] <= days[before] * (1 - WORTHWHILE) for before, after in pairwise(kept))


def test_cost_and_efficiency_stop_earlier_than_time():
    scales = search(config(rows=64, length=2048), cluster(), CALIBRATION, [1, 2, 4, 8, 16, 32], TOKENS)
    rows = scaling_table(scales, Limits())
    by_time, by_cost = worth_until(rows, "time")[0], worth_until(rows, "cost")[0]
    assert by_cost <= by_time and worth_until(rows, "efficiency")[0] <= by_time


# Impossible wishes.


def planned(model=None, made=None, nodes=(1, 2), **wishes):
    return make_plan(model or config(rows=64), made or cluster(), CALIBRATION, nodes, tokens=TOKENS, **wishes)


def test_a_budget_that_is_too_small_gets_the_cheapest_plan_and_what_it_pays_for():
    with pytest.raises(UserError, match=r"cheapest \(\d node.*times the budget of \$100; the budget pays for .* tokens"):
        planned(limits=Limits(budget_usd=100))


def test_a_deadline_that_is_too_early_gets_the_fastest_plan():
    with pytest.raises(UserError, match=r"fastest \(2 nodes.*times the deadline of 0\.001"):
        planned(limits=Limits(deadline_days=0.001))


def test_a_budget_and_a_deadline_that_exclude_each_other_are_reported_apart():
    everything = planned()
    cheapest = min(c.run.wall_cost_usd for s in everything.scales for c in s.candidates)
    fastest = min(c.run.wall_days for s in everything.scales for c in s.candidates)
    if all(c.run.wall_days > fastest * 1.001 for s in everything.scales for c in s.candidates if c.run.wall_cost_usd <= cheapest * 1.0001):
        with pytest.raises(UserError, match="cheapest within the deadline"):
            planned(limits=Limits(budget_usd=cheapest * 1.0001, deadline_days=fastest * 1.001))


def test_a_model_that_is_too_large_gets_the_missing_memory_and_the_nearest_number_of_nodes():
    with pytest.raises(UserError, match=r"GB more than the .* GB.*Nearest at this batch: 4 nodes"):
        planned(config("models/llama-3.1-70b", rows=64), nodes=(1, 2))


@pytest.mark.parametrize(("name", "rows", "wanted"), [("8b", 1024, 125), ("70b", 2500, 1250)])
def test_nodes_that_do_not_divide_the_batch_get_a_batch_that_works_with_its_cost(name, rows, wanted):
    model, made = f"models/llama-3.1-{name}", cluster(nodes=None)
    with pytest.raises(UserError, match=r"no layout .*with data\.batch_size=\d+: [\d,]+ nodes") as error:
        planned(config(model, rows=rows), made, nodes=(wanted,))
    found = re.findall(r"with data\.batch_size=(\d+): ([\d,]+) nodes", str(error.value))[0]
    other, nodes = (int(text.replace(",", "")) for text in found)
    assert 0.95 * wanted < nodes <= wanted
    best = planned(config(model, rows=other), made, nodes=(nodes,)).best[0]
    cost = f"{best.step.tokens_per_s:.3g} tokens/s, {best.run.wall_days:.3g} days, {best.run.wall_cost_usd:,.0f} USD"
    unused = f"; {wanted - nodes:,} of {wanted:,} nodes unused, {1 - nodes / wanted:.1%}" if nodes < wanted else ""
    assert f"{cost}{unused})" in str(error.value)


def test_the_node_counts_that_divide_the_batch_are_those_with_a_mesh_that_divides():
    model = config(rows=24, length=512)
    scales = search(model, cluster(devices_per_node=4, nodes=None), CALIBRATION, range(1, 26), TOKENS)
    dividing = dividing_nodes(model, 4, 25)
    within_nodes = [scale for scale in scales if any(candidate.layout.tensor <= 4 for candidate in scale.candidates)]
    assert {scale.nodes for scale in within_nodes} <= dividing
    assert {1, 2, 3, 6, 12, 24} <= dividing and not {5, 7, 25} & dividing


@pytest.mark.parametrize("seed", range(40))
def test_a_scale_that_gains_little_is_passed_over_where_a_larger_one_gains_enough(seed):
    """The independent rule: from the stop, no larger scale gains 10 % per doubling; the stop itself is reached by such gains."""
    rng = random.Random(seed)
    scales = sorted(rng.sample(range(1, 40), rng.randint(1, 8)))
    points = [ScalePoint(s, rng.uniform(0.8, 1.6) * s**-0.8, 1.0, rng.uniform(0.5, 1.0)) for s in scales]

    def gains(a, b):
        return b.time / a.time <= 0.9 ** math.log2(b.scale / a.scale)

    stop, reason = stopping_scale(points, "time")
    at = next(p for p in points if p.scale == stop)
    assert not any(gains(at, later) for later in points if later.scale > stop)
    reached = {points[0].scale}
    for p in points[1:]:
        if any(gains(q, p) for q in points if q.scale in reached):
            reached.add(p.scale)
    assert (stop in reached and "%" in reason) or len(points) == 1
    efficient, _ = stopping_scale(points, "efficiency")
    assert efficient == max(p.scale for i, p in enumerate(points) if i == 0 or p.efficiency >= 0.8)


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"no mesh divides: .*data\.batch_size=7"):
        planned(config("models/llama-3.2-1b", rows=7), cluster(devices_per_node=5), nodes=(1,))


def test_more_nodes_than_the_cluster_has_are_refused():
    with pytest.raises(UserError, match=r"--nodes 5: cluster 'planted'.* 4 nodes"):
        planned(made=cluster(nodes=4), nodes=(2, 5))
