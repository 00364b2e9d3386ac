"""The collective that a process waits in on CPUs, read from the stacks of its threads: kind, and name of the instruction.

A thread in a collective over gloo has `xla::cpu::GlooCommunicator::AllReduce` (or another kind) on its stack. /proc tells where the stack
of a waiting thread ends; return addresses on it are compared with the symbols of jaxlib's library, which has a symbol table. The stack also
has a pointer to the operation that runs, an object of XLA (`xla::cpu::AllReduceThunk`) that is recognized by its table of virtual
functions and holds the name of the instruction. A collective within one process, of several devices, waits elsewhere and is not seen.
Anything that is not as expected (another library, no symbols, no /proc) gives nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LIBRARY = "libjax_common.so"
KINDS = {
    "all-reduce": "AllReduce",
    "all-gather": "AllGather",
    "reduce-scatter": "ReduceScatter",
    "all-to-all": "AllToAll",
    "collective-permute": "CollectivePermute",
}
"""Kind of HLO -> its name in XLA."""
STACK_BYTES, OBJECT_BYTES, MOST_NAME = 1 << 16, 192, 120
"""How much of a stack and of an object is read; characters of the name of an instruction."""
_NAME = re.compile(rb"[A-Za-z_][\w.\-]*")
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Symbols:
    """Addresses in the loaded library, by kind."""

    functions: Mapping[str, range]
    """Of the function that makes a collective."""
    tables: Mapping[str, int]
    """Of the table of virtual functions, as the objects point to it."""


class NativeWaits:
    """Reads the stacks of this process."""

    def __init__(self) -> None:
        self._symbols: Symbols | None = None

    def prepare(self) -> None:
        """Read the symbols of the library (half a second): later its file system may hang."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            loaded = _loaded_at()
            self._symbols = None if loaded is None else _read_symbols(*loaded)

    def collective(self) -> str | None:
        """Return the kind and, where it is found, the name of the collective in which a thread waits: "all-reduce add.5".

        None where no thread does, or `prepare` found no symbols.
        """
        if self._symbols is None:
            return None
        with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
            for thread in sorted(os.listdir("/proc/self/task"), key=int):
                with contextlib.suppress(OSError, ValueError):  # the thread has ended; "running"
                    if (found := _collective(thread, memory.fileno(), self._symbols)) is not None:
                        return found
        return None


def _collective(thread: str, memory: int, symbols: Symbols) -> str | None:
    call = (Path("/proc/self/task") / thread / "syscall").read_text().split()
    if len(call) < 3:  # "running"; a number and -1 outside of a call still have the end of the stack
        return None
    stack = _words(memory, int(call[-2], 16), STACK_BYTES)
    places = {kind: np.flatnonzero((stack >= own.start) & (stack < own.stop)) for kind, own in symbols.functions.items()}
    places = {kind: place for kind, place in places.items() if place.size}
    if not places:
        return None
    kind = min(places, key=lambda one: int(places[one][0]))  # the innermost: others are left from before
    names = dict.fromkeys(
        name
        for pointer in dict.fromkeys(stack[places[kind][0] :].tolist())
        if (name := _name(memory, pointer, symbols.tables.get(kind))) is not None
    )
    return f"{kind} {next(iter(names))}" if names else kind


def _name(memory: int, pointer: int, table: int | None) -> str | None:
    """Return the name of the instruction of an object at an address; None where there is none with this table."""
    if table is None or pointer % 8 or not 1 << 16 <= pointer < 1 << 47:
        return None
    with contextlib.suppress(OSError):
        words = _words(memory, pointer, OBJECT_BYTES)
        if not words.size or int(words[0]) != table:
            return None
        for text, length in zip(words[1:-1].tolist(), words[2:].tolist(), strict=True):  # std::string: place, length
            if 0 < length <= MOST_NAME and 1 << 16 <= text < 1 << 47:
                with contextlib.suppress(OSError):
                    content = os.pread(memory, length + 1, text)
                    if len(content) == length + 1 and content[-1] == 0 and _NAME.fullmatch(content[:-1]):
                        return content[:-1].decode()
    return None


def _words(memory: int, address: int, size: int) -> Words:
    """Return the 8-byte words from an address on, as far as it is mapped."""
    content = os.pread(memory, size, address)
    return np.frombuffer(content[: len(content) // 8 * 8], np.uint64)


def _loaded_at() -> tuple[Path, int] | None:
    """Return the library and the address at which it begins; None where it is not loaded."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(f"/{LIBRARY}"):
                fields = line.split(maxsplit=5)
                if int(fields[2], 16) == 0:
                    return Path(fields[5].rstrip("\n")), int(fields[0].partition("-")[0], 16)
    return None


def _read_symbols(library: Path, base: int) -> Symbols | None:
    """Read the symbols from the library (ELF, 64 bits, little-endian); None where it has none."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:6] != b"\x7fELF\x02\x01":
            return None
        (sections,) = struct.unpack_from("<Q", content, 40)
        entry, count = struct.unpack_from("<HH", content, 58)
        for number in range(count):
            header = struct.unpack_from("<IIQQQQIIQQ", content, sections + number * entry)
            if header[1] == 2:  # SHT_SYMTAB
                names = struct.unpack_from("<IIQQQQIIQQ", content, sections + header[6] * entry)
                table = np.frombuffer(content[header[4] : header[4] + header[5]], _SYMBOL)
                return _find(content, names[4], names[4] + names[5], table, base)
    return None


_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])


def _find(content: mmap.mmap, begin: int, end: int, table: NDArray[np.void], base: int) -> Symbols | None:
    def symbol(mangled: str) -> tuple[int, int] | None:
        """Return address and size of the first symbol whose name begins so."""
        place = content.find(b"\0" + mangled.encode(), begin, end)
        rows = table[table["name"] == place + 1 - begin] if place >= 0 else table[:0]
        return (int(rows[0]["value"]), int(rows[0]["size"])) if len(rows) else None

    functions, tables = {}, {}
    for kind, name in KINDS.items():
        if found := symbol(f"_ZN3xla3cpu16GlooCommunicator{len(name)}{name}E"):
            functions[kind] = range(base + found[0], base + found[0] + found[1])
        thunk = f"{name}Thunk"
        if found := symbol(f"_ZTVN3xla3cpu{len(thunk)}{thunk}E\0"):
            tables[kind] = base + found[0] + 16  # behind the offset and the type
    return Symbols(functions, tables) if functions else None
