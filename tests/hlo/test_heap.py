"""The heap of temporaries at any instruction, read from XLA's buffer assignment and live ranges."""

import pytest

from ridgeline.hlo.heap import read_heap, stretches_of
from ridgeline.hlo.parse import parse

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
    assert heap.live == (0, 64, 128, 128, 96) and heap.gap_bytes == 160 - 128
    assert [(value.name, value.index) for value in heap.at(3)] == [("first", ""), ("second", "1")]
    assert [value.name for value in heap.at(4)] == ["loop", "last"]


def test_texts_without_a_heap_are_refused():
    with pytest.raises(ValueError, match="no heap"):
        read_heap("BufferAssignment:\n", RANGES)


STEP = """HloModule step, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, is_scheduled=true

%layer (in: (f32[4])) -> (f32[4]) {
  %in = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%in), index=0
  %mlp = f32[4]{0} negate(%x), metadata={op_name="jit(step)/while/body/transpose(jvp())/while/body/mlp/neg"}
  ROOT %out = (f32[4]{0}) tuple(%mlp)
}

%more (c: (f32[4])) -> pred[] {
  %c = (f32[4]{0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

%microbatch (min: (f32[4])) -> (f32[4]) {
  %min = (f32[4]{0}) parameter(0)
  %y = f32[4]{0} get-tuple-element(%min), index=0
  %logits = f32[4]{0} negate(%y), metadata={op_name="jit(step)/while/body/jvp(loss)/neg"}
  %start = (f32[4]{0}) tuple(%logits)
  %layers = (f32[4]{0}) while(%start), condition=%more, body=%layer
  %z = f32[4]{0} get-tuple-element(%layers), index=0
  %table = f32[4]{0} negate(%z), metadata={op_name="jit(step)/while/body/jvp(loss)/dot"}
  ROOT %mout = (f32[4]{0}) tuple(%table)
}

%cond (c2: (f32[4])) -> pred[] {
  %c2 = (f32[4]{0}) parameter(0)
  ROOT %p2 = pred[] constant(true)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %first = f32[4]{0} negate(%a), metadata={op_name="jit(step)/embed/neg"}
  %t = (f32[4]{0}) tuple(%first)
  %steps = (f32[4]{0}) while(%t), condition=%cond, body=%microbatch
  ROOT %r = f32[4]{0} get-tuple-element(%steps), index=0
}
"""


@pytest.mark.parametrize("of_layers", ["transpose(jvp())", "transpose(jvp(transpose(jvp())))"])
def test_one_chunk_of_logits_in_a_loop_of_microbatches_is_the_loss_and_not_the_loop(of_layers):
    schedule = ("first", "y", "logits", "layers", "x", "mlp", "z", "table", "r")
    found = stretches_of(parse(STEP.replace("transpose(jvp())", of_layers)), schedule)
    names = {point: [schedule[position] for position in positions] for point, positions in found.items()}
    assert names["loss"] == ["logits"] and names["forward pass"] == ["first", "y"]
    assert "mlp" in names["backward pass"] and "table" in names["embedding gradient"]
