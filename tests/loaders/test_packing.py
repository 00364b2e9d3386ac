"""Best-fit packing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.loaders.token_writer import best_fit

LENGTHS = st.lists(st.integers(1, 40), max_size=120)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 30))
def test_every_item_is_in_one_row_and_no_row_overflows(lengths: list[int], window: int) -> None:
    rows = best_fit(lengths, 40, window)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(row and row == sorted(row) and sum(lengths[item] for item in row) <= 40 for row in rows)


@settings(max_examples=200, deadline=None)
@given(LENGTHS)
def test_rows_are_at_most_twice_as_many_as_any_packing_needs(lengths: list[int]) -> None:
    """Any two rows together exceed the capacity, or the second would not have been opened."""
    needed = max(math.ceil(sum(lengths) / 40), sum(length > 20 for length in lengths))
    assert len(best_fit(lengths, 40)) <= 2 * needed


def test_an_item_goes_to_the_fullest_row_it_fits() -> None:
    # 6 and 5 open rows with 4 and 5 left; 4 fits both, the first is fuller; then 3 goes to the second
    assert best_fit([3, 6, 4, 5], 10) == [[1, 2], [0, 3]]


def test_items_of_different_windows_never_share_a_row() -> None:
    assert best_fit([1, 1, 1, 1], 10, window=2) == [[0, 1], [2, 3]]


def test_an_item_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="item 1 of length 11 does not fit a row of 10"):
        best_fit([3, 11], 10)


def test_mixed_lengths_waste_little() -> None:
    lengths = [100 + (index * 7919) % 1500 for index in range(3000)]
    rows = best_fit(lengths, 2048)
    assert 1 - sum(lengths) / (2048 * len(rows)) < 0.01
