"""Messages between the processes of a preflight: JSON lines over TCP, with process 0 as the server.

jax.distributed is not used: a node with a broken JAX, driver or device must be able to report it, and a process that ends or stops
responding must be named without ending the others. Process 0 listens on the ports of the run's rendezvous.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_RETRY_S = 0.2
_CONNECT_S = 5.0
_LINE_BYTES = 1 << 26
_CLOCK_ROUNDS = 12


class ExchangeLost(RuntimeError):
    """Process 0 cannot be reached: it did not start, stopped responding or ended."""


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@dataclass
class _Board:
    """Received messages, guarded by one condition."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    nodes: dict[int, str] = field(default_factory=dict)
    """Process -> node name, of the registered processes."""
    lost: set[int] = field(default_factory=set)
    """Processes whose connection ended."""
    values: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Tag -> process -> its last value with that tag."""


class ExchangeServer:
    """Process 0's side.

    Args:
      listeners: listening sockets; none for a single process.
      identity: identity of this start of the run; processes with another one are rejected.
      clock: wall clock in seconds, with which the others compare theirs.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        identity: str,
        processes: int,
        node: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.processes, self.identity = processes, identity
        self._clock = clock
        self._board = _Board(nodes={0: node})
        self._writers: list[asyncio.StreamWriter] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        if processes > 1:
            _allow_connections(processes)
            self._loop = asyncio.new_event_loop()
            self._servers = [
                self._loop.run_until_complete(asyncio.start_server(self._serve, sock=listener, limit=_LINE_BYTES, backlog=4096))
                for listener in listeners
            ]
            self._thread = threading.Thread(target=self._loop.run_forever, name="doctor-exchange", daemon=True)
            self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process: int | None = None
        board = self._board
        try:
            while data := await reader.readline():
                message = json.loads(data)
                if process is None:
                    process = self._register(message)
                    if process is None:
                        break
                    writer.write(_line({"tag": "welcome", "value": self.identity}))
                    self._writers.append(writer)
                elif "ping" in message:
                    writer.write(_line({"pong": message["ping"], "time": self._clock()}))
                else:
                    with board.changed:
                        board.values.setdefault(message["tag"], {})[process] = message["value"]
                        board.changed.notify_all()
        except (ValueError, KeyError, TypeError, ConnectionError, asyncio.LimitOverrunError):
            pass  # another program connected, or a peer ended in the middle of a line: close this connection
        finally:
            if writer in self._writers:
                self._writers.remove(writer)
            writer.close()
            if process is not None:
                with board.changed:
                    board.lost.add(process)
                    board.changed.notify_all()

    def _register(self, message: dict[str, Any]) -> int | None:
        """Register the process of a first message; return None for one of another job."""
        process, node = message.get("process"), message.get("node")
        if not isinstance(process, int) or not isinstance(node, str) or message.get("identity") != self.identity:
            return None
        if not 0 < process < self.processes:
            return None
        with self._board.changed:
            if process in self._board.nodes:
                return None
            self._board.nodes[process] = node
            self._board.changed.notify_all()
        return process

    def wait_for_all(self, timeout_s: float) -> dict[int, str]:
        """Wait until every process has registered, at most timeout_s; return process -> node of the registered ones."""
        with self._board.changed:
            self._board.changed.wait_for(lambda: len(self._board.nodes) == self.processes, timeout_s)
            return dict(self._board.nodes)

    def put(self, tag: str, value: Any) -> None:
        """Store a value as process 0."""
        with self._board.changed:
            self._board.values.setdefault(tag, {})[0] = value
            self._board.changed.notify_all()

    def gather(self, tag: str, timeout_s: float, awaited: Iterable[int] | None = None) -> dict[int, Any]:
        """Wait until every awaited process that is still connected has sent `tag`, at most timeout_s; return process -> value.

        awaited: None for every registered process.
        """
        board = self._board

        def complete() -> bool:
            return set(board.nodes if awaited is None else awaited) <= set(board.values.get(tag, {})) | board.lost

        with board.changed:
            board.changed.wait_for(complete, timeout_s)
            return dict(board.values.get(tag, {}))

    def latest(self, tag: str) -> dict[int, Any]:
        """Return process -> latest value with `tag` so far."""
        with self._board.changed:
            return dict(self._board.values.get(tag, {}))

    @property
    def lost(self) -> set[int]:
        """Registered processes whose connection has ended."""
        with self._board.changed:
            return set(self._board.lost)

    def broadcast(self, tag: str, value: Any) -> None:
        """Send a value to every other process."""
        if self._loop is None:
            return
        data = _line({"tag": tag, "value": value})

        async def send() -> None:
            for writer in list(self._writers):
                writer.write(data)

        asyncio.run_coroutine_threadsafe(send(), self._loop).result()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the others to disconnect, then stop listening."""
        if self._loop is None:
            return
        with self._board.changed:
            self._board.changed.wait_for(lambda: self._board.lost >= set(self._board.nodes) - {0}, timeout_s)
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        """End all connections."""
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class ExchangeClient:
    """The side of every other process.

    Args:
      addresses, ports: possible addresses of process 0; every pair is retried until the timeout.
      identity: identity of this start of the run; servers with another one are skipped.

    Raises:
      ExchangeLost: process 0 cannot be reached within `timeout_s`.
    """

    def __init__(self, addresses: Sequence[str], ports: Sequence[int], identity: str, process: int, node: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._send_lock = threading.Lock()
        why = "no server found"
        while True:
            for address, port in ((address, port) for port in ports for address in addresses):
                self.address = f"{address}:{port}"
                self._buffer, self._received = b"", dict[str, Any]()
                try:
                    self._socket = socket.create_connection((address, port), timeout=_CONNECT_S)
                except OSError as error:
                    why = error.strerror or str(error)
                    continue
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    self._send({"process": process, "identity": identity, "node": node})
                    if self.receive("welcome", _CONNECT_S) == identity:
                        return
                except (ExchangeLost, ValueError, KeyError, TypeError) as error:
                    why = str(error)
                self._socket.close()
            if time.monotonic() + _RETRY_S > deadline:
                raise ExchangeLost(
                    f"process {process} on {node} did not reach process 0 at {', '.join(addresses)}, ports {ports[0]}... "
                    f"within {timeout_s:.0f} s: {why}"
                )
            time.sleep(_RETRY_S)

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            try:
                self._socket.settimeout(None)
                self._socket.sendall(_line(message))
            except OSError as error:
                raise ExchangeLost(f"lost connection to process 0 at {self.address}: {error.strerror or error}") from error

    def put(self, tag: str, value: Any) -> None:
        """Send a value to process 0. Thread-safe."""
        self._send({"tag": tag, "value": value})

    def receive(self, tag: str, timeout_s: float) -> Any:
        """Wait for process 0's value with `tag`. Raises ExchangeLost if it stops responding or ends."""
        deadline = time.monotonic() + timeout_s
        while tag not in self._received:
            message = self._receive(deadline)
            self._received[message["tag"]] = message["value"]
        return self._received[tag]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            try:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise ExchangeLost(f"process 0 at {self.address} sent no message in time") from None
            except OSError as error:
                raise ExchangeLost(f"lost connection to process 0 at {self.address}: {error.strerror or error}") from error
            if not data:
                raise ExchangeLost(f"lost connection to process 0 at {self.address}: it ended, or another job uses this port")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def clock_offset(self, *, clock: Callable[[], float] = time.time, rounds: int = _CLOCK_ROUNDS) -> tuple[float, float]:
        """Compare this wall clock with process 0's; return (this minus process 0's, uncertainty), in seconds.

        The fastest of several round trips counts: process 0 read its clock between sending and receiving, so half of that round trip bounds
        the error (Cristian 1989, Probabilistic clock synchronization).
        """
        best: tuple[float, float] | None = None
        for number in range(rounds):
            sent_s, begun_s = clock(), time.monotonic()
            self._send({"ping": number})
            while "pong" not in (reply := self._receive(time.monotonic() + _CONNECT_S)):
                self._received[reply["tag"]] = reply["value"]
            trip_s = time.monotonic() - begun_s
            assert reply["pong"] == number
            if best is None or trip_s / 2 < best[1]:
                best = (sent_s + trip_s / 2 - reply["time"], trip_s / 2)
        assert best is not None
        return best

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


def free_port(address: str) -> int:
    """Return a port of `address` that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as probe:
        port: int = probe.getsockname()[1]
        return port


def _allow_connections(processes: int) -> None:
    """Raise the limit of open files to one connection per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < processes + 256:
        wanted = processes + 256 if hard == resource.RLIM_INFINITY else min(processes + 256, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
