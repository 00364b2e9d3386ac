"""Read a serialized HLO module (XLA's HloProto, as profiles contain it) into `hlo.module.Module`.

The attributes of an instruction become the text that XLA prints for them, so that all readers of a Module work on both forms. Field numbers
are those of openxla/xla, xla/service/hlo.proto and xla/xla_data.proto. Fields that no reader needs (literals, layouts, shardings, buffers)
are skipped without being decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.hlo.module import Computation, Instruction, Module, Shape, Source
from ridgeline.hlo.parse import with_derived_trip_counts
from ridgeline.hlo.protobuf import decode_text, fields, integers, signed, varint

_NAMES = "pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz"
_NAMES += " f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu buffer"
DTYPES = dict(enumerate(_NAMES.split(), 1))
"""PrimitiveType -> its name in HLO's text."""
_TUPLE = 13
_HOST_MEMORY = 5
"""Memory space of the host (xla/layout.h)."""


@dataclass
class _Raw:
    """The fields of an instruction that are needed, decoded."""

    texts: dict[int, str] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    lists: dict[int, list[int]] = field(default_factory=dict)
    messages: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.texts.get(1, "")

    @property
    def opcode(self) -> str:
        return self.texts.get(2, "")

    @property
    def id(self) -> int:
        return self.numbers.get(35, 0)


_TEXTS = frozenset({1, 2, 11, 28, 43, 63})  # name, opcode, fusion kind, custom-call target, backend config, comparison direction
_NUMBERS = frozenset({9, 13, 26, 35, 50, 58})  # parameter, tuple index, channel, id, feature groups, batch groups
_LISTS = frozenset({14, 36, 38})  # dimensions, operands, called computations
_MESSAGES = frozenset({3, 7, 8, 15, 16, 30, 49, 52, 68, 87, 90, 92, 93})
# shape, metadata, literal, window, convolution, dot, groups, permute, frontend attributes, groups, ragged dot, groups as iota, as mesh axes


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


def instruction_names(data: bytes) -> dict[int, str]:
    """Return the names of all instructions of an HloProto by id. Raises Damaged."""
    found: dict[int, str] = {}
    for number, _, begin, end in fields(data, 0, len(data)):
        for inner, _, first, last in fields(data, begin, end) if number == 1 else ():
            for each, _, start, stop in fields(data, first, last) if inner == 3 else ():
                if each == 2:
                    raw = _raw(data, start, stop)
                    found[raw.id] = raw.name
    return found


