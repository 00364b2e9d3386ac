"""Policy updates: the reward rises, resuming is bitwise, exports are complete versions, meshes agree, hostile input is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import ridgeline
from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.loaders.rollouts import Rollout
from ridgeline.models.huggingface.convert import open_hf
from ridgeline.models.policy import advantages, token_shares
from ridgeline.rundir.directory import read_metrics
from ridgeline.trainer.policy import PolicyTrainer
from ridgeline.trainer.run import train
from tests.loaders.chats import write_chat_tokenizer
from tests.parity.hugging_face import LLAMA, Variant, save_random_model

LENGTH, ROWS, VOCAB = 24, 16, 428


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compile: None) -> None:
    """These programs run for milliseconds."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy") / "base"
    shape = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_key_value_heads": 2}
    save_random_model(Variant("llama", LLAMA | shape), directory)
    write_chat_tokenizer(directory, "chatml")
    return directory


def make_config(base: Path | str, run_dir: Path | str, **sections: Any) -> Config:
    model = open_hf(Path(base)).model.model_dump(mode="json") if Path(base).is_dir() else {"vocab_size": VOCAB, "num_layers": 2}
    settings: dict[str, Any] = {
        "name": "policy",
        "run_dir": str(run_dir),
        "init_from": str(base),
        "model": model,
        "precision": {"compute": "float32"},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "data": {"seq_len": LENGTH, "batch_size": ROWS},
        "policy": {"loss": "grpo", "kl": 0.01},
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "trainer": {"steps": 100},
        "checkpoint": {"every": 1000},
        "logging": {"tensorboard": False},
    }
    return Config.model_validate({**settings, **{k: {**settings.get(k, {}), **v} for k, v in sections.items()}})


def random_rollouts(seed: int, count: int = ROWS, **given: Any) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    return [
        Rollout(
            rng.integers(0, VOCAB, rng.integers(1, 8)).tolist(),
            rng.integers(0, VOCAB, rng.integers(1, 15)).tolist(),
            float(rng.normal()),
            index // 4,
            **given,
        )
        for index in range(count)
    ]


def leaves(policy: PolicyTrainer) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(policy.state))]


