"""Reading compiled HLO text: of programs compiled here (CPU), and of one compiled for 8 GPUs."""

import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ridgeline.hlo.collectives import collectives, group_axes, replica_groups
from ridgeline.hlo.module import Shape, is_backward, scope
from ridgeline.hlo.parse import parse
from tests.sampling import seed

MESH_SHAPE = {"a": 2, "b": 2, "c": 2}
GPU_TEXT = Path(__file__).with_name("gpu_scan.hlo.txt")
"""A scan over 3 layers of a two-matrix MLP on data=2, fsdp=2, tensor=2, compiled for H100s; kernel settings cut from the text."""
GPU_MESH = {"pipeline": 1, "data": 2, "fsdp": 2, "context": 1, "tensor": 2, "expert": 1}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)


def compile_text(fn, *shapes, **kwargs) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fn, **kwargs).lower(*arguments).compile().as_text()


def by_hand(mesh, fn, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")])
def test_a_reduction_is_mapped_to_its_mesh_axes_and_bytes(mesh, axes):
    text = compile_text(by_hand(mesh, lambda x: jax.lax.psum(x, axes), P(axes), P()), (64, 16))
    [found] = collectives(text, MESH_SHAPE)
    shards = 2 ** len(axes)
    assert (found.kind, found.axes, found.group_size, found.count, found.dtype) == ("all-reduce", axes, shards, 1, "f32")
    assert found.bytes == 64 * 16 * 4 // shards
    assert found.operands == ((64 // shards, 16),)
    assert found.op_name.endswith("psum")
    assert found.source is not None
    assert found.source.file == __file__


def test_bytes_are_those_of_the_unsharded_side(mesh):
    gathered = compile_text(by_hand(mesh, lambda x: jax.lax.all_gather(x, "b", tiled=True), P("b"), P()), (64, 16))
    [found] = collectives(gathered, MESH_SHAPE)
    assert (found.kind, found.axes, found.bytes) == ("all-gather", ("b",), 64 * 16 * 4)
    scattered = compile_text(by_hand(mesh, lambda x: jax.lax.psum_scatter(x, "c", tiled=True), P(), P("c")), (64, 16))
    [found] = collectives(scattered, MESH_SHAPE)
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("c",), 64 * 16 * 4)


def test_permutes_and_all_to_alls_have_axes_too(mesh):
    ring = compile_text(by_hand(mesh, lambda x: jax.lax.ppermute(x, "b", [(0, 1), (1, 0)]), P("b"), P("b")), (8, 4))
    [found] = collectives(ring, MESH_SHAPE)
    assert (found.kind, found.axes, found.bytes) == ("collective-permute", ("b",), 4 * 4 * 4)
    nothing = compile_text(by_hand(mesh, lambda x: jax.lax.ppermute(x, "b", []), P("b"), P("b")), (8, 4))
    assert [(found.kind, found.axes) for found in collectives(nothing, MESH_SHAPE)] == [("collective-permute", ())]
    swap = compile_text(by_hand(mesh, lambda x: jax.lax.all_to_all(x, "a", 1, 0, tiled=True), P("a"), P(None, "a")), (8, 4))
    assert [c.axes for c in collectives(swap, MESH_SHAPE) if c.kind == "all-to-all"] == [("a",)]


def test_a_collective_inside_a_scan_counts_once_per_iteration_and_nested_loops_multiply(mesh):
    def inner(carry, x):
        return carry + jax.lax.psum(x * carry, "a"), None

    def outer(carry, xs):
        carry, _ = jax.lax.scan(inner, carry, xs)
        return jax.lax.pmax(carry, "b"), None

    fn = by_hand(mesh, lambda x: jax.lax.scan(outer, jnp.ones((4, 4)), x)[0], P(), P())
    module = parse(compile_text(fn, (5, 7, 4, 4)))
    assert {(c.axes, c.count) for c in collectives(module, MESH_SHAPE)} == {(("a",), 35), (("b",), 5)}
    assert module.unknown_loops == []


@pytest.mark.parametrize(("start", "bound", "step"), [(0, 7, 1), (1, 8, 2), (3, 14, 5), (2, 11, 3)])
def test_a_loop_whose_length_xla_does_not_state_is_counted_by_its_counter(start, bound, step):
    def counted(x):
        return jax.lax.while_loop(lambda c: c[0] < bound, lambda c: (c[0] + step, jnp.sin(c[1]) * c[0]), (start, x))[1]

    text = compile_text(counted, (64, 64))
    counts = [i.trip_count for _, i in parse(text).instructions() if i.opcode == "while"]
    without_count = parse(re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text))
    loops = [i for _, i in without_count.instructions() if i.opcode == "while"]
    assert all("known_trip_count" not in loop.attributes for loop in loops)
    assert counts == [len(range(start, bound, step))] == [loop.trip_count for loop in loops]
    assert without_count.unknown_loops == []


@pytest.mark.parametrize("hidden", [1, 4])
def test_a_count_hidden_from_xla_is_read_from_what_the_loop_starts_with(mesh, hidden):
    def looped(x):
        bound = jax.lax.optimization_barrier(jnp.int32(hidden))
        inner = lambda carry: jax.lax.scan(lambda c, _: (jnp.sin(jax.lax.psum(c, "a")), None), carry, length=3)[0]  # noqa: E731
        return jax.lax.fori_loop(0, bound, lambda _, carry: inner(carry), x)

    text = compile_text(by_hand(mesh, looped, P(), P()), (4, 4))
    outer = next(line for line in text.splitlines() if " while(" in line and "body/" not in line)
    assert "known_trip_count" not in outer, "XLA knows the count after all"
    module = parse(text)
    assert module.unknown_loops == [] and [c.count for c in collectives(module, MESH_SHAPE)] == [3 * hidden]


@pytest.mark.parametrize("case", [0, 1, 2, "never"])
def test_loops_whose_bounds_depend_on_the_loops_around_them_are_counted_exactly(case):
    """Executions of the innermost body, for drawn bounds and for some with none, equal those of the same loops in Python; so do those of a
    second loop, which starts where a first one ended, and of one in a branch."""
    rng = random.Random(f"{seed()} loops {case}")
    outer, middle, width, step, shift = rng.randint(2, 9), rng.randint(3, 7), rng.randint(1, 20), rng.randint(1, 6), rng.randint(-5, 5)
    share = rng.randint(0, 1)  # whether the innermost bounds depend on both counters
    if case == "never":
        outer, middle, width, step, shift, share = 5, 6, 3, 6, 5, 0

    def first(i, low):
        return low(0, i * step - width + shift) // 2

    def end(i, j, low, high):
        return high(4 * middle, low((i + share * j) % middle, (i * i + share * j * step) // width) + share * j + 1)

    def program(x):
        def innermost(_, c):
            return jnp.sin(c @ x)

        def around(i, c):
            inside = lambda j, c: jax.lax.fori_loop(first(i, jnp.maximum), end(i, j, jnp.maximum, jnp.minimum), innermost, c)  # noqa: E731
            return jax.lax.fori_loop(i // 3, jax.lax.optimization_barrier(jnp.int32(middle)), inside, c)

        hidden = jax.lax.optimization_barrier(jnp.int32(outer))
        whole = jax.lax.fori_loop(0, hidden, around, x)
        half = jax.lax.while_loop(lambda c: c[0] < hidden, lambda c: (c[0] + 2, c[1] @ x), (0, whole))
        last = jax.lax.while_loop(lambda c: c[0] <= 3 * outer, lambda c: (c[0] + 1, c[1] @ x.T), half)[1]
        branch = lambda c: jax.lax.fori_loop(hidden, 4 * hidden, lambda _, c: c @ c, c)  # noqa: E731
        return jax.lax.cond(last[0, 0] > 0, branch, jnp.sin, last)

    module = parse(compile_text(program, (32, 32)))
    runs = sorted(module.runs[c.name] for c, i in module.instructions() if i.opcode == "dot")
    inner = sum(len(range(first(i, max), end(i, j, max, min))) for i in range(outer) for j in range(i // 3, middle))
    start = 2 * -(-outer // 2)
    assert runs == sorted([inner, start // 2, 3 * outer + 1 - start, 3 * outer]) and module.unknown_loops == []
    assert inner == 0 or case != "never"
    certain = module.certain.intersection(c.name for c, i in module.instructions() if i.opcode == "dot")
    assert len(certain) == 2 + (inner > 0), "all that run, but the branch"


def test_a_loop_of_unknown_length_is_named():
    def moved(x):
        """The bound starts as a constant, but moves."""
        start = jax.lax.optimization_barrier((jnp.int32(0), jnp.int32(9)))
        return jax.lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 2, c[1] + 1, c[2] * c[1]), (*start, x))[2]

    for endless in (lambda x: jax.lax.while_loop(lambda v: v.sum() < 100, lambda v: v * 1.5, x), moved):
        assert len(parse(compile_text(endless, (4,))).unknown_loops) == 1


def test_partitioner_collectives_carry_scope_and_direction(mesh):
    def loss(w, x):
        with jax.named_scope("mlp"):
            y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(("a", "b"), None)))
        return jnp.sum(y * y)

    shardings = (NamedSharding(mesh, P("c", None)), NamedSharding(mesh, P(("a", "b"), "c")))
    text = compile_text(jax.grad(loss), (32, 16), (64, 32), in_shardings=shardings, out_shardings=shardings[0])
    found = collectives(text, MESH_SHAPE)
    forward = [c for c in found if not is_backward(c.op_name)]
    backward = [c for c in found if is_backward(c.op_name)]
    assert [(c.axes, c.bytes) for c in forward] == [(("c",), 16 * 16 * 4)]
    assert sum(c.bytes for c in backward) == 16 * 16 * 4
    assert {scope(c.op_name) for c in found} == {"mlp"}


def test_shapes_know_their_bytes():
    assert Shape("bf16", (3, 5)).bytes == 30
    assert Shape("pred", (8,)).bytes == 8
    assert Shape("f8e4m3fn", (8,)).bytes == 8
    assert Shape("s4", (8,)).bytes == 4
    assert Shape("f32", ()).bytes == 4
    with pytest.raises(ValueError, match="unknown HLO dtype 'weird'"):
        _ = Shape("weird", (1,)).bytes


def test_the_largest_array_outside_fusions_is_found():
    module = parse(compile_text(lambda x: jnp.sort(x @ x.T, axis=0), (128, 4)))
    assert max(shape.bytes for shape in module.largest(1)[0].shapes) == 128 * 128 * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[8], x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0), x", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("replica_groups=mesh['x'=4,'y'=2] {'y'}, x", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['x'=4,'y'=2] {'x'}, x", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['x'=1,'y'=4,'z'=2], device_ids=([2,4]T(1,0)) {'y'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['x'=4,'y'=2] {'x':(1)2}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['x'=4,'y'=2] {'x':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_every_form_of_replica_groups_is_read(text, expected):
    assert sorted(map(tuple, replica_groups(text, 8))) == sorted(map(tuple, expected))


def test_groups_that_are_no_mesh_axes_have_no_axes():
    assert group_axes(np.array([[0, 3], [1, 2], [4, 7], [5, 6]]), MESH_SHAPE) is None
    assert group_axes(np.array([[0, 1], [2, 3]]), MESH_SHAPE) is None
    assert group_axes(np.array([[4, 0], [5, 1], [2, 6], [7, 3]]), MESH_SHAPE) == ("a",)


def test_unreadable_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("not a module")
    with pytest.raises(ValueError, match="cannot read replica groups"):
        replica_groups("replica_groups=triangles", 8)


def test_gpu_text_with_start_and_done_pairs_combined_arrays_and_loops():
    found = collectives(GPU_TEXT.read_text(), GPU_MESH)
    assert [(c.kind, c.axes, c.bytes, c.count, c.asynchronous) for c in found] == [
        ("all-gather", ("tensor",), 2 * 32 * 64 * 4, 3, True),
        ("all-gather", ("fsdp",), 2 * 64 * 64 * 4, 3, True),
        ("reduce-scatter", ("tensor",), 2 * 32 * 64 * 4, 3, True),
        ("all-reduce", ("data", "fsdp", "tensor"), 4, 1, True),
    ]
    assert found[1].operands == ((32, 64), (32, 64))
    assert found[0].compute_between == 2
    assert found[0].source is not None
    assert found[0].source.file == "example.py"


def test_every_instruction_of_the_gpu_text_is_read():
    text = GPU_TEXT.read_text()
    module = parse(text)
    lines = [line for line in text.splitlines() if line.startswith("  ") and " = " in line]
    assert sum(1 for _ in module.instructions()) == len(lines)
    assert module.runs[module.entry] == 1
    assert module.name == "jit_loss"


def test_scope_is_the_innermost_known_name():
    name = "jit(loss)/transpose(jvp(attention))/while/body/mlp/dot_general"
    assert scope(name) == "mlp"
    assert is_backward(name)
    assert scope("jit(loss)/add") is None
