"""Memory of the allocators over time, from the events that XLA's allocator writes into the trace of the host.

Each event has the state of its allocator afterwards. What holds the memory at the peak is known of what was allocated during the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ridgeline.explain.trace.wire import MILLION, MISSING, Line, Plane
from ridgeline.rundir.analysis_memory import AllocatorMemory, HeldMemory, MemoryMoment

MEMORY_STATS = frozenset(
    {"allocator_name", "index_on_host", "device_ordinal", "bytes_reserved", "bytes_allocated", "bytes_available", "peak_bytes_in_use"}
    | {"fragmentation", "allocation_bytes", "addr", "tf_op", "data_type", "shape"}
)
_ALLOCATED, _FREED = "MemoryAllocation", "MemoryDeallocation"
_TYPES = {1: "f32", 2: "f64", 3: "s32", 4: "u8", 5: "s16", 6: "s8", 8: "c64", 9: "s64", 10: "pred", 14: "bf16", 17: "u16", 18: "c128"}
_TYPES |= {19: "f16", 22: "u32", 23: "u64", 24: "f8e5m2", 25: "f8e4m3fn", 29: "s4", 30: "u4"}
"""TensorFlow's number of a data type -> its name in HLO."""
LARGEST, POINTS = 5, 200


@dataclass
class MemoryEvents:
    """Allocations and frees of the allocators of a host (bfc_allocator.cc, AddTraceMe), in order of time; sizes in bytes, after the event.

    MISSING where an event does not have the statistic. Texts are indices into Space.strings.
    """

    time: np.ndarray
    """int64: picoseconds since the host's zero."""
    freed: np.ndarray
    """bool: memory was freed; else allocated."""
    allocator: np.ndarray
    """Its name."""
    device: np.ndarray
    """Device on the host, where the allocator has no name."""
    reserved: np.ndarray
    """In use outside of the heap (stacks of programs)."""
    allocated: np.ndarray
    """In use in the heap."""
    available: np.ndarray
    lifetime_peak: np.ndarray
    """Most in use since the process began."""
    fragmentation: np.ndarray
    """Share of the free memory that is not in the largest free block, in millionths."""
    size: np.ndarray
    """Of the block."""
    address: np.ndarray
    operation: np.ndarray
    """What the memory is for: name of a program, or a call of the runtime."""
    data_type: np.ndarray
    """Number in TensorFlow's enumeration of data types."""
    shape: np.ndarray

    def __len__(self) -> int:
        return len(self.time)

    @property
    def in_use(self) -> np.ndarray:
        """Bytes in use."""
        return np.maximum(self.reserved, 0) + np.maximum(self.allocated, 0)

    def take(self, rows: np.ndarray) -> MemoryEvents:
        """Return the events of these rows."""
        return MemoryEvents(*(getattr(self, key)[rows] for key in self.__dataclass_fields__))


def memory_rows(hosts: list[Plane], strings: list[str]) -> list[tuple[Line, np.ndarray]]:
    """Return the lines with events of allocators, and the rows of these."""
    names = [index for index, text in enumerate(strings) if text in (_ALLOCATED, _FREED)]
    lines = [line for plane in hosts for line in plane.lines if names and "bytes_allocated" in line.stats]
    return [(line, np.flatnonzero(np.isin(line.names, names) & (line.stats["bytes_allocated"] != MISSING))) for line in lines]


