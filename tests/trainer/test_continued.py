"""Continued pre-training: a run from another run's checkpoint with a mixture curriculum, a new warm-up, and longer rows by other RoPE."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from ridgeline.cli.commands.convert import to_hf
from ridgeline.configs.curriculum import phases
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import Config
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.models.huggingface.convert import check_same_model
from ridgeline.rundir.directory import read_metrics
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.run import train

ROOT = Path(__file__).parents[2]
SHORT, LONG, STEPS = 16, 48, 6
MODEL = {"vocab_size": 258, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32}
BEFORE = {**MODEL, "max_seq_len": SHORT}
ROPE = {"rope_theta": 4e4, "rope_scaling": {"kind": "yarn", "factor": 3.0, "original_max_seq_len": SHORT}}
AFTER = {**MODEL, "max_seq_len": LONG, **ROPE}
CURRICULUM = [{"step": 2, "weights": [1, 4]}, {"step": 5, "weights": [4, 1], "linear": True}]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Byte tokens of two parts of this project's sources."""
    directory, found = tmp_path_factory.mktemp("corpora"), []
    for name, weight in (("loaders", 3.0), ("configs", 1.0)):
        texts = directory / f"{name}-texts"
        texts.mkdir()
        for number, source in enumerate(sorted((ROOT / name).glob("*.py"))):
            (texts / f"{number:02d}.txt").write_text(source.read_text()[:1500])
        prepare(PrepareSettings((texts,), directory / name, "bytes"), workers=1)
        found.append({"path": str(directory / name), "weight": weight})
    return found


def make_config(corpora: list[dict[str, Any]], run_dir: Path, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "name": "small",
        "run_dir": str(run_dir),
        "precision": {"compute": "float32"},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 2},
        "logging": {"tensorboard": False},
        "trainer": {"log_every": 1},
        "data": {"train": corpora, "batch_size": 8},
    }
    merged = {**base, **{k: {**base[k], **v} if isinstance(v, dict) and k in base else v for k, v in sections.items()}}
    return Config.model_validate(merged)


