"""Settings that change speed and not what is trained: what a config sets away from its defaults, and what that buys.

Every one of them is a promise to know better than the defaults on this device, with this model and these versions; they are what must be
looked at again when any of the three changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.diff import MISSING, flatten
from ridgeline.configs.schema import Config
from ridgeline.rundir.noise import Comparison

SECTIONS = ("compute.", "mesh.rules.", "precision.", "data.workers", "data.threads", "data.prefetch")
NARROW = ("float32",)
"""Dtypes that are no specialisation: the widest."""


@dataclass(frozen=True)
class Knob:
    """One performance setting away from its default."""

    key: str
    """A config key, or the name of an XLA flag or variable."""
    value: Any
    default: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Rival:
    """A run of the same work with fewer performance settings, against this one."""

    name: str
    knobs: tuple[Knob, ...]
    """What this run sets and the rival does not; `default` is the rival's value."""
    comparison: Comparison
    """Step times of this run over those of the rival."""

    @property
    def gain(self) -> float:
        """Relative gain in speed over the rival; negative when this run is slower."""
        return 1 / self.comparison.ratio - 1


def knobs(config: Config, flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the performance settings of a run that are not the defaults, by key; float32 is never one."""
    mine, defaults = flatten(config), flatten(Config())
    found = {
        key: value
        for key, value in mine.items()
        if key.startswith(SECTIONS) and value != defaults.get(key, MISSING) and not (key.startswith("precision.") and value in NARROW)
    }
    return found | dict(flags)


def beyond(config: Config, flags: Mapping[str, str], simpler: Config, simpler_flags: Mapping[str, str]) -> tuple[Knob, ...]:
    """Return the performance settings of a run that a simpler one leaves at other values."""
    theirs = flatten(simpler) | dict(simpler_flags)
    return tuple(
        Knob(key, value, theirs.get(key, MISSING)) for key, value in knobs(config, flags).items() if theirs.get(key, MISSING) != value
    )
