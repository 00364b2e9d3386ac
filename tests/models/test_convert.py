"""Import and export of Hugging Face directories: sharding, padding, errors."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import MeshConfig
from ridgeline.models.family import families
from ridgeline.models.huggingface.convert import (
    export_weights,
    hf_config,
    model_from_hf,
    open_hf,
    parameter_shapes,
    tensor_rules,
    text_part,
)
from ridgeline.models.huggingface.safetensors_stream import read_header
from ridgeline.models.huggingface.tensor_map import TensorRule
from ridgeline.sharding.mesh import build_mesh

LLAMA = ModelConfig(vocab_size=40, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=6, mlp_dim=48, max_seq_len=64)
GPT2 = ModelConfig.model_validate(
    {
        "family": "gpt2",
        "vocab_size": 40,
        "num_layers": 2,
        "embed_dim": 32,
        "num_heads": 4,
        "mlp_dim": 64,
        "max_seq_len": 32,
        "norm": "layernorm",
        "position": "learned",
        "gated_mlp": False,
        "activation": "gelu_tanh",
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    }
)
ROOT = "model.layers.1.self_attn.q_proj.weight"


def random_values(model):
    rng = np.random.default_rng(0)
    return {path: rng.standard_normal(shape, dtype=np.float32) for path, shape in parameter_shapes(model).items()}


def write_hf(directory, model, **changes):
    values = random_values(model)
    directory.mkdir(exist_ok=True)
    export_weights(model, lambda path, layer: values[path] if layer is None else values[path][layer], directory, "float32")
    (directory / "config.json").write_text(json.dumps({**hf_config(model, "float32", {}), **changes}))
    return values


def rewrite(directory, change):
    """Apply `change` to the dict of tensors, through the reference implementation of safetensors."""
    path = directory / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(path))
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}], ids=str)
def test_every_device_gets_its_block_whatever_the_sharding(tmp_path, model, mesh):
    values = write_hf(tmp_path, model)
    checkpoint = open_hf(tmp_path)
    devices = build_mesh(MeshConfig(**{"fsdp": 1, **mesh}))

    def sharding(shape):
        """Split the two largest dims that divide, so that columns, rows, heads and layers are all cut."""
        spec = [None] * len(shape)
        free = [axis for axis in ("fsdp", "tensor") if devices.shape[axis] > 1]
        for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
            if free and shape[dim] % devices.shape[free[0]] == 0:
                spec[dim] = free.pop(0)
        return NamedSharding(devices, PartitionSpec(*spec))

    abstract = {path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(shape)) for path, shape in checkpoint.shapes.items()}
    for path, array in checkpoint.load(abstract).items():
        assert array.sharding == abstract[path].sharding
        np.testing.assert_array_equal(np.asarray(array), values[path], err_msg=path)


@pytest.mark.parametrize("path", ["blocks.attention.query", "blocks.attention.out", "blocks.mlp.down", "output", "embedding"])
def test_any_block_of_a_parameter_can_be_read(tmp_path, path):
    values = write_hf(tmp_path, LLAMA)
    checkpoint = open_hf(tmp_path)
    rng = np.random.default_rng(1)
    for _ in range(20):
        cuts = [sorted(rng.integers(0, size, 2)) for size in values[path].shape]
        index = tuple(slice(int(a), int(b) + 1) for a, b in cuts)
        np.testing.assert_array_equal(checkpoint.read(path, np.dtype(np.float32), index), values[path][index])


def test_a_padded_vocabulary_is_zero_on_import_and_dropped_on_export(tmp_path):
    values = write_hf(tmp_path / "hf", LLAMA)
    padded = LLAMA.model_copy(update={"pad_vocab_to": 48})
    checkpoint = open_hf(tmp_path / "hf", padded)
    float32 = np.dtype(np.float32)
    for path, axis in (("embedding", 0), ("output", 1)):
        table = checkpoint.read(path, float32)
        assert table.shape[axis] == 48
        np.testing.assert_array_equal(np.take(table, range(40), axis), values[path])
        assert not np.take(table, range(40, 48), axis).any()
    (tmp_path / "back").mkdir()
    export_weights(padded, lambda path, layer: checkpoint.read_layer(path, layer, float32), tmp_path / "back", "float32")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()


def test_the_reference_implementation_reads_exported_files(tmp_path):
    values = write_hf(tmp_path, LLAMA)
    theirs = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(theirs["model.layers.1.mlp.up_proj.weight"], values["blocks.mlp.up"][1].T)
    np.testing.assert_array_equal(theirs[ROOT], values["blocks.attention.query"][1].reshape(32, 48).T)
    assert len(theirs) == 3 + 2 * 9


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_rules_map_every_parameter_once(model):
    held = [path for rule in tensor_rules(model) for path in rule.params]
    assert sorted(held) == sorted(parameter_shapes(model))


def test_checkpoints_of_the_base_model_and_old_buffers_are_read(tmp_path):
    values = write_hf(tmp_path, GPT2)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
        tensors["lm_head.weight"] = tensors["wte.weight"]

    rewrite(tmp_path, strip)
    np.testing.assert_array_equal(open_hf(tmp_path).read("blocks.attention.key", np.dtype(np.float32)), values["blocks.attention.key"])


def drop(tensors):
    del tensors[ROOT], tensors["model.norm.weight"]


def add(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)


def reshape(tensors):
    tensors[ROOT] = np.zeros((48, 31), np.float32)


def quantize(tensors):
    tensors[ROOT] = np.zeros((48, 32), np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, f"lacks 2 of 21 tensors: model.norm.weight, {ROOT}"),
        (add, "1 tensors .*: model.layers.2.mlp.up_proj.weight"),
        (reshape, rf"{ROOT} is \[48, 31\], not \[48, 32\]"),
        (quantize, rf"unsupported dtype: {ROOT} \(I8\)"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    write_hf(tmp_path, LLAMA)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        open_hf(tmp_path)


def test_a_tied_model_with_another_head_is_refused(tmp_path):
    write_hf(tmp_path, GPT2)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": np.ones((40, 32), np.float32)}))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        open_hf(tmp_path)


PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_json_gives_the_preset(tmp_path, monkeypatch, preset):
    """As `hf:DIR` on a command line, in a `base:`, and with overrides; our export of it gives the same model again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(PUBLISHED[preset]))
    (tmp_path / "own.yaml").write_text("base: ['hf:published']\ntrainer:\n  steps: 7\n")
    loaded, based = load("hf:published", ["trainer.steps=7"]), load("own.yaml")
    assert loaded.config == based.config
    assert loaded.source("model.num_layers").text == "published/config.json"
    found, wanted = loaded.config.model, load(f"models/{preset}").config.model
    assert resolved_dims(found) == resolved_dims(wanted)
    assert resolved_dims(model_from_hf(hf_config(wanted, "bfloat16", {}))) == resolved_dims(wanted)


