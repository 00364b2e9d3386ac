"""Pipeline schedules: the time of a step, and the fraction in which stages are idle (the bubble).

With p stages, m microbatches and t = forward + backward of one microbatch on one stage, all stages alike:
    GPipe and 1F1B        seconds = (m + p - 1) * t,      bubble (p - 1) / (m + p - 1) OF THE TOTAL
    interleaved 1F1B      seconds = (m + (p - 1) / v) * t, bubble (p - 1) / (v*m + p - 1), v chunks of layers per stage
Some texts define the bubble as a fraction of the ideal time: (p - 1) / (v*m). Both are returned, under different names.
Sources: GPipe (arXiv 1811.06965, section 2.3); Narayanan et al., arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.calculators.checks import count, not_negative, positive


@dataclass(frozen=True)
class PipelineEstimate:
    """One step of a pipeline."""

    seconds: float
    """Time of the step."""
    ideal_s: float
    """Time without the bubble: m * (forward + backward)."""
    bubble_fraction: float
    """The bubble as a fraction of the total time."""
    bubble_over_ideal: float
    """The bubble as a fraction of the ideal time."""
    efficiency: float
    """Ideal over total time: 1 - bubble_fraction."""
    microbatches_in_flight: int
    """Microbatches whose activations the first stage keeps at once: p with 1F1B (interleaved: p + (p-1)/v in chunks), m with GPipe."""


def pipeline_estimate(
    *, stages: float, microbatches: float, forward_s: float, backward_s: float, interleave: float = 1, schedule: str = "1f1b"
) -> PipelineEstimate:
    """Estimate one step. `forward_s` and `backward_s` are of one microbatch on one stage (all of its chunks).

    Raises UserError for counts below 1 or times that are not positive.
    """
    p, m, v = count("stages", stages), count("microbatches", microbatches), count("interleave", interleave)
    each = positive("forward-s", forward_s) + not_negative("backward-s", backward_s)
    assert schedule in ("1f1b", "gpipe"), schedule
    ideal = m * each
    bubble = (p - 1) / v * each
    in_flight = m if schedule == "gpipe" else min(m, p)
    return PipelineEstimate(ideal + bubble, ideal, bubble / (ideal + bubble), bubble / ideal, ideal / (ideal + bubble), in_flight)
