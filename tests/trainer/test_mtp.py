"""Multi-token prediction: the targets of its modules, a run and its resume, evaluation and generation without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import ridgeline
from ridgeline.cli.main import run
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.launch.exit_codes import DONE
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.rows import with_future_targets
from ridgeline.models.huggingface.convert import check_same_model
from ridgeline.rundir.directory import read_metrics
from ridgeline.trainer.checkpoint.payload import named_leaves
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.run import train

LENGTH, ROWS, STEPS = 16, 8, 2
MODEL = {
    "family": "deepseek_v3",
    "vocab_size": 258,
    "num_layers": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "mlp_dim": 32,
    "max_seq_len": 256,
    "latent_attention": {"q_rank": None, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 8},
    "moe": {"experts": 4, "experts_per_token": 2, "expert_dim": 16, "shared_experts": 1, "choice_bias": True, "score": "sigmoid"}
    | {"groups": 2, "groups_per_token": 1, "group_score": "best_two", "normalize": True},
    "rope_interleaved": True,
}


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compile: None) -> None:
    """These programs run for milliseconds."""


def test_targets_ahead_are_of_the_same_document_and_count_as_targets() -> None:
    rows = {
        "targets": np.array([[11, 12, 20, 21, 22, 0]], np.int32),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]], np.int32),
        "weights": np.array([[1, 1, 0, 0, 1, 0]], np.float32),  # of the first tokens of documents, of a masked token, of padding: 0
    }
    found = with_future_targets(rows, 2)
    np.testing.assert_array_equal(found["mtp_targets"][0, :4].T, [[12, 20, 21, 22], [20, 21, 22, 0]])
    np.testing.assert_array_equal(found["mtp_weights"][0].T, [[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert with_future_targets(rows, 0) is rows


def make_config(run_dir: Path, corpus: Path, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": MODEL | {"mtp_layers": 1},
        "precision": {"compute": "float32"},
        "mesh": {"fsdp": 8},
        "data": {"train": [{"path": str(corpus)}], "seq_len": LENGTH, "batch_size": ROWS},
        "evaluation": {"sets": {"same": str(corpus)}, "max_batches": 2},
        "trainer": {"steps": STEPS, "log_every": 1},
        "checkpoint": {"every": STEPS // 2},
        "logging": {"tensorboard": False},
    }
    return Config.model_validate(sections | {key: sections.get(key, {}) | value for key, value in changes.items()})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp")
    for number, source in enumerate(sorted((Path(__file__).parents[2] / "loaders").glob("*.py"))[:6]):
        (directory / f"{number}.txt").write_text(source.read_text()[200:600])
    prepare(PrepareSettings((directory,), directory / "corpus", "bytes"), workers=1)
    return directory / "corpus"


def logged(config: Config, name: str) -> dict[int, float]:
    return {r["step"]: r[name] for r in read_metrics(config.directory / "metrics.jsonl") if name in r}


def payload(directory: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in ocp.load(directory).items() if hasattr(value, "shape")}


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = make_config(tmp_path_factory.mktemp("run") / "whole", corpus)
    assert train(config, command=["test"]) is not None
    return config


def test_a_run_logs_the_losses_of_its_modules_and_balances_their_experts(trained: Config) -> None:
    further = logged(trained, "train/mtp_loss")
    assert len(further) == STEPS and all(5 < loss < 6 for loss in further.values())  # log(258) = 5.6
    assert all(0 <= share <= 1 for share in logged(trained, "train/mtp_accuracy").values())
    state = payload(trained.directory / "checkpoints" / f"step_{STEPS:08d}")
    assert state["params.mtp.projection"].shape == (1, 32, 16)
    assert np.abs(state["params.mtp.block.mlp.router_bias"]).max() > 0  # moved by the loads of the modules


def test_a_run_is_evaluated_and_sampled_without_its_modules(trained: Config) -> None:
    assert logged(trained, "eval/same/loss")[STEPS] == pytest.approx(logged(trained, "train/loss")[STEPS], rel=0.1)
    assert len(ridgeline.generate(trained.directory, ["import "], max_tokens=3)) == 1


def test_exported_modules_are_read_again_where_wanted(trained: Config, tmp_path: Path) -> None:
    state = payload(trained.directory / "checkpoints" / f"step_{STEPS:08d}")
    assert run(["convert", "to-hf", str(trained.directory), str(tmp_path / "whole")]) == DONE
    assert run(["convert", "to-hf", str(trained.directory), str(tmp_path / "alone"), "--without-mtp"]) == DONE
    whole, alone = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "alone"))
    assert (whole["num_nextn_predict_layers"], alone["num_nextn_predict_layers"]) == (1, 0)
    wanted = lambda config: config.model_copy(update={"model": trained.model})  # noqa: E731
    read = named_leaves({"params": load_model(tmp_path / "whole", adapt=wanted).params})  # as with init_from
    assert {name for name in state if name.startswith("params.")} == set(read)
    for name, value in read.items():
        np.testing.assert_array_equal(np.asarray(value), state[name], err_msg=name)
    assert load_model(tmp_path / "alone").config.model.mtp_layers == load_model(tmp_path / "whole").config.model.mtp_layers == 0
    with pytest.raises(UserError, match=r"model\.mtp_layers = 1 \(checkpoint: 0\)$"):
        load_model(tmp_path / "alone", adapt=wanted)
    with pytest.raises(UserError, match=r"model\.mtp_layers = 0 \(checkpoint: 1\); `ridge convert to-hf .* --without-mtp` leaves the mod"):
        check_same_model(trained.directory, trained.model, trained.model.model_copy(update={"mtp_layers": 0}))  # of init_from


def test_a_resumed_run_continues_bitwise(trained: Config) -> None:
    """Last: it trains on in the directory, from the checkpoint before the last."""
    last = trained.directory / "checkpoints" / f"step_{STEPS:08d}"
    before, losses = payload(last), [logged(trained, f"train/{name}") for name in ("loss", "mtp_loss")]
    shutil.rmtree(last)
    assert train(trained, command=["test"]) is not None
    assert [logged(trained, f"train/{name}") for name in ("loss", "mtp_loss")] == losses
    after = payload(last)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
