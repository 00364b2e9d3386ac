"""A campaign: training that runs for weeks on many nodes, with failures, restarts and checkpoints. What `ridge simulate` simulates.

`Campaign` is what happens to the job, `Choice` what one can decide, `Outcome` what came of it. The simulation itself is
planner/campaign/trials.py, the search for the best choice planner/campaign/search.py.

The tier `local` is checkpoint.local: saves on each node, with a copy on the next one, beside rarer ones on shared storage. The policy
`shrink` (go on with fewer nodes) is that of jobs with elastic.min_nodes, `wait` that of others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ridgeline.planner.failure_catalog import FailureClass
from ridgeline.planner.policy import LEAST_SHARE, STRAGGLER_SHARE

Floats = NDArray[np.float64]
Tier = Literal["shared", "local"]
Elastic = Literal["wait", "shrink"]

CAUSES = {
    "queue": "Waiting for the scheduler, for a replaced node, for a shared service, or for a person to submit the job again.",
    "startup": "Launch, preflight, imports, rendezvous, first step.",
    "compile": "Tracing and compiling, or loading compiled programs.",
    "restore": "Reading the checkpoint.",
    "checkpoint": "Training waiting for saves.",
    "lost": "Steps that were repeated because no checkpoint held them.",
    "hang": "From a failure to the end of the last process: detection, and the watchdog's limit.",
    "teardown": "Writing the last checkpoint of a start that was stopped.",
    "straggler": "The excess of steps while a node is slow. `ridge goodput` counts it as productive.",
    "shrunk": "The excess of steps on fewer nodes (policy shrink). `ridge goodput` counts it as productive.",
}
"""Cause of lost time -> its meaning. The names are those of the run ledger (rundir.goodput.CATEGORIES), except the last two."""
PARTS = ("productive", *CAUSES)


@dataclass(frozen=True)
class Campaign:
    """What happens to a job. Times in seconds, rates per second of the whole job."""

    work_s: float
    """Time of all steps at full speed."""
    nodes: int
    devices_per_node: int
    classes: tuple[FailureClass, ...]
    step_limit_s: float
    """After which the watchdog ends a process without a finished step."""
    save_s: float
    """Time that a save blocks training."""
    write_s: dict[Tier, float]
    """From the end of the blocking part to a checkpoint that a restart can use."""
    restore_s: dict[Tier, float]
    detection_s: float = 0.0
    requeue_s: float = 0.0
    startup_s: float = 0.0
    compile_s: float = 0.0
    repair_s: float = 0.0
    outage_s: float = 0.0
    resubmit_s: float = 0.0
    max_restarts: int | None = None
    """Restarts after which the job is not requeued (slurm.max_restarts); None: no limit."""
    grace_s: float = math.inf
    """Time that a planned stop has for its save; a save that takes longer is lost."""
    queue_wait_s: float = 0.0
    """Mean wait for the scheduler at each start, exponentially distributed; not paid."""
    time_limit_s: float = math.inf
    preemptions_per_s: float = 0.0
    spared_until_save: bool = False
    """Nothing interrupts a start before its first checkpoint is written: so in the soak test, where rates count from there on."""
    schedule: tuple[tuple[float, str], ...] | None = None
    """(seconds, name of a class or "preemption") of every interruption, in order of time, instead of interruptions drawn by their rates.
    Seconds count while the job can be interrupted: not in the queue, and with `spared_until_save` not before the save of a start."""
    straggler_per_s: float = 0.0
    straggler_excess: float = 0.0
    straggler_found_s: float = 0.0
    shared_every_s: float = 3600.0
    """Tier `local`: time between its saves to shared storage."""
    sizes: tuple[int, ...] = ()
    """Numbers of nodes on which a job with the policy shrink goes on (planner.policy.elastic_sizes); (): all from LEAST_SHARE of its nodes
    on."""
    price_per_device_hour_usd: float | None = None

    @property
    def shrunk_sizes(self) -> tuple[int, ...]:
        """Numbers of nodes on which the job goes on, all its nodes among them."""
        return self.sizes or tuple(range(math.ceil(LEAST_SHARE * self.nodes), self.nodes + 1))

    @property
    def failures_per_s(self) -> float:
        """Rate of all interruptions that lose steps."""
        return sum(c.per_hour(self.nodes, self.devices_per_node) for c in self.classes if c.after != "planned") / 3600

    @property
    def replaced_per_s(self) -> float:
        """Rate at which nodes have to be replaced."""
        return sum(c.per_hour(self.nodes, self.devices_per_node) for c in self.classes if c.after == "replace") / 3600

    @property
    def stragglers_found(self) -> bool:
        """Whether a straggler is large enough for the diagnosis to report it."""
        return self.straggler_excess >= STRAGGLER_SHARE


@dataclass(frozen=True)
class Choice:
    """What one can decide."""

    interval_s: float
    """Time between saves."""
    spares: int
    """Nodes beside those of the job that replace a lost one at once."""
    tier: Tier = "shared"
    elastic: Elastic = "wait"


@dataclass(frozen=True)
class Outcome:
    """What came of one choice, in every trial. Arrays [trials]."""

    choice: Choice
    seconds: dict[str, Floats]
    """Part (PARTS) -> seconds; they sum to `wall_s`."""
    wall_s: Floats
    """From the submission to the end of the last save; infinite where the work is never done."""
    device_s: Floats
    """Device-seconds that are paid."""
    events: dict[str, Floats]
    """Kind of interruption -> how often."""
    stops: Floats
    """How often the job was no longer requeued, and a person submitted it again."""
    ended_s: Floats
    """Simulated time: `wall_s`, or where an endless trial was given up."""

    @property
    def days(self) -> Floats:
        """Wall days."""
        return self.wall_s / 86400

    @property
    def goodput(self) -> Floats:
        """Steps that count, at full speed, over the wall time."""
        return self.seconds["productive"] / self.ended_s

    @property
    def ledger_goodput(self) -> Floats:
        """The goodput that `ridge goodput` shows of such a run: slow steps count as productive."""
        kept = self.seconds["productive"] + self.seconds["straggler"] + self.seconds["shrunk"]
        return kept / self.ended_s

    @property
    def interruptions(self) -> Floats:
        """Interruptions of all kinds."""
        return np.sum(list(self.events.values()), axis=0)

    def usd(self, price_per_device_hour: float) -> Floats:
        """US dollars."""
        return self.device_s / 3600 * price_per_device_hour
