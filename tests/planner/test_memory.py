"""Memory of one device: held to the sizes of compiled steps, and to the properties any such model must have."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import (
    MESH_AXES,
    AttentionConfig,
    ComputeConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    TrainerConfig,
)
from ridgeline.planner.activations import units_in_flight
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.collectives.planned import StepSizes
from ridgeline.planner.hardware import GpuProgram, hardware
from ridgeline.planner.host_memory import offloaded_per_device, refusal
from ridgeline.planner.local import LocalSizes, attention_backend
from ridgeline.planner.memory import MARGINS, memory_per_device
from ridgeline.planner.optimizer_state import streamed_state_bytes
from ridgeline.planner.parameters import count_parameters
from ridgeline.planner.peak_memory import StepMemory
from ridgeline.planner.step_time import step_time

HERE = Path(__file__).parent


def compiled(overlap):
    """Sizes of steps compiled with the latency-hiding scheduler (O1), as runs on GPUs are, or with XLA's default flags."""
    name = "compiled_steps_overlap.json" if overlap else "compiled_steps.json"
    return [case | {"overlap": overlap} for case in json.loads((HERE / name).read_text())["cases"]]


COMPILED = compiled(True) + compiled(False)
RUNS = json.loads((HERE / "compiled_steps_run.json").read_text())["cases"]
"""Steps compiled with all flags of a run (launch/environment.py)."""
DRAWN = json.loads((HERE / "compiled_steps_drawn.json").read_text())["cases"]
"""Steps that the sampler drew, and some for one knob: gradients and parameters in bfloat16, offload, packed rows, 8 bits, ring, Muon."""
HEAPS = json.loads((HERE / "compiled_steps_heap.json").read_text())["cases"]
"""Steps with the heap of their temporaries at the points of the plan."""
LONG = json.loads((HERE / "compiled_steps_long.json").read_text())["cases"]
"""Steps with long packed rows, and with rows sharded over context."""
SCORES = [case for case in COMPILED if any("backend=xla" in override for override in case["overrides"])]
USUAL = [case for case in COMPILED if case not in SCORES]


POLICIES = ("none", "attention-only", "dots", "full")


def case_name(case):
    return "-".join(
        [
            case["config"].removeprefix("models/"),
            *(f"{a}{n}" for a, n in case["mesh"].items()),
            *case["overrides"][2:],
            "overlap" * case["overlap"],
        ]
    )


def sizes(data=1, fsdp=1, tensor=1):
    return dict.fromkeys(MESH_AXES, 1) | {"data": data, "fsdp": fsdp, "tensor": tensor}


def config(policy="full", accumulation=1, rows=64, length=512, **model):
    shape = {"vocab_size": 4096, "num_layers": 4, "embed_dim": 512, "num_heads": 8, "num_kv_heads": 8, "mlp_dim": 2048} | model
    return Config(
        model=ModelConfig(**shape),
        compute=ComputeConfig(remat=RematConfig(policy=policy)),
        data=DataConfig(seq_len=length, batch_size=rows),
        trainer=TrainerConfig(accumulation=accumulation),
    )


def estimated(case):
    resolved = load(case["config"], case["overrides"]).config
    sizes = dict.fromkeys(MESH_AXES, 1) | case["mesh"]
    return memory_per_device(resolved, sizes, overlap=case["overlap"], combined=case.get("combined", False), device=device_of(case))


def device_of(case):
    """The GPU that a step was compiled for (compile_table.py); None: H100."""
    if "cluster" in case:
        return hardware(load_cluster(case["cluster"]).config.device)
    return hardware("gb200") if any(value in override for value in ("mxfp8", "nvfp4") for override in case["overrides"]) else None


def relative_error(case):
    return estimated(case).compiled_bytes / (case["argument_bytes"] + case["temp_bytes"]) - 1


@pytest.mark.parametrize("case", USUAL, ids=case_name)
def test_state_is_exact_and_the_whole_is_close_to_the_compiled_step(case):
    assert estimated(case).argument_bytes == pytest.approx(case["argument_bytes"], rel=0.01)
    assert abs(relative_error(case)) < 0.065


