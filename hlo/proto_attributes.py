"""An instruction of a serialized HLO module: its decoded fields, and its attributes as the text that XLA prints for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.hlo.protobuf import decode_text, fields, integers, numbers, repeated, signed, varint


@dataclass
class RawInstruction:
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


def read_raw(data: bytes, start: int, end: int) -> RawInstruction:
    """Decode the fields of an instruction."""
    raw = RawInstruction()
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


def called_text(opcode: str, called: Sequence[str]) -> str:
    """Return the attribute that names the called computations, such as `to_apply=%add`; '' without any."""
    if not called:
        return ""
    if opcode == "while" and len(called) == 2:
        return f"condition=%{called[1]}, body=%{called[0]}"
    if len(called) > 1 or opcode in ("conditional", "custom-call"):
        key = "branch_computations" if opcode == "conditional" else "called_computations"
        return f"{key}={{{', '.join('%' + name for name in called)}}}"
    return f"{'calls' if opcode == 'fusion' else 'to_apply'}=%{called[0]}"


def attribute_texts(data: bytes, raw: RawInstruction) -> list[str]:
    """Return the other attributes, in the order of the text."""
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
        pairs = [numbers(data, *span) for span in raw.messages[52]]
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
    found = repeated(data, start, end)
    return [f"{name}={_braces(found[number])}" for number, name in names.items() if number in found]


def _window(data: bytes, start: int, end: int) -> str:
    """Return `window={size=3x3 stride=2x1 pad=1_2x0_1 lhs_dilate=1x2 rhs_dilate=2x1}`."""
    dims = [numbers(data, begin, stop) for number, _, begin, stop in fields(data, start, end) if number == 1]
    parts = ["size=" + "x".join(str(dim.get(1, 0)) for dim in dims), "stride=" + "x".join(str(dim.get(2, 1)) for dim in dims)]
    parts.append("pad=" + "x".join(f"{dim.get(3, 0)}_{dim.get(4, 0)}" for dim in dims))
    parts += ["lhs_dilate=" + "x".join(str(dim.get(6, 1)) for dim in dims), "rhs_dilate=" + "x".join(str(dim.get(5, 1)) for dim in dims)]
    return f"window={{{' '.join(parts)}}}" if dims else ""


def _convolution(data: bytes, start: int, end: int) -> str:
    """Return `dim_labels=b01f_01io->b01f`."""
    found = repeated(data, start, end)

    def labels(first: int, second: int, spatial: int, names: str) -> str:
        places = {found.get(first, [0])[0]: names[0], found.get(second, [0])[0]: names[1]}
        places |= {dim: str(index) for index, dim in enumerate(found.get(spatial, []))}
        return "".join(places[dim] for dim in sorted(places))

    return f"dim_labels={labels(7, 8, 11, 'bf')}_{labels(3, 4, 6, 'io')}->{labels(9, 10, 12, 'bf')}"


def _groups(data: bytes, raw: RawInstruction) -> str:
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
        return "{" + ",".join(_braces(repeated(data, *span).get(1, [])) for span in spans) + "}"
    return "{}" if raw.opcode.startswith(("all-", "reduce-scatter", "ragged-all", "collective-broadcast")) else ""


def _iota(data: bytes, start: int, end: int) -> str:
    found = repeated(data, start, end)
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
                    iota = repeated(data, first, last)
                    devices = f"[{_comma(iota.get(1, []))}]" + (f"T({_comma(iota[2])})" if 2 in iota else "")
        elif number == 2:
            axis, part = 0, ""
            for inner, _, first, last in fields(data, begin, stop):
                if inner == 1:
                    axis, _ = varint(data, first)
                elif inner == 2:
                    sizes = numbers(data, first, last)
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


_METADATA_TEXTS = {2: "op_name", 3: "source_file", 12: "deduplicated_name"}


def metadata_text(data: bytes, raw: RawInstruction) -> str:
    """Return `metadata={op_name="..." source_file="..." source_line=... deduplicated_name="..."}`; '' without metadata."""
    parts = []
    for start, end in raw.messages.get(7, []):
        for number, _, begin, stop in fields(data, start, end):
            if number in _METADATA_TEXTS:
                text = decode_text(data, begin, stop).replace('"', "'")
                parts.append(f'{_METADATA_TEXTS[number]}="{text}"')
            elif number in (4, 15):
                parts.append(f"{'source_line' if number == 4 else 'stack_frame_id'}={varint(data, begin)[0]}")
    return f"metadata={{{' '.join(parts)}}}" if parts else ""


def _entry(data: bytes, start: int, end: int) -> tuple[str, str]:
    found = {number: decode_text(data, begin, stop) for number, _, begin, stop in fields(data, start, end)}
    return found.get(1, ""), found.get(2, "")


def _comma(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)


def _braces(values: Sequence[int]) -> str:
    return f"{{{_comma(values)}}}"
