"""Memory of the programs of a profile: by use, at the peak, and over the schedule."""

from __future__ import annotations

from ridgeline.explain.trace.program import Program, Programs
from ridgeline.hlo.module import UNKNOWN
from ridgeline.rundir.analysis_memory import LiveBuffer, ProgramMemory

LARGEST, POINTS = 5, 100


def memory(programs: Programs) -> list[ProgramMemory]:
    """Return the memory of every program whose buffer assignment is known, the largest peak first."""
    found = [_one(programs.label(key), program) for key, program in programs.by_key.items() if program.memory is not None]
    return sorted((each for each in found if each is not None), key=lambda each: -each.peak_bytes)


def _one(label: str, program: Program) -> ProgramMemory | None:
    assigned = program.memory
    if assigned is None:
        return None
    at, peak = assigned.peak
    size = max(1, -(-len(assigned.timeline) // POINTS))
    stretches = [assigned.timeline[i : i + size] for i in range(0, len(assigned.timeline), size)]
    return ProgramMemory(
        module=label,
        arguments_bytes=assigned.arguments,
        outputs_bytes=assigned.outputs,
        constants_bytes=assigned.constants,
        temporaries_bytes=assigned.temporaries,
        peak_bytes=peak,
        peak_at=_live(program, at, peak - assigned.fixed),
        largest=[_live(program, *entry) for entry in assigned.at_peak[:LARGEST]],
        timeline=[_live(program, *max(stretch, key=lambda entry: entry[1])) for stretch in stretches],
    )


def _live(program: Program, instruction: str, size: int) -> LiveBuffer:
    kernel = program.kernels.get(instruction)
    return LiveBuffer(instruction, "other" if kernel is None else kernel.component, UNKNOWN if kernel is None else kernel.part, size)