@pytest.fixture(scope="module")
def first(corpora: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run with short rows."""
    directory = tmp_path_factory.mktemp("runs") / "first"
    config = make_config(corpora, directory, model=BEFORE, data={"seq_len": SHORT}, trainer={"steps": 4})
    train(config, command=["test"])
    return config


def continued(corpora: list[dict[str, Any]], run_dir: Path, first: Config, **sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "model": AFTER,
        "init_from": str(first.directory),
        "init_optimizer": True,
        "schedule": {"warmup_steps": 2, "initial_fraction": 0.1},
        "data": {"seq_len": LONG, "curriculum": CURRICULUM},
        "trainer": {"steps": STEPS},
    }
    return make_config(
        corpora, run_dir, **{**defaults, **{k: {**defaults.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}}
    )


def run(config: Config) -> dict[int, tuple[float, float]]:
    """Train; return step -> loss and learning rate."""
    train(config, command=["test"])
    records = read_metrics(config.directory / "metrics.jsonl")
    return {r["step"]: (r["train/loss"], r["train/learning_rate"]) for r in records if "train/loss" in r}


def payload(directory: Path, step: int) -> dict[str, np.ndarray]:
    from orbax.checkpoint import v1 as ocp

    stored = ocp.load(directory / "checkpoints" / f"step_{step:08d}")
    return {str(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(stored)}


@pytest.fixture(scope="module")
def whole(
    corpora: list[dict[str, Any]], first: Config, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, dict[int, tuple[float, float]]]:
    """The continued run without interruption."""
    config = continued(corpora, tmp_path_factory.mktemp("runs") / "whole", first)
    return config, run(config)


def test_the_log_names_what_changed_and_the_schedule_warms_up_again(
    whole: tuple[Config, dict[int, tuple[float, float]]], first: Config
) -> None:
    config, found = whole
    log = (config.directory / "train.log").read_text()
    assert f"starting from the parameters and the optimizer state of {first.directory}" in log
    for key in ("rope_theta = 10000.0, this run 40000.0", "rope_scaling = None, this run", "max_seq_len = 16, this run 48"):
        assert f"{first.directory} has model.{key}" in log
    rates = [found[step][1] for step in range(1, STEPS + 1)]
    assert rates[:3] == pytest.approx([1e-3 * (0.1 + 0.9 / 3), 1e-3 * (0.1 + 0.9 * 2 / 3), 1e-3], rel=1e-5)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_run_resumed_after_every_step_is_bitwise_the_uninterrupted_one(
    corpora: list[dict[str, Any]], first: Config, whole: tuple[Config, dict[int, tuple[float, float]]], tmp_path: Path
) -> None:
    """Phases begin at steps 0, 2, 3, 4 and 5."""
    reference, losses = whole
    halting = continued(corpora, tmp_path / "run", first, trainer={"stop_after_s": 1e-9})
    for _ in range(1, STEPS):
        run(halting)
    assert run(continued(corpora, tmp_path / "run", first)) == losses
    one, other = payload(reference.directory, STEPS), payload(tmp_path / "run", STEPS)
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def test_another_mesh_and_accumulation_read_the_same_rows(
    corpora: list[dict[str, Any]], first: Config, whole: tuple[Config, dict[int, tuple[float, float]]], tmp_path: Path
) -> None:
    found = run(continued(corpora, tmp_path / "run", first, mesh={"data": 2, "fsdp": 2, "tensor": 2}, trainer={"accumulation": 2}))
    for step, (loss, rate) in whole[1].items():
        assert found[step] == (pytest.approx(loss, rel=1e-5), rate)


def test_parameters_and_optimizer_state_are_carried_over_bitwise(tmp_path: Path) -> None:
    """With one batch per epoch, a new run's first step is the next step of the run that it starts from."""
    text = "".join(map(str, np.random.default_rng(0).integers(0, 10, 8 * SHORT - 8)))
    (tmp_path / "text.txt").write_text(text)
    prepare(PrepareSettings((tmp_path / "text.txt",), tmp_path / "corpus", "bytes"), workers=1)

    def trained(name: str, steps: int, **sections: Any) -> dict[str, np.ndarray]:
        config = make_config(
            [{"path": str(tmp_path / "corpus")}],
            tmp_path / name,
            model=BEFORE,
            data={"seq_len": SHORT, "shuffle": False},
            schedule={"kind": "constant"},
            trainer={"steps": steps},
            checkpoint={"keep_last": 9},
            **sections,
        )
        train(config, command=["test"])
        return payload(config.directory, steps)

    trained("first", 2)
    carried = trained("carried", 1, init_from=str(tmp_path / "first"), init_optimizer=True)
    fresh = trained("fresh", 1, init_from=str(tmp_path / "first"))
    expected = trained("first", 3)
    own = [name for name in expected if "params" in name or "opt_state" in name]
    assert sum("opt_state" in name for name in own) > 20
    for name in own:
        np.testing.assert_array_equal(carried[name], expected[name], err_msg=name)
    assert not all(np.array_equal(fresh[name], expected[name]) for name in own if "params" in name)


def test_a_start_that_cannot_be_meant_is_refused_by_name(
    corpora: list[dict[str, Any]], first: Config, whole: tuple[Config, dict[int, tuple[float, float]]], tmp_path: Path
) -> None:
    def refused(match: str, run_dir: Path, **sections: Any) -> None:
        with pytest.raises(UserError, match=match):
            train(continued(corpora, run_dir, first, **sections), command=["test"])
        assert run_dir == whole[0].directory or not run_dir.exists()

    refused(r"model\.num_heads = 4 \(checkpoint: 2\)", tmp_path / "new", model={"num_heads": 4, "num_kv_heads": 2})
    refused(r"init_optimizer: .* has optimizer.kind=adamw, this config lion", tmp_path / "new", optimizer={"kind": "lion"})
    (tmp_path / "none").mkdir()
    shutil.copy(first.directory / "config.yaml", tmp_path / "none")
    refused(r"^no checkpoint in ", tmp_path / "new", init_from=str(tmp_path / "none"))
    refused(r"init_optimizer: .* has precision.moments=float32", tmp_path / "new", precision={"moments": "bfloat16"})
    refused(r"cannot resume .*model\.rope_theta: 40000\.0 -> 50000\.0", whole[0].directory, model={"rope_theta": 5e4})
    refused(r"cannot resume .*model\.rope_scaling", whole[0].directory, model={"rope_scaling": None})


def test_learned_positions_keep_their_number(corpora: list[dict[str, Any]], tmp_path: Path) -> None:
    learned = {**BEFORE, "position": "learned"}
    config = make_config(corpora, tmp_path / "learned", model=learned, data={"seq_len": SHORT}, trainer={"steps": 1})
    train(config, command=["test"])
    longer = make_config(
        corpora, tmp_path / "new", model={**learned, "max_seq_len": LONG}, data={"seq_len": LONG}, init_from=str(config.directory)
    )
    with pytest.raises(UserError, match=r"model\.max_seq_len = 48 \(checkpoint: 16\)"):
        train(longer, command=["test"])


def test_the_exported_model_has_the_new_rope_settings_and_the_logits_of_transformers(
    whole: tuple[Config, dict[int, tuple[float, float]]], tmp_path: Path
) -> None:
    result = CliRunner().invoke(to_hf, [str(whole[0].directory), str(tmp_path / "hf")], catch_exceptions=False)
    assert result.exit_code == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["max_position_embeddings"] == LONG
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    rope = theirs.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"], rope["original_max_position_embeddings"]) == ("yarn", 3.0, 4e4, SHORT)
    tokens = np.random.default_rng(0).integers(0, 258, (8, LONG)).astype(np.int32)
    loaded = load_model(whole[0].directory)
    decoder = loaded.spec.merge(loaded.params)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(jax.jit(lambda x: decoder.logits(decoder(x)))(tokens))
    np.testing.assert_allclose(ours[..., :258], expected, rtol=2e-4, atol=2e-5)


def test_the_example_of_the_guide_fits_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    quickstart, example = (load(f"configs/{name}.yaml", []).config for name in ("quickstart", "examples/continued-tiny"))
    check_same_model(Path("runs/quickstart"), quickstart.model, example.model)
    assert (example.init_from, example.optimizer.kind) == (quickstart.directory, quickstart.optimizer.kind)
    assert example.data.train[0].path == quickstart.data.train[0].path
    assert example.data.seq_len == example.model.max_seq_len == 2 * quickstart.data.seq_len
    assert [step for step, _ in phases(example.data)][:3] == [0, 60, 61]
