"""Our decoders against transformers' on the same random weights: logits, gradients, packing, and export."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from ridgeline.models.huggingface.convert import export_weights, hf_config, open_hf, parameter_shapes
from ridgeline.models.loss import cross_entropy
from ridgeline.sharding.partition import Partitioner
from tests.parity.hugging_face import VARIANTS, load_ours, load_theirs, random_tokens, save_random_model

pytestmark = pytest.mark.parity
ROWS, LENGTH = 2, 48


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    theirs = save_random_model(VARIANTS[request.param], directory)
    return directory, theirs, *load_ours(directory)


def their_logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.from_numpy(np.asarray(tokens)).long()).logits.numpy()


def our_logits(graphdef, params, tokens, **kwargs):
    decoder = nnx.merge(graphdef, params)
    return np.asarray(decoder.logits(decoder(jnp.asarray(tokens), **kwargs)))


def test_logits_agree(pair):
    _, theirs, _, graphdef, params = pair
    tokens = random_tokens((ROWS, LENGTH))
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.3  # the random weights matter
    np.testing.assert_allclose(our_logits(graphdef, params, tokens), expected, atol=1e-4, rtol=0)


def test_gradients_agree_for_every_parameter(pair):
    _, theirs, checkpoint, graphdef, params = pair
    tokens = random_tokens((ROWS, LENGTH + 1), seed=1)
    theirs.zero_grad()
    logits = theirs(torch.from_numpy(tokens[:, :-1]).long()).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.from_numpy(tokens[:, 1:]).long().reshape(-1)).backward()

    def loss(params):
        decoder = nnx.merge(graphdef, params)
        x_BTD = decoder(jnp.asarray(tokens[:, :-1]))
        sums = cross_entropy(
            x_BTD,
            decoder.unembedding(),
            jnp.asarray(tokens[:, 1:]),
            jnp.ones((ROWS, LENGTH)),
            vocab_size=checkpoint.model.vocab_size,
            chunk=32,
            z_loss=0.0,
            partitioner=Partitioner.single(),
        )
        return sums.nats / sums.weight

    ours = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(jax.grad(loss)(params))[0]
    }
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    for rule in checkpoint.rules:
        for layer in range(checkpoint.model.num_layers) if rule.per_layer else [None]:
            values = {path: ours[path] if layer is None else ours[path][layer] for path in rule.params}
            mapped, expected = rule.export(values, checkpoint.model.vocab_size), gradients.pop(rule.name(layer))
            error = np.linalg.norm(mapped - expected) / np.linalg.norm(expected)
            assert error < 1e-3, f"{rule.name(layer)}: relative error {error:.2e}"
    assert not gradients  # no parameter of theirs is left over


def test_a_packed_row_equals_separate_forward_passes(pair):
    _, theirs, _, graphdef, params = pair
    documents = [random_tokens((1, length), seed=length) for length in (11, 20, 9)]
    padding = 4
    tokens = np.concatenate([*documents, np.zeros((1, padding), np.int32)], axis=1)
    lengths = [document.shape[1] for document in documents]
    positions = np.concatenate([np.arange(length) for length in [*lengths, padding]])[None].astype(np.int32)
    segments = np.repeat([1, 2, 3, 0], [*lengths, padding])[None].astype(np.int32)
    ours = our_logits(graphdef, params, tokens, positions_BT=jnp.asarray(positions), segment_ids_BT=jnp.asarray(segments))
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
