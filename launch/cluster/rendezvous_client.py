"""Rendezvous in every process but the first: find process 0, register, wait for the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import network
from ridgeline.launch.cluster.process_info import ProcessInfo
from ridgeline.launch.cluster.rendezvous import (
    SILENCE_S,
    Connection,
    Stopped,
    Verdict,
    connect,
    failure_reason,
    offer,
    read_verdict,
    unless_stopped,
)

CONNECT_S = 3.0
"""Timeout of one attempt; a connection inside a cluster takes milliseconds."""
FIRST_MESSAGE_S, MESSAGES_S = 5.0, 20.0


@dataclass
class Attempts:
    """Connection attempts so far; its text goes into messages."""

    coordinator: str
    addresses: Sequence[str]
    ports: Sequence[int]
    count: int = 0
    last: str = ""

    def __str__(self) -> str:
        where = ", ".join(self.addresses)
        shown = ", ".join(str(port) for port in self.ports[:3]) + (", ..." if len(self.ports) > 3 else "")
        return f"process 0 at {self.coordinator} ({where}; ports {shown}): {self.count} attempts, last: {self.last}"


async def register(
    info: ProcessInfo,
    identity: str,
    secret: str,
    *,
    coordinator: str,
    addresses: Sequence[str],
    ports: Sequence[int],
    timeout_s: float,
    stop: Callable[[], bool],
    log: Callable[[str], None],
) -> tuple[Verdict, Connection | None]:
    """Register with process 0; return its verdict and, of a successful rendezvous, the open connection. Raises Stopped."""
    attempts = Attempts(coordinator, addresses, ports)
    connection = await _find((identity, secret), info, attempts, timeout_s, stop, log)
    if connection is None:
        message = (
            f"{info.name} could not reach {attempts}; gave up after {timeout_s:.0f} s "
            "(check that process 0 runs and that no firewall blocks these ports)"
        )
        return Verdict(False, message, exit_codes.LOST_PEER), None
    verdict: Verdict | None = None
    try:
        verdict = await _wait(connection, coordinator, stop)
        return verdict, connection if verdict.ok else None
    finally:
        if verdict is None or not verdict.ok:
            connection.close()


async def _find(
    start: tuple[str, str], info: ProcessInfo, attempts: Attempts, timeout_s: float, stop: Callable[[], bool], log: Callable[[str], None]
) -> Connection | None:
    """Retry all addresses and ports until process 0 of this start accepts; None after timeout_s."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    message_s, pause_s = FIRST_MESSAGE_S, 0.05
    while True:
        connection = await unless_stopped(_try_all(start, info, attempts), stop)
        if connection is not None:
            return connection
        waited_s = loop.time() - begin
        if waited_s >= timeout_s:
            return None
        if waited_s >= message_s:
            log(f"{info.name} is waiting for {attempts}")
            message_s = waited_s + MESSAGES_S
        await unless_stopped(asyncio.sleep(min(pause_s, timeout_s - waited_s)), stop)
        pause_s = min(1.0, 1.5 * pause_s)


async def _try_all(start: tuple[str, str], info: ProcessInfo, attempts: Attempts) -> Connection | None:
    """Try every port of every address once, the ports of one address at the same time; None if process 0 is at none of them."""
    for address in attempts.addresses:
        attempts.count += 1
        tasks = [asyncio.ensure_future(_connect(address, port, start, info)) for port in attempts.ports]
        try:
            for attempt in asyncio.as_completed(tasks):
                result = await attempt
                if isinstance(result, Connection):
                    return result
                attempts.last = result
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # cancelled attempts close their own connections
    return None


async def _connect(address: str, port: int, start: tuple[str, str], info: ProcessInfo) -> Connection | str:
    """Return the connection to process 0 of this start, or the reason of the failure."""
    where = network.with_port(address, port)
    connection: Connection | None = None
    accepted = False
    try:
        connection = await connect(address, port, CONNECT_S)
        if (why := await offer(connection, *start)) is not None:
            return f"{where}: {why}"
        await connection.send({"card": info.to_json()})
        accepted = True
        return connection
    except OSError as error:
        return f"{where}: {failure_reason(error)}"
    finally:
        if connection is not None and not accepted:
            connection.close()


async def _wait(connection: Connection, coordinator: str, stop: Callable[[], bool]) -> Verdict:
    lost = Verdict(False, f"process 0 on {coordinator} ended during the rendezvous", exit_codes.LOST_PEER)
    while True:
        try:
            message = await unless_stopped(connection.receive(), stop, SILENCE_S)
        except Stopped:
            await connection.send({"stopping": True})
            raise
        except TimeoutError:
            return Verdict(False, f"no message from process 0 on {coordinator} for {SILENCE_S:.0f} s", exit_codes.LOST_PEER)
        if message is None:
            return lost
        if "verdict" in message:
            return read_verdict(message["verdict"]) or lost
        if "probe" in message:
            address, port = message["probe"]
            await connection.send({"probed": await _probe(address, port)})


async def _probe(address: str, port: int) -> str | None:
    try:
        connection = await connect(address, port, CONNECT_S)
    except OSError as error:
        return failure_reason(error)
    connection.close()
    return None
