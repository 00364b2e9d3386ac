"""The planner names a larger chunk of the cross-entropy where it pays and fits."""

from __future__ import annotations

import re

import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.config_changes import larger_loss_chunk
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import capacity_bytes, search_scale
from ridgeline.planner.step_time import Machine, step_time

CLUSTER, RATES = load_cluster("dgx-h200").config, load_calibration()
BATCH = ("data.batch_size=64", "data.seq_len=4096", "data.document_masking=false")


def advice(cluster, *overrides):
    config = load("models/qwen2.5-0.5b", (*BATCH, *overrides)).config
    best = search_scale(config, cluster, RATES, 1, 1e9).best
    machine = Machine(cluster, RATES, 8)
    return larger_loss_chunk(best, machine), best, machine


def test_a_narrow_model_with_a_large_vocabulary_is_advised_a_larger_chunk_which_is_faster_and_fits():
    found, best, machine = advice(CLUSTER)
    assert found is not None and found.loss_chunk > best.parts.config.compute.loss_chunk
    compute = best.parts.config.compute.model_copy(update={"loss_chunk": found.loss_chunk})
    larger = best.parts.config.model_copy(update={"compute": compute})
    times = [step_time(config, best.layout.sizes, CLUSTER, RATES).step_s for config in (best.parts.config, larger)]
    assert times[0] / times[1] - 1 == pytest.approx(found.gain)
    assert found.gain > 0.01
    assert found.memory_bytes == memory_per_device(larger, best.layout.sizes).total_bytes <= capacity_bytes(machine)
    assert advice(CLUSTER, f"compute.loss_chunk={found.loss_chunk}")[0] is None


def test_a_chunk_that_does_not_fit_is_not_advised():
    _, best, _ = advice(CLUSTER)
    memory = Machine(CLUSTER, RATES, 8).device.memory_bytes
    full = CLUSTER.model_copy(update={"utilisation_cap": best.memory.total_bytes / memory})
    assert larger_loss_chunk(best, Machine(full, RATES, 8)) is None


def test_the_plan_recommends_it_only_where_it_pays(capsys):
    for model, expected in (("models/qwen2.5-0.5b", True), ("models/llama-3.1-8b", False)):
        assert cli.run(["plan", model, "--cluster", "dgx-h200", *BATCH]) == 0
        assert (re.search(r"compute\.loss_chunk=\d+ would speed a step up", capsys.readouterr().out) is not None) is expected
