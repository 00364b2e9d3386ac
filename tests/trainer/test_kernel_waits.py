"""What real processes wait for in the kernel: named pipes and locks block there, as the files of a server that is gone do."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.trainer.kernel_waits import file_waits, worker_state

WAITS = {
    "open": ("os.open(path, os.O_RDONLY)", "openat of {path}"),
    "open in a directory": ("os.open(path.name, os.O_RDONLY, dir_fd=os.open(path.parent, os.O_RDONLY))", "openat of {path}"),
    "open in the working directory": ("os.chdir(path.parent); os.open(path.name, os.O_RDONLY)", "openat of {path}"),
    "read": ("os.read(os.open(path, os.O_RDWR), 1)", "read of {path}"),
    "write": ("file = os.open(path, os.O_RDWR); [os.write(file, bytes(4096)) for _ in range(1000)]", "write of {path}"),
    "lock": ("fcntl.flock(os.open(path.parent, os.O_RDONLY), fcntl.LOCK_EX)", "flock of {path.parent}"),
    "another thread": (
        "threading.Thread(target=os.open, args=(path, os.O_RDONLY), daemon=True).start(); time.sleep(600)",
        "openat of {path}",
    ),
}
"""What blocks, and its description. The test holds the lock of the directory."""
OTHERS = {
    "sleep": "time.sleep(600)",
    "pipe": "os.read(os.pipe()[0], 1)",
    "socket": "ends = socket.socketpair(); ends[0].recv(1)",
    "lock of Python": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "input": "sys.stdin.read()",
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Starts a process that does something; returns its id once it is about to."""
    started: list[subprocess.Popen[str]] = []

    def begin(action: str) -> int:
        code = f"""
            import fcntl, os, pathlib, socket, sys, threading, time
            path = pathlib.Path({str(tmp_path / "pipe")!r})
            print("ready", flush=True)
            {action}
            """
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until(found: Callable[[], object], wanted: object) -> None:
    end_s = time.monotonic() + 30
    while found() != wanted and time.monotonic() < end_s:
        time.sleep(0.05)
    assert found() == wanted


@pytest.mark.parametrize("what", WAITS)
def test_a_call_that_does_not_return_is_named_with_its_file(what: str, start: Callable[[str], int], tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        action, name = WAITS[what]
        process = start(action)
        until(lambda: file_waits(process), [name.format(path=path)])
        assert worker_state(process) == f"waits for {name.format(path=path)}"
    finally:
        os.close(directory)


@pytest.mark.parametrize("what", OTHERS)
def test_waits_for_other_things_are_left_out(what: str, start: Callable[[str], int]) -> None:
    process = start(OTHERS[what])
    until(lambda: worker_state(process), "waits in its own code")
    assert file_waits(process) == []


def test_calls_that_return_are_no_waits(start: Callable[[str], int], tmp_path: Path) -> None:
    """Reads follow each other, each of another byte."""
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    process = start("file = open(path.parent / 'file', 'rb', buffering=0)\n            while True: file.read(1) or file.seek(0)")
    time.sleep(0.2)
    assert [file_waits(process) for _ in range(5)] == [[]] * 5


def test_the_state_of_a_worker_that_is_stopped_or_works_or_has_ended(start: Callable[[str], int]) -> None:
    process = start("while True: pass")
    until(lambda: worker_state(process), "works, and gives nothing")
    os.kill(process, signal.SIGSTOP)
    until(lambda: worker_state(process), "is stopped")
    os.kill(process, signal.SIGKILL)
    until(lambda: worker_state(process), "has ended")
    assert file_waits(process) == []


def test_a_machine_whose_calls_are_not_known_has_no_names(start: Callable[[str], int]) -> None:
    assert file_waits(start("time.sleep(600)"), "another") == []
