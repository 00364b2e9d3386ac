"""The small messages of an XSpace that are read one by one: metadata entries and statistics."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from ridgeline.hlo.protobuf import Buffer, decode_text, fields, signed, varint

Value = int | float | str


def map_entry(data: Buffer, start: int, end: int) -> tuple[int, str]:
    """Read an entry of the event or statistic metadata: key, and the name in the value."""
    key, name = 0, ""
    for number, _, begin, stop in fields(data, start, end):
        if number == 1:
            key, _ = varint(data, begin)
        elif number == 2:
            for inner, _, first, last in fields(data, begin, stop):
                if inner == 2:
                    name = decode_text(data, first, last)
                elif inner == 1 and not key:
                    key, _ = varint(data, first)
    return key, name


def decode_stat(stat: bytes, names: dict[int, str]) -> tuple[int, Value]:
    """Decode an XStat: key and value; a reference becomes the text it refers to."""
    key, value = 0, 0  # type: tuple[int, Value]
    for number, _, begin, stop in fields(stat, 0, len(stat)):
        if number == 1:
            key, _ = varint(stat, begin)
        elif number == 2:
            value = float(struct.unpack("<d", stat[begin:stop])[0])
        elif number in (3, 4):
            value, _ = varint(stat, begin)
            value = signed(value) if number == 4 else value
        elif number in (5, 6):
            value = decode_text(stat, begin, stop)
        elif number == 7:
            value = names.get(varint(stat, begin)[0], "")
    return key, value


def module_entry(data: Buffer, start: int, end: int, names: Mapping[int, str]) -> tuple[int, tuple[int, int]] | None:
    """Read an entry of the event metadata of the plane `/host:metadata`: a program's id (signed 64-bit), and start and end of its HloProto
    in the file. None for an entry without one."""
    number, name, module = 0, "", None  # type: int, str, tuple[int, int] | None
    stated: int | None = None
    for which, _, begin, stop in fields(data, start, end):
        if which == 1:
            number = signed(varint(data, begin)[0])
        for inner, _, first, last in fields(data, begin, stop) if which == 2 else ():
            if inner == 2:
                name = decode_text(data, first, last)
            elif inner == 5:
                found = {field: (a, b) for field, _, a, b in fields(data, first, last)}
                what = names.get(varint(data, found[1][0])[0], "") if 1 in found else ""
                if what in ("Hlo Proto", "hlo_proto") and 6 in found:
                    module = found[6]
                elif what == "program_id" and (3 in found or 4 in found):
                    stated = signed(varint(data, found[3 if 3 in found else 4][0])[0])
    if module is None:
        return None
    written = re.search(r"\((\d+)\)$", name)  # `jit_f(16)`
    return stated if stated is not None else signed(int(written.group(1))) if written else number, module
