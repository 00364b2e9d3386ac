"""Profiles written by hand: planes, lines and events in microseconds, as a text proto turned into the bytes of an `*.xplane.pb`."""

from collections.abc import Sequence
from pathlib import Path

from jax.profiler import ProfileData
from jaxlib._hlo import hlo_module_from_text

Event = tuple[str, float, float, dict[str, object]]


def event(name: str, start_us: float, end_us: float, /, **stats: object) -> Event:
    return (name, start_us, end_us, stats)


def kernel(name: str, start_us: float, end_us: float, hlo_op: str = "", correlation_id: int | None = None, /, **stats: object) -> Event:
    """A kernel as the CUDA tracer writes it."""
    more = {"hlo_op": hlo_op, "hlo_module": "jit_train_step", "program_id": 7} if hlo_op else {}
    correlation = {} if correlation_id is None else {"correlation_id": correlation_id}
    return event(name, start_us, end_us, **more, **correlation, **stats)


def step(number: int, start_us: float, end_us: float) -> Event:
    return event("train", start_us, end_us, step_num=number, _r=1)


class Plane:
    def __init__(self, name: str, lines: dict[str, Sequence[Event]], stats: dict[str, object] | None = None, start_ns: int = 0) -> None:
        self.name, self.lines, self.stats, self.start_ns = name, lines, stats or {}, start_ns
        self.modules: dict[int, tuple[str, bytes]] = {}


def gpu(ordinal: int, streams: dict[str, Sequence[Event]], start_ns: int = 0, **stats: object) -> Plane:
    return Plane(f"/device:GPU:{ordinal}", streams, stats, start_ns)


def host(lines: dict[str, Sequence[Event]], start_ns: int = 0) -> Plane:
    return Plane("/host:CPU", lines, start_ns=start_ns)


def metadata(programs: dict[int, str]) -> Plane:
    """The plane with the programs' HLO by their id, as XLA writes it."""
    plane = Plane("/host:metadata", {})
    plane.modules = {number: (hlo.split()[1].rstrip(","), serialized_hlo(hlo)) for number, hlo in programs.items()}
    return plane


def serialized_hlo(hlo: str) -> bytes:
    """The text of a module as a serialized HloProto."""
    return hlo_proto(hlo_module_from_text(hlo))


def hlo_proto(module: object) -> bytes:
    """A module of jaxlib as a serialized HloProto, whose first field is the module."""
    content: bytes = module.as_serialized_hlo_module_proto()  # type: ignore[attr-defined]
    length, prefix = len(content), b"\n"
    while length > 127:
        prefix, length = prefix + bytes([length & 127 | 128]), length >> 7
    return prefix + bytes([length]) + content


def text(planes: Sequence[Plane]) -> str:
    return "\n".join(_plane(number, plane) for number, plane in enumerate(planes, 1))


def serialized(planes: Sequence[Plane]) -> bytes:
    return ProfileData.text_proto_to_serialized_xspace(text(planes))


def write(path: Path, planes: Sequence[Plane]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(serialized(planes))
    return path


def _plane(number: int, plane: Plane) -> str:
    names: dict[str, int] = {}
    keys: dict[str, int] = {}

    def stat(key: str, value: object) -> str:
        index = keys.setdefault(key, len(keys) + 1)
        if isinstance(value, str):  # texts are references, as the tracers write them
            return f"stats {{ metadata_id: {index} ref_value: {keys.setdefault(value, len(keys) + 1)} }}"
        kind = "double_value" if isinstance(value, float) else "uint64_value" if int(value) >= 2**63 else "int64_value"  # type: ignore[call-overload]
        return f"stats {{ metadata_id: {index} {kind}: {value} }}"

    parts = [f'planes {{ id: {number} name: "{plane.name}"']
    for line_id, (line, events) in enumerate(plane.lines.items(), 1):
        parts.append(f'lines {{ id: {line_id} name: "{line}" timestamp_ns: {plane.start_ns}')
        for name, start_us, end_us, stats in events:
            index = names.setdefault(name, len(names) + 1)
            times = f"offset_ps: {round(start_us * 1e6)} duration_ps: {round((end_us - start_us) * 1e6)}"
            parts.append(f"events {{ metadata_id: {index} {times} {' '.join(stat(k, v) for k, v in stats.items())} }}")
        parts.append("}")
    parts += [stat(key, value) for key, value in plane.stats.items()]
    for program, (module, hlo) in plane.modules.items():
        escaped = "".join(f"\\{byte:03o}" for byte in hlo)
        own = f'stats {{ metadata_id: {keys.setdefault("Hlo Proto", len(keys) + 1)} bytes_value: "{escaped}" }}'
        parts.append(f'event_metadata {{ key: {program} value {{ id: {program} name: "{module}({program})" {own} }} }}')
    parts += [f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for name, i in names.items()]
    parts += [f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for name, i in keys.items()]
    return " ".join([*parts, "}"])
