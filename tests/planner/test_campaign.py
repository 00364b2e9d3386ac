"""The simulation of a campaign against closed forms, and its accounting."""

from __future__ import annotations

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.planner.campaign.kinds import goes_on
from ridgeline.planner.campaign.model import CAUSES, Choice
from ridgeline.planner.campaign.search import best, in_repair, intervals
from ridgeline.planner.campaign.trials import daly_wall_s, simulate
from ridgeline.planner.failure_catalog import classes_of, measured_classes
from ridgeline.planner.policy import (
    PAUSE_S,
    QUICK_S,
    STRAGGLER_SHARE,
    configured_interval_s,
    elastic_size,
    requeue_pause_s,
    young_interval_s,
)
from ridgeline.rundir.goodput import CATEGORIES
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint.retention import Cadence
from tests.planner.campaigns import HOUR, campaign, failures
from tests.planner.clusters import cluster

ROOT = Path(__file__).resolve().parents[2]


def outcome(made, choice=Choice(HOUR, 0), trials=200, seed=0):  # noqa: B008 - frozen
    return simulate(made, [choice], trials=trials, seed=seed)[0]


@pytest.mark.parametrize(
    ("mtbf_h", "interval_min", "save_s", "restart_s"),
    [(24, 117, 300, 600), (6, 57, 300, 600), (6, 200, 300, 600), (3, 20, 60, 1800), (1.5, 90, 30, 900)],
)
def test_with_failures_alone_the_wall_time_is_that_of_dalys_formula(mtbf_h, interval_min, save_s, restart_s):
    """The mean of 400 trials lies within 4 standard errors. The pauses after quick failures, which the formula has not, are taken out."""
    interval_s = interval_min * 60.0
    work_s = 300 * interval_s
    made = campaign(failures(mtbf_h * HOUR), work_s=work_s, save_s=save_s, restore_s={"shared": restart_s, "local": 0.0})
    found = outcome(made, Choice(interval_s, 0), trials=400)
    wall_s = found.wall_s - found.seconds["queue"]
    expected_s = daly_wall_s(work_s=work_s, interval_s=interval_s, save_s=save_s, restart_s=restart_s, mtbf_s=mtbf_h * HOUR)
    error_s = wall_s.std(ddof=1) / math.sqrt(400)
    assert abs(wall_s.mean() - expected_s) < 4 * error_s
    assert error_s < 0.01 * expected_s


