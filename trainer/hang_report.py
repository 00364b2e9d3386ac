"""What every process of a run was doing when one of them made no progress: one file that names the process that the others wait for.

The positions of the processes come over their connections (launch/cluster/link.py), which a stuck main thread does not hold up. A process
is suspect if it does not answer, is the only one that does not wait for the others, has begun or finished fewer steps than the others, or
is the only one with a thread that waits for a file. Where it waits for a file or for a worker process of its loader, that is named.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline import PACKAGE
from ridgeline.configs.format import format_bytes
from ridgeline.hlo.collectives import Collective, collectives

THREADS, FRAMES, TEXT, OUTSIDE = 8, 16, 160, 8
"""Limits of a position: threads, frames of each, characters of a frame, things outside Python that it waits for."""
CANDIDATES = 4
"""Collectives of one kind that are named where the instruction is not known."""
WAITS = ("agreement.py", "multihost", "distributed.py", "_read_pending", "begin_together", "wait_at_barrier", "agreed", "stages.py")
"""In a frame of the main thread: it waits for the other processes, or for a step, which waits for theirs."""
IDLE = ("ridge-link", "lease", "stop-publish", "stop-listen", "watchdog", "hang", "clocks")
"""Threads of ours that wait most of the time."""
Frame = Annotated[str, Field(max_length=TEXT)]
MOST = 1000
"""Characters of such a thing."""
Outside = Annotated[str, Field(max_length=MOST)]


class Position(BaseModel):
    """What a process is doing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    step: int
    """Steps finished in total; of the first step's predecessor before it."""
    begun: int = 0
    """The number of the step that it has begun to dispatch last; 0 before the first one."""
    phase: Annotated[str, Field(max_length=TEXT)]
    silent_s: float
    """Seconds since its last progress."""
    threads: Annotated[dict[Frame, Annotated[list[Frame], Field(max_length=FRAMES)]], Field(max_length=THREADS)]
    """Thread -> its innermost Python frames, innermost last; the main thread first."""
    files: Annotated[list[Outside], Field(max_length=OUTSIDE)] = []
    """Files that its threads wait for, and in which call (trainer/kernel_waits.py)."""
    collective: Outside | None = None
    """Kind and name of the collective that it waits in; None where its stacks do not tell (trainer/native_waits.py)."""
    worker: Outside | None = None
    """The worker process of its loader that it waits for, and what that one does."""

    @property
    def main(self) -> Sequence[str]:
        """Frames of the main thread, and of the thread that it lets work at the start (trainer/stop.py, in_thread)."""
        return [frame for name, frames in self.threads.items() if name in ("MainThread", "worker") for frame in frames]

    @property
    def outside(self) -> list[str]:
        """What it waits for outside Python."""
        return [*([] if self.worker is None else [self.worker]), *self.files]

    @property
    def waits(self) -> bool:
        """Whether its main thread waits for other processes, as far as its frames tell."""
        return any(wait in frame for frame in self.main for wait in WAITS)


def read_position(value: object) -> Position | None:
    """Return a received position; None for anything else."""
    try:
        return Position.model_validate(value)
    except ValidationError:
        return None


def python_frames() -> dict[str, list[str]]:
    """Return the innermost Python frames of the threads that run our code, the main thread first."""
    stacks = sys._current_frames()
    found: dict[str, list[str]] = {}
    for thread in sorted(threading.enumerate(), key=lambda item: item is not threading.main_thread()):
        frame = stacks.get(thread.ident or 0)
        if frame is None or len(found) == THREADS or thread.name in IDLE:
            continue
        lines = [line for line in map(_line, traceback.walk_stack(frame)) if not line.startswith("threading.py")][::-1]
        if thread is threading.main_thread() or any(line.startswith("ridgeline/") for line in lines):
            found[thread.name[:TEXT]] = lines[-FRAMES:]
    return found


def _line(place: tuple[types.FrameType, int]) -> str:
    frame, number = place
    return f"{_module(frame.f_code.co_filename)}:{number} {frame.f_code.co_name}"[-TEXT:]


