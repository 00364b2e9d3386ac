"""The memory model against steps compiled here and now: the table of compiled sizes is checked by doing some of them again."""

import json
import math
from pathlib import Path

import pytest

from configs.load import load
from planner.memory import memory_per_device
from tests.trainer.gpu_models import cluster
from trainer.aot import Compiled, Request, compile_many

TABLE = json.loads((Path(__file__).parent / "compiled_steps_overlap.json").read_text())["cases"]
AGAIN = {"models/llama-3.2-1b": 8, "models/llama-3.1-70b": 1024}
"""Model -> devices of its first row in the table on so many."""


def row(model):
    return next(case for case in TABLE if case["config"] == model and math.prod(case["mesh"].values()) == AGAIN[model])


def resolved(case):
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **case["mesh"]}.items()]
    return load(case["config"], (*case["overrides"], *mesh, "precision.compute=bfloat16")).config


@pytest.mark.slow
def test_rows_compiled_again_are_what_the_table_says_and_within_five_percent_of_the_model():
    rows = [row(model) for model in AGAIN]
    configs = [resolved(case) for case in rows]
    requests = [
        Request.on(config, cluster(), AGAIN[model] // 8, optimization_level="O1") for model, config in zip(AGAIN, configs, strict=True)
    ]
    for case, config, result in zip(rows, configs, compile_many(requests), strict=True):
        assert isinstance(result, Compiled), result
        assert result.argument_bytes == pytest.approx(case["argument_bytes"], rel=1e-3)
        assert result.temp_bytes == pytest.approx(case["temp_bytes"], rel=0.02)
        planned = memory_per_device(config, result.mesh, overlap=True).compiled_bytes
        assert planned == pytest.approx(result.argument_bytes + result.temp_bytes, rel=0.05)