@pytest.mark.parametrize("overlap", [True, False])
def test_nearly_all_compiled_steps_are_within_five_percent(overlap):
    errors = [abs(relative_error(case)) for case in USUAL if case["overlap"] == overlap]
    assert len(errors) > 40 and sum(error <= 0.05 for error in errors) >= len(errors) - 2
    assert sorted(errors)[len(errors) // 2] < 0.02


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case_name(case | {"overlap": True}))
def test_steps_with_the_flags_of_a_run_take_what_a_run_is_planned_with(case):
    case = case | {"overlap": True, "combined": True}
    assert estimated(case).argument_bytes == pytest.approx(case["argument_bytes"], rel=0.01)
    assert abs(relative_error(case)) < case.get("within", {}).get(WHOLE, 0.065 if "1b" in case["config"] else 0.04)


TOO_HIGH = {"models/phi4-14b": 0.11}
"""Model -> how much more is planned with offloaded block inputs than compiled, since the embedding's gradient begins after the layers."""


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case_name(case | {"overlap": True}))
def test_steps_with_every_knob_take_what_is_planned(case):
    error = relative_error(case | {"overlap": True, "combined": True})
    if "within" in case:
        assert abs(error) < case["within"][WHOLE]
        return
    inputs = "compute.remat.names=[block_input]" in case["overrides"]
    most = TOO_HIGH.get(case["config"], 0.055) if inputs else 0.055
    assert -0.055 < error < most


@pytest.mark.parametrize("case", LONG, ids=lambda case: case_name(case | {"overlap": True}))
def test_steps_with_long_packed_rows_take_what_is_planned(case):
    assert abs(relative_error(case | {"overlap": True, "combined": True})) < 0.055


def test_nearly_all_steps_with_long_packed_rows_are_within_five_percent():
    errors = [abs(relative_error(case | {"overlap": True, "combined": True})) for case in LONG]
    assert sum(error <= 0.05 for error in errors) >= len(errors) - 2


def test_rows_over_context_need_no_more_than_plan_and_margin():
    """Without the share of the margin for them one of these would (Llama 3.1 8B, `dots`, fsdp=64 x context=8)."""
    over_context, short = [case for case in [*HEAPS, *LONG] if case["mesh"].get("context", 1) > 1], 0
    for case in over_context:
        planned = estimated(case | {"overlap": True, "combined": True})
        margin, own = planned.components["margin"].bytes, MARGINS["mesh.context"] * planned.temp_bytes
        assert case["temp_bytes"] < planned.temp_bytes + margin, case["config"]
        short += case["temp_bytes"] > planned.temp_bytes + margin - own
    assert short >= 1


OFFLOAD = [case for case in DRAWN if any("policy=offload" in override for override in case["overrides"])]


def test_steps_with_offload_need_no_more_than_plan_and_margin():
    for case in OFFLOAD:
        planned = estimated(case | {"overlap": True, "combined": True})
        assert case["temp_bytes"] < planned.temp_bytes + planned.components["margin"].bytes, case["config"]
    assert len(OFFLOAD) > 12


STAGED = [
    ("llama-3.2-3b", "dgx-h200", {"pipeline": 2, "fsdp": 64}, 4, ("none", "precision.moments=bfloat16", "compute.loss_chunk=4096"), 130.65),
    ("llama-3.2-1b", "dgx-h100", {"pipeline": 8, "fsdp": 2}, 32, ("full", "data.document_masking=false"), 46.13),
]
"""Model, cluster, mesh, microbatches, policy and further overrides, and compiled GB of drawn steps over stages (seed 170103), each of 512
rows of 16,384 tokens, that need more than plan and margin of other meshes."""


def test_stages_need_no_more_than_plan_and_margin():
    for model, cluster, mesh, micro, (policy, *more), compiled_gb in STAGED:
        shape = ["data.seq_len=16384", "data.batch_size=512", f"trainer.accumulation={micro}", f"compute.remat.policy={policy}"]
        case = {"config": f"models/{model}", "cluster": cluster, "mesh": mesh, "overrides": [*shape, *more], "overlap": True}
        planned = estimated(case | {"combined": True})
        assert 1e9 * compiled_gb < planned.compiled_bytes + planned.components["margin"].bytes, model


