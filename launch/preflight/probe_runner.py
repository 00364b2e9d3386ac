"""Run a probe process (measure/probe.py): start it, read its results, and end it if a measurement exceeds its time."""

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
    """Results of a probe. Plain values, sent as JSON."""

    results: dict[str, Any] = field(default_factory=dict)
    """Measurement -> value."""
    errors: dict[str, str] = field(default_factory=dict)
    """Measurement -> error."""
    hung_in: str | None = None
    """Measurement that exceeded its time."""
    hung_s: float | None = None
    """Time waited for it, s."""
    died_in: str | None = None
    """Measurement during which the process ended."""
    death: str | None = None
    """How it ended, and the last line of its output."""


def run_probe(
    plan: ProbePlan, timeout_s: float, progress: Callable[[str], None], before_end: Callable[[], object] = lambda: None
) -> ProbeOutcome:
    """Run a probe for at most `timeout_s`, and each measurement for at most the time that the probe states.

    Args:
      plan: its `channel` is set here.
      progress: called with the name of each measurement at its start.
      before_end: called when the probe has no more to send, before it is ended.
    """
    read_end, write_end = os.pipe()
    outcome = ProbeOutcome()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.measure.probe"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[write_end],
        )
        os.close(write_end)
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(replace(plan, channel=write_end).as_line())
                process.stdin.flush()
            running = _follow(read_end, time.monotonic() + timeout_s, outcome, progress)
            before_end()
        finally:
            os.close(read_end)
            if process.poll() is None and outcome.hung_in is not None:
                process.kill()
            code = _end(process)
        if running is not None and outcome.hung_in is None:
            outcome.died_in = running
            outcome.death = f"{_how(code)}{_last_line(output)}"
    return outcome


def _follow(channel: int, deadline: float, outcome: ProbeOutcome, progress: Callable[[str], None]) -> str | None:
    """Read results until the end; return the measurement that was running when the pipe closed, None if the probe finished."""
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
                result = json.loads(line)
                if result["kind"] == "end":
                    return None
                if result["kind"] == "begin":
                    running, begun = result["name"], time.monotonic()
                    budget_end = begun + result["budget_s"]
                    progress(running)
                elif result["kind"] == "result":
                    outcome.results[result["name"]] = result["value"]
                else:
                    outcome.errors[result["name"]] = result["error"]


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the probe by closing its input; kill it after 10 s. Return its exit code."""
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
            return -9  # uninterruptible in the kernel, as with a lost GPU: SIGKILL has no effect


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _last_line(output: Any) -> str:
    """Return the last informative line of the probe's output."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    informative = [line for line in lines if line and not line.startswith(("***", "@", "Fatal Python error", "Extension modules", "File "))]
    return f": {informative[-1][:300]}" if informative else ""
