"""`ridge convert` and `ridge generate` on directories as a user has them."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner
from flax import nnx

from ridgeline import models
from ridgeline.cli.commands.convert import from_hf, to_hf, upcycle
from ridgeline.cli.commands.generate import generate
from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config, open_hf
from ridgeline.models.upcycle import Upcycling
from ridgeline.planner.parameters import count_parameters
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.checkpoint.param_slices import ParamReader
from ridgeline.trainer.pretrained import load_model

MODEL = ModelConfig(
    vocab_size=300, num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, max_seq_len=64, init_std=0.2
)


def run(command, *arguments):
    """Invoke a command as the CLI does, letting UserError through."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def write_hf(directory, model=MODEL, dtype="float32", seed=0):
    """A Hugging Face directory with random weights and a byte-level BPE tokenizer."""
    directory.mkdir()
    decoder = models.build(model, ComputeConfig(), PrecisionConfig(), Partitioner.single(), nnx.Rngs(params=seed))
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))[0]
    values = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
    export_weights(model, lambda path, layer: values[path] if layer is None else values[path][layer], directory, dtype)
    (directory / "config.json").write_text(json.dumps(hf_config(model, dtype, {"eos_token_id": 0})))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, "<s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    return directory


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("convert") / "hf")


@pytest.fixture(scope="module")
def imported(hf):
    output = hf.parent / "imported"
    run(from_hf, hf, "--output", output)
    return output


def test_import_makes_a_run_directory_with_the_same_parameters(hf, imported):
    reader, checkpoint = ParamReader(imported / "checkpoints"), open_hf(hf)
    assert reader.step == 0
    assert reader.metadata["kind"] == "params"
    assert reader.shapes == checkpoint.shapes
    for path, shape in checkpoint.shapes.items():
        for layer in range(shape[0]) if path.startswith("blocks.") else (None,):
            assert reader.read(path, layer).tobytes() == checkpoint.read_layer(path, layer, np.dtype(np.float32)).tobytes()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_import_export_import_is_bitwise_equal(tmp_path, stored):
    first = write_hf(tmp_path / "first", dtype=stored)
    run(from_hf, first, "--output", tmp_path / "run")
    run(to_hf, tmp_path / "run", tmp_path / "second", "--max-shard-gb", "0.00004")
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 2
    before, after = open_hf(first), open_hf(tmp_path / "second")
    assert after.model == before.model
    for name in before.tensors:
        assert after.tensors[name].read().tobytes() == before.tensors[name].read().tobytes()
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "second" / "config.json").read_text())["bos_token_id"] == 1


def test_the_imported_run_and_the_directory_load_as_the_same_model(hf, imported):
    one, other = load_model(hf), load_model(imported)
    assert (one.step, other.step) == (None, 0)
    assert one.tokenizer.sha256 == other.tokenizer.sha256
    assert other.eos_ids == [0]
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), one.params, other.params)
    assert all(jax.tree.leaves(equal))