ZERO_ONE_CHUNK = [case for case in DRAWN if case["mesh"] == {"data": 8, "fsdp": 32, "tensor": 2} and "qwen2.5-32b" in case["config"]]


def test_the_gradient_of_the_unembedding_is_delayed_where_it_is_only_reduce_scattered():
    """One chunk of logits per microbatch: with mesh.zero_stage=2 over data too, which was planned 4.8 % too high; not where summed."""
    (case,) = ZERO_ONE_CHUNK
    assert abs(relative_error(case | {"overlap": True, "combined": True})) < 0.035
    summed = case | {"overrides": [item for item in case["overrides"] if "zero_stage" not in item], "overlap": True, "combined": True}
    whole = 4 * LocalSizes.of(load(case["config"], case["overrides"]).config, case["mesh"]).table
    delayed, at_once = (estimated(each | {"overlap": True, "combined": True}).components["loss"].bytes for each in (case, summed))
    assert delayed < whole / 2 and at_once >= whole


AT_THE_LOSS = [
    case
    for case in DRAWN
    if (case["config"], case["overrides"][-1])
    in {
        ("models/qwen3-8b", "compute.loss_chunk=8192"),
        ("models/qwen2.5-1.5b", "compute.loss_chunk=16384"),
    }
]
"""Steps whose peak is in the loss: one with the last layer recomputed early, one with a single chunk of logits."""


def test_the_peak_in_the_loss_is_planned_closely():
    """Without the term for either, 4 to 5 % are missing or too many, which the tolerance above allows."""
    assert len(AT_THE_LOSS) == 2
    for case in AT_THE_LOSS:
        assert abs(relative_error(case | {"overlap": True, "combined": True})) < 0.015, case["config"]


def test_the_inputs_of_norms_of_queries_and_keys_are_there_where_two_kernels_quantize():
    """Qwen3 8B in fp8 over tensor, gate and up computed again: without these inputs 2.5 % of the step are missing."""
    (case,) = (case for case in DRAWN if case["config"] == "models/qwen3-8b" and "precision.matmul=fp8" in case["overrides"])
    assert abs(relative_error(case | {"overlap": True, "combined": True})) < 0.018


OF_EXPERTS = [case for case in DRAWN if case["config"] in {"models/mixtral-8x7b", "models/qwen3-30b-a3b", "models/qwen3-235b-a22b"}]
IN_8_BITS = [case for case in OF_EXPERTS if any("precision.matmul=fp8" in item for item in case["overrides"])]


def test_a_ring_copies_none_of_what_dots_keeps_of_latent_attention():
    """DeepSeek V2 Lite on 128 H200 (drawn, seed 72102): with a copy of keys and values 5 % too much is planned. It needs 43.06 GB, of which
    0.93 are a gap in XLA's heap, which is not planned."""
    overrides = ["data.seq_len=2048", "model.max_seq_len=2048", "data.batch_size=1024", "trainer.accumulation=1"]
    overrides += ["compute.remat.policy=dots", "precision.params=bfloat16", "precision.stochastic_rounding=true"]
    overrides += ["precision.moments=bfloat16", "compute.loss_chunk=8192"]
    case = {"config": "models/deepseek-v2-lite", "overrides": overrides, "mesh": {"fsdp": 64, "context": 2}}
    assert estimated(case | {"overlap": True, "combined": True}).compiled_bytes == pytest.approx((43.06 - 0.93) * 1e9, rel=0.01)


def test_experts_in_8_bits_transpose_what_they_saved():
    """Without the copy of one of the two stacks, 30 GB of 100 are missing, more than the margin."""
    (case,) = (case for case in IN_8_BITS if "tensor" not in case["mesh"])
    estimate = estimated(case | {"overlap": True, "combined": True})
    assert estimate.peak_at == "copies of gate and up"
    assert estimate.temp_bytes == pytest.approx(case["temp_bytes"], rel=0.02)


def placed(*overrides, **mesh):
    """Sizes of Qwen3 30B, 8 of 128 experts per token, on a mesh."""
    settings = ("data.seq_len=2048", "data.batch_size=64", "data.document_masking=false", *overrides)
    return LocalSizes.of(load("models/qwen3-30b-a3b", settings).config, dict.fromkeys(MESH_AXES, 1) | mesh)


