"""Differences between two resolved configs, and which of them a resume allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.load import leaves
from ridgeline.configs.schema import Config
from ridgeline.configs.yaml_tree import dotted

MISSING = "(absent)"
"""Stands for the value of a key that only the other config has, such as a second data source."""


@dataclass(frozen=True, slots=True)
class Change:
    """One changed setting of a resume, whether the resume allows it, and the reason or consequence."""

    key: str
    old: Any
    new: Any
    allowed: bool
    why: str


def flatten(config: Config | dict[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value for every value of a config."""
    plain = config.model_dump(mode="json") if isinstance(config, Config) else config
    return {dotted(path): value for path, value in leaves(plain)}


def diff(old: Config | dict[str, Any], new: Config | dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, old, new) of every value that differs, in the order of the schema."""
    before, after = flatten(old), flatten(new)
    order = {name: index for index, name in enumerate(Config.model_fields)}
    keys = sorted(dict.fromkeys([*before, *after]), key=lambda key: order.get(key.partition(".")[0], len(order)))
    found = [(key, before.get(key, MISSING), after.get(key, MISSING)) for key in keys]
    return [(key, a, b) for key, a, b in found if (a != b and not (a != a and b != b)) or type(a) is not type(b)]  # NaN is NaN


def classify_changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Return the settings that changed since a checkpoint was written, and whether a resume allows each.

    Takes two `Config.model_dump(mode="json")`. The tokenizer is not part of the config: the trainer compares it by the data manifest.
    """
    return [Change(key, a, b, *_judge(key, old, new)) for key, a, b in diff(old, new)]


_REFUSED = {
    "optimizer.kind": "the optimizer state in the checkpoint is of the other kind",
    "precision.params": "the parameters in the checkpoint have the other dtype",
    "precision.moments": "the optimizer moments in the checkpoint have the other dtype",
    "lora.base": "the frozen matrices in the checkpoint are stored in the other dtype",
}
_ADAPTERS = ("lora.rank", "lora.alpha", "lora.targets", "lora.dora", "lora.rslora")
_DATA_ORDER = (
    "seed",
    "data.seed",
    "data.shuffle",
    "data.train",
    "data.curriculum",
    "data.seq_len",
    "data.batch_size",
    "data.document_masking",
)
_NOTES = {
    "model.init_std": "used only at initialization: no effect on a resumed run",
    "runtime.lease_timeout_s": "",
    "trainer.accumulation": "the same update, except for rounding",
    "trainer.steps": "the learning-rate schedule changes to the new length",
}


_DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model.num_kv_heads": lambda model: model["num_kv_heads"] or model["num_heads"],
    "model.head_dim": lambda model: model["head_dim"] or model["embed_dim"] // model["num_heads"],
    "model.pad_vocab_to": lambda model: model["pad_vocab_to"] or model["vocab_size"],
}
"""Keys whose null means a value derived from other keys."""


def _judge(key: str, old: dict[str, Any], new: dict[str, Any]) -> tuple[bool, str]:
    if key in _NOTES:
        return True, _NOTES[key]
    if key == "model.max_seq_len" and all(config.get("model", {}).get("position") == "rope" for config in (old, new)):
        return True, "rotary positions have no parameters: the checkpoint fits"
    if key in _DERIVED and _DERIVED[key](old["model"]) == _DERIVED[key](new["model"]):
        return True, "the same value, given or derived"
    if key in ("precision.matmul", "precision.amax_history") and "fp8_delayed" in (c["precision"]["matmul"] for c in (old, new)):
        return False, "fp8_delayed needs the amax history in the checkpoint, which the other setting does not have"
    if _under(key, ["model"]):
        return False, "the parameters in the checkpoint belong to the other model"
    if key in _REFUSED:
        return False, _REFUSED[key]
    if key in _ADAPTERS:
        return False, "the checkpoint has other adapters, or none"
    if key == "precision.compute" and new.get("lora", {}).get("rank") is not None:
        return False, "the frozen parameters in the checkpoint have the other dtype"
    if _under(key, _DATA_ORDER):
        return True, "the data of the next steps changes: the run does not continue the same data order"
    if _under(key, ["mesh", "compute", "precision", "runtime.platform", "runtime.cpu_devices"]):
        return True, "the same computation with other rounding: not bitwise equal to the uninterrupted run"
    return True, ""


def _under(key: str, parents: Iterable[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)
