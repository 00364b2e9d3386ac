"""Read a serialized HLO module (XLA's HloProto, as profiles contain it) into `hlo.module.Module`.

The attributes of an instruction become the text that XLA prints for them, so that all readers of a Module work on both forms. Field numbers
are those of openxla/xla, xla/service/hlo.proto and xla/xla_data.proto. Fields that no reader needs (literals, layouts, shardings, buffers)
are skipped without being decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.hlo.module import Computation, Instruction, Module, Shape, Source
from ridgeline.hlo.proto_attributes import RawInstruction, attribute_texts, called_text, metadata_text, read_raw
from ridgeline.hlo.protobuf import decode_text, fields, integers, numbers, repeated, signed, varint
from ridgeline.hlo.trip_counts import with_derived_trip_counts

_NAMES = "pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz"
_NAMES += " f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer"
DTYPES = dict(enumerate(_NAMES.split(), 1))
"""PrimitiveType -> its name in HLO's text."""
_TUPLE = 13
_HOST_MEMORY = 5
"""Memory space of the host (xla/layout.h)."""


def read_module(data: bytes) -> Module:
    """Read an HloProto. Raises Damaged (a ValueError) when it is not one, ValueError when it has no entry computation."""
    found = next(((begin, end) for number, _, begin, end in fields(data, 0, len(data)) if number == 1), None)
    if found is None:
        raise ValueError("it contains no HLO module")
    name, entry_name, entry_id = "", "", 0
    computations: list[_Computation] = []
    order: dict[int, list[int]] = {}
    sources: dict[int, Source] = {}
    for number, _, begin, end in fields(data, *found):
        if number == 1:
            name = decode_text(data, begin, end)
        elif number == 2:
            entry_name = decode_text(data, begin, end)
        elif number == 3:
            computations.append(_Computation(data, begin, end))
        elif number == 6:
            entry_id = signed(varint(data, begin)[0])
        elif number == 7:
            order = _schedule(data, begin, end)
        elif number == 17:
            sources = _sources(data, begin, end)
    names = {each.id: each.name for each in computations}
    entry = names.get(entry_id, entry_name)
    if entry not in names.values():
        raise ValueError("it contains no entry computation")
    roots = {each.name: root for each in computations if (root := each.root) is not None}
    wrapped = {number for each in computations for number in each.wrapped}
    read = {each.name: each.build(data, names, roots, order.get(each.id)) for each in computations if each.id not in wrapped}
    return Module(name, with_derived_trip_counts(read), entry, sources)


def module_name(data: bytes) -> str:
    """Return the name of the module of an HloProto, "" where it has none. Raises Damaged."""
    for number, _, begin, end in fields(data, 0, len(data)):
        for inner, _, first, last in fields(data, begin, end) if number == 1 else ():
            if inner == 1:
                return decode_text(data, first, last)
    return ""


def instruction_names(data: bytes) -> dict[int, str]:
    """Return the names of all instructions of an HloProto by id. Raises Damaged."""
    found: dict[int, str] = {}
    for number, _, begin, end in fields(data, 0, len(data)):
        for inner, _, first, last in fields(data, begin, end) if number == 1 else ():
            for each, _, start, stop in fields(data, first, last) if inner == 3 else ():
                if each == 2:
                    raw = read_raw(data, start, stop)
                    found[raw.id] = raw.name
    return found


