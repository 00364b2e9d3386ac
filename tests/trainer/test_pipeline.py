"""Programs of pipeline stages: what they keep of a microbatch until its backward pass, and how they run kernels of attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from ridgeline.models.attention.dispatch import SelfAttention
from ridgeline.models.attention.interface import AttentionRequest
from ridgeline.planner.pipeline import Schedule
from ridgeline.trainer.pipeline import pipeline_gradient
from tests.models.test_backward_order import REMAT
from tests.sampling import drawn
from tests.sharding.test_equality import EXPERTS, make_batch, make_config, prepared

LAYERS = 8
MICROBATCHES = 4
MESHES = {
    "fsdp": {"fsdp": 4},
    "tensor": {"fsdp": 2, "tensor": 2},
    "ring": {"fsdp": 2, "tensor": 2},
    "context": {"fsdp": 2, "context": 2},
    "data": {"data": 2, "tensor": 2},
    "no loop": {"fsdp": 2, "tensor": 2},
    "two kinds of layers": {"tensor": 4},
    "experts": {"fsdp": 2, "expert": 2},
    "experts over tensor": {"tensor": 2, "expert": 2},
}


def written_into_rings(jaxpr: Any, kept: int) -> set[tuple[int, ...]]:
    """Return the shapes of what is written into slots of arrays that have one for each unit in flight, in a traced program."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dynamic_update_slice":
            ring, update = (variable.aval.shape for variable in equation.invars[:2])
            if ring[0] == kept and update == (1, *ring[1:]):
                found.add(ring[1:])
        for inner in jaxprs_in_params(equation.params):
            found |= written_into_rings(inner, kept)
    return found


@pytest.mark.parametrize(("mesh", "remat"), drawn([(mesh, remat) for mesh in MESHES for remat in REMAT], 4))
def test_stages_keep_no_parameters(mesh, remat):
    """Both passes get them from the state: with a copy of them for each microbatch in flight a stage would need many times their memory."""
    model = EXPERTS if "experts" in mesh else {"sliding_window": 5, "full_attention_every": 2} if "kinds" in mesh else {}
    config = make_config(1, 1, 1, MICROBATCHES, num_layers=LAYERS, head_dim=12, **model)
    changes = {"remat": REMAT[remat], "tensor_overlap": "ring" if mesh == "ring" else "gather", "scan_layers": mesh != "no loop"}
    compute = config.compute.model_copy(update=changes)
    sizes = {"pipeline": 2, **MESHES[mesh]}
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes), "compute": compute})
    partitioner, spec, _, abstract = prepared(config, jax.devices())
    schedule = Schedule.of(config, partitioner.mesh.shape)
    gradient = pipeline_gradient(spec, config, partitioner)
    micro = {name: np.reshape(of, (MICROBATCHES, -1, of.shape[1])) for name, of in make_batch(0).items()}
    traced = jax.make_jaxpr(gradient)(abstract.params, abstract.amax, micro, np.float32(1))
    written = written_into_rings(traced.jaxpr, schedule.kept)
    matrices = {tuple(sorted(leaf.shape[1:])) for leaf in jax.tree.leaves(abstract.params["blocks"]) if leaf.ndim > 2}
    for shape in written:  # parameters of one layer, of the layers of a turn, or of all
        kept = [at for at in range(len(shape)) if math.prod(shape[:at]) in (1, 2, LAYERS // schedule.stages)]
        assert not any(tuple(sorted(shape[at:])) in matrices for at in kept), shape
    assert written


def manual_axes_of(jaxpr: Any, kernel: str, outside: frozenset[str] = frozenset()) -> list[frozenset[str]]:
    """Return the mesh axes over which the program is manual at each call of a primitive whose name holds `kernel`."""
    found = []
    for equation in jaxpr.eqns:
        if kernel in equation.primitive.name:
            found.append(outside)
        manual = outside | frozenset(equation.params.get("newly_manual_axes", ()))
        for inner in jaxprs_in_params(equation.params):
            found += manual_axes_of(inner, kernel, manual)
    return found


@pytest.mark.parametrize(("backend", "kernel"), [("cudnn", "dot_product_attention"), ("pallas", "pallas_call")])
def test_kernels_of_attention_get_the_shards_of_one_device_in_a_stage(backend, kernel, monkeypatch):
    """Partly manual, XLA does not partition them: the compilation for GPUs failed with cuDNN."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda wanted: float(wanted) <= 9)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda wanted: float(wanted) == 9)
    config = make_config(1, 2, 2, MICROBATCHES, num_layers=LAYERS)
    partitioner = prepared(config.model_copy(update={"mesh": config.mesh.model_copy(update={"pipeline": 2})}), jax.devices())[0]
    request = AttentionRequest("gpu", jnp.dtype("bfloat16"), head_dim=64, num_heads=8, num_kv_heads=8, packed=False)
    attention = SelfAttention(partitioner.in_stage, backend, 8, request)

    def gradient(q_BTNH: jax.Array) -> jax.Array:
        return jax.vjp(lambda q: attention(q, q, q, None), q_BTNH)[1](q_BTNH)[0]

    everywhere = PartitionSpec()
    staged = jax.shard_map(
        gradient, mesh=partitioner.mesh, in_specs=everywhere, out_specs=everywhere, axis_names={"pipeline"}, check_vma=False
    )
    traced = jax.make_jaxpr(jax.jit(staged))(jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16))
    assert set(manual_axes_of(traced.jaxpr, kernel)) == {frozenset(partitioner.mesh.axis_names)}
