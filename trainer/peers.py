"""Tell a lost peer from other errors: what JAX, gloo and NCCL say in a process when another one is gone."""

from __future__ import annotations

import re

_GONE = re.compile(
    r"connection (closed|reset|refused)|connect\w* .*(failed|timed out)|socket closed|broken pipe|heartbeat|leader.*(died|gone)"
    r"|task .*(disconnected|unhealthy|died)|coordination service.*(error|unavailable|shut)|unavailable:|gloo .*(timed out|failed)|gloo::"
    r"|nccl.*(remote|abort|unhandled system error)|DEADLINE_EXCEEDED",
    re.IGNORECASE | re.DOTALL,
)
_ADDRESS = re.compile(r"\[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-f:]{4,})\]?:\d{2,5}")
_TASK = re.compile(r"/task:(\d+)")
MAX_TEXT = 300


def lost_peer(error: BaseException, processes: int) -> str | None:
    """Return in one line which peer is gone and how it was noticed, or None when the error is about something else."""
    if processes == 1:
        return None
    seen: BaseException | None = error
    while seen is not None:
        text = " ".join(str(seen).split())
        if _GONE.search(text):
            return f"another process of the run is gone{_who(text)}: {text[:MAX_TEXT]}"
        seen = seen.__cause__ or seen.__context__
    return None


def _who(text: str) -> str:
    task, address = _TASK.search(text), _ADDRESS.search(text)
    named = [f"process {task.group(1)}"] if task else []
    named += [f"at {address.group(1)}"] if address else []
    return f" ({' '.join(named)})" if named else ""