class _Computation:
    """A computation whose instructions are not yet connected."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self.name, self.id, self._root = "", 0, 0
        self._raw: list[RawInstruction] = []
        for number, _, begin, stop in fields(data, start, end):
            if number == 1:
                self.name = decode_text(data, begin, stop)
            elif number == 2:
                self._raw.append(read_raw(data, begin, stop))
            elif number == 5:
                self.id = signed(varint(data, begin)[0])
            elif number == 6:
                self._root = signed(varint(data, begin)[0])

    @property
    def root(self) -> RawInstruction | None:
        return next((raw for raw in self._raw if raw.id == self._root), None)

    @property
    def wrapped(self) -> set[int]:
        """Computations that asynchronous instructions call: each is part of its instruction."""
        return {number for raw in self._raw if raw.opcode == "async-start" for number in raw.lists.get(38, [])}

    def build(self, data: bytes, names: Mapping[int, str], roots: Mapping[str, RawInstruction], order: Sequence[int] | None) -> Computation:
        """Connect the instructions.

        Args:
          data: the file.
          names: of the computations, by id.
          roots: root of each computation.
          order: ids in scheduled order; None: not scheduled.
        """
        by_id = {raw.id: raw for raw in self._raw}
        ids = [each for each in order if each in by_id] if order and set(order) >= set(by_id) else list(by_id)
        ids.sort(key=lambda each: each == self._root)  # the root last, as the text has it; the sort keeps the rest in order
        return Computation(self.name, tuple(_instruction(data, by_id[each], by_id, names, roots) for each in ids))


def _instruction(
    data: bytes, raw: RawInstruction, by_id: Mapping[int, RawInstruction], names: Mapping[int, str], roots: Mapping[str, RawInstruction]
) -> Instruction:
    shapes, on_host = _shapes(data, raw.messages.get(3, []))
    opcode, source = raw.opcode, raw
    if opcode.startswith("async-"):  # the text has it and what it wraps as one instruction: `fusion-start`
        wrapped = _called_ids(raw, by_id)
        source = roots.get(names.get(wrapped[0], ""), raw) if wrapped else raw
        opcode = opcode if source is raw else source.opcode + opcode.removeprefix("async")
    called = [names[each] for each in source.lists.get(38, []) if each in names]
    if opcode.endswith(("-done", "-update")):
        parts = [metadata_text(data, raw)]
    else:
        parts = [called_text(source.opcode, called), *attribute_texts(data, source), metadata_text(data, raw)]
        if config := source.texts.get(43):
            parts.append(f"backend_config={config}")
    return Instruction(
        name=raw.name,
        opcode=opcode,
        shapes=shapes,
        operands=tuple(by_id[each].name for each in raw.lists.get(36, []) if each in by_id),
        attributes="".join(f", {part}" for part in parts if part),
        parameter_number=raw.numbers.get(9, 0) if opcode == "parameter" else None,
        constant=_constant(data, raw, shapes) if opcode == "constant" else None,
        in_host_memory=on_host,
    )


def _called_ids(raw: RawInstruction, by_id: Mapping[int, RawInstruction]) -> list[int]:
    """Return what an asynchronous instruction calls: only its start names it, the rest of the chain refers to the start."""
    seen = 0
    while not raw.lists.get(38) and raw.lists.get(36) and raw.lists[36][0] in by_id and seen < len(by_id):
        raw, seen = by_id[raw.lists[36][0]], seen + 1
    return raw.lists.get(38, [])


def _shapes(data: bytes, spans: Sequence[tuple[int, int]]) -> tuple[tuple[Shape, ...], bool]:
    """Return the arrays of a shape, tuples flattened, and whether one of them is in host memory."""
    found: list[Shape] = []
    on_host = False
    for start, end in spans:
        dtype, dims, inner = 0, list[int](), list[tuple[int, int]]()
        for number, tag, begin, stop in fields(data, start, end):
            if number == 2:
                dtype, _ = varint(data, begin)
            elif number == 3:
                dims += integers(data, tag, begin, stop)
            elif number == 4:
                inner.append((begin, stop))
            elif number == 5:
                on_host = on_host or any(n == 8 and varint(data, b)[0] == _HOST_MEMORY for n, _, b, _ in fields(data, begin, stop))
        if dtype == _TUPLE or inner:
            more, there = _shapes(data, inner)
            found += more
            on_host = on_host or there
        elif dtype:
            found.append(Shape(DTYPES.get(dtype, f"u{8 * dtype}"), tuple(dims)))
    return tuple(found), on_host


def _constant(data: bytes, raw: RawInstruction, shapes: tuple[Shape, ...]) -> int | None:
    """Return the value of a single integer."""
    if len(shapes) != 1 or shapes[0].dims or shapes[0].dtype not in ("s32", "s64", "u32", "u64"):
        return None
    for start, end in raw.messages.get(8, []):
        for number, tag, begin, stop in fields(data, start, end):
            if number in (4, 5, 6, 7):
                return next(iter(integers(data, tag, begin, stop)), 0)
    return None


def _schedule(data: bytes, start: int, end: int) -> dict[int, list[int]]:
    """Return computation -> its instructions in scheduled order."""
    found: dict[int, list[int]] = {}
    for _, _, begin, stop in fields(data, start, end):
        key, sequence = 0, list[int]()
        for number, _, first, last in fields(data, begin, stop):
            if number == 1:
                key = signed(varint(data, first)[0])
            elif number == 2:
                sequence = repeated(data, first, last).get(1, [])
        found[key] = sequence
    return found


def _sources(data: bytes, start: int, end: int) -> dict[int, Source]:
    """Return stack frame -> source line; all ids are positions from 1."""
    texts: dict[int, list[str]] = {1: [], 2: []}
    rows: dict[int, list[dict[int, int]]] = {3: [], 4: []}
    for number, _, begin, stop in fields(data, start, end):
        if number in texts:
            texts[number].append(decode_text(data, begin, stop))
        elif number in rows:
            rows[number].append(numbers(data, begin, stop))

    def text(kind: int, position: int) -> str:
        return texts[kind][position - 1] if 0 < position <= len(texts[kind]) else ""

    places = [Source(text(1, place.get(1, 0)), place.get(3, 0), text(2, place.get(2, 0))) for place in rows[3]]
    frames = [frame.get(1, 0) for frame in rows[4]]
    return {index: places[place - 1] for index, place in enumerate(frames, 1) if 0 < place <= len(places)}
