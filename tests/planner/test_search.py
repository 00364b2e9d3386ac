"""The search: planted optima are found, nothing illegal or too large is offered, pruning loses nothing, and it is quick."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.rules import check_config, check_devices
from ridgeline.configs.schema import OptimizerConfig, RematConfig
from ridgeline.planner.advice import alternatives, bottleneck, stages_sentence
from ridgeline.planner.calculators.pipeline_schedule import pipeline_estimate
from ridgeline.planner.hardware import hardware
from ridgeline.planner.layouts import Layout, accumulations, meshes, remat_choices
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.overlap import ETA
from ridgeline.planner.plan import MOST_COMPILED, compile_above, make_plan, plan_json
from ridgeline.planner.search import Limits, capacity_bytes, evaluate, fits, ranked, search, search_scale, within
from ridgeline.planner.step_time import Machine, step_time
from ridgeline.planner.summary import sentences
from tests.planner.clusters import CALIBRATION, cluster, config, links

TOKENS = 1e11


def best(made, model, nodes=4):
    scale = search_scale(model, made, CALIBRATION, nodes, TOKENS)
    assert scale.best is not None
    return scale.best


def test_a_step_that_fills_the_memory_is_planned_with_less_overlap():
    """XLA's scheduler keeps within a limit of its own: near it a part of the bytes is not overlapped, never all of them."""
    made = load_cluster("dgx-h100").config
    scale = search_scale(load("models/llama-3.1-8b", ["data.batch_size=256", "data.seq_len=8192"]).config, made, CALIBRATION, 4, TOKENS)
    pool = 0.95 * 84942979072
    full = [c for c in scale.candidates if c.memory.compiled_bytes > 0.9 * (0.05 * c.memory.argument_bytes + 0.95 * pool)]
    rest = [c for c in scale.candidates if c not in full]
    assert full and rest
    assert {c.parts.eta for c in rest} == {ETA}
    assert all(0.8 * ETA < c.parts.eta < ETA for c in full)


