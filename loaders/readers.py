"""Readers: the documents and bad records of a unit of input, in file order.

A record that cannot be used is yielded as a `BadRecord`. A file that cannot be read to its end (truncated compression, missing column)
raises UserError.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.loaders.conversations import FIELDS, LAYOUTS, Conversation, Pair, conversation_from_record
from ridgeline.loaders.inputs import COMPRESSED_SUFFIXES, Unit, source_format
from ridgeline.loaders.records import BadRecord, Document, Place, RecordFields, document_from_bytes, document_from_record, type_name
from ridgeline.loaders.remote import fetch

Item = Document | Conversation | Pair | BadRecord
ROWS_PER_READ = 1024
"""Table rows converted to Python objects at a time."""


def read_unit(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    """Yield the documents and bad records of a unit. Raises UserError when the file itself cannot be read."""
    readers: dict[str, Callable[[Unit, RecordFields], Iterator[Item]]] = {
        "text": _read_text,
        "lines": _read_lines,
        "jsonl": _read_jsonl,
        "json": _read_json,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
    }
    if fields.chat and unit.format in ("text", "lines"):
        hint = "; set --format json for a list of records" if unit.path.suffix == ".json" else ""
        raise UserError(f"{unit.place()}: --chat reads records (.jsonl, .parquet, .arrow), not text{hint}")
    if unit.remote is not None:
        fetch(unit.remote)
    return readers.get(unit.format, _read_by_plugin)(unit, fields)


def _item(record: Any, fields: RecordFields, place: Place) -> Item:
    """Return what a record (a JSON object or a row) stands for."""
    if not fields.chat:
        return document_from_record(record, fields, place)
    if not isinstance(record, Mapping):
        return BadRecord(place, f"expected a JSON object, got {type_name(record)}")
    return conversation_from_record(record, place)


def _read_by_plugin(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    read = source_format(unit.format).read
    try:
        yield from read(unit, fields)
    except UserError:
        raise
    except Exception as error:  # a plug-in can fail in any way
        raise UserError(f"{unit.place()}: the reader of format '{unit.format}' failed: {type(error).__name__}: {error}") from error


def _read_text(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    place = unit.place()
    try:
        with unit.path.open("rb") as stream:
            data = stream.read()
    except OSError as error:
        yield BadRecord(place, f"cannot be read: {error.strerror or error}")
        return
    yield document_from_bytes(_decompress(unit, data), place)


def _decompress(unit: Unit, data: bytes) -> bytes:
    if unit.path.suffix not in COMPRESSED_SUFFIXES:
        return data
    with _open(unit.path, io.BytesIO(data)) as stream:
        return b"".join(line for line, _ in _guarded_lines(stream, unit.place()))


def _read_lines(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    for line, place in _lines(unit):
        item = document_from_bytes(line.rstrip(b"\r\n"), place)
        if isinstance(item, BadRecord) or item.text:
            yield item


def _read_jsonl(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    for line, place in _lines(unit):
        if line.isspace():
            continue
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            yield BadRecord(place, f"invalid UTF-8 at byte {error.start} of the line")
        except json.JSONDecodeError as error:
            yield BadRecord(place, f"invalid JSON at column {error.colno}: {error.msg}")
        except (RecursionError, ValueError) as error:  # extreme nesting or numbers
            yield BadRecord(place, f"invalid JSON: {error}")
        else:
            yield _item(record, fields, place)


def _read_json(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    try:
        with unit.path.open("rb") as raw, _open(unit.path, raw) as stream:
            records = json.load(stream)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{unit.place()}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{unit.place()}: not JSON ({error})") from error
    if not isinstance(records, list):
        raise UserError(f"{unit.place()}: expected a list of records, got {type_name(records)}")
    for number, record in enumerate(records, start=1):
        yield _item(record, fields, unit.place(number))


def _lines(unit: Unit) -> Iterator[tuple[bytes, Place]]:
    """Yield the lines that start in bytes [start, stop) of the unit."""
    try:
        raw = unit.path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {unit.place()}: {error.strerror}") from error
    with _open(unit.path, raw) as stream:
        position = 0
        if unit.start > 0:  # the line with byte start - 1 belongs to the previous unit, unless it ends there
            stream.seek(unit.start - 1)
            position = unit.start - 1 + len(stream.readline())
        skipped_bytes = position
        for line, number in _guarded_lines(stream, unit.place()):
            if unit.stop is not None and position >= unit.stop:
                return
            yield (line.removeprefix(codecs.BOM_UTF8) if position == 0 else line), unit.place(number, skipped_bytes)
            position += len(line)


def _open(path: Path, raw: BinaryIO) -> BinaryIO:
    """Wrap a file in the decompressor of its suffix."""
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdReader(raw), 1 << 20)
    return raw


class _ZstdReader(io.RawIOBase):
    """Concatenated zstd frames as one stream. The library's own reader treats a truncated last frame as the end of the file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: Any = None
        self._pending = memoryview(b"")  # decompressed, not yet returned
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            self._input = self._input or self._raw.read(1 << 17)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is truncated")
                return 0
            self._decompress()
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def _decompress(self) -> None:
        import zstandard

        self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            self._pending = memoryview(self._frame.decompress(self._input))
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._input = self._frame.unused_data
        if self._frame.eof:
            self._frame = None

    def close(self) -> None:
        self._raw.close()
        super().close()


