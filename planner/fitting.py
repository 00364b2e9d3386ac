"""The smallest change of a config that makes it fit: more microbatches, a smaller loss chunk, stronger rematerialisation, more shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ridgeline.configs.schema import Config
from ridgeline.planner.memory import memory_per_device

REMAT_LADDER = ("none", "attention-only", "dots", "full")
"""From what keeps most to what keeps least."""


def fitting_changes(config: Config, sizes: Mapping[str, int], capacity_bytes: int) -> list[str] | None:
    """Return the overrides of the smallest change whose estimated memory is within the capacity; None when no single or paired change is.

    Changes are tried in the order of what they cost: microbatches cost launches, a stronger rematerialisation costs FLOPs, sharding costs
    communication, both together cost both.
    """
    for overrides, changed, mesh in _changes(config, sizes):
        if memory_per_device(changed, mesh).total_bytes <= capacity_bytes:
            return overrides
    return None


def _changes(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[list[str], Config, Mapping[str, int]]]:
    accumulations = list(_accumulations(config, sizes))
    policies = list(_policies(config))
    for overrides, changed in (*accumulations, *policies):
        yield overrides, changed, sizes
    for remat, with_remat in policies:
        for more, changed in _accumulations(with_remat, sizes):
            yield remat + more, changed, sizes
    data, fsdp = sizes["data"], sizes["fsdp"]
    factor = 2
    while data % factor == 0:
        mesh = {**sizes, "data": data // factor, "fsdp": fsdp * factor}
        overrides = [f"mesh.data={mesh['data']}", f"mesh.fsdp={mesh['fsdp']}"]
        yield overrides, config, mesh
        for remat, with_remat in policies:
            yield overrides + remat, with_remat, mesh
        factor *= 2


def _accumulations(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[list[str], Config]]:
    rows = config.data.batch_size // (sizes["data"] * sizes["fsdp"])
    for count in range(config.trainer.accumulation + 1, rows + 1):
        if rows % count == 0:
            trainer = config.trainer.model_copy(update={"accumulation": count})
            yield [f"trainer.accumulation={count}"], config.model_copy(update={"trainer": trainer})


def _policies(config: Config) -> Iterator[tuple[list[str], Config]]:
    now = config.compute.remat.policy
    stronger = REMAT_LADDER[REMAT_LADDER.index(now) + 1 :] if now in REMAT_LADDER else ("full",)
    for policy in stronger:
        remat = config.compute.remat.model_copy(update={"policy": policy, "names": []})
        compute = config.compute.model_copy(update={"remat": remat})
        yield [f"compute.remat.policy={policy}"], config.model_copy(update={"compute": compute})
