"""Messages between the processes of a preflight, over the connections of launch/cluster/rendezvous.py, with process 0 as the server.

jax.distributed is not used: a node with a broken JAX, driver or device must be able to report it, and a process that ends or stops
responding must be named without ending the others. Process 0 listens on the ports of the run's rendezvous.

    process -> 0    {"process": ..., "node": ...}    after the handshake; process 0 responds {"registered": process}
    both ways       {"tag": ..., "value": ...}
    process -> 0    {"ping": n}                      process 0 responds {"pong": n, "time": ...}
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.launch.cluster import network
from ridgeline.launch.cluster.rendezvous import (
    BUFFER_BYTES,
    BackgroundLoop,
    Connection,
    Doorkeeper,
    allow_connections,
    connect,
    failure_reason,
    offer,
)

_RETRY_S = 0.2
_CONNECT_S = 5.0
_CLOCK_ROUNDS = 12


class ExchangeLost(RuntimeError):
    """Process 0 cannot be reached: it did not start, stopped responding or ended."""


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
      identity, secret: of this start of the run; processes with others are ignored.
      clock: wall clock in seconds, with which the others compare theirs.
      log: receives a warning about strangers.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        identity: str,
        processes: int,
        node: str,
        *,
        secret: str = "",
        clock: Callable[[], float] = time.time,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.processes = processes
        self._clock = clock
        self._board = _Board(nodes={0: node})
        self._doorkeeper = Doorkeeper(identity, secret, processes, log)
        self._connections: list[Connection] = []
        self._servers: list[asyncio.Server] = []
        self._loop: BackgroundLoop | None = None
        if processes > 1:
            allow_connections(processes)
            self._loop = BackgroundLoop()
            self._loop.run(self._listen(listeners))

    async def _listen(self, listeners: Sequence[socket.socket]) -> None:
        for listener in listeners:
            self._servers.append(await asyncio.start_server(self._serve, sock=listener, limit=BUFFER_BYTES, backlog=4096))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, board = Connection(reader, writer), self._board
        if not await self._doorkeeper.admit(connection):
            return
        process = self._register(await connection.receive() or {})
        if process is None:
            connection.close()
            return
        self._connections.append(connection)
        with contextlib.suppress(OSError):
            await connection.send({"registered": process})
            while (message := await connection.receive()) is not None:
                if "ping" in message:
                    await connection.send({"pong": message["ping"], "time": self._clock()})
                elif isinstance(message.get("tag"), str):
                    with board.changed:
                        board.values.setdefault(message["tag"], {})[process] = message.get("value")
                        board.changed.notify_all()
        self._connections.remove(connection)
        connection.close()
        with board.changed:
            board.lost.add(process)
            board.changed.notify_all()

    def _register(self, message: dict[str, Any]) -> int | None:
        """Register the process of a first message; return None for a malformed one or an index that is taken."""
        process, node = message.get("process"), message.get("node")
        if type(process) is not int or not isinstance(node, str) or not 0 < process < self.processes:
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
        if self._loop is not None:
            self._loop.run(self._send_all({"tag": tag, "value": value}))

    async def _send_all(self, message: dict[str, Any]) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                await connection.send(message)

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the others to disconnect, then stop listening."""
        if self._loop is None:
            return
        with self._board.changed:
            self._board.changed.wait_for(lambda: self._board.lost >= set(self._board.nodes) - {0}, timeout_s)
        self._loop.run(self._shut())

    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.close()