def test_all_to_all_without_a_capacity_has_a_slot_for_each_token_of_all_devices():
    exchange, factor = "compute.experts.exchange=", "compute.experts.capacity_factor=1.0"
    sent = placed(exchange + "all_to_all", expert=16)
    assert sent.sends_uncapped and sent.slots == 16 * sent.tokens
    others = placed(exchange + "gather", expert=16), placed(exchange + "all_to_all", factor, expert=16), placed(fsdp=16)
    assert not any(each.sends_uncapped for each in others)


def test_kept_gates_of_experts_in_every_second_layer_are_those_of_all_layers():
    """Gates of dense layers and of experts have different sizes; no component of the plan is below zero."""
    settings = ("data.seq_len=2048", "data.batch_size=32", "compute.remat.policy=none", "mesh.fsdp=2", "mesh.expert=8")
    made = load("models/llama-4-maverick-17b-128e", settings).config
    sizes = dict.fromkeys(MESH_AXES, 1) | {"fsdp": 2, "expert": 8}
    assert all(size >= 0 for size in memory_per_device(made, sizes).bytes_by_component().values())


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 4, "tensor": 8}, {"fsdp": 2, "expert": 16}], ids=str)
def test_the_planned_rows_of_experts_are_those_of_the_kernel(mesh):
    """The buffer's, and those that are multiplied: tokens and half a block of padding per expert."""
    from ridgeline.models.moe.grouped_matmul import choose_kernel

    cut, groups = placed(**mesh), mesh.get("expert", 1)
    kernel = choose_kernel("gpu", jnp.dtype("bfloat16"), 128, 8, groups, None)
    assert kernel.rows(8 * cut.tokens * groups, 128 // groups) == cut.expert_rows
    assert cut.busy_rows == pytest.approx(kernel._multiplied(cut.expert_rows, 128 // groups), rel=0.002)


def test_the_compiled_steps_span_what_the_model_is_used_for():
    devices = [json_devices(case) for case in USUAL]
    assert len(USUAL) >= 12 and min(devices) <= 8 and max(devices) >= 1024
    assert {"models/llama-3.2-1b", "models/llama-3.1-70b"} <= {case["config"] for case in USUAL}


def json_devices(case):
    devices = 1
    for size in case["mesh"].values():
        devices *= size
    return devices


@pytest.mark.parametrize("case", SCORES, ids=case_name)
def test_attention_that_stores_scores_is_seen_to_be_large(case):
    assert abs(relative_error(case)) < 0.15


def test_components_sum_to_the_total_and_each_lists_its_assumptions():
    estimate = memory_per_device(config(), sizes(fsdp=8))
    assert estimate.total_bytes == sum(estimate.bytes_by_component().values())
    assert estimate.total_bytes == max(estimate.bytes_at.values())
    assert all(component.assumption for component in estimate.components.values())
    assert estimate.compiled_bytes == estimate.argument_bytes + estimate.temp_bytes


def test_parameters_and_adamw_moments_are_exact_on_one_device():
    estimate = memory_per_device(config(), sizes())
    total = count_parameters(config().model).total
    assert estimate.components["parameters"].bytes == 4 * total
    assert estimate.components["moments"].bytes == 8 * total


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_state_leaves_the_device_for_host_memory_and_the_host_link(moments):
    """The compiled step of 8B over 8 H100 has 4.02 GB of arguments on the device with it, and 12.05 GB without (float32 moments)."""
    settings = ("data.seq_len=8192", "data.batch_size=8", "data.document_masking=false", f"precision.moments={moments}")
    kept, away = (load("models/llama-3.1-8b", (*settings, f"optimizer.offload={flag}")).config for flag in ("false", "true"))
    before, after = (memory_per_device(c, sizes(fsdp=8)) for c in (kept, away))
    state = before.components["moments"].bytes
    assert before.argument_bytes - after.argument_bytes == state and after.components["moments"].bytes == 0
    assert 0 < after.bytes_at["optimizer"] - (before.bytes_at["optimizer"] - state) < state / 2
    assert memory_per_device(away, sizes(fsdp=8), gpu=False) == memory_per_device(kept, sizes(fsdp=8), gpu=False)
    assert offloaded_per_device(kept, sizes(fsdp=8)) == 0 and offloaded_per_device(away, sizes(fsdp=8)) == 2 * state
    assert refusal(away, sizes(fsdp=8), 8, 2e12) == "" and "offloads" in refusal(away, sizes(fsdp=8), 8, 1e11)
    cluster, calibration = load_cluster("dgx-h100").config, load_calibration(None)
    one, other = (step_time(c, sizes(fsdp=8), cluster, calibration) for c in (kept, away))
    link = hardware(cluster.device).host_bandwidth_bytes_per_s
    assert 0.8 * state / link < other.step_s - one.step_s < 1.3 * state / link


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(POLICIES), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)))
def test_memory_falls_with_shards_and_microbatches(policy, data, tensor, fsdp, accumulation):
    """More shards of parameters, or smaller microbatches of the same rows, never need more activations and state."""
    base = memory_per_device(config(policy, accumulation), sizes(data, fsdp, tensor))
    sharded = memory_per_device(config(policy, accumulation), sizes(data, 2 * fsdp, tensor))
    for name in ("parameters", "moments", "activations"):
        assert sharded.components[name].bytes <= base.components[name].bytes
    assert sharded.components["parameters"].bytes < base.components["parameters"].bytes
    whole, half = (
        memory_per_device(config(policy, times * accumulation), sizes(data, fsdp, tensor), overlap=False).components["activations"].bytes
        for times in (1, 2)
    )
    assert half < whole


