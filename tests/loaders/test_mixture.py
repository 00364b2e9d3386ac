"""The order of rows: permutations per epoch, shares by weight, a pure function of its arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.loaders.loader import MAX_ROWS, Order


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_row_once(rows: int, seed: int) -> None:
    _, found = Order([rows], [1.0], seed=seed, shuffle=True).lookup(np.arange(3 * rows))
    for epoch in range(3):
        assert sorted(found[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_epochs_seeds_and_corpora_have_their_own_orders() -> None:
    def order(seed: int, epoch: int = 0) -> tuple[int, ...]:
        return tuple(Order([500], [1.0], seed=seed, shuffle=True).lookup(np.arange(epoch * 500, (epoch + 1) * 500))[1])

    orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]  # epoch 1 of seed 0 is not epoch 0 of seed 1
    assert len(set(orders)) == len(orders)
    corpora, rows = Order([500, 500], [1.0, 1.0], seed=0, shuffle=True).lookup(np.arange(1000))
    assert rows[corpora == 0].tolist() != rows[corpora == 1].tolist()


def test_a_shuffle_mixes_over_the_whole_corpus() -> None:
    _, rows = Order([10_000], [1.0], seed=1, shuffle=True).lookup(np.arange(10_000))
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.05
    assert abs(rows[:1000].mean() / 5000 - 1) < 0.1


def test_without_shuffle_rows_come_in_order() -> None:
    _, rows = Order([7], [1.0], seed=3, shuffle=False).lookup(np.arange(21))
    assert rows.tolist() == list(range(7)) * 3


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(1, 1000))
def test_shares_follow_the_weights_from_the_first_row_on(weights: list[int], drawn: int) -> None:
    sizes = [50 + 7 * index for index in range(len(weights))]
    corpora, rows = Order(sizes, [float(w) for w in weights], seed=0, shuffle=True).lookup(np.arange(drawn))
    counts = np.bincount(corpora, minlength=len(weights))
    expected = drawn * np.array(weights) / sum(weights)
    # Grain holds weights in hundredths of the smallest
    assert np.all(np.abs(counts - expected) <= len(weights) + 0.011 * expected)
    for corpus, size in enumerate(sizes):
        mine = rows[corpora == corpus]
        for start in range(0, len(mine) // size * size, size):
            assert sorted(mine[start : start + size]) == list(range(size))


def test_lookups_do_not_depend_on_one_another() -> None:
    order = Order([100, 30], [2.0, 1.0], seed=9, shuffle=True)
    whole = order.lookup(np.arange(600))
    parts = [order.lookup(np.array([index])) for index in np.random.default_rng(0).permutation(600)]
    again = np.random.default_rng(0).permutation(600)
    for index, (corpus, row) in zip(again, parts, strict=True):
        assert (corpus[0], row[0]) == (whole[0][index], whole[1][index])


def test_the_order_is_pinned() -> None:
    """A change here changes the data of every run that is resumed: it must be deliberate."""
    corpora, rows = Order([1000, 10], [3.0, 1.0], seed=42, shuffle=True).lookup(np.arange(12))
    assert corpora.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert rows.tolist() == [830, 142, 533, 2, 856, 439, 237, 7, 991, 12, 366, 6]


def test_more_rows_than_the_shuffle_can_count_are_refused() -> None:
    with pytest.raises(UserError, match=rf"{MAX_ROWS + 1} rows"):
        Order([MAX_ROWS + 1], [1.0], seed=0, shuffle=True)
