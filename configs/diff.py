"""What differs between two resolved configs, and which differences a resume allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.load import leaves
from ridgeline.configs.schema import Config
from ridgeline.configs.tree import dotted

MISSING = "(absent)"
"""Shown for a key that exists on one side only, such as a second data source."""


@dataclass(frozen=True, slots=True)
class Change:
    """One differing key of a resume: whether a checkpoint survives it, and why (or what follows from it)."""

    key: str
    old: Any
    new: Any
    allowed: bool
    why: str


def flatten(config: Config | dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of a config by dotted key."""
    plain = config.model_dump(mode="json") if isinstance(config, Config) else config
    return {dotted(path): value for path, value in leaves(plain)}


def diff(old: Config | dict[str, Any], new: Config | dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, old, new) of every leaf that differs, in the order of the schema."""
    before, after = flatten(old), flatten(new)
    sections = list(Config.model_fields)
    keys = sorted(dict.fromkeys([*before, *after]), key=lambda key: sections.index(key.partition(".")[0]))
    found = [(key, before.get(key, MISSING), after.get(key, MISSING)) for key in keys]
    return [(key, a, b) for key, a, b in found if a != b or type(a) is not type(b)]


def classify_changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Judge what changed since a checkpoint was written.

    Takes two `Config.model_dump(mode="json")`. The tokenizer is no part of the config: the trainer compares it through the
    data manifest.
    """
    return [Change(key, a, b, *_judge(key, old, new)) for key, a, b in diff(old, new)]


_REFUSED = {
    "optimizer.kind": "the optimiser's state in the checkpoint belongs to the other kind",
    "precision.params": "the checkpoint holds parameters of the other dtype",
    "precision.moments": "the checkpoint holds optimiser moments of the other dtype",
}
_DATA_ORDER = ("seed", "data.seed", "data.shuffle", "data.train", "data.seq_len", "data.batch_size", "data.document_masking")
_NOTES = {
    "model.init_std": "used at initialisation only: no effect on a resumed run",
    "trainer.accumulation": "same update up to rounding",
    "trainer.steps": "the schedule is stretched to the new length",
}


_DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model.num_kv_heads": lambda model: model["num_kv_heads"] or model["num_heads"],
    "model.head_dim": lambda model: model["head_dim"] or model["embed_dim"] // model["num_heads"],
    "model.pad_vocab_to": lambda model: model["pad_vocab_to"] or model["vocab_size"],
}
"""Keys whose null stands for a value that follows from others."""


def _judge(key: str, old: dict[str, Any], new: dict[str, Any]) -> tuple[bool, str]:
    if key in _NOTES:
        return True, _NOTES[key]
    if key == "model.max_seq_len" and all(config.get("model", {}).get("position") == "rope" for config in (old, new)):
        return True, "rotary positions have no table: parameters stay as they are"
    if key in _DERIVED and _DERIVED[key](old["model"]) == _DERIVED[key](new["model"]):
        return True, "the same value, left out or spelt out"
    if key in ("precision.matmul", "precision.amax_history") and "fp8_delayed" in (c["precision"]["matmul"] for c in (old, new)):
        return False, "fp8_delayed goes on from magnitudes in the checkpoint, which the other setting does not keep there"
    if _under(key, ["model"]):
        return False, "the checkpoint's parameters belong to the other model"
    if key in _REFUSED:
        return False, _REFUSED[key]
    if _under(key, _DATA_ORDER):
        return True, "the rows of the coming steps change: the run no longer continues the same data order"
    if _under(key, ["mesh", "compute", "precision", "runtime"]):
        return True, "same mathematics, other rounding: no longer bitwise equal to the uninterrupted run"
    return True, ""


def _under(key: str, parents: Iterable[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)
