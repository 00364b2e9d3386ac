"""Multi-token prediction against an implementation in PyTorch, assembled from the modules of transformers."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config, DataConfig, LossConfig
from ridgeline.loaders.rows import with_future_targets
from ridgeline.models.families.deepseek_v3 import with_modules
from ridgeline.models.huggingface.convert import (
    HfCheckpoint,
    export_weights,
    hf_config,
    model_from_hf,
    open_hf,
    parameter_shapes,
    tensor_rules,
)
from ridgeline.models.huggingface.safetensors_stream import read_directory
from ridgeline.models.loss import loss_of
from ridgeline.models.mtp import future_tokens
from ridgeline.sharding.partition import Partitioner
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import COMPUTE, VARIANTS, Variant, build_ours, random_tokens, save_random_model
from tests.parity.test_families import stored_gradients

pytestmark = pytest.mark.parity
ROWS, LENGTH, WEIGHT = 2, 13, 0.7
ENDS = [[5, 10, 13], [6, 13, 13]]
"""Ends of the documents of each row; the last three tokens of the second row are padding where they are in no document."""


class TheirModule(torch.nn.Module):
    """What a module has beside its block, named as in the published checkpoints (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.shared_head = torch.nn.ModuleDict({"norm": LlamaRMSNorm(width, eps)})


def packed_rows(vocab: int) -> dict[str, np.ndarray]:
    tokens = random_tokens((ROWS, LENGTH + 1), vocab, seed=3)
    segments = np.array([[1 + sum(at >= end for end in ends) for at in range(LENGTH)] for ends in ENDS], np.int32)
    starts = np.array([[max([0, *(end for end in ends if end <= at)]) for at in range(LENGTH)] for ends in ENDS])
    inside = np.concatenate([segments[:, 1:] == segments[:, :-1], np.ones((ROWS, 1), bool)], axis=1)
    masked = np.random.default_rng(0).random((ROWS, LENGTH)) < 0.2
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": (np.arange(LENGTH) - starts).astype(np.int32),
        "segment_ids": segments,
        "weights": (inside & ~masked).astype(np.float32),
    }


