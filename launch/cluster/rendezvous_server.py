"""Rendezvous in process 0: listen, collect the process descriptions, compare them, and send all processes one verdict."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import network
from ridgeline.launch.cluster.process_info import ProcessInfo, differences
from ridgeline.launch.cluster.rendezvous import BEAT_S, BUFFER_BYTES, SECRET, TICK_S, Connection, Doorkeeper, Stopped, Verdict

SETTLE_S = 3.0
"""Wait after the first error, so that other processes with the same error appear in the same message."""
LATE_S = 20.0
"""Wait after a refusal, so that processes still starting receive it."""
LATE_STOPPED_S = 3.0
"""The same wait after a request to stop, which usually reaches all processes."""
PROBE_S = 15.0
NAMED = 8
"""Limit of processes or errors named in a message."""


@dataclass
class Server:
    """State of one rendezvous.

    check_all: called with all descriptions once every process has registered; returns an error (exit code, message) or None.
    """

    own: ProcessInfo
    doorkeeper: Doorkeeper
    name_of: Callable[[int], str]
    check_all: Callable[[Sequence[ProcessInfo]], tuple[int, str] | None]
    jax_ports: Sequence[int]
    stop: Callable[[], bool]
    log: Callable[[str], None]
    timeout_s: float
    infos: dict[int, ProcessInfo] = field(default_factory=dict)
    connections: dict[int, Connection] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)
    probed: dict[int, str | None] = field(default_factory=dict)
    stopping: str | None = None
    verdict: Verdict | None = None
    _handlers: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, listeners: Sequence[socket.socket]) -> Verdict:
        """Run the rendezvous; return the verdict after sending it to all processes. Raises Stopped on a request to stop.

        The connections of a successful rendezvous stay open, with no reader.
        """
        self.infos[self.own.process] = self.own
        self._check(self.own)
        servers = [await asyncio.start_server(self._accept, sock=item, limit=BUFFER_BYTES) for item in listeners]
        try:
            verdict = await self._decide()
            await self._send_verdict(verdict)
            if self.stopping is not None:
                raise Stopped
            return verdict
        finally:
            for server in servers:
                server.close()
            for task in self._handlers:
                task.cancel()
            if self.verdict is None or not self.verdict.ok:
                for connection in self.connections.values():
                    connection.close()

    async def _decide(self) -> Verdict:
        missing = await self._gather()
        if self.stopping is not None:
            return Verdict(False, self.stopping, exit_codes.PREEMPTED)
        if self.errors:
            return self._refusal()
        if missing:
            named = _some([self.name_of(process) for process in missing])
            verb = "has" if len(missing) == 1 else "have"
            return Verdict(
                False,
                f"{named} {verb} not started within {self.timeout_s:.0f} s; {len(self.infos)} of {self.own.processes} processes are here"
                + self._strangers(),
                exit_codes.LOST_PEER,
            )
        error = self.check_all([self.infos[process] for process in sorted(self.infos)])
        if error is not None:
            return Verdict(False, error[1], error[0])
        return await self._probe()

    async def _gather(self) -> list[int]:
        """Wait for all processes, an error, or the timeout; return the missing processes."""
        loop = asyncio.get_running_loop()
        begin, beat, settle = loop.time(), 0.0, None
        while True:
            now = loop.time() - begin
            missing = [process for process in range(self.own.processes) if process not in self.infos]
            if self.stop():
                self.stopping = f"{self.own.name} received SIGTERM"
            if self.stopping is not None or now >= self.timeout_s:
                return missing
            if self.errors:
                settle = now + SETTLE_S if settle is None else settle
                if self._registered() >= self.own.processes or now >= settle:
                    return missing
            elif not missing:
                return []
            if now >= beat + BEAT_S:
                beat = now
                self.log(f"waiting for {len(missing)} of {self.own.processes} processes: {_some([self.name_of(p) for p in missing])}")
                await self._broadcast({"waiting": len(missing)})
            await asyncio.sleep(TICK_S / 2)

    async def _probe(self) -> Verdict:
        """Choose the port of jax.distributed and have every process connect to it."""
        if self.own.processes == 1 or not self.connections:
            address = "127.0.0.1"
        else:
            seen = Counter(connection.local_address for connection in self.connections.values())
            address = max(seen, key=lambda item: (not network.is_loopback(item), seen[item]))
        for port in self.jax_ports:
            listeners = network.listen([address], port)
            if listeners is not None:
                break
        else:
            return Verdict(
                False, f"no port of {self.own.host} is free for jax.distributed (tried {self.jax_ports[0]}, ...)", exit_codes.BAD_NODE
            )
        server = await asyncio.start_server(_hold_until_closed, sock=listeners[0])
        try:
            await self._broadcast({"probe": [address, port]})
            loop = asyncio.get_running_loop()
            deadline = loop.time() + PROBE_S
            others = set(self.connections)
            while not others <= set(self.probed) and loop.time() < deadline and self.stopping is None and not self.errors:
                if self.stop():
                    self.stopping = f"{self.own.name} received SIGTERM"
                await asyncio.sleep(TICK_S / 5)
        finally:
            server.close()
        if self.stopping is not None:
            return Verdict(False, self.stopping, exit_codes.PREEMPTED)
        if self.errors:
            return self._refusal()
        failed = {process: self.probed.get(process, "timed out") for process in sorted(others)}
        reasons = [f"{self.name_of(process)}: {reason}" for process, reason in failed.items() if reason is not None]
        if reasons:
            where = network.with_port(address, port)
            return Verdict(
                False,
                f"jax.distributed's port {where} cannot be reached from {_some(reasons)}; open it in the firewall",
                exit_codes.LOST_PEER,
            )
        counts = [info.devices for info in self.infos.values()]
        total = None if None in counts else sum(count for count in counts if count is not None)
        return Verdict(True, address=address, port=port, devices=total)

    async def _send_verdict(self, verdict: Verdict) -> None:
        """Send the verdict to all processes; a refusal also to those that register within LATE_S."""
        self.verdict = verdict
        await self._broadcast({"verdict": verdict.to_json()})
        if verdict.ok:
            return
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while self._registered() < self.own.processes:
            late_s = LATE_STOPPED_S if self.stopping is not None or self.stop() else LATE_S
            if loop.time() - begin >= min(late_s, self.timeout_s):
                return
            await asyncio.sleep(TICK_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        connection = Connection(reader, writer)
        try:
            await self._serve(connection)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(task)

    async def _serve(self, connection: Connection) -> None:
        """Serve one connection."""
        if not await self.doorkeeper.admit(connection):
            return
        try:
            info = ProcessInfo.from_json((await connection.receive() or {}).get("card"))
        except ValueError:
            self.log(f"WARNING: ignored a process at {connection.peer} that does not describe itself as this version does")
            connection.close()
            return
        self._admit(info, connection)
        if self.verdict is not None:
            await connection.send({"verdict": self.verdict.to_json()})
        while (message := await connection.receive()) is not None:
            if "probed" in message:
                self.probed[info.process] = None if message["probed"] is None else str(message["probed"])[:200]
            if message.get("stopping") is True:
                self.stopping = f"{info.name} received SIGTERM"
        if self.verdict is None and self.stopping is None:
            self.errors.append((exit_codes.LOST_PEER, f"{info.name} ended during the rendezvous"))

    def _admit(self, info: ProcessInfo, connection: Connection) -> None:
        """Register a process or record an error; its connection is kept in both cases, so that it receives the verdict."""
        key, known = info.process, self.infos.get(info.process)
        if info.processes != self.own.processes or not 0 <= key < self.own.processes:
            self._add_error(f"{info.name} counts {info.processes} processes, {self.own.name} counts {self.own.processes}")
        elif known is not None:
            self._add_error(f"two processes claim index {key}: pid {known.pid} on {known.host} and pid {info.pid} on {info.host}")
        else:
            self.infos[key], self.connections[key] = info, connection
            self._check(info)
            return
        self.connections[-1 - len(self.connections)] = connection  # receives the verdict, is not counted

    def _check(self, info: ProcessInfo) -> None:
        if info.error is not None:
            self.errors.append((info.error[0], f"{info.name}: {info.error[1]}"))
        for difference in differences(self.own, info):
            self._add_error(difference)

    def _add_error(self, message: str) -> None:
        self.errors.append((exit_codes.USAGE, message))

    async def _broadcast(self, message: dict[str, object]) -> None:
        for connection in list(self.connections.values()):
            with contextlib.suppress(OSError):
                await connection.send(message)

    def _refusal(self) -> Verdict:
        """Return the refusal with the highest exit code: a lost process may be the cause of the other errors."""
        code = max(code for code, _ in self.errors)
        messages = list(dict.fromkeys(message for each, message in self.errors if each == code))
        return Verdict(False, _some(messages, "; "), code)

    def _strangers(self) -> str:
        count = self.doorkeeper.strangers
        return f"; {count} connections were ignored, because they did not prove {SECRET}" if count else ""

    def _registered(self) -> int:
        """Count the registered processes, those with errors included."""
        return 1 + len(self.connections)


async def _hold_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the other side closes a test connection: this side keeps no TIME_WAIT state that would block the port."""
    with contextlib.suppress(OSError):
        await reader.read(1)
    writer.close()


def _some(items: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(items[:NAMED])
    return shown if len(items) <= NAMED else f"{shown} and {len(items) - NAMED} more"
