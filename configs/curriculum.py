"""The mixture of data.train over the steps: rules of data.curriculum, and the weights of each range of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ridgeline.configs.problem import Problem

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config, DataConfig

MAX_RATIO = 1e9
"""Largest weight of a corpus over the smallest one that is not 0."""
MAX_PARTS = 1000
"""Most ranges of steps of a linear change."""


def phases(data: DataConfig) -> list[tuple[int, list[float]]]:
    """Return (first step, weight of each corpus) of each range of steps with the same weights, from step 0 on.

    A linear change from step a to b gives step s the shares of a plus (s - a) / (b - a) of the difference to those of b, in MAX_PARTS equal
    ranges of steps if there are more steps.
    """
    start, weights = 0, [source.weight for source in data.train]
    found = [(start, weights)]
    for entry in data.curriculum:
        if entry.linear:
            steps, ends = entry.step - start, (_shares(weights), _shares(entry.weights))
            parts = min(steps, MAX_PARTS)
            for step in (steps * number // parts for number in range(1, parts)):
                found.append((start + step, [a + (b - a) * step / steps for a, b in zip(*ends, strict=True)]))
        start, weights = entry.step, entry.weights
        found = [*(found if start else []), (start, weights)]
    return found


def _shares(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def curriculum_rules(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with data.curriculum, and with the weights of data.train."""
    data, steps, before = config.data, config.trainer.steps, -1
    if (problem := _too_uneven([source.weight for source in data.train])) is not None:
        yield Problem(("data.train",), problem)
    for index, entry in enumerate(data.curriculum):
        key = f"data.curriculum.{index}"
        if entry.step <= before:
            yield Problem((f"{key}.step",), f"must be more than that of the entry before ({before}), got {entry.step}")
        if entry.step >= steps + entry.linear:
            limit = f"at most trainer.steps={steps}" if entry.linear else f"less than trainer.steps={steps}"
            yield Problem((f"{key}.step", "trainer.steps"), f"must be {limit}, got {entry.step}")
        if entry.linear and entry.step == 0:
            yield Problem((f"{key}.linear", f"{key}.step"), "there are no steps before step 0; set linear to false, or a later step")
        if len(entry.weights) != len(data.train):
            wanted = f"data.train has {len(data.train)} corpora, data.curriculum.{index}.weights has {len(entry.weights)} weights"
            yield Problem((f"{key}.weights", "data.train"), f"must have one weight per corpus: {wanted}")
        elif not any(entry.weights):
            yield Problem((f"{key}.weights",), "are all 0; at least one must be positive")
        elif (problem := _too_uneven(entry.weights)) is not None:
            yield Problem((f"{key}.weights",), problem)
        before = entry.step


def _too_uneven(weights: list[float]) -> str | None:
    drawn = [weight for weight in weights if weight]
    if not drawn or max(drawn) <= MAX_RATIO * min(drawn):
        return None
    return f"may differ by a factor of {MAX_RATIO:g}, got {min(drawn):g} and {max(drawn):g}"
