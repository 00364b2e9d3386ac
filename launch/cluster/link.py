"""The connections between the processes of a run after the rendezvous: the loss of a process is reported to all others within seconds.

Collectives do not report it reliably: an error of gloo or NCCL may never reach the thread that waits, and JAX's heartbeats take 100 s and
end the process in C++. Here every process keeps its connection to process 0 open for the life of the run:

    any process -> its peers    {"left": exit code, "why": ...}   before an orderly end
    process 0   -> the others   {"end": {...}}                    a process is gone, or ended with an error of its own
    any process -> process 0    {"survey": true}                  it makes no progress: what does everybody do?
    process 0   -> the others   {"where": true}                   asks for it
    any process -> process 0    {"position": {...}}               the answer
    any process -> process 0    {"stacks": true}                  its stacks are written
    process 0   -> who asked    {"surveyed": true}                the answers are in, it writes the report

A connection that ends without "left" means that the process is gone. Each process then has some seconds to end by itself (its collectives
fail, the save in flight is abandoned); after that a thread ends it with exit code LOST_PEER. Nothing runs while all is well: the event
loop sleeps in a thread of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster.rendezvous import BackgroundLoop, Connection

GRACE_S = 7.0
"""After a loss: time for this process to end by itself. More than trainer.checkpoint.checkpointer.ABANDON_S.

None after the loss of process 0: JAX's client aborts the process when the coordination service in process 0 is gone.
"""
LINGER_S = 2.0
"""Added in process 0, for the same reason: the others end first, by themselves."""
ERROR_GRACE_S = 60.0
"""The same after another process ended with an error of its own: this one may have the same error, and still has to write its logs."""
TOGETHER = (
    exit_codes.DONE,
    exit_codes.NUMERICAL_FAILURE,
    exit_codes.SAVE_FAILURE,
    exit_codes.PREEMPTED,
    exit_codes.TAKEN_OVER,
    exit_codes.CORRUPTION,
    exit_codes.INTERRUPTED,
)
"""Exit codes on which all processes agree: one that leaves with them is followed by the others."""
SEND_S, RECORD_S = 5.0, 0.2
SURVEY_S, SURVEYED_S, STACKS_S = 5.0, 15.0, 15.0
"""Time for the answers to a survey; for process 0's word that it has them, and for its report; then for the stacks of those that answered:
the end of process 0 may end them."""
NOT_BEGUN: Mapping[str, object] = {"step": 0, "phase": "the start, before training", "silent_s": 0.0, "threads": {}}
"""What a process is doing until training has begun (trainer/hang_report.py, Position)."""
END_REPORT_S = 2.0
"""A failed collective can be faster than process 0's report of who is gone."""


@dataclass(frozen=True)
class PeerEnd:
    """Another process has ended and this one cannot continue."""

    text: str
    """Names the process."""
    lost: bool
    """It ended without announcing its exit code; false: with an error of its own."""


