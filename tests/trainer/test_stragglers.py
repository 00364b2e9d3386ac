"""Naming slow ranks: the statistic on drawn and recorded times, the clocks, and what is reported."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from ridgeline.configs.fault_schema import StragglersConfig
from ridgeline.rundir.bad_nodes import add_bad_nodes, read_bad_nodes
from ridgeline.rundir.device_state import DeviceState
from ridgeline.rundir.events import EventLog, read_events
from ridgeline.trainer.stragglers import (
    HISTORY,
    PROBE_EVERY,
    PROBE_SHARE,
    PUBLISH_EVERY,
    WINDOW,
    ComputeClock,
    Probe,
    Stragglers,
    error_share,
    excesses,
    probe_interval,
    slow_ranks,
    state_text,
)

THRESHOLD, START = 0.1, 30
SLOWED = Path(__file__).with_name("own_times_slowed.json")
"""The same of a larger model, of a run without a slow rank (`clean`), and of one whose process 1 was `slowed` by straggler_run.py: "from"
that index on by the "share" of each of its steps. Recorded at a load of 8 to 14 on two cores."""
RECORDED = Path(__file__).with_name("own_times.json")
"""Own times in ms of two processes that train one small model on two shared cores of a loaded machine (load 8 to 10), neither slowed."""


def names(series: dict[str, np.ndarray]) -> list[tuple[int, set[str]]]:
    """Return step -> slow ranks, at each step at which process 0 compares."""
    found = []
    for step in range(PUBLISH_EVERY, len(next(iter(series.values()))) + 1, PUBLISH_EVERY):
        times = {name: dict(enumerate(map(float, own[:step]))) for name, own in series.items()}
        found.append((step, set(slow_ranks(excesses(times, WINDOW), THRESHOLD)[1])))
    return found


def drawn(seed: int, steps: int, noise: float) -> dict[str, np.ndarray]:
    """Return times of 2 to 16 ranks: steps that differ for all ranks alike, and noise of each rank."""
    source = np.random.default_rng(seed)
    usual = source.uniform(0.05, 2) * np.exp(source.normal(0, 0.2, steps))
    return {f"process {i}": usual * np.exp(source.normal(0, noise, steps)) for i in range(source.integers(2, 17))}


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_slowed_by_10_to_16_per_cent_is_named_within_20_steps_and_no_other(seed: int) -> None:
    source = np.random.default_rng(100 + seed)
    series, slow = drawn(seed, START + 30, source.uniform(0, 0.03)), source.uniform(1.1, 1.16)
    series["process 1"][START:] *= slow
    found = names(series)
    assert not set.union(*(ranks for step, ranks in found if step <= START))
    assert {"process 1"} == set.union(*(ranks for step, ranks in found if step <= START + 20))


@pytest.mark.parametrize("seed", range(8))
def test_no_rank_is_named_without_cause_in_300_steps(seed: int) -> None:
    series = drawn(seed, 300, np.random.default_rng(seed).uniform(0, 0.05))
    series["process 0"][::50] *= 3  # slow steps now and then, as those of log lines and saves
    assert not set.union(*(ranks for _, ranks in names(series)))


def test_recorded_noise_names_no_rank() -> None:
    recorded = {name: np.array(own) for name, own in json.loads(RECORDED.read_text()).items()}
    assert all(len(own) > 100 for own in recorded.values())
    assert not set.union(*(ranks for _, ranks in names(recorded)))
    recorded["process 1"][START:] *= 1.5
    assert {"process 1"} in [ranks for step, ranks in names(recorded) if step <= START + 20]


def steps_until_named(series: dict[str, np.ndarray], start: int, most: int) -> int | None:
    """Return after how many slow steps `process 1` and no other is named; None: not within `most`."""
    for slow in range(PUBLISH_EVERY - start % PUBLISH_EVERY, most + 1, PUBLISH_EVERY):
        newest = range(max(0, start + slow - HISTORY), start + slow)
        times = {name: {step: float(own[step]) for step in newest} for name, own in series.items()}
        if named := set(slow_ranks(excesses(times, WINDOW), THRESHOLD)[1]):
            return slow if named == {"process 1"} else None
    return None


@pytest.mark.parametrize(("slow", "least"), [(1.10, 0.95), (1.11, 0.98), (1.12, 0.98), (1.14, 0.98), (1.16, 0.98)])
def test_10_to_16_per_cent_are_named_within_20_steps_of_recorded_noise(slow: float, least: float) -> None:
    """At 100 drawn places of a record of 890 steps, of two ranks at a load of 8 to 14: which one is slow is drawn."""
    source = np.random.default_rng(16)
    clean = [np.array(own) for own in json.loads(SLOWED.read_text())["clean"].values()]
    found = []
    for _ in range(100):
        begin, first = int(source.integers(0, len(clean[0]) - 80)), int(source.integers(2))
        others, own = (clean[index][begin : begin + 80].copy() for index in (first, 1 - first))
        own *= np.median(others / own)  # what it is slower by is all that it is slower by
        own[40:] *= slow
        found.append(steps_until_named({"process 0": others, "process 1": own}, 40, 20) is not None)
    assert np.mean(found) >= least


def test_the_record_names_no_rank_before_it_is_slowed() -> None:
    recorded = json.loads(SLOWED.read_text())
    clean = {name: np.array(own) for name, own in recorded["clean"].items()}
    assert not set.union(*(ranks for _, ranks in names(clean)))
    slowed, start = recorded["slowed"], recorded["slowed"]["from"]
    assert not set.union(*(ranks for _, ranks in names({name: np.array(slowed[name][:start]) for name in clean})))


def drawn_logs(kind: str, source: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return logarithms of ratios of two ranks without a slow one, with noise of 8.5 %."""
    noise = 0.06 * np.sqrt(2)
    if kind == "heavy tails":
        return np.asarray(source.standard_t(3, shape) * 0.8 * noise)
    if kind == "slow steps":
        long = np.log1p(source.uniform(0, 1, (2, *shape)) * (source.random((2, *shape)) < 0.05))
        return np.asarray(source.normal(0, noise, shape) + long[0] - long[1])
    if kind == "shared edges":  # what one step has too much, the next has too little
        return np.diff(source.normal(0, noise / np.sqrt(2), (shape[0], shape[1] + 1)))
    logs = source.normal(0, noise, shape)
    for step in range(1, shape[1] if kind == "lasting" else 0):
        logs[:, step] = 0.4 * logs[:, step - 1] + np.sqrt(1 - 0.4**2) * logs[:, step]
    return logs


