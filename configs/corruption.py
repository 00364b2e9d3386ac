"""Rules of the section corruption_check."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.configs.problem import Problem
from ridgeline.configs.schema import Config


def corruption_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with checks for silent data corruption."""
    every, save = config.corruption_check.every, config.checkpoint.every
    if not every:
        return
    if save and every > save:  # with two kept checkpoints, one is then older than the last good check
        yield Problem(
            ("corruption_check.every", "checkpoint.every"),
            f"must be at most checkpoint.every={save}, so that a checkpoint from before the last good check is kept, got {every}",
        )
    if config.policy.loss is not None:
        yield Problem(("corruption_check.every", "policy.loss"), "policy updates are not checked; set corruption_check.every=0")
    if config.runtime.platform == "rocm":
        yield Problem(
            ("corruption_check.every", "runtime.platform"),
            "needs bitwise repeatable steps, which runtime.platform=rocm does not have; set corruption_check.every=0",
        )
