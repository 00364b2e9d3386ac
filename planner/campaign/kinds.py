"""What can happen to a job of a simulated campaign: kinds of events with their rates and effects; on how many nodes the job goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.planner.campaign.model import Campaign


@dataclass(frozen=True)
class Kind:
    """A kind of event."""

    name: str
    per_s: float = 0.0
    detection_s: float = 0.0
    graceful: bool = False
    """The job saves first."""
    replaces: bool = False
    outage_s: float = 0.0
    loses_memory: bool = False
    """The copies in the memory of the nodes are gone."""
    interrupts: bool = True
    requeues: bool = True
    """Goes through the scheduler's queue."""


def kinds(made: Campaign) -> list[Kind]:
    """Return the random kinds, then those that happen at known times (`AT_KNOWN_TIMES`)."""
    found = []
    for one in made.classes:
        per_s = one.per_hour(made.nodes, made.devices_per_node) / 3600
        detection_s = made.step_limit_s if one.found_by == "watchdog" else made.detection_s
        wait = one.after == "wait"
        found.append(
            Kind(
                one.name,
                per_s,
                0.0 if one.after == "planned" else detection_s,
                graceful=one.after == "planned",
                replaces=one.after == "replace",
                outage_s=made.outage_s if wait else 0.0,
                loses_memory=wait,
            )
        )
    found.append(Kind("preemption", made.preemptions_per_s, graceful=True, loses_memory=True))
    found.append(Kind("slow", made.straggler_per_s, interrupts=False))
    found.append(Kind("time_limit", graceful=True, loses_memory=True))
    found.append(Kind("straggler", graceful=True, replaces=True))
    found.append(Kind("grow", graceful=True))
    return found


AT_KNOWN_TIMES = ("time_limit", "straggler", "grow")


def goes_on(sizes: Sequence[int], nodes: int) -> NDArray[np.int64]:
    """Return on how many nodes a job goes on (planner.policy.elastic_size), by the number of missing nodes from 0 to `nodes`."""
    has_layout = np.zeros(nodes + 1, np.int64)
    possible = [size for size in sizes if size <= nodes]
    has_layout[possible] = possible
    sizes_below: NDArray[np.int64] = np.maximum.accumulate(has_layout)
    return sizes_below[::-1]