@pytest.mark.parametrize(("mtbf_h", "daly_min"), [(24, 117), (6, 57)])
def test_the_best_interval_is_dalys_and_near_youngs(mtbf_h, daly_min):
    """Daly 2006, figures 3 and 4: 500 h of work, saves of 5 minutes, restarts of 10: 117 and 57 minutes."""
    made = campaign(failures(mtbf_h * HOUR), restore_s={"shared": 600.0, "local": 1e9}, write_s={"shared": 0.0, "local": 1e9})
    tried = [Choice(daly_min * 60 * factor, 0) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    walls = [found.wall_s.mean() for found in simulate(made, tried, trials=300, seed=1)]
    assert np.argmin(walls) == 2
    assert daly_min * 60 == pytest.approx(young_interval_s(300, mtbf_h * HOUR), rel=0.06)
    assert 0.5 <= best(made).same_tier.interval_s / (daly_min * 60) <= 2


@given(st.floats(0.1, 300), st.floats(0, 600), st.floats(60, 1e5))
@settings(max_examples=30, deadline=None)
def test_without_failures_only_saves_cost(work_h, save_s, interval_s):
    found = outcome(campaign(work_s=work_h * HOUR, save_s=save_s), Choice(interval_s, 0), trials=2)
    saves = max(1, math.ceil(work_h * HOUR / interval_s - 1e-9))
    assert found.wall_s == pytest.approx(work_h * HOUR + saves * save_s)
    assert found.goodput == pytest.approx(work_h * HOUR / (work_h * HOUR + saves * save_s))
    assert found.interruptions.sum() == 0


def test_the_same_seed_gives_the_same_campaigns_and_another_one_others():
    made = campaign(failures(5 * HOUR))
    first, again, other = outcome(made), outcome(made), outcome(made, seed=1)
    assert np.array_equal(first.wall_s, again.wall_s)
    assert not np.array_equal(first.wall_s, other.wall_s)
    assert simulate(made, [Choice(60.0, 3), Choice(HOUR, 0)], trials=200, seed=0)[1].wall_s == pytest.approx(first.wall_s)


@given(st.floats(1.0, 1e6), st.floats(10, 2000), st.floats(0, 300), st.floats(0, 300), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_starts_that_are_spared_until_their_first_save_never_fail_twice_without_one(mtbf_s, interval_s, save_s, write_s, seed):
    """So no pause is longer than the first, the job is never given up, and each start repeats less than an interval and a write."""
    writes = {"shared": write_s, "local": write_s}
    made = campaign(failures(mtbf_s), work_s=50 * interval_s, save_s=save_s, write_s=writes, startup_s=100.0, spared_until_save=True)
    found = outcome(made, Choice(interval_s, 0), trials=20, seed=seed)
    failed = found.interruptions
    assert np.all(np.isfinite(found.wall_s))
    assert not found.stops.any()
    assert np.all(failed <= 50)
    assert np.all(found.seconds["queue"] <= failed * (made.requeue_s + PAUSE_S) + 1e-6)
    assert np.all(found.seconds["lost"] <= failed * (interval_s + write_s) + 1e-6)
    assert found.seconds["startup"] == pytest.approx((failed + 1) * 100.0)


@given(st.lists(st.floats(1.0, 5e4), min_size=1, max_size=30), st.floats(10, 2000), st.booleans(), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_interruptions_of_a_schedule_come_at_its_times(gaps_s, interval_s, spared, seed):
    """All that are due before the work is done, each once; rates and chance play no part."""
    times_s = np.cumsum(gaps_s)
    schedule = tuple((float(time_s), "failure" if number % 3 else "preemption") for number, time_s in enumerate(times_s))
    change = {"startup_s": 50.0, "write_s": {"shared": 5.0, "local": 5.0}, "spared_until_save": spared, "save_s": 1.0}
    made = campaign(replace(failures(HOUR), per_component_hour=0.0), work_s=2e5, schedule=schedule, **change)
    found, again = (outcome(made, Choice(interval_s, 0), trials=3, seed=number) for number in (seed, seed + 1))
    assert np.ptp(found.wall_s) == 0 and np.array_equal(found.wall_s, again.wall_s)
    ran_s = float(sum(found.seconds[part][0] for part in ("productive", "lost", "checkpoint", "startup", "restore", "teardown")))
    met = int(found.interruptions[0])
    starts = met + 1
    exempt_s = starts * (50 + 600 + interval_s + 6) if spared else 0.0
    assert met <= len(schedule)
    assert met == 0 or times_s[met - 1] <= ran_s + 1e-6
    assert met == len(schedule) or times_s[met] >= ran_s - exempt_s - starts * 6 - 1e-6


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), min_size=1, unique=True))))
@settings(max_examples=60, deadline=None)
def test_the_job_goes_on_with_as_many_nodes_as_the_trainer_takes(made):
    nodes, sizes = made
    found = goes_on(sizes, nodes)
    assert list(found) == [elastic_size(sizes, nodes - missing) for missing in range(nodes + 1)]


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_choice_has_the_same_trials_alone_and_beside_others_that_end_earlier_or_later(seed):
    """Also with fewer nodes than the job, stragglers, limits and memory copies; to the bit."""
    source = np.random.default_rng(seed)
    made = campaign(
        failures(6 * HOUR, "replace", name="node"),
        failures(9 * HOUR, "restart", "watchdog"),
        failures(30 * HOUR, "wait", name="service"),
        failures(40 * HOUR, "planned", name="update"),
        work_s=60 * HOUR,
        nodes=8,
        repair_s=12 * HOUR,
        outage_s=2 * HOUR,
        startup_s=200.0,
        compile_s=100.0,
        straggler_per_s=1 / (20 * HOUR),
        straggler_excess=0.1,
        straggler_found_s=4 * HOUR,
        time_limit_s=20 * HOUR,
        queue_wait_s=300.0,
        max_restarts=5,
        resubmit_s=1800.0,
        sizes=(5, 6, 8),
    )
    choices = [
        Choice(float(source.uniform(400, 2 * HOUR)), int(source.integers(0, 3)), tier, elastic)
        for tier in ("shared", "local")
        for elastic in ("wait", "shrink")
    ]
    together = simulate(made, choices, trials=6, seed=seed)
    for choice, found in zip(choices, together, strict=True):
        [alone] = simulate(made, [choice], trials=6, seed=seed)
        for part, values in alone.seconds.items():
            assert np.array_equal(values, found.seconds[part]), part
        for kind, counts in alone.events.items():
            assert np.array_equal(counts, found.events[kind]), kind
        assert np.array_equal(alone.wall_s, found.wall_s) and np.array_equal(alone.device_s, found.device_s)
        assert np.array_equal(alone.stops, found.stops) and np.array_equal(alone.ended_s, found.ended_s)
    assert len({float(found.wall_s.max()) for found in together}) == len(choices)


