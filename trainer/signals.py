"""Asking a run to stop: Ctrl-C and SIGTERM set a flag that the loop reads between steps."""

from __future__ import annotations

import signal
import types
from collections.abc import Callable

import jax


class StopRequest:
    """Context manager that turns the first SIGINT or SIGTERM into a request; a second Ctrl-C interrupts at once.

    With several processes the request is agreed on through JAX's preemption sync point (SIGTERM to any of them), so that all stop
    after the same step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, signal.Handlers | Callable[[int, types.FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopRequest:
        # With several processes SIGTERM stays with jax.distributed's own notifier, which the sync point reads.
        wanted = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
        for number in wanted:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
        self._say(f"{self._received.name} received: saving after this step (Ctrl-C again to stop without saving)")

    def agreed(self, step: int) -> signal.Signals | None:
        """Return the signal all processes agree to stop for after `step`, or None."""
        if jax.process_count() == 1:
            return self._received
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            return signal.SIGTERM
        return None