def resolved_dims(model):
    """The model section with derived values in place of null."""
    return {**model.model_dump(), "num_kv_heads": model.kv_heads, "head_dim": model.head_width}


def test_the_layer_for_multi_token_prediction_and_quantized_weights_are_not_read(tmp_path):
    """As published: DeepSeek V3 has one more layer than num_hidden_layers, and its weights are block-scaled fp8."""
    short = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 8, "vocab_size": 40}
    small = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 16, "first_k_dense_replace": 1, "q_lora_rank": 12}
    published = PUBLISHED["deepseek-v3-671b"] | short | small
    write_hf(tmp_path, model_from_hf(published), num_nextn_predict_layers=1)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": np.zeros((32, 64), np.float32)}))
    assert open_hf(tmp_path).model.num_layers == 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"1 tensors that the model does not have: model.layers.2.eh_proj.weight"):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": published["quantization_config"]}))
    with pytest.raises(UserError, match=r"quantized weights \(quantization_config, fp8\) are not supported"):
        open_hf(tmp_path)


def test_the_text_part_of_a_multimodal_directory_is_read(tmp_path):
    """As Llama 4 is published: another config.json around that of the text model, a prefix, and tensors of the vision encoder."""
    sizes = {
        "num_hidden_layers": 5,
        "hidden_size": 24,
        "intermediate_size": 8,
        "intermediate_size_mlp": 20,
        "vocab_size": 40,
        "head_dim": 6,
    }
    small = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "no_rope_layers": None, "moe_layers": None}
    outer = PUBLISHED["llama-4-maverick-17b-128e"]
    config = outer | {"text_config": outer["text_config"] | sizes | small}
    values = write_hf(tmp_path, model_from_hf(config))

    def wrap(tensors):
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_model.class_embedding"] = np.zeros(3, np.float32)

    rewrite(tmp_path, wrap)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_hf(tmp_path)
    assert found.model == model_from_hf(config)
    for path, value in values.items():
        np.testing.assert_array_equal(found.read(path, np.dtype(np.float32)), value)


