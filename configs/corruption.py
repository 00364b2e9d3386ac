"""Rules of the section corruption_check."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.configs.problem import Problem
from ridgeline.configs.schema import Config


def corruption_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with checks for silent data corruption."""
    if not config.corruption_check.every:
        return
    if config.policy.loss is not None:
        yield Problem(("corruption_check.every", "policy.loss"), "policy updates are not checked; set corruption_check.every=0")
    if config.runtime.platform == "rocm":
        yield Problem(
            ("corruption_check.every", "runtime.platform"),
            "needs bitwise repeatable steps, which runtime.platform=rocm does not have; set corruption_check.every=0",
        )