def _guarded_lines(stream: BinaryIO, path: Place) -> Iterator[tuple[bytes, int]]:
    """Yield (line, number from 1). Raises UserError with the last line read when a read fails."""
    number = 0
    try:
        for line in stream:
            number += 1
            yield line, number
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read after line {number} ({error})") from error


def _read_parquet(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(unit.path) as file:
            columns = _columns(unit.place(), file.schema_arrow.names, fields)
            row = sum(file.metadata.row_group(group).num_rows for group in range(unit.start))
            for batch in file.iter_batches(ROWS_PER_READ, row_groups=[unit.start], columns=columns):
                yield from _read_rows(unit, row, batch, fields)
                row += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{unit.place()}: not a readable Parquet file ({error})") from error


def _read_arrow(unit: Unit, fields: RecordFields) -> Iterator[Item]:
    import pyarrow
    import pyarrow.ipc

    row = 0
    try:
        with pyarrow.memory_map(str(unit.path)) as mapped:
            for batch in _arrow_batches(mapped):
                columns = _columns(unit.place(), batch.schema.names, fields)
                for start in range(0, batch.num_rows, ROWS_PER_READ):
                    piece = batch.select(columns).slice(start, ROWS_PER_READ)
                    yield from _read_rows(unit, row, piece, fields)
                    row += piece.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{unit.place()}: not a readable Arrow file after row {row} ({error})") from error


def _arrow_batches(mapped: Any) -> Iterator[Any]:
    """Yield the batches of an Arrow file in either layout: the stream that `datasets` writes, or random access."""
    import pyarrow.ipc

    if mapped.read(6) == b"ARROW1":
        file = pyarrow.ipc.open_file(mapped)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        mapped.seek(0)
        yield from pyarrow.ipc.open_stream(mapped)


def _columns(path: Place, names: list[str], fields: RecordFields) -> list[str]:
    """Return the columns to read. Raises UserError for a table without them, because every row would be bad."""
    if fields.chat:
        if not any(set(layout) <= set(names) for layout in LAYOUTS):
            wanted = " or ".join(" and ".join(f"'{name}'" for name in layout) for layout in LAYOUTS)
            raise UserError(f"{path}: no columns {wanted} (has: {', '.join(names)})")
        return [name for name in names if name in FIELDS]
    if not fields.sft:
        if fields.text not in names:
            raise UserError(f"{path}: {unknown_name('text field', fields.text, names)}; choose with --text-field")
        return [fields.text]
    if {"prompt", "completion"} <= set(names):
        return ["prompt", "completion"]
    raise UserError(f"{path}: no columns 'prompt' and 'completion' (has: {', '.join(names)})")


def _read_rows(unit: Unit, first_row: int, batch: Any, fields: RecordFields) -> Iterator[Item]:
    """Yield the documents of rows. Text columns are read as bytes, so that invalid UTF-8 loses a row and not the file."""
    import pyarrow

    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
            column = column.cast(pyarrow.large_binary())
        columns[name] = column
    for index in range(batch.num_rows):
        place = unit.place(first_row + index + 1)
        try:
            values = {name: _value(column[index]) for name, column in columns.items()}
            values = _without_null(values) if fields.chat else values
        except UnicodeDecodeError as error:
            yield BadRecord(place, f"invalid UTF-8 at byte {error.start}")
        else:
            yield _item(values, fields, place)


def _without_null(value: Any) -> Any:
    """Leave out null fields at all depths: a table has the fields of all rows in each row."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _value(scalar: Any) -> Any:
    value = scalar.as_py()
    return value.decode() if isinstance(value, bytes) else value
