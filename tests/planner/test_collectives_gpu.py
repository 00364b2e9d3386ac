"""The plan's collectives against the compiled GPU module: bytes of every kind over every set of axes, of a sample of 57 cases."""

import math
from functools import cache

import pytest

from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.collectives import as_compiled_for_gpu, bytes_per_step, planned_collectives
from ridgeline.planner.memory import memory_per_device
from ridgeline.trainer.aot.compile import Compiled, Request, compile_many
from ridgeline.trainer.aot.report import build_report
from ridgeline.trainer.plan_comparison import payload_bytes
from ridgeline.trainer.plan_record import compiled_collective
from tests.sampling import drawn
from tests.trainer.gpu_models import QUICK, SHAPES, cluster, small

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
    "data8-zero": ("mesh.data=8", "mesh.zero_stage=2"),
    "data2-fsdp2-tensor2-zero": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "mesh.zero_stage=2", "trainer.accumulation=2"),
    "fsdp4-tensor4": ("mesh.fsdp=4", "mesh.tensor=4", "compute.remat.policy=full", "trainer.accumulation=2"),
    "data2-context4-ring": ("mesh.data=2", "mesh.context=4", "compute.remat.policy=none", "compute.attention.context=ring"),
    "fsdp2-context2-tensor2-ring": (
        *("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "compute.remat.policy=full", "compute.attention.context=ring"),
        "trainer.accumulation=2",
    ),
    "pipeline2-fsdp2-tensor2": (  # attention of cuDNN; packed rows have that of Pallas
        *("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "compute.remat.policy=full", "trainer.accumulation=4", "model.num_layers=4"),
        "data.document_masking=false",
    ),
    "pipeline2-data2-tensor2": (
        *("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "compute.remat.policy=full", "trainer.accumulation=4", "model.num_layers=4"),
    ),
    "pipeline2-data2-fsdp2-zero": (
        *("mesh.pipeline=2", "mesh.data=2", "mesh.fsdp=2", "mesh.zero_stage=2", "compute.remat.policy=full", "trainer.accumulation=4"),
        "model.num_layers=4",
    ),
    "fsdp4-context2-all-to-all": (*("mesh.fsdp=4", "mesh.context=2", "compute.remat.policy=dots", "compute.attention.context=all_to_all"),),
}
EXPERT_LAYOUTS = {
    "expert8": ("mesh.expert=8", "compute.remat.policy=full", "trainer.accumulation=2"),
    "expert8-capacity": ("mesh.expert=8", "compute.experts.capacity_factor=1.5", "compute.remat.policy=none"),
    "tensor2-expert4": ("mesh.expert=4", "mesh.tensor=2", "compute.remat.policy=none"),
    "fsdp2-tensor2-expert2-gather": ("mesh.fsdp=2", "mesh.tensor=2", "mesh.expert=2", "compute.experts.exchange=gather"),
}
MATMUL_LAYOUTS = {
    "data8-zero-mxfp8": ("mesh.data=8", "mesh.zero_stage=2", "precision.matmul=mxfp8"),
    "data4-tensor2-zero-ring": ("mesh.data=4", "mesh.tensor=2", "mesh.zero_stage=2", "compute.tensor_overlap=ring"),
}
OF_TURNS = ("fsdp8-dots", "data4-tensor2", "fsdp4-tensor2", "data4-fsdp4", "data8-zero", "data2-fsdp2-tensor2-zero", *MATMUL_LAYOUTS)
"""Of models with several kinds of layers."""
EXPERT_TURNS = {
    f"{layout}, experts in turns": overrides
    for layout, overrides in {
        "fsdp4-tensor2": ("mesh.fsdp=4", "mesh.tensor=2", "compute.remat.policy=full"),
        "data2-fsdp4": ("mesh.data=2", "mesh.fsdp=4", "compute.remat.policy=full"),
        "data4-fsdp2": (
            "mesh.data=4",
            "mesh.fsdp=2",
            "compute.remat.policy=names",
            "compute.remat.names=[query]",
            "trainer.accumulation=2",
        ),
        "fsdp8-dots": ("mesh.fsdp=8", "compute.remat.policy=dots"),
        "fsdp4-context2": ("mesh.fsdp=4", "mesh.context=2", "compute.remat.policy=none"),
        "expert8": EXPERT_LAYOUTS["expert8"],
        "fsdp2-tensor2-expert2-gather": (*EXPERT_LAYOUTS["fsdp2-tensor2-expert2-gather"], "compute.remat.policy=full"),
    }.items()
}
"""Of models with several kinds of layers, with experts."""
ACCIDENT = "an MLP that nobody cuts"
LAYOUTS_OF = {
    "llama": (
        *("fsdp8", "fsdp8-dots", "data2-fsdp4", "data4-tensor2", "fsdp4-tensor2", "fsdp2-tensor4", "data4-fsdp4", "data2-fsdp4-tensor2"),
        *("data2-fsdp2-tensor2-zero", "data2-context4-ring", "pipeline2-fsdp2-tensor2"),
        *("pipeline2-data2-tensor2", "pipeline2-data2-fsdp2-zero", ACCIDENT),
    ),
    "qwen3": ("fsdp8-dots", "data4-tensor2", "fsdp4-tensor2", "fsdp2-tensor4", "data2-fsdp2-tensor2", "fsdp2-context2-tensor2-ring"),
    "gpt2": (
        *("data8", "data8-zero", "data2-fsdp2-tensor2-zero", "fsdp16", "data4-tensor2", "data2-fsdp2-tensor2", "fsdp4-tensor4"),
        "fsdp4-context2-all-to-all",
    ),
}
"""Each layout with a family at least, each family with every recomputation, every axis, and microbatches; a compile takes seconds."""
SCALARS_BYTES = 1024
"""Losses, counts and norms of gradients, a few words each."""


CASES = [
    *((family, one) for family, layouts in LAYOUTS_OF.items() for one in layouts if one != ACCIDENT),
    *(("experts", one) for one in EXPERT_LAYOUTS),
    *((family, one) for family in ("gemma2", "olmo3") for one in OF_TURNS),
    *((family, one) for family in ("gpt-oss", "llama4") for one in EXPERT_TURNS),
]
"""Family and layout."""
OVERRIDES = LAYOUTS | EXPERT_LAYOUTS | MATMUL_LAYOUTS | EXPERT_TURNS
SAMPLE = drawn(CASES, 2)
STAGES = "pipeline2-fsdp2-tensor2"


def request(family, layout):
    """As many nodes of eight devices as the mesh has devices for."""
    overrides = ("mesh.fsdp=4", "mesh.tensor=2", "mesh.rules.mlp=[]") if layout == ACCIDENT else OVERRIDES[layout]
    config = small(family, *overrides)
    device = "b200" if config.precision.block_scaled else "h100-sxm"
    return Request.on(config, cluster(device), math.prod(config.mesh.sizes.values()) // 8, xla_flags=QUICK)


@cache
def compiled():
    """The layouts of the sample, compiled in one process."""
    cases = dict.fromkeys([*SAMPLE, ("llama", STAGES), ("llama", ACCIDENT)])
    requests = [request(*case) for case in cases]
    return dict(zip(cases, zip(requests, compile_many(requests), strict=True), strict=True))


def test_every_layout_and_every_family_with_every_recomputation_is_compiled():
    compiled_layouts = {family: [layout for layout in layouts if layout != ACCIDENT] for family, layouts in LAYOUTS_OF.items()}
    assert compiled_layouts.keys() == SHAPES.keys() and {name for names in compiled_layouts.values() for name in names} == LAYOUTS.keys()
    settings = {family: {setting for name in names for setting in LAYOUTS[name]} for family, names in compiled_layouts.items()}
    for family, known in settings.items():
        assert {f"compute.remat.policy={policy}" for policy in ("none", "dots", "full", "attention-only")} <= known, family
        assert {setting.split("=")[0] for setting in known} >= {"mesh.data", "mesh.fsdp", "mesh.tensor", "trainer.accumulation"}, family


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), SAMPLE)
def test_the_gpu_step_moves_the_bytes_that_are_planned_and_no_others(family, layout):
    request, result = compiled()[family, layout]
    assert isinstance(result, Compiled), result
    planned = bytes_per_step(as_compiled_for_gpu(planned_collectives(request.config, result.mesh)))
    found = {}
    for c in collectives(parse(result.hlo_text), result.mesh):
        if payload_bytes(c) > SCALARS_BYTES:
            found[c.kind, c.axes] = found.get((c.kind, c.axes), 0) + payload_bytes(c) * c.count
    model = request.config.model
    metrics = 4 * model.moe_layers * (model.moe.experts + 4) if model.moe is not None else 0  # of the router, for each layer
    # the gradients of the vectors of a layer outside of the loop may be summed over each axis, not over all at once
    vectors = 4 * (2 * model.embed_dim + model.moe.experts) if layout in EXPERT_TURNS else 0
    assert found == pytest.approx(planned, rel=1e-4, abs=SCALARS_BYTES + metrics + vectors)
    report = build_report(request, cluster(), result)
    assert all(row.agrees for row in report.traffic), report.traffic
    assert [compiled_collective(c) for c in report.unplanned] == []


@pytest.mark.slow
def test_stages_need_the_memory_that_is_planned():
    request, result = compiled()["llama", STAGES]
    assert isinstance(result, Compiled), result
    assert "__cudnn$fmha" in result.hlo_text
    planned = memory_per_device(request.config, result.mesh, overlap=False, combined=False)
    assert planned.compiled_bytes == pytest.approx(result.argument_bytes + result.temp_bytes, rel=0.05)


@pytest.mark.slow
def test_an_accidental_resharding_is_unplanned_and_has_a_source_line():
    """An MLP that nobody cuts: its matrices are gathered whole over fsdp, and its activations over nothing."""
    request, result = compiled()["llama", ACCIDENT]
    assert isinstance(result, Compiled), result
    extra = build_report(request, cluster(), result).unplanned
    assert extra and all(c.bytes > 0 for c in extra)
    assert any(c.source is not None and c.source.file.endswith(".py") and "models" in c.source.file for c in extra)