def test_whether_a_layout_fits_is_what_the_search_finds():
    source, found = random.Random(5), []
    for _ in range(14):
        model = source.choice(["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "llama-3.1-405b"])
        made, nodes = load_cluster(source.choice(["dgx-h100", "dgx-a100"])).config, 2 ** source.randrange(4)
        rows = 8 * 2 ** source.randrange(6)
        drawn = load(f"models/{model}", [f"data.batch_size={rows}", f"data.seq_len={2 ** source.randrange(10, 14)}"]).config
        found.append(fits(drawn, made, CALIBRATION, nodes))
        assert found[-1] == (search_scale(drawn, made, CALIBRATION, nodes, TOKENS).best is not None)
    assert 3 <= sum(found) <= 11


# Planted optima.


def test_on_a_slow_network_the_sharding_stays_inside_the_node():
    """2 GB/s between nodes: only the gradients of shards may cross them, so parameters are sharded inside a node and replicated across."""
    made = cluster(links=links(network=2.0), nic_gb_per_s=16.0)
    found = best(made, config("models/llama-3.2-1b", rows=512)).layout
    assert found.fsdp * found.tensor <= 8 and found.data >= 4


def test_in_one_huge_nvlink_domain_sharding_ignores_where_nodes_end():
    """Memory for nothing but state cut over more than 8 GPUs, unless much is recomputed. Where all 64 reach each other at NVLink speed the
    sharding spreads and keeps activations; where nodes of 8 hang on a slow network it stays inside and recomputes."""
    model, little = config(rows=64), 0.42
    wide = cluster(links=links(domain=None)[:1], devices_per_node=64, nic_gb_per_s=None, utilisation_cap=little)
    spread = best(wide, model, nodes=1).layout
    assert spread.fsdp * spread.tensor > 8 and spread.remat.policy == "none"
    apart = cluster(links=links(network=2.0), nic_gb_per_s=16.0, utilisation_cap=little)
    inside = best(apart, model, nodes=8).layout
    assert inside.fsdp * inside.tensor <= 8 and inside.remat.policy != "none"


def test_tiny_memory_forces_sharding_and_recomputation_and_plenty_forbids_it():
    """A 3B model on 8 GPUs: with an eighth of the memory all state must be sharded and activations recomputed."""
    small = config("models/llama-3.2-3b", rows=64)
    tight = best(cluster(utilisation_cap=0.16), small, nodes=1)
    assert tight.layout.fsdp * tight.layout.tensor == 8 and tight.layout.remat.policy != "none"
    roomy = best(cluster(device="h200-sxm"), small, nodes=1)
    assert roomy.layout.remat.policy == "none"
    assert tight.step.step_s > roomy.step.step_s


def test_a_model_whose_state_fits_no_replica_is_sharded_over_all_nodes():
    """70B with AdamW is 847 GB of state: half of 32 H100s could not hold a replica beside its gradients and activations."""
    found = best(cluster(utilisation_cap=1.0), config("models/llama-3.1-70b", rows=64), nodes=4)
    assert found.layout.data == 1 and found.layout.fsdp * found.layout.tensor == 32


def test_where_compute_is_free_of_communication_nothing_is_cut():
    """One device: one layout of the mesh, and the only choices are microbatches and recomputation."""
    scale = search_scale(config("models/llama-3.2-1b", rows=8), cluster(devices_per_node=1), CALIBRATION, 1, TOKENS)
    assert {candidate.layout.text() for candidate in scale.candidates} == {"one device"}


# What is offered.


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_every_candidate_is_legal_and_fits_and_keeps_the_batch(nodes):
    model, made = config(rows=96), cluster()
    scale = search_scale(model, made, CALIBRATION, nodes, TOKENS)
    assert scale.candidates
    for candidate in scale.candidates:
        chosen = candidate.layout.apply(model)
        assert not check_config(chosen)
        assert check_devices(chosen, scale.devices) == candidate.layout.sizes
        assert candidate.memory.total_bytes <= capacity_bytes(Machine(made, CALIBRATION, scale.devices))
        rows = candidate.microbatch * candidate.layout.accumulation * candidate.layout.data * candidate.layout.fsdp
        assert rows == chosen.data.batch_size == model.data.batch_size


def test_every_mesh_is_either_a_candidate_or_rejected_with_a_reason():
    model, made = config(rows=128), cluster()
    scale = search_scale(model, made, CALIBRATION, 2, TOKENS)
    seen = {tuple(c.layout.mesh.items()) for c in scale.candidates} | {tuple(r.mesh.items()) for r in scale.rejections}
    assert seen == {tuple(mesh.layout.mesh.items()) for mesh in meshes(model, 16, made.devices_per_node)}
    assert all(rejection.reason for rejection in scale.rejections)
    illegal = [r for r in scale.rejections if r.remat is None]
    assert any("num_kv_heads=8 does not divide by mesh.tensor=16" in r.reason for r in illegal)


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "mixtral-8x7b", "gemma3-1b"])
def test_meshes_without_a_reason_break_no_rule_of_a_config(preset):
    model = load(f"models/{preset}", ["data.batch_size=64", "data.seq_len=32768", "optimizer.kind=adamw"]).config
    valid = [mesh.layout for mesh in meshes(model, 16, 8) if not mesh.refused]
    assert len(valid) > 5
    for layout in valid:
        assert not check_config(layout.apply(model)), layout


def test_pruning_finds_what_an_exhaustive_search_finds():
    model, made = config(rows=64), cluster()
    machine = Machine(made, CALIBRATION, 16)
    quickest = math.inf
    for mesh in meshes(model, 16, made.devices_per_node):
        if mesh.refused:
            continue
        for remat in remat_choices(model):
            for count in accumulations(model, mesh.layout):
                layout = replace(mesh.layout, accumulation=count, remat=remat)
                memory = memory_per_device(layout.apply(model), layout.sizes)
                if memory.total_bytes <= capacity_bytes(machine):
                    quickest = min(quickest, evaluate(model, layout, memory, machine, TOKENS, 2).step.step_s)
    assert best(made, model, nodes=2).step.step_s == pytest.approx(quickest)


