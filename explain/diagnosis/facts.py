"""What is known about a run before any judgement: figures with their units, each absent (None) where nothing measured it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.explain.diagnosis.expected import Expected, expect
from ridgeline.explain.diagnosis.held_down import device_rows
from ridgeline.explain.diagnosis.knobs import Rival
from ridgeline.explain.diagnosis.ranks import steady
from ridgeline.explain.study.scaling import Study
from ridgeline.rundir.bench_results import RESULTS, read
from ridgeline.rundir.events import JAX_CACHE, LOADED, event_files, read_events
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger
from ridgeline.rundir.noise import percentile
from ridgeline.rundir.phases import phases
from ridgeline.rundir.recompilation import Recompilation, recompilations


@dataclass(frozen=True)
class Facts:
    """The figures rules look at."""

    name: str
    ledger: Ledger
    path: Path | None = None
    """The run directory."""
    submitted: str | None = None
    """The cluster file it was submitted with."""
    nodes: int = 1
    """It ran on so many, when it was submitted."""
    config: Config | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    """One record per log line: step, loss, tokens_per_s, step_time_p50_s, data_wait_s, ..."""
    compiles: Sequence[tuple[str, float, bool]] = ()
    """(program, seconds, during the loop) of every compilation."""
    cached_s: float = 0.0
    """Seconds of those before the loop whose programs a cache had: tracing, lowering and loading, which a slow machine draws out."""
    saves_s: Sequence[float] = ()
    """Time each save held up the loop."""
    recompilations: Sequence[Recompilation] = ()
    """Programs compiled again during the loop: the step, the line that called them, what changed."""
    bench: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Layer -> seconds per step, by round: the newest stored `ridge bench all` of the same work on the same devices."""
    analysis: Mapping[str, Any] | None = None
    """The newest step ledger (`ridge analyze --json`)."""
    plan: Mapping[str, Any] | None = None
    """What was planned beside what was compiled, when the run started (plan.json)."""
    compiled: Mapping[str, Any] | None = None
    """The report of the compiled step (compile.json: written at the start, or by `ridge compile --json`)."""
    expected: Expected | None = None
    """What the planner says about this run on its cluster."""
    devices: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Device -> what it said of its clock, power and quota at each log line."""
    study: Study | None = None
    """Several runs at several scales."""
    batch_study: Study | None = None
    """Several runs at several batch sizes (`devices` is the batch)."""
    size_studies: Mapping[int, Study] = field(default_factory=dict)
    """Parameters of the model -> runs of that model at several scales."""
    simpler: Rival | None = None
    """A run of the same work with fewer performance settings."""
    axis: str | None = None
    """The mesh axis that grows from run to run."""
    price_usd: float | None = None
    """Of one device and hour."""

    @property
    def step_s(self) -> float | None:
        """Median step time of the log windows after the first, which still warms up."""
        values = sorted(float(s["step_time_p50_s"]) for s in (self.steps[1:] or self.steps) if "step_time_p50_s" in s)
        return percentile(values, 0.5) if values else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the step time that waited for data, over all windows."""
        waits = [(float(s["data_wait_s"]), float(s["step_time_mean_s"])) for s in self.steps if "data_wait_s" in s]
        total_s = math.fsum(step_s for _, step_s in waits)
        return math.fsum(wait_s for wait_s, _ in waits) / total_s if total_s > 0 else None

    @property
    def padding_share(self) -> float | None:
        """Share of the positions of a step that hold no target."""
        if self.config is None:
            return None
        positions = self.config.data.batch_size * self.config.data.seq_len
        targets = [float(s["target_tokens"]) for s in self.steps if "target_tokens" in s]
        return max(0.0, 1 - math.fsum(targets) / len(targets) / positions) if targets else None

    @property
    def memory_bytes(self) -> float | None:
        """Peak device memory; where the backend reports none, arguments and temporaries of the compiled step."""
        last = next((s for s in reversed(self.steps) if "peak_bytes" in s), None)
        if last is not None:
            return float(last["peak_bytes"])
        sizes = self.compiled or (self.plan or {}).get("compiled")
        return None if sizes is None else float(sizes["argument_bytes"] + sizes["temp_bytes"])

    @property
    def memory_limit_bytes(self) -> float | None:
        """What the allocator may use; where the backend does not say, the memory of a device of the cluster."""
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
    def traffic(self) -> Sequence[Mapping[str, Any]]:
        """Planned and compiled bytes per step by kind and axes of collectives."""
        rows: Sequence[Mapping[str, Any]] = (self.compiled or {}).get("traffic") or (self.plan or {}).get("communication") or ()
        return rows

    @property
    def compute_share(self) -> float | None:
        """Share of the step that the device that computes longest computes; None without a profile."""
        shares = [d["compute_s"] / d["total_s"] for d in (self.analysis or {}).get("devices", ()) if d["total_s"] > 0]
        return max(shares, default=None)

    def share(self, *categories: str) -> float:
        """Share of the wall time in categories of the run ledger."""
        return sum(self.ledger.seconds[name] for name in categories) / self.ledger.wall_s if self.ledger.wall_s > 0 else 0.0

    def every_device(self, part: Callable[[Mapping[str, Any]], float]) -> float | None:
        """Return the share of the step that a part of the step ledger takes on every device, in three of four steps at least.

        What only some devices have is the matter of whoever they wait for; what only some steps have is noise.
        """
        shares = [
            min(part(device) / device["total_s"] for device in step["devices"])
            for step in (self.analysis or {}).get("steps", ())
            if step.get("devices") and all(device["total_s"] > 0 for device in step["devices"])
        ]
        return steady(shares) if shares else None


