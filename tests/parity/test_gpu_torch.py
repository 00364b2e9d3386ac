"""The PyTorch peer of the benchmark for real GPUs computes what the trainer computes: same weights, same loss, same gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

from ridgeline import models
from ridgeline.configs.load import load
from ridgeline.configs.schema import PrecisionConfig
from ridgeline.models.huggingface.convert import hf_config
from ridgeline.sharding.partition import Partitioner
from tests.parity.hugging_face import COMPUTE, load_ours, random_tokens
from tests.parity.test_families import LENGTH, ROWS, loss_and_gradients

pytestmark = pytest.mark.parity
BENCH = Path(__file__).parents[2] / "benchmarks"
SHAPE = ("num_layers=2", "embed_dim=64", "num_heads=4", "num_kv_heads=2", "head_dim=16", "mlp_dim=96", "vocab_size=97")
TOKENS = random_tokens((ROWS, LENGTH + 1), seed=1)


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The peer's model in float32 with random weights, and the directory of these weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        from gpu_torch import Trained
    model = load("models/llama-3.2-1b", [f"model.{setting}" for setting in SHAPE]).config.model
    torch.manual_seed(0)
    made = Trained(hf_config(model, "float32", {}), "float32", compile=False, chunk_tokens=40)  # does not divide the 96 tokens
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.12 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp("peer") / "hf"
    made.causal_lm.save_pretrained(directory)
    return made, directory


def in_mode(made, mode):
    """The same weights in another mode."""
    other = type(made)(made.causal_lm.config.to_dict(), mode, compile=False, chunk_tokens=40)
    weights = dict(made.causal_lm.named_parameters())
    with torch.no_grad():
        for name, parameter in other.causal_lm.named_parameters():
            parameter.copy_(weights[name])
    return other


def gradients_of(made, directory):
    """Its loss, and its gradients under the names of a checkpoint."""
    made.zero_grad()
    loss = made(torch.from_numpy(TOKENS).long())
    loss.backward()
    holder = copy.deepcopy(made.causal_lm)
    for target, source in zip(holder.parameters(), made.causal_lm.parameters(), strict=True):
        target.data = source.grad.float()
    holder.save_pretrained(directory)
    return float(loss.detach()), load_file(directory / "model.safetensors")


def our_gradients(directory, precision):
    """The trainer's loss and gradients of the same weights, under the same names."""
    checkpoint, graphdef, params = load_ours(directory)
    made = nnx.eval_shape(lambda: models.build(checkpoint.model, COMPUTE, precision, Partitioner.single(), nnx.Rngs(params=0)))
    graphdef, _ = nnx.split(made, nnx.Param)
    loss, gradients = loss_and_gradients(graphdef, checkpoint.model)(params, TOKENS)
    leaves = jax.tree_util.tree_flatten_with_path(gradients)[0]
    ours = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
    found = {}
    for rule in checkpoint.rules:
        for layer, expert in rule.places(checkpoint.shapes):
            values = {path: ours[path] if layer is None else ours[path][layer] for path in rule.params}
            found[rule.name(layer, expert)] = rule.export(values, checkpoint.model.vocab_size)
    return float(loss), found


def difference(left, right):
    """The largest relative difference of a gradient."""
    assert left.keys() == right.keys()
    return max(np.linalg.norm(left[name] - right[name]) / np.linalg.norm(right[name]) for name in left)


def test_the_chunked_loss_and_the_whole_model_equal_ours_and_the_plain_computation(peer, tmp_path: Path) -> None:
    made, directory = peer
    loss, gradients = gradients_of(made, tmp_path / "chunked")
    ours, expected = our_gradients(directory, PrecisionConfig(params="float32", compute="float32"))
    assert loss == pytest.approx(ours, rel=1e-5)
    assert difference(gradients, expected) < 1e-4
    tokens = torch.from_numpy(TOKENS).long()
    logits = made.causal_lm(tokens[:, :-1]).logits
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss == pytest.approx(float(plain.detach()), rel=1e-6)
    made.zero_grad()
    plain.backward()
    plainly = made.causal_lm.model.embed_tokens.weight.grad.numpy()
    np.testing.assert_allclose(gradients["model.embed_tokens.weight"], plainly, atol=1e-5 * np.abs(plainly).max())


def test_float8_layers_compute_what_ours_do(peer, tmp_path: Path) -> None:
    made, directory = peer
    narrow = in_mode(made, "fp8")
    assert narrow.float8_layers == 2 * 7
    loss, gradients = gradients_of(narrow, tmp_path / "fp8")
    wide_loss, wide = gradients_of(in_mode(made, "autocast"), tmp_path / "bf16")
    ours, expected = our_gradients(directory, PrecisionConfig(params="float32", compute="bfloat16", matmul="fp8"))
    assert abs(loss - ours) < 0.25 * abs(loss - wide_loss), "closer to our float8 than to its own 16 bits"
    assert difference(gradients, expected) < difference(gradients, wide)


def test_float8_values_and_scales_are_ours(peer) -> None:
    from gpu_torch_parts import E4M3, E5M2, quantize  # on the path since the peer was made

    from ridgeline.models.matmul import fp8

    random = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    for x in (random, 1e-6 * random, np.full((4, 4), 448.0, np.float32), np.full((4, 4), 2.0, np.float32), np.zeros((4, 4), np.float32)):
        for theirs, ours in ((E4M3, fp8.VALUES), (E5M2, fp8.GRADIENTS)):
            values, scale = quantize(torch.from_numpy(x), theirs)
            expected, expected_scale = fp8.quantize(jax.numpy.asarray(x), ours)
            assert float(scale) == float(expected_scale)
            np.testing.assert_array_equal(values.float().numpy(), np.asarray(expected, np.float32))
