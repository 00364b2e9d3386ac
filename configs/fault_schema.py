"""The sections of the schema for faults: silent corruption, stragglers, loss spikes, lost nodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ridgeline.configs.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class CorruptionCheckConfig(Section):
    """Detection of silent data corruption: wrong bits in memory or computations (docs/guides/faulty-devices.md)."""

    every: NonNegativeInt = 0
    """Steps between checks; 0: none. Each check replays a step and compares both results bitwise, the copies of replicated arrays, and what
    each step has read with what the one before has written. The state is compared before each save too, without a replay. A check needs
    host memory for the state of the process's devices, and on GPUs runtime.deterministic. Off by default: it costs one more step and two
    copies of the state over PCIe."""


class StragglersConfig(Section):
    """Detection of ranks that compute more slowly than the others (docs/guides/faulty-devices.md)."""

    threshold: PositiveFloat | None = 0.1
    """Own compute time of a rank beyond that of the others from which it is named; null: never."""
    replace_after: PositiveInt | None = None
    """Steps after which the node of a rank that was named, and is still slow, is replaced: it is added to bad_nodes, and the run saves and
    ends with code 75, so that the job is requeued without it. Slurm jobs only; null: the node stays."""
    max_replaced: PositiveInt = 2
    """Most nodes of a run that are replaced as stragglers."""


class LossSpikesConfig(Section):
    """What a run does about loss spikes (docs/guides/numerics.md)."""

    policy: Literal["warn", "skip", "rollback"] = "warn"
    """warn: a line and an event. skip: an update whose loss is above the limit is not applied. rollback: three steps above the limit take
    the run back to the newest checkpoint from before them, and their batches are left out from then on."""
    window: int = Field(default=128, ge=32)
    """Losses whose median and median absolute deviation (MAD) a loss is compared with; the first 32 are not judged."""
    sigmas: PositiveFloat = 5.0
    """Rise over the median that counts, in standard deviations (1.4826 times the MAD)."""
    min_rise: PositiveFloat = 0.1
    """Least rise over the median that counts, in nats per token."""
    skip_before: NonNegativeInt = 1
    """Batches before the first step above the limit that rollback leaves out too: the update before it may have caused the spike."""
    max_rollbacks: PositiveInt = 5
    """Rollbacks of a run; the spike after them ends it with exit code 70."""


class ElasticConfig(Section):
    """Going on with fewer nodes, and spare nodes, in jobs of `ridge submit`."""

    min_nodes: PositiveInt | None = None
    """Fewest nodes on which the job goes on after it has lost nodes, or starts; null: all nodes of the job."""
    spares: NonNegativeInt = 0
    """Nodes that the job requests beyond those it trains on. They stay idle until one of the others is bad."""
    grow_minutes: NonNegativeFloat = 10.0
    """Minutes between checks for idle nodes while the job trains on fewer nodes than it was submitted for. When there are enough for a
    larger mesh, the run saves and is requeued; 0: it grows only when it is requeued for another reason."""

    @property
    def on(self) -> bool:
        """Whether the job may change its nodes."""
        return self.min_nodes is not None or self.spares > 0
