"""What is measured: the one table of metric names, the step timer and the evaluation metrics. No JAX here.

Conventions. Loss is in nats per target token. Tokens are the positions of the batch (rows x seq_len), padding included, because
they cost the same. MFU = model FLOPs / (step time x datasheet peak of the matmul dtype). Model FLOPs are those of `planner.flops`
(causal attention counted as half, no recomputation); the peak is the dense one of `planner.hardware` for precision.compute, also where the
layers read float8: `mfu` then compares with that of a run in bfloat16 and may pass 1, and `mfu_float8` has the float8 peak below the line.
On a device without a datasheet figure MFU does not exist: it is absent, never a guess. TensorBoard opens the first two groups in
alphabetical order, hence the names: `eval` and `train` are what one looks at first.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from perf.goodput import CATEGORIES
from perf.startup import PARTS as STARTUP_PARTS


class Metric(NamedTuple):
    """One row of the table."""

    unit: str
    description: str


METRICS: dict[str, Metric] = {
    "train/loss": Metric("nats/token", "Mean cross-entropy over the target tokens of the step, without z-loss."),
    "train/z_loss": Metric("nats/token", "Weighted z-loss term added to the objective (only when loss.z_loss > 0)."),
    "train/accuracy": Metric("fraction", "Target tokens that were the model's first choice."),
    "train/grad_norm": Metric("1", "Global L2 norm of the gradient before clipping."),
    "train/param_norm": Metric("1", "Global L2 norm of the parameters."),
    "train/learning_rate": Metric("1", "Learning rate used in the step."),
    "train/tokens": Metric("tokens", "Tokens (batch positions) of all steps of the run so far."),
    "train/target_tokens": Metric("tokens", "Target tokens (sum of weights) in the step."),
    "train/skipped_steps": Metric("steps", "Steps of the run whose update was skipped because loss or gradient was not finite."),
    "train_speed/tokens_per_s": Metric("tokens/s", "Tokens per second of step time, over all devices."),
    "train_speed/tokens_per_s_per_device": Metric("tokens/s", "Tokens per second of step time and device."),
    "train_speed/step_time_mean_s": Metric(
        "s", "Mean step time over the log window. Evaluations, saves and the start and end of captures are not step time."
    ),
    "train_speed/step_time_p50_s": Metric("s", "Median step time of the log window."),
    "train_speed/step_time_p95_s": Metric("s", "95th percentile of the step times of the log window."),
    "train_speed/step_time_max_s": Metric("s", "Longest step time of the log window."),
    "train_speed/data_wait_s": Metric("s", "Mean time per step spent waiting for the next batch (a part of the step time)."),
    "train_speed/data_wait_fraction": Metric("fraction", "Share of the step time spent waiting for the next batch."),
    "train_speed/tflop_per_s_per_device": Metric(
        "TFLOP/s", "Model FLOPs (causal attention counted as half, no recomputation) per second and device, in 1e12."
    ),
    "train_speed/mfu": Metric(
        "fraction", "Model FLOP/s over the datasheet's dense peak of the matmul dtype; absent on a device without one."
    ),
    "train_speed/mfu_float8": Metric(
        "fraction", "The same over the dense float8 peak; only where precision.matmul is narrower than 16 bits."
    ),
    "train_memory/peak_bytes": Metric(
        "bytes", "Peak device memory in use since the start, the largest over this process's devices; absent where not reported."
    ),
    "train_memory/limit_bytes": Metric("bytes", "Device memory the allocator may use; absent where the backend does not report it."),
    "train_device/clock_mhz": Metric("MHz", "Lowest clock of this process's devices at the log line before (CPU: mean of its cores)."),
    "train_device/power_w": Metric("W", "Power of this process's GPUs at the log line before."),
    "train_device/temperature_c": Metric("C", "Highest temperature of this process's GPUs at the log line before."),
    "train_device/stopped_share": Metric(
        "fraction", "Share of the time for which the control group had used up its CPU time. What a device does not offer is absent."
    ),
    "train_step_ledger/total_s": Metric("s", "A profiled step, mean over devices. The next parts but the overlapped one sum to it."),
    "train_step_ledger/compute_s": Metric("s", "Time of a profiled step in which the device computed."),
    "train_step_ledger/exposed_communication_s": Metric("s", "Time in which it communicated and did not compute."),
    "train_step_ledger/overlapped_communication_s": Metric("s", "Time in which it communicated and computed (a part of compute_s)."),
    "train_step_ledger/exposed_copy_s": Metric("s", "Time in which it only copied memory."),
    "train_step_ledger/idle_s": Metric("s", "Time in which it did nothing."),
    "train_goodput/goodput": Metric("fraction", "Productive share of the run's wall time so far, over all starts, queue included."),
    "train_goodput/goodput_now": Metric("fraction", "Productive share of the time since the record before."),
    "train_goodput/wall_s": Metric("s", "Wall time of the run so far; the categories sum to it."),
    **{f"train_goodput/{name}_s": Metric("s", f"So far: {meaning[0].lower()}{meaning[1:]}") for name, meaning in CATEGORIES.items()},
    "train_goodput/usd": Metric("USD", "Money so far: wall time of all devices at the price of the cluster the run was submitted to."),
    **{f"train_startup/{name}_s": Metric("s", f"Of this start: {text}") for name, text in STARTUP_PARTS.items()},
    "train_startup/total_s": Metric("s", "From the start of the process to the end of the first step; the parts sum to it. Written once."),
    "train_save/blocking_s": Metric("s", "Time a save held up the training loop."),
    "train_save/failures": Metric("saves", "Saves that failed so far."),
    "eval/<set>/loss": Metric("nats/token", "Mean cross-entropy over the target tokens of the set."),
    "eval/<set>/perplexity": Metric("1", "exp(loss)."),
    "eval/<set>/bits_per_byte": Metric("bits/byte", "Total cross-entropy in bits over the bytes of text the target tokens stand for."),
    "eval/<set>/accuracy": Metric("fraction", "Target tokens of the set that were the model's first choice."),
    "eval/<set>/tokens": Metric("tokens", "Target tokens evaluated."),
    "eval/<set>/duration_s": Metric("s", "Time the evaluation of the set took."),
}
"""Every name a run may write, with its unit and meaning. docs/METRICS.md is generated from it; writers refuse any other name."""

_SET_NAME = re.compile(r"^eval/[^/]+/")


def metric(name: str) -> Metric:
    """Look up a metric name; `eval/<anything>/x` is `eval/<set>/x`. An unknown name is a bug in the caller."""
    row = METRICS.get(name) or METRICS.get(_SET_NAME.sub("eval/<set>/", name))
    assert row is not None, f"metric '{name}' is not in perf.metrics.METRICS"
    return row


def metrics_table() -> str:
    """Render the table as the Markdown of docs/METRICS.md."""
    assert __doc__ is not None
    rows = [f"| `{name}` | {row.unit} | {row.description} |" for name, row in METRICS.items()]
    conventions = " ".join(__doc__.split("Conventions. ")[1].split())
    head = "Generated from `perf/metrics.py`: `python -m perf.metrics > docs/METRICS.md`."
    return "\n".join(["# Metrics", "", head, "", conventions, "", "| name | unit | meaning |", "|---|---|---|", *rows, ""])


class StepTimer:
    """Times steps over a log window. The caller marks the end of each step; time inside `paused()` belongs to no step.

    Marks are taken on the host. A loop that dispatches asynchronously marks a step when it has read the metrics of an earlier one: single
    intervals are then those of the device, shifted.

    Args:
      tokens_per_step: batch positions of one step over all devices.
      num_devices: devices in the mesh.
      flops_per_token: training FLOPs per token (planner.flops), or None.
      peak_flops: datasheet FLOP/s of one device for the matmul dtype (planner.hardware), or None when unknown.
      float8_peak_flops: the same for float8, where the layers' products read it; else None.
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
        """Begin the next step now, forgetting what came before (compilation, restore)."""
        self.begin_step()
        self._steps_s.clear()
        self._data_wait_s = 0.0

    def begin_step(self) -> None:
        """Begin the step under way anew: what came since the last mark belongs to no step. The window goes on."""
        self._mark_s = self._clock()
        self._paused_s = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the time of a block out of the step times (evaluation, saving, capture). May nest."""
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


def percentile(ordered: list[float], share: float) -> float:
    """Linear-interpolated percentile of an ascending, non-empty list; `share` in [0, 1] (numpy's default method)."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


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
      tokens: their number (sum of weights), positive.
      correct: how many were the model's first choice.
      text_bytes: bytes of text they stand for; without it there are no bits per byte.
      duration_s: time it took.
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
    """Return exp(loss), infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


if __name__ == "__main__":
    print(metrics_table(), end="")
