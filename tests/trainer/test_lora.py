"""Runs that train adapters: resume, what a checkpoint has, export and start from exports, and the refusal of what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx
from safetensors.numpy import load_file

from ridgeline import models
from ridgeline.cli.commands.convert import from_hf, to_hf
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ComputeConfig, Config, PrecisionConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.pretrained import LoadedModel, load_model
from tests.trainer.test_run import corpus, make_config, payload, run  # noqa: F401

LORA = {"rank": 4, "alpha": 8.0, "dora": True, "dropout": 0.1, "targets": ["query", "out", "up", "down"]}


def by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A Hugging Face directory without a tokenizer, and its parameters."""
    directory = tmp_path_factory.mktemp("lora") / "base"
    directory.mkdir()
    model = make_config(Path("corpus"), Path("run")).model
    decoder = models.build(model, ComputeConfig(), PrecisionConfig(), Partitioner.single(), nnx.Rngs(params=4))
    values = by_path(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
    export_weights(model, lambda path, layer: values[path] if layer is None else values[path][layer], directory, "float32")
    (directory / "config.json").write_text(json.dumps(hf_config(model, "float32", {})))
    return directory, values


def adapted(corpus: Path, run_dir: Path, base: Path, **sections: Any) -> Config:  # noqa: F811
    trainer = {"steps": 4} | sections.pop("trainer", {})
    runtime = {"compilation_cache": str(base.parent / "programs")}
    settings = {"lora": LORA, "init_from": str(base), "evaluation": {"every": 0, "sets": {}}, "runtime": runtime} | sections
    return make_config(corpus, run_dir, trainer=trainer, **settings)


@pytest.fixture(scope="module")
def whole(corpus: Path, base: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[int, float]]:  # noqa: F811
    """An uninterrupted run on eight devices."""
    config = adapted(corpus, tmp_path_factory.mktemp("runs") / "whole", base[0])
    return config, run(config)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    corpus: Path,  # noqa: F811
    base: tuple[Path, Any],
    whole: tuple[Config, dict[int, float]],
    tmp_path: Path,
) -> None:
    run(adapted(corpus, tmp_path / "run", base[0], trainer={"stop_after_s": 1e-9}))
    resumed = adapted(corpus, tmp_path / "run", base[0])
    assert run(resumed) == whole[1]
    one, other = payload(whole[0]), payload(resumed)
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def test_a_checkpoint_has_the_base_unchanged_and_state_of_adapters_only(base: tuple[Path, Any], whole: tuple[Config, Any]) -> None:
    stored = {name.split("'")[1]: values for name, values in payload(whole[0]).items()}
    frozen = {name.removeprefix("params."): v for name, v in stored.items() if name.startswith("params.") and "adapters" not in name}
    assert frozen.keys() == base[1].keys()
    assert all(np.array_equal(values, base[1][name]) for name, values in frozen.items())
    adapters = [name for name in stored if name.startswith("params.") and "adapters" in name]
    assert len(adapters) == 3 * len(LORA["targets"])
    state = [name for name in stored if name.startswith("opt_state.") and stored[name].ndim > 0]
    assert len(state) == 2 * len(adapters)
    assert all("adapters" in name for name in state)
    assert all(np.any(stored[name]) for name in adapters)


def logits(loaded: LoadedModel) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 258, (8, 16)).astype(np.int32)
    return np.asarray(jax.jit(lambda decoder: decoder.logits(decoder(tokens)))(loaded.decoder))


