"""The elastic policy over drawn configs and numbers of nodes, compared with a search over all meshes and accumulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.problem import divisors
from ridgeline.configs.rules import batch_shards, layout_problems
from ridgeline.configs.schema import Config
from ridgeline.planner.policy import elastic_config, elastic_size, elastic_sizes


def drawn_config(rng: np.random.Generator) -> tuple[Config, int, int]:
    """Return a config with a legal mesh, its nodes, and devices per node."""
    while True:
        per_node, nodes = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 9))
        tensor = int(rng.choice([1, 1, 2, 4]))
        if nodes * per_node % tensor:
            continue
        shards = nodes * per_node // tensor
        fsdp = int(rng.choice(divisors(shards)))
        accumulation = int(rng.choice([1, 1, 2, 3]))
        config = Config.model_validate(
            {
                "model": {"vocab_size": 256, "embed_dim": int(rng.choice([96, 240, 256])), "num_heads": 8, "mlp_dim": 256},
                "mesh": {"data": shards // fsdp, "fsdp": fsdp, "tensor": tensor},
                "data": {"batch_size": shards * accumulation * int(rng.choice([1, 2, 3, 5, 12])), "seq_len": 64},
                "trainer": {"accumulation": accumulation},
            }
        )
        if not layout_problems(config, config.mesh.sizes):
            return config, nodes, per_node


def legal(config: Config, devices: int) -> list[tuple[int, int]]:
    """Return (fsdp, accumulation) of every legal layout on that many devices with no more rows per device, by trying all."""
    sizes, rows = config.mesh.sizes, config.data.batch_size
    most = rows // (config.trainer.accumulation * batch_shards(config, sizes))
    if devices % sizes["tensor"]:
        return []
    shards = devices // sizes["tensor"]
    found = []
    for fsdp in range(1, shards + 1):
        for accumulation in range(1, rows + 1):
            if shards % fsdp or rows % (accumulation * shards) or rows // (accumulation * shards) > most:
                continue
            mesh = sizes | {"data": shards // fsdp, "fsdp": fsdp}
            if not layout_problems(with_layout(config, mesh, accumulation), mesh):
                found.append((fsdp, accumulation))
    return found


def with_layout(config: Config, mesh: dict[str, int], accumulation: int) -> Config:
    trainer = config.trainer.model_copy(update={"accumulation": accumulation})
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh), "trainer": trainer})


@pytest.mark.parametrize("seed", range(20))
def test_a_resized_config_has_the_same_batch_and_a_legal_layout_or_there_is_none(seed: int) -> None:
    config, whole, per_node = drawn_config(np.random.default_rng(seed))
    for nodes in range(1, whole + 3):
        exists = legal(config, nodes * per_node)
        if not exists:
            with pytest.raises(UserError, match=f" {nodes} node"):
                elastic_config(config, nodes, per_node)
            continue
        found = elastic_config(config, nodes, per_node)
        mesh, accumulation = found.mesh.sizes, found.trainer.accumulation
        assert math.prod(mesh.values()) == nodes * per_node
        assert not layout_problems(found, mesh)
        assert with_layout(found, config.mesh.sizes, config.trainer.accumulation) == config, "nothing else changes: batch, seed, order"
        if nodes == whole:
            assert found == config
            continue
        kept = [count for fsdp, count in exists if fsdp == mesh["fsdp"]]
        assert accumulation == min(kept)
        if config.mesh.fsdp in {fsdp for fsdp, _ in exists}:
            assert mesh["fsdp"] == config.mesh.fsdp


def test_more_good_nodes_never_mean_a_smaller_job() -> None:
    for seed in range(20):
        config, whole, per_node = drawn_config(np.random.default_rng(seed))
        found, without = elastic_sizes(config, range(1, whole + 1), per_node)
        assert whole in found and found.keys() | without.keys() == set(range(1, whole + 1))
        sizes = [elastic_size(found, nodes) for nodes in range(whole + 3)]
        assert sizes == sorted(sizes) and sizes[-1] == whole
        assert all(size == 0 or size in found for size in sizes)


def test_what_does_not_divide_is_named_with_what_would() -> None:
    config = Config.model_validate({"mesh": {"fsdp": 8, "tensor": 4}, "data": {"batch_size": 64}})
    with pytest.raises(UserError, match=r"^no layout on 3 nodes \(12 devices\): data.batch_size=64 does not divide by 3 .*63 or 66 works"):
        elastic_config(config, 3, 4)
    with pytest.raises(UserError, match=r"^mesh.tensor=4 does not divide 3 nodes \(6 devices\); 2 nodes or 4 nodes works$"):
        elastic_config(config, 3, 2)
    small = config.model_copy(update={"mesh": config.mesh.model_copy(update={"fsdp": 4, "data": 2})})
    assert elastic_config(small, 4, 4).mesh.sizes == small.mesh.sizes | {"data": 1}
    assert elastic_config(small, 4, 4).trainer.accumulation == 2
