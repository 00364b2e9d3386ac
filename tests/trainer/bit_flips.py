"""Flips a bit in the memory of one device of a running run, as a faulty device does, before a chosen step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax

from ridgeline.trainer.corruption import CorruptionCheck


def flip(leaf: jax.Array, device: int, element: int, bit: int) -> None:
    """Flip a bit of one device's buffer of an array, in place."""
    [shard] = [shard for shard in leaf.addressable_shards if shard.device.id == device]
    data = jax.block_until_ready(shard.data)
    byte = (element % data.size) * data.dtype.itemsize + bit % (8 * data.dtype.itemsize) // 8
    address = data.unsafe_buffer_pointer() + byte
    ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1 << bit % 8


def before_step(step: int, act: Callable[[Any], None], replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have `act` called with the state before the step of this number begins and after the one before has ended."""
    run_step = CorruptionCheck.step

    def acted(self: CorruptionCheck, state: Any, batch: Any) -> Any:
        if self._step == step:
            act(jax.block_until_ready(state))
        return run_step(self, state, batch)

    replace(CorruptionCheck, "step", acted)
