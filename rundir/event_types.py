"""The types of the fields of events that readers rely on. A value of another type is damage: the line is refused with its place and key.

A field that a table does not name is kept as it is: a later version, or a plug-in, may write more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.configs.errors import UserError

PHASES = (
    "launch",
    "import",
    "rendezvous",
    "init",
    "restore",
    "compile",
    "setup",
    "first_step",
    "train",
    "data_wait",
    "evaluation",
    "save",
    "check",
    "profile",
    "teardown",
)
"""All phase names; the run ledger sums over exactly these."""
NON_FINITE = ("NaN", "Infinity", "-Infinity")
"""How a log writes non-finite numbers (rundir/jsonl.py::dump_json)."""
_MOST_S = 1e11
"""Largest time in seconds, some 3,000 years: sums and differences of times stay exact enough."""

NUMBERS = ("loss", "grad_norm")
"""Metrics in a step event that may be non-finite."""

Check = Callable[[Any], bool]


def number(value: Any) -> bool:
    """A number that fits a float, or the name of a non-finite one."""
    kind = type(value)
    return kind is float or (kind is int and abs(value) < 1 << 63) or (kind is str and value in NON_FINITE)


def finite(value: Any) -> bool:
    """A number that is not negative and finite."""
    return type(value) in (int, float) and 0 <= value < 1e18


def seconds(value: Any) -> bool:
    """A finite time."""
    return type(value) in (int, float) and abs(value) <= _MOST_S and math.isfinite(value)


def count(value: Any) -> bool:
    """An integer from 0 on that fits 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def text(value: Any) -> bool:
    """A string."""
    return type(value) is str


def optional(check: Check) -> Check:
    """Or null."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """A list whose items pass the check."""
    return lambda value: type(value) is list and all(map(check, value))


def mapping_of(check: Check) -> Check:
    """A mapping whose values pass the check."""
    return lambda value: type(value) is dict and all(map(check, value.values()))


def record_of(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """A mapping with the needed keys, and of other keys those in `more`, of these types."""
    known = {**needed, **(more or {})}
    return lambda value: type(value) is dict and needed.keys() <= value.keys() and all(known[k](v) for k, v in value.items() if k in known)


OWN: Mapping[str, Check] = {"time": seconds, "mono": seconds, "run": text, "process": count, "restart": count, "kind": text}
"""Keys of every event."""
_PHASE: Mapping[str, Check] = {"phase": lambda value: value in PHASES, "parent": optional(count)}
NEEDED: Mapping[str, Mapping[str, Check]] = {
    "phase_start": {**_PHASE, "id": count},
    "phase_end": {"phase": _PHASE["phase"], "id": count, "duration_s": seconds, "outcome": text},
    "phase_total": {**_PHASE, "duration_s": seconds, "count": count},
    "step": {"step": count},
    "recompilation": {"program": text, "duration_s": seconds},
}
"""Kind of event -> the fields that it must have."""
_OF_PHASE: Mapping[str, Check] = {
    "step": count,
    "start_step": count,
    "results": mapping_of(number),
    "program": text,
    "source": text,
    "tier": optional(text),
    "ago_s": seconds,
    **dict.fromkeys(("trace_s", "lower_s", "compile_s", "load_s"), seconds),
}
_DEVICE = dict.fromkeys(
    ("clock_mhz", "rated_mhz", "power_w", "power_limit_w", "power_default_w", "temperature_c", "stopped_share"), optional(number)
)
_SETTING = dict.fromkeys(("name", "value", "reason", "chosen"), optional(text))
_CHANGE = dict.fromkeys(("argument", "before", "after"), text)
OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    "phase_start": _OF_PHASE,
    "phase_end": {**_OF_PHASE, "parent": optional(count)},
    "phase_total": _OF_PHASE,
    "hang": {"silent_s": seconds},
    "recompilation": {"step": optional(count), "source": optional(text), "arguments": list_of(record_of(_CHANGE))},
    "environment": {"settings": list_of(record_of({"name": text, "value": optional(text)}, _SETTING))},
    "device_states": {"host": text},
    "device_state": {"devices": list_of(record_of({"device": text}, {**_DEVICE, "reasons": list_of(text)}))},
    "step": {
        **dict.fromkeys(NUMBERS, number),
        **dict.fromkeys(("tokens", "target_tokens", "tokens_per_s", "mfu", "peak_bytes", "limit_bytes"), finite),
        **dict.fromkeys(("data_wait_s", "step_time_mean_s", "step_time_p50_s"), finite),
    },
    "checkpoint_saved": {"step": count, "total_s": seconds, "size_bytes": count},
    "local_checkpoint_saved": {"step": count, "total_s": seconds, "size_bytes": count},
    "checkpoint_copied": {"step": count, "total_s": seconds, "size_bytes": count},
}
"""Kind of event -> the types of fields that it may lack."""


def check_event(record: Mapping[str, Any], place: str) -> None:
    """Check the types of one line of an event log. Raises UserError with `place` and the key."""
    _check(record, OWN, "event", place)
    kind = record["kind"]
    _check(record, NEEDED.get(kind, {}), kind, place)
    types = OPTIONAL.get(kind, {})
    for key in types.keys() & record.keys():
        if not types[key](record[key]):
            raise _wrong(kind, key, record[key], place)


def _check(record: Mapping[str, Any], types: Mapping[str, Check], what: str, place: str) -> None:
    for key, check in types.items():
        if key not in record:
            raise UserError(f"{place}: {what} without '{key}'")
        if not check(record[key]):
            raise _wrong(what, key, record[key], place)


def _wrong(what: str, key: str, value: Any, place: str) -> UserError:
    return UserError(f"{place}: {what[:40]} with a wrong '{key[:40]}': {json.dumps(value)[:40]}")
