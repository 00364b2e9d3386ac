"""The heap of temporaries at any instruction, read from XLA's buffer assignment and live ranges."""

import pytest

from ridgeline.hlo.heap import read_heap

ASSIGNMENT = """BufferAssignment:
allocation 0: size 16, parameter 0, shape |f32[4]| at ShapeIndex {}:
 value: <1 x @0> (size=16,offset=0): f32[4]{0}
allocation 1: size 160, preallocated-temp:
 value: <2 first @0> (size=64,offset=0): f32[16]{0}
 value: <3 second{1} @0> (size=64,offset=64): f32[16]{0}
 value: <4 loop{0} (phi) @0> (size=64,offset=0): f32[16]{0}
 value: <5 last @0> (size=32,offset=128): f32[8]{0}
"""
RANGES = """HloLiveRange (max 4):
  InstructionSequence:
    0:x
    1:first
    2:second
    3:loop
    4:last
  BufferLiveRange:
    x{}:0-4
    first{}:1-3
    second{1}:2-3
    loop{0}:3-4
    last{}:4-4
"""


def test_values_in_one_place_count_once_and_arguments_do_not_count():
    heap = read_heap(ASSIGNMENT, RANGES)
    assert heap.bytes == 160 and heap.schedule == ("x", "first", "second", "loop", "last")
    assert heap.live == (0, 64, 128, 128, 96)
    assert [(value.name, value.index) for value in heap.at(3)] == [("first", ""), ("second", "1")]
    assert [value.name for value in heap.at(4)] == ["loop", "last"]


def test_texts_without_a_heap_are_refused():
    with pytest.raises(ValueError, match="no heap"):
        read_heap("BufferAssignment:\n", RANGES)
