"""Measured costs of rematerialization decide between policies, for the device and the shape of layer they were measured on."""

from __future__ import annotations

import itertools

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES, RematConfig
from ridgeline.planner.calibration import Calibration, load_calibration
from ridgeline.planner.calibration_file import add_layer
from ridgeline.planner.hardware import hardware
from ridgeline.planner.layer_costs import LayerPoint, LayerShape, PolicyCost
from ridgeline.planner.layouts import MEMORY_LADDER
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.plan import make_plan, plan_json
from ridgeline.planner.search import search_scale
from ridgeline.planner.step_time import step_time

CLUSTER, SHIPPED, ONE = load_cluster("dgx-h100").config, load_calibration(), dict.fromkeys(MESH_AXES, 1)
POLICIES = [remat for remat in MEMORY_LADDER if remat.policy != "offload"]
BATCH = ("data.batch_size=32", "data.seq_len=2048", "data.document_masking=false", "precision.compute=bfloat16")


def loaded(model="models/llama-3.2-1b", *overrides):
    return load(model, (*BATCH, *overrides)).config


def point(config, more_s, *, device="h100-sxm", tokens=8192, **shape):
    """A measurement of this config's layers: 10 ms with everything kept, and what each policy adds."""
    costs = [PolicyCost(policy=r.policy, names=list(r.names), layer_s=0.01 + more_s[r.policy], kept_bytes=1) for r in POLICIES]
    of = LayerShape.of(LocalSizes.of(config, ONE), gpu=True).model_copy(update=shape)
    return LayerPoint(device=device, shape=of, tokens=tokens, policies=costs, source="made for a test")


def calibrated(*points):
    return Calibration("measured", SHIPPED.file.model_copy(update={"layers": list(points)}))


def with_remat(config, remat):
    return config.model_copy(update={"compute": config.compute.model_copy(update={"remat": remat})})


@pytest.mark.parametrize("cheapest", [remat.policy for remat in POLICIES])
def test_the_policy_measured_cheapest_is_chosen_where_it_fits(cheapest):
    config = loaded()
    more_s = {remat.policy: 0.001 if remat.policy == cheapest else 0.003 for remat in POLICIES}
    best = search_scale(config, CLUSTER, calibrated(point(config, more_s)), 1, 1e9).best
    assert best is not None
    assert best.layout.remat.policy == cheapest


def test_a_policy_measured_cheap_that_does_not_fit_is_not_chosen():
    config = loaded("models/llama-3.1-70b", "data.seq_len=8192", "data.batch_size=256")
    more_s = {"none": 0.001, "attention-only": 0.001, "dots": 0.05, "names": 0.06, "full": 0.003}
    scale = search_scale(config, CLUSTER, calibrated(point(config, more_s, tokens=8192)), 4, 1e9)
    assert scale.best is not None
    assert scale.best.layout.remat.policy in ("full", "offload")  # both compute the whole block again
    assert {candidate.layout.remat.policy for candidate in scale.candidates}.isdisjoint({"none", "attention-only"})


def test_steps_differ_by_what_was_measured_for_their_layers_microbatches_and_tokens():
    more_s = {"none": 0.0, "attention-only": 0.001, "dots": -0.002, "names": 0.003, "full": 0.004}
    for accumulation, rows in ((1, 8), (4, 8), (2, 64)):
        config = loaded("models/llama-3.2-1b", f"data.batch_size={rows}", f"trainer.accumulation={accumulation}")
        rates = calibrated(point(config, more_s, tokens=4096))
        steps = {r.policy: step_time(with_remat(config, r), ONE, CLUSTER, rates).step_s for r in POLICIES}
        assert steps["none"] == step_time(config, ONE, CLUSTER, SHIPPED).step_s
        for a, b in itertools.combinations(steps, 2):
            expected = (more_s[a] - more_s[b]) * config.model.num_layers * rows * 2048 / 4096
            assert steps[a] - steps[b] == pytest.approx(expected)


