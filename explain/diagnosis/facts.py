"""The facts of a run that rules judge: figures with their units, each None where nothing measured it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.explain.diagnosis.expected import Expected, expect
from ridgeline.explain.diagnosis.ranks import steady
from ridgeline.explain.diagnosis.settings import SimplerRun
from ridgeline.explain.diagnosis.throttled import device_samples
from ridgeline.explain.study.analysis import Study
from ridgeline.rundir.analysis import Analysis, Collective
from ridgeline.rundir.analysis_times import DeviceStep
from ridgeline.rundir.bench_results import RESULTS, read
from ridgeline.rundir.device_state import DeviceState
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import JAX_CACHE, LOADED
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger
from ridgeline.rundir.loss_spikes import Spike, loss_spikes
from ridgeline.rundir.noise import median
from ridgeline.rundir.phases import Phase, phases
from ridgeline.rundir.recompilation import Recompilation, recompilations
from ridgeline.rundir.records import CompileRecord, Devices, PlanRecord, Start, TrafficRow
from ridgeline.rundir.speed import Line, Speed, Window, log_lines, run_speed, windows


@dataclass(frozen=True)
class Compilation:
    """One compilation by process 0."""

    program: str
    duration_s: float
    in_loop: bool
    """During the training loop."""
    start: int = 0
    """Number of the start: each start compiles its programs once."""


@dataclass(frozen=True)
class Facts:
    """What rules judge: the figures of one run, or of several runs of the same work."""

    name: str
    ledger: Ledger
    path: Path | None = None
    """The run directory."""
    submitted: str | None = None
    """The cluster file of its newest submission."""
    nodes: int = 1
    """Number of nodes of its newest submission."""
    config: Config | None = None
    steps: Sequence[Line] = ()
    """One record per log line: step, loss, tokens_per_s, step_time_p50_s, data_wait_s, ..., and restart, the number of its start."""
    compiles: Sequence[Compilation] = ()
    cached_s: float = 0.0
    """Seconds of the compilations before the loop that a cache served: tracing, lowering and loading, which are long on a slow machine."""
    saves_s: Sequence[float] = ()
    """Time the loop waited for each save."""
    recompilations: Sequence[Recompilation] = ()
    """Programs compiled again during the loop: the step, the line that called them, what changed."""
    spikes: Sequence[Spike] = ()
    """Loss spikes of process 0."""
    hangs: Sequence[str] = ()
    """What the watchdog ended, in order: a step, a save, ..."""
    bench: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Layer -> seconds per step, by round: the newest stored `ridge bench all` of the same work on the same devices."""
    analysis: Analysis | None = None
    """The newest step ledger (analysis.json)."""
    plan: PlanRecord | None = None
    """What was planned beside what was compiled, when the run started."""
    compiled: CompileRecord | None = None
    """The compiled step (compile.json: written at the start, or by `ridge compile --json`)."""
    expected: Expected | None = None
    """What the planner expects of this run on its cluster."""
    devices: Mapping[str, Sequence[DeviceState]] = field(default_factory=dict)
    """Device -> its clock, power and quota at each log line."""
    study: Study | None = None
    """Several runs at several scales."""
    batch_study: Study | None = None
    """Several runs at several batch sizes."""
    size_studies: Mapping[int, Study] = field(default_factory=dict)
    """Parameters of the model -> runs of that model at several scales."""
    simpler: SimplerRun | None = None
    """A run of the same work with fewer performance settings."""
    axis: str | None = None
    """The mesh axis that grows from run to run."""
    price_usd: float | None = None
    """Of one device and hour."""

    @property
    def step_s(self) -> float | None:
        """Median step time over the log windows that count (rundir.speed)."""
        return median([window.median_s for window in self.windows]) if self.windows else None

    @cached_property
    def windows(self) -> Sequence[Window]:
        """The log windows of the steps, without warm-up."""
        return windows(self.steps)

    @cached_property
    def speed(self) -> Speed | None:
        """The speed of the run."""
        return run_speed(self.windows)

    @property
    def data_wait_share(self) -> float | None:
        """Share of the step time spent waiting for data, over all windows."""
        waits = [(s["data_wait_s"], s["step_time_mean_s"]) for s in self.steps if "data_wait_s" in s and "step_time_mean_s" in s]
        total_s = math.fsum(step_s for _, step_s in waits)
        return math.fsum(wait_s for wait_s, _ in waits) / total_s if total_s > 0 else None

    @property
    def padding_share(self) -> float | None:
        """Share of the positions of a step that have no target, in the newest start: earlier ones may have had another batch size."""
        if self.config is None:
            return None
        positions = self.config.data.batch_size * self.config.data.seq_len
        newest = max((s["restart"] for s in self.steps), default=0)
        targets = [float(s["target_tokens"]) for s in self.steps if "target_tokens" in s and s["restart"] == newest]
        return max(0.0, 1 - math.fsum(targets) / len(targets) / positions) if targets else None

    @property
    def memory_bytes(self) -> float | None:
        """Peak device memory; where the backend reports none, arguments and temporaries of the compiled step."""
        last = next((s for s in reversed(self.steps) if "peak_bytes" in s), None)
        if last is not None:
            return float(last["peak_bytes"])
        sizes = self.compiled or (None if self.plan is None else self.plan.compiled)
        return None if sizes is None else float(sizes.step_bytes)

    @property
    def memory_limit_bytes(self) -> float | None:
        """Limit of the allocator; where the backend reports none, the memory of a device of the cluster."""
        last = next((s for s in reversed(self.steps) if s.get("limit_bytes")), None)
        if last is not None:
            return float(last["limit_bytes"])
        return None if self.expected is None else float(self.expected.capacity_bytes)

    @property
    def memory_share(self) -> float | None:
        """Memory in use over the limit."""
        used, limit = self.memory_bytes, self.memory_limit_bytes
        return None if used is None or limit is None else used / limit

    @property
    def traffic(self) -> Sequence[TrafficRow]:
        """Planned and compiled bytes per step by kind and axes of collectives."""
        compiled = () if self.compiled is None else self.compiled.traffic
        return compiled or (() if self.plan is None else self.plan.communication)

    @property
    def collectives(self) -> Sequence[Collective]:
        """Collectives of the step ledger, longest exposed time first; none without a profile."""
        return sorted(() if self.analysis is None else self.analysis.collectives, key=lambda each: -each.exposed_s)

    @property
    def compute_share(self) -> float | None:
        """Largest share of the step that a device computes; None without a profile."""
        devices = () if self.analysis is None else self.analysis.devices
        return max((device.compute_s / device.total_s for device in devices if device.total_s > 0), default=None)

    def share(self, *categories: str) -> float:
        """Share of the wall time in categories of the run ledger."""
        return sum(self.ledger.seconds[name] for name in categories) / self.ledger.wall_s if self.ledger.wall_s > 0 else 0.0

    def every_device(self, part: Callable[[DeviceStep], float]) -> float | None:
        """Return the share of the step that a part of the step ledger takes on every device in at least three of four steps.

        A part that only some devices have is caused by the device they wait for; a part that only some steps have is noise.
        """
        shares = [
            min(part(device) / device.total_s for device in step.devices)
            for step in (() if self.analysis is None else self.analysis.steps)
            if step.devices and all(device.total_s > 0 for device in step.devices)
        ]
        return steady(shares) if shares else None


