"""`ridge bench` on a tiny config and eight virtual devices: every layer really measured, stored, compared; a slow loader found."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ridgeline.cli import main as cli
from ridgeline.configs.load import load
from ridgeline.configs.schema import MeshConfig
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.loaders import loader as loaders
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.measure import pieces, tasks
from ridgeline.measure import step as step_session
from ridgeline.measure.collectives import collective
from ridgeline.measure.pieces import matmuls, time_round
from ridgeline.measure.step_work import Matmul
from ridgeline.measure.timer import calls_for, rounds_s
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.rundir.bench_results import read
from ridgeline.sharding.mesh import build_mesh

pytestmark = pytest.mark.xdist_group("bench")  # layers are measured once
ROOT = Path(__file__).parents[2]
LAYERS = ["matmul", "memory", "collectives", "step", "loader", "loop", "save", "save_write", "restore", "checkpoint"]
CONFIG = """
name: tiny
run_dir: runs/tiny
model: {vocab_size: 258, num_layers: 2, embed_dim: 32, num_heads: 4, mlp_dim: 32, max_seq_len: 64}
precision: {compute: float32}
mesh: {data: 2, fsdp: 2, tensor: 2}
data: {train: [{path: corpus}], seq_len: 64, batch_size: 8, threads: 1, prefetch: 1}
trainer: {steps: 100000, log_every: 2}
checkpoint: {every: 50000}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config and its corpus."""
    directory = tmp_path_factory.mktemp("bench")
    (directory / "tiny.yaml").write_text(CONFIG)
    texts = directory / "texts"
    texts.mkdir()
    for number, source in enumerate(sorted((ROOT / "trainer").glob("*.py"))[:8]):
        (texts / f"{number:02d}.txt").write_text(source.read_text()[:2000])
    prepare(PrepareSettings((texts,), directory / "corpus", "bytes"), workers=1)
    return directory


@pytest.fixture(autouse=True)
def _short(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(step_session, "MOST_STEPS", 3)


@pytest.fixture(scope="module")
def measured(place: Path) -> dict[str, Any]:
    """What `ridge bench all --json` prints, and what it stored."""
    with pytest.MonkeyPatch.context() as patch, open(place / "out.json", "w") as out:
        patch.chdir(place)
        patch.setattr(step_session, "MOST_STEPS", 3)
        patch.setattr("sys.stdout", out)
        assert cli.run(["bench", "all", "tiny.yaml", "seed=3", "--repeats", "3", "--json"]) == 0
    return json.loads((place / "out.json").read_text())


def test_every_layer_is_measured_and_the_ladder_sums(measured: dict[str, Any]) -> None:
    assert list(measured["series"]) == LAYERS
    assert all(len(values) == 3 for values in measured["series"].values())
    assert all(value > 0 for values in measured["series"].values() for value in values)
    ladder = measured["ladder"]
    assert [rung["name"] for rung in ladder] == ["matmul", "memory", "collectives", "step", "loop", "checkpoint"]
    assert sum(rung["adds_s"] for rung in ladder) == pytest.approx(ladder[-1]["time_s"])
    assert ladder[3]["time_s"] == statistics.median(measured["series"]["step"])
    assert ladder[4]["time_s"] == statistics.median(measured["series"]["loop"])
    verdict = measured["verdict"]
    assert verdict["rung"] in {rung["name"] for rung in ladder}
    assert verdict["sentence"].startswith(f"Look at {verdict['rung']}: ")
    for name, values in measured["series"].items():
        assert measured["summary"][name]["median_s"] == statistics.median(values)


def test_the_pieces_are_those_of_the_config(measured: dict[str, Any], place: Path) -> None:
    config = load("tiny.yaml", ()).config
    mesh = {"pipeline": 1, "data": 2, "fsdp": 2, "context": 1, "tensor": 2, "expert": 1}
    timed = {layer: [p for p in measured["pieces"] if p["layer"] == layer] for layer in ("matmul", "memory", "collectives")}
    planned = compiled_collectives(config, mesh, gpu=False)
    assert sorted((p["what"], p["kind"], tuple(p["axes"]), p["bytes"]) for p in timed["collectives"]) == sorted(
        (p.what, p.kind, p.axes, p.bytes) for p in planned
    )
    assert set(measured["groups"]["collectives"]) == {"+".join(p.axes) for p in planned}
    assert {p["part"] for p in timed["matmul"]} == {"attention projections", "attention", "mlp", "unembedding"}
    assert {p["dtype"] for p in timed["matmul"]} == {"float32"}
    for layer, parts in measured["groups"].items():
        assert sum(parts.values()) == pytest.approx(sum(p["per_step_s"] for p in timed[layer]))
    assert measured["facts"]["steps_between_saves"] == 50000
    assert measured["facts"]["checkpoint_bytes"] > 0
    assert measured["facts"]["log_lines"] >= 1


def test_the_result_is_stored_with_its_provenance(measured: dict[str, Any], place: Path) -> None:
    stored = read(place / measured["stored"])
    assert stored.path.parent == place / "bench" / "all"
    assert stored.series == measured["series"]
    assert stored.config["seed"] == 3
    assert stored.provenance == measured["provenance"]
    assert stored.provenance["overrides"] == ["seed=3"]
    assert stored.provenance["device"] == {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}
    assert 0 <= stored.load_of_others <= 1


def test_nothing_is_left_behind(measured: dict[str, Any], place: Path) -> None:
    assert not (place / "runs").exists()
    assert sorted(p.name for p in place.iterdir()) == ["bench", "corpus", "out.json", "texts", "tiny.yaml"]


def test_a_slow_loader_shows_in_the_loop_and_not_in_the_step(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    delay_s = 10 * statistics.median(measured["series"]["step"])
    read_rows = loaders.StepRows.__getitem__

    def slow(self: loaders.StepRows, step: Any) -> Any:
        if not isinstance(step, slice):
            time.sleep(delay_s)
        return read_rows(self, step)

    monkeypatch.setattr(loaders.StepRows, "__getitem__", slow)
    found = tasks.to_json(tasks.measure("all", load("tiny.yaml", ()).config, 3, lambda line: None))
    step_s, loop_s, loader_s = (found["summary"][name]["median_s"] for name in ("step", "loop", "loader"))
    assert loader_s >= delay_s
    assert loop_s > 0.9 * delay_s
    assert step_s < loop_s / 2
    assert found["verdict"]["rung"] == "loop"
    assert "loader alone" in found["verdict"]["sentence"]
    assert found["facts"]["data_wait_s"] > 0.5 * loop_s


def test_a_result_is_compared_with_stored_ones(
    measured: dict[str, Any], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline is this very measurement as other code would have stored it, ten times faster and ten times slower."""
    baseline = json.loads((place / measured["stored"]).read_text())
    baseline["series"] = {"loader": [value / 10 for value in measured["series"]["loader"]]}
    baseline |= {"task": "loader"}
    baseline["provenance"] |= {"code": {"commit": "f" * 40, "diff_sha256": None}, "neighbours": 0.0}
    for name, factor in (("fast", 1.0), ("slow", 1e4)):
        scaled = {"loader": [value * factor for value in baseline["series"]["loader"]]}
        (tmp_path / f"{name}.json").write_text(json.dumps({**baseline, "series": scaled}))
    command = ["bench", "loader", "tiny.yaml", "seed=3", "--repeats", "3", "--no-save", "--fail-on-slower"]
    assert cli.run([*command, "--baseline", str(tmp_path / "slow.json")]) == 0
    shown = capsys.readouterr().out
    assert "\nfaster: loader\n" in shown
    assert "tokens/s; first batch after" in shown
    new = json.loads((tmp_path / "slow.json").read_text())
    new["provenance"] |= {"code": {"commit": "e" * 40, "diff_sha256": None}}
    (tmp_path / "new.json").write_text(json.dumps(new))
    pair = ["bench", "compare", str(tmp_path / "fast.json"), str(tmp_path / "new.json")]
    assert cli.run([*pair, "--fail-on-slower"]) == 1
    assert "\nslower: loader\n" in capsys.readouterr().out
    assert cli.run([*pair, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [(row["layer"], row["verdict"]) for row in compared["layers"]] == [("loader", "slower")]
    assert compared["baseline"]["code"] == "f" * 12
    template = ["bench", "template", "Slow", "--baseline", pair[2], "--new", pair[3], "--append", str(tmp_path / "LOG.md")]
    assert cli.run(template) == 0
    assert "* **Measured effect.** slower: loader" in (tmp_path / "LOG.md").read_text()


def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "all", "tiny.yaml", "seed=3", "data.batch_size=16", "--baseline", measured["stored"]]) == 2
    error = capsys.readouterr().err
    assert "config data.batch_size 8, 16 (if that is the change under test: --change data.batch_size)" in error
    assert "measuring" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["loop", "tiny.yaml", "data.train=[]"], "data.train is empty"),
        (["loader", "tiny.yaml", "data.train=[{path: nowhere}]"], "nowhere"),
        (["step", "tiny.yaml", "mesh.data=3"], "mesh"),
        (["step", "tiny.yaml", "--repeats", "2"], "2 is not in the range x>=3"),
        (["step", "tiny.yaml", "--fail-on-slower"], "--fail-on-slower needs --baseline"),
        (["step", "tiny.yaml", "--change", "seed"], "--change needs --baseline"),
        (["step", "tiny.yaml", "--save", "x.json", "--no-save"], "--save and --no-save exclude each other"),
        (["step", "tiny.yaml", "--save", "tiny.yaml"], "tiny.yaml exists already"),
        (["step", "tiny.yaml", "--baseline", "tiny.yaml"], "tiny.yaml is not a result of ridge bench"),
        (["stepp", "tiny.yaml"], "unknown command 'stepp'; did you mean 'step'?"),
        (["compare", "nowhere", "tiny.yaml"], "nowhere not found"),
        (["template", "x", "--baseline", "tiny.yaml"], "--baseline and --new"),
    ],
)
def test_a_mistake_is_one_line_and_measures_nothing(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert "measuring" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_collective_moves_the_given_bytes_over_its_axes(kind: str) -> None:
    mesh = build_mesh(load("tiny.yaml", ()).config.mesh, jax.devices())
    run = collective(kind, ("data", "tensor"), 96 * 4, mesh)
    text = run.func.lower(*run.args).compile().as_text()  # type: ignore[attr-defined]
    found = collectives(parse(text), dict(mesh.shape))
    assert [(c.kind, c.axes, c.bytes) for c in found] == [(kind, ("data", "tensor"), 96 * 4)]
    assert run().shape == (96,)


def test_rounds_are_as_many_calls_as_fill_the_time() -> None:
    calls = []
    assert len(rounds_s(lambda: calls.append(1), rounds=4, least_s=0.0, most=7)) == 4
    assert len(calls) == 2 + 4
    assert calls_for(lambda: None, 1.0, 7) == 7
    assert calls_for(lambda: sum(range(100_000)), 0.0, 7) == 1


def test_text_names_the_layer_and_the_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "matmul", "tiny.yaml", "--repeats", "3", "--save", "own/matmul.json"]) == 0
    shown = capsys.readouterr()
    assert "12 of " in shown.out
    assert "TFLOP/s" in shown.out
    assert "stored in own/matmul.json" in shown.out
    assert "measuring round 1 of 3: matmul" in shown.err
    assert list(read(Path("own/matmul.json")).series) == ["matmul"]
    shutil.rmtree("own")