class Link:
    """This process's connections to the others: of process 0 to all, of another one to process 0.

    Args:
      loop: in which the connections were opened.
      connections: by process.
      names: of these processes, for messages.
      relay: whether this is process 0, which reports the end of one process to the others.
    """

    def __init__(
        self,
        loop: BackgroundLoop | None = None,
        connections: Mapping[int, Connection] = types.MappingProxyType({}),
        names: Mapping[int, str] = types.MappingProxyType({}),
        *,
        relay: bool = False,
    ) -> None:
        self._loop, self._connections, self._names, self._relay = loop, dict(connections), names, relay
        self._changed = threading.Condition()
        self._end: PeerEnd | None = None
        self._deadline_s: float | None = None
        self._left: int | None = None
        self._stopping = self._closed = False
        self._open = set(self._connections)
        self._tasks: list[asyncio.Task[None]] = []
        self.record: Callable[[PeerEnd], None] = lambda end: None
        """Records the end of another process; called once, in a thread of its own."""
        self.position: Callable[[], dict[str, object]] = lambda: {**NOT_BEGUN}
        """Returns what this process is doing, as JSON values; called in a thread of its own."""
        self.stacks: Callable[[], None] = lambda: None
        """Writes the stacks of this process after such an answer; called in a thread of its own."""
        self.report: Callable[[dict[int, object]], None] = lambda positions: None
        """Reports a survey: process -> its position, None where it did not answer; called in a thread of its own."""
        self._positions: dict[int, object] = {}
        self._written: set[int] = set()
        self._surveying: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._surveyed = threading.Event()
        if loop is not None:
            loop.run(self._start())
            atexit.register(self.leave, exit_codes.DONE)  # for commands that do not announce their end

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        """Announce the exit code that follows from an exception."""
        self.leave(exit_codes.of(error))

    @property
    def loss(self) -> str | None:
        """Names a process that is gone; None: all are there, or ended by themselves."""
        return self._end.text if self._end is not None and self._end.lost else None

    def leave(self, code: int, why: str = "") -> None:
        """Announce that this process ends by itself with this exit code. A peer lost after that still ends it, with the same code."""
        if self._loop is None or self._left is not None:
            return
        self._left = code
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._send_all({"left": code, "why": why}), SEND_S)

    def exit(self, code: int) -> NoReturn:
        """Announce the end and end at once."""
        self.leave(code)
        os._exit(code)

    @property
    def names(self) -> Mapping[int, str]:
        """Process -> its name and machine."""
        return self._names

    def survey(self, process: int) -> None:
        """Have it reported what all processes are doing; `process` is this one.

        Returns in process 0 when it is reported and the stacks are written, elsewhere when process 0 has the answers; after SURVEYED_S, and
        in process 0 STACKS_S more, in any case.

        Process 0 asks all others and reports. Where it does not answer, this process reports that.
        """
        if self._loop is None:
            self.report({process: self.position()})
            return
        if self._relay:
            with contextlib.suppress(TimeoutError):
                self._loop.run(self._survey(), SURVEYED_S + STACKS_S)
            return
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._send_all({"survey": True}), SEND_S)
        if not self._surveyed.wait(SURVEYED_S):
            self.report({process: self.position(), 0: None})

    async def _ask_all(self) -> None:
        """Ask the other processes for their positions, and wait until all that are connected have answered, SURVEY_S at most."""
        self._positions.clear()
        deadline_s = time.monotonic() + SURVEY_S
        with contextlib.suppress(TimeoutError):  # a stopped process may not take the question
            await asyncio.wait_for(self._send_all({"where": True}), SURVEY_S)
        while time.monotonic() < deadline_s and not self._open <= self._positions.keys():
            await asyncio.sleep(0.05)

    async def _survey_for(self, connection: Connection) -> None:
        """In process 0: ask and report for another process, which is told before the report is written: its file system may hang."""
        self._begin_survey()
        await self._answered.wait()
        with contextlib.suppress(OSError):
            await connection.send({"surveyed": True})

    async def _survey(self) -> None:
        await asyncio.shield(self._begin_survey())

    def _begin_survey(self) -> asyncio.Task[None]:
        """In process 0: ask and report, once however many ask for it."""
        if self._surveying is None:
            self._surveying = asyncio.ensure_future(self._survey_once())
        return self._surveying

    async def _survey_once(self) -> None:
        here = asyncio.ensure_future(asyncio.to_thread(self.position))
        await self._ask_all()
        # before another process is told, which then ends: this one would no longer wait for it in a collective
        positions = {0: await here, **{other: self._positions.get(other) for other in self._connections}}
        self._answered.set()
        own = asyncio.ensure_future(asyncio.to_thread(self.stacks))
        await asyncio.to_thread(self.report, positions)
        deadline_s = time.monotonic() + STACKS_S
        while time.monotonic() < deadline_s and (self._open & self._positions.keys()) - self._written:
            await asyncio.sleep(0.05)
        await own

    async def _answer(self, connection: Connection) -> None:
        """Tell process 0 what this process is doing, and then write its stacks."""
        with contextlib.suppress(Exception):
            await connection.send({"position": await asyncio.to_thread(self.position)})
            await asyncio.to_thread(self.stacks)
            await connection.send({"stacks": True})

    def close(self) -> None:
        """Stop watching: the processes no longer work together, and this one goes on."""
        self.leave(exit_codes.DONE)
        self._closed = True

    def end_process(self, why: str) -> NoReturn:
        """End this process because another one is lost. `why`: used if the link itself reports no process within END_REPORT_S."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None, END_REPORT_S if self._loop is not None else 0)
            why = why if self._end is None else self._end.text
        self._stop(why)

    def _stop(self, why: str) -> NoReturn:
        """Print one line and end the process. A second thread waits here for the first one's end."""
        with self._changed:
            first, self._stopping = not self._stopping, True
        while not first:
            time.sleep(1)
        with contextlib.suppress(OSError, ValueError):  # nobody may read it: Slurm's step daemon may be what was killed
            sys.stderr.write(f"ridge: stopped: {why}; the last good checkpoint is intact\n")
            sys.stdout.flush()
        self.leave(exit_codes.LOST_PEER, why)
        if self._relay:
            with self._changed:
                self._changed.wait_for(lambda: not self._open, GRACE_S + LINGER_S)
        os._exit(exit_codes.LOST_PEER)

    async def _start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._watch(process, connection)) for process, connection in self._connections.items()]

    async def _watch(self, process: int, connection: Connection) -> None:
        """Read from one process until its connection ends."""
        left, why = None, ""
        while (message := await connection.receive()) is not None:
            if isinstance(message.get("left"), int):
                left, why = message["left"], str(message.get("why"))
                if left not in (*TOGETHER, exit_codes.LOST_PEER):  # it may wait for this process before it ends
                    await self._report(self._failed(process, left), ERROR_GRACE_S)
            if (end := _peer_end(message.get("end"))) is not None and not self._relay:
                self._ended(end, GRACE_S)
            if self._relay and message.get("survey") is True:
                self._tasks.append(asyncio.ensure_future(self._survey_for(connection)))
            elif self._relay and "position" in message:
                self._positions[process] = message["position"]
            elif self._relay and message.get("stacks") is True:
                self._written.add(process)
            elif message.get("where") is True:
                self._tasks.append(asyncio.ensure_future(self._answer(connection)))  # this loop goes on: it notices the loss of process 0
            elif message.get("surveyed") is True:
                self._surveyed.set()
        connection.close()
        with self._changed:
            self._open.discard(process)
            self._changed.notify_all()
        if left in TOGETHER:
            return
        if left is None:
            end = PeerEnd(f"another process of the run is gone: {self._names[process]} (its connection ended)", True)
        elif left == exit_codes.LOST_PEER:
            end = PeerEnd(why, True)  # it has found the loss first
        else:
            end = self._failed(process, left)
        await self._report(end, GRACE_S + LINGER_S if self._relay else 0.0)

    def _failed(self, process: int, code: int) -> PeerEnd:
        return PeerEnd(f"another process of the run ended with exit code {code}: {self._names[process]}", False)

    async def _report(self, end: PeerEnd, grace_s: float) -> None:
        """Note the end of a process; in process 0 also report it to the others."""
        first = self._ended(end, grace_s)
        if first and self._relay:
            await self._send_all({"end": asdict(end)})

    async def _send_all(self, message: dict[str, object]) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                await connection.send(message)

    def _ended(self, end: PeerEnd, grace_s: float) -> bool:
        """Note the end of another process; return whether it changes anything."""
        with self._changed:
            if self._closed or (self._end is not None and (self._end.lost or not end.lost)):
                return False
            guarded, self._end = self._deadline_s is not None, end
            self._deadline_s = time.monotonic() + (grace_s if end.lost else ERROR_GRACE_S)
            self._changed.notify_all()
        recording = threading.Thread(target=self._record, args=(end,), name="ridge-record", daemon=True)  # the file system may hang
        recording.start()
        recording.join(RECORD_S)
        if not guarded:
            threading.Thread(target=self._guard, name="ridge-lost-peer", daemon=True).start()
        return True

    def _record(self, end: PeerEnd) -> None:
        with contextlib.suppress(Exception):
            self.record(end)

    def _guard(self) -> None:
        """End this process at the deadline."""
        with self._changed:
            while self._deadline_s is not None and (left_s := self._deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            end = self._end
        if self._closed or end is None:
            return
        if self._left is not None:  # it has ended for another reason, and waits in JAX's shutdown for the process that is gone
            os._exit(self._left)
        self._stop(end.text)


def _peer_end(value: object) -> PeerEnd | None:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str) or not isinstance(value.get("lost"), bool):
        return None
    return PeerEnd(value["text"], value["lost"])