@pytest.mark.parametrize(
    ("kind", "share", "most", "least"),
    [
        ("independent", (0.9, 1.05), 8e-4, 0.6),
        ("heavy tails", (0.9, 1.05), 8e-4, 0.5),
        ("slow steps", (0.9, 1.05), 8e-4, 0.4),
        ("lasting", (1.1, 1.35), 6e-3, 0.4),
        ("shared edges", (0.45, 0.65), 1e-4, 0.95),
    ],
)
def test_the_error_follows_how_successive_steps_are_related(kind: str, share: tuple[float, float], most: float, least: float) -> None:
    """In 20,000 drawn windows: false alarms at most as often as stated, and 10 % found at least as often."""
    logs = drawn_logs(kind, np.random.default_rng(3), (20_000, HISTORY))
    assert share[0] <= float(np.mean(error_share(logs, WINDOW))) <= share[1]

    def named(slower: float) -> float:
        found = {str(number): np.expm1(row) for number, row in enumerate(logs + slower)}
        return len(slow_ranks(found, THRESHOLD)[1]) / len(logs)

    assert named(0.0) <= most
    assert named(np.log(1.1)) >= least


@pytest.mark.parametrize("behind", range(WINDOW))
def test_all_of_the_history_is_common_where_a_process_is_behind(behind: int, tmp_path: Path) -> None:
    recorder: Any = SimpleNamespace(events=None, progress=SimpleNamespace(note=print), timer=None, writer=None)
    clock = itertools.count()
    published = []
    for steps in (100, 100 - behind):
        hook = Stragglers(
            StragglersConfig(threshold=THRESHOLD),
            recorder,
            SimpleNamespace(newest=[]),  # type: ignore[arg-type]
            None,
            "r.0",
            tmp_path,
            cpu_clock=lambda: float(next(clock)),
        )
        hook.close(0)
        for step in range(1, steps + 1):
            hook.on_result(SimpleNamespace(step=step, first=step == 1, duration_s=0.1, param_norm=None))  # type: ignore[arg-type]
        published.append({step: own[0] for step, own in hook._own})
    found = excesses({"a": published[0], "b": published[1]}, WINDOW)
    assert [len(values) for values in found.values()] == [HISTORY, HISTORY]