def read_facts(run: RunDir, *, cluster: str | None = None, calibration: Path | None = None, **more: Any) -> Facts:
    """Read the facts of a run directory.

    Args:
      run: the run directory.
      cluster: file or name of the cluster it ran on; None: see rundir.directory.known_cluster.
      calibration: file of `ridge calibrate` from that cluster; None: published rates.
      more: fields of Facts from elsewhere (a study, a price).

    Raises:
      UserError: the run has no events, or a file of it is damaged; or there is no such cluster or calibration.
    """
    events = run.events
    found = phases(events)
    start = run.record.last_start if run.exists else None
    expected = expect(run, cluster, calibration)
    compiles = [p for p in found if p.name == "compile" and p.process == 0]
    return Facts(
        name=run.name,
        ledger=run_ledger(events, queue_waits(run, events)),
        path=run.path,
        submitted=None if run.cluster_file is None else str(run.cluster_file),
        nodes=_nodes(run, start),
        config=run.config,
        steps=log_lines(events),
        compiles=[Compilation(str(p.fields.get("program", "?")), p.duration_s, _inside_loop(p), p.restart) for p in compiles],
        cached_s=math.fsum(p.duration_s for p in compiles if p.fields.get("source") in (JAX_CACHE, LOADED) and not _inside_loop(p)),
        recompilations=recompilations(events, 0),
        spikes=loss_spikes(events),
        hangs=[str(event.fields.get("phase", "")) for event in events if event.kind == "hang"],
        bench={} if start is None else stored_ladder(Path(start.directory), run.config, start.devices),
        saves_s=[p.duration_s for p in found if p.name == "save" and p.process == 0],
        analysis=None if run.analysis is None else _with_planned(run.analysis, expected),
        plan=run.plan,
        compiled=run.compiled,
        expected=expected,
        devices=device_samples(events),
        **more,
    )


def _nodes(run: RunDir, start: Start | None) -> int:
    """Number of nodes of a start."""
    return 1 if run.cluster is None or start is None else max(1, start.devices.count // run.cluster.devices_per_node)


def _inside_loop(phase: Phase) -> bool:
    parent = phase.parent
    while parent is not None and parent.name != "train":
        parent = parent.parent
    return parent is not None


def _with_planned(analysis: Analysis, expected: Expected | None) -> Analysis:
    """Add the planned bus bandwidth to each collective that has none."""

    def planned(row: Collective) -> Collective:
        if expected is None or row.planned_bus_bandwidth is not None or not (row.axes and row.bytes and row.count):
            return row
        return replace(row, planned_bus_bandwidth=expected.bus_bandwidth(row.kind, row.bytes / row.count, row.axes))

    return replace(analysis, collectives=[planned(row) for row in analysis.collectives])


def stored_ladder(directory: Path, config: Config | None, devices: Devices) -> Mapping[str, Sequence[float]]:
    """Return the series of the newest result of `ridge bench all` of this work on these devices; {} where there is none.

    Args:
      directory: where the run was started; results are below it by default.
      config: of the run; model, compute, precision, mesh, optimizer and batch must be equal.
      devices: platform, kind and count must be equal.
    """
    if config is None:
        return {}
    mine = config.model_dump(mode="json")
    for file in sorted((directory / RESULTS / "all").glob("*.json"), reverse=True):
        try:
            found = read(file)
        except UserError:
            continue
        device = found.provenance["device"]
        alike = all(found.config.get(section) == mine[section] for section in _WORK)
        rows = all(found.config.get("data", {}).get(key) == mine["data"][key] for key in ("batch_size", "seq_len"))
        if alike and rows and all(device.get(key) == getattr(devices, key) for key in ("platform", "kind", "count")):
            return found.series
    return {}


_WORK = ("model", "compute", "precision", "mesh", "optimizer")
