"""Multi-token prediction: the targets of its modules, a run and its resume, evaluation and generation without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import ridgeline
from ridgeline.configs.schema import Config
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.rows import with_future_targets
from ridgeline.rundir.directory import read_metrics
from ridgeline.trainer.run import train

LENGTH, ROWS, STEPS = 16, 8, 4
MOE = {"experts": 4, "experts_per_token": 2, "expert_dim": 16, "choice_bias": True, "score": "sigmoid"}
MODEL = {
    "vocab_size": 258,
    "num_layers": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "mlp_dim": 32,
    "max_seq_len": 256,
    "pad_vocab_to": 260,
    "moe": MOE,
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
        "model": MODEL | {"mtp_layers": 2},
        "precision": {"compute": "float32"},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
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


def payload(config: Config) -> Any:
    newest = sorted((config.directory / "checkpoints").glob("step_*"))[-1]
    return ocp.load(newest)


def test_a_stopped_run_continues_bitwise_and_is_evaluated_and_sampled_without_its_modules(corpus: Path, tmp_path: Path) -> None:
    whole = make_config(tmp_path / "whole", corpus)
    outcome = train(whole, command=["test"])
    config = make_config(tmp_path / "parts", corpus)
    train(config.model_copy(update={"trainer": config.trainer.model_copy(update={"stop_after_s": 1e-9})}), command=["test"])
    train(config, command=["test"])
    assert logged(config, "train/loss") == logged(whole, "train/loss")
    assert logged(config, "train/mtp_loss") == logged(whole, "train/mtp_loss")
    state = payload(whole)
    for one, other in zip(jax.tree.leaves(payload(config)), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    further = logged(whole, "train/mtp_loss")
    assert len(further) == STEPS and all(5 < loss < 6 for loss in further.values())  # log(258) = 5.6
    assert all(0 <= share <= 1 for share in logged(whole, "train/mtp_accuracy").values())
    assert np.asarray(state["params.mtp.projection"]).shape == (2, 32, 16)
    assert np.abs(np.asarray(state["params.mtp.block.mlp.router_bias"])).max() > 0  # moved by the loads of the modules
    assert logged(whole, "eval/same/loss")[STEPS] == pytest.approx(logged(whole, "train/loss")[STEPS], rel=0.1)
    assert outcome is not None
    assert len(ridgeline.generate(whole.directory, ["import "], max_tokens=3)) == 1
