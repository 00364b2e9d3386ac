"""Simulation of a compiled step's schedule on three streams (compute, communication, host copies): overlapped and exposed time.

Kernels run one after another in scheduled order. A collective runs after its start instruction and after the previous collective; at its
done instruction the compute stream waits for it. A collective that is not split into start and done blocks both streams. Copies between
device and host memory run in the same way on a third stream. Loop bodies are simulated once and repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ridgeline.hlo.collectives import Collective
from ridgeline.hlo.module import Computation, Instruction, Module
from ridgeline.hlo.roofline import Kernel

HOST_COPY = "host copy"


@dataclass
class Schedule:
    """Times of one step on one device."""

    step_s: float = 0.0
    """The whole step."""
    compute_s: float = 0.0
    """All kernels."""
    communication_s: float = 0.0
    """All collectives, overlapped or not."""
    exposed_s: float = 0.0
    """Time the compute stream waits for collectives and host copies."""
    exposed: dict[tuple[str, tuple[str, ...] | None], float] = field(default_factory=lambda: defaultdict(float))
    """Exposed time by (kind, axes); host copies are (HOST_COPY, None)."""

    def add(self, other: Schedule, times: float) -> None:
        """Append another schedule, repeated."""
        self.step_s += other.step_s * times
        self.compute_s += other.compute_s * times
        self.communication_s += other.communication_s * times
        self.exposed_s += other.exposed_s * times
        for key, value in other.exposed.items():
            self.exposed[key] += value * times


def simulate(
    module: Module,
    kernels: Sequence[Kernel],
    collectives: Sequence[Collective],
    kernel_s: Callable[[Kernel], float],
    collective_s: Callable[[Collective], float],
) -> Schedule:
    """Simulate the entry computation.

    Args:
      module: the compiled module; its text order is its schedule.
      kernels: of the module (hlo.roofline.kernels).
      collectives: of the module (hlo.collectives.collectives).
      kernel_s: time of one execution of a kernel.
      collective_s: time of one execution of a collective.
    """
    copies = {k.name for k in kernels if k.host_copy}
    simulator = _Simulator(module, {k.name: kernel_s(k) for k in kernels}, {c.name: c for c in collectives}, collective_s, copies)
    return simulator.run(module.computations[module.entry])


class _Simulator:
    def __init__(
        self,
        module: Module,
        kernel_s: dict[str, float],
        collectives: dict[str, Collective],
        collective_s: Callable[[Collective], float],
        copies: set[str],
    ) -> None:
        self.module, self.kernel_s, self.collectives, self.collective_s = module, kernel_s, collectives, collective_s
        self.copies = copies
        self._simulated: dict[str, Schedule] = {}

    def run(self, computation: Computation) -> Schedule:
        """Simulate one computation, starting with idle streams."""
        if computation.name in self._simulated:
            return self._simulated[computation.name]
        schedule = Schedule()
        now_s = busy_until_s = copying_until_s = 0.0
        ends: dict[str, tuple[float, tuple[str, tuple[str, ...] | None]]] = {}
        for instruction in computation.instructions:
            collective = self.collectives.get(instruction.name)
            if collective is not None:
                duration_s = self.collective_s(collective)
                schedule.communication_s += duration_s
                busy_until_s = max(now_s, busy_until_s) + duration_s
                ends[instruction.name] = busy_until_s, (collective.kind, collective.axes)
                if not collective.asynchronous:
                    now_s = self._wait(schedule, now_s, *ends[instruction.name])
            elif instruction.name in self.copies:
                copying_until_s = max(now_s, copying_until_s) + self.kernel_s[instruction.name]
                ends[instruction.name] = copying_until_s, (HOST_COPY, None)
            elif instruction.opcode.endswith("-done") and instruction.operands and instruction.operands[0] in ends:
                now_s = self._wait(schedule, now_s, *ends[instruction.operands[0]])
            elif instruction.opcode in ("while", "call", "conditional"):
                before_s = schedule.step_s
                for name, times in self._bodies(instruction):
                    schedule.add(self.run(self.module.computations[name]), times)
                now_s += schedule.step_s - before_s
                schedule.step_s = before_s
            else:
                duration_s = self.kernel_s.get(instruction.name, 0.0)
                schedule.compute_s += duration_s
                now_s += duration_s
        schedule.step_s = now_s
        self._simulated[computation.name] = schedule
        return schedule

    def _bodies(self, instruction: Instruction) -> list[tuple[str, float]]:
        return [(name, float(instruction.repeats)) for name in instruction.called if name in self.module.computations]

    @staticmethod
    def _wait(schedule: Schedule, now_s: float, end_s: float, what: tuple[str, tuple[str, ...] | None]) -> float:
        waited_s = max(0.0, end_s - now_s)
        schedule.exposed_s += waited_s
        schedule.exposed[what] += waited_s
        return max(now_s, end_s)
