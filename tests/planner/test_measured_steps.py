"""Planned steps against steps that ran on a GPU (measured_steps.json): time and memory, and that nothing that ran is said not to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import hardware
from ridgeline.planner.kernels import Kernels
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.step_time import step_time

FILE = json.loads(Path(__file__).with_name("measured_steps.json").read_text())
CLUSTER = load_cluster(FILE["device"]).config.model_copy(update={"devices_per_node": 1, "links": []})


@pytest.mark.parametrize("row", FILE["rows"], ids=lambda row: row["name"])
def test_the_plan_is_what_ran(row: dict[str, Any]) -> None:
    config = load(f"models/{row['model']}", [*FILE["common"], *row["overrides"]]).config
    sizes = dict.fromkeys(MESH_AXES, 1)
    step_s = step_time(config, sizes, CLUSTER, load_calibration(None)).step_s
    assert abs(step_s / row["step_s"] - 1) <= (0.05 if row["sets"] else 0.03), "goal: 10 %"
    memory = memory_per_device(config, sizes)
    assert row["peak_bytes"] <= memory.total_bytes - memory.reserve_bytes, "the margin covers it"
    assert abs(memory.compiled_bytes / row["peak_bytes"] - 1) <= 0.05


@pytest.mark.parametrize("row", [row for row in FILE["rows"] if "loss_s" in row], ids=lambda row: row["name"])
def test_attention_and_loss_take_what_they_took(row: dict[str, Any]) -> None:
    config = load(f"models/{row['model']}", [*FILE["common"], *row["overrides"]]).config
    kernels = Kernels(LocalSizes.of(config, dict.fromkeys(MESH_AXES, 1)), hardware(CLUSTER.device), load_calibration(None))
    attention = kernels.attention()
    attention_s = (attention.forward + attention.backward).seconds * config.model.num_layers
    assert abs(attention_s / row["attention_s"] - 1) <= 0.05
    assert abs(kernels.loss().seconds / row["loss_s"] - 1) <= 0.06
    if "unembedding_gradient_s" in row:
        model = config.model
        chunk_s = kernels.unembedding_gradient_s(model.embed_dim, model.padded_vocab_size, config.compute.loss_chunk)
        assert abs(chunk_s / row["unembedding_gradient_s"] - 1) <= 0.05