def read_memory_events(found: list[tuple[Line, np.ndarray]], strings: list[str]) -> MemoryEvents | None:
    """Return the events at these rows (of memory_rows); None without any."""
    if not sum(len(rows) for _, rows in found):
        return None

    def stat(*keys: str) -> np.ndarray:
        return np.concatenate([line.stat(*keys)[rows].astype(np.int64) for line, rows in found])

    def text(key: str) -> np.ndarray:
        values = stat(key)
        return np.where((values >= 0) & (values < len(strings)), values, MISSING)  # a text of digits was written as a number

    time = np.concatenate([line.start_ps[rows] for line, rows in found])
    freed = strings.index(_FREED) if _FREED in strings else MISSING
    events = MemoryEvents(
        time=time,
        freed=np.concatenate([line.names[rows] == freed for line, rows in found]),
        allocator=text("allocator_name"),
        device=stat("index_on_host", "device_ordinal"),
        reserved=stat("bytes_reserved"),
        allocated=stat("bytes_allocated"),
        available=stat("bytes_available"),
        lifetime_peak=stat("peak_bytes_in_use"),
        fragmentation=stat("fragmentation"),
        size=stat("allocation_bytes"),
        address=stat("addr"),
        operation=text("tf_op"),
        data_type=stat("data_type"),
        shape=text("shape"),
    )
    return events.take(np.argsort(time, kind="stable"))


def by_allocator(events: MemoryEvents | None, strings: list[str]) -> Iterator[tuple[str, MemoryEvents]]:
    """Yield the name of every allocator, and its events."""
    if events is None:
        return
    for allocator, device in np.unique(np.stack([events.allocator, events.device * (events.allocator == MISSING)]), axis=1).T.tolist():
        name = strings[allocator] if allocator != MISSING else f"device {device}" if device != MISSING else "unnamed allocator"
        mine = events.allocator == allocator
        yield name, events.take(np.flatnonzero(mine if allocator != MISSING else mine & (events.device == device)))


def allocator_memory(host: str, name: str, events: MemoryEvents, strings: list[str]) -> AllocatorMemory:
    """Return the memory of one allocator over time, and what holds it at the peak."""
    in_use = events.in_use
    at = int(in_use.argmax())
    held, early_bytes = _held(events, at, strings)
    size = max(1, -(-len(events) // POINTS))
    moments = [start + int(in_use[start : start + size].argmax()) for start in range(0, len(events), size)]
    return AllocatorMemory(
        host=host,
        allocator=name,
        allocations=int((~events.freed).sum()),
        frees=int(events.freed.sum()),
        capacity_bytes=float(in_use[at] + max(0, events.available[at])) if events.available[at] != MISSING else None,
        lifetime_peak_bytes=float(events.lifetime_peak.max()) if events.lifetime_peak.max() != MISSING else None,
        peak=_moment(events, at, strings),
        early_bytes=early_bytes,
        held=held[:LARGEST],
        timeline=[_moment(events, row, strings) for row in moments],
    )


def _held(events: MemoryEvents, at: int, strings: list[str]) -> tuple[list[HeldMemory], float]:
    """Return what holds memory after an event, the largest first, and what was allocated before the capture."""
    live: dict[int, int] = {}
    for row, (freed, address) in enumerate(zip(events.freed[: at + 1].tolist(), events.address[: at + 1].tolist(), strict=True)):
        if freed:
            live.pop(address, None)
        else:
            live[address] = row
    found: dict[tuple[int, int, int], list[int]] = {}
    for row in live.values():
        found.setdefault((int(events.operation[row]), int(events.data_type[row]), int(events.shape[row])), []).append(row)
    held = [
        HeldMemory(
            operation=_text(operation, strings) or "unknown",
            data_type=_TYPES.get(data_type, ""),
            shape=_text(shape, strings),
            count=len(rows),
            bytes=float(np.maximum(events.size[rows], 0).sum()),
        )
        for (operation, data_type, shape), rows in found.items()
    ]
    early = float(events.in_use[at] - np.maximum(events.reserved[at], 0)) - sum(each.bytes for each in held)
    return sorted(held, key=lambda each: -each.bytes), max(0.0, early)


def _moment(events: MemoryEvents, row: int, strings: list[str]) -> MemoryMoment:
    share = int(events.fragmentation[row])
    return MemoryMoment(
        time_s=float(events.time[row]) * 1e-12,
        in_use_bytes=float(events.in_use[row]),
        fragmentation=None if share == MISSING else share / MILLION,
        operation=_text(int(events.operation[row]), strings),
    )


def _text(index: int, strings: list[str]) -> str:
    return "" if index == MISSING else strings[index]