def read_facts(run: Path, *, cluster: str | None = None, calibration: Path | None = None, **more: Any) -> Facts:
    """Gather the facts of a run directory.

    Args:
      run: the run directory.
      cluster: file or name of the cluster it ran on; None: what the run itself knows of it.
      calibration: file of `ridge calibrate` that was made on it; None: published rates.
      more: fields of Facts that come from elsewhere (a study, a price).

    Raises:
      UserError: the run has no events, or a file of it is damaged; or there is no such cluster or calibration.
    """
    events = read_events(event_files(run))
    ledger = run_ledger(events, queue_waits(run, events))
    found = phases(events)
    record = _json(run / "run.json") or {}
    start = (record.get("starts") or [{}])[-1]
    config_file = run / "config.yaml"
    config = from_resolved(config_file) if config_file.is_file() else None
    plan = _json(run / "plan.json")
    analyses = sorted(run.glob("tensorboard/plugins/profile/*/analysis.json"), key=lambda path: path.stat().st_mtime)
    expected = expect(run, config, plan, cluster, calibration)
    submissions = sorted(run.glob("slurm/*/cluster.yaml"), key=lambda path: path.stat().st_mtime)
    submitted = str(submissions[-1]) if submissions else None
    return Facts(
        name=str(record.get("name", run.name)),
        ledger=ledger,
        path=run,
        submitted=submitted,
        nodes=_nodes(start, submitted),
        config=config,
        steps=[event.fields for event in events if event.kind == "step" and event.process == 0],
        compiles=[
            (str(p.fields.get("program", "?")), p.duration_s, _inside_loop(p)) for p in found if p.name == "compile" and p.process == 0
        ],
        cached_s=math.fsum(
            p.duration_s
            for p in found
            if p.name == "compile" and p.process == 0 and p.fields.get("source") in (JAX_CACHE, LOADED) and not _inside_loop(p)
        ),
        recompilations=recompilations(events, 0),
        bench=stored_ladder(Path(str(start.get("directory", "."))), config, start.get("devices") or {}),
        saves_s=[p.duration_s for p in found if p.name == "save" and p.process == 0],
        analysis=with_planned(_json(analyses[-1]), expected) if analyses else None,
        plan=plan,
        compiled=_json(run / "compile.json"),
        expected=expected,
        devices=device_rows(events),
        **more,
    )


def _nodes(start: Mapping[str, Any], submitted: str | None) -> int:
    """Nodes of a start."""
    devices = int((start.get("devices") or {}).get("count", 1))
    return 1 if submitted is None else max(1, devices // load_cluster(submitted).config.devices_per_node)


def _inside_loop(phase: Any) -> bool:
    parent = phase.parent
    while parent is not None and parent.name != "train":
        parent = parent.parent
    return parent is not None


def with_planned(analysis: dict[str, Any] | None, expected: Expected | None) -> dict[str, Any] | None:
    """Put the planned bus bandwidth beside the measured one of each collective that has none."""
    for row in (analysis or {}).get("collectives", []):
        if expected is not None and row.get("planned_bus_bandwidth") is None and row.get("axes") and row.get("bytes") and row.get("count"):
            row["planned_bus_bandwidth"] = expected.bus_bandwidth(row["kind"], row["bytes"] / row["count"], row["axes"])
    return analysis


def stored_ladder(directory: Path, config: Config | None, devices: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """Return the series of the newest result of `ridge bench all` of this work on these devices; {} where there is none.

    Args:
      directory: the run was started in it; results are below it by default.
      config: of the run; what it trains, how, and on which mesh must be equal.
      devices: platform, kind and count.
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
        if alike and rows and all(device.get(key) == devices.get(key) for key in ("platform", "kind", "count")):
            return found.series
    return {}


_WORK = ("model", "compute", "precision", "mesh", "optimizer")


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
