"""The table of metric names with units and meanings.

Conventions. Loss is in nats per target token. Tokens are the positions of the batch (rows x seq_len), padding included, because
they take the same compute. The speed of a run, in its summary, reports, studies and tables, is the tokens of the logged steps over their
step time, without the first log window of each start (`rundir.speed`); `train_speed/tokens_per_s` is that of one window. MFU = model
FLOPs / (step time x datasheet peak of the matmul dtype). Model FLOPs are those of `planner.flops` (causal attention counted as half, no
recomputation); the peak is the dense one of `planner.hardware` for precision.compute, also when matmuls read float8: `mfu` then compares
with a run in bfloat16 and may exceed 1, and the denominator of `mfu_float8` is the float8 peak.
MFU is absent on a device without a datasheet peak. TensorBoard opens the first two groups in alphabetical order: `eval` and `train`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.configs import plugins
from ridgeline.rundir.goodput import CATEGORIES
from ridgeline.rundir.startup import PARTS as STARTUP_PARTS


class Metric(NamedTuple):
    """One row of the table."""

    unit: str
    description: str


@dataclass(frozen=True)
class DerivedMetric:
    """A metric of an installed package (entry point group `ridgeline.metrics`), computed from the others of a log line."""

    unit: str
    description: str
    value: Callable[[Mapping[str, float]], float | None]
    """Metrics of a step -> the value; None: absent in this step."""


METRICS: dict[str, Metric] = {
    "train/loss": Metric(
        "nats/token",
        "Mean cross-entropy over the target tokens of the step, without z-loss. With preference.loss: mean loss of its pairs; with "
        "distillation.weight: (1 - weight) x cross-entropy + weight x temperature^2 x divergence.",
    ),
    "train/z_loss": Metric("nats/token", "Weighted z-loss term added to the objective (only when loss.z_loss > 0)."),
    "train/mtp_loss": Metric(
        "nats/token",
        "Mean cross-entropy of the modules of multi-token prediction over their target tokens, not part of train/loss (only with "
        "model.mtp_layers).",
    ),
    "train/mtp_accuracy": Metric("fraction", "Target tokens that these modules predicted (largest logit)."),
    "train/accuracy": Metric("fraction", "Target tokens that the model predicted (largest logit); absent with preference.loss."),
    "train/grad_norm": Metric("1", "Global L2 norm of the gradient before clipping."),
    "train/param_norm": Metric("1", "Global L2 norm of the parameters."),
    "train/learning_rate": Metric("1", "Learning rate used in the step."),
    "train/tokens": Metric("tokens", "Tokens (batch positions) of all steps of the run so far."),
    "train/target_tokens": Metric("tokens", "Target tokens (sum of weights) in the step."),
    "train/skipped_steps": Metric(
        "steps", "Steps of the run whose update was skipped because loss or gradient was not finite, or the norm above optimizer.skip_norm."
    ),
    "train/loss_spikes": Metric("spikes", "Loss spikes of the run so far (`rundir.loss_spikes`)."),
    "train_router/balance_loss": Metric(
        "1",
        "Load-balancing loss without its weight: 1 at perfect balance, mean over rows and layers. This group: only with model.moe.",
    ),
    "train_router/z_loss": Metric("1", "Router z-loss without its weight: log(Z)^2 of the router's logits, mean over tokens and layers."),
    "train_router/entropy": Metric("nats", "Entropy of the router's scores, mean over tokens and layers."),
    "train_router/load_max": Metric("1", "Load of the busiest expert over the mean load of its layer, the largest over layers."),
    "train_router/load_mean": Metric("1", "Load of the busiest expert over the mean load of its layer, mean over layers."),
    "train_router/dropped": Metric("fraction", "Assignments of tokens to experts that were dropped (compute.experts.capacity_factor)."),
    "train_preference/accuracy": Metric(
        "fraction",
        "Pairs whose chosen answer has the larger reward. This group: only with preference.loss, means over the step's pairs.",
    ),
    "train_preference/margin": Metric("1", "Reward of the chosen answer minus that of the rejected one."),
    "train_preference/chosen_reward": Metric("1", "preference.beta x (log-probability of the chosen answer minus that by the reference)."),
    "train_preference/rejected_reward": Metric("1", "The same of the rejected answer."),
    "train_preference/chosen_log_prob": Metric("nats", "Log-probability of the chosen answer: sum over its target tokens."),
    "train_preference/rejected_log_prob": Metric("nats", "The same of the rejected answer."),
    "train_distillation/divergence": Metric(
        "nats/token",
        "Divergence of the model from the teacher, KL(teacher || student), at distillation.temperature. This group: only with "
        "distillation.weight.",
    ),
    "train_distillation/cross_entropy": Metric("nats/token", "Mean cross-entropy over the target tokens of the step."),
    "train_policy/kl": Metric(
        "nats",
        "Divergence from the model before training; 0 without policy.kl. This group: only with policy.loss, means over completion tokens.",
    ),
    "train_policy/clipped_low": Metric("fraction", "Tokens of negative advantage whose probability ratio is below 1 - policy.clip_low."),
    "train_policy/clipped_high": Metric("fraction", "Tokens of positive advantage whose probability ratio is above 1 + policy.clip_high."),
    "train_policy/ratio": Metric("1", "Probability of a token over that by the model that sampled it."),
    "train_policy/reward": Metric("1", "Mean reward of the rollouts of the update."),
    "train_policy/reward_std": Metric("1", "Standard deviation of these rewards."),
    "train_policy/completion_tokens": Metric("tokens", "Mean length of the completions of the update."),
    "train_speed/tokens_per_s": Metric("tokens/s", "Tokens per second of step time in the log window, over all devices."),
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
    "train_device/clock_mhz": Metric("MHz", "Lowest clock of this process's devices at the previous log line (CPU: mean of its cores)."),
    "train_device/power_w": Metric("W", "Power of this process's GPUs at the previous log line."),
    "train_device/temperature_c": Metric("C", "Highest temperature of this process's GPUs at the previous log line."),
    "train_device/stopped_share": Metric(
        "fraction",
        "Share of the time in which the control group was throttled (CPU quota used up); absent where not reported.",
    ),
    "train_step_ledger/total_s": Metric(
        "s", "Time of a profiled step, mean over devices. The parts below sum to it, without the overlapped one."
    ),
    "train_step_ledger/compute_s": Metric("s", "Time of a profiled step in which the device computed."),
    "train_step_ledger/exposed_communication_s": Metric("s", "Time in which the device communicated and did not compute."),
    "train_step_ledger/overlapped_communication_s": Metric(
        "s", "Time in which the device communicated and computed (a part of compute_s)."
    ),
    "train_step_ledger/exposed_copy_s": Metric("s", "Time in which the device only copied memory."),
    "train_step_ledger/idle_s": Metric("s", "Time in which the device was idle."),
    "train_goodput/goodput": Metric("fraction", "Productive share of the run's wall time so far, over all starts, queue included."),
    "train_goodput/goodput_now": Metric("fraction", "Productive share of the time since the previous record."),
    "train_goodput/wall_s": Metric("s", "Wall time of the run so far; the categories sum to it."),
    **{f"train_goodput/{name}_s": Metric("s", f"So far: {meaning[0].lower()}{meaning[1:]}") for name, meaning in CATEGORIES.items()},
    "train_goodput/usd": Metric("USD", "Cost so far: wall time of all devices at the price of the cluster the run was submitted to."),
    **{f"train_startup/{name}_s": Metric("s", f"Of this start: {text}") for name, text in STARTUP_PARTS.items()},
    "train_startup/total_s": Metric("s", "From the start of the process to the end of the first step; the parts sum to it. Written once."),
    "train_straggler/excess": Metric(
        "fraction", "Own compute time of the slowest rank beyond the median of the others, median of the newest steps; 0: none is slower."
    ),
    "train_straggler/wait_s": Metric("s", "Time per step that the others wait for the slowest rank, estimated from that."),
    "train_save/blocking_s": Metric("s", "Time the training loop waited for a save."),
    "train_save/failures": Metric("saves", "Saves that failed so far."),
    "eval/<set>/loss": Metric("nats/token", "Mean cross-entropy over the target tokens of the set; of preference pairs, their mean loss."),
    "eval/<set>/reward_accuracy": Metric("fraction", "Preference pairs of the set whose chosen answer has the larger reward."),
    "eval/<set>/reward_margin": Metric("1", "Reward of the chosen answer minus that of the rejected one, mean over the pairs of the set."),
    "eval/<set>/pairs": Metric("pairs", "Preference pairs evaluated."),
    "eval/<set>/perplexity": Metric("1", "exp(loss)."),
    "eval/<set>/bits_per_byte": Metric("bits/byte", "Total cross-entropy in bits over the bytes of text of the target tokens."),
    "eval/<set>/accuracy": Metric("fraction", "Target tokens of the set that the model predicted (largest logit)."),
    "eval/<set>/tokens": Metric("tokens", "Target tokens evaluated."),
    "eval/<set>/duration_s": Metric("s", "Time the evaluation of the set took."),
    "task/<task>/<metric>": Metric("-", "Metric of a task of lm-evaluation-harness; behind its name the filter, where the task has one."),
    "task/<task>/<metric>_stderr": Metric("-", "Standard error of that metric, where the harness has one."),
    "samples/tokens": Metric("tokens", "Mean number of new tokens of the samples (evaluation.samples)."),
    "samples/ended": Metric("fraction", "Samples that ended with an end-of-sequence token."),
    "samples/duration_s": Metric("s", "Time the samples took."),
}
"""All metric names with unit and meaning. docs/METRICS.md is generated from it; writers reject other names."""

_SET_NAME = re.compile(r"^eval/[^/]+/")
_TASK_NAME = re.compile(r"^task/[^/]+/.+?(?P<error>_stderr)?$")


def derived_metric(name: str) -> DerivedMetric:
    """Return the metric of an installed package. Raises UserError as `plugins.load`."""
    return plugins.load("metrics", name, DerivedMetric, METRICS)


def metric(name: str) -> Metric:
    """Return the row of a metric name; `eval/<any set>/x` is `eval/<set>/x`, and so for tasks. An unknown name is a bug in the caller."""
    row = METRICS.get(name) or METRICS.get(_SET_NAME.sub("eval/<set>/", name))
    if task := _TASK_NAME.match(name):
        row = METRICS[f"task/<task>/<metric>{task['error'] or ''}"]
    if row is None and name in plugins.names("metrics"):
        derived = derived_metric(name)
        return Metric(derived.unit, derived.description)
    assert row is not None, f"metric '{name}' is not in rundir.metrics.METRICS"
    return row


def metrics_table() -> str:
    """Render the table as the Markdown of docs/METRICS.md."""
    assert __doc__ is not None
    rows = [f"| `{name}` | {row.unit} | {row.description} |" for name, row in METRICS.items()]
    conventions = " ".join(__doc__.split("Conventions. ")[1].split())
    head = "Generated from `rundir/metrics.py`: `python -m ridgeline.rundir.metrics > docs/METRICS.md`."
    return "\n".join(["# Metrics", "", head, "", conventions, "", "| name | unit | meaning |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(metrics_table(), end="")
