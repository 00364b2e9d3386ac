"""The schedule of pipeline stages: 1F1B, with one or several chunks of layers per stage.

S stages, v chunks per stage, M microbatches. The layers are cut into S*v chunks; stage s has chunks s, S + s, 2S + s, ... A unit is one
microbatch in one chunk. All stages work in ticks: in a tick a stage runs the forward pass of one unit and the backward pass of another.
Each stage takes the units in the same order: S microbatches through its first chunk, the same S through its second, and so on, then the
next S microbatches (arXiv 2104.04473, section 2.2); the backward pass takes the chunks of such a group in reverse. With i the position in
that order, stage s runs the forward pass of unit i in tick s + i, and the backward pass of unit i in tick (S*v - 1) + (S - 1 - s) + i: one
tick after the stage from which its input comes, and at the last stage in the tick of its loss. So the ticks are

    S*v - 1                with a forward pass only,
    v*M - S*v + S          with both,
    S*v - 1                with a backward pass only,

v*M + S - 1 forward and as many backward passes in all, of which v*M are of use: the bubble is (S - 1) / (v*M + S - 1), as with stages
that do not wait for each other's ticks. The price of ticks is memory: the input of a unit is kept for up to 2*S*v - 1 ticks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ridgeline.configs.schema import Config


class Unit(NamedTuple):
    """What a stage does in a tick; integers, or traced arrays of them."""

    microbatch: Any
    chunk: Any
    """Of the stage's own chunks."""
    real: Any
    """Whether there is such a unit; if not, the other values are those of some other unit."""


@dataclass(frozen=True)
class Schedule:
    """The ticks of one step."""

    stages: int
    microbatches: int
    chunks: int = 1
    """Chunks of layers per stage."""

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> Schedule:
        """Return the schedule of a config on a mesh of these axis sizes."""
        return cls(sizes.get("pipeline", 1), config.trainer.accumulation, config.mesh.pipeline_chunks)

    @property
    def units(self) -> int:
        """Units of a stage; with several chunks those of whole groups of S microbatches, of which some may not be real."""
        if self.chunks == 1:
            return self.microbatches
        return -(-self.microbatches // self.stages) * self.stages * self.chunks

    @property
    def first_backward(self) -> int:
        """The first tick with a backward pass."""
        return self.stages * self.chunks - 1

    @property
    def forward_ticks(self) -> int:
        """Ticks with a forward pass, the first ones."""
        return self.units + self.stages - 1

    @property
    def ticks(self) -> int:
        """All ticks."""
        return self.first_backward + self.forward_ticks

    @property
    def kept(self) -> int:
        """Units whose residuals a device keeps at once."""
        return min(2 * self.stages * self.chunks - 1, self.forward_ticks)

    @property
    def bubble_fraction(self) -> float:
        """The share of the time of a step in which a stage does nothing of use."""
        return 1 - self.microbatches * self.chunks / self.forward_ticks

    def forward(self, stage: Any, tick: Any) -> Unit:
        """Return the unit whose forward pass a stage runs in a tick."""
        return self._unit(tick - stage)

    def backward(self, stage: Any, tick: Any) -> Unit:
        """Return the unit whose backward pass a stage runs in a tick."""
        unit = self._unit(tick - self.first_backward - (self.stages - 1 - stage))
        return unit._replace(chunk=self.chunks - 1 - unit.chunk)

    def forward_tick(self, stage: Any, unit: Unit) -> Any:
        """Return the tick in which a stage runs the forward pass of a unit."""
        group, place = unit.microbatch // self.stages, unit.microbatch % self.stages
        return stage + (group * self.chunks + unit.chunk) * self.stages + place

    def _unit(self, index: Any) -> Unit:
        started = index >= 0
        index = started * index
        microbatch = index // (self.stages * self.chunks) * self.stages + index % self.stages
        real = started & (microbatch < self.microbatches)
        return Unit(real * microbatch, index // self.stages % self.chunks, real)
