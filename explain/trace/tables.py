"""The full tables of an analysis as CSV or Parquet: one file per table, one row per line, times in seconds, sizes in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from ridgeline.configs.errors import UserError
from ridgeline.rundir.analysis import Analysis

Format = Literal["csv", "parquet"]


def tables(analysis: Analysis) -> dict[str, list[dict[str, Any]]]:
    """Return table -> rows. All rows of a table have the same keys."""
    found: dict[str, list[dict[str, Any]]] = {
        "steps": [{"step": step.step, **_row(device)} for step in analysis.steps for device in step.devices],
        "devices": [_row(device) for device in analysis.devices],
        "syncs": [{"host": host.host, **_row(sync)} for host in analysis.hosts for sync in host.syncs],
        "hosts": [_row(host, leave_out=("syncs", "compilations")) for host in analysis.hosts],
    }
    found["memory"] = [_row(each, leave_out=("peak_at", "largest", "timeline")) for each in analysis.memory]
    found["memory_timeline"] = [
        {"module": each.module, "position": n, **_row(at)} for each in analysis.memory for n, at in enumerate(each.timeline)
    ]
    found["allocators"] = [_row(each, leave_out=("peak", "held", "timeline")) | _row(each.peak) for each in analysis.allocators]
    found["allocator_timeline"] = [
        {"host": each.host, "allocator": each.allocator, **_row(at)} for each in analysis.allocators for at in each.timeline
    ]
    found["held_memory"] = [{"host": each.host, "allocator": each.allocator, **_row(h)} for each in analysis.allocators for h in each.held]
    for name in ("components", "operations", "matmuls", "collectives", "message_sizes", "stragglers"):
        found[name] = [_row(each) for each in getattr(analysis, name)]
    return {name: rows for name, rows in found.items() if rows}


def write_tables(analysis: Analysis, directory: Path, form: Format) -> list[Path]:
    """Write every table that has rows; return the files.

    Raises:
      UserError: the directory cannot be written.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, rows in tables(analysis).items():
            path = directory / f"{name}.{form}"
            (csv.write_csv if form == "csv" else parquet.write_table)(pa.Table.from_pylist(rows), path)
            written.append(path)
    except OSError as error:
        raise UserError(f"cannot write tables to {directory}: {error.strerror or error}") from None
    return written


def _row(record: Any, leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return a record as a flat row: mappings become columns, sequences texts."""
    row: dict[str, Any] = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if each.name in leave_out:
            continue
        if isinstance(value, Mapping):
            row |= {f"{each.name.removesuffix('_by_cause')}_{key}_s": part for key, part in value.items()}
        elif isinstance(value, list | tuple):
            row[each.name] = ("x" if each.name == "matmul" else "+").join(str(part) for part in value)
        else:
            row[each.name] = value
    return row
