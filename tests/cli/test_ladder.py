"""`ridge ladder`: sizes and how they are refused, and a real ladder on this machine, interrupted and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import run as ridge
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch.trials.ladder import TRAINING, _final_loss
from ridgeline.launch.trials.ladder_sizes import nearest_width, scaled_model, sizes_of, width_unit
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.parameters import count_parameters
from ridgeline.rundir.directory import METRICS_FILE

ROOT = Path(__file__).parents[2]
CONFIG = """\
name: tiny
model:
  {{vocab_size: 258, num_layers: 2, embed_dim: 32, num_heads: 4, num_kv_heads: 2, mlp_dim: 64, max_seq_len: 32, mup: {{base_embed_dim: 8}}}}
precision: {{compute: float32}}
data: {{train: [{{path: {corpus}}}], seq_len: 32, batch_size: 16}}
optimizer: {{learning_rate: 1e-2}}
schedule: {{warmup_steps: 100}}
trainer: {{steps: 1000}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
runtime: {{platform: cpu}}
"""
SIZES = "24,8,16x1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ladder")
    (place / "text.txt").write_text((ROOT / "cli" / "main.py").read_text())
    prepare(PrepareSettings((place / "text.txt",), place / "corpus", "bytes"), workers=1)
    file = place / "tiny.yaml"
    file.write_text(CONFIG.format(corpus=place / "corpus"))
    return file


def test_sizes_keep_the_proportions() -> None:
    made = sizes_of("quickstart", (), "384,96x3,192", 20)
    assert [size.name for size in made] == ["96x3", "192x4", "384x8"]
    for size, heads, kv_heads, hidden in zip(made, (3, 6, 12), (1, 3, 6), (256, 512, 1024), strict=True):
        model = size.config.model
        assert (model.num_heads, model.kv_heads, model.mlp_dim, model.head_width) == (heads, kv_heads, hidden, 32)
        assert size.params == count_parameters(model).active
        per_step = size.config.data.batch_size * size.config.data.seq_len
        assert 0 <= size.tokens - 20 * size.params < per_step and size.config.trainer.steps * per_step == size.tokens
        assert size.flops == train_flops_per_token(model, size.config.data.seq_len).total * size.tokens
        assert size.config.schedule.warmup_steps == round(20 * size.config.trainer.steps / 600)
    assert made[1].config.model == load("quickstart").config.model, "the width of the config is the config's model"


def test_a_parameter_count_is_the_nearest_width() -> None:
    model = load("quickstart").config.model
    (small, _), unit = sizes_of("quickstart", (), "1M,8M", 1), width_unit(model)
    params = [count_parameters(scaled_model(model, unit * at)).active for at in range(1, 40)]
    assert small.params == min(params, key=lambda count: abs(count / 1e6 - 1) if count > 1e6 else abs(1e6 / count - 1))
    assert nearest_width(model, 1.0, float) == unit


def test_experts_are_scaled(config: Path) -> None:
    moe = ("model.family=qwen3_moe", "model.moe.experts=4", "model.moe.experts_per_token=2", "model.moe.expert_dim=32")
    assert [size.config.model.expert_width for size in sizes_of(str(config), moe, "16,64", 5)] == [16, 64]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ("8,foo", [], "--sizes foo: must be a width (256), a width and a number of layers (256x8), or a number of parameters (10M)"),
        ("8,0", [], "--sizes 0: must be a width (256)"),
        ("8,", [], "--sizes : must be a width (256)"),
        ("8,20", [], "--sizes 20: must be a multiple of 8 for whole heads"),
        ("8,8x1", [], "8x1 is given twice; use --repeats for several seeds"),
        ("8", [], "a law needs at least 2 sizes"),
        ("8,16", ["--tokens-per-parameter", "0.1"], "1 steps of 512 tokens; at least 4 are needed"),
        ("8,16", ["--loss", "validation"], "unknown --loss 'validation' (allowed: training)"),
        ("8,16", ["--nodes", "2"], "--nodes needs --cluster"),
        ("8,16", ["--cluster", "dgx-h100", "--time", "30"], "--time is for Slurm: it needs --nodes"),
        ("8,16", ["--target", "models/nothing"], "models/nothing"),
        ("8,16", ["data.curriculum=[{step: 100, weights: [1]}]"], "data.curriculum: its steps do not fit the sizes"),
        ("8,16", ["init_from=/nowhere"], "init_from: the sizes of a ladder start from random parameters"),
        ("8,16", ["model.latent_attention.kv_rank=8", "model.num_kv_heads=null", "model.mup=null"], "model.latent_attention: the widths"),
    ],
)
def test_what_is_no_ladder_is_refused(
    sizes: str, options: list[str], message: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ridge(["ladder", str(config), "--sizes", sizes, "--output", str(tmp_path / "out"), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", ["NaN", "Infinity"])
def test_a_final_loss_that_is_not_finite_is_refused_by_name(bad: str, tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "train/loss": {bad if step == 19 else 2.5}}}\n' for step in range(1, 21)]
    (tmp_path / METRICS_FILE).write_text("".join(lines))
    with pytest.raises(UserError, match=r"its last training loss is not finite"):
        _final_loss(tmp_path, TRAINING, 20)


def command(config: Path, output: Path, *more: str) -> list[str]:
    fixed = ["--sizes", SIZES, "--tokens-per-parameter", "1", "--cluster", "dgx-h100", "--budget-flops", "1T", "--output", str(output)]
    return [sys.executable, "-m", "ridgeline", "ladder", str(config), *fixed, "--json", *more]


@pytest.fixture(scope="module")
def made(config: Path) -> dict[str, Any]:
    """The document of a real ladder, which was interrupted in its second run and continued."""
    output = config.parent / "out"
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen(command(config, output), env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if "[2/3]" in line:
            first.send_signal(signal.SIGINT)
            break
    said = first.stderr.read()
    assert first.wait() == 130 and "1 of 3 runs are finished" in said, said
    again = subprocess.run(command(config, output), env=env, capture_output=True, text=True, check=True)
    assert "1 of 3 runs are finished" in again.stderr and "[2/2]" in again.stderr
    found: dict[str, Any] = json.loads(again.stdout)
    return found


def test_a_ladder_is_trained_fitted_and_planned(made: dict[str, Any], config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, law = made["rows"], made["law"]
    assert [row["size"] for row in rows] == ["8x1", "16x1", "24x2"] and all(row["failure"] is None for row in rows)
    assert rows[0]["loss"] > rows[1]["loss"] > rows[2]["loss"] > made["target"]["loss"] > law["irreducible"] >= 0
    for row in rows:
        assert row["loss"] == pytest.approx(row["fitted"], rel=0.05)
    for name in ("irreducible", "amplitude", "alpha"):
        assert law["intervals"][name][0] <= law[name] <= law["intervals"][name][1]
    assert made["check"]["size"] == "24x2" and made["check"]["measured"] == rows[2]["loss"]
    target, chosen = made["target"], made["recommendation"]
    assert target["params"] == count_parameters(load(str(config)).config.model).active and target["tokens"] == target["params"]
    assert target["cost"]["devices"] == 8 and target["cost"]["wall_usd"] > 0 and target["cost"]["wall_days"] > 0
    assert made["budget_flops"] == 1e12 == chosen["flops"] and chosen["embed_dim"] % 8 == 0 and chosen["loss"] < target["loss"]
    assert 0.5 < chosen["tokens"] / chosen["params"] < 2, "the size whose tokens at this ratio take the budget"
    output = config.parent / "out"
    assert {"study.json", "study.md", "loss.svg", "fit.svg", "000", "001", "002"} <= set(os.listdir(output))
    assert ridge(["report", str(output), "-o", str(output / "r.html")]) == 0
    assert "Loss over compute" in (output / "r.html").read_text()
    assert ridge(["diagnose", str(output)]) == 2
    assert "is a scaling-law ladder" in capsys.readouterr().err


def test_another_config_in_the_same_directory_is_refused(made: dict[str, Any], config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ridge(command(config, config.parent / "out", "optimizer.learning_rate=1e-3")[3:]) == 2
    assert "holds runs with another config (optimizer.learning_rate): choose another --output" in " ".join(capsys.readouterr().err.split())