def test_conversion_holds_a_few_tensors_and_not_the_model(tmp_path):
    script = Path(__file__).with_name("conversion_memory.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path), "40", "384"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.split("figures ")[1])
    assert figures["model_bytes"] > 9 * figures["largest_bytes"]
    allowed_bytes = 3 * figures["largest_bytes"] + 64 * 2**20  # buffers, threads, the checkpoint's index
    assert allowed_bytes < figures["model_bytes"] / 2
    assert figures["from_hf_bytes"] < allowed_bytes
    assert figures["to_hf_bytes"] < allowed_bytes
    assert filecmp.cmp(tmp_path / "hf" / "model.safetensors", tmp_path / "back" / "model.safetensors", shallow=False)


def test_import_reads_into_the_requested_dtype_at_a_relative_path(hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(from_hf, hf, "--output", "run", "--dtype", "bfloat16")
    loaded = load_model(Path("run"))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {"bfloat16"}


def test_generate_samples_the_same_text_from_the_run_and_from_the_directory(hf, imported):
    arguments = ["--prompt", "def f", "--prompt", "x", "--max-tokens", "12", "--seed", "3", "--json"]
    rows = json.loads(run(generate, imported, *arguments))
    assert [row["prompt"] for row in rows] == ["def f", "x"]
    assert rows[0]["tokens"] == 12 or rows[0]["stopped_by"] == "eos"
    same = json.loads(run(generate, hf, *arguments))
    assert [row["text"] for row in same] == [row["text"] for row in rows]
    assert [(row["step"], bool(row["config_sha256"])) for row in (rows[0], same[0])] == [(0, True), (None, False)]
    assert run(generate, imported, "--prompt", "def f", "--max-tokens", "5").startswith("def f")


def test_a_damaged_checkpoint_is_not_exported(hf, tmp_path):
    run(from_hf, hf, "--output", tmp_path / "run")
    victim = max((tmp_path / "run" / "checkpoints").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(UserError, match="no good checkpoint"):
        run(to_hf, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_outputs_are_never_overwritten_and_failures_leave_nothing(hf, imported, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        run(from_hf, hf, "--output", tmp_path / "full")
    with pytest.raises(UserError, match="not empty"):
        run(to_hf, imported, tmp_path / "full")
    broken = write_hf(tmp_path / "broken", dtype="float32")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated"):
        run(from_hf, broken, "--output", tmp_path / "never")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "full"]


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (to_hf, ["{hf}", "{tmp}/out"], "is a Hugging Face directory"),
        (to_hf, ["{tmp}", "{tmp}/out"], "contains no model"),
        (to_hf, ["{run}", "{tmp}/out", "--step", "7"], "no complete checkpoint of step 7"),
        (to_hf, ["{run}", "{tmp}/out", "--max-shard-gb", "0"], "--max-shard-gb 0"),
        (to_hf, ["{run}", "{tmp}/out", "--without-mtp"], "has no modules of multi-token prediction; leave out --without-mtp"),
        (from_hf, ["{tmp}/absent", "--output", "{tmp}/out"], "no such Hugging Face directory"),
        (generate, ["{tmp}/absent"], "no such run directory"),
        (generate, ["{hf}", "--step", "3"], "it has no steps"),
        (generate, ["{hf}", "--max-tokens", "400"], "model.max_seq_len is 64"),
        (generate, ["{hf}", "--temperature", "-1"], "temperature"),
        (generate, ["{hf}", "--seed", "-1"], "--seed"),
    ],
)
def test_bad_arguments_are_one_clear_error(hf, imported, tmp_path, command, arguments, message):
    filled = [argument.format(hf=hf, run=imported, tmp=tmp_path) for argument in arguments]
    with pytest.raises(UserError, match=message):
        run(command, *filled)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def without_tokenizer(hf):
    directory = hf.parent / "bare"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((hf / name).read_bytes())
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    return directory


def test_a_model_without_a_tokenizer_is_converted_and_loaded_and_refused_only_for_text(without_tokenizer, tmp_path):
    run(from_hf, without_tokenizer, "--output", tmp_path / "run")
    run(to_hf, tmp_path / "run", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (without_tokenizer / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 7
    for place in (without_tokenizer, tmp_path / "run", tmp_path / "back"):
        assert load_model(place).source.tokenizer is None
        with pytest.raises(UserError, match="has no tokenizer"):
            run(generate, place)


def test_an_export_names_its_step_and_config(imported, tmp_path):
    answer = json.loads(run(to_hf, imported, tmp_path / "out", "--json"))
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())["ridgeline"]
    assert recorded == {"run": "imported", "step": 0, "config_sha256": answer["config_sha256"]}
    assert answer["step"] == 0
    assert len(answer["config_sha256"]) == 64


def logits_of(source):
    loaded = load_model(source)
    tokens = np.random.default_rng(0).integers(0, 300, (2, 40)).astype(np.int32)
    structure = nnx.split(
        nnx.eval_shape(
            lambda: models.build(
                loaded.source.config.model, ComputeConfig(), PrecisionConfig(compute="float32"), Partitioner.single(), nnx.Rngs(params=0)
            )
        )
    )[0]
    decoder = nnx.merge(structure, jax.device_get(loaded.params))
    return np.asarray(decoder.logits(decoder(tokens)))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_an_upcycled_model_computes_the_function_of_the_dense_one(hf, imported, tmp_path, family):
    """From a Hugging Face directory and from a run; its export is one of the family with experts, and reinitialized experts differ."""
    qk_norm = {"qk_norm": True} if family == "qwen3" else {}
    dense = hf if family == "llama" else write_hf(tmp_path / "hf", MODEL.model_copy(update={"family": family, **qk_norm}))
    answer = json.loads(run(upcycle, dense, tmp_path / "moe", "--experts", "5", "--experts-per-token", "2", "--json"))
    reader = ParamReader(tmp_path / "moe" / "checkpoints")
    assert answer["family"] == {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}[family]
    assert answer["parameters"] == count_parameters(load_model(tmp_path / "moe").source.config.model).total
    assert reader.read("blocks.mlp.router", 0).std() > 0.1 and not np.array_equal(*(reader.read("blocks.mlp.router", n) for n in (0, 1)))
    np.testing.assert_allclose(logits_of(tmp_path / "moe"), logits_of(dense), atol=2e-5)
    if family == "llama":
        run(upcycle, imported, tmp_path / "of-run", "--experts", "5")
        other = ParamReader(tmp_path / "of-run" / "checkpoints")
        assert all(np.array_equal(reader.read(path, 0), other.read(path, 0)) for path in reader.shapes if path.startswith("blocks."))
        run(to_hf, tmp_path / "moe", tmp_path / "exported")
        assert json.loads((tmp_path / "exported" / "config.json").read_text())["architectures"] == ["MixtralForCausalLM"]
        assert open_hf(tmp_path / "exported").model == load_model(tmp_path / "moe").source.config.model
        assert (tmp_path / "of-run" / "tokenizer" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()


def test_reinitialized_dims_are_the_same_in_the_three_matrices_and_keep_mean_and_deviation():
    rng = np.random.default_rng(0)
    dense = {
        f"blocks.mlp.{name}": rng.normal(0.3, 0.2, (64, 48) if name != "down" else (48, 64)).astype(np.float32)
        for name in ("gate", "up", "down")
    }
    model = MODEL.model_copy(update={"num_layers": 1, "embed_dim": 64})
    read = lambda path, layer: dense.get(path, np.zeros(1, np.float32))  # noqa: E731
    made = {path: values for path, _, values in Upcycling(3, reinitialized=0.25).slices(model, read, np.dtype(np.float32))}
    changed = []
    for name in ("gate", "up", "down"):
        old = dense[f"blocks.mlp.{name}"]
        new_DEF = made[f"blocks.mlp.{name}"]
        differs_EF = (new_DEF != (old.T if name == "down" else old)[:, None]).all(0)
        assert (differs_EF.sum(1) == 12).all()
        drawn = new_DEF[:, differs_EF]
        assert drawn.mean() == pytest.approx(0.3, abs=0.03) and drawn.std() == pytest.approx(0.2, abs=0.02)
        changed.append(differs_EF)
    assert (changed[0] == changed[1]).all() and (changed[0] == changed[2]).all() and (changed[0][0] != changed[0][1]).any()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"family": "gpt2"}, {"experts": 4}, r"'gpt2' has no counterpart with experts \(supported: llama, mistral, qwen3\)"),
        ({}, {"experts": 4, "experts_per_token": 5}, "model.moe.experts_per_token: must be at most model.moe.experts=4"),
        ({"moe": MoEConfig()}, {"experts": 4}, "has experts already"),
        ({"attention_bias": True, "output_bias": True}, {"experts": 4}, "model.attention_bias = true is not supported by .*Mixtral"),
    ],
)
def test_models_that_cannot_be_upcycled_are_refused(changes, arguments, message):
    with pytest.raises(UserError, match=message):
        Upcycling(**arguments).model(MODEL.model_copy(update=changes))