def test_layouts_are_planned_with_the_memory_of_the_clusters_gpu():
    """XLA builds other programs for A100 than for H100."""
    model, made = load("models/olmo2-1b", ["data.batch_size=512", "data.document_masking=false"]).config, load_cluster("dgx-a100").config
    found = best(made, model, nodes=1)
    on_a100, on_h100 = (
        memory_per_device(found.layout.apply(model), found.layout.sizes, device=hardware(name)) for name in (made.device, "h100-sxm")
    )
    assert found.layout.accumulation > 1
    assert found.memory == on_a100 != on_h100


def test_the_configs_own_recomputation_is_tried_too():
    own = RematConfig(policy="names", names=["mlp_up"])
    model = config()
    chosen = model.model_copy(update={"compute": model.compute.model_copy(update={"remat": own})})
    assert own in remat_choices(chosen) and own not in remat_choices(model)


def test_ten_thousand_devices_are_searched_in_seconds():
    start = time.monotonic()
    scales = search(config("models/llama-3.1-405b", 2560, 8192), cluster(), CALIBRATION, [1250, 1280], TOKENS)
    assert time.monotonic() - start < 10
    assert scales[1].devices == 10240 and scales[1].candidates


def test_one_function_times_a_layout_also_near_capacity():
    """What `ridge plan` prints for a layout is what `ridge estimate step` prints for it."""
    near = 0
    for name, rows, length in (("models/llama-3.1-8b", 64, 8192), ("models/llama-3.1-70b", 64, 4096), ("models/llama-3.2-1b", 256, 4096)):
        base = config(name, rows=rows, length=length)
        for scale in search(base, cluster(), CALIBRATION, [2, 8], 1e12):
            fullest = sorted(scale.candidates, key=lambda candidate: -candidate.memory.total_bytes)
            for candidate in [*fullest[:2], *random.Random(scale.nodes).sample(fullest, min(6, len(fullest)))]:
                again = step_time(candidate.layout.apply(base), candidate.layout.sizes, cluster(), CALIBRATION)
                assert again.step_s == candidate.step.step_s and again.breakdown_s == candidate.step.breakdown_s
                near += candidate.parts.eta < ETA
    assert near > 3


def test_muons_gathers_count_in_memory_and_time():
    model = config("models/llama-3.2-1b", rows=64, length=2048)
    muon = model.model_copy(update={"optimizer": OptimizerConfig(kind="muon")})
    layout = Layout(1, 8, 1)
    plain, other = (step_time(layout.apply(c), layout.sizes, cluster(), CALIBRATION) for c in (model, muon))
    assert other.step_s > plain.step_s


# Ranking, limits, advice.


def test_time_cost_and_efficiency_rank_differently():
    scales = search(config(rows=128), cluster(), CALIBRATION, [1, 4, 16], TOKENS)
    fastest, cheapest, leanest = (ranked(scales, objective, Limits())[0] for objective in ("time", "cost", "efficiency"))
    assert fastest.run.wall_days == min(c.run.wall_days for s in scales for c in s.candidates)
    assert cheapest.run.wall_cost_usd == min(c.run.wall_cost_usd for s in scales for c in s.candidates)
    assert leanest.step.tokens_per_s_per_device == max(c.step.tokens_per_s_per_device for s in scales for c in s.candidates)
    assert fastest.nodes == 16 and cheapest.nodes < 16


def test_limits_leave_out_what_breaks_them_and_say_by_how_much():
    scales = search(config(rows=128), cluster(), CALIBRATION, [1, 4], TOKENS)
    everything = ranked(scales, "cost", Limits())
    budget = everything[0].run.wall_cost_usd * 1.01
    kept = ranked(scales, "time", Limits(budget_usd=budget))
    assert 0 < len(kept) < len(everything) and all(c.run.wall_cost_usd <= budget for c in kept)
    dear = max(everything, key=lambda c: c.run.wall_cost_usd)
    assert "times the budget" in within(dear, Limits(budget_usd=budget))
    slow = max(everything, key=lambda c: c.run.wall_days)
    assert "times the deadline" in within(slow, Limits(deadline_days=slow.run.wall_days / 2))


