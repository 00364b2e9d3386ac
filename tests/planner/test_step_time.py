"""The extended roofline: never below a ceiling, monotone in every resource, and exact where it can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES, RematConfig
from ridgeline.planner.activations import stacked_bytes
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.hardware import hardware
from ridgeline.planner.kernels import Kernels, update_bytes
from ridgeline.planner.layouts import Layout
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.overlap import ETA, Communication, exposed_s
from ridgeline.planner.recompute import recomputed_by
from ridgeline.planner.software import software
from ridgeline.planner.step_time import Machine, host_input_s, step_parts, step_time
from tests.planner.clusters import CALIBRATION, cluster, config, links

NODES = st.sampled_from((1, 2, 4))
LAYOUTS = st.builds(
    Layout,
    data=st.sampled_from((1, 2, 4)),
    fsdp=st.sampled_from((1, 2, 8, 16)),
    tensor=st.sampled_from((1, 2, 4, 8)),
    accumulation=st.sampled_from((1, 2)),
    remat=st.sampled_from([RematConfig(policy=policy) for policy in ("none", "dots", "full")]),
)


def estimate(layout, made=None, model=None):
    made = made or cluster()
    return step_time(layout.apply(model or config()), layout.sizes, made, CALIBRATION)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_no_step_is_below_any_single_ceiling(layout):
    chosen, made = layout.apply(config()), cluster()
    machine = Machine(made, CALIBRATION, layout.devices)
    parts = step_parts(chosen, layout.sizes, machine)
    step = parts.assemble()
    peak = hardware("h100-sxm").peak_flops["bfloat16"]
    flops = train_flops_per_token(chosen.model, 4096).total * 128 * 4096
    assert step.step_s > flops / (peak * layout.devices)
    assert step.mfu == pytest.approx(flops / (peak * layout.devices) / step.step_s)
    work = parts.forward + parts.backward + parts.rest
    assert step.step_s >= work.compute_s and step.step_s >= work.memory_s
    assert step.step_s >= step.communication_s - 1e-12
    assert step.step_s >= host_input_s(LocalSizes.of(chosen, layout.sizes), machine)
    assert sum(step.breakdown_s.values()) == pytest.approx(step.step_s)
    assert all(seconds >= 0 for seconds in step.breakdown_s.values())
    assert math.isclose(step.tokens_per_s * step.step_s, 128 * 4096)


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, st.floats(1.0, 8.0))
def test_more_bandwidth_or_compute_is_never_slower(layout, factor):
    base = estimate(layout).step_s
    assert estimate(layout, cluster(links=links(nvlink=450 * factor))).step_s <= base * (1 + 1e-9)
    assert estimate(layout, cluster(links=links(network=50 * factor), nic_gb_per_s=400 * factor)).step_s <= base * (1 + 1e-9)
    parts = step_parts(layout.apply(config()), layout.sizes, Machine(cluster(), CALIBRATION, layout.devices))
    for ceiling in ("compute", "hbm", "nvlink", "network", "host_input"):
        assert parts.assemble({ceiling: factor}).step_s <= base * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(LAYOUTS)
def test_recomputing_costs_time_and_never_moves_less(layout):
    steps = [
        estimate(Layout(layout.data, layout.fsdp, layout.tensor, layout.accumulation, RematConfig(policy=p))) for p in ("none", "full")
    ]
    assert steps[0].step_s < steps[1].step_s
    assert steps[0].communication_s <= steps[1].communication_s


def test_one_device_communicates_nothing():
    step = estimate(Layout(1, 1, 1, 64))
    assert step.communication == () and step.breakdown_s["nvlink"] == step.breakdown_s["network"] == 0


def test_communication_hides_under_compute_and_what_does_not_is_paid():
    """T = Tc + Tm - eta * min(Tc, Tm), for gathers of parameters; the residual stream over tensor is paid in full but for scatters of
    gradients of inputs, and where the MLP is recomputed in the forward pass alone."""
    layout = Layout(1, 8, 1)
    parts = step_parts(layout.apply(config()), layout.sizes, Machine(cluster(), CALIBRATION, 8))
    hidden = [item for item in parts.communication if item.overlappable]
    assert hidden and all(item.planned.where == "layer" for item in hidden)
    total = sum(item.seconds for item in hidden)
    free = exposed_s(hidden, {"forward": 1e9, "backward": 1e9})
    assert sum(free.values()) == pytest.approx((1 - ETA) * total)
    assert sum(exposed_s(hidden, {"forward": 0.0, "backward": 0.0}).values()) == pytest.approx(total)
    for policy, gathers in (("none", {"attention update", "mlp update"}), ("full", set())):
        tensor = Layout(1, 1, 8, 1, RematConfig(policy=policy))
        stream = step_parts(tensor.apply(config()), tensor.sizes, Machine(cluster(), CALIBRATION, 8)).communication
        paid = [item for item in stream if not item.overlappable]
        backward = {item.planned.what for item in paid if item.planned.where == "layer" and item.planned.phase == "backward"}
        assert backward == gathers | {"norms"}
        exposed = sum(exposed_s(stream, {"forward": 1e9, "backward": 1e9}).values())
        hidden = sum(item.seconds for item in stream if item.overlappable)
        assert exposed == pytest.approx(sum(item.seconds for item in paid) + (1 - ETA) * hidden) and hidden


def test_rings_move_what_gathers_move_and_hide_a_part_of_it():
    layout = Layout(1, 1, 8, 1, RematConfig(policy="full"))
    machine, base = Machine(cluster(), CALIBRATION, 8), layout.apply(config())
    ringed = base.model_copy(update={"compute": base.compute.model_copy(update={"tensor_overlap": "ring"})})
    plain, ring = (step_parts(each, layout.sizes, machine) for each in (base, ringed))
    moved = [sum(i.seconds for i in parts.communication if i.planned.where == "layer") for parts in (plain, ring)]
    assert moved[1] == pytest.approx(moved[0], rel=0.02)
    waits = [sum(parts.assemble().breakdown_s[link] for link in ("nvlink", "network")) for parts in (plain, ring)]
    assert 0.4 * waits[0] < waits[1] < 0.7 * waits[0]
    unhidden = [replace(parts, eta=0.0).assemble().breakdown_s["nvlink"] for parts in (plain, ring)]
    assert unhidden[1] == pytest.approx(unhidden[0], rel=0.02)


def test_axes_use_the_links_they_span():
    """tensor=8 stays on NVLink; data=2 over two nodes leaves through the network; a collective over both names both."""
    layout = Layout(2, 1, 8)
    step = estimate(layout)
    kinds = {item.planned.axes: set(item.by_kind()) for item in step.communication}
    assert kinds[("tensor",)] == {"nvlink"} and kinds[("data",)] == {"network"}
    for item in step.communication:
        assert isinstance(item, Communication)
        assert sum(item.by_kind().values()) == pytest.approx(item.seconds)


def test_products_take_their_flops_at_the_calibrated_rate():
    layout = Layout(1, 1, 1, 128)
    local = LocalSizes.of(layout.apply(config()), layout.sizes)
    kernels = Kernels(local, hardware("h100-sxm"), CALIBRATION)
    shapes = kernels.matmuls()
    assert shapes["gate"] == (4096, 14336, 4096) and shapes["down"] == (4096, 4096, 14336) and shapes["key"] == (4096, 1024, 4096)
    flops = sum(2 * m * n * k for m, n, k in shapes.values())
    forward = kernels.layer_forward()
    assert forward.compute_s > flops / 989.4e12
    assert kernels.layer_backward().compute_s > 2 * flops / 989.4e12


def test_an_input_pipeline_that_is_too_slow_is_the_ceiling():
    slow = CALIBRATION.file.host.model_copy(update={"input_tokens_per_s": 1000.0})
    calibration = type(CALIBRATION)("slow host", CALIBRATION.file.model_copy(update={"host": slow}))
    layout = Layout(1, 8, 1)
    step = step_time(layout.apply(config()), layout.sizes, cluster(), calibration)
    assert step.step_s == pytest.approx(128 * 4096 / 1000, rel=1e-3)
    assert step.breakdown_s["host_input"] > 0.9 * step.step_s


def test_every_shipped_cluster_can_be_predicted():
    from ridgeline.configs.cluster import cluster_names

    for name in cluster_names():
        made = load_cluster(name).config
        devices = made.devices_per_node
        layout = Layout(1, devices, 1)
        model = config("models/llama-3.2-1b", rows=devices, length=512)
        if made.device == "cpu":
            model = model.model_copy(update={"precision": model.precision.model_copy(update={"compute": "float32"})})
        step = step_time(layout.apply(model), layout.sizes, made, CALIBRATION)
        assert step.step_s > 0 and 0 < step.mfu < 1, name


def test_scales_of_earlier_steps_save_a_pass_over_the_inputs_of_products():
    def work(matmul):
        made = config()
        made = made.model_copy(update={"precision": made.precision.model_copy(update={"compute": "bfloat16", "matmul": matmul})})
        return Kernels(LocalSizes.of(made, {}), hardware("h100-sxm"), CALIBRATION)

    current, delayed = work("fp8"), work("fp8_delayed")
    local = current.local
    inputs = 2 * local.stream_bytes + local.query_bytes + local.hidden_bytes
    assert current.layer_forward().memory_s - delayed.layer_forward().memory_s == pytest.approx(current.memory_s(inputs))
    assert current.layer_forward().compute_s == delayed.layer_forward().compute_s < work("compute").layer_forward().compute_s


NARROW = ("precision.params=bfloat16", "precision.stochastic_rounding=true", "precision.moments=int8", "precision.gradients=bfloat16")
KERNELS = (
    ("models/llama-3.1-8b", {"fsdp": 8}, (4096, 64, 4, "none"), (), 38.0, None),
    ("models/llama-3.1-8b", {"fsdp": 8}, (4096, 64, 4, "none"), NARROW, 26.9, None),
    ("models/llama-3.1-8b", {"fsdp": 64}, (8192, 256, 4, "none"), (), 4.8, 348.9),
    ("models/llama-3.1-8b", {"fsdp": 16}, (4096, 64, 4, "full"), (), 19.0, 20.5),
    ("models/llama-3.1-70b", {"fsdp": 64}, (8192, 256, 4, "full"), (), 41.6, 148.3),
    ("models/llama-3.2-1b", {"fsdp": 8}, (4096, 128, 2, "full"), (), 6.1, 14.3),
)
"""Model, mesh, (tokens, rows, microbatches, remat), precision; GB that kernels of the compiled step move in the optimizer, and into, as
zeros into and between the stacks of the layers' scan (GPU backend, jax 0.10.2, as hlo.roofline counts them)."""


