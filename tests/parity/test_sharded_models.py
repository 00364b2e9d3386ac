"""A model on 8 devices gives the losses and the greedy tokens of one device, and no device holds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import ridgeline
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.models.generate import Sampling, generate, generate_rows, generation_config
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.pretrained import load_model
from ridgeline.trainer.state import model_spec
from tests.parity.hugging_face import DEEPSEEK, LLAMA, QWEN3_MOE, Variant, save_random_model
from tests.sampling import drawn

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_compile")]
SIZES = {"vocab_size": 264, "num_hidden_layers": 2, "intermediate_size": 48}
MODELS = {
    "dense": (Variant("llama", LLAMA | SIZES | {"num_key_value_heads": 2}), ["mesh.fsdp=8", "mesh.data=4 mesh.fsdp=1 mesh.tensor=2"]),
    "experts": (
        Variant("qwen3_moe", QWEN3_MOE | SIZES | {"num_experts": 8, "moe_intermediate_size": 24}),
        ["mesh.expert=4 mesh.fsdp=2", "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2"],
    ),
    "latent": (
        Variant("deepseek_v3", DEEPSEEK | SIZES | {"q_lora_rank": 24, "kv_lora_rank": 16, "n_group": 3, "topk_group": 2}),
        ["mesh.fsdp=4 mesh.tensor=2"],
    ),
}
PROMPTS = [[5, 9, 2, 44, 17, 3, 8, 90, 100], [7], [60, 1, 0], [250, 251, 9, 9]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    (directory / "text.txt").write_text(Path(__file__).read_text()[:1500])
    prepare(PrepareSettings((directory / "text.txt",), directory / "set", "bytes"), workers=1)
    return directory / "set"


def greedy(directory: Path, mesh: list[str]) -> tuple[Any, list[list[int]]]:
    loaded = load_model(directory, adapt=generation_config, mesh=mesh)
    results = generate(loaded.decoder, PROMPTS, max_tokens=8, sampling=Sampling(temperature=0))
    return loaded, [result.tokens for result in results]


def per_device(tree: Any) -> list[int]:
    """Bytes on each device."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return list(held.values())


@pytest.mark.parametrize("name", drawn(list(MODELS), 2))
def test_losses_and_tokens_equal_those_of_one_device(corpus: Path, tmp_path: Path, name: str) -> None:
    variant, meshes = MODELS[name]
    save_random_model(variant, tmp_path)
    loss: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    for mesh in ["mesh.fsdp=1", *meshes]:
        result = ridgeline.evaluate(tmp_path, {"text": corpus}, seq_len=64, batch_size=8, overrides=mesh.split())
        loss[mesh] = result.sets["text"].loss
        loaded, tokens[mesh] = greedy(tmp_path, mesh.split())
        sharded = np.prod([size for axis, size in loaded.partitioner.mesh.shape.items() if axis in ("fsdp", "tensor", "expert")])
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
        assert max(per_device(loaded.params)) < whole / sharded * 1.3  # norms and routers are replicated
    assert list(loss.values()) == pytest.approx([loss["mesh.fsdp=1"]] * len(loss), rel=1e-5)
    assert all(found == tokens["mesh.fsdp=1"] for found in tokens.values())


def test_each_row_of_a_batch_is_as_if_alone(tmp_path: Path) -> None:
    save_random_model(MODELS["experts"][0], tmp_path)
    loaded, together = greedy(tmp_path, ["mesh.expert=2", "mesh.fsdp=4"])
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        (alone,) = generate(loaded.decoder, [prompt], max_tokens=8, sampling=Sampling(temperature=0))
        assert alone.tokens == tokens


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}])
def test_no_device_holds_the_whole_model_or_cache_while_it_generates(mesh: dict[str, int]) -> None:
    """Of the compiled program: temporary memory, in which gathered parameters and the cache are."""
    model = ModelConfig(vocab_size=256, num_layers=8, embed_dim=256, num_heads=4, mlp_dim=1024, max_seq_len=4096)
    config = generation_config(Config.model_validate({"model": model, "mesh": mesh, "precision": {"compute": "float32"}}))
    partitioner = Partitioner.of(build_mesh(config.mesh), config)
    spec = model_spec(config, partitioner)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), spec.abstract_params, spec.param_shardings
    )
    graphdef, state = nnx.split(spec.merge(params))
    tokens, row = np.zeros((8, 64), np.int32), np.ones(8, np.int32)
    program = generate_rows.lower(graphdef, 128, 64, Sampling(temperature=0), True, state, tokens, row, row, row[:1], np.uint32(0))
    model_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    cache_bytes = 2 * 8 * 8 * 128 * 256 * 4
    layer_bytes = model_bytes / 8
    assert program.compile().memory_analysis().temp_size_in_bytes < cache_bytes / 8 * 2.5 + layer_bytes
