# ruff: noqa: E501
"""Programs of any origin: HLO in the trace, joined by program id; executions, FLOPs, categories and passes."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.perfetto import trace_events
from ridgeline.explain.trace.program import read_programs
from ridgeline.explain.trace.read import read_host
from ridgeline.hlo.proto import module_name
from ridgeline.planner.hardware import hardware
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import event, gpu, host, kernel, metadata, step, write

STREAM = "Stream #14(Kernel)"
LAYERS, HEADS, LENGTH, WIDTH = 4, 8, 512, 64
QKV = f"bf16[2,{HEADS},{LENGTH},{WIDTH}]{{3,2,1,0}}"
SIZE_BYTES = 2 * HEADS * LENGTH * WIDTH * 2
ATTENTION = f"""HloModule jit_train_step, is_scheduled=true

%body (arg: (s32[], {QKV})) -> (s32[], {QKV}) {{
  %arg = (s32[], {QKV}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %q = {QKV} get-tuple-element(%arg), index=1
  %backward = ({QKV}, {QKV}, {QKV}) custom-call(%q, %q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={{op_name="jit(train_step)/transpose(jvp(Block_0))/while/body/dot_product_attention"}}, backend_config={{"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"element_type":"BF16","dimensions":["2","{HEADS}","{LENGTH}","{LENGTH}"]}},"mask_type":"CAUSAL"}}}}
  %dq = {QKV} get-tuple-element(%backward), index=0
  %mine = {QKV} custom-call(%dq), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="jit(train_step)/jvp(Block_0)/while/body/my_kernel"}}
  ROOT %out = (s32[], {QKV}) tuple(%next, %mine)
}}

%cond (arg.1: (s32[], {QKV})) -> pred[] {{
  %arg.1 = (s32[], {QKV}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %end = s32[] constant({LAYERS})
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}}

ENTRY %main (p: {QKV}) -> {QKV} {{
  %p = {QKV} parameter(0)
  %zero = s32[] constant(0)
  %before = {QKV} add(%p, %p), metadata={{op_name="jit(train_step)/add"}}
  %init = (s32[], {QKV}) tuple(%zero, %before)
  %loop = (s32[], {QKV}) while(%init), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"{LAYERS}"}}}}
  %grads = {QKV} get-tuple-element(%loop), index=1
  ROOT %after = {QKV} multiply(%grads, %p), metadata={{op_name="jit(train_step)/mul"}}
}}
"""


def report_of(directory, *planes, device=None):
    """The analysis of a trace whose whole length is one step."""
    end_us = max(event[2] for plane in planes for line in plane.lines.values() for event in line)
    write(directory / "node.xplane.pb", [*planes, host({"python": [step(1, 0, end_us)]})])
    return to_json(analyze(load_profile(find_capture(directory), hardware=device and hardware(device))), top=100)


@pytest.mark.parametrize(
    "launched",
    [("dot_do_o", "dq_dk_dv", "convert_dq"), ("flash_bwd", "flash_bwd", "convert_dq"), ("flash_bwd", "flash_bwd"), ("flash_bwd",)],
)
@pytest.mark.parametrize("runs", [1, 3])
def test_flops_and_bytes_count_per_execution_not_per_kernel(tmp_path, launched, runs):
    events, now = [], 0

    def launch(name, op):
        nonlocal now
        events.append(event(name, now, now + 10, hlo_op=op, hlo_module="jit_train_step", program_id=7))
        now += 10

    for _ in range(runs):
        launch("add", "before")
        for _ in range(LAYERS):
            for name in launched:
                launch(name, "backward")
            launch("my_kernel", "mine")
        launch("mul", "after")
    report = report_of(tmp_path, gpu(0, {STREAM: events}), metadata({7: ATTENTION}), device="h100-sxm")
    found = {o["op"]: o for o in report["operations"]}
    attention = found["backward"]
    assert (attention["runs"], attention["kernels"]) == (LAYERS * runs, LAYERS * runs * len(launched))
    causal_flops = 5 * 2 * 2 * HEADS * LENGTH * LENGTH * WIDTH / 2
    assert attention["flops"] == causal_flops * LAYERS * runs
    assert attention["bytes"] == 7 * SIZE_BYTES * LAYERS * runs  # four read, three written
    assert (attention["component"], attention["category"], attention["phase"]) == ("attention", "attention", "backward")
    assert (found["before"]["phase"], found["after"]["phase"]) == ("unknown", "update")  # after uses gradients, before does not
    assert found["before"]["category"] == "elementwise"


def test_unknown_flops_are_judged_nowhere(tmp_path, capsys):
    from ridgeline.cli.main import run as ridge

    events = [event("my_kernel", 10 * i, 10 * i + 9, hlo_op="mine", hlo_module="jit_train_step", program_id=7) for i in range(LAYERS)]
    report = report_of(tmp_path, gpu(0, {STREAM: events}), metadata({7: ATTENTION}), device="h100-sxm")
    (mine,) = report["operations"]
    assert (mine["flops"], mine["ceiling_s"], mine["bound"]) == (None, None, None)
    assert mine["bytes"] == 2 * SIZE_BYTES * LAYERS
    (part,) = report["components"]
    assert (part["flops"], part["flops_per_s"], part["ceiling_s"], part["attained"], part["headroom_s"]) == (None,) * 5
    assert ridge(["analyze", str(tmp_path), "--device", "h100-sxm"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "custom call" in line]
    assert [line.count("unknown") for line in lines] == [4, 3]  # of a component; of an operation, whose source is unknown too


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A capture by jax.profiler of five products of one name, a gradient step, a convolution and a layer norm; and what XLA counts for each."""
    directory = tmp_path_factory.mktemp("foreign")

    def dot(a, b):
        return a @ b

    def loss(stack, x):
        return (jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, stack)[0] ** 2).sum()

    def update(stack, x):
        return stack - 0.1 * jax.grad(loss)(stack, x)

    def layer_norm(x):
        with jax.named_scope("LayerNorm_0"):
            return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def conv(image, window):
        return jax.lax.conv_general_dilated(image, window, (1, 1), "SAME")

    calls = [(dot, (jnp.ones((n, 64)), jnp.ones((64, 32)))) for n in (32, 64, 96, 128, 160)]
    calls += [(update, (jnp.ones((5, 64, 64)), jnp.ones((16, 64)))), (layer_norm, (jnp.ones((64, 256)),))]
    calls += [(conv, (jnp.ones((2, 3, 16, 16)), jnp.ones((8, 3, 3, 3))))]
    compiled = [(jax.jit(function).lower(*arguments).compile(), arguments) for function, arguments in calls]
    with jax.profiler.trace(str(directory)), jax.profiler.StepTraceAnnotation("all", step_num=0):
        for program, arguments in compiled:
            jax.block_until_ready(program(*arguments))
    return directory, [program for program, _ in compiled]


