"""The ledger of a run's earlier starts, kept in `ledger.json`: a start reads the event log of the start before it, not of all of them.

Only process 0 reads and writes it. Without the file, or where it does not fit the log, the whole log is read.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import astuple

from ridgeline.configs.errors import UserError
from ridgeline.rundir.directory import LEDGER_FILE, RunDir
from ridgeline.rundir.events import Event, EventLog, read_events_from
from ridgeline.rundir.files import Record, read_record, write_record
from ridgeline.rundir.goodput import CATEGORIES, EarlierStarts, Stretch, add_starts, queue_waits, shorten

MOST_SAVES = 256
"""Newest saves that the file keeps; a start that resumes from an earlier one reads the whole log."""


class LedgerRecord(Record):
    """ledger.json."""

    run: str
    """Id of the run."""
    starts: int
    """How many starts it covers."""
    log_bytes: int
    """How much of the event log it covers: the events of these starts."""
    stretches: list[tuple[float, float, str, int, bool]]
    """Begin and end (wall clock, s), category, restart, and whether in the training loop."""
    saves: list[tuple[int, int, float]]
    """Step, restart, and end (wall clock, s)."""
    all_saves: bool
    """Whether `saves` has all saves of these starts."""


def read_earlier_starts(run: RunDir, log: EventLog, start_step: int) -> tuple[EarlierStarts, list[Event]]:
    """Return the ledger of the starts before the current one, and the events of the current one. Updates ledger.json.

    Args:
      run: the run directory.
      log: event log of process 0, open.
      start_step: step that the current start resumes from.

    Raises:
      UserError: the event log or the record of the jobs is damaged.
    """
    record = _record(run, log)
    found = None if record is None else _continued(run, log, record, start_step)
    earlier, now, changed = found or _read(run, log, EarlierStarts(), read_events_from(log.path, 0))
    if changed:
        with contextlib.suppress(OSError):  # the next start reads more
            write_record(run.path / LEDGER_FILE, _as_record(shorten(earlier, MOST_SAVES), log))
    return earlier, now


def _record(run: RunDir, log: EventLog) -> LedgerRecord | None:
    """Return ledger.json; None without one that can be used."""
    try:
        record = read_record(run.path / LEDGER_FILE, LedgerRecord)
    except UserError:
        return None
    if record is None or record.run != log.run or not 0 < record.starts <= log.restart or not 0 < record.log_bytes <= log.start_byte:
        return None
    times_s = [time_s for begin_s, end_s, *_ in record.stretches for time_s in (begin_s, end_s)] + [end_s for *_, end_s in record.saves]
    known = all(category in CATEGORIES for _, _, category, _, _ in record.stretches)
    return record if known and all(map(math.isfinite, times_s)) else None


def _continued(run: RunDir, log: EventLog, record: LedgerRecord, start_step: int) -> tuple[EarlierStarts, list[Event], bool] | None:
    """Return what `_read` does, from the record and the events after those it covers; None where these do not follow it."""
    try:
        events = read_events_from(log.path, record.log_bytes)
    except UserError:  # the log is another one, or damaged: the whole one is read
        return None
    if not events or events[0].restart < record.starts or events[0].run != record.run:
        return None
    saved: dict[int, dict[int, float]] = {}
    for step, restart, end_s in record.saves:
        saved.setdefault(step, {})[restart] = end_s
    earlier = EarlierStarts(tuple(Stretch(*stretch) for stretch in record.stretches), saved, record.all_saves)
    if not earlier.all_saves:
        resumed = {e.fields.get("start_step") for e in events if e.kind == "phase_start" and e.fields["phase"] == "train"} | {start_step}
        known = {e.fields.get("step") for e in events if e.kind == "phase_start" and e.fields["phase"] == "save"} | {0, *saved}
        if not resumed <= known:
            return None
    return _read(run, log, earlier, events)


def _read(run: RunDir, log: EventLog, earlier: EarlierStarts, events: list[Event]) -> tuple[EarlierStarts, list[Event], bool]:
    """Return the earlier starts with those of `events` before the current one, the events of that one, and whether there are others."""
    before = [event for event in events if event.restart < log.restart]
    now = [event for event in events if event.restart >= log.restart]
    if before:
        earlier = add_starts(earlier, before, queue_waits(run, before))
    return earlier, now, bool(before)


def _as_record(earlier: EarlierStarts, log: EventLog) -> LedgerRecord:
    saves = [(step, restart, end_s) for step, ends in earlier.saved.items() for restart, end_s in ends.items()]
    return LedgerRecord(
        run=log.run,
        starts=log.restart,
        log_bytes=log.start_byte,
        stretches=[astuple(stretch) for stretch in earlier.stretches],
        saves=saves,
        all_saves=earlier.all_saves,
    )
