"""Adapters against peft's on the same tiny Llama: logits, gradients, the stored format in both directions, and the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config, MeshConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config
from ridgeline.models.huggingface.peft import adapter_tensors, export_adapter, merged, open_adapter
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.step import loss_sums
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import VARIANTS, load_theirs, random_tokens, save_random_model

pytestmark = pytest.mark.parity
KINDS = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "some targets, rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
}


@pytest.fixture(scope="module", params=list(KINDS))
def adapted(request, tmp_path_factory):
    """An adapter directory of peft with random values, and peft's model."""
    root = tmp_path_factory.mktemp("lora")
    save_random_model(VARIANTS["llama3"], root / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **KINDS[request.param])
    theirs = peft.get_peft_model(load_theirs(root / "base"), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(root / "adapter")
    return root / "adapter", theirs.eval(), load_model(root / "adapter", adapt=on_one_device)


def on_one_device(config: Config) -> Config:
    return config.model_copy(update={"mesh": MeshConfig(fsdp=1)})


def their_logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.from_numpy(tokens).long()).logits.numpy()


@jax.jit
def our_logits(decoder, tokens):
    return decoder.logits(decoder(tokens))


def by_path(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def test_logits_and_gradients_equal_those_of_peft(adapted):
    _, theirs, loaded = adapted
    compare(theirs, loaded)


def compare(theirs, loaded):
    tokens = random_tokens((2, 33))
    np.testing.assert_allclose(np.asarray(our_logits(loaded.decoder, tokens)), their_logits(theirs, tokens), atol=2e-5, rtol=0)

    logits = theirs(torch.from_numpy(tokens[:, :-1]).long()).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(tokens[:, 1:]).long().flatten(), reduction="sum").backward()
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    shape = (2, 32)
    batch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:]), "weights": jnp.ones(shape)}
    batch |= {"positions": jnp.broadcast_to(jnp.arange(32), shape), "segment_ids": jnp.ones(shape, jnp.int32)}
    trained, frozen = loaded.spec.split(loaded.params)

    def nats(trained):
        return loss_sums(loaded.spec, loaded.config, loaded.partitioner, loaded.spec.join(trained, frozen), batch)[0].nats

    ours = by_path(jax.jit(jax.grad(nats), compiler_options=QUICK_COMPILE)(trained))
    for tensor in adapter_tensors(loaded.model, loaded.config.lora):
        for layer, gradient in enumerate(ours.pop(tensor.path)):
            part = {"a": "lora_A.default.weight", "b": "lora_B.default.weight", "magnitude": "lora_magnitude_vector.default.weight"}
            wanted = expected.pop(f"base_model.model.{tensor.module(layer)}.{part[tensor.part]}")
            assert np.linalg.norm(tensor.to_hf(gradient) - wanted) <= 1e-5 * np.linalg.norm(wanted), (tensor.path, layer)
    assert not ours and not expected


def test_a_base_in_8_bits_equals_peft_on_weights_that_torch_quantized(tmp_path):
    """Symmetric, a scale per output; embeddings, norms and the output head are not quantized. Merging adds to the dequantized weights."""
    save_random_model(VARIANTS["llama3"], tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True)
    theirs = peft.get_peft_model(load_theirs(tmp_path / "base"), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    unquantized = their_logits(theirs.eval(), random_tokens((2, 16), seed=4))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("_proj.weight", "base_layer.weight")):
                scale = parameter.abs().amax(1, keepdim=True) / 127
                parameter.copy_(torch.round(parameter / scale) * scale)

    def in_8_bits(config: Config) -> Config:
        return on_one_device(config).model_copy(update={"lora": config.lora.model_copy(update={"base": "int8"})})

    loaded = load_model(tmp_path / "adapter", adapt=in_8_bits)
    stored = by_path(loaded.params)
    assert sum(values.dtype == np.int8 for values in stored.values()) == 7
    compare(theirs, loaded)
    assert not np.allclose(their_logits(theirs, random_tokens((2, 16), seed=4)), unquantized, atol=2e-4, rtol=0)

    (tmp_path / "merged").mkdir()
    export_weights(loaded.model, merged(read_of(loaded), loaded.model, loaded.config.lora), tmp_path / "merged", "float32")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(hf_config(loaded.model, "float32", {})))
    tokens = random_tokens((2, 16), seed=3)
    ours = their_logits(load_theirs(tmp_path / "merged"), tokens)
    np.testing.assert_allclose(ours, their_logits(theirs.merge_and_unload().eval(), tokens), atol=2e-5, rtol=0)


def read_of(loaded):
    values = by_path(loaded.params)
    return lambda path, layer: values[path] if layer is None else values[path][layer]


def test_an_exported_adapter_is_bitwise_that_of_peft_and_peft_loads_it(adapted, tmp_path):
    directory, theirs, loaded = adapted
    export_adapter(loaded.model, loaded.config.lora, read_of(loaded), tmp_path, str(directory.parent / "base"), "float32")
    ours, stored = (load_file(place / "adapter_model.safetensors") for place in (tmp_path, directory))
    assert ours.keys() == stored.keys()
    assert all(np.array_equal(ours[name], stored[name]) for name in ours)
    again = peft.PeftModel.from_pretrained(load_theirs(directory.parent / "base"), tmp_path).eval()
    tokens = random_tokens((2, 16), seed=2)
    np.testing.assert_array_equal(their_logits(again, tokens), their_logits(theirs, tokens))
    assert open_adapter(tmp_path, loaded.model).lora == loaded.config.lora


def test_the_merged_model_equals_that_of_peft(adapted, tmp_path):
    directory, _, loaded = adapted
    read = merged(read_of(loaded), loaded.model, loaded.config.lora)
    export_weights(loaded.model, read, tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(loaded.model, "float32", {})))
    tokens = random_tokens((2, 16), seed=3)
    merged_by_peft = peft.PeftModel.from_pretrained(load_theirs(directory.parent / "base"), directory).merge_and_unload().eval()
    ours = their_logits(load_theirs(tmp_path), tokens)
    np.testing.assert_allclose(ours, their_logits(merged_by_peft, tokens), atol=2e-5, rtol=0)
    np.testing.assert_allclose(ours, np.asarray(our_logits(loaded.decoder, tokens)), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 is not supported (allowed: LORA)"),
        ({"bias": "all"}, "bias=all: trained biases are not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules are not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern: ranks that differ by layer are not supported"),
        ({"r": None}, "lacks 'r'"),
        ({"r": "four"}, "'r' is 'four'"),
        ({"r": 3}, "is F32[4, 32], not of shape [3, 32]"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"base_model_name_or_path": "org/absent"}, "its base model 'org/absent' is no directory here"),
        ({"base_model_name_or_path": None}, "it names no base model; write the base's path to base_model_name_or_path"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4 changed the base model"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: block-diagonal LoRA"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_imported_is_refused_by_name(changes, message, tmp_path):
    save_random_model(VARIANTS["llama3"], tmp_path / "base")
    peft.get_peft_model(load_theirs(tmp_path / "base"), peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as caught:
        load_model(Path(path.parent))
    assert message in str(caught.value)
