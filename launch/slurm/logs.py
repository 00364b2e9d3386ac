"""Logs of jobs: the file, the lines of one rank, and following a log while the job runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular
from ridgeline.rundir import jobs as places
from ridgeline.rundir.jobs import JobRecord

POLL_S = 0.5
READ_BYTES = 16 << 20
"""Most bytes read at once."""
QUERY_EVERY_S = 10.0
_LABEL = re.compile(r" *0*(\d+): ?(.*\n?)", re.DOTALL)


def log_file(run_dir: Path, records: Sequence[JobRecord], job: str | None) -> tuple[Path, JobRecord]:
    """Return the log and the record of one of a run's jobs; None: the newest. Raises UserError for an unknown job."""
    if job is None:
        record = records[-1]
    else:
        found = [record for record in records if record.job == job]
        if not found:
            raise UserError(f"job {job} was not submitted from {run_dir} (jobs: {', '.join(record.job for record in records)})")
        record = found[0]
    return places.slurm_directory(run_dir) / places.log_name(record), record


def of_rank(lines: Iterator[str], rank: int | None) -> Iterator[str]:
    """Yield the lines of one rank without its label; None: all lines unchanged."""
    for line in lines:
        if rank is None:
            yield line
        elif (match := _LABEL.fullmatch(line)) and match[1] == str(rank):
            yield match[2]


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log; a longer one than READ_BYTES in parts. Raises UserError when it cannot be read."""
    with open_regular(path) as stream:
        try:
            while line := stream.readline(READ_BYTES):
                yield line.decode("utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None


def follow(
    path: Path, ended: Callable[[], bool], clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Yield the complete lines of a log as they are written, until the job has ended and all lines are read.

    ended: returns whether the job has ended; called every QUERY_EVERY_S while no line arrives.
    """
    queried_s = -QUERY_EVERY_S
    rest, position, over = "", 0, False
    while True:
        text = ""
        if path.exists():
            with open_regular(path) as stream:
                stream.seek(position)
                data = stream.read(READ_BYTES)
            position += len(data)
            text = data.decode("utf-8", errors="replace")
        rest += text
        *lines, rest = rest.split("\n")
        yield from (f"{line}\n" for line in lines)
        if text:
            continue
        if over:
            if rest:
                yield rest
            return
        if clock() - queried_s >= QUERY_EVERY_S:
            queried_s = clock()
            over = ended()  # read once more: lines written just before the end
            continue
        sleep(POLL_S)