def export(run_dir: Path, directory: Path, *options: str) -> Path:
    result = CliRunner().invoke(to_hf, [str(run_dir), str(directory), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return directory


def test_exports_compute_what_the_run_computes_and_training_goes_on_from_them(
    corpus: Path,  # noqa: F811
    base: tuple[Path, Any],
    whole: tuple[Config, Any],
    tmp_path: Path,
) -> None:
    directory = whole[0].directory
    loaded = load_model(directory)
    (weights,) = base[0].glob("*.safetensors")
    hidden = weights.rename(weights.with_suffix(".away"))
    adapter = export(directory, tmp_path / "adapter", "--adapter")  # needs the base's config.json, not its weights
    hidden.rename(weights)
    again = load_model(adapter)
    ours, theirs = by_path(loaded.params), by_path(again.params)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    np.testing.assert_allclose(logits(load_model(export(directory, tmp_path / "merged", "--merge"))), logits(loaded), atol=1e-5, rtol=0)

    quantized = export(directory, tmp_path / "quantized", "--merge", "--quantize", "int8", "--no-loss")
    whole_model = tmp_path / "whole_model"
    assert CliRunner().invoke(from_hf, [str(tmp_path / "merged"), "--output", str(whole_model)], catch_exceptions=False).exit_code == 0
    again_quantized = export(whole_model, tmp_path / "again_quantized", "--quantize", "int8", "--no-loss")
    stored = [load_file(path / "model.safetensors") for path in (quantized, again_quantized)]
    assert stored[0].keys() == stored[1].keys() and any(name.endswith("weight_packed") for name in stored[0])
    assert all(np.array_equal(stored[0][name], stored[1][name]) for name in stored[0])

    imported = tmp_path / "imported"
    assert CliRunner().invoke(from_hf, [str(adapter), "--output", str(imported)], catch_exceptions=False).exit_code == 0
    with pytest.raises(UserError, match=r"lora\.alpha = 9\.0 \(there: 8\.0\)"):
        run(adapted(corpus, tmp_path / "other", imported, lora=LORA | {"alpha": 9.0}))
    with pytest.raises(UserError, match=r"has adapters: train them on with lora\.rank=4 lora\.alpha=8, or write the merged model"):
        run(adapted(corpus, tmp_path / "other", adapter, lora={}))
    kept = by_path(load_model(imported).params)
    assert all(np.array_equal(ours[name], kept[name]) for name in ours)
    assert run(adapted(corpus, tmp_path / "on", adapter, trainer={"steps": 1}))[1] != whole[1][1]


def test_other_adapters_do_not_resume(corpus: Path, base: tuple[Path, Any], whole: tuple[Config, Any]) -> None:  # noqa: F811
    for change in ({"rank": 2}, {"dora": False}, {"targets": ["query"]}):
        with pytest.raises(UserError, match=f"cannot resume with the changed config: lora.{next(iter(change))}"):
            run(adapted(corpus, whole[0].directory, base[0], lora=LORA | change, trainer={"steps": 8}))


INPUTS = {"query": (1,), "key": (1,), "value": (1,), "out": (1, 2), "gate": (1,), "up": (1,), "down": (1,)}
"""Input dims of the stacked matrices."""


def test_a_base_in_8_bits_is_quantized_on_load_resumes_bitwise_and_is_exported(
    corpus: Path,  # noqa: F811
    base: tuple[Path, dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    lora = {"rank": 4, "dora": True, "targets": ["query", "down"], "base": "int8"}
    whole = adapted(corpus, tmp_path / "whole", base[0], lora=lora)
    losses = run(whole)
    run(adapted(corpus, tmp_path / "run", base[0], lora=lora, trainer={"stop_after_s": 1e-9}))
    resumed = adapted(corpus, tmp_path / "run", base[0], lora=lora)
    assert run(resumed) == losses
    stored, other = ({name.split("'")[1]: values for name, values in payload(config).items()} for config in (whole, resumed))
    assert stored.keys() == other.keys()
    assert all(np.array_equal(values, other[name]) for name, values in stored.items())

    matrices = {path: path.split(".")[-1] for path in base[1] if path.split(".")[-1] in INPUTS}
    assert len(matrices) >= 6
    for path, name in matrices.items():
        scale = np.abs(base[1][path]).max(INPUTS[name], keepdims=True) / np.float32(127)
        np.testing.assert_array_equal(stored[f"params.{path}.scale"], scale)
        assert stored[f"params.{path}.int8"].dtype == np.int8
        np.testing.assert_array_equal(stored[f"params.{path}.int8"], np.rint(base[1][path] / scale))
    others = base[1].keys() - matrices.keys()
    assert all(np.array_equal(stored[f"params.{path}"], base[1][path]) for path in others)
    assert all("adapters" in name for name, values in stored.items() if name.startswith("opt_state.") and values.ndim > 0)

    imported = tmp_path / "imported"
    assert CliRunner().invoke(from_hf, [str(base[0]), "--output", str(imported)], catch_exceptions=False).exit_code == 0
    assert run(adapted(corpus, tmp_path / "from_a_run", imported, lora=lora)) == losses
    with pytest.raises(UserError, match=r"cannot resume with the changed config: lora\.base"):
        run(adapted(corpus, whole.directory, base[0], lora=lora | {"base": "compute"}, trainer={"steps": 8}))
    with pytest.raises(UserError, match=r"has its frozen matrices in 8 bits: set lora\.base=int8"):
        run(adapted(corpus, tmp_path / "other", whole.directory, lora=lora | {"base": "compute"}))

    def in_8_bits(config: Config) -> Config:
        return config.model_copy(update={"lora": config.lora.model_copy(update={"base": "int8"})})

    computed = logits(load_model(whole.directory))
    adapter = export(whole.directory, tmp_path / "adapter", "--adapter")
    np.testing.assert_array_equal(logits(load_model(adapter, adapt=in_8_bits)), computed)
    np.testing.assert_allclose(logits(load_model(export(whole.directory, tmp_path / "merged", "--merge"))), computed, atol=1e-5, rtol=0)


def test_an_export_says_what_to_choose(whole: tuple[Config, Any], base: tuple[Path, Any], tmp_path: Path) -> None:
    for options in ((), ("--adapter", "--merge")):
        with pytest.raises(UserError, match="has adapters; choose one of --adapter and --merge"):
            export(whole[0].directory, tmp_path / "out", *options)
    with pytest.raises(UserError, match="--base is for an adapter directory"):
        CliRunner().invoke(from_hf, [str(base[0]), "--output", str(tmp_path / "x"), "--base", str(base[0])], catch_exceptions=False)


def test_adapters_of_experts_resume_bitwise_and_are_exported(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    model = {"family": "qwen3_moe", "num_layers": 1, "qk_norm": True, "moe": {"experts": 4, "experts_per_token": 2, "expert_dim": 16}}
    lora = {"rank": 2, "targets": ["query", "expert_gate", "expert_up", "expert_down"]}
    runtime = {"compilation_cache": str(tmp_path / "programs")}

    def config(name: str, **trainer: float) -> Config:
        steps = {"steps": 4} | trainer
        evaluation = {"every": 0, "sets": {}}
        return make_config(corpus, tmp_path / name, model=model, lora=lora, trainer=steps, evaluation=evaluation, runtime=runtime)

    whole = config("whole")
    losses = run(whole)
    run(config("run", stop_after_s=1e-9))
    assert run(config("run")) == losses
    one, other = payload(whole), payload(config("run"))
    assert all(np.array_equal(values, other[name]) for name, values in one.items())
    state = [name for name, values in one.items() if name.split("'")[1].startswith("opt_state.") and values.ndim > 0]
    assert len(state) == 2 * 2 * len(lora["targets"])
    assert all("adapters" in name for name in state)
    loaded = load_model(whole.directory)
    export(whole.directory, tmp_path / "adapter", "--adapter")
    merged = logits(load_model(export(whole.directory, tmp_path / "merged", "--merge")))
    np.testing.assert_allclose(merged, logits(loaded), atol=1e-5, rtol=0)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    up = by_path(loaded.params)["blocks.mlp.adapters.up.a"]
    for expert in range(4):
        name = f"base_model.model.model.layers.0.mlp.experts.{expert}.up_proj.lora_A.weight"
        np.testing.assert_array_equal(stored[name], up[0, :, expert].T)
