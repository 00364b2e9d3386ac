"""What the threads of a process wait for in the kernel, as Linux tells in /proc: the system call, and the file that it is about.

A thread counts as waiting if two looks, SAMPLE_S apart, find it in the same call. No file is opened or asked for its status, only its name
is read: this must work while a file system hangs. Calls on pipes, sockets and devices are left out, and so is the rest where /proc does not
tell (another architecture, a container that forbids it).
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
import time
from pathlib import Path

SAMPLE_S = 0.1
"""Between two looks at the calls of a process."""
_NAME_BYTES = 4096
_OF_FILE = {
    "x86_64": {
        0: "read", 1: "write", 3: "close", 5: "fstat", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 72: "fcntl", 73: "flock",
        74: "fsync", 75: "fdatasync", 77: "ftruncate", 78: "getdents", 138: "fstatfs", 217: "getdents64", 285: "fallocate", 295: "preadv",
        296: "pwritev", 326: "copy_file_range", 327: "preadv2", 328: "pwritev2",
    },
    "aarch64": {
        25: "fcntl", 32: "flock", 44: "fstatfs", 46: "ftruncate", 47: "fallocate", 57: "close", 61: "getdents64", 63: "read", 64: "write",
        65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 69: "preadv", 70: "pwritev", 80: "fstat", 82: "fsync", 83: "fdatasync",
        285: "copy_file_range", 286: "preadv2", 287: "pwritev2",
    },
}  # fmt: skip
"""Machine -> number -> name of the calls whose first argument is an open file (Linux, arch/*/entry/syscalls)."""
_OF_NAME = {
    "x86_64": {
        2: "open", 4: "stat", 6: "lstat", 21: "access", 76: "truncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link",
        87: "unlink", 89: "readlink", 137: "statfs",
    },
    "aarch64": {43: "statfs", 45: "truncate"},
}  # fmt: skip
"""The same of those whose first argument is the name of a file."""
_OF_NAME_AT = {
    "x86_64": {
        257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 265: "linkat", 267: "readlinkat",
        269: "faccessat", 316: "renameat2", 332: "statx", 437: "openat2", 439: "faccessat2",
    },
    "aarch64": {
        34: "mkdirat", 35: "unlinkat", 37: "linkat", 38: "renameat", 48: "faccessat", 56: "openat", 78: "readlinkat", 79: "newfstatat",
        276: "renameat2", 291: "statx", 437: "openat2", 439: "faccessat2",
    },
}  # fmt: skip
"""The same of those whose first two arguments are a directory and the name of a file in it."""


def file_waits(process: int, machine: str = platform.machine()) -> list[str]:
    """Return what the threads of a process wait for in the kernel: "pread64 of /data/shard-00001", each once.

    A page of a mapped file has no name: "a page of a file". Takes SAMPLE_S where a thread is in a call on a file, else nearly no time.
    """
    before = _calls(process, machine)
    if not before:
        return []
    time.sleep(SAMPLE_S)
    after = _calls(process, machine)
    waiting = (_described(process, call, machine) for thread, call in sorted(before.items()) if after.get(thread) == call)
    return list(dict.fromkeys(found for found in waiting if found is not None))


def worker_state(process: int, machine: str = platform.machine()) -> str:
    """Return what a worker process does that gives no result: "is stopped", "waits for pread64 of /data/shard-00001", ..."""
    state = _state(Path(f"/proc/{process}/stat"))
    if state in ("T", "t"):
        return "is stopped"
    if state in ("Z", "X", ""):
        return "has ended"
    if waits := file_waits(process, machine):
        return f"waits for {'; '.join(waits)}"
    return "works, and gives nothing" if state == "R" else "waits in its own code"


def _calls(process: int, machine: str) -> dict[int, str]:
    """Return thread -> the line of /proc on its call, of the threads that are in a call on a file or wait for a page."""
    known = {number for table in (_OF_FILE, _OF_NAME, _OF_NAME_AT) for number in table.get(machine, {})}
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for directory in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):  # the thread has ended; "running"
                line = (directory / "syscall").read_text()
                number = int(line.split()[0])
                if number in known or (number == -1 and _state(directory / "stat") == "D"):
                    found[int(directory.name)] = line
    return found


def _state(stat: Path) -> str:
    """Return the state of a process or thread, one letter; empty if it is gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _described(process: int, line: str, machine: str) -> str | None:
    """Return the call and its file; None for a call on something other than a file."""
    number, *arguments = line.split()
    first, second = (int(argument, 16) for argument in arguments[:2])
    if int(number) == -1:
        return "a page of a file"
    if (name := _OF_FILE[machine].get(int(number))) is not None:
        path = _of_descriptor(process, first)
    elif (name := _OF_NAME[machine].get(int(number))) is not None:
        path = _absolute(process, None, _text(process, first))
    else:
        name = _OF_NAME_AT[machine][int(number)]
        path = _absolute(process, first, _text(process, second))
    if not path.startswith("/") or path.startswith(("/dev/", "/proc/", "/memfd:")):
        return None
    return f"{name} of {path}"


def _of_descriptor(process: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/fd/{descriptor}")
    except OSError:
        return ""


def _absolute(process: int, directory: int | None, name: str) -> str:
    """Return a name with the directory that it is relative to; None and AT_FDCWD: the working directory."""
    if name.startswith("/") or not name:
        return name
    signed = None if directory is None else struct.unpack("i", struct.pack("I", directory & 0xFFFFFFFF))[0]
    try:
        base = os.readlink(f"/proc/{process}/cwd") if signed is None or signed < 0 else _of_descriptor(process, signed)
    except OSError:
        return ""
    return f"{base}/{name}"


def _text(process: int, address: int) -> str:
    """Return the text at an address of a process, up to its end or that of the page; empty if it cannot be read."""
    found = b""
    try:
        with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            while b"\0" not in found and len(found) < _NAME_BYTES:
                page = os.sysconf("SC_PAGE_SIZE")
                more = memory.read(page - (address + len(found)) % page)
                if not more:
                    break
                found += more
    except (OSError, OverflowError, ValueError):
        pass
    return os.fsdecode(found.partition(b"\0")[0]) if b"\0" in found else ""
