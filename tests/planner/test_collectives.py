"""The plan of a step's collectives, in numbers worked out by hand. (The compiled step is held to it in tests/sharding.)"""

import json
from pathlib import Path

import numpy as np
import pytest

from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.configs.schema import (
    MESH_AXES,
    ComputeConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    TrainerConfig,
)
from ridgeline.planner.collectives import as_compiled_for_cpu, as_compiled_for_gpu, bytes_per_step, planned_collectives
from ridgeline.planner.experts import exchange_method, peers_per_token
from ridgeline.planner.parameters import matmul_weights
from ridgeline.planner.recompute import recomputed

D, F, N, K, H, V, L = 64, 160, 8, 4, 8, 512, 3
HERE = Path(__file__).parent
PLAIN, OVERLAP, RUNS = (json.loads((HERE / f"compiled_steps{kind}.json").read_text())["cases"] for kind in ("", "_overlap", "_run"))
SIZES = {"pipeline": 1, "data": 2, "fsdp": 4, "context": 1, "tensor": 2, "expert": 1}


def config(accumulation: int = 2, policy: str = "none", names=(), optimizer: str = "adamw") -> Config:
    return Config(
        compute=ComputeConfig(remat=RematConfig(policy=policy, names=list(names))),
        optimizer=OptimizerConfig(kind=optimizer),
        model=ModelConfig(vocab_size=V, num_layers=L, embed_dim=D, num_heads=N, num_kv_heads=K, head_dim=H, mlp_dim=F),
        precision=PrecisionConfig(compute="bfloat16"),
        mesh=MeshConfig(data=2, fsdp=4, tensor=2),
        data=DataConfig(batch_size=32, seq_len=16),
        trainer=TrainerConfig(accumulation=accumulation),
    )


def test_one_device_plans_nothing():
    assert planned_collectives(config(), dict.fromkeys(SIZES, 1)) == []


def test_layers_move_what_the_formulas_say():
    planned = [item for item in planned_collectives(config(), SIZES) if item.where == "layer"]
    weights = 2 * D * (N + K) * H + 3 * D * F
    total = {}
    for item in planned:
        total[item.phase, item.kind, item.axes] = total.get((item.phase, item.kind, item.axes), 0) + item.bytes
    stream = 2 * 16 * D * 2  # 2 rows of a microbatch per device, bfloat16
    assert total["forward", "all-gather", ("fsdp",)] == total["backward", "all-gather", ("fsdp",)] == weights // 2 * 2
    assert total["backward", "reduce-scatter", ("fsdp",)] == weights // 2 * 4
    assert total["backward", "all-reduce", ("data",)] == weights // 2 // 4 * 4
    for phase in ("forward", "backward"):
        assert total[phase, "all-gather", ("tensor",)] == total[phase, "reduce-scatter", ("tensor",)] == 2 * stream
    assert {item.count for item in planned} == {L * 2}


def test_microbatches_repeat_parameter_traffic_but_not_that_of_activations():
    one, four = (bytes_per_step(planned_collectives(config(n), SIZES)) for n in (1, 4))
    assert four["all-gather", ("fsdp",)] == 4 * one["all-gather", ("fsdp",)]
    assert four["all-gather", ("tensor",)] == one["all-gather", ("tensor",)]


def test_the_cpu_form_splits_sums_and_forms_no_reduce_scatter_but_those_by_hand():
    for item in planned_collectives(config(), SIZES):
        compiled = as_compiled_for_cpu(item)
        assert (compiled.kind == "reduce-scatter") == (item.kind == "reduce-scatter" and item.by_hand)
        assert compiled.bytes == item.bytes * item.parts
        assert compiled.count in (item.count, 1)


def case_name(case):
    return "-".join(
        [
            case["config"].removeprefix("models/"),
            *(f"{a}{n}" for a, n in case["mesh"].items()),
            *case["overrides"][2:],
            *(["overlap"] if case in OVERLAP else ["run"] if case in RUNS else []),
        ]
    )


@pytest.mark.parametrize("case", [*PLAIN, *OVERLAP, *RUNS], ids=case_name)
def test_the_plan_is_what_the_gpu_backend_compiled(case):
    """Bytes of a step by kind and axes."""
    resolved = load(case["config"], case["overrides"]).config
    planned = as_compiled_for_gpu(planned_collectives(resolved, dict.fromkeys(MESH_AXES, 1) | case["mesh"]))
    totals = {f"{kind} {'+'.join(axes)}": size for (kind, axes), size in bytes_per_step(planned).items() if size >= 1e6}
    sums = 3e6 if resolved.optimizer.kind == "adafactor" else 1e4  # its row and column sums; scalars
    for key in {*totals, *case["collectives"]}:
        assert totals.get(key, 0) == pytest.approx(case["collectives"].get(key, 0), rel=1e-4, abs=sums), key


