"""SIGTERM before training began: between the start of a process and the moment JAX takes the signal over."""

from __future__ import annotations

import os
import signal
import types


class EarlyStop:
    """Notes a SIGTERM instead of dying of it; call the object to ask."""

    def __init__(self) -> None:
        self._asked = False

    def install(self) -> None:
        """Take SIGTERM over."""
        signal.signal(signal.SIGTERM, self._note)

    def __call__(self) -> bool:
        """Tell whether a SIGTERM came."""
        return self._asked

    def hand_over(self) -> None:
        """Repeat a SIGTERM that came while jax.distributed connected, now that JAX's own handler (the sync point's) is in place."""
        if self._asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._asked = True
