"""What is known about a run before any judgement: figures with their units, each absent (None) where nothing measured it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.load import from_resolved
from configs.schema import Config
from perf.diagnosis.knobs import Rival
from perf.events import Event, event_files, read_events
from perf.goodput import Ledger, queue_waits, run_ledger
from perf.metrics import percentile
from perf.scaling import Study
from perf.timeline import phases


@dataclass(frozen=True)
class Facts:
    """The figures rules look at."""

    name: str
    ledger: Ledger
    config: Config | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    """One record per log line: step, loss, tokens_per_s, step_time_p50_s, data_wait_s, ..."""
    compiles: Sequence[tuple[str, float, bool]] = ()
    """(program, seconds, during the loop) of every compilation."""
    saves_s: Sequence[float] = ()
    """Time each save held up the loop."""
    ranks_step_s: Mapping[int, float] = field(default_factory=dict)
    """Median own time per step of each process, waiting for others excluded, where it is known."""
    analysis: Mapping[str, Any] | None = None
    """The newest step ledger (`ridge analyze --json`)."""
    plan: Mapping[str, Any] | None = None
    """What was predicted when the run started."""
    compiled: Mapping[str, Any] | None = None
    """The compile report (`ridge compile --json`)."""
    study: Study | None = None
    """Several runs at several scales."""
    batch_study: Study | None = None
    """Several runs at several batch sizes (`devices` is the batch)."""
    size_studies: Mapping[int, Study] = field(default_factory=dict)
    """Parameters of the model -> runs of that model at several scales."""
    simpler: Rival | None = None
    """A run of the same work with fewer performance settings."""
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
    def memory_share(self) -> float | None:
        """Peak device memory over what the allocator may use."""
        last = next((s for s in reversed(self.steps) if "peak_bytes" in s and s.get("limit_bytes")), None)
        return None if last is None else float(last["peak_bytes"]) / float(last["limit_bytes"])

    def share(self, *categories: str) -> float:
        """Share of the wall time in categories of the run ledger."""
        return sum(self.ledger.seconds[name] for name in categories) / self.ledger.wall_s if self.ledger.wall_s > 0 else 0.0

    def step_share(self, key: str) -> float | None:
        """Share of the step ledger's total, over all devices, of one of its parts, such as `exposed_communication_s`."""
        if not self.analysis or not self.analysis.get("devices"):
            return None
        devices = self.analysis["devices"]
        total_s = math.fsum(float(d["total_s"]) for d in devices)
        return math.fsum(float(d[key]) for d in devices) / total_s if total_s > 0 else None


def read_facts(run: Path, **more: Any) -> Facts:
    """Gather the facts of a run directory; `more` are fields of Facts that come from elsewhere (a study, a price).

    Raises:
      UserError: the run has no events, or a file of it is damaged.
    """
    events = read_events(event_files(run))
    ledger = run_ledger(events, queue_waits(run, events))
    found = phases(events)
    record = _json(run / "run.json") or {}
    config_file = run / "config.yaml"
    analyses = sorted(run.glob("tensorboard/plugins/profile/*/analysis.json"))
    return Facts(
        name=str(record.get("name", run.name)),
        ledger=ledger,
        config=from_resolved(config_file) if config_file.is_file() else None,
        steps=[event.fields for event in events if event.kind == "step" and event.process == 0],
        compiles=[
            (str(p.fields.get("program", "?")), p.duration_s, _inside_loop(p)) for p in found if p.name == "compile" and p.process == 0
        ],
        saves_s=[p.duration_s for p in found if p.name == "save" and p.process == 0],
        ranks_step_s=_ranks(events),
        analysis=_json(analyses[-1]) if analyses else None,
        plan=_json(run / "plan.json"),
        compiled=_json(run / "compile.json"),
        **more,
    )


def _inside_loop(phase: Any) -> bool:
    parent = phase.parent
    while parent is not None and parent.name != "train":
        parent = parent.parent
    return parent is not None


def _ranks(events: Sequence[Event]) -> dict[int, float]:
    """Median of what each process did by itself in a step, where the loop records it."""
    values: dict[int, list[float]] = {}
    for event in events:
        if event.kind == "step" and isinstance(event.fields.get("own_time_s"), int | float):
            values.setdefault(event.process, []).append(float(event.fields["own_time_s"]))
    return {process: percentile(sorted(times), 0.5) for process, times in values.items()}


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