def test_a_foreign_capture_has_flops_sources_passes_and_categories(foreign):
    directory, compiled = foreign
    report = to_json(analyze(load_profile(find_capture(directory), hardware=hardware("h100-sxm"))), top=1000)
    assert not any("no HLO" in note for note in report["notes"])
    per_program = {}
    for o in report["operations"]:
        per_program.setdefault((o["module"], o["program_id"]), []).append(o)
    dots = sorted(sum(o["flops"] for o in found) for (name, _), found in per_program.items() if name.startswith("jit_dot("))
    assert dots == [program.cost_analysis()["flops"] for program in compiled[:5]]  # XLA's own count
    assert {name for name, _ in per_program if name.startswith("jit_dot")} == {
        f"jit_dot({i})" for n, i in per_program if n.startswith("jit_dot")
    }
    (convolution,) = [o for o in report["operations"] if o["category"] == "convolution"]
    assert convolution["flops"] == compiled[7].cost_analysis()["flops"]
    assert "norm" in {o["category"] for o in report["operations"] if o["module"] == "jit_layer_norm"}
    parts = {(o["component"], o["phase"]) for o in report["operations"] if o["module"] == "jit_update"}
    assert {("matmul", "forward"), ("matmul", "backward")} <= parts
    assert "update" in {phase for _, phase in parts}
    assert {o["phase"] for o in report["operations"] if o["module"].startswith("jit_dot")} == {"unknown"}
    products = [o for o in report["operations"] if o["flops"] and o["module"] == "jit_update"]
    assert sum(o["flops"] for o in products) == 3 * 5 * 2 * 16 * 64 * 64  # one forward, two backward, five layers
    assert all(o["source"].rpartition(":")[0] == __file__ for o in products)
    assert all(o["ceiling_s"] is not None for o in report["operations"])
    shapes = {(s["m"], s["n"], s["k"]): s for s in report["matmuls"]}
    assert {(n, 32, 64) for n in (32, 64, 96, 128, 160)} <= shapes.keys()
    assert shapes[160, 32, 64]["flops_per_s"] == pytest.approx(2 * 160 * 32 * 64 / shapes[160, 32, 64]["time_s"])


