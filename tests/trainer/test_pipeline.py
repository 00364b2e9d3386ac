"""What pipeline stages keep between the forward and the backward pass of a microbatch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from ridgeline.configs.schema import RematConfig
from ridgeline.planner.pipeline import Schedule
from ridgeline.trainer.pipeline import pipeline_gradient
from tests.sampling import drawn
from tests.sharding.test_equality import EXPERTS, make_batch, make_config, prepared

LAYERS = 4
MICROBATCHES = 4
REMAT = {
    "none": RematConfig(policy="none"),
    "attention-only": RematConfig(policy="attention-only"),
    "dots": RematConfig(policy="dots"),
    "full": RematConfig(policy="full"),
    "names": RematConfig(policy="names", names=["mlp_up"]),
}
MESHES = {
    "fsdp": {"fsdp": 4},
    "tensor": {"fsdp": 2, "tensor": 2},
    "ring": {"fsdp": 2, "tensor": 2},
    "context": {"fsdp": 2, "context": 2},
    "data": {"data": 2, "tensor": 2},
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
    compute = config.compute.model_copy(update={"remat": REMAT[remat], "tensor_overlap": "ring" if mesh == "ring" else "none"})
    sizes = {"pipeline": 2, **MESHES[mesh]}
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes), "compute": compute})
    partitioner, spec, _, abstract = prepared(config, jax.devices())
    schedule = Schedule.of(config, partitioner.mesh.shape)
    gradient = pipeline_gradient(spec, config, partitioner)
    micro = {name: np.reshape(of, (MICROBATCHES, -1, of.shape[1])) for name, of in make_batch(0).items()}
    traced = jax.make_jaxpr(gradient)(abstract.params, abstract.amax, micro, np.float32(1))
    written = written_into_rings(traced.jaxpr, schedule.kept)
    blocks = [leaf.shape for leaf in jax.tree.leaves(abstract.params["blocks"])]
    stacked = {(LAYERS // schedule.stages, *shape[1:]) for shape in blocks if len(shape) > 2}
    assert written and not written & stacked
