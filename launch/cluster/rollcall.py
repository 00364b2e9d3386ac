"""The roll call: before JAX is asked to connect anything, every process reports to process 0 over plain TCP.

JAX's own rendezvous waits five minutes without a word when a process is missing, and says nothing of different code or packages. Here
process 0 listens on a port both sides derive, checks everybody's card, tries the port that jax.distributed will use from every process, and
tells all of them the same verdict in one line.

One JSON object per line:

    process  -> 0   {"ridge": 1, "identity": ..., "card": {...}}
    0 -> process    {"ridge": 1, "identity": ...}        or, of another start of a run:   {"ridge": 1, "other": ...}
    0 -> process    {"waiting": n}                        every few seconds
    0 -> process    {"probe": [address, port]}            once all are here and agree
    process  -> 0   {"probed": null or "why not"}
    0 -> process    {"verdict": {...}}
    process  -> 0   {"stopping": true}                    a SIGTERM came
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
"""How often a waiting process looks whether it was asked to stop."""
BEAT_S = 5.0
"""Process 0 speaks this often to those who wait."""
SILENCE_S = 60.0
"""No word from process 0 for this long: it or the network is gone."""


class Stopped(Exception):
    """The process was asked to stop while it waited."""


@dataclass(frozen=True)
class Verdict:
    """What process 0 tells all processes at the end of the roll call."""

    ok: bool
    message: str = ""
    """Why not, in one line."""
    exit_code: int = 0
    address: str = ""
    """Where jax.distributed's coordinator will listen."""
    port: int = 0
    devices: int | None = None
    """Devices of all processes together; None: not known before JAX is asked."""

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return asdict(self)


class Line:
    """A TCP connection that carries JSON lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, value: dict[str, Any]) -> None:
        """Send one object. Raises OSError when the other side is gone."""
        self.writer.write(json.dumps(value).encode() + b"\n")
        await self.writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next object, None at the end of the connection or when the other side does not speak JSON lines."""
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
        """Our address on this connection."""
        return str(self.writer.get_extra_info("sockname")[0])


async def connect(address: str, port: int, timeout_s: float) -> Line:
    """Open a connection. Raises OSError (TimeoutError included)."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port, limit=LINE_LIMIT_BYTES), timeout_s)
    return Line(reader, writer)


async def unless_stopped(work: Awaitable[T], stop: Callable[[], bool], timeout_s: float | None = None) -> T:
    """Await `work`, looking every TICK_S whether to stop. Raises Stopped, or TimeoutError after timeout_s."""
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


def why(error: BaseException) -> str:
    """Say why a connection failed."""
    if isinstance(error, TimeoutError):
        return "no answer (timed out)"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
