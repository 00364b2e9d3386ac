"""Memory of a compiled program, from XLA's buffer assignment in its HloProto: by use, and over its schedule.

The buffers of arguments, outputs and constants live as long as the program runs. Temporaries share one heap, whose allocations and frees
XLA recorded in scheduled order. A loop's body is in the schedule once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.hlo.protobuf import decode_text, fields, signed, varint

_ALLOCATE, _FREE, _SHARE = 0, 1, 2


@dataclass
class ProgramMemory:
    """Memory of one run of a program on one device, bytes."""

    arguments: int = 0
    outputs: int = 0
    """Outputs that do not reuse the memory of arguments."""
    constants: int = 0
    temporaries: int = 0
    """The heap, its gaps included."""
    timeline: list[tuple[str, int]] = field(default_factory=list)
    """(instruction, live temporaries) after every change, in scheduled order."""
    at_peak: list[tuple[str, int]] = field(default_factory=list)
    """(instruction, size) of the temporaries that are live at the peak, largest first."""

    @property
    def fixed(self) -> int:
        """What lives as long as the program runs."""
        return self.arguments + self.outputs + self.constants

    @property
    def peak(self) -> tuple[str, int]:
        """The instruction at the peak, and all memory then, without gaps in the heap."""
        name, live = max(self.timeline, key=lambda entry: entry[1], default=("", 0))
        return name, self.fixed + live


def read_memory(data: bytes, names: dict[int, str]) -> ProgramMemory | None:
    """Read the buffer assignment of an HloProto; None when it has none.

    Args:
      data: the HloProto.
      names: of the instructions, by id.

    Raises:
      Damaged: it is not an HloProto.
    """
    found = next(((begin, end) for number, _, begin, end in fields(data, 0, len(data)) if number == 3), None)
    if found is None:
        return None
    memory = ProgramMemory()
    buffers: dict[int, tuple[str, int]] = {}
    events: list[list[tuple[int, int, str, int]]] = []
    for number, _, begin, end in fields(data, *found):
        if number == 1:
            key, buffer = _buffer(data, begin, end, names)
            buffers[key] = buffer
        elif number == 3:
            _allocation(data, begin, end, memory)
        elif number == 4:
            events.append([_event(data, a, b) for n, _, a, b in fields(data, begin, end) if n == 1])
    _replay(memory, buffers, max(events, key=len, default=[]))
    return memory


def _allocation(data: bytes, start: int, end: int, memory: ProgramMemory) -> None:
    found = _integers(data, start, end)
    size = found.get(2, 0)
    if found.get(3):  # of one thread of the CPU backend: registers
        return
    if found.get(5):
        memory.arguments += size
    elif found.get(12):
        memory.constants += size
    elif found.get(7):
        memory.outputs += size
    else:
        memory.temporaries += size


def _buffer(data: bytes, start: int, end: int, names: dict[int, str]) -> tuple[int, tuple[str, int]]:
    key = size = 0
    name = ""
    for number, _, begin, stop in fields(data, start, end):
        if number == 1:
            key, _ = varint(data, begin)
        elif number == 2:
            size, _ = varint(data, begin)
        elif number == 3:
            for inner, _, first, last in fields(data, begin, stop):
                if inner == 2:
                    name = decode_text(data, first, last)
                elif inner == 4:
                    name = names.get(signed(varint(data, first)[0]), name)
    return key, (name, size)


def _event(data: bytes, start: int, end: int) -> tuple[int, int, str, int]:
    """Return kind, buffer, instruction, and the buffer that it shares memory with."""
    found = _integers(data, start, end)
    name = next((decode_text(data, begin, stop) for number, _, begin, stop in fields(data, start, end) if number == 4), "")
    return found.get(1, _ALLOCATE), found.get(2, 0), name, found.get(5, 0)


def _replay(memory: ProgramMemory, buffers: dict[int, tuple[str, int]], events: Sequence[tuple[int, int, str, int]]) -> None:
    """Follow the live temporaries. Memory that buffers share is free when the last of them is."""
    owner: dict[int, int] = {}
    users: dict[int, int] = {}
    live = peak = 0
    for kind, buffer, name, shared in events:
        if kind == _FREE:
            root = owner.pop(buffer, buffer)
            users[root] = users.get(root, 1) - 1
            if users[root] > 0:
                continue
            users.pop(root)
            live -= buffers.get(root, ("", 0))[1]
        else:
            root = owner.get(shared, shared) if kind == _SHARE else buffer
            owner[buffer] = root
            users[root] = users.get(root, 0) + 1
            if users[root] > 1:
                continue
            live += buffers.get(root, ("", 0))[1]
        memory.timeline.append((name, live))
        if live > peak:
            peak = live
            memory.at_peak = [buffers[each] for each in users if each in buffers]
    memory.at_peak.sort(key=lambda entry: -entry[1])


def _integers(data: bytes, start: int, end: int) -> dict[int, int]:
    return {number: varint(data, begin)[0] for number, tag, begin, _ in fields(data, start, end) if varint(data, tag)[0] & 7 == 0}
