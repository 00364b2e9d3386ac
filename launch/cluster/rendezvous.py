"""Rendezvous before jax.distributed starts: messages and TCP connections. Every process registers with process 0.

jax.distributed waits five minutes without output when a process is missing, and does not compare code or packages. Here process 0 listens
on a port that all processes derive, compares the process descriptions, has every process test the port that jax.distributed will use, and
sends all of them the same verdict: one line with the cause.

Protocol, one JSON object per line ("card" holds a `ProcessInfo`). A connection begins with a handshake, which the preflight's exchange
(launch/preflight/exchange.py) shares: both sides prove that they have the secret of the job, without sending it. What fails it is a
stranger: it is counted and ignored.

    process  -> 0   {"ridge": 2, "identity": ..., "nonce": a}
    0 -> process    {"ridge": 2, "identity": ..., "nonce": b, "proof": HMAC("server", a, b)}    of another start: {"ridge": 2, "other": ...}
    process  -> 0   {"proof": HMAC("client", a, b)}
    0 -> process    {"accepted": true}

    process  -> 0   {"card": {...}}
    0 -> process    {"waiting": n}                        every few seconds
    0 -> process    {"probe": [address, port]}            once all processes have registered and agree
    process  -> 0   {"probed": null or "reason"}
    0 -> process    {"verdict": {...}}
    process  -> 0   {"stopping": true}                    SIGTERM received

The connections of a successful rendezvous stay open for the life of the run (launch/cluster/link.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import resource
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")

SECRET = "RIDGE_SECRET"
"""Environment variable: the secret of a job, equal in its processes. Job scripts and `ridge launch` set it. Without it any program that
reaches process 0's port, and can guess the identity of the start, may register."""
HELLO_BYTES, MESSAGE_BYTES = 1 << 12, 1 << 24
"""Longest message during the handshake, and after it."""
BUFFER_BYTES = 1 << 15
HELLO_S = 10.0
"""Timeout of a handshake."""
STRANGERS = 256
"""Connections that may be in the handshake at a time beyond the number of processes; more are closed at once."""
TICK_S = 0.1
"""Interval at which a waiting process checks for a request to stop."""
BEAT_S = 5.0
"""Interval of process 0's messages to waiting processes."""
SILENCE_S = 60.0
"""Without a message from process 0 for this long, it or the network has failed."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 20, 10, 4
"""A host that vanishes without closing its connections is noticed after 60 s: the kernel's probes get no answer. A stopped or busy process
is not affected, because its kernel answers. JAX's own limit is join.HEARTBEAT_S."""


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


_VERDICT: TypeAdapter[Verdict] = TypeAdapter(Verdict)


def read_verdict(value: object) -> Verdict | None:
    """Return a received verdict; None for anything else."""
    try:
        return _VERDICT.validate_json(json.dumps(value), strict=True)
    except ValueError:
        return None


class Connection:
    """A TCP connection that carries JSON objects, one per line. Longer lines than `limit` and anything else end it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.limit = HELLO_BYTES
        _keep_alive(writer.get_extra_info("socket"))

    async def send(self, value: dict[str, Any]) -> None:
        """Send one object. Raises OSError for a closed connection."""
        self.writer.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        await self.writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next object, None at the end of the connection or for anything but a JSON object within the limit."""
        try:
            line = await self._line()
            value = None if line is None else json.loads(line)
        except (ValueError, RecursionError, OSError, asyncio.IncompleteReadError):
            return None
        return value if isinstance(value, dict) else None

    async def _line(self) -> bytes | None:
        parts, size = [], 0
        while True:
            try:
                part = await self.reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:  # longer than the reader's buffer
                part = await self.reader.readexactly(error.consumed)
            parts.append(part)
            size += len(part)
            if size > self.limit:
                return None
            if part.endswith(b"\n"):
                return b"".join(parts)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()

    @property
    def peer(self) -> str:
        """Address of the other side."""
        name = self.writer.get_extra_info("peername")
        return str(name[0]) if name else "unknown"

    @property
    def local_address(self) -> str:
        """This process's address on the connection."""
        return str(self.writer.get_extra_info("sockname")[0])


