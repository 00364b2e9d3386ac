"""Our decoders against transformers' on the same random weights: logits, gradients, packing, and export."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config, OptimizerConfig
from ridgeline.models.huggingface.convert import export_weights, hf_config, open_hf, parameter_shapes
from ridgeline.models.huggingface.mxfp4 import with_dequantized
from ridgeline.models.huggingface.safetensors_stream import read_directory
from ridgeline.models.loss import cross_entropy
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.state import model_spec
from tests.models.tiny import QUICK_COMPILE
from tests.parity.hugging_face import COMPUTE, FP32, VARIANTS, load_ours, load_theirs, random_tokens, save_random_model
from tests.sampling import drawn

pytestmark = pytest.mark.parity
ROWS, LENGTH = 2, 48


def of(count):
    """The test's `pair` of so many drawn variants. Gradients, import and export are compared of all."""
    return pytest.mark.parametrize("pair", drawn(list(VARIANTS), count), indirect=True)


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    theirs = save_random_model(VARIANTS[request.param], directory)
    return directory, theirs, *load_ours(directory)


def their_logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.from_numpy(np.asarray(tokens)).long()).logits.numpy()


@functools.cache
def forward_pass(graphdef):
    def run(params, *inputs):
        decoder = nnx.merge(graphdef, params)
        return decoder.logits(decoder(*inputs))

    return jax.jit(run, compiler_options=QUICK_COMPILE)


def our_logits(graphdef, params, *inputs):
    return np.asarray(forward_pass(graphdef)(params, *inputs))


@of(12)
def test_logits_agree(pair):
    _, theirs, _, graphdef, params = pair
    tokens = random_tokens((ROWS, LENGTH))
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.3  # the random weights matter
    np.testing.assert_allclose(our_logits(graphdef, params, tokens), expected, atol=1e-4, rtol=0)


@functools.cache
def loss_and_gradients(graphdef, model):
    """The compiled mean loss of next tokens and its gradients, as the trainer computes them."""

    def loss(params, tokens):
        decoder = nnx.merge(graphdef, params)
        sums = cross_entropy(
            decoder(tokens[:, :-1]),
            decoder.unembedding(),
            tokens[:, 1:],
            jnp.ones((ROWS, LENGTH)),
            vocab_size=model.vocab_size,
            chunk=32,
            z_loss=0.0,
            softcap=model.logit_softcap,
            partitioner=Partitioner.single(),
        )
        return sums.nats / sums.weight

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK_COMPILE)


def their_loss(theirs, tokens):
    logits = theirs(torch.from_numpy(tokens[:, :-1]).long()).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.from_numpy(tokens[:, 1:]).long().reshape(-1))


def test_gradients_agree_for_every_parameter(pair, tmp_path):
    _, theirs, checkpoint, graphdef, params = pair
    tokens = random_tokens((ROWS, LENGTH + 1), seed=1)
    theirs.zero_grad()
    their_loss(theirs, tokens).backward()
    ours = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(loss_and_gradients(graphdef, checkpoint.model)(params, tokens)[1])[0]
    }
    gradients = stored_gradients(theirs, tmp_path)
    for rule in checkpoint.rules:
        for place in rule.places(checkpoint.shapes):
            layer, expert = place
            values = {path: ours[path] if layer is None else ours[path][layer] for path in rule.params}
            values = values if expert is None else {path: value[:, expert] for path, value in values.items()}
            mapped, expected = rule.export(values, checkpoint.model.vocab_size), gradients.pop(rule.name(*place))
            error = np.linalg.norm(mapped - expected) / (np.linalg.norm(expected) or 1.0)
            assert error < 1e-3, f"{rule.name(*place)}: relative error {error:.2e}"
    assert not gradients  # no parameter of theirs is left over