def _module(path: str) -> str:
    """Return a file's path without the directory that it is installed in."""
    if Path(path).is_relative_to(PACKAGE):
        return f"ridgeline/{Path(path).relative_to(PACKAGE)}"
    return path.rpartition("site-packages/")[2].removeprefix(f"{sysconfig.get_path('stdlib')}/")


def suspects(positions: Mapping[int, Position | None]) -> tuple[list[int], str]:
    """Return the processes that the others wait for, and why; [] where no process differs from the others."""
    silent = [process for process, position in positions.items() if position is None]
    if silent:
        return silent, "does not answer: it is stopped, holds Python's lock, or its machine is lost"
    answers = {process: position for process, position in positions.items() if position is not None}
    working = [process for process, position in answers.items() if not position.waits]
    if working and len(working) < len(answers):
        return working, "does not wait for the others"
    newest = max(position.begun for position in answers.values())
    late = [process for process, position in answers.items() if position.begun < newest]
    if late:
        return late, f"has not begun the step of the others ({newest})"
    newest = max(position.step for position in answers.values())
    behind = [process for process, position in answers.items() if position.step < newest]
    if behind:
        return behind, f"has finished fewer steps than the others ({newest})"
    blocked = [process for process, position in answers.items() if position.files]
    if blocked and len(blocked) < len(answers):
        return blocked, "waits for a file, unlike the others"
    outside = [process for process, position in answers.items() if position.collective is None]
    if outside and len(outside) < len(answers):
        return outside, "is in no collective, unlike the others"
    return [], ""


def report_text(
    positions: Mapping[int, Position | None], names: Mapping[int, str], hlo_text: str | None, mesh_shape: Mapping[str, int]
) -> str:
    """Return the report: the suspect, the collective that waits, what each process does, and the stacks, equal ones once.

    positions: process -> what it was doing, None where it did not answer; names: of processes, with their machine; hlo_text: the compiled
    step, None before there is one.
    """
    found, why = suspects(positions)
    lines = [_verdict(positions, names, found, why)]
    listed = [] if hlo_text is None or len(positions) == 1 else _collectives(hlo_text, mesh_shape)
    if waits := _waits(positions, names, listed):
        lines += waits
    elif listed:
        waiting = [process for process in positions if process not in found]
        rest = f"; {_list(waiting, names)} {_verb(waiting)} there or in a later one" if waiting else ""
        lines.append(f"the first collective of a step is {_described(listed[0])}{rest}{_not_reached(positions, names)}")
    groups: dict[tuple[Any, ...], list[int]] = {}
    for process, position in sorted(positions.items()):
        groups.setdefault(_key(position), []).append(process)
    for processes in groups.values():
        position = positions[processes[0]]
        lines.append(f"\n{_list(processes, names)}" + (" (suspect)" if set(processes) & set(found) else ""))
        if position is None:
            lines.append("  no answer")
            continue
        lines.append(f"  after step {position.step}, in {position.phase}, without progress for {position.silent_s:.0f} s")
        lines += [f"  waits for {outside}" for outside in position.outside]
        for name, frames in position.threads.items():
            lines += [f"  {name}", *(f"    {frame}" for frame in frames)]
    return "\n".join(lines) + "\n"


