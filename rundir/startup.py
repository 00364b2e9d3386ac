"""Where the time of a start goes, from the start of the process to the first finished step: the parts of TensorBoard's `train_startup`."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.rundir.events import COMPILE_PARTS, Event
from ridgeline.rundir.phases import Phase, phases

PARTS = {
    "launch": "the interpreter, the command, reading the config, data manifests, describing mesh and model.",
    "import": "loading JAX and the packages of training.",
    "rendezvous": "the processes finding each other.",
    "restore": "reading the checkpoint.",
    "init": "making the first state; compiling the program that does is among the next parts.",
    "trace": "tracing programs.",
    "lower": "lowering them.",
    "compile": "XLA compiling them, or reading its work from JAX's cache.",
    "load": "loading programs that an earlier start compiled.",
    "first_step": "the first step.",
    "other": "nothing above: agreeing with other processes, opening files, waiting for the first batch.",
}
"""Part of a start -> what it holds."""


def startup_parts(events: Sequence[Event], restart: int) -> dict[str, float] | None:
    """Return the seconds of each part (those that took place) of one start of process 0, in the order of PARTS; they sum to the time from
    the start of the process to the end of the first step. None while there is none.

    Args:
      events: of the run (rundir.events.read_events).
      restart: which start.
    """
    found = phases(event for event in events if event.process == 0 and event.restart == restart)
    first = next((phase for phase in found if phase.name == "first_step"), None)
    if first is None:
        return None
    end_s = _end_s(first)
    seconds = dict.fromkeys(PARTS, 0.0)
    for phase in found:
        if _end_s(phase) > end_s:
            continue
        if phase.name == "compile":
            parts = {part: float(phase.fields.get(part, 0.0)) for part in COMPILE_PARTS}
            for part, value_s in parts.items():
                seconds[part.removesuffix("_s")] += value_s
        elif phase.name in seconds:
            seconds[phase.name] += phase.own_s
    total_s = end_s - min(phase.start_mono_s for phase in found)
    seconds["other"] = max(0.0, total_s - sum(value_s for name, value_s in seconds.items() if name != "other"))
    return {name: value_s for name, value_s in seconds.items() if value_s > 0}


def startup_metrics(events: Sequence[Event], restart: int) -> dict[str, float]:
    """Return the metrics of one start; none before the end of its first step."""
    parts = startup_parts(events, restart) or {}
    metrics = {f"train_startup/{name}_s": value_s for name, value_s in parts.items()}
    return metrics | {"train_startup/total_s": sum(parts.values())} if parts else {}


def _end_s(phase: Phase) -> float:
    return phase.start_mono_s + phase.duration_s