@of(8)
def test_ten_optimizer_steps_agree(pair):
    """AdamW of the trainer and of torch, where only matrices decay; the tokens are the same, so that the loss falls."""
    directory, _, checkpoint, graphdef, params = pair
    theirs, config = load_theirs(directory), OptimizerConfig(learning_rate=1e-3, eps=1e-3)  # a smaller eps amplifies rounding errors
    matrices = [p for name, p in theirs.named_parameters() if p.dim() > 1 and not name.endswith("bias")]
    vectors = [p for name, p in theirs.named_parameters() if p.dim() == 1 or name.endswith("bias")]  # biases of experts have two dims
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.b1, config.b2), eps=config.eps)
    axes = model_spec(Config(model=checkpoint.model, compute=COMPUTE, precision=FP32), Partitioner.single()).param_axes
    optimizer = build_optimizer(config, FP32, axes)

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params, learning_rate=jnp.float32(config.learning_rate), key=jax.random.key(0))
        return optax.apply_updates(params, updates), state

    state, losses, expected = optimizer.init(params), [], []
    tokens = random_tokens((ROWS, LENGTH + 1), seed=1)
    for _ in range(10):
        loss, gradients = loss_and_gradients(graphdef, checkpoint.model)(params, tokens)
        params, state = update(gradients, state, params)
        adam.zero_grad()
        wanted = their_loss(theirs, tokens)
        wanted.backward()
        adam.step()
        losses.append(float(loss))
        expected.append(wanted.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert expected[0] - expected[-1] > 100 * 2e-4 * expected[0]  # training changes the loss far more than the tolerance


def stored_gradients(theirs, directory):
    """Their gradients under the names of a checkpoint, which are not those of their modules where these fuse experts."""
    holder = copy.deepcopy(theirs)
    for target, source in zip(holder.parameters(), theirs.parameters(), strict=True):
        target.data = source.grad
    for name, buffer in holder.named_buffers():
        if name.endswith("e_score_correction_bias"):  # no gradient: it affects the choice only
            buffer.zero_()
    holder.save_pretrained(directory / "gradients")
    return load_file(directory / "gradients" / "model.safetensors")


@of(12)
def test_a_packed_row_equals_separate_forward_passes(pair):
    _, theirs, _, graphdef, params = pair
    documents = [random_tokens((1, length), seed=length) for length in (11, 20, 9)]
    padding = 4
    tokens = np.concatenate([*documents, np.zeros((1, padding), np.int32)], axis=1)
    lengths = [document.shape[1] for document in documents]
    positions = np.concatenate([np.arange(length) for length in [*lengths, padding]])[None].astype(np.int32)
    segments = np.repeat([1, 2, 3, 0], [*lengths, padding])[None].astype(np.int32)
    ours = our_logits(graphdef, params, tokens, positions, segments)
    expected = np.concatenate([their_logits(theirs, document) for document in documents], axis=1)
    np.testing.assert_allclose(ours[:, : sum(lengths)], expected, atol=1e-4, rtol=0)


def test_import_export_import_is_bitwise_equal_and_transformers_reads_our_export(pair, tmp_path):
    _, theirs, checkpoint, _, params = pair
    stored = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps(hf_config(checkpoint.model, "float32", {})))

    def read(path, layer):
        return stored[path] if layer is None else stored[path][layer]

    export_weights(checkpoint.model, read, exported, "float32", max_shard_bytes=40_000)
    assert len(list(exported.glob("*.safetensors"))) > 1
    again = open_hf(exported)
    assert again.model == checkpoint.model
    for path in parameter_shapes(checkpoint.model):
        assert again.read(path, np.dtype(np.float32)).tobytes() == stored[path].tobytes(), path
    tokens = random_tokens((ROWS, LENGTH), seed=2)
    np.testing.assert_array_equal(their_logits(load_theirs(exported), tokens), their_logits(theirs, tokens))


def test_mxfp4_weights_are_dequantized_as_by_transformers(tmp_path):
    """Random bytes, every scale with finite values; blocks of any part of a tensor; and a directory as it is published."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (5, 24, 3, 16), np.uint8), rng.integers(0, 252, (5, 24, 3), np.uint8)
    wanted = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).float().numpy()
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    tensor = with_dequantized(read_directory(tmp_path))["w"]
    assert tensor.shape == wanted.shape
    for part in ((slice(None),) * 3, (slice(1, 4), slice(30, 67), slice(3, 9)), (slice(0, 1), slice(64, 96), slice(24, 24))):
        np.testing.assert_array_equal(tensor.read(part).astype(np.float32), wanted[part])
    lone = {name: one for name, one in read_directory(tmp_path).items() if name == "w_blocks"}
    with pytest.raises(UserError, match="'w_blocks' has no 'w_scales'"):
        with_dequantized(lone)


def test_a_published_gpt_oss_directory_is_read(tmp_path):
    """With its experts in MXFP4: the values are those that transformers dequantizes, and the export has them unquantized."""
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    variant = dataclasses.replace(VARIANTS["gpt-oss"], arguments=VARIANTS["gpt-oss"].arguments | sizes)
    save_random_model(variant, tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(1)
    dense = {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 124, (experts, outputs, inputs // 32), np.uint8)
        pair = (torch.from_numpy(tensors[f"{name}_{kind}"]) for kind in ("blocks", "scales"))
        dense[name] = convert_moe_packed_tensors(*pair).float().numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    checkpoint = open_hf(tmp_path)
    first = dense["model.layers.3.mlp.experts.gate_up_proj"]
    gate, up = (checkpoint.read_layer(f"blocks.mlp.{name}", 3, np.dtype(np.float32)) for name in ("gate", "up"))
    np.testing.assert_array_equal(gate, first[..., 0::2].swapaxes(0, 1))
    np.testing.assert_array_equal(up, first[..., 1::2].swapaxes(0, 1))
    (tmp_path / "back").mkdir()
    export_weights(
        checkpoint.model, lambda path, layer: checkpoint.read_layer(path, layer, np.dtype(np.float32)), tmp_path / "back", "float32"
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, values in dense.items():
        np.testing.assert_array_equal(back[name], values)
