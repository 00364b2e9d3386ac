"""plan.json: the plan of a run beside its compiled step, its differences explained, and never the end of a run."""

import json
import time

import pytest

from ridgeline.hlo.collectives import Collective
from ridgeline.hlo.module import Source
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.memory import memory_per_device
from ridgeline.trainer.plan_comparison import Traffic, memory_rows, traffic_rows
from ridgeline.trainer.plan_record import record_plan
from ridgeline.trainer.prepare import prepare
from ridgeline.trainer.step import abstract_batch
from tests.trainer.gpu_models import small

SETTINGS = ("mesh.fsdp=4", "mesh.data=2", "compute.attention.backend=xla")
"""In bfloat16, which XLA's CPU backend moves as float32: that is no difference to the plan."""


@pytest.fixture(scope="module")
def compiled():
    config = small("llama", *SETTINGS)
    parts = prepare(config)
    return config, dict(parts.mesh.shape), parts.train_step.lower(parts.abstract, abstract_batch(config, parts.partitioner)).compile()


def test_plan_and_compile_lie_side_by_side(compiled, tmp_path):
    config, mesh, step = compiled
    begin = time.process_time()
    assert record_plan(tmp_path, config, mesh, step, device_kind="cpu", gpu=False) is None
    assert time.process_time() - begin < 3  # 0.1 s on a quiet machine
    made = json.loads((tmp_path / "plan.json").read_bytes())
    assert made["memory_bytes"] == sum(made["components"].values()) > 0
    assert [row["what"] for row in made["memory"]] == ["arguments", "temporaries", "step"]
    assert made["memory"][0]["explanation"] == "as planned"
    assert made["communication"] and all(row["explanation"] for row in made["memory"] + made["communication"])
    assert all(row["agrees"] for row in made["communication"]), made["communication"]
    assert "step_s" not in made and made["no_step_s"]
    report = json.loads((tmp_path / "compile.json").read_bytes())
    assert report["traffic"] == made["communication"]
    assert report["argument_bytes"] == made["compiled"]["argument_bytes"] > 0
    model_flops = train_flops_per_token(config.model, config.data.seq_len).total * config.data.batch_size * config.data.seq_len / 8
    assert report["flops"] == pytest.approx(model_flops, rel=0.3)
    assert {c["kind"] for c in report["collectives"]} == {row["kind"] for row in report["traffic"] if row["compiled_bytes"]}
    assert all(c["source"] for c in report["collectives"] if c["bytes"] > 1e5)
    assert report["uncounted_loops"] == []


def test_a_known_gpu_gets_a_predicted_step_time(compiled, tmp_path):
    config, mesh, step = compiled
    assert record_plan(tmp_path, config, mesh, step, device_kind="NVIDIA H100 80GB HBM3", gpu=True) is None
    made = json.loads((tmp_path / "plan.json").read_bytes())
    assert made["cluster"] == "dgx-h100" and made["step_s"] == pytest.approx(sum(made["breakdown_s"].values()))


def test_an_unknown_device_has_the_reason_for_no_step_time(compiled, tmp_path):
    config, mesh, step = compiled
    assert record_plan(tmp_path, config, mesh, step, device_kind="Abacus 9", gpu=True) is None
    made = json.loads((tmp_path / "plan.json").read_bytes())
    assert "step_s" not in made and "hardware catalog" in made["no_step_s"]


def test_what_cannot_be_recorded_is_reported_and_ends_nothing(compiled, tmp_path):
    config, mesh, step = compiled
    logged = record_plan(tmp_path / "missing", config, mesh, step, device_kind="cpu", gpu=False)
    assert logged is not None and logged.startswith("no plan.json: FileNotFoundError")


def test_differences_are_explained():
    estimate = memory_per_device(small("llama"), dict.fromkeys(("pipeline", "data", "fsdp", "context", "tensor", "expert"), 1))
    rows = memory_rows(estimate, estimate.argument_bytes, 2 * estimate.temp_bytes)
    assert [row.agrees for row in rows] == [True, False, False]
    assert "+100.0%" in rows[1].explanation and estimate.peak_at in rows[1].explanation
    gather = Collective("all-gather", "bf16", 10**8, ("fsdp",), 8, 3, "ag", "main", "", Source("models/block.py", 7, ""), ((1,),), True, 1)
    more, fewer = Traffic("once", "all-gather", ("fsdp",), 0.0, 3e8), Traffic("once", "all-reduce", ("data",), 1e9, 0.0)
    explained = [row.explanation for row in traffic_rows([more, fewer], [gather])]
    assert "nothing of this kind is planned" in explained[0] and "100.0 MB x 3 at models/block.py:7" in explained[0]
    assert "fewer" in explained[1]