class _Computation:
    """A computation whose instructions are not yet connected."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self.name, self.id, self._root = "", 0, 0
        self._raw: list[_Raw] = []
        for number, _, begin, stop in fields(data, start, end):
            if number == 1:
                self.name = decode_text(data, begin, stop)
            elif number == 2:
                self._raw.append(_raw(data, begin, stop))
            elif number == 5:
                self.id = signed(varint(data, begin)[0])
            elif number == 6:
                self._root = signed(varint(data, begin)[0])

    @property
    def root(self) -> _Raw | None:
        return next((raw for raw in self._raw if raw.id == self._root), None)

    @property
    def wrapped(self) -> set[int]:
        """Computations that asynchronous instructions call: each is part of its instruction."""
        return {number for raw in self._raw if raw.opcode == "async-start" for number in raw.lists.get(38, [])}

    def build(self, data: bytes, names: Mapping[int, str], roots: Mapping[str, _Raw], order: Sequence[int] | None) -> Computation:
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


def _raw(data: bytes, start: int, end: int) -> _Raw:
    raw = _Raw()
    for number, tag, begin, stop in fields(data, start, end):
        if number in _TEXTS:
            raw.texts[number] = decode_text(data, begin, stop)
        elif number in _NUMBERS:
            raw.numbers[number] = signed(varint(data, begin)[0])
        elif number in _LISTS:
            raw.lists.setdefault(number, []).extend(integers(data, tag, begin, stop))
        elif number in _MESSAGES:
            raw.messages.setdefault(number, []).append((begin, stop))
    return raw


def _instruction(data: bytes, raw: _Raw, by_id: Mapping[int, _Raw], names: Mapping[int, str], roots: Mapping[str, _Raw]) -> Instruction:
    shapes, on_host = _shapes(data, raw.messages.get(3, []))
    opcode, source = raw.opcode, raw
    if opcode.startswith("async-"):  # the text has it and what it wraps as one instruction: `fusion-start`
        wrapped = _called_ids(raw, by_id)
        source = roots.get(names.get(wrapped[0], ""), raw) if wrapped else raw
        opcode = opcode if source is raw else source.opcode + opcode.removeprefix("async")
    called = [names[each] for each in source.lists.get(38, []) if each in names]
    if opcode.endswith(("-done", "-update")):
        parts = [_metadata(data, raw)]
    else:
        parts = [_called(source.opcode, called), *_attributes(data, source), _metadata(data, raw)]
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


def _called_ids(raw: _Raw, by_id: Mapping[int, _Raw]) -> list[int]:
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


def _called(opcode: str, called: Sequence[str]) -> str:
    if not called:
        return ""
    if opcode == "while" and len(called) == 2:
        return f"condition=%{called[1]}, body=%{called[0]}"
    if len(called) > 1 or opcode in ("conditional", "custom-call"):
        key = "branch_computations" if opcode == "conditional" else "called_computations"
        return f"{key}={{{', '.join('%' + name for name in called)}}}"
    return f"{'calls' if opcode == 'fusion' else 'to_apply'}=%{called[0]}"


def _attributes(data: bytes, raw: _Raw) -> list[str]:
    parts = []
    if raw.opcode == "get-tuple-element":
        parts.append(f"index={raw.numbers.get(13, 0)}")
    if dims := raw.lists.get(14):
        parts.append(f"dimensions={_braces(dims)}")
    if 15 in raw.messages:
        parts.append(_window(data, *raw.messages[15][0]))
    if 16 in raw.messages:
        parts.append(_convolution(data, *raw.messages[16][0]))
    counts = {"feature_group_count": raw.numbers.get(50, 1), "batch_group_count": raw.numbers.get(58, 1)}
    parts += [f"{name}={count}" for name, count in counts.items() if count > 1]
    for start, end in raw.messages.get(30, []):
        parts += _dot(data, start, end)
    for start, end in raw.messages.get(90, []):
        for number, _, begin, stop in fields(data, start, end):
            parts += _dot(data, begin, stop) if number == 1 else []
    if 11 in raw.texts:
        parts.append(f"kind={raw.texts[11]}")
    if raw.numbers.get(26, 0) > 0:
        parts.append(f"channel_id={raw.numbers[26]}")
    if groups := _groups(data, raw):
        parts.append(f"replica_groups={groups}")
    if 52 in raw.messages:
        pairs = [_numbers(data, *span) for span in raw.messages[52]]
        parts.append("source_target_pairs={" + ",".join(f"{{{pair.get(1, 0)},{pair.get(2, 0)}}}" for pair in pairs) + "}")
    if 63 in raw.texts:
        parts.append(f"direction={raw.texts[63]}")
    if 28 in raw.texts:
        parts.append(f'custom_call_target="{raw.texts[28]}"')
    for start, end in raw.messages.get(68, []):
        entries = [_entry(data, begin, stop) for number, _, begin, stop in fields(data, start, end) if number == 1]
        if entries:
            parts.append("frontend_attributes={" + ",".join(f'{key}="{value}"' for key, value in entries) + "}")
    return parts


def _dot(data: bytes, start: int, end: int) -> list[str]:
    names = {1: "lhs_contracting_dims", 2: "rhs_contracting_dims", 3: "lhs_batch_dims", 4: "rhs_batch_dims"}
    found = _repeated(data, start, end)
    return [f"{name}={_braces(found[number])}" for number, name in names.items() if number in found]


def _window(data: bytes, start: int, end: int) -> str:
    """Return `window={size=3x3 stride=2x1 pad=1_2x0_1 lhs_dilate=1x2 rhs_dilate=2x1}`."""
    dims = [_numbers(data, begin, stop) for number, _, begin, stop in fields(data, start, end) if number == 1]
    parts = ["size=" + "x".join(str(dim.get(1, 0)) for dim in dims), "stride=" + "x".join(str(dim.get(2, 1)) for dim in dims)]
    parts.append("pad=" + "x".join(f"{dim.get(3, 0)}_{dim.get(4, 0)}" for dim in dims))
    parts += ["lhs_dilate=" + "x".join(str(dim.get(6, 1)) for dim in dims), "rhs_dilate=" + "x".join(str(dim.get(5, 1)) for dim in dims)]
    return f"window={{{' '.join(parts)}}}" if dims else ""


def _convolution(data: bytes, start: int, end: int) -> str:
    """Return `dim_labels=b01f_01io->b01f`."""
    found = _repeated(data, start, end)

    def labels(first: int, second: int, spatial: int, names: str) -> str:
        places = {found.get(first, [0])[0]: names[0], found.get(second, [0])[0]: names[1]}
        places |= {dim: str(index) for index, dim in enumerate(found.get(spatial, []))}
        return "".join(places[dim] for dim in sorted(places))

    return f"dim_labels={labels(7, 8, 11, 'bf')}_{labels(3, 4, 6, 'io')}->{labels(9, 10, 12, 'bf')}"


def _groups(data: bytes, raw: _Raw) -> str:
    """Return the replica groups of a collective in the form that they are stored in; '' for other instructions."""
    if 93 in raw.messages:
        return _mesh_groups(data, *raw.messages[93][0])
    if 92 in raw.messages:
        return _iota(data, *raw.messages[92][0])
    spans = list(raw.messages.get(49, []))
    for start, end in raw.messages.get(87, []):
        for number, _, begin, stop in fields(data, start, end):
            if number == 2:
                return _iota(data, begin, stop)
            if number == 1:
                spans.append((begin, stop))
    if spans:
        return "{" + ",".join(_braces(_repeated(data, *span).get(1, [])) for span in spans) + "}"
    return "{}" if raw.opcode.startswith(("all-", "reduce-scatter", "ragged-all", "collective-broadcast")) else ""


def _iota(data: bytes, start: int, end: int) -> str:
    found = _repeated(data, start, end)
    order = found.get(4, [])
    transposed = f"T({_comma(order)})" if order and order != sorted(order) else ""
    return f"[{found.get(1, [1])[0]},{found.get(2, [1])[0]}]<=[{_comma(found.get(3, [1]))}]{transposed}"


def _mesh_groups(data: bytes, start: int, end: int) -> str:
    """Return `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2,'b'}`."""
    axes: list[tuple[str, int]] = []
    devices, parts = "", list[str]()
    for number, _, begin, stop in fields(data, start, end):
        if number == 1:
            for inner, tag, first, last in fields(data, begin, stop):
                if inner == 1:
                    axes.append(_axis(data, first, last))
                elif inner == 2:
                    devices += ("," if devices else "") + _comma(integers(data, tag, first, last))
                elif inner == 3:
                    iota = _repeated(data, first, last)
                    devices = f"[{_comma(iota.get(1, []))}]" + (f"T({_comma(iota[2])})" if 2 in iota else "")
        elif number == 2:
            axis, part = 0, ""
            for inner, _, first, last in fields(data, begin, stop):
                if inner == 1:
                    axis, _ = varint(data, first)
                elif inner == 2:
                    sizes = _numbers(data, first, last)
                    part = f":({sizes.get(1, 1)}){sizes.get(2, 1)}"
            parts.append(f"'{axes[axis][0]}'{part}")
    mesh = ",".join(f"'{name}'={size}" for name, size in axes)
    return f"mesh[{mesh}]{f', device_ids=({devices})' if devices else ''} {{{','.join(parts)}}}"


def _axis(data: bytes, start: int, end: int) -> tuple[str, int]:
    name, size = "", 1
    for number, _, begin, stop in fields(data, start, end):
        if number == 1:
            name = decode_text(data, begin, stop)
        elif number == 2:
            size, _ = varint(data, begin)
    return name, size


def _metadata(data: bytes, raw: _Raw) -> str:
    parts = []
    for start, end in raw.messages.get(7, []):
        for number, _, begin, stop in fields(data, start, end):
            if number in (2, 3):
                text = decode_text(data, begin, stop).replace('"', "'")
                parts.append(f'{"op_name" if number == 2 else "source_file"}="{text}"')
            elif number in (4, 15):
                parts.append(f"{'source_line' if number == 4 else 'stack_frame_id'}={varint(data, begin)[0]}")
    return f"metadata={{{' '.join(parts)}}}" if parts else ""


def _constant(data: bytes, raw: _Raw, shapes: tuple[Shape, ...]) -> int | None:
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
                sequence = _repeated(data, first, last).get(1, [])
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
            rows[number].append(_numbers(data, begin, stop))

    def text(kind: int, position: int) -> str:
        return texts[kind][position - 1] if 0 < position <= len(texts[kind]) else ""

    places = [Source(text(1, place.get(1, 0)), place.get(3, 0), text(2, place.get(2, 0))) for place in rows[3]]
    frames = [frame.get(1, 0) for frame in rows[4]]
    return {index: places[place - 1] for index, place in enumerate(frames, 1) if 0 < place <= len(places)}


def _entry(data: bytes, start: int, end: int) -> tuple[str, str]:
    found = {number: decode_text(data, begin, stop) for number, _, begin, stop in fields(data, start, end)}
    return found.get(1, ""), found.get(2, "")


def _numbers(data: bytes, start: int, end: int) -> dict[int, int]:
    """Return the single integers of a message by field; other fields are skipped."""
    return {number: signed(varint(data, begin)[0]) for number, tag, begin, _ in fields(data, start, end) if varint(data, tag)[0] & 7 == 0}


def _repeated(data: bytes, start: int, end: int) -> dict[int, list[int]]:
    """Return the integers of a message by field, repeated or single."""
    found: dict[int, list[int]] = {}
    for number, tag, begin, stop in fields(data, start, end):
        if varint(data, tag)[0] & 7 in (0, 2):
            found.setdefault(number, []).extend(integers(data, tag, begin, stop))
    return found


def _comma(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)


def _braces(values: Sequence[int]) -> str:
    return f"{{{_comma(values)}}}"