@pytest.mark.parametrize(("model", "mesh", "shape", "precision", "update_gb", "stacks_gb"), KERNELS)
def test_the_update_and_the_scans_stacks_move_what_compiled_steps_move(model, mesh, shape, precision, update_gb, stacks_gb):
    length, rows, microbatches, remat = shape
    batch = (f"data.seq_len={length}", f"data.batch_size={rows}", f"trainer.accumulation={microbatches}", "data.document_masking=false")
    config = load(model, [*batch, *precision, f"compute.remat.policy={remat}", "precision.compute=bfloat16"]).config
    local = LocalSizes.of(config, dict.fromkeys(MESH_AXES, 1) | mesh)
    assert update_bytes(local, transposed=True) / 1e9 == pytest.approx(update_gb, rel=0.02)
    if stacks_gb is not None:
        assert microbatches * stacked_bytes(local, "cudnn") / 1e9 == pytest.approx(stacks_gb, rel=0.04)
    unrolled = config.model_copy(update={"compute": config.compute.model_copy(update={"scan_layers": False})})
    assert stacked_bytes(LocalSizes.of(unrolled, dict.fromkeys(MESH_AXES, 1) | mesh), "cudnn") == 0


@pytest.mark.parametrize(("backend", "again"), [("cudnn", True), ("pallas", False)])
def test_a_kept_attention_result_spares_its_computation_only_with_its_statistics(backend, again):
    def backward(names):
        remat = {"policy": "names", "names": ["query", "key", "value", *names]}
        made = load(
            "models/llama-3.1-8b", [f"compute.attention.backend={backend}", "precision.compute=bfloat16", "data.document_masking=false"]
        )
        compute = made.config.compute.model_copy(update={"remat": RematConfig(**remat)})
        local = LocalSizes.of(made.config.model_copy(update={"compute": compute}), dict.fromkeys(MESH_AXES, 1))
        return Kernels(local, hardware("h100-sxm"), CALIBRATION).layer_backward().compute_s

    assert backward(["attention_context"]) == backward([])
    assert (backward(["attention_context", "attention_lse"]) == backward([])) == again