@settings(max_examples=30, deadline=None)
@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)), st.integers(1, 4))
def test_recomputing_more_never_keeps_more(fsdp, tensor, factor):
    kept = [memory_per_device(config(p, rows=64 * factor), sizes(1, fsdp, tensor)).components["activations"].bytes for p in POLICIES]
    assert kept == sorted(kept, reverse=True)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from((256, 512, 1024)), st.sampled_from((2, 4)))
def test_activations_grow_linearly_with_the_sequence(length, factor):
    """Flash attention keeps nothing quadratic."""
    one = memory_per_device(
        config("none", length=length).model_copy(update={"data": DataConfig(seq_len=length, batch_size=8, document_masking=False)}), sizes()
    )
    many = memory_per_device(
        config("none").model_copy(update={"data": DataConfig(seq_len=factor * length, batch_size=8, document_masking=False)}), sizes()
    )
    assert many.components["activations"].bytes == factor * one.components["activations"].bytes


def test_a_larger_vocabulary_costs_in_the_loss_and_chunks_bound_the_logits():
    small, large = (memory_per_device(config("full", vocab_size=v), sizes()).bytes_at["loss"] for v in (4096, 65536))
    assert large > small
    chunked = config("full", vocab_size=65536)
    finer = chunked.model_copy(update={"compute": chunked.compute.model_copy(update={"loss_chunk": 128})})
    assert memory_per_device(finer, sizes()).bytes_at["loss"] < memory_per_device(chunked, sizes()).bytes_at["loss"]


@pytest.mark.parametrize(("settings", "largest"), [({"mlp_dim": 96}, 3 * 32 * 96), ({"mlp_dim": 24}, 3 * 2 * 32 * 32)])
def test_the_largest_offloaded_states_may_be_those_of_modules_of_multi_token_prediction(settings, largest):
    """The MLP matrices of their blocks are stacks of three, and so are their projections; both are larger than any other parameter."""
    whole = config(vocab_size=64, num_layers=1, embed_dim=32, mtp_layers=3, **settings)
    away = whole.model_copy(update={"optimizer": OptimizerConfig(offload=True)})
    assert streamed_state_bytes(LocalSizes.of(away, sizes())) == pytest.approx(2 * largest * 8, abs=1)


def test_offloaded_values_leave_the_device_and_named_ones_stay():
    named = config().model_copy(update={"compute": ComputeConfig(remat=RematConfig(policy="names", names=["mlp_up", "query"]))})
    offloaded = config().model_copy(update={"compute": ComputeConfig(remat=RematConfig(policy="offload", names=["mlp_up", "query"]))})
    full, kept, away = (memory_per_device(c, sizes()).components["activations"].bytes for c in (config("full"), named, offloaded))
    assert full == away < kept


