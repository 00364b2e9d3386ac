"""`ridge bench remat` on the CPU: what it measures is what `ridge plan` then chooses by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.configs.load import load
from ridgeline.configs.schema import RematConfig
from ridgeline.measure import remat
from ridgeline.planner.calibration import load_calibration

MODEL = "model: {vocab_size: 512, num_layers: 6, embed_dim: 64, num_heads: 4, num_kv_heads: 2, mlp_dim: 128, max_seq_len: 64}\n"
REST = "precision: {compute: float32}\ndata: {batch_size: 4, seq_len: 64, document_masking: false}\ncompute: {attention: {backend: xla}}\n"


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(MODEL + REST)


def test_what_is_measured_here_is_what_the_plan_takes(capsys, monkeypatch):
    monkeypatch.setattr(remat, "policies_of", lambda config: [RematConfig(policy="none"), RematConfig(policy="full")])
    monkeypatch.setattr(remat, "ROUND_S", 1e-3)
    Path("own.yaml").write_text("name: mine\nmemory: [{device: cpu, gb_per_s: 5, source: made for a test}]\n")
    assert cli.run(["bench", "remat", "x.yaml", "--into", "own.yaml", "--repeats", "2", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    none, full = measured["policies"]
    assert (measured["device"], measured["tokens"], measured["shape"]["attention"]) == ("cpu", 256, "xla")
    assert none["layer_s"] > 0 and full["layer_s"] > 0
    stream_bytes, hidden_bytes = 256 * 64 * 4, 256 * 128 * 4
    assert none["kept_bytes"] - full["kept_bytes"] >= 2 * hidden_bytes + stream_bytes  # gate, up and the queries at least
    own = load_calibration("own.yaml")
    assert own.name == "mine"
    assert [point.model_dump(mode="json") for point in own.file.layers] == [measured]
    assert own.file.memory[-1].gb_per_s == 5  # what was in the file stays there

    assert cli.run(["plan", "x.yaml", "--cluster", "local", "--calibration", "own.yaml", "--json"]) == 0
    candidates = {found["remat"]: found for found in json.loads(capsys.readouterr().out)["candidates"]}
    more_s = {"none": 0.0, "full": 6 * (full["layer_s"] - none["layer_s"])}
    for policy, seconds in more_s.items():
        found = candidates.get(policy)
        assert found is None or found["recompute_measured_s"] == pytest.approx(seconds)
    assert set(candidates) & set(more_s)
    assert cli.run(["plan", "x.yaml", "--cluster", "local", "--calibration", "own.yaml", "compute.remat.policy=full", "--top", "9"]) == 0
    assert "256 tokens: none " in capsys.readouterr().out


def test_a_layer_is_measured_as_one_device_of_the_mesh_has_it():
    layer = remat.one_device(load("x.yaml", ("mesh.tensor=2", "mesh.fsdp=2", "data.batch_size=8", "trainer.accumulation=2")).config)
    assert (layer.model.num_heads, layer.model.kv_heads, layer.model.head_width, layer.model.mlp_dim) == (2, 1, 16, 64)
    assert (layer.data.batch_size, layer.mesh.tensor, layer.model.embed_dim) == (2, 1, 64)
    long = load("x.yaml", ("data.batch_size=4096",)).config
    assert remat.one_device(long).data.batch_size * 64 == remat.MOST_TOKENS
    assert remat.one_device(long, rows=3).data.batch_size == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--into", "no/own.yaml"], "no/own.yaml: cannot be written: "),
        (["--into", "x.yaml"], "x.yaml:1: model: unknown key"),
        (["mesh.tensor=8"], "model.num_heads=4 does not divide by mesh.tensor=8"),
        (["compute.remat.policy=names", "compute.remat.names=[queries]"], "did you mean 'query'"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_mistakes_are_refused_in_one_line_before_anything_is_measured(arguments, message, capsys):
    assert cli.run(["bench", "remat", "x.yaml", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "rounds" not in shown


@pytest.mark.parametrize("policy", ["none", "full", "dots", "attention-only"])
def test_every_policy_is_measured_once(policy):
    found = remat.policies_of(load("x.yaml", [f"compute.remat.policy={policy}"]).config)
    keys = [(each.policy, frozenset(each.names)) for each in found]
    assert len(keys) == len(set(keys)) and {"none", "attention-only", "full", "dots"} <= {each.policy for each in found}
    assert keys[0][0] == "none" and "offload" not in {name for name, _ in keys}
