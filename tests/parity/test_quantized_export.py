"""8-bit exports decoded by the format's definition in PyTorch, and computed with by transformers.

The package compressed-tensors itself is not among the dependencies of the tests: docs/guides/configs.md has what it reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.models.huggingface.compressed import CompressedTensor, Quantization
from ridgeline.models.huggingface.convert import export_weights, hf_config, open_hf, parameter_shapes, quantization_config

pytestmark = pytest.mark.parity
MODEL = ModelConfig(vocab_size=96, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=52, max_seq_len=64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write(directory: Path, kind: Quantization | None, dtype: str, seed: int) -> dict[str, torch.Tensor]:
    """Export random weights whose outputs differ in size by up to 1e4; return the tensors in the files."""
    rng = np.random.default_rng(seed)
    values = {
        path: (rng.standard_normal(shape) * 0.3 * 10 ** rng.uniform(-4, 0, shape[-1])).astype(np.float32)
        for path, shape in parameter_shapes(MODEL).items()
    }
    values["blocks.mlp.up"][0, :, 5] = 0  # an output without weights
    directory.mkdir()
    export_weights(MODEL, lambda path, layer: values[path] if layer is None else values[path][layer], directory, dtype, 15_000, kind)
    config = hf_config(MODEL, dtype, {}) | ({} if kind is None else {"quantization_config": quantization_config(MODEL, kind)})
    (directory / "config.json").write_text(json.dumps(config))
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_stored_values_are_those_of_pytorch_and_decode_to_what_is_read(tmp_path: Path, kind: Quantization, dtype: str) -> None:
    exact = write(tmp_path / "exact", None, "float32", seed=7)
    stored = write(tmp_path / "stored", kind, dtype, seed=7)
    read = open_hf(tmp_path / "stored").tensors
    assert set(read) == set(exact)
    matrices = {name for name in exact if ".layers." in name and name.endswith("_proj.weight")}
    assert {name for name, tensor in read.items() if isinstance(tensor, CompressedTensor)} == matrices
    for name, weight in exact.items():
        if name not in matrices:
            assert torch.equal(stored[name], weight.to(DTYPES[dtype]))
            continue
        scale = stored[name + "_scale"]
        limit = 448.0 if kind == "fp8" else 127.0
        ideal = weight.abs().amax(1, keepdim=True) / limit
        assert scale.dtype == DTYPES[dtype]
        assert torch.equal(scale, ideal.to(scale.dtype).clamp(min=torch.finfo(scale.dtype).tiny))
        ratio = (weight / scale.float()).clamp(-limit, limit)
        if kind == "fp8":
            elements = stored[name]
            assert torch.equal(elements.view(torch.uint8), ratio.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            packed, (outputs, inputs) = stored[name + "_packed"], stored[name + "_shape"].tolist()
            shifts = torch.arange(4) * 8
            elements = ((packed.long()[..., None] >> shifts) & 255).reshape(outputs, inputs) - 128
            assert torch.equal(elements, ratio.round().long())
        decoded = (elements.float() * scale.float()).to(scale.dtype)
        assert torch.equal(torch.from_numpy(read[name].read().astype(np.float32)), decoded.float())
        rng = np.random.default_rng(len(name))
        for _ in range(3):
            rows, columns = (slice(*sorted(rng.integers(0, dim + 1, 2).tolist())) for dim in weight.shape)
            block = torch.from_numpy(read[name].read((rows, columns)).astype(np.float32))
            assert torch.equal(block, decoded.float()[rows, columns])


def test_the_model_computes_what_transformers_does_with_the_decoded_weights(tmp_path: Path) -> None:
    from tests.parity.hugging_face import load_ours, random_tokens

    exact = write(tmp_path / "exact", None, "float32", seed=3)
    write(tmp_path / "stored", "int8", "float32", seed=3)
    decoded = {name: torch.from_numpy(tensor.read()) for name, tensor in open_hf(tmp_path / "stored").tensors.items()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact").eval()
    tokens = random_tokens((2, 24), MODEL.vocab_size)
    with torch.no_grad():
        before = theirs(torch.from_numpy(tokens).long()).logits
        theirs.load_state_dict(decoded | ({} if "lm_head.weight" in exact else {"lm_head.weight": decoded["model.embed_tokens.weight"]}))
        after = theirs(torch.from_numpy(tokens).long()).logits
    _, graphdef, params = load_ours(tmp_path / "stored")
    decoder = nnx.merge(graphdef, params)
    ours = torch.from_numpy(np.array(decoder.logits(decoder(tokens))))
    largest = after.abs().max()
    assert (ours - after).abs().max() < 1e-5 * largest
    assert (ours - before).abs().max() > 1e-3 * largest


def test_what_the_format_cannot_have_is_refused(tmp_path: Path) -> None:
    for model, message in (
        (MODEL.model_copy(update={"family": "mixtral", "moe": MoEConfig(experts=2, experts_per_token=1)}), "with experts"),
        (MODEL.model_copy(update={"mlp_dim": 50}), r"down_proj.weight has 50 inputs, which must be a multiple of 4"),
    ):
        with pytest.raises(UserError, match=message):
            quantization_config(model, "int8")
    write(tmp_path / "hf", "fp8", "float32", seed=1)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "group"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantized weights \(compressed-tensors, float-quantized\) are not supported"):
        open_hf(tmp_path / "hf")
