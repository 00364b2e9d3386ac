"""Recompilations during training, as recorded in the event log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.configs.format import format_seconds
from ridgeline.rundir.events import Event

EVENT = "recompilation"
"""Kind of the event."""


@dataclass(frozen=True)
class Change:
    """An argument that differs from the previous compilation."""

    argument: str
    """Its path, such as `batch['tokens']`."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.argument} {self.before} -> {self.after}"


@dataclass(frozen=True)
class Recompilation:
    """A program that was compiled again during training."""

    program: str
    step: int | None
    """The step during which it happened."""
    duration_s: float
    arguments: tuple[Change, ...]
    """Changed arguments; empty when not known."""
    source: str | None
    """`file:line` of the call; None when not known."""
    time_s: float = 0.0
    """When it ended, seconds since 1970."""

    def describe(self) -> str:
        """Return a line with program, place, duration and cause."""
        at = "" if self.step is None else f"step {self.step}: "
        where = "" if self.source is None else f" at {self.source}"
        changed = [str(change) for change in self.arguments]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        why = (
            ", ".join(changed[:3]) + more if changed else "shapes and dtypes are the same: a sharding, a layout, or a function defined anew"
        )
        took = format_seconds(self.duration_s)
        return f"{at}{self.program} was compiled again{where} in {took}: {why}"


def recompilations(events: Sequence[Event], process: int) -> list[Recompilation]:
    """Return the recompilations in the log of one process."""
    return [
        Recompilation(
            str(event.fields["program"]),
            step if isinstance(step := event.fields.get("step"), int) else None,
            float(event.fields["duration_s"]),
            _changes(event.fields.get("arguments")),
            str(source) if (source := event.fields.get("source")) is not None else None,
            event.time_s,
        )
        for event in events
        if event.kind == EVENT and event.process == process
    ]


def _changes(arguments: object) -> tuple[Change, ...]:
    """Return the recorded changes, without damaged ones."""
    rows = arguments if isinstance(arguments, list) else []
    names = ("argument", "before", "after")
    return tuple(Change(*(str(row[name]) for name in names)) for row in rows if isinstance(row, dict) and row.keys() >= set(names))
