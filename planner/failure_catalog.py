"""The failure catalog (planner/failures.yaml): published failure rates by class of component, and how long recovery takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ruamel.yaml import YAML

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import unknown_name

CATALOG = Path(__file__).with_name("failures.yaml")
Component = Literal["device", "link", "node", "job"]
After = Literal["restart", "replace", "wait", "planned"]
MEASURED = "llama-3"
"""The fleet whose interruptions are known by class."""


@dataclass(frozen=True)
class Fleet:
    """A published failure rate."""

    name: str
    title: str
    per_node_day: float
    """Failures of one node per day."""
    source: str


@dataclass(frozen=True)
class FailureClass:
    """One class of components whose failure stops a job."""

    name: str
    per: Component
    """What one component is; a link is one network port and its cable, one per device."""
    per_component_hour: float
    """Failures of one component per hour."""
    after: After
    """What the job needs then: a restart on the same nodes, one node replaced, to wait for a shared service, or nothing (planned: it saves
    first)."""
    found_by: Literal["exit", "watchdog"]
    source: str

    def per_hour(self, nodes: int, devices_per_node: int) -> float:
        """Return the failures per hour of a job."""
        counts = {"device": nodes * devices_per_node, "link": nodes * devices_per_node, "node": nodes, "job": 1}
        return self.per_component_hour * counts[self.per]


@dataclass(frozen=True)
class Stragglers:
    """Nodes that become slow."""

    per_node_hour: float
    excess: float
    """Additional time of a step, over that of a step without them."""
    found_s: float
    """From its beginning to its exclusion, where it is large enough to be reported (planner.policy.STRAGGLER_SHARE)."""
    source: str


@dataclass(frozen=True)
class RestartTimes:
    """Parts of the time from a failure to the first step, in seconds, without reading the checkpoint."""

    detection_s: float
    requeue_s: float
    startup_s: float
    compile_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.detection_s + self.requeue_s + self.startup_s + self.compile_s


@dataclass(frozen=True)
class Waits:
    """How long things outside of the job take, in seconds."""

    repair_s: float
    """Until a replaced node is back."""
    outage_s: float
    """Until a shared service is back."""
    resubmit_s: float
    """Until a person submits a job that is no longer requeued."""


@functools.cache
def _read() -> dict[str, Any]:
    entries: dict[str, Any] = YAML(typ="safe").load(CATALOG)
    return entries


@functools.cache
def fleets() -> dict[str, Fleet]:
    """Return the published fleets by name."""
    found = {}
    for name, entry in _read()["fleets"].items():
        rate = entry["per_1000_node_days"] / 1000 if "per_1000_node_days" in entry else _events_per_node_day(entry, entry["interruptions"])
        found[name] = Fleet(name, entry["name"], rate, entry["source"])
    return found


def fleet(name: str) -> Fleet:
    """Return a published fleet. Raises UserError with the nearest name."""
    if name not in fleets():
        raise unknown_name("fleet", name, list(fleets()))
    return fleets()[name]


@functools.cache
def measured_classes() -> tuple[FailureClass, ...]:
    """Return the classes with the rates of MEASURED."""
    base = _read()["fleets"][MEASURED]
    hours = base["days"] * 24
    devices = base["nodes"] * base["devices_per_node"]
    counts = {"device": devices, "link": devices, "node": base["nodes"], "job": 1}
    found = []
    for name, entry in _read()["classes"].items():
        assert entry["per"] in get_args(Component) and entry["after"] in get_args(After), name
        rate = entry["interruptions"] / (counts[entry["per"]] * hours)
        found.append(FailureClass(name, entry["per"], rate, entry["after"], entry["found_by"], entry["source"]))
    return tuple(found)


def classes_of(cluster: ClusterConfig, fleet_name: str | None = None) -> tuple[FailureClass, ...]:
    """Return the classes with the rates of a cluster.

    They are those of MEASURED, scaled to the rate of another published fleet, whose planned interruptions are not published and therefore
    none; else to the cluster's node_mtbf_hours, planned ones included, as `ridge plan` counts them. Raises UserError for an unknown fleet.
    """
    base = _read()["fleets"][MEASURED]
    classes = measured_classes()
    planned = [c for c in classes if c.after == "planned"]
    if fleet_name is not None:
        wanted = fleet(fleet_name)
        if wanted.name == MEASURED:
            return classes
        unexpected = base["interruptions"] - sum(_read()["classes"][c.name]["interruptions"] for c in planned)
        return tuple(_scaled(c, wanted.per_node_day / _events_per_node_day(base, unexpected)) for c in classes if c not in planned)
    if cluster.node_mtbf_hours is None:
        return classes
    factor = 24 / cluster.node_mtbf_hours / _events_per_node_day(base, base["interruptions"])
    return tuple(_scaled(c, factor) for c in classes)


def stragglers() -> Stragglers:
    """Return how often nodes become slow, and by how much."""
    entry = _read()["stragglers"]
    per_hour = entry["share_of_nodes"] / (entry["in_days"] * 24)
    return Stragglers(per_hour, entry["excess"], entry["found_hours"] * 3600.0, entry["source"])


def restart_times() -> RestartTimes:
    """Return the parts of the time of a restart."""
    return RestartTimes(**{name: float(value) for name, value in _read()["restart"].items() if name != "source"})


def waits() -> Waits:
    """Return how long repairs take."""
    entries = _read()
    return Waits(entries["repair_hours"] * 3600.0, entries["outage_hours"] * 3600.0, entries["resubmit_minutes"] * 60.0)


def _events_per_node_day(entry: dict[str, Any], events: float) -> float:
    return float(events / entry["days"] / entry["nodes"])


def _scaled(one: FailureClass, factor: float) -> FailureClass:
    return FailureClass(one.name, one.per, one.per_component_hour * factor, one.after, one.found_by, one.source)