def test_the_bottleneck_is_the_ceiling_whose_doubling_helps_most():
    made = cluster(links=links(network=2.0), nic_gb_per_s=16.0)
    machine = Machine(made, CALIBRATION, 32)
    slow_network = best(made, config(rows=32), nodes=4)
    bound = bottleneck(slow_network, machine)
    assert bound.ceiling == "network" and "network" in bound.sentence
    faster = slow_network.parts.assemble({"network": 2.0}).step_s
    assert bound.gain == pytest.approx(slow_network.step.step_s / faster - 1)
    roomy = best(cluster(), config(rows=512, length=8192), nodes=1)
    assert bottleneck(roomy, Machine(cluster(), CALIBRATION, 8)).ceiling == "compute"


def test_the_advice_claims_that_nothing_is_recomputed_only_where_that_is_so():
    """Also where keeping more would bring nothing: every policy, each with the layouts that compute limits."""
    machine = Machine(cluster(), CALIBRATION, 8)
    scale = search_scale(config(rows=512, length=8192), machine.cluster, CALIBRATION, 1, TOKENS)
    seen = {}
    for candidate in scale.candidates:
        policy = candidate.layout.remat.policy
        claimed = "Nothing is recomputed" in bottleneck(candidate, machine).sentence
        assert not claimed or policy == "none"
        seen.setdefault(policy, set()).add(claimed)
    assert len(seen) > 2 and True in seen["none"]


def test_obvious_alternatives_lose_with_a_reason_or_are_no_worse():
    model, made = config(rows=128), cluster()
    scale = search_scale(model, made, CALIBRATION, 4, TOKENS)
    found = {alternative.name: alternative for alternative in alternatives(scale, Machine(made, CALIBRATION, 32))}
    assert "more than the" in found["data parallel only"].reason and found["data parallel only"].slower is None
    assert found["data parallel with ZeRO stage 2"].slower > 0
    assert found["tensor in a node, fsdp across"].slower > 0
    assert all(a.slower is None or a.slower >= 0 for a in found.values())


def test_a_config_with_its_own_sharding_rules_is_not_guessed_about():
    model = load("models/llama-3.1-8b", ["mesh.rules={kv_heads: []}"]).config
    with pytest.raises(UserError, match=r"mesh\.rules.*default sharding rules"):
        search(model, load_cluster("dgx-h100").config, CALIBRATION, [1], TOKENS)


# The best layout compiled.


def test_a_best_layout_near_capacity_is_compiled_and_the_next_one_is_tried_if_it_is_refused():
    """The issue's layout: planned to fit closely, refused by the compiler."""
    made, model = load_cluster("dgx-h100").config, load("models/qwen3-8b", ["data.batch_size=128", "data.seq_len=4096"]).config
    best_two = [c.layout for c in make_plan(model, made, CALIBRATION, [1], tokens=TOKENS, top=2).best]
    asked = []

    def compiler(candidate):
        asked.append(candidate.layout)
        return 10**12 if len(asked) == 1 else 10**9

    plan = make_plan(model, made, CALIBRATION, [1], tokens=TOKENS, compiler=compiler, compiled_above=0.0)
    refused, taken = plan.compiled
    assert asked[0] == best_two[0] == refused.candidate.layout and refused.fits is False
    assert plan.best[0] is taken.candidate and taken.fits and plan.best[0].layout != best_two[0]
    assert "does not fit in 80.7 GB" in refused.sentence and "1.0 GB compiled: fits" in taken.sentence
    memory = taken.candidate.memory
    both = f"{memory.total_bytes / 1e9:.1f} GB planned, of which {memory.margin_bytes / 1e9:.1f} GB is margin, 1.0 GB compiled"
    assert both in taken.sentence and f"{both}, of 80.7 GB per device" in sentences(plan)[0]
    assert any(rejection.reason == refused.sentence for scale in plan.scales for rejection in scale.rejections)
    assert [(row["fits"], row["margin_bytes"]) for row in plan_json(plan)["compiled"]] == [
        (False, refused.candidate.memory.margin_bytes),
        (True, memory.margin_bytes),
    ]