def test_every_family_has_a_published_config_json():
    families_here = {model_from_hf(config).family for config in PUBLISHED.values()}
    assert families_here >= set(families())


def test_a_directory_or_model_that_is_not_known_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(UserError, match=r"no such Hugging Face directory: .*absent"):
        load(f"hf:{tmp_path / 'absent'}")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    with pytest.raises(UserError, match=r"model_type 'mamba' is not supported \(allowed: .*Gemma2ForCausalLM \(gemma2\).*Qwen3ForCausalLM"):
        load(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, r"did you mean 'LlamaForCausalLM'.*allowed: .*GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
        (
            {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            r"'GemmaForCausalLM' with model_type 'gemma' is not supported \(al",
        ),
        ({"architectures": ["GemmaForCausalLM"], "model_type": None}, r"'GemmaForCausalLM' is not supported \(allowed"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, r"is not supported \(allowed"),
        ({"model_type": "gemma"}, r"'LlamaForCausalLM' with model_type 'gemma' is not supported \(allowed"),
        ({"model_type": "mistral"}, "'LlamaForCausalLM' with model_type 'mistral' is not supported; did you mean 'MistralForCausalLM'"),
        ({"architectures": ["MistralForCausalLM"]}, r"'MistralForCausalLM' with model_type 'llama' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' is 'LlamaForCausalLM', expected list"),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "'hidden_size' is '32', expected int"),
        ({"num_hidden_layers": 0}, "model.num_layers = 0"),
        ({"hidden_act": "silo"}, "unknown activation.*did you mean 'silu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "unknown rope type.*'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}}, "beta_fast = 16 is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config, gptq"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes'"),
    ],
)
def test_unsupported_config_features_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        model_from_hf({**hf_config(LLAMA, "float32", {}), **changes})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "max_window_layers = 1"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has full_attention, sliding_attention"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = full_attention, sliding_attention is not supp"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "rope_type = 'yarn' is not supported"),
        ("llama4", {"layer_types": ["chunked_attention"] * 2}, "layer_types = .* is not supported"),
        ("llama4", {"no_rope_layers": [0, 0]}, "no_rope_layers = 0, 0 is not supported"),
        ("llama4", {"moe_layers": [0], "no_rope_layers": None}, "moe_layers = 0 is not supported"),
        ("llama4", {"attention_chunk_size": None}, "config.json lacks 'attention_chunk_size'"),
        ("phi3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "unknown rope type in config.json 'longrope'"),
    ],
)
def test_unsupported_family_features_are_refused(family, changes, message):
    own = {"gpt2": GPT2, "qwen2": LLAMA.model_copy(update={"family": "qwen2", "attention_bias": True})}
    published = {"gemma2": "gemma2-2b", "olmo3": "olmo3-7b", "phi3": "phi3-mini", "llama4": "llama-4-scout-17b-16e"}
    short = {"num_hidden_layers": 2, "layer_types": None}
    config = hf_config(own[family], "float32", {}) if family in own else dict(text_part(PUBLISHED[published[family]])[0]) | short
    changes = {"no_rope_layers": [1, 0], **changes} if family == "llama4" else changes
    with pytest.raises(UserError, match=message):
        model_from_hf({**config, **changes})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LLAMA.model_copy(update={"attention_bias": True}), r"model.output_bias = false .* LlamaForCausalLM \(only true\)"),
        (LLAMA.model_copy(update={"qk_norm": True}), "model.qk_norm = true"),
        (LLAMA.model_copy(update={"sliding_window": 8}), r"model.sliding_window = 8 .* \(only null\)"),
        (LLAMA.model_copy(update={"norm": "layernorm"}), "model.norm = layernorm"),
        (LLAMA.model_copy(update={"family": "qwen2"}), "model.attention_bias = false"),
        (LLAMA.model_copy(update={"family": "qwen3"}), "model.qk_norm = false"),
        (GPT2.model_copy(update={"sliding_window": 4}), "model.sliding_window = 4"),
        (GPT2.model_copy(update={"logit_softcap": 30.0}), "model.logit_softcap = 30.0"),
        (LLAMA.model_copy(update={"attention_softcap": 50.0}), "model.attention_softcap = 50.0"),
        (LLAMA.model_copy(update={"family": "qwen3", "qk_norm": True, "qk_norm_dims": "all_heads"}), "model.qk_norm_dims = all_heads"),
        (LLAMA.model_copy(update={"family": "mistral", "norm_position": "both"}), "model.norm_position = both"),
        (LLAMA.model_copy(update={"family": "mistral", "rotary_fraction": 0.5}), "model.rotary_fraction = 0.5"),
        (GPT2.model_copy(update={"num_kv_heads": 2}), "model.kv_heads = 2"),
    ],
)
def test_models_an_architecture_cannot_represent_are_refused_by_key(model, message):
    with pytest.raises(UserError, match=message):
        hf_config(model, "float32", {})