def test_zero_stage_2_divides_the_update_over_data():
    plain, sharded = (estimate(Layout(8, 1, 1, zero_stage=stage)) for stage in (0, 2))
    assert sharded.breakdown_s["optimizer"] == pytest.approx(plain.breakdown_s["optimizer"] / 8)


def test_experts_take_the_time_of_whole_tiles():
    """gpt-oss: 2,880 hidden units are 360 on each of 8 devices; its kernel pads them to 384."""
    overrides = ("data.seq_len=2048", "data.batch_size=64", "data.document_masking=false", "precision.compute=bfloat16")
    made = load("models/gpt-oss-20b", overrides).config

    def gate(tensor, name="ridgeline"):
        local = LocalSizes.of(made, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 4, "tensor": tensor})
        return Kernels(local, hardware("h100-sxm"), replace(CALIBRATION, software=software(name))).matmuls()["gate"], local

    (rows, width, _), local = gate(1)
    assert (rows, width) == (round(local.busy_rows / software().grouped_rate), 2880)
    assert gate(8)[0][:2] == (rows, 384) and gate(8, "megatron")[0][1] == 360


KEPT_ON_HOST = ["compute.remat.policy=offload", "compute.remat.names=[query,mlp_up]"]
TWICE = [
    ("llama-3.1-8b", {"fsdp": 4, "tensor": 2}, ["model.num_layers=8", *KEPT_ON_HOST], 15 / 8),
    (
        "llama-3.1-8b",
        {"fsdp": 4, "tensor": 2},
        ["model.num_layers=8", "compute.remat.policy=names", "compute.remat.names=[mlp_gate,mlp_up]"],
        1,
    ),
    ("llama-3.1-8b", {"fsdp": 4, "tensor": 2}, ["model.num_layers=8", "compute.remat.policy=full"], 1),
    ("qwen3-30b-a3b", {"fsdp": 2, "expert": 4}, ["model.num_layers=8", "compute.remat.policy=full", "compute.experts.exchange=gather"], 1),
    ("llama-2-7b", {"fsdp": 8}, ["compute.remat.policy=full"], 1),
]
"""Model, mesh, overrides, and executions of attention's kernels in the recomputation of a compiled step over those in its forward pass
(jaxlib 0.10.2)."""


