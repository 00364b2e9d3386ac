"""Metrics of the training loop: step times over a log window, device memory, evaluation results (names: rundir.metrics)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping

from ridgeline.rundir.noise import percentile


class StepTimer:
    """Times steps over a log window. The caller marks the end of each step; time inside `paused()` belongs to no step.

    Marks are taken on the host. A loop that dispatches asynchronously marks a step when it has read the metrics of an earlier step: the
    intervals are those of the device, shifted by a step.

    Args:
      tokens_per_step: batch positions of one step over all devices.
      num_devices: devices in the mesh.
      flops_per_token: training FLOPs per token (planner.flops), or None.
      peak_flops: datasheet FLOP/s of one device for the matmul dtype (planner.hardware), or None when unknown.
      float8_peak_flops: the same for float8, when matmuls of the layers read float8; else None.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        num_devices: int,
        flops_per_token: float | None,
        peak_flops: float | None,
        float8_peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens_per_step, self._num_devices = tokens_per_step, num_devices
        self._flops_per_token, self._peaks = flops_per_token, {"mfu": peak_flops, "mfu_float8": float8_peak_flops}
        self._clock = clock
        self._mark_s = clock()
        self._paused_s = 0.0
        self._pause_depth = 0
        self._steps_s: list[float] = []
        self._usual_step_s: float | None = None
        self._data_wait_s = 0.0

    def usual_step_s(self) -> float | None:
        """Return the median step time of the newest window with steps in it; None before the first step."""
        return percentile(sorted(self._steps_s), 0.5) if self._steps_s else self._usual_step_s

    def start(self) -> None:
        """Begin the next step now and discard the time before (compilation, restore)."""
        self.begin_step()
        self._steps_s.clear()
        self._data_wait_s = 0.0

    def begin_step(self) -> None:
        """Restart the current step: the time since the last mark belongs to no step. The window continues."""
        self._mark_s = self._clock()
        self._paused_s = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a block from the step times (evaluation, saving, capture). May nest."""
        start_s = self._clock()
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            if not self._pause_depth:
                self._paused_s += self._clock() - start_s

    def waited(self, duration_s: float) -> None:
        """Add time spent waiting for data in the current step."""
        self._data_wait_s += duration_s

    def step(self) -> float:
        """Mark the end of a step and return its time in seconds."""
        assert not self._pause_depth, "a step cannot end inside a pause"
        now_s = self._clock()
        duration_s = now_s - self._mark_s - self._paused_s
        self._mark_s, self._paused_s = now_s, 0.0
        self._steps_s.append(duration_s)
        return duration_s

    @property
    def window_data_wait_s(self) -> float:
        """Time spent waiting for data since the last report."""
        return self._data_wait_s

    @property
    def window_steps(self) -> int:
        """Steps marked since the last report."""
        return len(self._steps_s)

    def report(self) -> dict[str, float]:
        """Return the speed metrics of the window and begin a new one. Empty when no step ended in it."""
        steps_s, wait_s = sorted(self._steps_s), self._data_wait_s
        self._usual_step_s = self.usual_step_s()
        self._steps_s, self._data_wait_s = [], 0.0
        total_s = math.fsum(steps_s)
        if not steps_s or total_s <= 0:
            return {}
        tokens_per_s = self._tokens_per_step * len(steps_s) / total_s
        values = {
            "train_speed/tokens_per_s": tokens_per_s,
            "train_speed/tokens_per_s_per_device": tokens_per_s / self._num_devices,
            "train_speed/step_time_mean_s": total_s / len(steps_s),
            "train_speed/step_time_p50_s": percentile(steps_s, 0.50),
            "train_speed/step_time_p95_s": percentile(steps_s, 0.95),
            "train_speed/step_time_max_s": steps_s[-1],
            "train_speed/data_wait_s": wait_s / len(steps_s),
            "train_speed/data_wait_fraction": wait_s / total_s,
        }
        if self._flops_per_token is not None:
            flop_per_s = self._flops_per_token * tokens_per_s / self._num_devices
            values["train_speed/tflop_per_s_per_device"] = flop_per_s / 1e12
            values |= {f"train_speed/{name}": flop_per_s / peak for name, peak in self._peaks.items() if peak is not None}
        return values


def memory_metrics(stats: list[Mapping[str, int] | None]) -> dict[str, float]:
    """Return the memory metrics from `device.memory_stats()` of the local devices; empty where the backend reports none (CPU)."""
    known = [s for s in stats if s]
    values: dict[str, float] = {}
    if known and all("peak_bytes_in_use" in s for s in known):
        values["train_memory/peak_bytes"] = float(max(s["peak_bytes_in_use"] for s in known))
    if known and all("bytes_limit" in s for s in known):
        values["train_memory/limit_bytes"] = float(min(s["bytes_limit"] for s in known))
    return values


def evaluation_metrics(
    name: str, *, nats: float, tokens: float, correct: float | None = None, text_bytes: float | None = None, duration_s: float | None = None
) -> dict[str, float]:
    """Return the metrics of one evaluation set.

    Args:
      name: the set's name.
      nats: summed cross-entropy of the target tokens.
      tokens: number of target tokens (sum of weights), positive.
      correct: number of target tokens that the model predicted.
      text_bytes: bytes of text of the target tokens; None: no bits per byte.
      duration_s: time of the evaluation.
    """
    assert tokens > 0, f"evaluation set '{name}' has no target tokens"
    loss = nats / tokens
    values = {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens}
    if text_bytes is not None:
        values["bits_per_byte"] = nats / math.log(2) / text_bytes
    if correct is not None:
        values["accuracy"] = correct / tokens
    if duration_s is not None:
        values["duration_s"] = duration_s
    return {f"eval/{name}/{key}": value for key, value in values.items()}


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
