"""Mixtures whose weights change during training: shares, the order within each corpus, resuming, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.curriculum import MAX_PARTS, phases
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config, DataConfig
from ridgeline.loaders.loader import Order, build_loader
from ridgeline.loaders.mixture import Mixture
from tests.loaders.loader_worker import row_digests
from tests.loaders.token_corpora import random_docs, write_corpus

Phases = list[tuple[int, list[float]]]


@st.composite
def drawn_phases(draw: st.DrawFn) -> Phases:
    """Phases of 1 to 400 elements over 2 to 5 corpora; some weights are 0."""
    corpora = draw(st.integers(2, 5))
    one = st.one_of(st.just(0.0), st.floats(0.02, 5.0))
    weights = draw(st.lists(st.lists(one, min_size=corpora, max_size=corpora).filter(any), min_size=1, max_size=6))
    lengths = draw(st.lists(st.integers(1, 400), min_size=len(weights) - 1, max_size=len(weights) - 1))
    return list(zip(itertools.accumulate([0, *lengths]), weights, strict=True))


@settings(max_examples=40, deadline=None)
@given(drawn_phases())
def test_no_element_is_left_out_or_repeated_and_each_phase_has_its_shares(given_phases: Phases) -> None:
    mixture, corpora = Mixture(given_phases), len(given_phases[0][1])
    ends = [start for start, _ in given_phases[1:]] + [given_phases[-1][0] + 300]
    found = [mixture.find(g) for g in range(ends[-1])]
    for corpus in range(corpora):
        numbers = [number for at, number in found if at == corpus]
        assert numbers == list(range(len(numbers)))
    for (start, weights), end in zip(given_phases, ends, strict=True):
        counts = np.bincount([corpus for corpus, _ in found[start:end]], minlength=corpora)
        assert np.subtract(mixture.counts(end), mixture.counts(start)).tolist() == counts.tolist()
        expected = (end - start) * np.array(weights) / sum(weights)
        assert np.all(np.abs(counts - expected) <= corpora + 0.011 * expected)  # Grain holds weights in hundredths of the smallest
        assert not counts[np.array(weights) == 0].any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 5.0), min_size=2, max_size=5), st.lists(st.integers(0, 10**11), min_size=20, max_size=20))
def test_without_changes_the_order_is_that_of_grains_mix(weights: list[float], elements: list[int]) -> None:
    """As in runs of earlier versions, which used it."""
    sources = [
        grain.MapDataset.source([index]).repeat().map_with_index(lambda number, corpus: (corpus, number)) for index in range(len(weights))
    ]
    theirs: Any = grain.MapDataset.mix(sources, weights=weights)
    ours = Mixture([(0, weights)])
    assert [ours.find(g) for g in elements] == [theirs[g] for g in elements]


def test_phases_of_one_element_add_up_to_their_shares() -> None:
    """A linear change gives every step weights of its own; rounding in each of them would never draw a small corpus."""
    rng = np.random.default_rng(5)
    weights = rng.dirichlet([20.0, 1.0, 0.5], size=3000)
    mixture = Mixture([(g, list(row)) for g, row in enumerate(weights)])
    assert np.all(np.abs(np.array(mixture.counts(3000)) - weights.sum(axis=0)) < 3 + 0.011 * weights.sum(axis=0))


def config(curriculum: list[dict[str, Any]], *, corpora: int = 2, steps: int = 100, **data: Any) -> Config:
    train = [{"path": f"data/{index}", "weight": 1.0 + index} for index in range(corpora)]
    return Config.model_validate({"data": {"train": train, "curriculum": curriculum, **data}, "trainer": {"steps": steps}})


def test_a_linear_change_is_linear_between_its_entries() -> None:
    start, end = 10, 60
    entries = [{"step": start, "weights": [3, 1]}, {"step": end, "weights": [0, 2], "linear": True}]
    found = phases(config(entries).data)
    assert found[:2] == [(0, [1.0, 2.0]), (start, [3.0, 1.0])]
    assert found[-1] == (end, [0.0, 2.0])
    for step, weights in found[2:-1]:
        np.testing.assert_allclose(weights, np.interp(step, [start, end], [0.75, 0.0]) * np.array([1, -1]) + [0, 1], atol=1e-12)
    assert [step for step, _ in found[2:-1]] == list(range(start + 1, end))


def test_a_long_linear_change_has_a_bounded_number_of_phases() -> None:
    found = phases(config([{"step": 1_000_000, "weights": [0, 1], "linear": True}], steps=1_000_000).data)
    assert len(found) == MAX_PARTS + 1
    steps = np.array([step for step, _ in found])
    assert np.all(np.diff(steps) == 1000)
    np.testing.assert_allclose([weights[0] for _, weights in found[1:]], (1 - steps[1:] / 1e6) / 3, atol=1e-12)


def test_an_entry_of_step_0_replaces_the_weights_of_the_corpora() -> None:
    assert phases(config([{"step": 0, "weights": [0, 1]}, {"step": 5, "weights": [1, 1]}]).data) == [(0, [0.0, 1.0]), (5, [1.0, 1.0])]


ENTRIES = [{"step": 3, "weights": [0, 1, 2]}, {"step": 7, "weights": [2, 1, 0], "linear": True}, {"step": 9, "weights": [1, 0, 0]}]
STEPS, ALL = 12, np.arange(8)


@pytest.fixture(params=["stream", "packed"])
def data(tmp_path: Path, request: pytest.FixtureRequest) -> DataConfig:
    """Three small corpora, of which some are read more than once."""
    for index, name in enumerate("abc"):
        write_corpus(tmp_path / name, [random_docs(index, 30)], pack_length=32 if request.param == "packed" else None)
    train = [{"path": str(tmp_path / name), "weight": weight} for name, weight in zip("abc", (4.0, 2.0, 1.0), strict=True)]
    return DataConfig.model_validate({"train": train, "curriculum": ENTRIES, "seq_len": 32, "batch_size": 8, "prefetch": 2, "threads": 2})


def test_batches_are_the_same_from_any_step_on_and_for_any_share_of_the_rows(data: DataConfig) -> None:
    """Also on the first step of a phase, in the middle of one, and within a linear change."""
    expected = row_digests(data, ALL, 0, STEPS)
    for start_step in range(1, STEPS):
        assert row_digests(data, ALL, start_step, STEPS - start_step).items() <= expected.items()
    for rows in (np.array([0, 1, 2]), np.array([3, 4]), np.array([5, 6, 7])):
        assert row_digests(data, rows, 2, 6).items() <= expected.items()
    plain = data.model_copy(update={"curriculum": []})
    before = row_digests(plain, ALL, 0, STEPS)
    assert [before[step, row] == digest for (step, row), digest in expected.items() if step < 3] == [True] * 24
    assert before != expected


@pytest.mark.parametrize("data", ["stream"], indirect=True)
def test_worker_processes_read_the_same_batches(data: DataConfig) -> None:
    assert row_digests(data.model_copy(update={"workers": 2}), ALL, 2, 6).items() <= row_digests(data, ALL, 0, 8).items()


def test_epochs_of_a_corpus_go_on_over_the_phases(data: DataConfig) -> None:
    loader = build_loader(data, seed=11, vocab_size=50, rows=ALL)
    loader.close()
    sources, order = loader._steps.sources, loader._steps._order
    corpora, rows = order.lookup(np.arange(STEPS * 8))
    for index, source in enumerate(sources):
        mine = rows[corpora == index]
        assert loader.epochs(STEPS)[str(source.directory)] == pytest.approx(len(mine) / source.num_rows)
        for start in range(0, len(mine), source.num_rows):
            epoch = mine[start : start + source.num_rows]
            assert len(set(epoch)) == len(epoch)
        alone = Order([s.num_rows for s in sources], [float(i == index) for i in range(3)], seed=11, shuffle=True)
        assert mine.tolist() == alone.lookup(np.arange(len(mine)))[1].tolist()  # the corpus's own order, from its first row on
    per_step = corpora.reshape(STEPS, 8)
    assert not (per_step[3] == 0).any()
    assert (per_step[9:] == 0).all()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [{"step": 5, "weights": [1, 2]}, {"step": 5, "weights": [1, 1]}],
            "data.curriculum.1.step must be more than that of the entry before (5), got 5",
        ),
        ([{"step": 100, "weights": [1, 2]}], "data.curriculum.0.step must be less than trainer.steps=100, got 100"),
        ([{"step": 101, "weights": [1, 2], "linear": True}], "data.curriculum.0.step must be at most trainer.steps=100, got 101"),
        ([{"step": 0, "weights": [1, 2], "linear": True}], "data.curriculum.0.linear there are no steps before step 0"),
        ([{"step": 5, "weights": [1]}], "data.curriculum.0.weights must have one weight per corpus: data.train has 2 corpora"),
        ([{"step": 5, "weights": [0, 0]}], "data.curriculum.0.weights are all 0"),
        ([{"step": 5, "weights": [1e-9, 10]}], "data.curriculum.0.weights may differ by a factor of 1e+09"),
    ],
)
def test_a_curriculum_that_cannot_be_meant_is_refused_by_name(entries: list[dict[str, Any]], message: str) -> None:
    (problem,) = check_config(config(entries))
    assert f"{problem.keys[0]} {problem.message}".startswith(message)


def test_a_curriculum_that_ends_with_the_run_is_accepted() -> None:
    assert check_config(config([{"step": 0, "weights": [0, 1]}, {"step": 100, "weights": [1, 0], "linear": True}])) == []
