"""Samples of long tables of cases: the suite runs a few of each table, drawn anew for every commit; `make test FULL=1` runs all."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FULL = os.environ.get("FULL", "") not in ("", "0")


@cache
def seed() -> str:
    """Return SEED of the environment, or else the commit: the same in every process of a run of the suite, and in a second try."""
    if given := os.environ.get("SEED"):
        return given
    try:
        head = ["git", "rev-parse", "HEAD"]
        return subprocess.run(head, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    except OSError:  # no git
        return ""


def drawn(cases: Sequence[T], count: int) -> list[T]:
    """Return `count` of the cases, in their order; all of them with FULL=1."""
    if FULL or count >= len(cases):
        return list(cases)
    kept = set(random.Random(f"{seed()} {len(cases)}").sample(range(len(cases)), count))
    return [case for number, case in enumerate(cases) if number in kept]
