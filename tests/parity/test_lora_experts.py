"""Adapters of routed experts against peft's on tiny models with experts: logits, gradients, the stored format, the merged model."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

from ridgeline.configs.errors import UserError
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config, open_hf, parameter_shapes
from ridgeline.models.huggingface.peft import export_adapter, merged, open_adapter
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.step import loss_sums
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import VARIANTS, load_theirs, random_tokens, save_random_model
from tests.parity.test_lora import by_path, on_one_device, our_logits, read_of, their_logits

pytestmark = pytest.mark.parity
RANK = 3
TARGETS = ["query", "expert_gate", "expert_up", "expert_down"]


@pytest.fixture(scope="module", params=["qwen3-moe", "mixtral"])
def adapted(request, tmp_path_factory):
    """An adapter directory of ours with random values, peft's model of it, and ours."""
    root = tmp_path_factory.mktemp("experts")
    save_random_model(VARIANTS[request.param], root / "base")
    model, lora = open_hf(root / "base").model, LoraConfig(rank=RANK, alpha=5, targets=TARGETS)
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(model, lora)
    values = {path: 0.2 * rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items() if ".adapters." in path}
    (root / "adapter").mkdir()
    export_adapter(model, lora, lambda path, layer: values[path][layer], root / "adapter", str(root / "base"), "float32")
    theirs = peft.PeftModel.from_pretrained(load_theirs(root / "base"), root / "adapter", is_trainable=True).eval()
    return root, theirs, load_model(root / "adapter", adapt=on_one_device), values


def test_logits_equal_those_of_peft_and_the_adapters_matter(adapted):
    root, theirs, loaded, values = adapted
    tokens = random_tokens((2, 33))
    ours = np.asarray(our_logits(loaded.decoder, tokens))
    np.testing.assert_allclose(ours, their_logits(theirs, tokens), atol=5e-5, rtol=0)
    assert np.abs(ours - their_logits(load_theirs(root / "base"), tokens)).max() > 0.1
    read = by_path(loaded.params)
    assert all(np.array_equal(read[path], value) for path, value in values.items())


def their_gradients(theirs, experts: int, hidden: int) -> dict[tuple[str, int], np.ndarray]:
    """Path of our parameter and layer -> gradient. peft stores gate and up as one parameter of rank 2 x RANK, whose B is block-diagonal."""
    found = {}
    for name, parameter in theirs.named_parameters():
        if ".experts." not in name or parameter.grad is None:
            continue
        layer, grad = int(name.split("layers.")[1].split(".")[0]), parameter.grad.numpy()
        if "base_layer" in name and "lora_A" in name:
            whole = grad.reshape(experts, 2 * RANK, -1).transpose(2, 0, 1)
            found["gate.a", layer], found["up.a", layer] = whole[..., :RANK], whole[..., RANK:]
        elif "base_layer" in name:
            whole = grad.reshape(2 * hidden, 2 * RANK, experts).transpose(1, 2, 0)
            found["gate.b", layer], found["up.b", layer] = whole[:RANK, :, :hidden], whole[RANK:, :, hidden:]
        elif "lora_A" in name:
            found["down.a", layer] = grad.reshape(experts, RANK, -1).transpose(2, 0, 1)
        else:
            found["down.b", layer] = grad.reshape(-1, RANK, experts).transpose(1, 2, 0)
    return found


def test_gradients_equal_those_of_peft(adapted):
    _, theirs, loaded, _ = adapted
    tokens = random_tokens((2, 33))
    logits = theirs(torch.from_numpy(tokens[:, :-1]).long()).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(tokens[:, 1:]).long().flatten(), reduction="sum").backward()
    expected = their_gradients(theirs, loaded.model.moe.experts, loaded.model.expert_width)
    shape = (2, 32)
    batch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:]), "weights": jnp.ones(shape)}
    batch |= {"positions": jnp.broadcast_to(jnp.arange(32), shape), "segment_ids": jnp.ones(shape, jnp.int32)}
    trained, frozen = loaded.spec.split(loaded.params)

    def nats(trained):
        return loss_sums(loaded.spec, loaded.config, loaded.partitioner, loaded.spec.join(trained, frozen), batch)[0].nats

    ours = by_path(jax.jit(jax.grad(nats), compiler_options=QUICK_COMPILE)(trained))
    for (path, layer), wanted in expected.items():
        got = ours[f"blocks.mlp.adapters.{path}"][layer - loaded.model.dense_layers]
        assert np.linalg.norm(got - wanted) <= 2e-5 * np.linalg.norm(wanted), (path, layer)
    assert len(expected) == 6 * loaded.model.moe_layers


def test_exports_are_bitwise_and_the_merged_model_computes_the_same(adapted, tmp_path):
    root, _, loaded, _ = adapted
    (tmp_path / "again").mkdir()
    export_adapter(loaded.model, loaded.config.lora, read_of(loaded), tmp_path / "again", str(root / "base"), "float32")
    ours, stored = (load_file(place / "adapter_model.safetensors") for place in (tmp_path / "again", root / "adapter"))
    assert ours.keys() == stored.keys()
    assert all(np.array_equal(ours[name], stored[name]) for name in ours)
    assert open_adapter(tmp_path / "again", loaded.model).lora == loaded.config.lora
    (tmp_path / "merged").mkdir()
    export_weights(loaded.model, merged(read_of(loaded), loaded.model, loaded.config.lora), tmp_path / "merged", "float32")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(hf_config(loaded.model, "float32", {})))
    tokens = random_tokens((2, 16), seed=3)
    whole = their_logits(load_theirs(tmp_path / "merged"), tokens)
    np.testing.assert_allclose(whole, np.asarray(our_logits(loaded.decoder, tokens)), atol=5e-5, rtol=0)
    some = loaded.config.lora.model_copy(update={"targets": ["expert_up"]})
    with pytest.raises(UserError, match="peft loads adapters of all matrices of the routed experts or of none"):
        export_adapter(loaded.model, some, read_of(loaded), tmp_path / "again", None, "float32")
