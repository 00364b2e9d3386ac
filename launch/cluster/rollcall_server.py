"""The roll call as held by process 0: listen, collect everybody's card, judge, and tell all the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import network
from ridgeline.launch.cluster.card import Card, differences
from ridgeline.launch.cluster.rollcall import BEAT_S, LINE_LIMIT_BYTES, TICK_S, Line, Stopped, Verdict

BACKLOG = 4096
SETTLE_S = 3.0
"""After the first objection: time for others with the same trouble to be named in the same line."""
LATE_S = 20.0
"""After a verdict against the start: time for processes still on their way to hear it."""
LATE_STOPPED_S = 3.0
"""The same when asked to stop: then the others usually are, too."""
PROBE_S = 15.0
NAMED = 8
"""At most so many processes or objections are named."""


def listen(addresses: Iterable[str], port: int) -> list[socket.socket] | None:
    """Listen on one port of all the addresses; None when it is taken on any of them."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for address in addresses:
            listener = stack.enter_context(socket.socket(network.family(address), socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of the port do not matter
            try:
                listener.bind((address, port))
                listener.listen(BACKLOG)
            except OSError:
                return None
            listener.setblocking(False)
            sockets.append(listener)
        stack.pop_all()
        return sockets


@dataclass
class Server:
    """State of one roll call. `judge` looks at all cards once everybody is here and returns an objection (exit code, words) or None."""

    card: Card
    identity: str
    name_of: Callable[[int], str]
    judge: Callable[[Sequence[Card]], tuple[int, str] | None]
    jax_ports: Sequence[int]
    stop: Callable[[], bool]
    say: Callable[[str], None]
    timeout_s: float
    cards: dict[int, Card] = field(default_factory=dict)
    lines: dict[int, Line] = field(default_factory=dict)
    objections: list[tuple[int, str]] = field(default_factory=list)
    probed: dict[int, str | None] = field(default_factory=dict)
    stopping: str | None = None
    verdict: Verdict | None = None
    _handlers: set[asyncio.Task[None]] = field(default_factory=set)

    async def call(self, listeners: Sequence[socket.socket]) -> Verdict:
        """Hold the roll call and return its verdict after everybody was told. Raises Stopped when asked to stop."""
        self.cards[self.card.process] = self.card
        self._check(self.card)
        servers = [await asyncio.start_server(self._accept, sock=item, limit=LINE_LIMIT_BYTES) for item in listeners]
        try:
            verdict = await self._judge()
            await self._tell(verdict)
            if self.stopping is not None:
                raise Stopped
            return verdict
        finally:
            for server in servers:
                server.close()
            for task in self._handlers:
                task.cancel()
            for line in self.lines.values():
                line.close()

    async def _judge(self) -> Verdict:
        missing = await self._gather()
        if self.stopping is not None:
            return Verdict(False, self.stopping, exit_codes.PREEMPTED)
        if self.objections:
            return self._refusal()
        if missing:
            named = _some([self.name_of(process) for process in missing])
            verb = "has" if len(missing) == 1 else "have"
            return Verdict(False, f"{named} {verb} not come within {self.timeout_s:.0f} s; {self._here()}", exit_codes.LOST_PEER)
        objection = self.judge([self.cards[process] for process in sorted(self.cards)])
        if objection is not None:
            return Verdict(False, objection[1], objection[0])
        return await self._probe()

    async def _gather(self) -> list[int]:
        """Wait until all are here, somebody objects, or time is up; return who is missing."""
        loop = asyncio.get_running_loop()
        begin, beat, settle = loop.time(), 0.0, None
        while True:
            now = loop.time() - begin
            missing = [process for process in range(self.card.processes) if process not in self.cards]
            if self.stop():
                self.stopping = f"{self.card.name} was asked to stop"
            if self.stopping is not None or now >= self.timeout_s:
                return missing
            if self.objections:
                settle = now + SETTLE_S if settle is None else settle
                if self._heard() >= self.card.processes or now >= settle:
                    return missing
            elif not missing:
                return []
            if now >= beat + BEAT_S:
                beat = now
                self.say(f"waiting for {len(missing)} of {self.card.processes} processes: {_some([self.name_of(p) for p in missing])}")
                await self._broadcast({"waiting": len(missing)})
            await asyncio.sleep(TICK_S / 2)

    async def _probe(self) -> Verdict:
        """Choose the port of jax.distributed and have every process try it."""
        if self.card.processes == 1 or not self.lines:
            address = "127.0.0.1"
        else:
            seen = Counter(line.local_address for line in self.lines.values())
            address = max(seen, key=lambda item: (not network.is_loopback(item), seen[item]))
        for port in self.jax_ports:
            listeners = listen([address], port)
            if listeners is not None:
                break
        else:
            return Verdict(
                False, f"no port of {self.card.host} is free for jax.distributed (tried {self.jax_ports[0]}, ...)", exit_codes.BAD_NODE
            )
        server = await asyncio.start_server(_hold_until_closed, sock=listeners[0])
        try:
            await self._broadcast({"probe": [address, port]})
            loop = asyncio.get_running_loop()
            deadline = loop.time() + PROBE_S
            others = set(self.lines)
            while not others <= set(self.probed) and loop.time() < deadline and self.stopping is None and not self.objections:
                if self.stop():
                    self.stopping = f"{self.card.name} was asked to stop"
                await asyncio.sleep(TICK_S / 5)
        finally:
            server.close()
        if self.stopping is not None:
            return Verdict(False, self.stopping, exit_codes.PREEMPTED)
        if self.objections:
            return self._refusal()
        failed = {process: self.probed.get(process, "no answer (timed out)") for process in sorted(others)}
        words = [f"{self.name_of(process)}: {reason}" for process, reason in failed.items() if reason is not None]
        if words:
            where = network.with_port(address, port)
            return Verdict(
                False,
                f"jax.distributed's port {where} cannot be reached from {_some(words)}; open it in the firewall",
                exit_codes.LOST_PEER,
            )
        counts = [card.devices for card in self.cards.values()]
        total = None if None in counts else sum(count for count in counts if count is not None)
        return Verdict(True, address=address, port=port, devices=total)

    async def _tell(self, verdict: Verdict) -> None:
        """Send the verdict to all; on a refusal also to those still on their way."""
        self.verdict = verdict
        await self._broadcast({"verdict": verdict.to_json()})
        if verdict.ok:
            return
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while self._heard() < self.card.processes:
            late_s = LATE_STOPPED_S if self.stopping is not None or self.stop() else LATE_S
            if loop.time() - begin >= min(late_s, self.timeout_s):
                return
            await asyncio.sleep(TICK_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        line = Line(reader, writer)
        try:
            await self._serve(line)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(task)

    async def _serve(self, line: Line) -> None:
        """Serve one connection from its first word to its end."""
        hello = await line.receive()
        if hello is None or hello.get("ridge") != 1 or hello.get("identity") != self.identity:
            if hello is not None:
                await line.send({"ridge": 1, "other": self.identity})
            line.close()
            return
        try:
            card = Card.from_json(hello["card"])
        except (KeyError, TypeError):
            line.close()
            return
        await line.send({"ridge": 1, "identity": self.identity})
        self._admit(card, line)
        if self.verdict is not None:
            await line.send({"verdict": self.verdict.to_json()})
        while (message := await line.receive()) is not None:
            if "probed" in message:
                self.probed[card.process] = message["probed"]
            if "stopping" in message:
                self.stopping = f"{card.name} was asked to stop"
        if self.verdict is None and self.stopping is None:
            self.objections.append((exit_codes.LOST_PEER, f"{card.name} ended during the roll call"))

    def _admit(self, card: Card, line: Line) -> None:
        """Take a process in, or object to it; its line is kept either way, so that it hears the verdict."""
        key, known = card.process, self.cards.get(card.process)
        if card.processes != self.card.processes or not 0 <= key < self.card.processes:
            self._object(f"{card.name} counts {card.processes} processes, {self.card.name} counts {self.card.processes}")
        elif known is not None:
            self._object(f"two processes claim index {key}: pid {known.pid} on {known.host} and pid {card.pid} on {card.host}")
        else:
            self.cards[key], self.lines[key] = card, line
            self._check(card)
            return
        self.lines[-1 - len(self.lines)] = line  # heard, but not counted

    def _check(self, card: Card) -> None:
        if card.trouble is not None:
            self.objections.append((card.trouble[0], f"{card.name}: {card.trouble[1]}"))
        for difference in differences(self.card, card):
            self._object(difference)

    def _object(self, words: str) -> None:
        self.objections.append((exit_codes.USAGE, words))

    async def _broadcast(self, message: dict[str, object]) -> None:
        for line in list(self.lines.values()):
            with contextlib.suppress(OSError):
                await line.send(message)

    def _refusal(self) -> Verdict:
        """Return the verdict of the objections: lost processes weigh more, since their cause may be why others object."""
        code = max(code for code, _ in self.objections)
        words = list(dict.fromkeys(words for each, words in self.objections if each == code))
        return Verdict(False, _some(words, "; "), code)

    def _heard(self) -> int:
        """Count the processes that have reported, those refused included."""
        return 1 + len(self.lines)

    def _here(self) -> str:
        return f"{len(self.cards)} of {self.card.processes} are here"


async def _hold_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Keep a probe's connection until the other side closes it: so no waiting state of it stays with the port."""
    with contextlib.suppress(OSError):
        await reader.read(1)
    writer.close()


def _some(words: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(words[:NAMED])
    return shown if len(words) <= NAMED else f"{shown} and {len(words) - NAMED} more"