def _collectives(hlo_text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    try:
        return collectives(hlo_text, mesh_shape)
    except ValueError:  # one in a form that is not read
        return []


def _described(one: Collective) -> str:
    """Return kind, name, axes, bytes and line of Python."""
    over = "" if one.axes is None else f" over {', '.join(one.axes)}"
    where = f", {one.source.file}:{one.source.line}" if one.source is not None else ""
    return f"{one.kind} {one.name}{over}, {format_bytes(one.bytes)}{where}"


def _waits(positions: Mapping[int, Position | None], names: Mapping[int, str], listed: Sequence[Collective]) -> list[str]:
    """Return a line for each collective that processes wait in, and which processes are not in it, with what is known of them."""
    groups: dict[str, list[int]] = {}
    for process, position in sorted(positions.items()):
        if position is not None and position.collective is not None:
            groups.setdefault(position.collective, []).append(process)
    lines = []
    for name, processes in groups.items():
        kind, _, instruction = name.partition(" ")
        numbers = [number for number, one in enumerate(listed) if one.kind == kind and instruction in ("", one.name)]
        if len(numbers) == 1:
            one = listed[numbers[0]]
            what = f"{_described(one)} (number {numbers[0] + 1} of {len(listed)} of the step{', in a loop' if one.count > 1 else ''})"
        elif numbers and not instruction:
            shown = "; ".join(_described(listed[number]) for number in numbers[:CANDIDATES])
            more = f" and {len(numbers) - CANDIDATES} more" if len(numbers) > CANDIDATES else ""
            what = f"{kind}, one of {len(numbers)} of the step: {shown}{more}"
        else:
            what = f"{name}{', which is not of the step' if listed else ''}"
        others = [process for process in positions if process not in processes]
        lines.append(f"{_list(processes, names)} {_verb(processes)} in {what}{_absent(others, processes, positions, names)}")
    return lines


def _absent(others: Sequence[int], there: Sequence[int], positions: Mapping[int, Position | None], names: Mapping[int, str]) -> str:
    """Say of the processes that are not in a collective what is known: it is not reached, or they are elsewhere."""
    begun = min(position.begun for process in there if (position := positions[process]) is not None)
    late = {process: position.begun for process in others if (position := positions[process]) is not None and position.begun < begun}
    silent = [process for process in others if positions[process] is None]
    parts = (
        []
        if not late
        else [f"not reached by {_list([*late], names)}, which {_verb([*late], 'has', 'have')} not begun step {max(late.values()) + 1}"]
    )
    parts += [] if not silent else [f"unknown of {_list(silent, names)}"]
    rest = [process for process in others if process not in (*late, *silent)]
    parts += [] if not rest else [f"{_list(rest, names)} {_verb(rest, 'is', 'are')} not in it"]
    return "".join(f"; {part}" for part in parts)


def _key(position: Position | None) -> tuple[Any, ...]:
    """Return what is equal for processes that do the same."""
    if position is None:
        return ()
    stacks = tuple((name, *frames) for name, frames in position.threads.items())
    return position.step, position.begun, position.phase, position.collective, tuple(position.outside), stacks


def _verdict(positions: Mapping[int, Position | None], names: Mapping[int, str], found: list[int], why: str) -> str:
    answers = {process: position for process, position in positions.items() if position is not None}
    outside = dict.fromkeys(name for process in found or answers if process in answers for name in answers[process].outside)
    waits = "; ".join(list(outside)[:OUTSIDE])
    if found:
        return f"suspect: {_list(found, names)}, which {why}" + (f", and waits for {waits}" if waits else "")
    if waits:
        waiting = [process for process, position in answers.items() if position.outside]
        return f"suspect: {waits}, for which {_list(waiting, names)} {_verb(waiting)}"
    if len(positions) == 1:
        return "suspect: none, there is one process"
    return "suspect: none, all processes do the same: a collective, a kernel, or a file system that all use"


def _not_reached(positions: Mapping[int, Position | None], names: Mapping[int, str]) -> str:
    """Say which processes have begun fewer steps than the others, and the first one whose collectives they have not reached."""
    begun = {process: position.begun for process, position in positions.items() if position is not None}
    newest = max(begun.values(), default=0)
    late = [process for process, step in begun.items() if step < newest]
    return f"; in step {max(begun[process] for process in late) + 1} not reached by {_list(late, names)}" if late else ""


def _verb(processes: Sequence[int], one: str = "waits", several: str = "wait") -> str:
    return one if len(processes) == 1 else several


def _list(processes: Sequence[int], names: Mapping[int, str], most: int = 16) -> str:
    """Name processes, by their machines where these are few."""
    named = ", ".join(names.get(process, f"process {process}") for process in processes[:most])
    return named + (f" and {len(processes) - most} more" if len(processes) > most else "")
