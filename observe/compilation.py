"""Compiling a program part by part, each part timed: tracing, lowering, and XLA's compile or what JAX's persistent cache spared it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from ridgeline.rundir.events import COMPILED, JAX_CACHE

_FOUND = "/jax/compilation_cache/cache_retrieval_time_sec"


def compile_in_parts(function: Any, name: str, args: Sequence[Any], record: dict[str, Any]) -> Any:
    """Compile a jitted function for these arguments (arrays or their shapes); put `source` and the seconds of each part into `record`."""
    import jax

    thread, found = threading.get_ident(), [False]

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        found[0] |= event == _FOUND and threading.get_ident() == thread

    began_s = time.perf_counter()
    traced = function.trace(*args)
    traced_s = time.perf_counter()
    lowered = traced.lower()
    lowered_s = time.perf_counter()
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        compiled = lowered.compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    record["source"] = JAX_CACHE if found[0] else COMPILED
    record.update(trace_s=traced_s - began_s, lower_s=lowered_s - traced_s, compile_s=time.perf_counter() - lowered_s)
    return compiled