def test_equal_times_have_no_relation() -> None:
    assert error_share(np.zeros((2, WINDOW)), WINDOW).tolist() == [1.0, 1.0]
    assert error_share(np.zeros((1, HISTORY)), WINDOW // PROBE_EVERY).tolist() == [1.0]


def test_ranks_are_compared_at_the_steps_that_all_have() -> None:
    own = dict.fromkeys(range(40), 1.0)
    assert excesses({"a": own}, 5) == {}
    assert excesses({"a": own, "b": dict.fromkeys(range(36, 44), 2.0)}, 5) == {}
    found = excesses({"a": own, "b": dict.fromkeys(range(35, 44), 2.0), "c": own}, 5)
    assert list(found) == ["a", "b", "c"]
    np.testing.assert_allclose(np.array(list(found.values())), [[-1 / 3] * 5, [1.0] * 5, [-1 / 3] * 5])


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64, 301])
def test_a_rank_is_compared_with_the_median_of_the_others(ranks: int) -> None:
    own = np.random.default_rng(ranks).uniform(0.1, 0.2, (ranks, 6)).round(2)  # with equal times
    found = excesses({str(rank): dict(enumerate(map(float, times))) for rank, times in enumerate(own)}, 6)
    expected = [times / np.median(np.delete(own, rank, 0), 0) - 1 for rank, times in enumerate(own)]
    np.testing.assert_allclose(np.array(list(found.values())), expected, atol=1e-12)


@pytest.mark.parametrize(("noise", "least"), [(0.03, 0.95), (0.05, 0.7), (0.06, 0.6)])
def test_12_per_cent_are_found_in_noise_that_is_half_as_large(noise: float, least: float) -> None:
    """Of 600 drawn pairs of ranks, with a step in twenty up to twice as long; the noise is that of one rank's steps."""
    source, shape = np.random.default_rng(7), (600, 2, WINDOW)

    def named(slower: float) -> float:
        own = np.exp(source.normal(0, noise, shape)) * (1 + source.uniform(0, 1, shape) * (source.random(shape) < 0.05))
        own[:, 1] *= 1 + slower
        pairs = ({"a": dict(enumerate(map(float, one[0]))), "b": dict(enumerate(map(float, one[1])))} for one in own)
        return float(np.mean(["b" in slow_ranks(excesses(pair, WINDOW), THRESHOLD)[1] for pair in pairs]))

    assert named(0.12) >= least
    assert named(0.0) <= 0.005


def test_computing_counts_and_waiting_does_not() -> None:
    def compute() -> None:
        start_s = time.thread_time()
        while time.thread_time() - start_s < 0.2:
            pass

    clock = ComputeClock()
    start_s = clock()
    compute()
    own_s = clock() - start_s
    assert own_s >= 0.19
    other = threading.Thread(target=compute)  # as the thread of gloo, which polls
    other.start()
    other.join()
    assert clock() - start_s < own_s + 0.1
    x = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))(np.full((600, 600), 1 / 600, np.float32))
    before_s = clock()
    jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))(x))
    assert clock() > before_s


def test_the_probe_times_every_local_device() -> None:
    times = Probe(jax.local_devices(), dim=32).times()
    assert len(times) == 8 and min(times) > 0


def test_a_slow_rank_is_reported_once_with_its_node_and_state_and_again_when_it_has_recovered(tmp_path: Path) -> None:
    notes: list[str] = []
    log = EventLog(tmp_path / "events.0.jsonl", 0, run="r", restart=0)
    recorder: Any = SimpleNamespace(events=log, progress=SimpleNamespace(note=notes.append), timer=None, writer=None)
    hook = Stragglers(StragglersConfig(threshold=THRESHOLD), recorder, SimpleNamespace(newest=[]), None, "r.0", tmp_path)  # type: ignore[arg-type]
    state = state_text(DeviceState("gpu:0", clock_mhz=1290, rated_mhz=1980, temperature_c=88, reasons=("hardware thermal slowdown",)))

    def published(share: float) -> list[dict[str, Any]]:
        own = {process: [[step, [0.5 * (1 + share * (process == 2))]] for step in range(WINDOW)] for process in range(4)}
        return [{"process": process, "node": f"node0{process}", "own": own[process], "states": [state]} for process in own]

    hook._step_s = 0.56
    for step, share in (
        (18, 0.0),
        (21, 0.12),
        (24, 0.12),
        (27, 0.06),
        (30, 0.0),
        (33, 0.12),
        (36, 0.0),
    ):  # at 30 noise alone: the window has steps from before 21
        hook._compare(step, published(share))
    hook.close(36)
    log.close()
    found = [(event.kind, event.fields) for event in read_events(tmp_path / "events.0.jsonl") if event.kind.startswith("straggler")]
    assert [(kind, fields["step"], fields["rank"]) for kind, fields in found] == [
        ("straggler", 21, "process 2"),
        ("straggler_end", 36, "process 2"),
    ]
    assert found[0][1] | {"node": "node02", "excess": pytest.approx(0.12), "wait_s": pytest.approx(0.06)} == found[0][1]
    assert notes == [
        "step 21: straggler: process 2 (node node02) computes 12% longer than the others, 1290 MHz of 1980, 88 °C, hardware thermal "
        "slowdown; they wait about 60 ms per step",
        "step 36: process 2 is no longer slower than the others",
    ]


