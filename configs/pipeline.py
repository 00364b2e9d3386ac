"""Layers of pipeline stages: how many each has, and what does not go with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ridgeline.configs.schema import Config


def chunk_layers(config: Config, stages: int) -> int:
    """Return the layers of a chunk, the same for all: layers that are missing in the last ones are replaced by empty ones.

    A chunk has whole periods of the kinds of layers, since all stages run one program.
    """
    period = config.model.layer_period
    return -(-config.model.num_layers // (stages * config.mesh.pipeline_chunks * period)) * period


def layer_slots(config: Config, stages: int) -> int:
    """Return the layers that the time of a step has room for: those of the model and the empty ones."""
    return chunk_layers(config, stages) * stages * config.mesh.pipeline_chunks


def stored_by_stage(config: Config, sizes: Mapping[str, int]) -> bool:
    """Whether each stage stores its own layers: they divide evenly, into one chunk per stage. Otherwise layers are sharded over
    `pipeline` along their width, and each step moves them to their stages and their gradients back."""
    stages = sizes.get("pipeline", 1)
    return config.mesh.pipeline_chunks == 1 and layer_slots(config, stages) == config.model.num_layers


def data_summed_once(config: Config, sizes: Mapping[str, int]) -> bool:
    """Whether gradients are summed over `data` once per step, after all microbatches: with stages, where `data` shards rows only."""
    rules = config.mesh.rules
    elsewhere = any("data" in axes for name, axes in rules.items() if name != "batch")
    return sizes.get("pipeline", 1) > 1 and sizes.get("data", 1) > 1 and "data" in rules.get("batch", ["data"]) and not elsewhere


def of_stage(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return the config with the layers that one stage has, empty ones included."""
    stages = sizes.get("pipeline", 1)
    if stages == 1:
        return config
    layers = layer_slots(config, stages) // stages
    return config.model_copy(update={"model": config.model.model_copy(update={"num_layers": layers})})


def pipeline_problems(config: Config, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, message) of each setting that does not go with `mesh.pipeline` of this size."""
    stages, chunks, model = sizes.get("pipeline", 1), config.mesh.pipeline_chunks, config.model
    if stages == 1:
        if chunks > 1 and config.mesh.pipeline == 1:
            yield (("mesh.pipeline_chunks", "mesh.pipeline"), f"needs mesh.pipeline of 2 or more, got {chunks} (1: no chunks)")
        return
    empty = layer_slots(config, stages) - model.num_layers
    if empty >= chunk_layers(config, stages):
        most = max((n for n in range(1, stages) if layer_slots(config, n) - model.num_layers < chunk_layers(config, n)), default=1)
        of = f" of {chunks} chunks" if chunks > 1 else ""
        yield (
            ("mesh.pipeline", "model.num_layers"),
            f"model.num_layers={model.num_layers} leaves a stage{of} without layers on mesh.pipeline={stages} (mesh.pipeline={most} works)",
        )
    if empty and model.moe is not None:
        yield (
            ("mesh.pipeline", "model.num_layers"),
            f"model.num_layers={model.num_layers} does not divide into mesh.pipeline={stages} x {chunks} chunks, which experts need",
        )
    if model.moe is not None and model.interleaved_experts:
        yield (
            ("mesh.pipeline", "model.moe.every"),
            f"supports no dense layers between those with experts, model.moe.every={model.moe.every} (set mesh.pipeline=1)",
        )
    elif model.moe is not None and model.dense_layers:
        yield (
            ("mesh.pipeline", "model.moe.dense_layers"),
            f"supports no dense layers before those with experts, model.moe.dense_layers={model.dense_layers} (set mesh.pipeline=1)",
        )
    if chunks > 1 and config.trainer.accumulation % stages:
        near = max(1, round(config.trainer.accumulation / stages)) * stages
        yield (
            ("mesh.pipeline_chunks", "trainer.accumulation", "mesh.pipeline"),
            f"needs trainer.accumulation to be a multiple of mesh.pipeline={stages}, got {config.trainer.accumulation} ({near} works)",
        )
    pieces = stages * sizes.get("context", 1) * sizes.get("tensor", 1)
    if config.data.seq_len % pieces:
        near = max(1, round(config.data.seq_len / pieces)) * pieces
        yield (
            ("mesh.pipeline", "data.seq_len"),
            f"data.seq_len={config.data.seq_len} does not divide by {pieces}, the devices of pipeline, context and tensor, over which the "
            f"loss is split (data.seq_len={near} works)",
        )
    if config.compute.remat.offloads:
        yield (
            ("compute.remat.policy", "mesh.pipeline"),
            f"offload does not go with mesh.pipeline={stages}; set compute.remat.policy=full",
        )
    if config.optimizer.offload:
        yield (("optimizer.offload", "mesh.pipeline"), f"does not go with mesh.pipeline={stages}; set optimizer.offload=false")
    for logical, axes in config.mesh.rules.items():
        if "pipeline" in axes or logical == "layers":
            yield (
                (f"mesh.rules.{logical}", "mesh.pipeline"),
                f"cannot be changed with mesh.pipeline={stages}; remove it, or set mesh.pipeline=1",
            )
