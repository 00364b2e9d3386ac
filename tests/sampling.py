"""Samples of long tables of cases and of the longest files: the suite runs a few cases of each table and a part of the tests of each such
file, drawn anew for every commit; `make test FULL=1` runs all."""

from __future__ import annotations

import math
import os
import random
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

LONGEST = (
    "docs/test_commands",
    "sharding/test_equality",
    "trainer/test_hang_runs",
    "trainer/test_run",
    "launch/test_doctor",
    "launch/test_launch",
    "planner/test_collectives_gpu",
    "trainer/test_aot",
    "planner/test_memory_live",
    "launch/test_link",
    "sharding/test_collective_budget",
    "trainer/test_nan_search",
    "cli/test_compile",
    "launch/test_overlap_compiled",
    "cli/test_plan",
    "cli/test_scale",
    "trainer/test_fp8_training",
    "trainer/test_gpu_bench",
    "trainer/test_lora",
    "trainer/test_step",
    "trainer/test_preference",
    "trainer/test_rollback",
    "trainer/test_policy",
    "cli/test_recipes",
    "cli/test_init",
    "trainer/test_continued",
    "cli/test_bench",
    "models/test_attention",
    "parity/test_families",
    "cli/test_damaged_links",
    "cli/test_simulate",
    "planner/test_search",
    "planner/test_economics",
    "trainer/test_recomputed_attention",
    "models/test_decoder",
    "cli/test_damaged_runs",
    "loaders/test_prepare",
    "cli/test_bad_input",
    "cli/test_evaluate",
    "loaders/test_loader",
    "trainer/test_distillation",
    "models/test_remat",
    "trainer/test_mtp",
    "models/test_moe",
    "trainer/test_low_precision_meshes",
    "parity/test_generation",
    "models/test_backward_order",
    "models/test_collective_matmul",
    "trainer/test_checkpoint_tools",
    "parity/test_sharded_models",
    "cli/test_convert",
    "trainer/test_corruption",
    "models/test_mup",
    "parity/test_lora_experts",
    "parity/test_text_evaluation",
    "trainer/test_checkpoint_failures",
    "planner/test_any_config",
    "parity/test_lora",
    "test_plugins",
    "parity/test_harness",
    "test_api",
    "trainer/test_low_precision_convergence",
)
"""Files that take longest: begun first, so that no worker waits at the end for one that was begun last, and of which PART runs."""
PART = 1 / 6
"""Share of the tests of such a file that runs per commit."""
PAGES = "docs/test_commands"
"""The one of them that draws whole pages itself, as the commands of a page follow each other."""
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


def of_commit(files: Sequence[int | None]) -> list[bool]:
    """Return for each test whether it runs, given the number of its file in LONGEST; None: of another file."""
    chosen: set[int] = set()
    for file in {file for file in files if file is not None}:
        own = [test for test, of_test in enumerate(files) if of_test == file]
        chosen.update(own if LONGEST[file] == PAGES else drawn(own, math.ceil(PART * len(own))))
    return [file is None or test in chosen for test, file in enumerate(files)]