def test_more_failures_cost_more_time():
    classes = (failures(40 * HOUR), failures(90 * HOUR, "replace", name="node"))
    walls = []
    for factor in (0.0, 0.5, 1.0, 2.0, 4.0):
        scaled = tuple(replace(one, per_component_hour=one.per_component_hour * factor) for one in classes)
        walls.append(outcome(campaign(*scaled, repair_s=4 * HOUR, requeue_s=60.0)).wall_s.mean())
    assert walls == sorted(walls) and walls[0] < 0.95 * walls[-1]


CLASSES = st.lists(
    st.tuples(st.floats(0.3, 50), st.sampled_from(["restart", "replace", "wait", "planned"]), st.sampled_from(["exit", "watchdog"])),
    max_size=4,
)
TIMES = st.sampled_from([0.0, 30.0, 400.0])


@given(
    classes=CLASSES,
    interval_s=st.floats(30, 5000),
    choice=st.tuples(st.integers(0, 3), st.sampled_from(["shared", "local"]), st.sampled_from(["wait", "shrink"])),
    work_h=st.floats(0.5, 60),
    times=st.fixed_dictionaries(
        dict.fromkeys(("save_s", "detection_s", "requeue_s", "startup_s", "compile_s", "repair_s", "outage_s", "resubmit_s"), TIMES)
        | {"queue_wait_s": TIMES, "time_limit_s": st.sampled_from([math.inf, 3000.0]), "grace_s": st.sampled_from([math.inf, 100.0])}
    ),
    writes=st.tuples(TIMES, TIMES),
    rest=st.fixed_dictionaries(
        {
            "max_restarts": st.sampled_from([None, 0, 3]),
            "preemptions_per_s": st.sampled_from([0.0, 1e-4]),
            "straggler_per_s": st.sampled_from([0.0, 1e-4]),
            "straggler_excess": st.sampled_from([0.05, 0.5]),
            "straggler_found_s": st.sampled_from([0.0, 2000.0]),
            "shared_every_s": st.sampled_from([100.0, 9000.0]),
            "sizes": st.sampled_from([(), (2, 4), (4,), (2, 3, 4)]),
        }
    ),
)
@settings(max_examples=40, deadline=None)
def test_the_parts_sum_to_the_wall_time_of_every_trial(classes, interval_s, choice, work_h, times, writes, rest):
    made_classes = [failures(hours * HOUR, after, by, f"class{i}") for i, (hours, after, by) in enumerate(classes)]
    written = dict(zip(("shared", "local"), writes, strict=True))
    made = campaign(*made_classes, work_s=work_h * HOUR, write_s=written, restore_s=written, **times, **rest)
    interval_s = max(interval_s, *writes)
    found = outcome(made, Choice(interval_s, *choice), trials=5)
    parts_s = np.array(list(found.seconds.values()))
    assert parts_s.sum(axis=0) == pytest.approx(found.ended_s, rel=1e-9, abs=1e-4)
    assert parts_s.min() > -1e-5
    ended = np.isfinite(found.wall_s)
    assert found.seconds["productive"][ended] == pytest.approx(made.work_s, rel=1e-9)
    assert np.all(found.goodput <= found.ledger_goodput + 1e-12)
    assert np.all(found.device_s[ended] <= (4 + choice[0]) * 8 * found.wall_s[ended] * (1 + 1e-12))
    if choice[2] == "wait":
        assert np.all(found.seconds["shrunk"] == 0)


def test_the_causes_have_the_names_of_the_run_ledger():
    assert set(CAUSES) - set(CATEGORIES) == {"straggler", "shrunk"}
    for cause in ("straggler", "shrunk"):
        assert "`ridge goodput` counts it as productive" in CAUSES[cause]


