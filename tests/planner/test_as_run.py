"""A step as other training software runs it: whose collectives are fewer, and what else it does not do or does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.planner.as_run import as_run
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.planner.communication import forwarded_s, time_s
from ridgeline.planner.links import Fabric
from ridgeline.planner.pipeline import Schedule
from ridgeline.planner.software import software
from ridgeline.planner.step_time import step_time

SIZES = {"pipeline": 4, "data": 2, "fsdp": 1, "context": 1, "tensor": 2, "expert": 8}
MESH = [f"mesh.{axis}={size}" for axis, size in SIZES.items()]


def config(*overrides):
    base = [
        "trainer.accumulation=8",
        "data.seq_len=4096",
        "data.batch_size=128",
        "precision.compute=bfloat16",
        "data.document_masking=false",
    ]
    return load("models/qwen3-30b-a3b", [*base, *MESH, "compute.experts.capacity_factor=1", *overrides]).config


@pytest.mark.parametrize("name", ["ridgeline", "maxtext", "torch-compile"])
def test_software_that_runs_the_planned_step_has_the_planned_collectives(name):
    planned = compiled_collectives(config(), SIZES)
    assert as_run(planned, software(name), Schedule.of(config(), SIZES)) == planned


def test_megatron_reduces_once_and_its_stages_hold_layers_embedding_and_loss():
    planned, schedule = compiled_collectives(config(), SIZES), Schedule.of(config(), SIZES)
    found = as_run(planned, software("megatron"), schedule)
    assert {item.what for item in found if item.axes == ("pipeline",)} == {
        "residual stream to the next stage",
        "its gradient to the previous stage",
    }
    of_parameters = [item for item in found if item.what == "attention parameters"]
    assert {(item.kind, item.count) for item in of_parameters if item.axes == ("expert",)} == {("all-gather", 12), ("reduce-scatter", 12)}
    assert not [item for item in found if item.what.endswith("(again)")]
    tokens = [item for item in planned if item.of_tokens and not item.what.endswith("(again)")]
    assert tokens and [item for item in found if item.of_tokens] == tokens


@pytest.mark.parametrize("narrow", [False, True])
def test_inputs_of_8_bit_matmuls_are_gathered_in_8_bits(narrow):
    planned, schedule = compiled_collectives(config(), SIZES), Schedule.of(config(), SIZES)
    found = as_run(planned, software("megatron"), schedule, narrow=narrow)
    bytes_of = [
        next(item.bytes for item in items if item.what == "attention input" and item.phase == "forward") for items in (planned, found)
    ]
    assert bytes_of[0] == bytes_of[1] * (2 if narrow else 1)


@given(st.integers(2, 16), st.integers(1, 8), st.sampled_from([64, 128]))
def test_a_token_is_sent_once_to_each_node_with_its_experts(nodes, per_token, experts):
    group = Fabric.from_cluster(load_cluster("dgx-h100").config, num_devices=8 * nodes).group(1, 8 * nodes)
    copies, forwarded = time_s("all-to-all", 1e9, group), forwarded_s(1e9, group, experts * nodes, per_token)
    assert forwarded.seconds <= copies.seconds * (1 + 1e-9)
    if per_token == 1:
        assert math.isclose(forwarded.seconds, copies.seconds)
    within = Fabric.from_cluster(load_cluster("dgx-h100").config, num_devices=8).group(1, 8)
    assert forwarded_s(1e9, within, experts, per_token) == time_s("all-to-all", 1e9, within)


def test_no_layer_with_experts_is_faster_than_the_host_launches_its_kernels():
    sizes, cluster = {axis: 8 if axis == "expert" else 1 for axis in SIZES}, load_cluster("dgx-b200").config
    small = config(*(f"mesh.{axis}={size}" for axis, size in sizes.items()), "data.batch_size=64")
    names = ("megatron", "megatron-without-graphs")
    graphs, without = (step_time(small, sizes, cluster, load_calibration(None, name)) for name in names)
    layers = small.model.num_layers * small.trainer.accumulation
    assert graphs.step_s < layers * software(names[1]).launch_s <= without.step_s
    assert without.step_s == pytest.approx(sum(without.breakdown_s.values()))
    assert without.step_s - graphs.step_s == pytest.approx(without.breakdown_s["host_launch"], rel=1e-6)
