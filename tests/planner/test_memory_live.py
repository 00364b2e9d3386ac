"""The memory model against steps compiled here and now: the table of compiled sizes is checked by doing some of them again."""

import json
import math
import random
import sys
from pathlib import Path

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.launch.environment import run_flags
from ridgeline.planner.hardware import hardware
from ridgeline.planner.memory import memory_per_device
from ridgeline.trainer.aot.compile import Compiled, Request, compile_ahead, compile_many
from tests.sampling import drawn
from tests.trainer.gpu_models import cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = json.loads((Path(__file__).parent / "compiled_steps_overlap.json").read_text())["cases"]
AGAIN = {"models/llama-3.2-1b": 8, "models/llama-3.1-70b": 1024}
"""Model -> devices of its first row in the table on so many."""


def row(model):
    return next(case for case in TABLE if case["config"] == model and math.prod(case["mesh"].values()) == AGAIN[model])


def resolved(case):
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **case["mesh"]}.items()]
    return load(case["config"], (*case["overrides"], *mesh, "precision.compute=bfloat16")).config


@pytest.mark.slow
def test_rows_compiled_again_equal_the_table_and_are_within_five_percent_of_the_model():
    models = drawn(list(AGAIN), 1)
    rows = [row(model) for model in models]
    configs = [resolved(case) for case in rows]
    requests = [
        Request.on(config, cluster(), AGAIN[model] // 8, optimization_level="O1") for model, config in zip(models, configs, strict=True)
    ]
    for case, config, result in zip(rows, configs, compile_many(requests), strict=True):
        assert isinstance(result, Compiled), result
        assert result.argument_bytes == pytest.approx(case["argument_bytes"], rel=1e-3)
        assert result.temp_bytes == pytest.approx(case["temp_bytes"], rel=0.02)
        planned = memory_per_device(config, result.mesh, overlap=True, combined=False).compiled_bytes
        assert planned == pytest.approx(result.argument_bytes + result.temp_bytes, rel=0.05)


DRAWN = 3
"""By the sampler; one of them is compiled per commit."""
SAME_FLAGS = ("remat", "packing", "params", "moments", "loss_chunk")
"""Knobs of the sampler that do not change XLA's flags, so that one process compiles all."""


@pytest.mark.slow
def test_steps_drawn_over_every_knob_take_what_is_planned(monkeypatch):
    """A few of what `make bench-memory` draws by the hundred: four layers of a 1B model on eight H100, with one microbatch and fsdp, or
    with two and ZeRO stage 2."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from plan_vs_compile import KNOBS

    rng = random.Random(13)
    configs = []
    meshes = ("mesh.fsdp=8",), ("mesh.data=4", "mesh.fsdp=2", "mesh.zero_stage=2", "trainer.accumulation=2")
    for number in range(DRAWN):
        shape = ("model.num_layers=4", "data.seq_len=4096", "data.batch_size=64", *meshes[number % 2])
        knobs = [item for knob in SAME_FLAGS for item in rng.choices(*zip(*KNOBS[knob], strict=True))[0]]
        configs.append(load("models/llama-3.2-1b", (*shape, "precision.compute=bfloat16", *knobs)).config)
    configs = drawn(configs, 1)
    ((flags, level),) = {run_flags(config, "h100-sxm") for config in configs}
    requests = [Request.on(config, cluster(), 1, xla_flags=flags, optimization_level=level) for config in configs]
    for config, result in zip(configs, compile_many(requests), strict=True):
        assert isinstance(result, Compiled), result
        planned = memory_per_device(config, result.mesh)
        assert planned.argument_bytes == pytest.approx(result.argument_bytes, rel=1e-3)
        error = (result.argument_bytes + result.temp_bytes) / planned.compiled_bytes - 1
        assert abs(error) < 0.08, (error, config.compute, config.precision)
        assert result.allocated_bytes <= planned.total_bytes


@pytest.mark.slow
@pytest.mark.parametrize("device", ["gb200", "b200"])
def test_a_stack_is_copied_over_tensor_only_where_xla_has_measured_matmul_times(device):
    """What the plan knows of XLA's tables (planner/constant_costs.py), asked of the compiler: one step, two GPUs of one architecture."""
    shape = ("data.seq_len=32768", "model.max_seq_len=32768", "data.batch_size=8", "trainer.accumulation=2", "data.document_masking=false")
    config = load(
        "models/llama-3.1-8b", (*shape, "mesh.fsdp=2", "mesh.tensor=2", "compute.remat.policy=full", "precision.compute=bfloat16")
    ).config
    flags, level = run_flags(config, device)
    name = {"gb200": "gb200-nvl72", "b200": "dgx-b200"}[device]
    on = load_cluster(name).config.model_copy(update={"devices_per_node": 4, "nodes": None})
    result = compile_ahead(Request.on(config, on, 1, xla_flags=flags, optimization_level=level))
    planned = memory_per_device(config, result.mesh, device=hardware(device))
    assert planned.compiled_bytes == pytest.approx(result.argument_bytes + result.temp_bytes, rel=0.025)
    other = memory_per_device(config, result.mesh, device=hardware({"gb200": "b200", "b200": "gb200"}[device]))
    assert other.compiled_bytes != pytest.approx(planned.compiled_bytes, rel=0.05)


def test_the_sampler_draws_only_attention_that_the_model_can_use(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from plan_vs_compile import check_attention

    pallas = ("compute.attention.backend=pallas", "precision.compute=bfloat16")
    check_attention(load("models/llama-3.2-1b", pallas).config)
    with pytest.raises(UserError, match="pallas"):
        check_attention(load("models/gemma2-2b", pallas).config)


NARROW = ("precision.params=bfloat16", "precision.stochastic_rounding=true", "precision.moments=int8", "precision.gradients=bfloat16")


@pytest.mark.slow
def test_a_narrow_state_stays_narrow_in_the_compiled_update_and_takes_what_is_planned():
    """8B on eight H100 with four microbatches and nothing recomputed, as a run compiles it."""
    overrides = ("data.seq_len=4096", "data.batch_size=64", "data.document_masking=false", "precision.compute=bfloat16", "mesh.fsdp=8")
    config = load("models/llama-3.1-8b", (*overrides, *NARROW, "compute.remat.policy=none", "trainer.accumulation=4")).config
    flags, level = run_flags(config, "h100-sxm")
    result = compile_ahead(Request.on(config, cluster(), 1, xla_flags=flags, optimization_level=level))
    planned = memory_per_device(config, result.mesh, overlap=True)
    assert planned.argument_bytes == pytest.approx(result.argument_bytes, rel=1e-3)
    assert planned.compiled_bytes == pytest.approx(result.argument_bytes + result.temp_bytes, rel=0.03)
    module = parse(result.hlo_text)
    update = [each for each in module.computations[module.entry].instructions if "optimizer/" in each.op_name]
    matrices = {math.prod(leaf["local_shape"]) for leaf in result.leaves if "mu.code" in leaf["name"]}
    narrow = {"s8", "u8", "bf16"}
    written = [shape for each in update for shape in each.shapes if math.prod(shape.dims) in matrices]
    codes = [(leaf["name"], tuple(leaf["local_shape"])) for leaf in result.leaves if "mu.code" in leaf["name"]]
    turned = {shape for name, shape in codes if name.endswith(("mlp.down", "attention.out"))}  # planner/kernels.py
    kept = {shape.dtype for shape in written if shape.dims not in turned}
    assert len(turned) == 2 and kept == narrow, "only transposed gradients are float32 on the way from gradient to update"
    moved = collectives(module, result.mesh)
    assert not [c for c in moved if c.dtype in ("s8", "u8") or ("optimizer/" in c.op_name and c.bytes > 64)], "scales are each device's own"
