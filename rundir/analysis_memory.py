"""Memory in the analysis of a profile: what a program takes, in bytes, and what the allocator reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LiveBuffer:
    """A temporary, or a moment of the schedule."""

    instruction: str
    component: str
    phase: str
    bytes: float


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Memory that a program takes on one device, as XLA assigned it; bytes."""

    module: str
    arguments_bytes: float
    outputs_bytes: float
    """Outputs that do not reuse the memory of arguments."""
    constants_bytes: float
    temporaries_bytes: float
    peak_bytes: float
    """Most that is live at once, arguments included, gaps between temporaries not."""
    peak_at: LiveBuffer
    """The instruction that runs then; `bytes`: live temporaries."""
    largest: Sequence[LiveBuffer]
    """Temporaries that are live at the peak, largest first."""
    timeline: Sequence[LiveBuffer]
    """Live temporaries over the schedule: the largest value of each of up to 100 equal stretches."""


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """The state of an allocator at one moment."""

    time_s: float
    """Since the start of the capture."""
    in_use_bytes: float
    fragmentation: float | None
    """Share of the free memory that is not in the largest free block."""
    operation: str
    """What memory was allocated or freed for then; '' where the trace does not have it."""


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Memory that was allocated during the capture for one purpose and is in use at the peak."""

    operation: str
    data_type: str
    """In HLO's notation; '' where it is unknown."""
    shape: str
    count: int
    bytes: float


@dataclass(frozen=True, kw_only=True)
class AllocatorMemory:
    """The memory of one allocator during the capture, from the events that it writes."""

    host: str
    allocator: str
    """Its name, such as `GPU_0_bfc`."""
    allocations: int
    frees: int
    capacity_bytes: float | None
    """Most that it may take."""
    lifetime_peak_bytes: float | None
    """Most in use since the process began."""
    peak: MemoryMoment
    """Most in use during the capture."""
    early_bytes: float
    """In use then, and allocated before the capture."""
    held: Sequence[HeldMemory]
    """What was allocated during the capture and is in use then, largest first."""
    timeline: Sequence[MemoryMoment]
    """The moment with the most in use, of each of up to 200 stretches with equally many events."""
