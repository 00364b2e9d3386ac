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
from ridgeline.hlo.heap import read_heap
from ridgeline.hlo.parse import parse
from ridgeline.launch.environment import run_flags
from ridgeline.planner.activations import saved_arrays
from ridgeline.planner.hardware import hardware
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import memory_per_device
from ridgeline.trainer.aot.compile import Compiled, Request, compile_ahead, compile_many
from tests.sampling import drawn
from tests.trainer.gpu_models import cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = json.loads((Path(__file__).parent / "compiled_steps_overlap.json").read_text())["cases"]
ATTENTION = "[query,key,value,attention_out]"
OVER_TENSOR = [
    # model, device, rows per device, tokens of a row, fsdp, tensor, further overrides
    ("llama-3.1-8b", "gb200", 2, 32768, 2, 2, []),
    ("llama-3.1-8b", "a100-80gb", 2, 32768, 2, 2, []),
    ("llama-3.1-8b", "b200", 2, 32768, 2, 2, []),
    ("llama-3.1-8b", "h100-sxm", 2, 32768, 2, 2, []),
    ("phi4-14b", "gb200", 16, 16384, 8, 2, []),
    ("phi4-14b", "b200", 16, 16384, 8, 2, []),
    ("mistral-nemo-12b", "gb200", 2, 32768, 32, 4, []),
    ("qwen3-8b", "a100-80gb", 4, 16384, 64, 2, []),
    ("olmo2-7b", "a100-80gb", 8, 8192, 4, 2, []),
    # matmuls of queries are split too on the GPU with more cores
    ("llama-3.2-1b", "gb200", 8, 8192, 8, 2, []),
    ("llama-3.2-1b", "a100-80gb", 8, 8192, 8, 2, []),
    # biases, with and without split matmuls of keys
    ("qwen2.5-32b", "gb200", 16, 4096, 8, 4, []),
    ("qwen2.5-32b", "a100-80gb", 16, 4096, 8, 4, []),
    ("qwen2.5-1.5b", "a100-80gb", 16, 16384, 32, 2, []),
    ("qwen2.5-14b", "gb200", 4, 8192, 8, 2, []),
    ("qwen2.5-14b", "a100-80gb", 4, 8192, 8, 2, []),
    # biases, and the input of MLP down is not computed again for the weight gradients
    ("glm4-9b", "a100-80gb", 4, 8192, 8, 2, []),
    # one kernel for the gradient of a norm's weight
    ("llama-3.1-70b", "gb200", 4, 4096, 4, 8, []),
    ("llama-3.1-70b", "a100-80gb", 4, 4096, 4, 8, []),
    # matmuls are library calls
    ("qwen3-8b", "gb200", 8, 32768, 4, 4, ["precision.matmul=fp8"]),
    # inputs pass a ring
    ("llama-3.1-8b", "gb200", 16, 2048, 2, 2, ["compute.tensor_overlap=ring"]),
    # attention's update is kept, or the values of attention alone
    ("llama-3.1-8b", "gb200", 8, 8192, 8, 2, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"]),
    ("llama-3.1-8b", "a100-80gb", 8, 8192, 8, 2, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"]),
    ("llama-3.1-8b", "gb200", 8, 8192, 8, 2, ["compute.remat.policy=names", "compute.remat.names=[query,key,value]"]),
    ("llama-3.1-70b", "a100-80gb", 16, 2048, 4, 8, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"]),
    ("llama-3.1-70b", "gb200", 16, 2048, 4, 8, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"]),
    ("llama-2-7b", "a100-80gb", 4, 4096, 32, 2, ["compute.remat.policy=dots"]),
    ("qwen2.5-7b", "a100-80gb", 16, 1024, 64, 2, ["compute.remat.policy=dots"]),
    ("qwen2.5-7b", "a100-80gb", 8, 8192, 8, 2, ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}"]),
    ("llama-3.2-3b", "gb200", 16, 4096, 2, 2, ["compute.remat.policy=offload", "compute.remat.names=[query,mlp_up]"]),
    # gathered streams are kept, with and without fsdp
    ("llama-3.2-3b", "h100-sxm", 8, 8192, 1, 8, ["compute.remat.policy=none"]),
    ("llama-3.1-8b", "h100-sxm", 4, 8192, 1, 8, ["compute.remat.policy=none", "precision.matmul=fp8_delayed"]),
    ("llama-3.2-1b", "h200-sxm", 8, 32768, 8, 8, ["compute.remat.policy=attention-only"]),
    ("llama-3.1-8b", "h100-sxm", 8, 4096, 8, 4, ["compute.remat.policy=attention-only", "compute.tensor_overlap=ring"]),
    (
        "llama-3.1-8b",
        "b200",
        8,
        8192,
        8,
        4,
        ["compute.remat.policy=names", f"compute.remat.names={ATTENTION}", "compute.tensor_overlap=ring"],
    ),
    # layers are not alike
    ("gemma3-4b", "h100-sxm", 8, 8192, 4, 2, ["compute.remat.policy=dots"]),
]
"""Steps of which XLA copied, or transposed, stacks of saved values before the backward pass waited for them (models/backward_order.py)."""


AGAIN = {"models/llama-3.2-1b": 8, "models/llama-3.1-70b": 1024}
"""Model -> devices of its first row in the table on so many."""


B16 = ("precision.params=bfloat16", "precision.stochastic_rounding=true")
OVER_DATA = [
    # model, cluster, rows, mesh, further overrides
    ("llama-3.1-8b", "dgx-h100", 8, {"data": 8}, []),
    ("llama-3.1-8b", "dgx-h100", 8, {"data": 8}, ["optimizer.kind=adafactor"]),
    ("llama-3.1-8b", "dgx-h100", 8, {"data": 8}, ["optimizer.offload=true"]),
    ("llama-3.1-8b", "dgx-h100", 16, {"data": 8}, [*B16, "trainer.accumulation=2"]),
    ("llama-2-13b", "dgx-a100", 16, {"data": 4, "fsdp": 4}, ["precision.moments=int8"]),
    ("qwen2.5-14b", "dgx-b200", 8, {"data": 2, "tensor": 4}, ["precision.gradients=bfloat16"]),
    ("phi4-14b", "dgx-h200", 16, {"data": 8}, ["optimizer.kind=lion", "trainer.accumulation=2"]),
    ("olmo2-7b", "gb200-nvl72", 8, {"data": 8}, ["optimizer.kind=sgd"]),
    ("qwen3-8b", "dgx-h100", 16, {"data": 8}, ["precision.moments=bfloat16", "trainer.accumulation=2"]),
    ("gemma2-9b", "dgx-h200", 8, {"data": 8}, []),
    ("glm4-9b", "dgx-b200", 8, {"data": 8}, ["precision.matmul=fp8"]),
    ("olmo3-7b", "dgx-h100", 8, {"data": 8}, []),
]


SCALED = ("olmo3-7b", "llama-2-7b", "gemma2-2b")
CHUNKED = ("mesh.pipeline_chunks=2", "optimizer.kind=sgd", "compute.loss_chunk=8192")
IN_STAGES = [
    # model, cluster, tokens of a row, rows, microbatches, mesh, further overrides
    ("gpt2-xl", "dgx-h100", 8192, 64, 2, {"pipeline": 2, "fsdp": 4}, ["precision.gradients=bfloat16"]),
    ("qwen2.5-32b", "mn5-acc", 2048, 512, 2, {"pipeline": 2, "fsdp": 32, "tensor": 2}, ["precision.gradients=bfloat16"]),
    ("llama-3.1-70b", "dgx-h200", 4096, 64, 16, {"pipeline": 8, "data": 2, "fsdp": 2}, []),
    ("mixtral-8x7b", "dgx-h200", 4096, 128, 2, {"pipeline": 2, "fsdp": 8, "expert": 2}, []),
    ("olmo3-7b", "dgx-a100", 4096, 32, 8, {"pipeline": 2, "data": 4}, ["mesh.zero_stage=2", "precision.moments=int8"]),
    ("gemma3-12b", "dgx-a100", 1024, 64, 8, {"pipeline": 2, "fsdp": 4, "tensor": 2}, ["compute.remat.policy=dots"]),
    ("gemma3-12b", "dgx-h100", 4096, 32, 2, {"pipeline": 2, "fsdp": 8, "tensor": 8}, ["compute.remat.policy=none"]),
    ("llama-2-7b", "dgx-b200", 2048, 1024, 2, {"pipeline": 2, "data": 4, "fsdp": 8}, [*CHUNKED, "compute.remat.policy=attention-only"]),
    ("olmo3-7b", "dgx-b200", 4096, 32, 4, {"pipeline": 2, "data": 4}, ["mesh.zero_stage=2", "precision.matmul=nvfp4"]),
    ("llama-2-7b", "dgx-b200", 4096, 32, 4, {"pipeline": 2, "data": 4}, ["mesh.zero_stage=2", "precision.matmul=mxfp8"]),
]


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
@pytest.mark.parametrize("number", drawn(list(range(len(OVER_TENSOR))), 4))
def test_no_stack_of_saved_values_is_copied_over_tensor(number):
    """One microbatch of ten layers (Gemma 3: four turns of six), compiled here and now. A stack has a dim of all layers."""
    model, device, rows, length, fsdp, tensor, more = OVER_TENSOR[number]
    layers = 24 if "gemma" in model else 10
    shape = (f"data.seq_len={length}", f"model.max_seq_len={length}", f"data.batch_size={rows * fsdp}", f"model.num_layers={layers}")
    shape = (*shape, f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}", "data.document_masking=false", "precision.compute=bfloat16")
    config = load(f"models/{model}", (*shape, "trainer.accumulation=1", "compute.remat.policy=full", *more)).config
    flags, level = run_flags(config, device)
    clusters = {"gb200": "gb200-nvl72", "b200": "dgx-b200", "h200-sxm": "dgx-h200", "a100-80gb": "dgx-a100", "h100-sxm": "dgx-h100"}
    per_node = min(fsdp * tensor, 4 if device == "gb200" else 8)
    on = load_cluster(clusters[device]).config.model_copy(update={"devices_per_node": per_node, "nodes": None})
    assert on.device == device
    result = compile_ahead(Request.on(config, on, fsdp * tensor // per_node, xla_flags=flags, optimization_level=level))
    assert result.buffers_text is not None and result.live_ranges_text is not None
    heap, module = read_heap(result.buffers_text, result.live_ranges_text), parse(result.hlo_text)
    local = LocalSizes.of(config, result.mesh)
    stack = layers * local.cut_stream_bytes
    kept = sum(count for count, size in saved_arrays(local, "cudnn") if size in (local.cut_stream_bytes, local.stream_bytes))
    points = heap.peaks(module)
    for point in ("start of the backward pass", "backward pass"):
        live = [each for each in heap.buffers(module, points[point]) if each.dtype == "bf16" and layers in each.dims]
        found = [each for each in live if each.bytes // each.copies in (stack, stack * tensor)]
        assert sum(each.copies for each in found) <= kept, (point, found)
    # gaps in XLA's heap are not planned
    planned = memory_per_device(config, result.mesh, device=hardware(device))
    assert (result.argument_bytes + result.temp_bytes - heap.gap_bytes) / planned.compiled_bytes - 1 < 0.08


WITH_EXPERTS = [
    # model, cluster, mesh, further overrides: gate and up are kept
    ("qwen3-30b-a3b", "dgx-h100", {"fsdp": 8}, ("compute.remat.policy=none", "precision.matmul=fp8")),
    ("mixtral-8x7b", "dgx-h100", {"fsdp": 2, "tensor": 4}, ("compute.remat.policy=none", "precision.matmul=fp8_delayed")),
    ("qwen3-30b-a3b", "dgx-h200", {"fsdp": 4, "tensor": 2}, ("compute.remat.policy=attention-only", "precision.matmul=fp8_delayed")),
    ("mixtral-8x7b", "dgx-b200", {"fsdp": 2, "expert": 4}, ("compute.remat.policy=dots", "precision.matmul=fp8")),
]
OF_EXPERTS = 6
"""Layers of these steps."""


def with_experts(model, name, mesh, more):
    """Return a step of a model with experts as compiled here and now: two microbatches of four rows per device; and its config."""
    axes = (*(f"mesh.{axis}={size}" for axis, size in ({"fsdp": 1} | mesh).items()), "trainer.accumulation=2")
    rows = 8 * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    shape = (f"model.num_layers={OF_EXPERTS}", "data.seq_len=4096", f"data.batch_size={rows}", "data.document_masking=false")
    config = load(f"models/{model}", (*shape, *axes, "precision.compute=bfloat16", *more)).config
    on = load_cluster(name).config.model_copy(update={"nodes": None})
    flags, level = run_flags(config, on.device)
    result = compile_ahead(Request.on(config, on, 1, xla_flags=flags, optimization_level=level))
    assert result.heap is not None
    return result, config


@pytest.mark.slow
@pytest.mark.parametrize("number", drawn(list(range(len(WITH_EXPERTS))), 1))
def test_no_stack_of_gate_or_up_of_experts_is_copied(number):
    """XLA would copy both, to write the last layer's into the copies, while its backward pass reads them."""
    result, config = with_experts(*WITH_EXPERTS[number])
    heap, module, local = result.heap, parse(result.hlo_text), LocalSizes.of(config, result.mesh)
    for point in ("loss", "start of the backward pass"):
        live = [each for each in heap.buffers(module, heap.peaks(module)[point]) if each.dtype == "bf16" and OF_EXPERTS in each.dims]
        stacks = [each for each in live if each.bytes // each.copies == OF_EXPERTS * local.hidden_bytes]
        assert sum(each.copies for each in stacks) == 2, (point, live)


@pytest.mark.slow
def test_no_stack_of_block_inputs_of_experts_is_copied_over_tensor():
    """Attention's values are kept, gate and up are not."""
    kept = ("compute.remat.policy=names", "compute.remat.names=[query,key,value]")
    result, config = with_experts("qwen3-30b-a3b", "dgx-a100", {"fsdp": 2, "tensor": 4}, kept)
    heap, module, local = result.heap, parse(result.hlo_text), LocalSizes.of(config, result.mesh)
    stack, counts = OF_EXPERTS * local.cut_stream_bytes, []
    for position in {value.begin for value in heap.values if value.bytes == stack}:
        live = [each for each in heap.buffers(module, position) if each.dtype == "bf16" and OF_EXPERTS in each.dims]
        counts.append(sum(each.copies for each in live if each.bytes // each.copies == stack))
    assert max(counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", drawn([{"fsdp": 8}, {"fsdp": 2, "expert": 4}, {"expert": 8}], 1))
def test_attention_of_layers_with_experts_is_not_computed_again_beside_the_loss(mesh):
    """XLA would, for the three layers outside of the loop, if only their MLPs waited for gradients, or nothing did."""
    result, config = with_experts("qwen3-30b-a3b", "dgx-h100", mesh, ("compute.remat.policy=full",))
    heap, module, local = result.heap, parse(result.hlo_text), LocalSizes.of(config, result.mesh)
    live = heap.buffers(module, heap.peaks(module)["loss"])
    again = [each for each in live if "rematted_computation" in each.op_name and each.bytes >= local.key_bytes]
    assert not [each for each in again if "attention" in each.what and "sharding_constraint" not in each.op_name], again


DEFERRED = [
    # model, cluster, mesh, tokens of a row, further overrides
    ("mixtral-8x7b", "dgx-b200", {"fsdp": 8}, 16384, ("compute.remat.policy=full",)),
    ("mixtral-8x7b", "dgx-h200", {"fsdp": 4, "expert": 2}, 4096, ("compute.remat.policy=names", f"compute.remat.names={ATTENTION}")),
    ("qwen3-30b-a3b", "dgx-h200", {"fsdp": 4, "expert": 2}, 32768, ("compute.remat.policy=full", "compute.experts.capacity_factor=1.25")),
    ("qwen3-30b-a3b", "dgx-b200", {"fsdp": 4, "tensor": 2}, 16384, ("compute.remat.policy=full",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", drawn(list(range(len(DEFERRED))), 1))
def test_unreduced_gradients_of_two_layers_at_most_are_there_where_reductions_are_deferred(number):
    """XLA would keep those of all layers that it takes out of the loop for the reductions: five or six layers' matrices."""
    model, name, mesh, tokens, more = DEFERRED[number]
    result, config = with_experts(model, name, mesh, (f"data.seq_len={tokens}", f"model.max_seq_len={tokens}", *more))
    heap, module, local = result.heap, parse(result.hlo_text), LocalSizes.of(config, result.mesh)
    matrix = local.mlp_matrix * local.gradient_itemsize
    for point, position in heap.peaks(module).items():
        live = [each for each in heap.buffers(module, position) if each.dtype == "f32" and each.bytes // each.copies == matrix]
        assert sum(each.copies for each in live) <= 6, (point, live)  # gate, up and down
    planned = memory_per_device(config, result.mesh, device=hardware(load_cluster(name).config.device))
    assert abs((result.argument_bytes + result.temp_bytes) / planned.compiled_bytes - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("number", drawn(list(range(len(OVER_DATA))), 2))
def test_updated_parameters_are_gathered_in_turn(number):
    """mesh.zero_stage=2 as compiled here and now: XLA alone would gather all of them at once, beside those of before."""
    model, name, rows, mesh, more = OVER_DATA[number]
    axes = (*(f"mesh.{axis}={size}" for axis, size in ({"fsdp": 1} | mesh).items()), "mesh.zero_stage=2", f"data.batch_size={rows}")
    shape = ("data.seq_len=1024", "data.document_masking=false", "precision.compute=bfloat16", "compute.remat.policy=full")
    config = load(f"models/{model}", (*shape, *axes, *more)).config
    on = load_cluster(name).config.model_copy(update={"nodes": None})
    flags, level = run_flags(config, on.device)
    result = compile_ahead(
        Request.on(config, on, math.prod(mesh.values()) // on.devices_per_node, xla_flags=flags, optimization_level=level)
    )
    assert result.buffers_text is not None and result.live_ranges_text is not None
    heap, module = read_heap(result.buffers_text, result.live_ranges_text), parse(result.hlo_text)
    local = LocalSizes.of(config, result.mesh)
    largest = max(local.mlp_matrices, local.table) // local.fsdp * local.parameter_itemsize
    points = [at for at, of in enumerate(heap.schedule) if of.startswith("all-gather-start")]
    live = {at: [each for each in heap.buffers(module, at) if each.name.startswith("all-gather-start")] for at in points}
    updated = [sum(each.bytes for each in found if "optimizer/" in each.op_name) for found in live.values()]
    # a large and a small one; XLA gathers the unembedding into its place
    assert largest <= max(updated) <= 1.6 * largest
    planned = memory_per_device(config, result.mesh, device=hardware(on.device))
    assert abs((result.argument_bytes + result.temp_bytes - heap.gap_bytes) / planned.compiled_bytes - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("model", "matmul"), drawn([(m, of) for m in SCALED for of in ("nvfp4", "mxfp8")], 1))
def test_block_scaled_matmuls_transpose_one_layer_at_a_time(model, matmul):
    """Parameters on every device: XLA would transpose all of them, in float32, before the loop over microbatches."""
    axes = ("mesh.data=8", "mesh.fsdp=1", "mesh.zero_stage=2", "trainer.accumulation=2", "data.batch_size=16", "data.seq_len=1024")
    more = ("data.document_masking=false", "precision.compute=bfloat16", "compute.remat.policy=full", f"precision.matmul={matmul}")
    config = load(f"models/{model}", (*axes, *more)).config
    flags, level = run_flags(config, "b200")
    result = compile_ahead(Request.on(config, load_cluster("dgx-b200").config, 1, xla_flags=flags, optimization_level=level))
    assert result.heap is not None
    module, stack = parse(result.hlo_text), config.model.num_layers * config.model.embed_dim * config.model.mlp_dim
    live = result.heap.buffers(module, result.heap.peaks(module)["forward pass"])
    assert not [each for each in live if each.dtype == "f32" and math.prod(each.dims) == stack]


def in_stages(model, name, length, rows, micro, mesh, more):
    """Return a step as compiled here and now, and what is planned for it."""
    axes = (*(f"mesh.{axis}={size}" for axis, size in ({"fsdp": 1} | mesh).items()), f"trainer.accumulation={micro}")
    shape = (f"data.seq_len={length}", f"model.max_seq_len={length}", f"data.batch_size={rows}", "data.document_masking=false")
    config = load(f"models/{model}", (*shape, *axes, "precision.compute=bfloat16", "compute.remat.policy=full", *more)).config
    on = load_cluster(name).config.model_copy(update={"nodes": None})
    flags, level = run_flags(config, on.device)
    nodes = math.prod(mesh.values()) // on.devices_per_node
    result = compile_ahead(Request.on(config, on, nodes, xla_flags=flags, optimization_level=level))
    assert result.heap is not None
    return result, memory_per_device(config, result.mesh, device=hardware(on.device))


@pytest.mark.slow
@pytest.mark.parametrize("number", drawn(list(range(len(IN_STAGES))), 2))
def test_stages_keep_what_is_planned_of_each_microbatch_in_flight(number):
    """No parameters, no copy of the slots in another layout, and no residuals beside the slots they are in."""
    result, planned = in_stages(*IN_STAGES[number])
    assert planned.argument_bytes == pytest.approx(result.argument_bytes, rel=5e-3)
    assert abs((result.argument_bytes + result.temp_bytes - result.heap.gap_bytes) / planned.compiled_bytes - 1) < 0.05


@pytest.mark.slow
def test_two_layers_of_a_stage_are_not_recomputed_together():
    """In a loop of two turns, which XLA unrolls, this step needs more than planned."""
    result, planned = in_stages("llama-3.2-1b", "dgx-h100", 8192, 256, 16, {"pipeline": 8, "fsdp": 2}, [])
    assert result.argument_bytes + result.temp_bytes < planned.compiled_bytes


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