@pytest.mark.parametrize(
    "settings",
    [
        *((f"precision.matmul={matmul}",) for matmul in ("compute", "fp8", "fp8_delayed", "mxfp8", "nvfp4")),
        ("lora.rank=8",),
        ("lora.rank=8", "lora.base=int8"),
    ],
)
def test_gathered_weights_take_the_bytes_that_their_gather_moves(settings):
    resolved = load("models/llama-3.1-8b", (*settings, "data.batch_size=8", "data.seq_len=1024")).config
    moved = StepSizes(resolved, sizes(fsdp=8) | {"context": 1}, gpu=True).gathered
    assert LocalSizes.of(resolved, sizes(fsdp=8)).matrix_itemsize == moved


def test_compiled_steps_with_latent_attention_fit_into_what_is_planned_with_its_margin():
    """DeepSeek V3 on 1,024 H100 and its first 5 layers on 64, DeepSeek V2 Lite by several policies and axes."""
    cases = [case for case in (*DRAWN, *HEAPS) if "deepseek" in case["config"]]
    assert len({(case["config"], str(case["mesh"])) for case in cases}) >= 5
    for case in cases:
        estimate = estimated(case | {"overlap": True, "combined": True})
        assert case["temp_bytes"] < estimate.temp_bytes + estimate.components["margin"].bytes, case


def test_a_ring_of_layers_with_and_without_a_window_keeps_free_what_a_compiled_step_needed():
    """Gemma 2 9B on 32 A100s, drawn by benchmarks/plan_vs_compile.py --seed 150104 and compiled with jax 0.10.2: planned 12 % too low."""
    overrides = ["data.seq_len=8192", "model.max_seq_len=8192", "data.batch_size=128", "trainer.accumulation=2", "mesh.fsdp=8"]
    overrides += ["mesh.tensor=4", "compute.remat.policy=full", "data.document_masking=false", "compute.tensor_overlap=ring"]
    resolved = load("models/gemma2-9b", overrides).config
    device = hardware(load_cluster("dgx-a100").config.device)
    estimate = memory_per_device(resolved, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 8, "tensor": 4}, device=device)
    assert estimate.compiled_bytes < 24_612_000_000 < estimate.compiled_bytes + estimate.components["margin"].bytes


def test_experts_in_8_bits_with_a_capacity_over_tensor_take_what_is_planned():
    """Qwen3-30B-A3B on 32 H100, drawn by plan_vs_compile.py --experts --seed 760611: 38.7 GB; 46.6 with late weight gradients."""
    overrides = ["data.seq_len=32768", "model.max_seq_len=32768", "data.batch_size=64", "trainer.accumulation=2", "mesh.fsdp=16"]
    overrides += ["mesh.tensor=2", "compute.remat.policy=full", "data.document_masking=false", "precision.matmul=fp8"]
    overrides += ["precision.gradients=bfloat16", "compute.loss_chunk=8192", "compute.experts.capacity_factor=1.0"]
    resolved = load("models/qwen3-30b-a3b", [*overrides, "compute.experts.exchange=gather"]).config
    estimate = memory_per_device(resolved, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 16, "tensor": 2})
    assert estimate.compiled_bytes == pytest.approx(38.66e9, rel=0.02)


def test_the_runtimes_own_share_and_the_margin_are_not_part_of_the_compiled_size():
    estimate = memory_per_device(config(), sizes(data=2, fsdp=2, tensor=2))
    reserve, margin = (estimate.components[name].bytes for name in ("runtime_reserve", "margin"))
    assert reserve > 0 and margin > 0
    assert estimate.total_bytes - estimate.compiled_bytes == reserve + margin


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256, 36])
@pytest.mark.parametrize(("packed", "length", "softcap"), [(True, 512, None), (True, 511, None), (False, 511, None), (True, 512, 50.0)])
def test_auto_attention_is_what_the_models_choose(precision, width, packed, length, softcap):
    import jax.numpy as jnp

    from ridgeline.models.attention import AttentionRequest, resolve_backend

    chosen = config(head_dim=width, attention_softcap=softcap).model_copy(
        update={
            "precision": PrecisionConfig(compute=precision),
            "data": DataConfig(seq_len=length, batch_size=8, document_masking=packed),
            "compute": ComputeConfig(attention=AttentionConfig(backend="auto")),
        }
    )
    for gpu, platform in ((True, "cuda"), (False, "cpu")):
        request = AttentionRequest(platform, jnp.dtype(precision), width, 8, 8, True, None, packed, length, softcap)
        assert attention_backend(chosen, gpu=gpu) == resolve_backend("auto", request).name