@pytest.mark.parametrize(("model", "mesh", "overrides", "compiled"), TWICE)
def test_attention_is_recomputed_twice_where_a_gather_follows_its_update_and_nothing_waits(model, mesh, overrides, compiled):
    made = load(f"models/{model}", ["data.batch_size=1024", "precision.compute=bfloat16", *overrides]).config
    local = LocalSizes.of(made, dict.fromkeys(MESH_AXES, 1) | mesh)
    kernels = Kernels(local, hardware("h100-sxm"), CALIBRATION)
    assert 1 + kernels.attention_twice(recomputed_by(made)) == pytest.approx(compiled)
    once = replace(CALIBRATION, software=software("maxtext"))
    assert Kernels(local, hardware("h100-sxm"), once).attention_twice(recomputed_by(made)) == 0


@pytest.mark.parametrize("rows", [1, 4])
def test_the_stream_is_turned_around_collectives_over_tensor(rows):
    """Llama 3.2 3B over tensor=8, 4 rows of 8,192 tokens, as compiled: 4 transposes of 403 MB in the forward pass; in the backward pass 2,
    and sums of 805 and 604 MB before the scatters. A single row needs no transposes."""
    settings = [
        "data.seq_len=8192",
        f"data.batch_size={rows}",
        "trainer.accumulation=1",
        "compute.remat.policy=none",
        "precision.compute=bfloat16",
    ]

    def moved(*more):
        made = load("models/llama-3.2-3b", [*settings, *more]).config
        kernels = Kernels(LocalSizes.of(made, dict.fromkeys(MESH_AXES, 1) | {"tensor": 8}), hardware("a100-80gb"), CALIBRATION)
        seconds = kernels.layer_forward().memory_s, kernels.layer_backward().memory_s
        return [each * CALIBRATION.memory_bytes_per_s(kernels.device) / 1e6 for each in seconds]

    around = [gather - ring for gather, ring in zip(moved(), moved("compute.tensor_overlap=ring"), strict=True)]
    compiled = (4 * 403, 2 * 403 + 805 + 604) if rows == 4 else (0, (805 + 604) / 4)
    assert around == pytest.approx(compiled, rel=0.01, abs=1e-6)


def test_matmuls_of_experts_with_a_capacity_run_at_the_rate_of_plain_ones():
    def rows(*more):
        settings = ["data.seq_len=4096", "data.batch_size=16", "precision.compute=bfloat16", *more]
        local = LocalSizes.of(load("models/mixtral-8x7b", settings).config, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 16})
        return Kernels(local, hardware("h100-sxm"), CALIBRATION).matmuls()["gate"][0], local

    with_capacity, local = rows("compute.experts.capacity_factor=1.25")
    assert with_capacity == local.expert_rows
    grouped, local = rows()
    assert grouped == round(local.busy_rows / software().grouped_rate)


