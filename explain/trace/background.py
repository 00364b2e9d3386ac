"""Analyze a capture in a separate process at the lowest priority while the run goes on.

`python -m ridgeline.explain.trace.background DIRECTORY N`

Reading a large trace takes tens of seconds of Python, which would delay launches if it ran in a thread of the training process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ridgeline.configs.errors import UserError

ARRIVAL_S = 120.0
"""Longest wait for the traces of the other processes, which are written at about the same time."""
POLL_S = 0.5


def start(directory: Path, num_traces: int) -> subprocess.Popen[bytes]:
    """Start the analysis of a capture; it begins once `num_traces` processes have written their traces."""
    command = [sys.executable, "-m", "ridgeline.explain.trace.background", str(directory), str(num_traces)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def wait_for_traces(
    directory: Path, count: int, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Wait until a capture has `count` traces, at most ARRIVAL_S; return how many it has. Traces appear as whole files."""
    deadline_s = clock() + ARRIVAL_S
    while (found := len(list(directory.glob("*.xplane.pb")))) < count and clock() < deadline_s:
        sleep(POLL_S)
    return found


def main(arguments: list[str]) -> int:
    """Analyze and publish; an error is one line on stderr."""
    directory, count = Path(arguments[0]), int(arguments[1])
    os.nice(19)
    from ridgeline.explain.trace.analysis import analyze
    from ridgeline.explain.trace.capture import find_capture
    from ridgeline.explain.trace.load import load_profile
    from ridgeline.explain.trace.publish import publish

    try:
        found = wait_for_traces(directory, count)
        if found < count:
            print(f"{directory}: only {found} of {count} traces arrived", file=sys.stderr)
        capture = find_capture(directory)
        publish(capture, analyze(load_profile(capture)))
    except UserError as error:
        print(f"no analysis of the profile: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
