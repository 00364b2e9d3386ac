"""The doctor's side of a probe process: start it, follow what it says, end it when a measurement takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.measure.probe import ProbePlan


@dataclass
class ProbeOutcome:
    """What a probe found. Plain values, so that it travels as JSON."""

    results: dict[str, Any] = field(default_factory=dict)
    """Measurement -> value."""
    errors: dict[str, str] = field(default_factory=dict)
    """Measurement -> why it failed."""
    hung_in: str | None = None
    """The measurement that did not end in its time."""
    hung_s: float | None = None
    """How long it was waited for."""
    died_in: str | None = None
    """The measurement in which the process died."""
    death: str | None = None
    """How it died, with its last words."""


def run_probe(plan: ProbePlan, timeout_s: float, progress: Callable[[str], None]) -> ProbeOutcome:
    """Run a probe to its end, at most `timeout_s` in all and each measurement at most the time it announces.

    Args:
      plan: `channel` is chosen here.
      progress: told the name of each measurement as it begins.
    """
    read_end, write_end = os.pipe()
    outcome = ProbeOutcome()
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.measure.probe"],
            stdin=subprocess.PIPE,
            stdout=words,
            stderr=words,
            pass_fds=[write_end],
        )
        os.close(write_end)
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(replace(plan, channel=write_end).as_line())
                process.stdin.flush()
            running = _follow(read_end, time.monotonic() + timeout_s, outcome, progress)
        finally:
            os.close(read_end)
            if process.poll() is None and outcome.hung_in is not None:
                process.kill()
            code = _end(process)
        if running is not None and outcome.hung_in is None:
            outcome.died_in = running
            outcome.death = f"{_how(code)}{_last_words(words)}"
    return outcome


def _follow(channel: int, deadline: float, outcome: ProbeOutcome, progress: Callable[[str], None]) -> str | None:
    """Read answers until the end; return the measurement that was running when the pipe closed, None when the probe finished."""
    running: str = "start"
    budget_end, begun = deadline, time.monotonic()
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, min(deadline, budget_end) - time.monotonic())):
                outcome.hung_in, outcome.hung_s = running, round(time.monotonic() - begun, 1)
                return running
            data = os.read(channel, 1 << 16)
            if not data:
                return running
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if answer["kind"] == "end":
                    return None
                if answer["kind"] == "begin":
                    running, begun = answer["name"], time.monotonic()
                    budget_end = begun + answer["budget_s"]
                    progress(running)
                elif answer["kind"] == "result":
                    outcome.results[answer["name"]] = answer["value"]
                else:
                    outcome.errors[answer["name"]] = answer["error"]


def _end(process: subprocess.Popen[bytes]) -> int:
    """Close the probe's input, which ends it; kill it if that does not help."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            return process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            return -9  # stuck in the kernel, as with a lost GPU: it cannot even be killed


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _last_words(words: Any) -> str:
    """Return the last line the probe printed that says something."""
    words.seek(0)
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines()]
    telling = [line for line in lines if line and not line.startswith(("***", "@", "Fatal Python error", "Extension modules", "File "))]
    return f": {telling[-1][:300]}" if telling else ""