@pytest.mark.parametrize(
    ("in_job", "earlier", "said"),
    [
        (True, 1, "step 27: the run saves and is requeued without node02 (stragglers.replace_after)"),
        (True, 2, "node02 stays: 2 nodes have been replaced (stragglers.max_replaced)"),
        (False, 0, "node02 cannot be replaced (stragglers.replace_after): this is no Slurm job"),
    ],
)
def test_a_rank_that_stays_slow_is_replaced_once_where_the_job_can_and_may(tmp_path: Path, in_job: bool, earlier: int, said: str) -> None:
    notes, signals = list[str](), list[int]()
    log = EventLog(tmp_path / "events.0.jsonl", 0, run="r", restart=0)
    recorder: Any = SimpleNamespace(events=log, progress=SimpleNamespace(note=notes.append), timer=None, writer=None)
    others = {f"node1{number}": "straggler: 20% slower for 9 steps" for number in range(earlier)} | {"node20": "failed the preflight"}
    add_bad_nodes(tmp_path, others, datetime.now())
    config = StragglersConfig(threshold=THRESHOLD, replace_after=6)
    hook = Stragglers(config, recorder, SimpleNamespace(newest=[]), None, "r.0", tmp_path, in_job)  # type: ignore[arg-type]
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        for step in range(18, 40, 3):
            slow = 2 if step > 18 else None
            own = {process: [[at, [0.5 * (1.3 if process == slow else 1)]] for at in range(WINDOW)] for process in range(4)}
            hook._compare(step, [{"process": p, "node": f"node0{p}", "own": own[p], "states": []} for p in own])
    finally:
        signal.signal(signal.SIGTERM, before)
    hook.close(40)
    log.close()
    assert [note for note in notes if "straggler:" not in note] == [said]
    done = in_job and earlier < config.max_replaced
    assert signals == [signal.SIGTERM] * done
    bad = read_bad_nodes(tmp_path)
    assert set(bad) == set(others) | ({"node02"} if done else set())
    assert not done or bad["node02"] == "straggler: 30% slower for 6 steps"
    assert [event.fields["nodes"] for event in read_events(log.path) if event.kind == "straggler_replaced"] == [["node02"]] * done


def test_a_rank_that_is_fast_again_is_not_replaced_before_it_is_told_as_recovered(tmp_path: Path) -> None:
    notes, log = list[str](), EventLog(tmp_path / "events.0.jsonl", 0, run="r", restart=0)
    recorder: Any = SimpleNamespace(events=log, progress=SimpleNamespace(note=notes.append), timer=None, writer=None)
    config = StragglersConfig(threshold=THRESHOLD, replace_after=6)
    hook = Stragglers(config, recorder, SimpleNamespace(newest=[]), None, "r.0", tmp_path, in_job=False)  # type: ignore[arg-type]
    for step in range(18, 40, 3):
        own = {process: [[at, [0.65 if process == 2 and step == 21 else 0.5]] for at in range(WINDOW)] for process in range(4)}
        hook._compare(step, [{"process": p, "node": f"node0{p}", "own": own[p], "states": []} for p in own])
    hook.close(40)
    log.close()
    assert [note for note in notes if "straggler:" not in note] == ["step 36: process 2 is no longer slower than the others"]


def test_probes_take_a_small_share_of_the_time() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        probe_s, step_s = 10 ** rng.uniform(-4, -1), 10 ** rng.uniform(-3, 2)
        interval = probe_interval(probe_s, step_s)
        assert interval >= PROBE_EVERY and interval & (interval - 1) == 0
        assert probe_s <= PROBE_SHARE * interval * step_s
        assert interval == PROBE_EVERY or probe_s > PROBE_SHARE * interval / 2 * step_s
    assert probe_interval(0.002, 0.0) == PROBE_EVERY
