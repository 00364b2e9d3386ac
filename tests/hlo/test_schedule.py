# ruff: noqa: E501
"""Kernels, buffers and the played schedule of compiled modules, on small texts whose answers are worked out by hand."""

import pytest

from ridgeline.hlo.buffers import describe, grouped, live_at_peak
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.module import part_of
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import kernels, total_flops, without_flops
from ridgeline.hlo.schedule import simulate

MODULE = """\
HloModule jit_step, is_scheduled=true

%fused_dot (p0: bf16[64,32], p1: bf16[32,128]) -> f32[64,128] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,128]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_slice (p2: f32[10,64,32], p3: s32[]) -> bf16[64,32] {
  %p2 = f32[10,64,32]{2,1,0} parameter(0)
  %p3 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,64,32]{2,1,0} dynamic-slice(%p2, %p3, %zero, %zero), dynamic_slice_sizes={1,64,32}
  %flat = f32[64,32]{1,0} bitcast(%slice)
  ROOT %half = bf16[64,32]{1,0} convert(%flat)
}

%fused_update (p4: f32[10,64,128], p5: s32[], p6: f32[64,128]) -> f32[10,64,128] {
  %p4 = f32[10,64,128]{2,1,0} parameter(0)
  %p5 = s32[] parameter(1)
  %p6 = f32[64,128]{1,0} parameter(2)
  %row = f32[1,64,128]{2,1,0} bitcast(%p6)
  %zero.1 = s32[] constant(0)
  ROOT %update = f32[10,64,128]{2,1,0} dynamic-update-slice(%p4, %row, %p5, %zero.1, %zero.1)
}

%body (arg: (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64])) -> (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64]) {
  %arg = (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %stack = f32[10,64,32]{2,1,0} get-tuple-element(%arg), index=1
  %kept = f32[10,64,128]{2,1,0} get-tuple-element(%arg), index=2
  %shard = bf16[32,64]{1,0} get-tuple-element(%arg), index=3
  %gather = (bf16[32,64], bf16[32,128]) all-gather-start(%shard), replica_groups={{0,1}}, dimensions={1}
  %x = bf16[64,32]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/jvp()/while/body/norm/convert"}
  %w = bf16[32,128]{1,0} all-gather-done(%gather)
  %y = f32[64,128]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(step)/jvp()/while/body/mlp/dot_general"}
  %kept.1 = f32[10,64,128]{2,1,0} fusion(%kept, %i, %y), kind=kLoop, calls=%fused_update, metadata={op_name="jit(step)/jvp()/while/body/dynamic_update_slice"}
  ROOT %out = (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64]) tuple(%i, %stack, %kept.1, %shard)
}

%cond (arg.1: (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64])) -> pred[] {
  %arg.1 = (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64]) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %ten = s32[] constant(10)
  ROOT %less = pred[] compare(%i.1, %ten), direction=LT
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (stack.1: f32[10,64,32], shard.1: bf16[32,64]) -> f32[10,64,128] {
  %stack.1 = f32[10,64,32]{2,1,0} parameter(0), metadata={op_name="state.params['blocks']['mlp']['up']"}
  %shard.1 = bf16[32,64]{1,0} parameter(1), metadata={op_name="batch['tokens']"}
  %start = s32[] constant(0)
  %room = f32[10,64,128]{2,1,0} broadcast(%start), metadata={op_name="jit(step)/jvp(loss)/broadcast_in_dim"}
  %init = (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64]) tuple(%start, %stack.1, %room, %shard.1)
  %loop = (s32[], f32[10,64,32], f32[10,64,128], bf16[32,64]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %result = f32[10,64,128]{2,1,0} get-tuple-element(%loop), index=2
  ROOT %total = f32[10,64,128]{2,1,0} all-reduce(%result), replica_groups={{0,1}}, to_apply=%sum
}
"""
MESH = {"data": 2}


@pytest.fixture(scope="module")
def module():
    return parse(MODULE)


def by_name(module):
    return {kernel.name: kernel for kernel in kernels(module)}


