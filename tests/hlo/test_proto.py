"""Serialized HLO modules are read as their text is: compiled here, compiled for GPUs, damaged."""

import random
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxlib._hlo import hlo_module_from_text

from ridgeline.hlo.collectives import collectives, replica_groups
from ridgeline.hlo.flops import flops_of
from ridgeline.hlo.parse import parse
from ridgeline.hlo.proto import read_module
from ridgeline.hlo.roofline import kernels
from tests.explain.xspace import hlo_proto, serialized_hlo

HERE = Path(__file__).parent
GPU_SCAN = (HERE / "gpu_scan.hlo.txt").read_text()
COMPARED = ("name", "opcode", "shapes", "operands", "parameter_number", "op_name", "deduplicated_name", "called", "trip_count")
COMPARED += ("in_host_memory",)
GROUPS = """HloModule t, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
}
"""


def scanned(stack, x):
    def layer(carry, weight):
        return jnp.tanh(carry @ weight), None

    return (jax.lax.scan(layer, x, stack)[0] ** 2).sum()


def compiled_programs():
    x, stack, image = jnp.ones((16, 16)), jnp.ones((5, 16, 16)), jnp.ones((2, 3, 8, 8))
    yield jax.jit(jax.value_and_grad(scanned)), (stack, x)
    yield jax.jit(lambda a: jnp.sort(a, axis=0)), (x,)
    yield jax.jit(lambda a, k: jax.lax.conv_general_dilated(a, k, (2, 1), "SAME", feature_group_count=3)), (image, jnp.ones((6, 1, 3, 3)))
    yield jax.jit(lambda a: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, a)), (x,)
    yield jax.jit(lambda a, i: jax.lax.switch(i, [jnp.sin, lambda v: v @ v], a)), (x, 1)
    yield jax.jit(jnp.linalg.qr), (x,)


def same(text: str, serialized: bytes) -> None:
    """Everything that is read of a module is the same in both forms."""
    expected, found = parse(text), read_module(serialized)
    assert (found.name, found.entry, found.computations.keys()) == (expected.name, expected.entry, expected.computations.keys())
    for name, computation in expected.computations.items():
        for one, other in zip(computation.instructions, found.computations[name].instructions, strict=True):
            for key in COMPARED:
                assert getattr(one, key) == getattr(other, key), key
            assert expected.source(one) == found.source(other)
            if one.shapes and one.shapes[0].dtype in ("s32", "u32", "s64", "u64"):
                assert one.constant == other.constant
    assert expected.runs == found.runs
    assert {kernel.name: kernel for kernel in kernels(expected)} == {kernel.name: kernel for kernel in kernels(found)}
    ours, theirs = (sorted(collectives(module, {"data": 8}), key=lambda c: c.name) for module in (expected, found))
    assert ours == theirs


def test_compiled_programs_are_read_as_their_text_is():
    for function, arguments in compiled_programs():
        (module,) = function.lower(*arguments).compile().runtime_executable().hlo_modules()
        same(module.to_string(), hlo_proto(module))


def test_names_of_equal_instructions_are_read_as_in_the_text():
    named = GROUPS.replace("GROUPS", "{{0,1,2,3,4,5,6,7}}").replace(
        "to_apply=%add\n}", 'to_apply=%add, metadata={op_name="a/b" deduplicated_name="all-reduce.7" stack_frame_id=3}\n}'
    )
    module = hlo_module_from_text(named)
    assert read_module(hlo_proto(module)).computations["main"].instructions[-1].deduplicated_name == "all-reduce.7"
    same(module.to_string(), hlo_proto(module))


@pytest.mark.parametrize("file", ["gpu_scan.hlo.txt", "../explain/trace_gpu.hlo.txt"])
def test_programs_for_gpus_are_read_as_their_text_is(file):
    module = hlo_module_from_text((HERE / file).read_text())
    same(module.to_string(), hlo_proto(module))


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1},{2,3},{4,5},{6,7}}",
        "[4,2]<=[2,4]T(1,0)",
        "[2,4]<=[8]",
        "mesh['a'=4,'b'=2] {'b'}",
        "mesh['a'=4,'b'=2] {'a':(2)2}",
        "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
    ],
)
def test_replica_groups_are_read_in_every_form(groups):
    (reduction,) = [i for _, i in read_module(serialized_hlo(GROUPS.replace("GROUPS", groups))).instructions() if i.opcode == "all-reduce"]
    assert replica_groups(reduction.attributes, 8).tolist() == replica_groups(f"replica_groups={groups}", 8).tolist()


def test_damage_is_one_kind_of_error():
    whole, rng = serialized_hlo(GPU_SCAN), random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            found = read_module(bytes(damaged))
            kernels(found), collectives(found, {"data": 8})
        except (ValueError, LookupError):
            pass


def test_flops_of_convolutions_are_those_of_xla():
    """Drawn strides, padding, dilations and groups; XLA's cost analysis, as the test does, leaves out products with padding and holes."""
    rng = random.Random(0)
    for _ in range(6):
        groups = rng.choice([1, 2])
        settings = {
            "window_strides": (rng.randint(1, 3), rng.randint(1, 2)),
            "padding": [(rng.randint(-1, 3), rng.randint(0, 2)) for _ in range(2)],
            "lhs_dilation": (rng.randint(1, 3), rng.randint(1, 2)),
            "rhs_dilation": (rng.randint(1, 2), rng.randint(1, 3)),
            rng.choice(["feature_group_count", "batch_group_count"]): groups,
        }
        image = jax.ShapeDtypeStruct((4, 4, rng.randint(7, 13), rng.randint(7, 13)), jnp.float32)
        channels = 4 // settings.get("feature_group_count", 1)
        kernel = jax.ShapeDtypeStruct((6, channels, rng.randint(1, 3), rng.randint(1, 4)), jnp.float32)
        compiled = jax.jit(lambda a, k, s=settings: jax.lax.conv_general_dilated(a, k, **s)).lower(image, kernel).compile()
        ours = sum(flops_of(place, i) for place, i in parse(compiled.as_text()).instructions() if i.opcode == "convolution")
        assert ours == compiled.cost_analysis().get("flops", 0.0)
