"""The simulated step has the plan's rates: kernels written by hand take what the plan counts for the same work."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import kernels
from ridgeline.planner.hardware import hardware
from ridgeline.planner.kernels import Kernels
from ridgeline.planner.local import LocalSizes
from ridgeline.trainer.aot.compile import Request
from ridgeline.trainer.aot.simulated import simulate_step
from tests.planner.clusters import CALIBRATION, cluster

ONE = dict.fromkeys(MESH_AXES, 1)
DEVICE = hardware("h100-sxm")
SETTINGS = ["precision.compute=bfloat16", "data.document_masking=false", "data.batch_size=1", "trainer.accumulation=1", "data.seq_len=4096"]


def simulated(model, overrides, *lines):
    """Return the seconds of a step of these instructions, and the plan's kernels of the same config on one device."""
    config = load(f"models/{model}", [*SETTINGS, *overrides]).config
    module = parse(
        "\n".join(["HloModule jit_step, is_scheduled=true\n", "ENTRY %main () -> f32[] {", *(f"  {line}" for line in lines), "}\n"])
    )
    request, compiled = Request(config, DEVICE, 1, 1), SimpleNamespace(mesh=ONE)
    schedule = simulate_step(request, cluster(), compiled, CALIBRATION, module, kernels(module), collectives(module, ONE))
    return schedule.step_s, Kernels(LocalSizes.of(config, ONE), DEVICE, CALIBRATION)


def pallas(name, flops, scope, operands="%q", result="bf16[1,4096,32,128]"):
    return (
        f'%{name} = {result} custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(train_step)/{scope}/shard_map/{name}/pallas_call"}}, '
        f'backend_config={{serialized_metadata = "{{\\22flops\\22: \\22{round(flops)}\\22}}"}}'
    )


def test_kernels_of_pallas_take_the_planned_time_of_attention():
    one = 2 * 2048 * 128 * 32 * 4096
    step_s, planned = simulated(
        "llama-3.1-8b",
        ["compute.attention.backend=pallas"],
        "%q = bf16[1,4096,32,128] parameter(0)",
        pallas("attention_forward", 2 * one, "jvp()/attention"),
        pallas("attention_query_gradient", 3 * one, "transpose(jvp())/attention"),
        pallas("attention_key_gradients", 4 * one, "transpose(jvp())/attention"),
    )
    assert step_s == pytest.approx((planned.attention().forward + planned.attention().backward).seconds)


def test_kernels_of_cudnn_take_the_planned_time_of_attention():
    scores = '{"intermediate_tensor_shape": {"dimensions": ["1", "32", "4096", "4096"]}, "mask_type": "CAUSAL"}'
    paths = {"__cudnn$fmhaSoftmax": "jvp()", "__cudnn$fmhaSoftmaxBackward": "transpose(jvp())"}
    kernel = '%k{n} = bf16[1,4096,32,128] custom-call(%q), custom_call_target="{target}", metadata={{op_name="jit(step)/{path}/attention"}}'
    step_s, planned = simulated(
        "llama-3.1-8b",
        ["compute.attention.backend=cudnn"],
        "%q = bf16[1,4096,32,128] parameter(0)",
        *(f"{kernel.format(n=n, target=target, path=path)}, backend_config={scores}" for n, (target, path) in enumerate(paths.items())),
    )
    assert step_s == pytest.approx((planned.attention().forward + planned.attention().backward).seconds)


def test_matmuls_of_experts_have_the_rate_of_grouped_ones_with_the_rows_that_are_filled():
    rows, inputs, outputs = 8192, 4096, 14336
    step_s, planned = simulated(
        "mixtral-8x7b",
        [],
        "%i = s32[128] parameter(0)",
        "%x = bf16[16384,4096] parameter(1)",
        "%w = bf16[4096,8,14336] parameter(2)",
        pallas("expert_matmul", 2 * rows * inputs * outputs, "jvp()/mlp", "%i, %x, %w", "bf16[16384,14336]"),
    )
    assert step_s == pytest.approx(planned.matmul_s(rows, outputs, inputs) / CALIBRATION.software.grouped_rate)


def test_matmuls_of_float32_run_in_tfloat32():
    dot = "ROOT %y = f32[8192,8192] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    step_s, planned = simulated("llama-3.1-8b", [], "%x = f32[8192,8192] parameter(0)", dot)
    assert step_s == pytest.approx(planned.matmul_s(8192, 8192, 8192, "tfloat32"))
    assert step_s > planned.matmul_s(8192, 8192, 8192) and math.isfinite(step_s)
