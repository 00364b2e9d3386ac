"""Switches the storage trouble of a process that runs with storage_trouble.c preloaded."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.xla_flags import QUICK_XLA

SOURCE = Path(__file__).with_name("storage_trouble.c")
VARIABLE = "STORAGE_TROUBLE"
KINDS = ("none", "full", "inodes", "read_only", "broken", "stale", "gone", "slow", "late", "lost", "stuck")
"""broken: every access is an I/O error; stale: file handles of a server that has restarted; gone: nothing is found any more, open files
work on, as after a lazy unmount; slow: each call takes the delay; late: a rename takes the delay, as on a busy NFS server; lost: every
second rename happens, but the repeated request finds no source, as after a lost reply; stuck: no call returns from the kernel, as of a
server that is gone: for a run that is then ended."""
_BYTES = 4096


def build(directory: Path) -> Path:
    """Compile the library."""
    library = directory / "storage_trouble.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def environment(library: Path, control: Path) -> dict[str, str]:
    """Return the variables of a process under the library."""
    control.write_bytes(bytes(_BYTES))
    return {"LD_PRELOAD": str(library), VARIABLE: str(control)}


class Trouble:
    """The trouble of the processes that map a control file."""

    def __init__(self, control: Path | None = None) -> None:
        with open(control or os.environ[VARIABLE], "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)

    def begin(self, kind: str, prefixes: Sequence[Path], delay_ms: int = 0) -> None:
        """Begin trouble for all paths that begin with one of the prefixes."""
        text = "\n".join(map(str, prefixes)).encode()
        self.end()
        self._map[16 : 16 + len(text) + 1] = text + b"\0"
        self._map[0:16] = struct.pack("iiii", KINDS.index(kind), delay_ms, 0, 0)

    def end(self) -> int:
        """End it; return how many calls it met."""
        hits = self.hits
        self._map[0:4] = struct.pack("i", 0)
        return hits

    @property
    def hits(self) -> int:
        """Calls that failed or waited so far."""
        return int(struct.unpack("i", self._map[8:12])[0])


def without(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without virtual devices, for a process with one."""
    return {**env, "XLA_FLAGS": QUICK_XLA}
