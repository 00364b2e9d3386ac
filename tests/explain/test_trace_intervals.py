"""Interval sets against sets of integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.explain.trace.intervals import EMPTY, clip, covered, intersect, join, subtract, total, union

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


def build(found):
    return union(np.array([a for a, _ in found], np.int64), np.array([b for _, b in found], np.int64))


def points(found):
    return {x for a, b in found for x in range(a, b)}


def of(intervals):
    return points(intervals.tolist())


@given(pairs, pairs)
def test_set_operations_are_those_of_sets(a, b):
    for result, expected in (
        (build(a), points(a)),
        (join(build(a), build(b)), points(a) | points(b)),
        (intersect(build(a), build(b)), points(a) & points(b)),
        (subtract(build(a), build(b)), points(a) - points(b)),
        (clip(build(a), 5, 20), points(a) & set(range(5, 20))),
    ):
        assert of(result) == expected
        assert total(result) == len(expected)
        assert (result[:, 1] > result[:, 0]).all()
        assert (result[1:, 0] >= result[:-1, 1]).all()


@given(pairs, pairs)
def test_covered_is_the_length_inside_a_set(a, by):
    start, end = (np.array([p[i] for p in a], np.int64) for i in (0, 1))
    expected = [len(points([p]) & points(by)) for p in a]
    assert covered(start, end, build(by)).tolist() == expected


def test_nothing_is_nothing():
    assert total(join()) == total(intersect(EMPTY, EMPTY)) == total(subtract(EMPTY, EMPTY)) == 0