class ExchangeClient:
    """The side of every other process.

    Args:
      addresses, ports: possible addresses of process 0; every pair is retried until the timeout.
      identity, secret: of this start of the run; servers with others are skipped.

    Raises:
      ExchangeLost: process 0 cannot be reached within `timeout_s`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ports: Sequence[int],
        identity: str,
        process: int,
        node: str,
        *,
        timeout_s: float,
        secret: str = "",
    ) -> None:
        self._loop = BackgroundLoop()
        self._changed = threading.Condition()
        self._received: dict[str, Any] = {}
        self._ended = False
        self._pong: asyncio.Future[dict[str, Any]] | None = None
        deadline = time.monotonic() + timeout_s
        while True:
            for address, port in ((address, port) for port in ports for address in addresses):
                why = self._loop.run(self._enter(address, port, (identity, secret), {"process": process, "node": node}))
                if why is None:
                    return
            if time.monotonic() + _RETRY_S > deadline:
                raise ExchangeLost(
                    f"process {process} on {node} did not reach process 0 at {', '.join(addresses)}, ports {ports[0]}... "
                    f"within {timeout_s:.0f} s: {why}"
                )
            time.sleep(_RETRY_S)

    async def _enter(self, address: str, port: int, start: tuple[str, str], hello: dict[str, Any]) -> str | None:
        """Connect to one address; return why process 0 is not there, None if it is."""
        connection: Connection | None = None
        try:
            connection = await connect(address, port, _CONNECT_S)
            why = await offer(connection, *start)
            if why is None:
                await connection.send(hello)
                if await asyncio.wait_for(connection.receive(), _CONNECT_S) != {"registered": hello["process"]}:
                    connection.close()
                    return "process 0 did not register this process"
                self.address, self._connection = network.with_port(address, port), connection
                self._task = asyncio.ensure_future(self._read(connection))
                return None
        except OSError as error:
            why = failure_reason(error)
        if connection is not None:
            connection.close()
        return why

    async def _read(self, connection: Connection) -> None:
        while (message := await connection.receive()) is not None:
            if "pong" in message and self._pong is not None and not self._pong.done():
                self._pong.set_result(message)
            elif isinstance(message.get("tag"), str):
                with self._changed:
                    self._received[message["tag"]] = message.get("value")
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def put(self, tag: str, value: Any) -> None:
        """Send a value to process 0. Thread-safe."""
        try:
            self._loop.run(self._connection.send({"tag": tag, "value": value}))
        except OSError as error:
            raise ExchangeLost(f"lost connection to process 0 at {self.address}: {failure_reason(error)}") from error

    def receive(self, tag: str, timeout_s: float) -> Any:
        """Wait for process 0's value with `tag`. Raises ExchangeLost if it stops responding or ends."""
        with self._changed:
            self._changed.wait_for(lambda: tag in self._received or self._ended, timeout_s)
            if tag in self._received:
                return self._received[tag]
        if self._ended:
            raise ExchangeLost(f"lost connection to process 0 at {self.address}: it ended, or did not accept this process")
        raise ExchangeLost(f"process 0 at {self.address} sent no message in time")

    def clock_offset(self, *, clock: Callable[[], float] = time.time, rounds: int = _CLOCK_ROUNDS) -> tuple[float, float]:
        """Compare this wall clock with process 0's; return (this minus process 0's, uncertainty), in seconds.

        The fastest of several round trips counts: process 0 read its clock between sending and receiving, so half of that round trip bounds
        the error (Cristian 1989, Probabilistic clock synchronization).
        """
        return self._loop.run(self._compare_clocks(clock, rounds))

    async def _compare_clocks(self, clock: Callable[[], float], rounds: int) -> tuple[float, float]:
        best: tuple[float, float] | None = None
        for number in range(rounds):
            self._pong = asyncio.get_running_loop().create_future()
            sent_s, begun_s = clock(), time.monotonic()
            try:
                await self._connection.send({"ping": number})
                reply = await asyncio.wait_for(self._pong, _CONNECT_S)
            except OSError as error:
                raise ExchangeLost(f"lost connection to process 0 at {self.address}: {failure_reason(error)}") from error
            trip_s = time.monotonic() - begun_s
            if best is None or trip_s / 2 < best[1]:
                best = (sent_s + trip_s / 2 - float(reply["time"]), trip_s / 2)
        assert best is not None
        return best

    def close(self) -> None:
        """Disconnect."""
        self._loop.run(self._disconnect())

    async def _disconnect(self) -> None:
        self._connection.close()
