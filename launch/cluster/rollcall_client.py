"""The roll call as seen by every process but the first: find process 0, report, wait for the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import network
from ridgeline.launch.cluster.card import Card
from ridgeline.launch.cluster.rollcall import SILENCE_S, Line, Stopped, Verdict, connect, unless_stopped, why

CONNECT_S = 3.0
"""For one attempt: on the networks of a cluster a connection takes milliseconds."""
FIRST_NOTE_S, NOTES_S = 5.0, 20.0


@dataclass
class Attempts:
    """What has been tried so far, for people."""

    coordinator: str
    addresses: Sequence[str]
    ports: Sequence[int]
    count: int = 0
    last: str = ""

    def __str__(self) -> str:
        where = ", ".join(self.addresses)
        shown = ", ".join(str(port) for port in self.ports[:3]) + (", ..." if len(self.ports) > 3 else "")
        return f"process 0 at {self.coordinator} ({where}; ports {shown}): {self.count} attempts, last: {self.last}"


async def report(
    card: Card,
    identity: str,
    *,
    coordinator: str,
    addresses: Sequence[str],
    ports: Sequence[int],
    timeout_s: float,
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Verdict:
    """Report to process 0 and return its verdict. Raises Stopped."""
    attempts = Attempts(coordinator, addresses, ports)
    line = await _find(identity, card, attempts, timeout_s, stop, say)
    if line is None:
        return Verdict(
            False,
            f"{card.name} could not reach {attempts}; gave up after {timeout_s:.0f} s (is process 0 running, and no firewall between?)",
            exit_codes.LOST_PEER,
        )
    try:
        return await _wait(line, coordinator, stop)
    finally:
        line.close()


async def _find(
    identity: str, card: Card, attempts: Attempts, timeout_s: float, stop: Callable[[], bool], say: Callable[[str], None]
) -> Line | None:
    """Try all addresses and ports, again and again, until process 0 of this start answers; None when time is up."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    note_s, pause_s = FIRST_NOTE_S, 0.05
    while True:
        line = await unless_stopped(_sweep(identity, card, attempts), stop)
        if line is not None:
            return line
        waited_s = loop.time() - begin
        if waited_s >= timeout_s:
            return None
        if waited_s >= note_s:
            say(f"{card.name} is waiting for {attempts}")
            note_s = waited_s + NOTES_S
        await unless_stopped(asyncio.sleep(min(pause_s, timeout_s - waited_s)), stop)
        pause_s = min(1.0, 1.5 * pause_s)


async def _sweep(identity: str, card: Card, attempts: Attempts) -> Line | None:
    """Try every port of every address once, all ports of an address at the same time; None when process 0 is at none of them."""
    for address in attempts.addresses:
        attempts.count += 1
        tasks = [asyncio.ensure_future(_introduce(address, port, identity, card)) for port in attempts.ports]
        try:
            for answer in asyncio.as_completed(tasks):
                result = await answer
                if isinstance(result, Line):
                    return result
                attempts.last = result
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # cancelled attempts close their own connections
    return None


async def _introduce(address: str, port: int, identity: str, card: Card) -> Line | str:
    """Return the connection to process 0 of this start, or why it is not there."""
    where = network.with_port(address, port)
    line: Line | None = None
    answered = False
    try:
        line = await connect(address, port, CONNECT_S)
        await line.send({"ridge": 1, "identity": identity, "card": card.to_json()})
        reply = await asyncio.wait_for(line.receive(), 2 * CONNECT_S)
        if reply is None or reply.get("ridge") != 1:
            return f"{where}: something else listens there"
        if reply.get("identity") != identity:
            return f"{where}: process 0 of another run ({reply.get('other')})"
        answered = True
        return line
    except OSError as error:
        return f"{where}: {why(error)}"
    finally:
        if line is not None and not answered:
            line.close()


async def _wait(line: Line, coordinator: str, stop: Callable[[], bool]) -> Verdict:
    lost = Verdict(False, f"process 0 on {coordinator} ended during the roll call", exit_codes.LOST_PEER)
    while True:
        try:
            message = await unless_stopped(line.receive(), stop, SILENCE_S)
        except Stopped:
            await line.send({"stopping": True})
            raise
        except TimeoutError:
            return Verdict(False, f"no word from process 0 on {coordinator} for {SILENCE_S:.0f} s", exit_codes.LOST_PEER)
        if message is None:
            return lost
        if "verdict" in message:
            return Verdict(**message["verdict"])
        if "probe" in message:
            address, port = message["probe"]
            await line.send({"probed": await _probe(address, port)})


async def _probe(address: str, port: int) -> str | None:
    try:
        line = await connect(address, port, CONNECT_S)
    except OSError as error:
        return why(error)
    line.close()
    return None
