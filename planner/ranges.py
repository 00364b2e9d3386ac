"""The range of a predicted step time: how far published runs of its class were from their predictions.

planner/ranges.csv has the errors of held-out published runs by software, generation of the device, precision and experts; it is generated
(`python -m ridgeline.planner.published ranges`), and a test recomputes it. Within the range lie 90 % of the runs of the class. Money,
days, device-hours and throughput are proportional to the step time and have the same range.
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.schema import Config
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.software import Software

FILE = Path(__file__).with_name("ranges.csv")
FIELDS = ("software", "generation", "precision", "runs", "longest", "median", "p90", "worst")
ANY = "any"
EXPERTS = " experts"
"""Suffix of the precision of models with experts."""
FEWEST = 5
"""Held-out runs that a class needs."""
WIDER = 2.0
"""Factor on the range of another class, where the own one has too few runs: nothing was validated there. Assumed."""


@dataclass(frozen=True)
class Range:
    """A symmetric relative range."""

    share: float
    """0.05: from 5 % less to 5 % more."""
    basis: str
    """The published runs that it follows from."""

    def around(self, value: float) -> tuple[float, float]:
        """Return the lower and upper end around a value that is proportional to the step time. From 1 the share is a factor in both
        directions."""
        low = value / (1 + self.share) if self.share >= 1 else value * (1 - self.share)
        return low, value * (1 + self.share)

    def around_rate(self, value: float) -> tuple[float, float]:
        """Return the lower and upper end around a rate, which is inversely proportional to the step time."""
        short, long = self.around(1.0)
        return value / long, value / short


def precision_class(config: Config) -> str:
    """Return the class of the layers' matmuls: 32, 16 or (8 and 4) 8 bits, with experts or without."""
    bits = "8-bit" if config.precision.matmul != "compute" else "32-bit" if config.precision.compute == "float32" else "16-bit"
    return bits if config.model.moe is None else f"{bits}{EXPERTS}"


def step_range(config: Config, device: Hardware, software: Software) -> Range:
    """Return the range of a step time: that of its class, or WIDER that of the nearest class with enough runs.

    A class is validated for rows of up to twice the longest of its runs.
    """
    like, generation, precision = software.like or software.name, device.generation or ANY, precision_class(config)
    work = f"{precision} matmuls" if config.model.moe is None else f"{precision.removesuffix(EXPERTS)} matmuls, models with experts"
    ladder = {
        (like, generation, precision): f"{like} on {generation}, {work}",
        (like, ANY, precision): f"{like} on other devices, {work}",
        (ANY, generation, precision): f"other software on {generation}, {work}",
        (ANY, ANY, ANY): "all software and devices",
    }
    key = next(key for key in ladder if _table().get(key, _EMPTY).runs >= FEWEST)
    found = _table()[key]
    own = key == (like, generation, precision) and config.data.seq_len <= 2 * found.longest
    share = math.ceil(100 * found.p90 * (1.0 if own else WIDER)) / 100
    widened = "" if own else f"; times {WIDER:g}, since no such run is published"
    return Range(share, f"90% of {found.runs} held-out published runs, {ladder[key]}{widened}")


@dataclass(frozen=True)
class _Class:
    """A line of planner/ranges.csv."""

    runs: int
    longest: int
    p90: float


_EMPTY = _Class(0, 0, 0.0)


@functools.cache
def _table() -> dict[tuple[str, str, str], _Class]:
    with FILE.open() as file:
        rows = csv.DictReader(file)
        return {
            (row["software"], row["generation"], row["precision"]): _Class(int(row["runs"]), int(row["longest"]), float(row["p90"]))
            for row in rows
        }