def their_losses(model: Any, modules: list[TheirModule], rows: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of the model and of its modules, document by document."""
    blocks = model.model.layers[model.config.num_hidden_layers :]
    main, further = torch.zeros(()), torch.zeros(())
    for row in range(ROWS):
        for segment in range(1, rows["segment_ids"][row].max() + 1):
            at = np.flatnonzero(rows["segment_ids"][row] == segment)
            ids = torch.from_numpy(np.append(rows["tokens"][row, at], rows["targets"][row, at[-1]])).long()
            weights = torch.from_numpy(rows["weights"][row, at])
            hidden = model.model(ids[None, :-1]).last_hidden_state
            main = main + (weights * torch.nn.functional.cross_entropy(model.lm_head(hidden)[0], ids[1:], reduction="none")).sum()
            for k, module in enumerate(modules, start=1):
                count = len(at) - k  # tokens i whose token i + k + 1 is a target of the document
                if count < 1:
                    break
                embedded = model.model.embed_tokens(ids[None, k : k + count])
                x = module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(hidden[:, :count])], dim=-1))
                positions = torch.arange(count)[None]
                mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
                x = blocks[k - 1](x, attention_mask=mask, position_ids=positions, position_embeddings=model.model.rotary_emb(x, positions))
                hidden = module.shared_head["norm"](x if isinstance(x, torch.Tensor) else x[0])
                nats = torch.nn.functional.cross_entropy(model.lm_head(hidden)[0], ids[1 + k : 1 + k + count], reduction="none")
                further = further + (weights[k : k + count] * nats).sum()
    return main, further


def saved_model(name: str, modules: int, directory: Any) -> tuple[Any, list[TheirModule]]:
    """Write a random model with modules as layers after its own; return it, with their blocks as its last layers, and the modules."""
    variant = VARIANTS[name]
    layers = variant.arguments["num_hidden_layers"]
    theirs = save_random_model(Variant(variant.kind, variant.arguments | {"num_hidden_layers": layers + modules}), directory)
    theirs.config.num_hidden_layers = layers
    path, made = directory / "model.safetensors", []
    tensors = load_file(path)
    for k in range(modules):
        module = TheirModule(theirs.config.hidden_size, theirs.config.rms_norm_eps)
        with torch.no_grad():
            for each, value in module.named_parameters():
                value.copy_(("norm" in each) * 1.0 + 0.15 * torch.randn_like(value))
                tensors[f"model.layers.{layers + k}.{each}"] = value.numpy()
        made.append(module)
    tensors |= {f"model.layers.{layers}.embed_tokens.weight": tensors["model.embed_tokens.weight"]} if name == "deepseek-v3" else {}
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers} | ({"num_nextn_predict_layers": modules} if name == "deepseek-v3" else {})
    (directory / "config.json").write_text(json.dumps(config))
    return theirs, made


def opened(directory: Any, modules: int) -> HfCheckpoint:
    """The weights with their modules, of a family that Hugging Face stores them of, or not."""
    config = json.loads((directory / "config.json").read_text())
    described = model_from_hf(config)
    model = described.model_copy(update={"mtp_layers": modules})
    if described.family == "deepseek_v3":
        return open_hf(directory, model)
    rules = with_modules(tensor_rules(described), model)
    return HfCheckpoint(directory, config, model, dict(read_directory(directory)), rules, parameter_shapes(model))


@pytest.mark.parametrize(("name", "modules"), [("deepseek-v3", 1), ("llama2", 2)])
def test_losses_and_gradients_agree_on_packed_rows(name, modules, tmp_path):
    theirs, further = saved_model(name, modules, tmp_path / "hf")
    checkpoint = opened(tmp_path / "hf", modules)
    config = Config(
        model=checkpoint.model, compute=COMPUTE, data=DataConfig(batch_size=ROWS, seq_len=LENGTH), loss=LossConfig(mtp_weight=WEIGHT)
    )
    rows = packed_rows(theirs.config.vocab_size)
    batch, partitioner = with_future_targets(rows, modules), Partitioner.single()
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_ours(checkpoint.model)), nnx.Param)
    place = partitioner.replicated()
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), nnx.to_pure_dict(state))

    def objective(params: Any) -> Any:
        decoder = nnx.merge(graphdef, params)
        x, _ = decoder.forward(batch["tokens"], batch["positions"], batch["segment_ids"], None, future_tokens(batch))
        sums = loss_of(decoder, config, partitioner, x, batch)
        alone = decoder(batch["tokens"], batch["positions"], batch["segment_ids"])
        return sums.objective, (sums, x[:: 1 + modules] - alone)

    run = jax.jit(jax.value_and_grad(objective, has_aux=True), compiler_options=QUICK_COMPILE)
    (value, (sums, difference)), grads = run(checkpoint.load(abstract))
    assert not np.any(difference)  # the modules do not change the model
    main, of_modules = their_losses(theirs, further, rows)
    expected = main + WEIGHT / modules * of_modules
    np.testing.assert_allclose([sums.nats, sums.mtp.nats, value], [main.item(), (expected - main).item(), expected.item()], rtol=1e-5)
    assert 0 < sums.mtp.weight < WEIGHT * sums.weight
    expected.backward()
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]
    }
    layers = theirs.config.num_hidden_layers
    gradients = stored_gradients(theirs, tmp_path)
    gradients |= {
        f"model.layers.{layers + k}.{each}": p.grad.numpy() for k, one in enumerate(further) for each, p in one.named_parameters()
    }
    for rule in checkpoint.rules:
        for at, expert in rule.places(checkpoint.shapes):
            values = {path: found[path] if at is None else found[path][at] for path in rule.params}
            values = values if expert is None else {path: value[:, expert] for path, value in values.items()}
            ours, wanted = rule.export(values, checkpoint.model.vocab_size), gradients.pop(rule.name(at, expert))
            error = np.linalg.norm(ours - wanted) / (np.linalg.norm(wanted) or 1.0)
            assert error < 1e-4, f"{rule.name(at, expert)}: relative error {error:.2e}"
    assert not gradients


def test_modules_are_read_where_wanted_and_written_back_bitwise(tmp_path):
    saved_model("deepseek-v3", 1, tmp_path / "hf")
    assert open_hf(tmp_path / "hf").model.mtp_layers == 0  # they are skipped
    checkpoint, stored = opened(tmp_path / "hf", 1), load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "again").mkdir()
    export_weights(
        checkpoint.model, lambda path, layer: checkpoint.read_layer(path, layer, np.dtype("float32")), tmp_path / "again", "float32"
    )
    written = load_file(tmp_path / "again" / "model.safetensors")
    copies = {name for name in stored if name.endswith("3.embed_tokens.weight")}  # as published; the model's own is used
    assert len(copies) == 1 and written.keys() == stored.keys() - copies
    assert all(np.array_equal(written[name], stored[name]) for name in written)
    assert hf_config(checkpoint.model, "float32", {})["num_nextn_predict_layers"] == 1
    with pytest.raises(UserError, match=r"model\.mtp_layers = 2 \(checkpoint: 1\)"):
        open_hf(tmp_path / "hf", checkpoint.model.model_copy(update={"mtp_layers": 2}))
    llama = model_from_hf(VARIANTS["llama2"].config().to_dict() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UserError, match=r"model\.mtp_layers = 1 is not supported by Hugging Face's LlamaForCausalLM"):
        hf_config(llama.model_copy(update={"mtp_layers": 1}), "float32", {})