def test_directories_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such Hugging Face directory"):
        open_hf(tmp_path / "absent")
    with pytest.raises(UserError, match=r"has no config\.json"):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(LLAMA, "float32", {})))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no weights in .*found pytorch_model.bin"):
        open_hf(tmp_path)


def test_truncated_and_malformed_weights_are_refused(tmp_path):
    write_hf(tmp_path, LLAMA)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"truncated: tensor '.*' ends at byte"):
        open_hf(tmp_path)
    no_json = b"\x08" + bytes(7) + b"not json"
    for content, message in ((whole[:100], "truncated or not a safetensors file"), (b"", "truncated"), (no_json, "not JSON")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_hf(tmp_path)


def test_a_missing_shard_and_a_wrong_index_are_refused(tmp_path):
    values = random_values(LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(LLAMA, "float32", {})))
    read = lambda path, layer: values[path] if layer is None else values[path][layer]  # noqa: E731
    export_weights(LLAMA, read, tmp_path, "float32", max_shard_bytes=20_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 22_000 for path in shards)
    open_hf(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "ghost": shards[0].name}}))
    with pytest.raises(UserError, match=r"index\.json .*: ghost"):
        open_hf(tmp_path)
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "ghost": "../other.safetensors"}}))
    with pytest.raises(UserError, match="outside its directory"):
        open_hf(tmp_path)
    index.write_text(json.dumps(content))
    shards[1].unlink()
    with pytest.raises(UserError, match=r"cannot read weights file .*00002"):
        open_hf(tmp_path)


def test_weights_of_another_model_are_refused_with_the_differences(tmp_path):
    write_hf(tmp_path, LLAMA)
    wanted = LLAMA.model_copy(update={"num_layers": 3, "norm_eps": 0.5, "rope_theta": 500000.0})
    with pytest.raises(UserError, match=r"model.num_layers = 3 \(.* 2\), model.norm_eps = 0.5 \([^,]*\)$"):
        open_hf(tmp_path, wanted)


def test_weights_too_large_for_float16_are_refused(tmp_path):
    values = random_values(LLAMA)
    values["output"][0, 0] = 1e6
    read = lambda path, layer: values[path] if layer is None else values[path][layer]  # noqa: E731
    with pytest.raises(UserError, match=r"'output' .*too large for float16"):
        export_weights(LLAMA, read, tmp_path, "float16")


def test_column_blocks_read_little_more_than_a_buffer(tmp_path, monkeypatch):
    import ridgeline.models.huggingface.safetensors_stream as stream

    values = write_hf(tmp_path, LLAMA)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 256)
    tensor = read_header(tmp_path / "model.safetensors")[ROOT]
    expected = values["blocks.attention.query"][1].reshape(32, 48).T
    np.testing.assert_array_equal(tensor.read((slice(3, 40), slice(5, 9))), expected[3:40, 5:9])


def test_fused_tensors_concatenate_their_parts():
    rule = TensorRule("c_attn.weight", ("q", "k"), "in_out")
    shapes = {"q": (2, 3, 4), "k": (2, 3, 4)}
    values = {name: np.random.default_rng(i).random((2, 3, 4)) for i, name in enumerate(shapes)}
    fused = rule.export(values, vocab_size=1)
    assert fused.shape == rule.hf_shape(shapes, 1) == (2, 24)
    np.testing.assert_array_equal(fused[:, 12:], values["k"].reshape(2, 12))