@pytest.mark.parametrize(
    "other",
    [{"device": "h200-sxm"}, {"seq_len": 4096}, {"mlp_dim": 4096}, {"compute": "float32"}, {"attention": "pallas"}, {"num_heads": 16}],
)
def test_a_measurement_of_another_device_or_layer_is_not_used(other):
    config = loaded()
    rates = calibrated(point(config, {"none": 0.0, "attention-only": 1, "dots": 1, "names": 1, "full": 1}, **other))
    for remat in POLICIES:
        chosen = with_remat(config, remat)
        assert step_time(chosen, ONE, CLUSTER, rates) == step_time(chosen, ONE, CLUSTER, SHIPPED)


def test_a_policy_that_was_not_measured_keeps_its_formula():
    config = loaded()
    rates = calibrated(point(config, dict.fromkeys(("none", "attention-only", "dots", "names", "full"), 1.0)))
    other = with_remat(config, RematConfig(policy="names", names=["query", "mlp_up"]))
    assert step_time(other, ONE, CLUSTER, rates) == step_time(other, ONE, CLUSTER, SHIPPED)


def test_a_cut_over_tensor_is_a_shape_of_its_own():
    config, halves = loaded(), ONE | {"tensor": 2}
    local = LocalSizes.of(config, halves)
    half = LayerShape.of(local, gpu=True)
    assert (half.num_heads, half.mlp_dim) == (config.model.num_heads // 2, config.model.mlp_dim // 2)
    rates = calibrated(point(config, dict.fromkeys(("none", "attention-only", "dots", "names", "full"), 0.0)))
    assert rates.layer(hardware("h100-sxm"), local) is None
    assert rates.layer(hardware("h100-sxm"), LocalSizes.of(config, ONE)) is not None


def test_the_plan_states_that_it_was_measured():
    config = loaded()
    more_s = {"none": 0.0, "attention-only": 0.001, "dots": -0.002, "names": 0.003, "full": 0.004}
    measured, counted = (make_plan(config, CLUSTER, rates, [1], tokens=1e9) for rates in (calibrated(point(config, more_s)), SHIPPED))
    sentence = measured.best[0].parts.measured.sentence()
    assert "8,192 tokens: none 10 ms, attention-only +1 ms, dots -2 ms, names(query, key, value, " in sentence
    best = plan_json(measured)["candidates"][0]
    rows = config.data.batch_size * config.data.seq_len / 8 / best["accumulation"]
    assert best["remat"] == "dots"
    assert best["recompute_measured_s"] == pytest.approx(-0.002 * config.model.num_layers * best["accumulation"] * rows / 8192)
    assert counted.best[0].parts.measured is None
    assert plan_json(counted)["candidates"][0]["recompute_measured_s"] is None


def test_a_newer_measurement_takes_the_place_of_its_like():
    config = loaded()
    zero = dict.fromkeys(("none", "attention-only", "dots", "names", "full"), 0.0)
    first, longer, again = point(config, zero), point(config, zero, seq_len=4096), point(config, zero | {"full": 0.5})
    file = SHIPPED.file
    for each in (first, longer, again):
        file = add_layer(file, each)
    assert file.layers == [longer, again]


BROKEN = """
layers:
- device: cpu
  tokens: 8
  source: made
  shape: {{embed_dim: 8, num_heads: 1, num_kv_heads: 1, head_dim: 8, mlp_dim: 8, seq_len: 8, compute: float32, attention: xla}}
  policies: [{policies}]
"""
NONE = "{policy: none, layer_s: 1.0, kept_bytes: 0}"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (NONE.replace("none", "full"), "layers.0: policies: `none`"),
        (f"{NONE}, {NONE}", "layers.0: policies: a policy is listed twice"),
        (NONE.replace("1.0", "-1.0"), "greater than 0"),
    ],
)
def test_a_broken_measurement_is_refused_with_file_and_reason(tmp_path, policies, message):
    path = tmp_path / "own.yaml"
    path.write_text(BROKEN.format(policies=policies))
    with pytest.raises(UserError, match=r"own\.yaml") as error:
        load_calibration(path)
    assert message in str(error.value)