def test_without_a_spare_a_lost_node_costs_its_repair_and_with_one_nothing():
    made = campaign(failures(200 * HOUR, "replace"), repair_s=5 * HOUR, requeue_s=60.0)
    none, one = simulate(made, [Choice(HOUR, 0), Choice(HOUR, 1)], trials=100, seed=0)
    pauses_s = PAUSE_S * 50
    for found, each_s in ((none, 5 * HOUR), (one, 60.0)):
        alone = found.interruptions <= 1  # with several, one may fall into the repair of another
        assert alone.sum() > 10
        assert np.all(np.abs(found.seconds["queue"] - found.interruptions * each_s)[alone] <= pauses_s)
    assert np.all(one.wall_s <= none.wall_s + 1e-6)
    assert one.device_s.mean() / one.wall_s.mean() == pytest.approx(40)
    assert one.usd(2.0) == pytest.approx(40 * one.wall_s / HOUR * 2.0)


def test_a_job_that_shrinks_loses_the_share_of_the_missing_node_instead_of_waiting():
    made = campaign(failures(500 * HOUR, "replace"), repair_s=24 * HOUR, save_s=1.0)
    wait, shrink = simulate(made, [Choice(HOUR, 0), Choice(HOUR, 0, "shared", "shrink")], trials=300, seed=0)
    assert shrink.seconds["shrunk"].mean() > 0 == wait.seconds["shrunk"].mean()
    one = (shrink.interruptions == 2) & (shrink.events["grow"] == 1)  # lost one node, and grew again when it was back
    assert one.sum() > 20
    assert shrink.seconds["shrunk"][one] == pytest.approx(6 * HOUR, rel=0.01)  # a quarter of a day less the start
    assert shrink.wall_s.mean() < wait.wall_s.mean()