async def connect(address: str, port: int, timeout_s: float) -> Connection:
    """Open a connection. Raises OSError (TimeoutError included)."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port, limit=BUFFER_BYTES), timeout_s)
    return Connection(reader, writer)


async def offer(connection: Connection, identity: str, secret: str) -> str | None:
    """The handshake of a process that connects; return why the other side is not process 0 of this start, None if it is."""
    mine = secrets.token_hex(16)
    await connection.send({"ridge": 2, "identity": identity, "nonce": mine})
    reply = await asyncio.wait_for(connection.receive(), HELLO_S)
    if reply is None or reply.get("ridge") != 2:
        return "another program listens on this port"
    if reply.get("identity") != identity:
        return f"process 0 of another run ({str(reply.get('other'))[:200]})"
    nonces = [mine, str(reply.get("nonce"))]
    if not _proves(reply, "server", identity, nonces, secret):
        return f"process 0 there has another {SECRET}, or one of the two has none"
    await connection.send({"proof": _proof("client", identity, nonces, secret)})
    reply = await asyncio.wait_for(connection.receive(), HELLO_S)
    if reply is None or reply.get("accepted") is not True:
        return "process 0 did not accept this process"
    connection.limit = MESSAGE_BYTES
    return None


@dataclass
class Doorkeeper:
    """The handshake of process 0: lets the processes of this start in, counts and ignores everyone else."""

    identity: str
    secret: str
    processes: int
    log: Callable[[str], None]
    strangers: int = 0
    """Connections of other programs, and of processes without the secret."""
    _open: int = 0

    async def admit(self, connection: Connection) -> bool:
        """Return whether the other side belongs to this start; a stranger's connection is closed."""
        if self._open >= self.processes + STRANGERS:
            return self._refuse(connection, "too many connections")
        self._open += 1
        try:
            why = await asyncio.wait_for(self._examine(connection), HELLO_S)
        except TimeoutError:
            why = "it sent nothing"
        except OSError:
            why = "it disconnected"
        finally:
            self._open -= 1
        if why is not None:
            return self._refuse(connection, why)
        connection.limit = MESSAGE_BYTES
        return True

    async def _examine(self, connection: Connection) -> str | None:
        """Return why the other side does not belong to this start; "" for a process of another start, which is no stranger."""
        hello = await connection.receive()
        if hello is None or hello.get("ridge") != 2 or not isinstance(hello.get("nonce"), str):
            return "it is no process of ridge"
        if hello.get("identity") != self.identity:
            await connection.send({"ridge": 2, "other": self.identity})
            return ""
        nonces = [hello["nonce"], secrets.token_hex(16)]
        proof = _proof("server", self.identity, nonces, self.secret)
        await connection.send({"ridge": 2, "identity": self.identity, "nonce": nonces[1], "proof": proof})
        reply = await connection.receive()
        if reply is None or not _proves(reply, "client", self.identity, nonces, self.secret):
            return f"it does not have the {SECRET} of this process"
        await connection.send({"accepted": True})
        return None

    def _refuse(self, connection: Connection, why: str) -> bool:
        if why:
            self.strangers += 1
            if str(self.strangers).strip("0") == "1":  # the 1st, 10th, 100th, ...
                self.log(f"WARNING: ignored a connection from {connection.peer}: {why} ({self.strangers} so far)")
        connection.close()
        return False


def _proof(side: str, identity: str, nonces: list[str], secret: str) -> str:
    text = json.dumps([side, identity, *nonces])
    return hmac.new(secret.encode(errors="surrogateescape"), text.encode(), "sha256").hexdigest()


def _proves(message: dict[str, Any], side: str, identity: str, nonces: list[str], secret: str) -> bool:
    given = message.get("proof")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _proof(side, identity, nonces, secret).encode())


class BackgroundLoop:
    """An event loop in a daemon thread: connections outlive the call that opened them, and cost the other threads nothing while idle."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report_error)
        threading.Thread(target=self._loop.run_forever, name="ridge-link", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the loop and return its result. Raises TimeoutError. Not from the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


def _report_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not sys.is_finalizing():  # tasks that wait at the end of the process are no error
        loop.default_exception_handler(context)


def allow_connections(processes: int) -> None:
    """Raise the limit of open files for one connection per process here and one in JAX's coordination service."""
    needed = 2 * processes + 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))


def _keep_alive(item: socket.socket) -> None:
    item.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES)),
    ):
        if (option := getattr(socket, name, None)) is not None:  # Linux has all four
            item.setsockopt(socket.IPPROTO_TCP, option, value)


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
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