def test_a_damaged_program_in_a_trace_is_a_note(foreign, tmp_path):
    (file,) = foreign[0].rglob("*.xplane.pb")
    content, spans = bytearray(file.read_bytes()), read_host(file).modules
    for start, end in spans.values():
        content[start + 4 : end] = bytes([7]) * (end - start - 4)
    (tmp_path / "node.xplane.pb").write_bytes(content)
    report = to_json(analyze(load_profile(find_capture(tmp_path))))
    assert any("cannot be read" in note for note in report["notes"])
    assert {o["flops"] for o in report["operations"]} == {None}


def test_the_hlo_in_a_capture_of_ours_gives_what_the_text_beside_it_gives(capture_dir, tmp_path):
    with_text = to_json(analyze(load_profile(find_capture(capture_dir))), top=100)
    (file,) = capture_dir.glob("*.xplane.pb")
    (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "capture.json").write_bytes((capture_dir / "capture.json").read_bytes())
    alone = to_json(analyze(load_profile(find_capture(tmp_path))), top=100)
    assert alone["operations"] == with_text["operations"]
    (bare := tmp_path / "bare").mkdir()
    content = file.read_bytes().replace(b"/host:metadata", b"/host:metadat_")
    (bare / file.name).write_bytes(content)
    (text,) = capture_dir.glob("*.hlo.txt")
    (bare / text.name).write_bytes(text.read_bytes())
    (bare / "capture.json").write_bytes((capture_dir / "capture.json").read_bytes())
    beside = to_json(analyze(load_profile(find_capture(bare))), top=100)
    key = lambda o: (o["op"], o["flops"], o["bytes"], o["phase"], o["component"], o["source"])  # noqa: E731
    mine = [key(o) for o in with_text["operations"] if o["module"] == "jit_toy_step"]
    assert mine == [key(o) for o in beside["operations"] if o["module"] == "jit_toy_step"]


@pytest.mark.parametrize("seed", range(4))
def test_a_program_is_found_by_its_name_where_its_number_is_of_no_module_or_of_another(capture_dir, tmp_path, seed):
    """XLA on the CPU numbers the programs that ran and the saved modules apart (jax 0.12)."""
    (file,) = capture_dir.glob("*.xplane.pb")
    host, rng = read_host(file), random.Random(seed)
    expected = read_programs([host], tmp_path, 1, None).by_key
    (step,) = [key for key in expected if key.module == "jit_toy_step"]
    data = file.read_bytes()
    # Its own number need not be the program's in this capture either: XLA 0.10 numbers them apart now and then.
    named = [own for own, (start, end) in host.modules.items() if module_name(data[start:end]) == step.module]
    saved = [
        host.modules.pop(own) for own in sorted(named, key=lambda own: own != step.program_id)
    ]  # several: compiled by earlier tests too
    host.modules[-1] = saved[0]
    others = [number for number in host.modules if number != -1]
    numbers = rng.sample(sorted({*others, step.program_id}), len(others)) if seed % 2 else rng.sample(range(10**6, 10**7), len(others))
    host.modules = {-1: host.modules[-1]} | {new: host.modules[old] for new, old in zip(numbers, others, strict=True)}
    found = read_programs([host], tmp_path, 1, None)
    assert found.by_key[step].opcodes == expected[step].opcodes and not found.notes
    host.modules[-2] = host.modules[-1]
    assert step not in read_programs([host], tmp_path, 1, None).by_key  # two modules have its name