def test_the_loss_chunk_is_that_of_the_loss():
    """models/loss.py cuts each row into equal chunks; R rows of one chunk exist at a time."""
    local = LocalSizes.of(config(rows=64, length=1000), sizes(data=2))
    assert local.rows == 32 and local.loss_chunk_tokens == 32 * 32  # 1024 // 32 rows: 32 tokens of each row, 1000 in 32 chunks of 32


START, WHOLE = "start of the backward pass", "whole step"
AT_START = (START, "reductions of the first layers")
"""Points of the plan before the loop over layers."""
LAST = "last layer of the backward pass"
AT_END = (LAST, "reductions after the layers")
"""Points of the plan in the backward pass of the first layer, which comes last, and of the tables."""


@pytest.mark.parametrize(("mesh", "experts"), [({"fsdp": 8}, 128), ({"fsdp": 2, "expert": 4}, 32), ({"data": 2, "expert": 4}, 32)])
def test_unreduced_gradients_of_experts_wait_in_the_next_layer_where_they_are_summed(mesh, experts):
    def waiting(**mesh):
        local = placed(**mesh)
        return StepMemory(local, local.attention_backend(), True, True, 1, GpuProgram()).deferred_gradients

    assert waiting(**mesh) == 3 * experts * 2048 * 768 * 4
    assert waiting(expert=8) == waiting(tensor=4) == waiting() == 0


def test_the_components_at_a_point_sum_to_the_heap_there():
    """A missing term shows here where the tolerance of the peak, or another point that is the peak, hides it.

    Rows say how closely their points are planned (within); at other points less is live than planned, or the plan is known to be off.
    """
    for case in HEAPS:
        close = case.get("within", {})
        resolved = load(case["config"], case["overrides"]).config
        local = LocalSizes.of(resolved, dict.fromkeys(MESH_AXES, 1) | case["mesh"])
        backend = local.attention_backend()
        device = device_of(case)
        program = GpuProgram() if device is None else device.program
        planned = StepMemory(local, backend, True, True, units_in_flight(local, backend), program).points()
        at_start = (planned[point] for point in AT_START if point in planned)
        planned[START] = max(at_start, key=lambda parts: sum(part.bytes for part in parts.values()))
        if LAST in planned:
            at_end = (planned[point] for point in AT_END if point in planned)
            planned[LAST] = max(at_end, key=lambda parts: sum(part.bytes for part in parts.values()))
        for point, tolerance in close.items():
            if point != WHOLE:
                total = sum(part.bytes for part in planned[point].values())
                assert total == pytest.approx(case["heap_at"][point], rel=tolerance), (case, point)
        assert abs(relative_error(case | {"overlap": True, "combined": True})) < close.get(WHOLE, 0.055), case
    assert sum(len(case.get("within", {})) for case in HEAPS) > 900


def test_kept_gate_and_up_are_read_from_the_stacks_in_the_mlps_backward_pass():
    """Two hidden activations less are computed again, of which one is still needed where the gradients are."""

    def at_mlp(names):
        made = config("names", rows=8, length=4096, mlp_dim=8192)
        made = made.model_copy(update={"compute": ComputeConfig(remat=RematConfig(policy="names", names=names))})
        local = LocalSizes.of(made, sizes(fsdp=8))
        return local, StepMemory(local, "cudnn", True, True, units_in_flight(local, "cudnn")).backward()["working_activations"].bytes

    (local, one), (_, both) = at_mlp(["mlp_up"]), at_mlp(["mlp_gate", "mlp_up"])
    assert one - both == local.hidden_bytes
