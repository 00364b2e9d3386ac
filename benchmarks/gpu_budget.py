"""Time budget of `benchmarks/gpu.py`: the order of its parts, their expected durations, and which parts to skip.

A part is one side of a row: ours, PyTorch with float32 parameters (as ours), bfloat16 parameters or float8 matmuls, or MaxText. Expected
durations are predictions; as parts finish, the expectations for the other parts of the same side are corrected by the measured durations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_rows import LEAST_STEPS, MEASURED_S, WARMUP_STEPS, Row

OURS, TORCH, TORCH_BF16, TORCH_FP8, MAXTEXT = "ours", "PyTorch autocast", "PyTorch bf16", "PyTorch fp8", "MaxText"
PEERS = (TORCH, TORCH_FP8, MAXTEXT, TORCH_BF16)
START_S = 11.0
"""Import, device initialization, state: 5 to 7 s for the state of 1B to 5B parameters on an H200 machine with 16 cores, as the next two."""
COMPILE_S, COMPILE_UNROLLED_S = 15.0, 30.0
"""5 to 15 s, autotuning included. Unrolled layers are compiled one by one: 15 s for 8, 12 in a loop."""
CAPTURE_S = 6.0
"""Two profiled steps and the analysis of their trace."""
TORCH_START_S, TORCH_COMPILE_LAYER_S, TORCH_COMPILE_S = 12.0, 1.0, 18.0
"""torch.compile traces and compiles every layer of a model: 36 s for 18 layers on the same machine."""
TORCH_FP8_COMPILES = 2.7
"""Compilation with float8 matmuls over that without: 97 s."""
TORCH_STEPS_S = 9.0
MAXTEXT_START_S, MAXTEXT_COMPILE_S, MAXTEXT_STEPS_S = 30.0, 40.0, 7.0
"""It imports twice as much as we do and, like us, compiles one layer once."""
MARGIN_S = 5.0
"""Reserved for the table and the files."""


@dataclass(frozen=True)
class Part:
    """One side of a row."""

    row: Row
    side: str

    @property
    def name(self) -> str:
        """Name for output."""
        return f"{self.row.name}, {self.side}"


def in_order(rows: Sequence[Row], *, peers: Sequence[str], explicit: bool) -> list[Part]:
    """Return the parts, the most important first.

    Our leading rows, PyTorch's, our rows with a target, MaxText's leading ones, the other peers, our other rows, other forms of PyTorch's.
    peers: the sides beside ours that can be measured. Rows that were named (`explicit`) are done one after another, each with its peers.
    """
    parts = [Part(row, side) for row in rows for side in (OURS, *peers) if side == OURS or (row.peer and (side == TORCH_FP8) == row.fp8)]
    return parts if explicit else sorted(parts, key=_rank)


def _rank(part: Part) -> int:
    row, side = part.row, part.side
    if side == OURS:
        return 0 if row.leading else 2 if row.over is None else 5
    if row.leading:
        return {TORCH: 1, TORCH_FP8: 1, MAXTEXT: 3, TORCH_BF16: 6}[side]
    return {TORCH: 4, TORCH_FP8: 4, MAXTEXT: 4, TORCH_BF16: 7}[side]


def expected_s(part: Part, *, layers: int, step_s: float, profile: bool, tiny: bool = False) -> float:
    """Return the expected seconds of a part. `step_s`: predicted step time of our side."""
    if tiny:
        return 1.0
    if part.side == MAXTEXT:
        return MAXTEXT_START_S + MAXTEXT_COMPILE_S + MAXTEXT_STEPS_S + 4 * step_s
    if part.side != OURS:
        compile_s = (TORCH_COMPILE_S + TORCH_COMPILE_LAYER_S * layers) * (TORCH_FP8_COMPILES if part.side == TORCH_FP8 else 1.0)
        return TORCH_START_S + compile_s + TORCH_STEPS_S + 4 * step_s
    compile_s = COMPILE_UNROLLED_S if "compute.scan_layers=false" in part.row.overrides else COMPILE_S
    steps_s = WARMUP_STEPS * step_s + max(MEASURED_S, LEAST_STEPS * step_s)
    return START_S + compile_s + steps_s + (CAPTURE_S if profile else 0.0)


@dataclass
class Budget:
    """The time limit, and the time used by the parts."""

    limit_s: float
    clock: Callable[[], float]
    begun: float = field(init=False)
    took: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Side -> expected and measured seconds of its finished parts."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(part, why)."""

    def __post_init__(self) -> None:
        """Start the clock."""
        self.begun = self.clock()

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.begun

    @property
    def left_s(self) -> float:
        """Seconds left for further parts."""
        return self.limit_s - MARGIN_S - self.spent_s

    def corrected_s(self, side: str, seconds: float) -> float:
        """Return the expected seconds, corrected by the finished parts of the same side."""
        expected, taken = self.took.get(side, (0.0, 0.0))
        return seconds * taken / expected if expected else seconds

    def refusal(self, side: str, seconds: float) -> str | None:
        """Return why a part with these expected seconds is skipped; None if it fits."""
        needed = self.corrected_s(side, seconds)
        return (
            None if needed <= self.left_s else f"needs about {needed:.0f} s, {max(0.0, self.left_s):.0f} s are left of {self.limit_s:.0f}"
        )

    def leave_out(self, part: str, why: str) -> None:
        """Record a skipped part."""
        self.left_out.append((part, why))

    def finished(self, side: str, expected: float, taken: float) -> None:
        """Record the measured seconds of a part."""
        before = self.took.get(side, (0.0, 0.0))
        self.took[side] = before[0] + expected, before[1] + taken