def test_the_job_is_not_requeued_more_often_than_the_job_script_does_it():
    made = campaign(failures(5 * HOUR), max_restarts=3, resubmit_s=7200.0)
    found = outcome(made, Choice(600.0, 0))
    assert np.array_equal(found.stops, found.interruptions // 4)
    assert np.all(found.seconds["queue"] >= found.stops * 7200)


def test_five_failures_without_a_checkpoint_stop_the_job():
    made = campaign(failures(2 * HOUR), work_s=40 * HOUR, save_s=0.0)
    often, seldom = simulate(made, [Choice(60.0, 0), Choice(4 * HOUR, 0)], trials=100, seed=0)
    assert often.stops.sum() == 0 < seldom.stops.sum()


@pytest.mark.parametrize("failures_in_a_row", [1, 2, 5])
def test_the_pause_is_that_of_the_job_script(failures_in_a_row):
    line = next(line for line in (ROOT / "launch/slurm/supervise.sh").read_text().splitlines() if "PAUSE=$((" in line)
    for ran_s in (QUICK_S - 1, QUICK_S):
        script = line.replace("@{quick_s}", str(QUICK_S)).replace("@{pause_s}", str(PAUSE_S))
        shell = f"PAUSE=0; BEGIN=0; END={ran_s}; FAILURES={failures_in_a_row}; {script.strip()}\necho $PAUSE"
        printed = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
        assert int(printed) == requeue_pause_s(failures_in_a_row, ran_s)


@pytest.mark.parametrize(("every", "minutes", "step_s"), [(10, 0, 30.0), (0, 7, 20.0), (50, 5, 10.0), (3, 60, 40.0)])
def test_the_configured_interval_is_that_of_the_trainers_saves(every, minutes, step_s):
    """Saves in a day of steps, by the trainer's own decision."""
    now_s = [0.0]
    config = CheckpointConfig(every=every, every_minutes=minutes, final=False)
    cadence = Cadence(config, lambda: now_s[0], Agreement("test"))
    saves = 0
    for step in range(1, int(86400 / step_s) + 1):
        now_s[0] += step_s
        if cadence.due(step, False):
            cadence.saved()
            saves += 1
    assert 86400 / saves == pytest.approx(configured_interval_s(config, step_s), rel=0.06)


def test_jobs_with_a_time_limit_save_and_wait_but_lose_nothing():
    made = campaign(work_s=100 * HOUR, time_limit_s=10 * HOUR, startup_s=360.0, save_s=36.0, queue_wait_s=1800.0)
    found = outcome(made, Choice(HOUR, 0), trials=50)
    assert np.all(found.seconds["lost"] == 0)
    assert set(found.interruptions) == {10}
    assert found.seconds["queue"].mean() == pytest.approx(11 * 1800, rel=0.2)
    assert found.device_s == pytest.approx(32 * (found.wall_s - found.seconds["queue"]))  # waiting is not paid


def test_a_planned_stop_with_too_little_grace_loses_its_steps():
    made = campaign(failures(5 * HOUR, "planned"), write_s={"shared": 200.0, "local": 0.0}, grace_s=600.0)
    enough, short = outcome(made), outcome(replace(made, grace_s=400.0))
    assert enough.seconds["lost"].sum() == 0 < short.seconds["lost"].sum()


def test_only_stragglers_above_the_diagnosis_threshold_are_found():
    made = campaign(straggler_per_s=1 / (100 * HOUR), straggler_found_s=3 * HOUR, save_s=0.0)
    small, large = (outcome(replace(made, straggler_excess=excess)) for excess in (STRAGGLER_SHARE - 0.01, STRAGGLER_SHARE))
    assert small.events["straggler"].sum() == 0 < large.events["straggler"].sum()
    mean_s = large.seconds["straggler"].sum() / large.events["straggler"].sum()
    assert mean_s == pytest.approx(3 * HOUR * (1 - 1 / 1.1), rel=0.02)
    assert small.seconds["straggler"].mean() > large.seconds["straggler"].mean()


def test_memory_copies_do_not_survive_the_loss_of_the_whole_job():
    local = Choice(600.0, 0, "local")
    made = campaign(failures(10 * HOUR), save_s=0.0, shared_every_s=4 * HOUR)
    kept, gone = outcome(made, local), outcome(replace(made, classes=(failures(10 * HOUR, "wait"),)), local)
    per_failure = [found.seconds["lost"].sum() / found.interruptions.sum() for found in (kept, gone)]
    assert per_failure[0] == pytest.approx(300, rel=0.1)
    assert 0.7 * 2 * HOUR < per_failure[1] < 1.05 * 2 * HOUR


def test_hangs_take_the_watchdogs_limit():
    found = outcome(campaign(failures(50 * HOUR, found_by="watchdog"), detection_s=5.0))
    assert found.seconds["hang"] == pytest.approx(found.interruptions * 1800)


def test_a_job_that_never_gets_to_a_checkpoint_never_ends():
    found = outcome(campaign(failures(60.0), work_s=5 * HOUR), trials=4)
    assert np.all(np.isinf(found.wall_s)) and np.all(found.goodput < 0.05)


def test_spares_of_the_search_are_enough_at_their_quantile():
    made = campaign(failures(5 * HOUR, "replace"), repair_s=20 * HOUR)
    rng = np.random.default_rng(0)
    away = rng.poisson(4.0, 200_000)
    for quantile in (0.5, 0.9, 0.99):
        spares = in_repair(made, quantile)
        assert (away <= spares).mean() >= quantile - 0.003 and (away < spares).mean() < quantile + 0.003
    assert in_repair(campaign(), 0.99) == 0


def test_the_search_finds_the_best_of_what_it_tries():
    made = campaign(failures(10 * HOUR), failures(30 * HOUR, "replace", name="node"), work_s=300 * HOUR, repair_s=24 * HOUR, save_s=30.0)
    found = best(made, objective="time").same_tier
    grid = [Choice(interval_s, spares) for interval_s in intervals(made, "shared") for spares in (0, 1, 2, 4)]
    walls = {o.choice: o.wall_s.mean() for o in simulate(made, [found, *grid], trials=200, seed=5)}
    assert walls[found] <= 1.01 * min(walls.values())


def test_rates_scale_with_the_parts_and_the_cluster():
    classes = measured_classes()
    small, large = (sum(one.per_hour(nodes, 8) for one in classes if one.per != "job") for nodes in (100, 300))
    assert large == pytest.approx(3 * small)
    scaled = classes_of(cluster(node_mtbf_hours=1000.0))
    assert sum(one.per_hour(2048, 8) for one in scaled) == pytest.approx(2048 / 1000)