def test_comparing_and_writing_need_no_jax(tmp_path: Path) -> None:
    calls = "c.run(['bench', 'template', 'x']); c.run(['bench', 'compare', 'a', 'b'])"
    code = f"import sys, ridgeline.cli.main as c; {calls}; sys.exit('jax' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "* **Hypothesis.** " in done.stdout
    assert done.stderr.startswith("ridge: error: a not found") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("dtype", ["float8", "mxfp8", "nvfp4"])
def test_a_narrow_product_is_timed_in_its_own_arithmetic(dtype: str) -> None:
    mesh = build_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    found = Matmul("mlp", "up forward", dtype, (64, 96, 128), 1, 2.0)
    [piece] = matmuls([found], mesh)
    time_round([piece])
    assert piece.per_step_s()[0] > 0 and piece.detail["dtype"] == dtype

    left, right = (pieces.maker(mesh, PartitionSpec(), shape, dtype, seed)() for seed, shape in enumerate(((64, 128), (96, 128))))
    assert all(leaf.dtype.itemsize <= 1 for leaf in (left[0], right[0])), "what it reads is narrow"
    wide = [
        jax.random.normal(jax.random.key(seed), shape, "bfloat16").astype("float32") for seed, shape in enumerate(((64, 128), (96, 128)))
    ]
    exact = wide[0] @ wide[1].T
    y = pieces.NARROW[dtype]("cpu", left, right).astype("float32")
    error = float(np.linalg.norm(y * (left[2] * right[2] if dtype == "nvfp4" else 1.0) - exact) / np.linalg.norm(exact))
    assert 0.01 < error < (0.2 if dtype == "nvfp4" else 0.05)
