"""Which narrower training state would make a run fit that does not: exact settings, and the bytes they save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import Candidate, search_scale

MOMENTS = {"adamw": "int8", "lion": "bfloat16", "muon": "bfloat16", "sgd": "bfloat16"}
"""Optimiser -> narrowest moments it takes (configs/rules.py); Adafactor's statistics are small already."""


@dataclass(frozen=True)
class Narrowing:
    """Settings with which a config fits."""

    settings: dict[str, object]
    """Key below `precision` to value."""
    best: Candidate
    """The fastest layout that fits with them."""
    saved_bytes: int
    """Per device, against the same layout without them."""

    @property
    def overrides(self) -> str:
        """The settings as one types them."""
        return " ".join(f"precision.{key}={str(value).lower()}" for key, value in self.settings.items())

    @property
    def sentence(self) -> str:
        """What to set and what it brings."""
        layout = self.best.layout
        where = f"{layout.text()}, {layout.accumulation} x, remat {layout.remat.policy}"
        return f"{self.overrides} saves {self.saved_bytes / 1e9:.1f} GB per device and fits ({where})."


def choices(config: Config) -> Iterator[dict[str, object]]:
    """Yield the settings to try, what costs least precision first; only what changes something."""
    now = config.precision.model_dump()
    moments = {"moments": MOMENTS[config.optimizer.kind]} if config.optimizer.kind in MOMENTS else {}
    gradients = {"gradients": "bfloat16"}
    masters = {"params": "bfloat16", "stochastic_rounding": True}
    tried: list[dict[str, object]] = [{}]
    for wanted in (moments, gradients, moments | gradients, moments | masters, moments | gradients | masters):
        changed: dict[str, object] = {key: value for key, value in wanted.items() if now[key] != value and now[key] != "int8"}
        if changed not in tried:
            tried.append(changed)
            yield changed


def narrow_enough(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int, tokens: float) -> Narrowing | None:
    """Return the first of `choices` with which a config fits on so many nodes; None: not even with all of them."""
    for settings in choices(config):
        narrow = config.model_copy(update={"precision": config.precision.model_copy(update=settings)})
        best = search_scale(narrow, cluster, calibration, nodes, tokens).best
        if best is not None:
            wide = memory_per_device(best.layout.apply(config), best.layout.sizes)
            return Narrowing(settings, best, wide.total_bytes - best.memory.total_bytes)
    return None