@pytest.mark.parametrize("seed", range(6))
def test_executions_are_counted_for_any_number_of_kernels(tmp_path, seed):
    """Instructions in and outside a loop of known length, each with its own kernels, some of them launched twice per execution."""
    rng = random.Random(seed)
    runs, trips = rng.randint(1, 4), rng.randint(1, 5)
    kernels = {op: [rng.choice("abc") for _ in range(rng.randint(1, 4))] for op in ("outside", "inside.1", "inside.2")}
    kernels["plain"] = ["d"]
    body = "\n".join(f"  %{op} = f32[8] add(%x, %x)" for op in ("inside.1", "inside.2"))
    hlo = f"""HloModule jit_f, is_scheduled=true

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %arg = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8] get-tuple-element(%arg), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
{body}
  ROOT %out = (s32[], f32[8]) tuple(%next, %inside.2)
}}

%cond (arg.1: (s32[], f32[8])) -> pred[] {{
  %arg.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %end = s32[] constant({trips})
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %outside = f32[8] add(%p, %p)
  %plain = f32[8] add(%outside, %p)
  %init = (s32[], f32[8]) tuple(%zero, %plain)
  %loop = (s32[], f32[8]) while(%init), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
  ROOT %result = f32[8] get-tuple-element(%loop), index=1
}}
"""
    order = [op for _ in range(runs) for op in ["outside", "plain", *["inside.1", "inside.2"] * trips]]
    launched = [(name, op) for op in order for name in kernels[op]]
    events = [event(name, 10 * i, 10 * i + 5, hlo_op=op, hlo_module="jit_f", program_id=3) for i, (name, op) in enumerate(launched)]
    report = report_of(tmp_path, gpu(0, {STREAM: events}), metadata({3: hlo}))
    found = {o["op"]: o["runs"] for o in report["operations"]}
    expected = {"outside": runs, "plain": runs, "inside.1": runs * trips, "inside.2": runs * trips}
    doubled = {op for op, names in kernels.items() if np.gcd.reduce([names.count(n) for n in set(names)]) > 1}
    if len(doubled) < 2:  # where most instructions launch all their kernels twice, nothing in a trace shows it
        assert found == expected
    bare = report_of(tmp_path / "bare", gpu(0, {STREAM: events}))  # without HLO the names of the kernels remain
    assert {o["op"]: o["runs"] for o in bare["operations"] if o["op"] not in doubled} == {
        op: count for op, count in expected.items() if op not in doubled
    }


@pytest.mark.parametrize(("module", "taken"), [("jit_train_step", True), ("jit_other", False)])
def test_a_program_of_another_name_is_not_joined_by_its_number(tmp_path, module, taken):
    """XLA numbers programs per backend: two backends of one process may use a number twice."""
    events = [event("add", 10 * i, 10 * i + 9, hlo_op="before", hlo_module=module, program_id=7) for i in range(LAYERS)]
    (before,) = report_of(tmp_path, gpu(0, {STREAM: events}), metadata({7: ATTENTION}))["operations"]
    assert (before["bytes"] is not None) == taken


