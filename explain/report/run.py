"""What the report shows of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeline.explain.diagnosis.facts import Facts, read_facts
from ridgeline.explain.diagnosis.finding import Finding
from ridgeline.explain.diagnosis.rules import diagnose
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import Event
from ridgeline.rundir.phases import phases
from ridgeline.rundir.records import Devices, Start


@dataclass(frozen=True)
class RunReport:
    """A run with its diagnosis."""

    run: RunDir
    facts: Facts
    findings: Sequence[Finding]
    label: str
    """Its name on the page."""

    @property
    def events(self) -> Sequence[Event]:
        """Events of all processes and starts."""
        return self.run.events

    @property
    def start(self) -> Start:
        """The newest start in run.json; one without figures where it records none."""
        return self.run.record.last_start or Start(devices=Devices(count=1))

    @property
    def settings(self) -> dict[str, str]:
        """XLA flags and environment variables of the newest start, by name, without those that were dropped."""
        return {str(s.get("name")): str(s.get("value")) for s in self.environment or [] if s.get("chosen") != "dropped"}

    @property
    def environment(self) -> list[dict[str, Any]] | None:
        """Settings of the newest start with who chose them and why; None where they were not recorded."""
        found = [event.fields for event in self.events if event.kind == "environment" and event.process == 0]
        settings = found[-1].get("settings") if found else None
        return [row for row in settings if isinstance(row, dict)] if isinstance(settings, list) else None

    @property
    def devices(self) -> int:
        """Number of devices of the newest start."""
        return self.start.devices.count

    @cached_property
    def evaluations(self) -> dict[str, dict[int, float]]:
        """Evaluation set -> step -> loss, the newest of each step, in the order of the steps."""
        found: dict[str, dict[int, float]] = {}
        for phase in phases(self.events):
            step, results = phase.fields.get("step"), phase.fields.get("results")
            if phase.name == "evaluation" and phase.process == 0 and isinstance(step, int) and isinstance(results, dict):
                for name, loss in results.items():
                    if isinstance(loss, int | float):
                        found.setdefault(name, {})[step] = float(loss)
        return {name: dict(sorted(losses.items())) for name, losses in found.items()}

    @property
    def window_times_s(self) -> list[float]:
        """Median step time of each log window that counts (rundir.speed)."""
        return [window.median_s for window in self.facts.windows]


def read_run(path: Path, label: str | None = None, **more: Any) -> RunReport:
    """Read what the page shows of a run directory. `more`: of read_facts. Raises UserError when it is not a run, or damaged."""
    run = RunDir.open(path)
    run.require_events()
    facts = read_facts(run, **more)
    return RunReport(run, facts, diagnose(facts), label or run.name)
