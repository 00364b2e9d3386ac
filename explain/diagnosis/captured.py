"""The facts of a captured profile without a run directory: what its step ledger shows. Everything else about the run is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.explain.diagnosis.facts import Compilation, Facts, read_facts
from ridgeline.explain.diagnosis.finding import Finding
from ridgeline.explain.diagnosis.rules import diagnose
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import Capture, find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.rundir.analysis import Analysis
from ridgeline.rundir.captures import captures, trace_files
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import event_files
from ridgeline.rundir.goodput import CATEGORIES, Ledger


def is_capture(path: Path) -> bool:
    """Whether a path is a trace, the directory of a capture or a log directory with captures, and not a run directory."""
    if not path.is_dir():
        return path.is_file()
    return not RunDir(path).exists and not event_files(path) and bool(trace_files(path) or captures(path))


def capture_facts(path: Path, *, cluster: str | None = None, calibration: Path | None = None) -> Facts:
    """Analyze a capture and return its facts; with those of its run, where it is inside a run directory.

    Raises:
      UserError: there is no profile, a file is damaged, or there is no such cluster or calibration.
    """
    capture = find_capture(path)
    analysis = analyze(load_profile(capture, cluster=cluster, calibration=calibration))
    if capture.run is not None and event_files(capture.run.path):
        return replace(read_facts(capture.run, cluster=cluster, calibration=calibration), analysis=analysis)
    return _alone(path, capture, analysis)


def findings(facts: Facts) -> list[Finding]:
    """Apply the rules. Commands that start a run are left out where the run is unknown."""
    found = diagnose(facts)
    if facts.path is not None:
        return found
    return [replace(f, command=None) if f.command is not None and not f.command.startswith("ridge analyze") else f for f in found]


def _alone(path: Path, capture: Capture, analysis: Analysis) -> Facts:
    """Take the steps of the capture as the whole run: gains are shares of its time."""
    wall_s = sum(step.total_s for step in analysis.steps)
    steps: Any = [
        {
            "step": step.window if step.step is None else step.step,
            "restart": 0,
            "step_time_p50_s": step.total_s,
            "step_time_mean_s": step.total_s,
            "data_wait_s": step.idle_by_cause["data_wait"],
        }
        for step in analysis.steps
    ]
    return Facts(
        name=str(path),
        ledger=Ledger(
            seconds=dict.fromkeys(CATEGORIES, 0.0) | {"productive": wall_s},
            wall_s=wall_s,
            starts=1,
            steps=len(analysis.steps),
            lost_steps=0,
            tokens=None,
            stretches=(),
        ),
        config=capture.config,
        steps=steps,
        compiles=_compilations(analysis),
        analysis=analysis,
    )


def _compilations(analysis: Analysis) -> Sequence[Compilation]:
    """The compilations of the first host, each time one."""
    first = next(iter(analysis.hosts), None)
    return [
        Compilation(each.program, each.duration_s / each.count, True)
        for each in (() if first is None else first.compilations)
        for _ in range(each.count)
    ]