def test_a_step_without_stages_has_no_bubble():
    """34 layers are no whole number of Gemma 3's periods of 6."""
    made = load("models/gemma3-4b", ["data.batch_size=8", "precision.compute=bfloat16"]).config
    assert step_time(made, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 8}, cluster(), CALIBRATION).breakdown_s["bubble"] == 0


def test_parameters_of_experts_overlap_with_attention_alone_where_tokens_wait_in_the_same_queue():
    """As compiled for Mixtral over fsdp=4 x expert=8 on H100 (jaxlib 0.10.2): of a gather of 5.5 ms 4.6 ms are exposed beside 5.8 ms of
    computation, of which 0.9 ms come before the exchange of tokens."""
    overrides = ["data.seq_len=2048", "data.document_masking=false", "precision.compute=bfloat16", "precision.gradients=bfloat16"]
    overrides += [
        "compute.experts.capacity_factor=1.0",
        "compute.experts.exchange=all_to_all",
        "data.batch_size=256",
        "trainer.accumulation=4",
    ]
    made, sizes = load("models/mixtral-8x7b", overrides).config, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 4, "expert": 8}
    dgx, layers = load_cluster("dgx-h100").config, 4 * 32
    parts = step_parts(made, sizes, Machine(dgx, CALIBRATION, 32))
    [gather] = [item for item in parts.communication if item.groups[0] == "experts" and item.planned.phase == "forward"]
    around = {"experts": {"forward": parts.beside["experts"].forward.seconds, "backward": parts.beside["experts"].backward.seconds}}
    assert gather.seconds / layers == pytest.approx(5.5e-3, rel=0.02)
    compute = {"forward": parts.forward.seconds, "backward": parts.backward.seconds}
    exposed = sum(exposed_s([gather], compute, beside_s=around).values())
    assert exposed / layers == pytest.approx(4.6e-3, rel=0.1)
    assert sum(exposed_s([gather], compute).values()) / layers == pytest.approx((1 - ETA) * 5.5e-3, rel=0.05)
    alone = step_parts(made, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 32}, Machine(dgx, CALIBRATION, 32))
    assert "experts" not in alone.beside, "no exchange"


def test_collectives_of_experts_beside_attention_overlap_with_it_alone():
    """DeepSeek V3 over tensor: the gathers of both passes with attention's forward pass, the reductions with its backward pass."""
    batch = ["data.seq_len=4096", "data.batch_size=8192", "trainer.accumulation=4", "compute.remat.policy=full"]
    made, sizes = load("models/deepseek-v3-671b", batch).config, dict.fromkeys(MESH_AXES, 1) | {"fsdp": 512, "tensor": 2}
    parts = step_parts(made, sizes, Machine(load_cluster("dgx-h100").config, CALIBRATION, 1024))
    gathers, reductions = parts.beside["experts"], parts.beside["expert gradients"]
    assert gathers.forward == gathers.backward and not reductions.forward.seconds
    assert 0 < gathers.forward.seconds < reductions.backward.seconds < parts.backward.seconds - gathers.backward.seconds
    beside = {name: {"forward": times.forward.seconds, "backward": times.backward.seconds} for name, times in parts.beside.items()}
    compute = {"forward": parts.forward.seconds, "backward": parts.backward.seconds}
    of_experts = [item for item in parts.communication if item.planned.what == "experts" and item.planned.where == "layer"]
    assert {item.groups[0] for item in of_experts} == set(beside)
    for item in of_experts:
        hidden = beside[item.groups[0]][item.planned.phase]
        exposed = sum(exposed_s([item], compute, beside_s=beside).values())
        assert exposed == pytest.approx(item.seconds - ETA * min(hidden, item.seconds))
        assert exposed > 0.2 * item.seconds, "longer than attention"


@pytest.mark.parametrize(("sizes", "waits"), [({"fsdp": 4, "tensor": 8}, True), ({"fsdp": 4, "expert": 8}, True), ({"fsdp": 32}, False)])
def test_tokens_that_are_gathered_over_tensor_wait_for_parameters_of_experts_too(sizes, waits):
    made = load("models/mixtral-8x7b", ["data.seq_len=2048", "data.batch_size=256"]).config
    parts = step_parts(made, dict.fromkeys(MESH_AXES, 1) | sizes, Machine(load_cluster("dgx-h100").config, CALIBRATION, 32))
    assert ("experts" in parts.beside) == waits and "expert gradients" not in parts.beside
