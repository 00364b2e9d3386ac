"""The ways in which a run fails, each with an exit code of its own (launch/exit_codes.py), and how a lost peer is recognized."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|connect\w* .*(failed|timed out)|socket closed|broken pipe|heartbeat|leader.*(died|gone)"
    r"|task .*(disconnected|unhealthy|died)|coordination service.*(error|unavailable|shut)|unavailable:|gloo .*(timed out|failed)|gloo::"
    r"|nccl.*(remote|abort|unhandled system error)|DEADLINE_EXCEEDED",
    re.IGNORECASE | re.DOTALL,
)
_ADDRESS = re.compile(r"\[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-f:]{4,})\]?:\d{2,5}")
_TASK = re.compile(r"/task:(\d+)")
MAX_TEXT = 300


class NumericalFailure(Exception):
    """Too many consecutive non-finite steps, or a state that is not finite when it should be saved. It is not saved."""

    steps: Sequence[int] = ()
    """Steps of the complete checkpoints in ascending order; a restart takes the last."""


class WentBack(Exception):
    """After a loss spike the run directory has been taken back to an earlier step: the run goes on from there. The message says why."""


class CorruptionFound(Exception):
    """Digests of state or gradient disagree: a device computes or stores wrong bits. The message names it."""


class CheckpointError(RuntimeError):
    """Checkpoints could not be saved or loaded, and continuing would lose work. Earlier checkpoints are intact."""


class Link(Protocol):
    """The part of launch.cluster.link.Link that a run uses."""

    record: Callable[[Any], None]
    """Called when another process is lost, in a thread of its own, with an object that has `text`."""
    position: Callable[[], dict[str, object]]
    """Returns what this process is doing, as JSON values."""
    stacks: Callable[[], None]
    """Writes the stacks of this process after that, in a thread of its own."""
    report: Callable[[dict[int, object]], None]
    """Called with the positions of all processes, None where one did not answer, in a thread of its own."""

    @property
    def names(self) -> Mapping[int, str]:
        """Other process -> its name and machine."""

    def survey(self, process: int) -> None:
        """Have the positions of all processes reported. `process` is this one."""

    def exit(self, code: int) -> NoReturn:
        """Announce the end of this process to the others, and end it."""


def lost_peer(error: BaseException, processes: int) -> str | None:
    """Return one line that names the lost process and the error of JAX, gloo or NCCL; None when `error` has another cause.

    processes: number of processes in the run.
    """
    if processes == 1:
        return None
    current: BaseException | None = error
    while current is not None:
        text = " ".join(str(current).split())
        if _CONNECTION_LOST.search(text):
            return f"another process of the run is gone{_peer(text)}: {text[:MAX_TEXT]}"
        current = current.__cause__ or current.__context__
    return None


def _peer(text: str) -> str:
    task, address = _TASK.search(text), _ADDRESS.search(text)
    names = [f"process {task.group(1)}"] if task else []
    names += [f"at {address.group(1)}"] if address else []
    return f" ({' '.join(names)})" if names else ""