def test_collectives_of_several_kernels_count_once_and_are_listed_by_size(tmp_path):
    hlo = """HloModule jit_f, is_scheduled=true, num_partitions=2

ENTRY %main (p: f32[1024], q: f32[4096]) -> f32[8192] {
  %p = f32[1024] parameter(0)
  %q = f32[4096] parameter(1)
  %all-gather.1 = f32[2048] all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true
  ROOT %all-gather.2 = f32[8192] all-gather(%q), channel_id=2, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true
}
"""
    talk = [
        ("all-gather.1", 0, 10),
        ("all-gather.2", 10, 20),
        ("all-gather.2", 20, 50),
        ("all-gather.1", 60, 70),
        ("all-gather.2", 70, 80),
        ("all-gather.2", 80, 110),
    ]
    names = {"all-gather.1": ["ncclDevKernel_AllGather"], "all-gather.2": ["ncclDevKernel_First", "ncclDevKernel_Second"]}
    turn = {"all-gather.1": 0, "all-gather.2": 0}
    events = []
    for op, start, end in talk:
        name = names[op][turn[op] % len(names[op])]
        turn[op] += 1
        events.append(event(name, start, end, hlo_op=op, hlo_module="jit_f", program_id=3))
    report = report_of(tmp_path, gpu(0, {STREAM: events}), gpu(1, {STREAM: events}), metadata({3: hlo}))
    (traffic,) = report["collectives"]
    assert (traffic["count"], traffic["bytes"]) == (4, 2 * 2048 * 4 + 2 * 8192 * 4)
    small, large = report["message_sizes"]
    assert (small["kind"], small["group_size"], small["size_bytes"], small["count"]) == ("all-gather", 2, 2048 * 4, 2)
    assert small["bus_bandwidth"] == pytest.approx(2048 * 4 / 10e-6 / 2)
    assert (large["size_bytes"], large["count"], large["time_s"]) == (8192 * 4, 2, pytest.approx(40e-6))
    assert json.dumps(report)


def test_without_hlo_the_names_of_kernels_show_the_category(tmp_path):
    names = {
        "nvjet_tst_128x256_64x4_h_bz_coopA_NNT": "matmul",
        "sm90_xmma_gemm_bf16bf16_bf16f32": "matmul",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "fmha_v2_flash_attention_bf16": "attention",
        "sm80_xmma_fprop_implicit_gemm_bf16": "convolution",
        "input_reduce_fusion_3": "reduction",
        "loop_transpose_fusion": "copy",
        "loop_add_fusion": "elementwise",
        "rms_norm_kernel": "norm",
        "mystery": "other",
    }
    events = [kernel(name, 10 * i, 10 * i + 5 + i) for i, name in enumerate(names)]
    report = report_of(tmp_path, gpu(0, {STREAM: events}))
    assert {o["kernel_name"]: o["category"] for o in report["operations"]} == names
    assert {o["phase"] for o in report["operations"]} == {"unknown"}


def test_memory_of_programs_is_what_xla_states(foreign):
    """Sizes as in XLA's own memory analysis; the timeline stays below the heap, and its peak is reached with the buffers named."""
    directory, compiled = foreign
    report = to_json(analyze(load_profile(find_capture(directory))), top=1000)
    found = {each["module"].partition("(")[0]: each for each in report["memory"]}
    for program, name in ((compiled[5], "jit_update"), (compiled[6], "jit_layer_norm"), (compiled[7], "jit_conv")):
        stated, each = program.memory_analysis(), found[name]
        assert each["arguments_bytes"] == stated.argument_size_in_bytes
        assert each["temporaries_bytes"] == stated.temp_size_in_bytes
        fixed = each["arguments_bytes"] + each["outputs_bytes"] + each["constants_bytes"]
        assert fixed + max((at["bytes"] for at in each["timeline"]), default=0) == each["peak_bytes"]
        assert each["peak_bytes"] <= fixed + each["temporaries_bytes"]
    update = found["jit_update"]
    assert update["peak_at"]["bytes"] >= sum(b["bytes"] for b in update["largest"]) > 0
    assert update["largest"][0]["bytes"] == 5 * 16 * 64 * 4  # what the backward pass keeps of five layers
    profile = load_profile(find_capture(directory))
    counters = [e["args"]["bytes"] for e in trace_events(profile, analyze(profile)) if e["ph"] == "C"]
    assert max(counters) == max(each["peak_bytes"] for each in report["memory"])