def extra(policy, names=()):
    """Bytes of the backward pass of a layer beyond what it moves when nothing is recomputed, by kind and axes."""

    def layer(items):
        return bytes_per_step([item for item in items if item.where == "layer" and item.phase == "backward"])

    base, more = layer(planned_collectives(config(1), SIZES)), layer(planned_collectives(config(1, policy, names), SIZES))
    return {key: (more[key] - base.get(key, 0)) // L for key in more if more[key] != base.get(key, 0)}


def test_full_recomputation_moves_the_streams_again_but_gathers_parameters_once_for_both():
    stream = 4 * 16 * D * 2
    assert extra("full") == {("all-gather", ("tensor",)): 2 * stream, ("reduce-scatter", ("tensor",)): stream}


def test_kept_products_do_not_save_the_gathers_of_their_inputs():
    assert extra("dots") == {("all-gather", ("tensor",)): 2 * 4 * 16 * D * 2}
    assert extra("attention-only") == {}


def test_named_values_in_host_memory_communicate_as_those_on_the_device():
    names = ("query", "key", "value", "attention_context", "attention_out")
    assert set(extra("names", names)) == {("all-gather", ("tensor",))}  # attention's update is kept
    assert extra("offload", names) == extra("names", names)


def test_head_norms_need_the_projections_again_even_where_their_results_are_kept():
    model = config().model.model_copy(update={"qk_norm": True})
    again = recomputed(model, RematConfig(policy="names", names=["query", "key", "value", "attention_out", "mlp_gate", "mlp_up"]))
    assert again.weights == {"query", "key"}


def test_only_muon_communicates_in_the_optimizer():
    """Whole float32 matrices of a share of the layers, there and back, over each axis that shards them."""
    assert not [item for item in planned_collectives(config(optimizer="lion"), SIZES) if item.where == "optimizer"]
    muon = config(optimizer="muon")
    planned = [item for item in planned_collectives(muon, SIZES) if item.where == "optimizer"]
    assert {(item.kind, item.axes, item.count) for item in planned} == {("all-to-all", (axis,), 2) for axis in ("fsdp", "tensor")}
    devices = SIZES["fsdp"] * SIZES["tensor"]
    layers = -(-muon.model.num_layers // devices)
    assert sum(item.bytes for item in planned) == 2 * 4 * layers * sum(matmul_weights(muon.model).values())


def test_the_gpu_form_joins_axes_of_replicated_gradients_and_sums_over_microbatches_first():
    planned = planned_collectives(config(4), SIZES)
    compiled = as_compiled_for_gpu(planned)
    assert [item.axes for item in compiled if item.replicated] == [("data", "fsdp", "tensor")] * 2
    embedding = [item for item in compiled if item.what == "embedding" and item.kind == "all-reduce"]
    assert [item.count for item in embedding] == [1]
    assert {item.count for item in planned if item.what == "unembedding" and item.kind == "all-reduce"} == {4}


def test_tokens_go_to_as_many_devices_as_their_experts_are_on():
    rng = np.random.default_rng(0)
    for experts, per_token, expert in ((8, 2, 4), (128, 8, 8), (128, 8, 64), (16, 16, 4)):
        moe = MoEConfig(experts=experts, experts_per_token=per_token)
        chosen = np.argsort(rng.random((4000, experts)), 1)[:, :per_token]
        devices = [len(set(row)) for row in (chosen // (experts // expert)).tolist()]
        assert peers_per_token(moe, expert) == pytest.approx(np.mean(devices), rel=0.02)


@pytest.mark.parametrize("factor", [None, 1.0, 1.25])
def test_auto_exchanges_all_to_all_where_that_sends_less(factor):
    """Also not by a little: where auto gathers, a token goes to as many devices as there are, or has room on as many."""
    for expert in (2, 4, 8, 16, 32):
        sizes = dict.fromkeys(MESH_AXES, 1) | {"fsdp": 2, "expert": expert}
        moe = MoEConfig(experts=64, experts_per_token=4, expert_dim=32)
        sent = {}
        for exchange in ("auto", "gather", "all_to_all"):
            experts = ExpertsConfig(exchange=exchange, capacity_factor=factor)
            made = config().model_copy(update={"compute": ComputeConfig(experts=experts), "data": DataConfig(batch_size=128, seq_len=64)})
            made = made.model_copy(update={"model": made.model.model_copy(update={"moe": moe})})
            planned = [item for item in planned_collectives(made, sizes) if item.of_tokens]
            sent[exchange] = sum(item.sent_bytes * item.count for item in planned)
            kinds = {item.kind for item in planned}
            method = exchange_method(moe, experts, sizes)
            assert (method == "gather") == (kinds == {"all-gather", "reduce-scatter"})
            assert method == (exchange if exchange != "auto" else "all_to_all" if expert > 4 * (factor or 1) else "gather")
        assert sent["auto"] == min(sent["auto"], sent["gather"]) and sent["all_to_all"] <= sent["gather"]
        assert sent["auto"] < sent["gather"] or expert <= 4 * (factor or 1)
