"""Seconds of computation on one device: those that arithmetic takes, and those of passes over device memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Seconds of computation on one device."""

    compute_s: float = 0.0
    """Matmuls and attention."""
    memory_s: float = 0.0
    """Passes over device memory by other kernels."""

    @property
    def seconds(self) -> float:
        """Their sum."""
        return self.compute_s + self.memory_s

    def __add__(self, other: Work) -> Work:
        """Add each part."""
        return Work(self.compute_s + other.compute_s, self.memory_s + other.memory_s)

    def __mul__(self, times: float) -> Work:
        """Multiply each part."""
        return Work(self.compute_s * times, self.memory_s * times)
