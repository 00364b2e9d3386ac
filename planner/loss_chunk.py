"""Whether more logits at a time would pay: the chunk of the cross-entropy by predicted time and memory.

Every chunk reads and writes the whole float32 gradient of the unembedding, so small chunks of a large vocabulary are bound by memory;
larger ones have larger products, and cost `chunk * V * (4 + a)` bytes of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.schema import Config
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import Candidate, capacity_bytes
from ridgeline.planner.step_time import Machine, step_parts

LEAST_GAIN = 0.01
"""Relative gain in throughput worth a word."""
NEARLY = 0.002
"""A smaller chunk is as good where it takes this much longer at most."""
DOUBLINGS = 3


@dataclass(frozen=True)
class ChunkAdvice:
    """A larger compute.loss_chunk that pays."""

    loss_chunk: int
    gain: float
    """Relative gain in throughput."""
    memory_bytes: int
    """Of a device, with it."""

    @property
    def sentence(self) -> str:
        """The advice in words."""
        return f"compute.loss_chunk={self.loss_chunk} would give {self.gain:.1%} and fits ({self.memory_bytes / 1e9:.1f} GB)."


def better_chunk(candidate: Candidate, machine: Machine) -> ChunkAdvice | None:
    """Return the smallest larger chunk that is nearly the fastest of those that fit; None where it would gain less than LEAST_GAIN."""
    config, sizes = candidate.parts.config, candidate.layout.sizes
    fitting: list[tuple[int, float, int]] = []
    for doubling in range(1, DOUBLINGS + 1):
        chunk = config.compute.loss_chunk << doubling
        larger = _with_chunk(config, chunk)
        memory = memory_per_device(larger, sizes, gpu=machine.device.tensor_cores)
        if memory.total_bytes > capacity_bytes(machine):
            break
        fitting.append((chunk, step_parts(larger, sizes, machine).assemble().step_s, memory.total_bytes))
    if not fitting:
        return None
    fastest_s = min(step_s for _, step_s, _ in fitting)
    chunk, step_s, size = next(found for found in fitting if found[1] <= fastest_s * (1 + NEARLY))
    now_s = step_parts(config, sizes, machine).assemble().step_s  # the candidate's own also knows how full the device is
    gain = now_s / step_s - 1
    return ChunkAdvice(chunk, gain, size) if gain >= LEAST_GAIN else None


def _with_chunk(config: Config, chunk: int) -> Config:
    return config.model_copy(update={"compute": config.compute.model_copy(update={"loss_chunk": chunk})})
