"""How a sharded step's collectives are combined and scheduled: XLA flags from the size of a layer and the mesh.

Chosen by playing compiled schedules (`benchmarks/overlap.py`; docs/PERFORMANCE.md has the figures):
* A collective is one layer's: smaller ones hide less and pay more latencies (8B on 512 H100, single parameters: 0.294 s for 0.252 s),
  larger ones wait for a layer whose compute has not begun.
* Three may be on their way at once: the gather of the next layer, the reduction of the last, and the small sums of norms, which otherwise
  take the place of the gather (8B on 64 H100: 3.19 s for 3.39 s with two). Where tensor parallelism spans more than two devices, a third
  gather only stands before the collectives of the stream, which run in the order of their start: two (70B, tensor=8: 10.30 s for 10.43 s).
  So it is before the hops of a ring (405B on 64 H100, fsdp=32 x tensor=2: 170 s for 190 s).
"""

from __future__ import annotations

from ridgeline.configs.schema import Config
from ridgeline.planner.parameters import count_parameters

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
IN_FLIGHT, IN_FLIGHT_TENSOR = 3, 2
WIDEST_TENSOR = 2
"""Devices on tensor up to which the third collective pays."""


def layer_bytes(config: Config, dtype: str) -> int:
    """Return the bytes of one layer's parameters in a dtype, on the devices that gather them over fsdp: cut over tensor only."""
    return count_parameters(config.model).non_embedding // config.model.num_layers * BYTES[dtype] // max(1, config.mesh.tensor)


def overlap_flags(config: Config) -> list[tuple[str, str, str]]:
    """Return (flag, value, reason); none for a mesh of data alone, whose gradients XLA combines and hides as it is."""
    flags = []
    fsdp, tensor = config.mesh.fsdp != 1, config.mesh.tensor != 1
    if fsdp:
        reason = "FSDP: combine the collectives of one layer, not of several, so that each overlaps with the layer before"
        gathered, reduced = (str(layer_bytes(config, dtype)) for dtype in (config.precision.compute, config.precision.gradients))
        for kind, size in (("all_gather", gathered), ("reduce_scatter", reduced), ("all_reduce", reduced)):
            flags.append((f"--xla_gpu_{kind}_combine_threshold_bytes", size, reason))
    if fsdp or tensor:
        reason = "collectives on their way at once: the next layer's gather need not wait for the last one's reduction"
        few = config.mesh.tensor > WIDEST_TENSOR or (tensor and config.compute.tensor_overlap == "ring")
        limit = IN_FLIGHT_TENSOR if few else IN_FLIGHT
        flags.append(("--xla_gpu_experimental_parallel_collective_overlap_limit", str(limit), reason))
    return flags
