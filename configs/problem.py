"""A broken rule between settings, and the numbers that its message offers instead."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule. `keys`: the settings involved, most specific first; `message`: what is wrong and what is valid."""

    keys: tuple[str, ...]
    message: str

    @property
    def is_predicate(self) -> bool:
        """Whether the message is about the first key without naming it: "must be at most 2", "does not support adapters"."""
        return self.message.split(" ", 1)[0] in ("must", "does", "needs", "is", "has", "leaves", "there")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_text(value: int, allowed: list[int]) -> str:
    """Return the allowed numbers just below and above a value, as text."""
    below = [n for n in allowed if n < value][-1:]
    above = [n for n in allowed if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))


def multiples(value: int, of: int) -> str:
    """Return the multiples of `of` around a value, as text."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)
