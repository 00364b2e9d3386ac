"""Copies of activations to host memory and back: what they overlap with, and that no resource makes a step slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.load import load
from ridgeline.configs.remat import NAMES
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.hardware import hardware
from ridgeline.planner.host_copies import STAGES, HostCopy, host_copies, waits_s
from ridgeline.planner.kernels import Kernels
from ridgeline.planner.local import LocalSizes
from tests.planner.clusters import CALIBRATION

SECONDS = st.floats(0.0, 10.0)
COPIES = st.lists(st.builds(HostCopy, seconds=SECONDS, ready=st.floats(0.0, 1.0), needed=st.none() | st.floats(0.0, 1.0)), max_size=4)


def phi4(*names):
    """Phi-4 over fsdp=512 in fp8 with 4 rows of 16,384 tokens, of which each device has one of 4 microbatches."""
    names = f"compute.remat.names=[{','.join(names)}]"
    settings = [
        "data.seq_len=16384",
        "data.batch_size=8192",
        "trainer.accumulation=4",
        "data.document_masking=false",
        "precision.matmul=fp8",
    ]
    settings += ["model.max_seq_len=16384", "precision.compute=bfloat16", "compute.remat.policy=offload", names]
    made = load("models/phi4-14b", settings).config
    kernels = Kernels(LocalSizes.of(made, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 512}), hardware("h100-sxm"), CALIBRATION)
    return kernels, host_copies(kernels, 4, kernels.device.host_bandwidth_bytes_per_s)


def test_every_value_that_can_be_offloaded_has_its_stage():
    assert sorted(name for names in STAGES for name in names) == sorted(NAMES)


def test_an_mlp_activation_is_copied_beside_the_matmuls_after_it():
    """As compiled for Phi-4 (jaxlib 0.10.2): of a copy of 36.7 ms a layer's forward pass waits for 13.9 ms, and for none of its input."""
    kernels, copies = phi4("mlp_up")
    layers = 4 * kernels.local.model.num_layers
    forward_s = kernels.layer_forward().seconds * layers
    assert copies[0].seconds / layers == pytest.approx(0.0367, rel=0.01)
    assert waits_s(copies, forward_s, 1e9) / layers == pytest.approx(0.0139, rel=0.2)
    assert waits_s(phi4("block_input")[1], forward_s, 1e9) == 0


def test_the_backward_pass_waits_for_queries_but_not_for_inputs_of_blocks():
    """As compiled: 7.5 of 10.5 ms; keys and values are recomputed meanwhile."""
    kernels, copies = phi4("query")
    layers = 4 * kernels.local.model.num_layers
    backward_s = kernels.layer_backward().seconds * layers
    assert copies[0].seconds / layers == pytest.approx(0.0105, rel=0.01)
    assert waits_s(copies, 1e9, backward_s) / layers == pytest.approx(0.0075, rel=0.25)
    assert waits_s(phi4("block_input")[1], 1e9, backward_s) == 0


@given(COPIES, SECONDS, SECONDS, st.floats(1.0, 8.0))
def test_faster_copies_or_computation_never_lengthen_a_pass(copies, forward_s, backward_s, faster):
    copies = sorted(copies, key=lambda copy: copy.ready)
    whole = forward_s + backward_s + waits_s(copies, forward_s, backward_s)
    assert waits_s(copies, forward_s, backward_s, faster) <= waits_s(copies, forward_s, backward_s) + 1e-9
    sped = forward_s / faster, backward_s / faster
    assert sum(sped) + waits_s(copies, *sped) <= whole + 1e-9
    assert whole >= sum(copy.seconds for copy in copies) * 2 - 1e-9
