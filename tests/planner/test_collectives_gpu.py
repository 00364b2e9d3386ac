"""The plan's collectives against the compiled GPU module: bytes of every kind over every set of axes, three families, twelve layouts."""

import math
from functools import cache

import pytest

from perf.collectives import collectives
from perf.hlo import parse
from planner.collectives import as_compiled_for_gpu, bytes_per_step, planned_collectives
from tests.trainer.gpu_models import SHAPES, cluster, small
from trainer.aot import Compiled, Request, compile_many
from trainer.aot_report import build_report
from trainer.compile_record import collective_json
from trainer.traffic import payload_bytes

LAYOUTS = {
    "data8": ("mesh.data=8",),
    "fsdp8": ("mesh.fsdp=8", "compute.remat.policy=none"),
    "fsdp8-dots": ("mesh.fsdp=8", "compute.remat.policy=dots", "trainer.accumulation=2"),
    "data2-fsdp4": ("mesh.data=2", "mesh.fsdp=4", "compute.remat.policy=full"),
    "data4-tensor2": ("mesh.data=4", "mesh.tensor=2", "compute.remat.policy=dots"),
    "fsdp4-tensor2": ("mesh.fsdp=4", "mesh.tensor=2", "compute.remat.policy=full"),
    "fsdp2-tensor4": ("mesh.fsdp=2", "mesh.tensor=4", "compute.remat.policy=attention-only"),
    "data2-fsdp2-tensor2": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "compute.remat.policy=none"),
    "fsdp16": ("mesh.fsdp=16", "compute.remat.policy=attention-only"),
    "data4-fsdp4": ("mesh.data=4", "mesh.fsdp=4", "compute.remat.policy=full", "trainer.accumulation=2", "data.batch_size=32"),
    "data2-fsdp4-tensor2": ("mesh.data=2", "mesh.fsdp=4", "mesh.tensor=2", "compute.remat.policy=dots"),
    "fsdp4-tensor4": ("mesh.fsdp=4", "mesh.tensor=4", "compute.remat.policy=full", "trainer.accumulation=2"),
}
SCALARS_BYTES = 1024
"""Losses, counts and norms of gradients, a few words each."""


def request(family, overrides):
    """As many nodes of eight devices as the mesh has devices for."""
    config = small(family, *overrides)
    return Request.on(config, cluster(), math.prod(config.mesh.sizes.values()) // 8)


@cache
def compiled(family):
    """Every layout of a family, compiled in one process."""
    requests = [request(family, overrides) for overrides in LAYOUTS.values()]
    return dict(zip(LAYOUTS, zip(requests, compile_many(requests), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.xdist_group(f"gpu-steps-{name}")) for name in SHAPES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gpu_step_moves_the_bytes_that_are_planned_and_no_others(family, layout):
    asked, result = compiled(family)[layout]
    assert isinstance(result, Compiled), result
    planned = bytes_per_step(as_compiled_for_gpu(planned_collectives(asked.config, result.mesh)))
    found = {}
    for c in collectives(parse(result.hlo_text), result.mesh):
        if payload_bytes(c) > SCALARS_BYTES:
            found[c.kind, c.axes] = found.get((c.kind, c.axes), 0) + payload_bytes(c) * c.count
    assert found == pytest.approx(planned, rel=1e-4, abs=SCALARS_BYTES)
    report = build_report(asked, cluster(), result)
    assert all(row.agrees for row in report.traffic), report.traffic
    assert [collective_json(c) for c in report.unplanned] == []


@pytest.mark.slow
def test_an_accidental_resharding_is_unplanned_and_has_a_source_line():
    """An MLP that nobody cuts: its matrices are gathered whole over fsdp, and its activations over nothing."""
    asked = request("llama", ("mesh.fsdp=4", "mesh.tensor=2", "mesh.rules.mlp=[]"))
    (result,) = compile_many([asked])
    assert isinstance(result, Compiled), result
    extra = build_report(asked, cluster(), result).unplanned
    assert extra and all(c.bytes > 0 for c in extra)
    assert any(c.source is not None and c.source.file.endswith(".py") and "models" in c.source.file for c in extra)
