"""`ridge shardings`: rows, totals, and refusals."""

import json
import math

import pytest

from ridgeline.cli.main import run
from ridgeline.configs.load import load
from ridgeline.planner.parameters import count_parameters

LARGE = ["shardings", "models/llama-3.1-405b", "mesh.fsdp=512", "mesh.tensor=8", "data.batch_size=4096", "--devices", "4096"]


def test_a_model_and_mesh_far_beyond_this_machine_add_up(capsys):
    assert run([*LARGE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == 4096
    assert report["mesh"] == {"fsdp": 512, "tensor": 8}
    assert report["parameters"] == count_parameters(load(LARGE[1]).config.model).total
    assert sum(math.prod(row["shape"]) for row in report["rows"]) == report["parameters"]
    assert report["parameter_bytes_per_device"] == sum(row["bytes_per_device"] for row in report["rows"])
    assert report["total_bytes_per_device"] == sum(report[f"{k}_bytes_per_device"] for k in ("parameter", "gradient", "optimizer"))
    query = next(row for row in report["rows"] if row["path"] == "blocks.attention.query")
    assert query["spec"] == ["pipeline", "fsdp", "tensor", None]
    assert query["local_shape"] == [126, 16384 // 512, 128 // 8, 128]
    assert query["bytes_per_device"] * 4096 == query["bytes"]


def test_text_names_parameter_axes_partition_and_totals(capsys):
    assert run(LARGE) == 0
    text = capsys.readouterr().out
    assert "mesh fsdp=512 x tensor=8, 4,096 devices" in text
    assert any(line.split()[0] == "blocks.mlp.down" and "pipeline, tensor, fsdp" in line for line in text.splitlines() if line)
    assert "optimizer (adamw)" in text


def test_an_indivisible_model_is_refused_in_one_line(capsys):
    assert run(["shardings", "models/llama-3.2-1b", "--devices", "7"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "blocks.attention.key of shape (16, 2048, 8, 64): dim 1 ('embed', size 2048) does not divide over mesh fsdp=7 = 7" in error


def test_a_mesh_that_does_not_match_the_devices_is_refused(capsys):
    assert run(["shardings", "models/llama-3.2-1b", "mesh.fsdp=8", "--devices", "16"]) == 2
    assert "mesh.fsdp=8 does not match 16 devices; set mesh.data=2 or mesh.fsdp=16" in capsys.readouterr().err


def test_zero_stage_2_shards_gradients_and_optimizer_state_over_data_as_fsdp_would(capsys):
    reports = []
    for mesh in (["mesh.data=8", "mesh.fsdp=1", "mesh.zero_stage=2"], ["mesh.fsdp=8"], ["mesh.data=8", "mesh.fsdp=1"]):
        assert run(["shardings", "models/llama-3.2-1b", *mesh, "--devices", "8", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    zero, fsdp, data = reports
    for part in ("gradient", "optimizer"):
        assert zero[f"{part}_bytes_per_device"] == fsdp[f"{part}_bytes_per_device"] < data[f"{part}_bytes_per_device"]
    assert zero["parameter_bytes_per_device"] == data["parameter_bytes_per_device"]


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_every_optimizer_can_be_reported(kind, capsys):
    assert run(["shardings", "models/llama-3.2-1b", f"optimizer.kind={kind}", "--devices", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer_bytes_per_device"] > 0