def test_a_product_inside_a_fusion_counts_its_flops_once_per_run_of_the_loop(module):
    product = by_name(module)["y"]
    assert product.flops == 2 * 64 * 128 * 32
    assert (product.count, product.dtype, product.component, product.part) == (10, "bf16", "mlp", "forward")
    assert product.bytes == 64 * 32 * 2 + 32 * 128 * 2 + 64 * 128 * 4
    assert total_flops(kernels(module)) == 10 * product.flops


def test_a_sliced_operand_counts_its_slice_and_an_updated_buffer_its_update(module):
    found = by_name(module)
    assert found["x"].bytes == 64 * 32 * 4 + 4 + 64 * 32 * 2  # one of ten rows in, the index, half precision out
    assert found["kept.1"].bytes == 64 * 128 * 4 + 4 + 64 * 128 * 4  # the row in, the index, the row out: not the ten


def test_collectives_tuples_and_fused_instructions_are_no_kernels(module):
    assert set(by_name(module)) == {"x", "y", "kept.1", "less", "room"}


def test_a_kernel_is_bound_by_the_larger_of_its_two_times(module):
    product = by_name(module)["y"]
    assert product.seconds(1e6, 1e12) == pytest.approx(10 * product.flops / 1e6)
    assert product.bottleneck(1e6, 1e12) == "compute"
    assert product.seconds(1e15, 1e3) == pytest.approx(10 * product.bytes / 1e3)
    assert product.bottleneck(1e15, 1e3) == "memory"


def played(module, kernel_s, gather_s, reduce_s):
    found = collectives(module, MESH)
    times = {"all-gather": gather_s, "all-reduce": reduce_s}
    return simulate(module, kernels(module), found, lambda k: kernel_s.get(k.name, 0.0), lambda c: times[c.kind])


def test_a_collective_hides_behind_what_is_scheduled_before_its_done(module):
    schedule = played(module, {"x": 2.0, "y": 3.0}, gather_s=1.5, reduce_s=4.0)
    assert schedule.compute_s == pytest.approx(10 * 5.0)
    assert schedule.communication_s == pytest.approx(10 * 1.5 + 4.0)
    assert dict(schedule.exposed) == {("all-gather", ("data",)): 0.0, ("all-reduce", ("data",)): 4.0}  # not split: it blocks
    assert schedule.step_s == pytest.approx(50.0 + 4.0)


def test_what_does_not_hide_is_waited_for_in_every_run_of_the_loop(module):
    schedule = played(module, {"x": 2.0, "y": 3.0}, gather_s=6.0, reduce_s=0.0)
    assert schedule.exposed["all-gather", ("data",)] == pytest.approx(10 * 4.0)
    assert schedule.step_s == pytest.approx(10 * (6.0 + 3.0))
    assert schedule.step_s == pytest.approx(schedule.compute_s + schedule.exposed_s)


OFFLOAD = """\
HloModule jit_step, is_scheduled=true

%fused_copy (p0: bf16[10,64,32], p1: bf16[1,64,32]) -> bf16[10,64,32] {
  %p0 = bf16[10,64,32]{2,1,0:S(5)} parameter(0)
  %p1 = bf16[1,64,32]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %update = bf16[10,64,32]{2,1,0:S(5)} dynamic-update-slice(%p0, %p1, %zero, %zero, %zero)
}

%fused_add (p2: bf16[1,64,32]) -> bf16[1,64,32] {
  %p2 = bf16[1,64,32]{2,1,0} parameter(0)
  ROOT %add = bf16[1,64,32]{2,1,0} add(%p2, %p2)
}

ENTRY %main (row: bf16[1,64,32], kept: bf16[10,64,32]) -> bf16[1,64,32] {
  %row = bf16[1,64,32]{2,1,0} parameter(0)
  %kept = bf16[10,64,32]{2,1,0:S(5)} parameter(1)
  %away = ((bf16[10,64,32]{2,1,0:S(5)}, bf16[1,64,32]{2,1,0}), bf16[10,64,32]{2,1,0:S(5)}, u32[]) fusion-start(%kept, %row), kind=kLoop, calls=%fused_copy
  %work = bf16[1,64,32]{2,1,0} fusion(%row), kind=kLoop, calls=%fused_add
  %gone = bf16[10,64,32]{2,1,0:S(5)} fusion-done(%away)
  ROOT %more = bf16[1,64,32]{2,1,0} fusion(%work), kind=kLoop, calls=%fused_add
}
"""


