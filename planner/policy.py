"""Decisions of real jobs that `ridge simulate` takes too. Each has one implementation: the trainer, the job script, the diagnosis and the
simulation of a campaign use this file.
"""

from __future__ import annotations

import math
from typing import Any

from ridgeline.configs.schema import CheckpointConfig

LEAST_INTERVAL_S = 600.0
"""Shortest save interval: with a failure every few hours, more frequent saves save little and load the file system."""
USUAL_STEPS = 20
"""A step counts as hanging after this many times the usual step time."""
QUICK_S = 600
"""A start that fails within this time is followed by a pause before the next one."""
PAUSE_S = 10
"""Pause after the first failure, three times as long after each further one in a row. The pending job holds no node."""
MAX_FAILURES = 5
"""Consecutive failed starts without a new checkpoint after which a job is not requeued."""
STRAGGLER_SHARE = 0.10
"""Own time of the slowest device beyond the median one, over the step, from which it is reported as a straggler."""


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the interval between saves that block training for `save_s` (Young, CACM 17(9), 1974); infinite without failures."""
    return math.sqrt(2 * save_s * mtbf_s)


def save_interval_s(save_s: float, mtbf_s: float, write_s: float) -> float:
    """Return the save interval of a plan: Young's, but at least the time of a write and LEAST_INTERVAL_S."""
    return max(young_interval_s(save_s, mtbf_s), write_s, LEAST_INTERVAL_S)


def configured_interval_s(checkpoint: CheckpointConfig, step_s: float) -> float:
    """Return the mean time between the saves of a config whose steps take `step_s`; infinite where it saves only at the end.

    As trainer.checkpoint.retention.Cadence decides: a save by steps restarts the interval in minutes.
    """
    by_steps_s = checkpoint.every * step_s if checkpoint.every else math.inf
    by_time_s = checkpoint.every_minutes * 60 if checkpoint.every_minutes else math.inf
    if math.isinf(by_steps_s):
        return by_time_s
    return by_steps_s / math.ceil(by_steps_s / by_time_s) if by_time_s < by_steps_s else by_steps_s


def requeue_pause_s(failures: Any, ran_s: Any) -> Any:
    """Return the pause before the next start, in seconds, as launch/slurm/supervise.sh computes it. Numbers or arrays.

    Args:
      failures: failed starts in a row without a new checkpoint, this one included; at least 1.
      ran_s: how long this start ran.
    """
    return (ran_s < QUICK_S) * PAUSE_S * 3 ** (failures - 1)


def step_limit_s(least_s: float, usual_s: float | None) -> float:
    """Return the time without a finished step after which the watchdog ends a process: USUAL_STEPS usual steps, at least `least_s`."""
    return max(least_s, USUAL_STEPS * (usual_s or 0.0))
