"""`ridge launch`: start N processes of one command on this machine, forward signals, and end all if one fails."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster.detect import LOCAL_PROCESS, LOCAL_PROCESSES
from ridgeline.launch.cluster.devices import VISIBLE
from ridgeline.launch.cluster.network import LOOPBACK
from ridgeline.launch.cluster.rendezvous import SECRET

GRACE_S = 30.0
"""After the first failure: time for the others to exit, first by themselves, then after SIGTERM, before SIGKILL."""
POLL_S = 0.1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Ended:
    """How a group of processes ended."""

    code: int
    """0, or the exit code of the first process that failed (128 + N for signal N)."""
    failed_first: int | None = None
    """Index of that process; None if all finished or stopped on request."""


def environments(processes: int, env: Mapping[str, str], gpus: int | None) -> list[dict[str, str]]:
    """Return the variables of each process, with an equal share of the GPUs. Raises ValueError if the GPUs are not divisible.

    gpus: number of GPUs the driver shows; None: no GPUs, or not to be used.
    """
    shown = env.get(VISIBLE)
    ids = [str(number) for number in range(gpus or 0)]
    if ids and shown is not None:
        ids = [entry for entry in shown.split(",") if entry]
    if ids and len(ids) % processes:
        raise ValueError(f"{len(ids)} GPUs are not divisible by {processes} processes")
    share = len(ids) // processes
    common = {SECRET: secrets.token_hex(32), **env, "PYTHONUNBUFFERED": "1", LOCAL_PROCESSES: str(processes)}
    return [
        {**common, LOCAL_PROCESS: str(index), **({VISIBLE: ",".join(ids[index * share : (index + 1) * share])} if ids else {})}
        for index in range(processes)
    ]


@contextlib.contextmanager
def held_signals(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Deliver signals at the end of the block only.

    For a block that starts processes: an exception raised within Popen, after the fork, would leave a process running.
    """
    arrived: list[int] = []
    previous = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for arrival in arrived:
            signal.raise_signal(arrival)


class Group:
    """The running processes; signals are forwarded to all of them.

    With several processes Ctrl-C is forwarded as SIGTERM, after which they save and stop together; a second Ctrl-C kills them.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], out: TextIO = sys.stdout) -> None:
        self._out, self._lock, self._interrupted = out, threading.Lock(), False
        self.processes: list[subprocess.Popen[bytes]] = []
        self._previous = {number: signal.signal(number, self._forward) for number in FORWARDED}
        with held_signals(FORWARDED):
            self.processes = [
                # own session: Ctrl-C reaches each process once, through this one
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
                for command, env in zip(commands, environments, strict=True)
            ]
        self._readers = [threading.Thread(target=self._copy, args=(index, p.stdout), daemon=True) for index, p in enumerate(self.processes)]
        for reader in self._readers:
            reader.start()

    def wait(self, clock: Callable[[], float] = time.monotonic, grace_s: float = GRACE_S) -> Ended:
        """Wait for all processes. If one fails, the others get SIGTERM after grace_s and SIGKILL after another grace_s."""
        first: tuple[int, int] | None = None
        failed_at, sent = 0.0, 0
        while (running := [process for process in self.processes if process.poll() is None]) or first is None:
            if first is None:
                bad = [(index, p.returncode) for index, p in enumerate(self.processes) if p.returncode]
                if bad:
                    first, failed_at = bad[0], clock()
                    if running:
                        self._write(
                            f"ridge launch: process {first[0]} exited with {_code(first[1])}; waiting {grace_s:g} s for the others\n"
                        )
                elif not running:
                    break
            elif clock() - failed_at > grace_s * (sent + 1) and sent < 2:
                sent += 1
                for process in running:
                    process.send_signal(signal.SIGTERM if sent == 1 else signal.SIGKILL)
            time.sleep(POLL_S)
        for reader in self._readers:
            reader.join(5)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if first is None:
            return Ended(0)
        if self._interrupted:
            return Ended(exit_codes.INTERRUPTED)
        return Ended(_code(first[1]), None if first[1] == exit_codes.PREEMPTED else first[0])

    def _forward(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and len(self.processes) > 1:
            number = signal.SIGKILL if self._interrupted else signal.SIGTERM
            self._interrupted = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _copy(self, index: int, stream: IO[bytes] | None) -> None:
        assert stream is not None
        prefix = f"{index:>{len(str(len(self.processes) - 1))}}: " if len(self.processes) > 1 else ""
        for line in stream:
            self._write(prefix + line.decode(errors="replace").rstrip("\n") + "\n")

    def _write(self, text: str) -> None:
        with self._lock:
            self._out.write(text)
            self._out.flush()


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def commands(processes: int, arguments: Sequence[str], port: int) -> list[list[str]]:
    """Return the command line of each process: `ridge ARGUMENTS` and its index in the group."""
    base = [sys.executable, "-m", "ridgeline", *arguments]
    if processes == 1:
        return [[*base, "--processes", "1"]]
    place = ["--coordinator", f"{LOOPBACK}:{port}", "--processes", str(processes)]
    return [[*base, *place, "--process", str(index)] for index in range(processes)]