def load_example() -> Any:
    """The worked example as a module."""
    file = Path(__file__).parents[2] / "examples" / "rl" / "letters.py"
    spec = importlib.util.spec_from_file_location("letters", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_of_the_example_rises(base: Path, tmp_path: Path) -> None:
    config = make_config(base, tmp_path / "run", optimizer={"learning_rate": 0.1}, data={"seq_len": LENGTH, "batch_size": 32})
    weights = tmp_path / "weights"
    rewards = load_example().improve(config, 10, str(weights), max_tokens=6)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.2, rewards
    logged = [record for record in read_metrics(config.directory / "metrics.jsonl") if "train_policy/reward" in record]
    assert [record["train_policy/reward"] for record in logged] == pytest.approx(rewards)
    assert logged[0]["train_policy/ratio"] == pytest.approx(1, abs=1e-4)  # sampled by the model before the update
    assert logged[0]["train_policy/kl"] == pytest.approx(0, abs=1e-5)
    assert sorted(path.name for path in weights.iterdir()) == ["latest", "v000009", "v000010"]
    assert json.loads((weights / "latest" / "config.json").read_text())["ridgeline"]["update"] == 10
    with PolicyTrainer(config) as policy:
        again = open_hf(weights / "latest", config.model).load(policy._parts.abstract.params)
        for ours, stored in zip(jax.tree.leaves(policy.state.params), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(ours, stored)
        assert policy.export(weights).name == "v000010"  # the same version again
        assert (weights / "latest").resolve() == (weights / "v000010").resolve()


def test_resuming_between_updates_is_bitwise_and_epochs_take_steps(base: Path, tmp_path: Path) -> None:
    settings = {"policy": {"epochs": 2}}
    with PolicyTrainer(make_config(base, tmp_path / "whole", **settings)) as policy:
        for update in range(3):
            policy.update(random_rollouts(update, 2 * ROWS))
        assert policy.step == 12
        whole = leaves(policy)
    for updates in ((0,), (1, 2)):
        with PolicyTrainer(make_config(base, tmp_path / "parts", **settings)) as policy:
            assert policy.updates == updates[0]
            for update in updates:
                policy.update(random_rollouts(update, 2 * ROWS))
            parts = leaves(policy)
    for ours, expected in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_adapters_are_trained_alone_and_exported_merged(base: Path, tmp_path: Path) -> None:
    with PolicyTrainer(make_config(base, tmp_path / "run", lora={"rank": 3})) as policy:
        for seed in (0, 1):
            policy.update(random_rollouts(seed))
        version = policy.export(tmp_path / "weights")
    before, after = (load_file(directory / "model.safetensors") for directory in (base, version))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        change = after[name] - weight
        if name.endswith("_proj.weight"):
            values = np.linalg.svd(change, compute_uv=False)
            assert values[0] > 1e-6, name
            assert values[3] < 1e-3 * values[0], name  # rank 3, up to rounding
        else:
            assert not change.any(), name


def test_meshes_and_microbatches_train_as_one_device(base: Path, tmp_path: Path) -> None:
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    found = []
    for index, (mesh, accumulation) in enumerate(
        [(one, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 2), (one | {"fsdp": 2, "context": 2, "tensor": 2}, 1)]
    ):
        sections = {"mesh": mesh, "trainer": {"accumulation": accumulation}, "optimizer": {"kind": "sgd", "learning_rate": 0.1}}
        config = make_config(base, tmp_path / str(index), **sections)
        with PolicyTrainer(config, devices=jax.devices()[: int(np.prod(list(mesh.values())))]) as policy:
            metrics = [policy.update(random_rollouts(seed)) for seed in (0, 1)]
            found.append((metrics, [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(policy.state.params))]))
    for metrics, params in found[1:]:
        for ours, expected in zip(metrics, found[0][0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for ours, expected in zip(params, found[0][1], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-6)


def test_rollouts_that_do_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    good = random_rollouts(0)
    with PolicyTrainer(make_config(base, tmp_path / "run", trainer={"steps": 1})) as policy:
        for rollouts, message in (
            (good[:-1], "15 rollouts must be a multiple of data.batch_size=16"),
            ([*good[:-1], Rollout([1], [], 0.0, 0)], r"rollouts\[15\]: prompt and completion must have"),
            ([*good[:-1], Rollout([1], [2] * LENGTH + [3], 0.0, 0)], "26 tokens are more than data.seq_len"),
            ([*good[:-1], Rollout([1], [VOCAB], 0.0, 0)], r"token ids must be in 0..427"),
            ([*good[:-1], Rollout([1], [1], float("nan"), 0)], "the reward must be finite"),
            ([*good[:-1], Rollout([1], [1], 0.0, 0, [0.0])], "for all rollouts or for none"),
            (random_rollouts(0, log_probs=[0.0] * 99), "finite numbers, one per token"),
            (random_rollouts(0, 2 * ROWS), "trainer.steps=1: an update takes 2 steps"),
        ):
            with pytest.raises(UserError, match=message):
                policy.update(rollouts)
        assert policy.step == 0


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"policy": {"loss": None}}, "policy.kl", "there are no policy updates; set policy.loss"),
        ({"policy": {"loss": "dr_grpo"}}, "policy.max_completion", "set the largest number of tokens"),
        ({"policy": {"max_completion": 4}}, "policy.max_completion", "not used by grpo; remove it"),
        ({"preference": {"loss": "dpo"}}, "preference.loss", "a run has one loss"),
        ({"loss": {"z_loss": 1e-4}}, "loss.z_loss", "set loss.z_loss=0"),
        ({"mesh": {"pipeline": 2, "data": 1}}, "mesh.pipeline", "set mesh.pipeline=1"),
        ({"data": {"train": [{"path": "corpus"}]}}, "data.train", "read rollouts, no corpora"),
    ],
)
def test_settings_that_do_not_work_are_refused_by_name(sections: dict[str, Any], key: str, message: str) -> None:
    problems = check_config(make_config("no-directory", "r", **sections))
    assert any(problem.keys[0] == key and message in problem.message for problem in problems), problems


def test_the_command_line_points_to_the_api(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"call ridgeline.open_policy from Python"):
        train(make_config(base, tmp_path / "run"), command=["test"])
    assert callable(ridgeline.open_policy)


def test_advantages_and_shares_follow_their_definitions() -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=30), rng.integers(0, 6, 30)
    for group in range(6):
        of = rewards[groups == group]
        assert advantages(rewards, groups, "none")[groups == group] == pytest.approx(of - of.mean(), abs=1e-6)
        expected = (of - of.mean()) / (of.std(ddof=1) + 1e-4)
        assert advantages(rewards, groups, "group")[groups == group] == pytest.approx(expected, abs=1e-5)
    assert advantages(np.ones(3), np.arange(3), "group").tolist() == [0, 0, 0]
    mask = np.arange(9) < rng.integers(1, 10, 5)[:, None]
    assert token_shares(make_config("none", "r").policy, mask).sum(axis=1) == pytest.approx(np.full(5, 0.2))
