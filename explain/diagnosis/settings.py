"""Performance settings: settings that change the speed of a run and not what is trained, away from their defaults.

Each of them may help only on this device, with this model and these versions, and must be checked again when one of the three changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.diff import MISSING, flatten
from ridgeline.configs.schema import Config
from ridgeline.rundir.noise import Comparison

SECTIONS = ("compute.", "mesh.rules.", "precision.", "data.workers", "data.threads", "data.prefetch")
WIDEST = ("float32",)
"""Dtypes that do not count as a performance setting."""


@dataclass(frozen=True)
class Setting:
    """One performance setting away from its default."""

    key: str
    """A config key, or the name of an XLA flag or variable."""
    value: Any
    default: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class SimplerRun:
    """A run of the same work with fewer performance settings, compared with this one."""

    name: str
    settings: tuple[Setting, ...]
    """Set in this run and not in the simpler one; `default` is the value in the simpler run."""
    comparison: Comparison
    """Step times of this run over those of the simpler run."""

    @property
    def gain(self) -> float:
        """Relative gain in speed over the simpler run; negative when this run is slower."""
        return 1 / self.comparison.ratio - 1


def performance_settings(config: Config, flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the performance settings of a run that differ from the defaults, by key, with XLA flags; float32 never counts."""
    mine, defaults = flatten(config), flatten(Config())
    found = {
        key: value
        for key, value in mine.items()
        if key.startswith(SECTIONS) and value != defaults.get(key, MISSING) and not (key.startswith("precision.") and value in WIDEST)
    }
    return found | dict(flags)


def extra_settings(config: Config, flags: Mapping[str, str], simpler: Config, simpler_flags: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the performance settings of a run that have another value in a simpler run."""
    theirs = flatten(simpler) | dict(simpler_flags)
    return tuple(
        Setting(key, value, theirs.get(key, MISSING))
        for key, value in performance_settings(config, flags).items()
        if theirs.get(key, MISSING) != value
    )
