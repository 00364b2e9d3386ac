"""Rendezvous before jax.distributed starts: messages and TCP connections. Every process registers with process 0.

jax.distributed waits five minutes without output when a process is missing, and does not compare code or packages. Here process 0 listens
on a port that all processes derive, compares the process descriptions, has every process test the port that jax.distributed will use, and
sends all of them the same verdict: one line with the cause.

Protocol, one JSON object per line ("card" holds a `ProcessInfo`):

    process  -> 0   {"ridge": 1, "identity": ..., "card": {...}}
    0 -> process    {"ridge": 1, "identity": ...}        or, of another start of a run:   {"ridge": 1, "other": ...}
    0 -> process    {"waiting": n}                        every few seconds
    0 -> process    {"probe": [address, port]}            once all processes have registered and agree
    process  -> 0   {"probed": null or "reason"}
    0 -> process    {"verdict": {...}}
    process  -> 0   {"stopping": true}                    SIGTERM received
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LINE_LIMIT_BYTES = 1 << 20
TICK_S = 0.1
"""Interval at which a waiting process checks for a request to stop."""
BEAT_S = 5.0
"""Interval of process 0's messages to waiting processes."""
SILENCE_S = 60.0
"""Without a message from process 0 for this long, it or the network has failed."""


class Stopped(Exception):
    """SIGTERM arrived while the process waited."""


@dataclass(frozen=True)
class Verdict:
    """Result of the rendezvous, sent by process 0 to all processes."""

    ok: bool
    message: str = ""
    """Cause of a refusal, in one line."""
    exit_code: int = 0
    address: str = ""
    """Address of jax.distributed's coordinator."""
    port: int = 0
    devices: int | None = None
    """Devices of all processes together; None: unknown until JAX is loaded."""

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self)


class Connection:
    """A TCP connection that carries JSON lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, value: dict[str, Any]) -> None:
        """Send one object. Raises OSError for a closed connection."""
        self.writer.write(json.dumps(value).encode() + b"\n")
        await self.writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next object, None at the end of the connection or for anything but a JSON object."""
        try:
            line = await self.reader.readline()
            value = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, OSError, asyncio.IncompleteReadError):
            return None
        return value if isinstance(value, dict) else None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()

    @property
    def local_address(self) -> str:
        """This process's address on the connection."""
        return str(self.writer.get_extra_info("sockname")[0])


async def connect(address: str, port: int, timeout_s: float) -> Connection:
    """Open a connection. Raises OSError (TimeoutError included)."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port, limit=LINE_LIMIT_BYTES), timeout_s)
    return Connection(reader, writer)


async def unless_stopped(work: Awaitable[T], stop: Callable[[], bool], timeout_s: float | None = None) -> T:
    """Await `work` and check every TICK_S for a request to stop. Raises Stopped, or TimeoutError after timeout_s."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    try:
        while True:
            if stop():
                raise Stopped
            left = TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - loop.time()))
            done, _ = await asyncio.wait({task}, timeout=left)
            if done:
                return task.result()
            if deadline is not None and loop.time() >= deadline:
                raise TimeoutError
    finally:
        task.cancel()


def failure_reason(error: BaseException) -> str:
    """Return the reason of a failed connection."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