@pytest.mark.parametrize(("copy_s", "waited_s"), [(1.5, 0.0), (5.0, 3.0)])
def test_a_copy_to_host_memory_runs_beside_compute_until_its_done(copy_s, waited_s):
    module = parse(OFFLOAD)
    assert [k.name for k in kernels(module) if k.host_copy] == ["away"]
    assert by_name(module)["away"].bytes == 2 * 64 * 32 * 2  # the row read and written, not the ten
    schedule = simulate(module, kernels(module), [], lambda k: copy_s if k.host_copy else 2.0, lambda c: 0.0)
    assert schedule.compute_s == 4.0
    assert schedule.exposed_s == schedule.exposed["host copy", None] == waited_s
    assert schedule.step_s == 4.0 + waited_s


LIVE = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:x
  BufferLiveRange:
    x{}:0-1
  Live ranges at 7 (peak):
    arg{1}: 81920 bytes (cumulative: 81920 bytes)
    room{}: 327680 bytes (cumulative: 409600 bytes)
    y{}: 32768 bytes (cumulative: 442368 bytes)
    y.clone{}: 32768 bytes (cumulative: 475136 bytes)
  Stack trace breakdown for peak usage: 475 136 bytes
    main (100.0%, total: 475 136 bytes)
"""


def test_buffers_at_the_peak_lead_back_to_what_made_them(module):
    found = live_at_peak(module, LIVE)
    assert [(b.name, b.bytes, b.what) for b in found] == [
        ("room", 327680, "loss, forward"),
        ("arg{1}", 81920, "parameter blocks.mlp.up"),  # a part of the loop's state is the argument that entered it
        ("y", 32768, "mlp, forward"),
        ("y.clone", 32768, "other"),  # not in the module's text
    ]
    assert (found[1].dtype, found[1].dims) == ("f32", (10, 64, 32))
    assert live_at_peak(module, "nothing of the kind") == []


def test_buffers_of_one_origin_are_added_up(module):
    twice = grouped([*live_at_peak(module, LIVE)[:2], *live_at_peak(module, LIVE)[:2]])
    assert [(b.bytes, b.copies) for b in twice] == [(655360, 2), (163840, 2)]


@pytest.mark.parametrize(
    ("op_name", "what"),
    [
        ("state.params['blocks']['mlp']['gate']", "parameter blocks.mlp.gate"),
        ("state.opt_state[0][0].mu['output']", "optimizer state output"),
        ("batch['tokens']", "batch tokens"),
        ("jit(train_step)/jvp()/while/body/jit(f)/dynamic_update_slice", "activations, forward, stacked over layers"),
        ("jit(train_step)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/dot", "mlp, recompute"),
        ("jit(train_step)/transpose(jvp(attention))/dot", "attention, backward"),
        ("jit(train_step)/optimizer/add", "optimizer, update"),
    ],
)
def test_a_buffer_is_called_what_it_is(op_name, what):
    assert describe(op_name) == what


def test_recomputation_is_distinguished_from_the_backward_pass():
    assert part_of("jit(f)/transpose(jvp())/checkpoint/rematted_computation/mlp/dot") == "recompute"
    assert part_of("jit(f)/transpose(jvp())/checkpoint/mlp/dot") == "backward"


def test_a_fusion_split_into_start_and_done_is_the_same_kernel_once():
    update = "%kept.1 = f32[10,64,128]{2,1,0} fusion(%kept, %i, %y), kind=kLoop, calls=%fused_update"
    assert update in MODULE
    split = (
        "%kept.0 = ((f32[10,64,128], s32[], f32[64,128]), f32[10,64,128], u32[]) fusion-start(%kept, %i, %y), kind=kLoop, calls=%fused_update\n"
        "  %kept.1 = f32[10,64,128]{2,1,0} fusion-done(%kept.0)"
    )
    found = by_name(parse(MODULE.replace(update, split)))
    whole = by_name(parse(MODULE))
    assert found.keys() == whole.keys() - {"kept.1"} | {"kept.0"}
    assert (found["kept.0"].bytes, found["kept.0"].count) == (whole["kept.1"].bytes, whole["kept.1"].count)


KERNELS = """\
HloModule jit_step, is_scheduled=true