def test_only_a_best_layout_near_capacity_is_compiled_and_a_failed_compile_leaves_the_plan():
    made, model = load_cluster("dgx-h100").config, load("models/qwen3-8b", ["data.batch_size=128", "data.seq_len=4096"]).config

    def broken(candidate):
        raise UserError("the compiler failed")

    below = make_plan(model, made, CALIBRATION, [1], tokens=TOKENS, compiler=broken, compiled_above=1.0)
    assert below.compiled == ()
    above = make_plan(model, made, CALIBRATION, [1], tokens=TOKENS, compiler=broken, compiled_above=0.0)
    assert above.best[0].layout == below.best[0].layout and above.compiled[0].fits is None
    assert "not compiled: the compiler failed" in above.compiled[0].sentence


@pytest.mark.parametrize(("model", "settings"), [("llama-3.1-8b", ()), ("qwen3-30b-a3b", ()), ("qwen3-30b-a3b", ("lora.rank=8",))])
def test_trained_experts_are_compiled_at_a_smaller_share_of_the_memory(model, settings):
    """Their planned memory is less exact. Layouts are refused until one between the shares is the best one."""
    made, batch = load_cluster("dgx-h100").config, ("data.batch_size=512", "data.seq_len=4096", "data.document_masking=false")
    run, asked = load(f"models/{model}", (*batch, *settings)).config, []
    least = 0.7 if model == "qwen3-30b-a3b" and not settings else 0.9
    nodes = [2] if least < 0.9 else [4, 8]
    plan = make_plan(run, made, CALIBRATION, nodes, tokens=TOKENS, compiler=lambda candidate: asked.append(candidate) or 10**12)
    shares = [candidate.memory.total_bytes / plan.capacity_bytes for candidate in asked]
    assert all(share > least for share in shares) and compile_above(run) == least
    assert len(asked) == MOST_COMPILED or plan.best[0].memory.total_bytes <= least * plan.capacity_bytes
    if least < 0.9:  # one that a dense model would not have compiled
        assert min(shares) <= 0.9


# Stages.


def test_stages_pay_on_a_slow_network_with_few_rows_and_not_on_a_fast_one():
    model = config("models/llama-3.1-70b", rows=128)
    slow = search_scale(model, cluster(links=links(network=2.0), nic_gb_per_s=16.0), CALIBRATION, 16, TOKENS)
    fast = search_scale(model, cluster(), CALIBRATION, 16, TOKENS)
    assert slow.best.layout.pipeline > 1 and stages_sentence(slow).startswith("Pipeline stages pay: ")
    assert fast.best.layout.pipeline == 1 and stages_sentence(fast).startswith("Pipeline stages do not pay: ")
    assert all(c.layout.accumulation >= c.layout.pipeline for scale in (slow, fast) for c in scale.candidates)


def test_the_bubble_of_a_plan_is_that_of_the_formula():
    """Of what the stages do: loss and update are not in their ticks."""
    scale = search_scale(config("models/llama-3.1-70b", rows=128), cluster(), CALIBRATION, 16, TOKENS)
    staged = next(c for c in scale.candidates if c.layout.pipeline > 1)
    stages, microbatches = staged.layout.pipeline, staged.layout.accumulation
    formula = pipeline_estimate(stages=stages, microbatches=microbatches, forward_s=1, backward_s=2).bubble_fraction
    assert staged.parts.bubble == pytest.approx(formula)
    ticks = staged.parts.forward.seconds + staged.parts.backward.seconds
    assert formula * ticks <= staged.step.breakdown_s["bubble"] <= formula * staged.step.step_s
    assert sum(staged.step.breakdown_s.values()) == pytest.approx(staged.step.step_s)