%inner (q0: bf16[64,32]) -> bf16[64,32] {
  ROOT %q0 = bf16[64,32]{1,0} parameter(0)
}

%triton_gemm (p0: bf16[64,32], p1: bf16[32,128]) -> bf16[64,128] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,128]{1,0} parameter(1)
  %tile = bf16[64,32]{1,0} fusion(%p0), kind=kCustom, calls=%inner
  ROOT %dot.2 = bf16[64,128]{1,0} dot(%tile, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (r0: bf16[64,32], r1: bf16[32,128]) -> bf16[64,128] {
  %r0 = bf16[64,32]{1,0} parameter(0)
  %r1 = bf16[32,128]{1,0} parameter(1)
  ROOT %nested = bf16[64,128]{1,0} fusion(%r0, %r1), kind=kCustom, calls=%triton_gemm
}

ENTRY %main (a: bf16[64,32], b: bf16[32,128]) -> bf16[64,128] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,128]{1,0} parameter(1)
  %gemm = bf16[64,128]{1,0} fusion(%a, %b), kind=kCustom, calls=%outer, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %said = bf16[64,32]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 1 : i32, ir = "ML\\EFR", name = "attention_forward", serialized_metadata = "{\\22flops\\22: \\22103079215104\\22}"}
  %silent = bf16[64,32]{1,0} custom-call(%said), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/mlp/mine"}, backend_config={grid_x = 1 : i32, ir = "ML\\EFR", name = "mine"}
  %sorted = bf16[64,32]{1,0} custom-call(%silent), custom_call_target="__cub$DeviceRadixSort"
  ROOT %end = bf16[64,128]{1,0} copy(%gemm)
}
"""


def test_kernels_of_triton_count_what_they_multiply_or_are_named_as_unknown():
    found = {kernel.name: kernel for kernel in kernels(parse(KERNELS))}
    assert found["gemm"].flops == 2 * 64 * 32 * 128 and found["gemm"].dtype == "bf16"
    assert found["said"].flops == 103079215104
    assert found["sorted"].flops == 0
    assert without_flops(list(found.values())) == {"jit(step)/mlp/mine": 1.0}


def one_kernel(*lines):
    """Return the last kernel of a module that runs these instructions; computations of fusions come before an ENTRY line."""
    at = lines.index("ENTRY") if "ENTRY" in lines else -1
    before, inside = lines[: max(at, 0)], lines[at + 1 :]
    text = "\n".join(
        ["HloModule jit_step, is_scheduled=true\n", *before, "ENTRY %main () -> f32[] {", *(f"  {line}" for line in inside), "}\n"]
    )
    return kernels(parse(text))[-1]


@pytest.mark.parametrize("name", ["expert_matmul", "expert_weight_gradient"])
def test_experts_read_the_rows_that_have_tokens_of_buffers_with_room_for_the_worst_case(name):
    """384 of 1,024 rows: results are written whole, matrices read whole."""
    if name == "expert_matmul":  # rows [R, I] and matrices [I, E, O] to [R, O]
        shapes = {"x": "bf16[1024,128]", "y": "bf16[128,8,256]"}, "bf16[1024,256]"
        moved = 384 * 128 * 2 + 128 * 8 * 256 * 2 + 1024 * 256 * 2
    else:  # inputs [R, I] and gradients [R, O] to [I, E, O]
        shapes = {"x": "bf16[1024,128]", "y": "bf16[1024,256]"}, "f32[128,8,256]"
        moved = 384 * (128 + 256) * 2 + 128 * 8 * 256 * 4
    kernel = one_kernel(
        "%i = s32[16]{0} parameter(0)",
        *(f"%{operand} = {shape} parameter({n})" for n, (operand, shape) in enumerate(shapes[0].items(), 1)),
        f'ROOT %call = {shapes[1]} custom-call(%i, %x, %y), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(step)/mlp/shard_map/{name}/pallas_call"}}, '
        f'backend_config={{serialized_metadata = "{{\\22flops\\22: \\22{2 * 384 * 128 * 256}\\22}}"}}',
    )
    assert (kernel.category, kernel.grouped, kernel.flops) == ("matmul", True, 2 * 384 * 128 * 256)
    assert sorted((kernel.matmul.m, kernel.matmul.n, kernel.matmul.k)) == [128, 256, 384]
    assert (kernel.matmul.m if name == "expert_matmul" else kernel.matmul.k) == 384
    assert kernel.bytes == moved + 16 * 4


def test_a_sum_in_a_stack_is_read_before_it_is_written():
    kernel = one_kernel(
        "%add_to (p0: f32[10,64], p1: s32[], p2: f32[1,64]) -> f32[10,64] {",
        "  %p0 = f32[10,64]{1,0} parameter(0)",
        "  %p1 = s32[] parameter(1)",
        "  %p2 = f32[1,64]{1,0} parameter(2)",
        "  %zero = s32[] constant(0)",
        "  %old = f32[1,64]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,64}",
        "  %new = f32[1,64]{1,0} add(%old, %p2)",
        "  ROOT %update = f32[10,64]{1,0} dynamic-update-slice(%p0, %new, %p1, %zero)",
        "}",
        "ENTRY",
        "%stack = f32[10,64]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%row = f32[1,64]{1,0} parameter(2)",
        "ROOT %sum = f32[10,64]{1,0} fusion(%stack, %i, %row), kind=kLoop, calls=%add_to",
    )
    assert kernel.bytes == 3 * 64 * 4 + 4


@pytest.mark.parametrize(("window", "keys"), [(0, 2048), (4096, 2048), (1024, 1024 - 1024**2 / 8192)])
def test_fused_attention_computes_the_keys_that_a_query_sees(window, keys):
    scores = f'"intermediate_tensor_shape": {{"dimensions": ["2", "8", "4096", "4096"]}}, "mask_type": "CAUSAL", "sliding_window_length": {window}'
    kernel = one_kernel(
        "%q = bf16[2,4096,8,128]{3,2,1,0} parameter(0)",
        f'ROOT %out = bf16[2,4096,8,128] custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={{{scores}}}',
    )
    assert kernel.flops == pytest.approx(2 * 2 * (2 * 8 * 4096) * keys * 128)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f8e4m3fn", "f8e5m2"])
@pytest.mark.parametrize("indices", [0, 1, 2])
def test_the_dtype_of_a_custom_kernel_is_that_of_its_first_array_of_numbers(dtype, indices):
    """Kernels of experts take the starts of the experts' rows first."""
    integers = [f"%i{n} = s32[9]{{0}} parameter({n})" for n in range(indices)]
    operands = ", ".join([*(f"%i{n}" for n in range(indices)), "%x"])
    text = "\n  ".join(
        [
            "HloModule jit_step, is_scheduled=true\n\nENTRY %main () -> bf16[64,32] {",
            *integers,
            f"%x = {dtype}[64,32]{{1,0}} parameter({indices})",
            f'ROOT %call = bf16[64,32]{{1,0}} custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton", '
            'backend_config={serialized_metadata = "{\\22flops\\22: \\2212\\22}"}',
        ]
    )
    [kernel] = [kernel for kernel in kernels(parse(text + "\n}\n")) if kernel.flops]
    assert (kernel.dtype, kernel.flops) == (dtype, 12)
