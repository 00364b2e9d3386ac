"""The compiled programs of a profile: opcodes, kernels with FLOPs and bytes, collectives with their groups, by instruction.

Their HLO is in the trace itself (plane `/host:metadata`, one HloProto per `program_id`) and, for the step of a run, as text beside it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular, read_limited
from ridgeline.explain.trace.read import Host, ProgramKey
from ridgeline.hlo.collectives import Collective, collectives, replica_groups
from ridgeline.hlo.memory import ProgramMemory, read_memory
from ridgeline.hlo.module import Instruction, Module
from ridgeline.hlo.parse import parse
from ridgeline.hlo.proto import instruction_names, module_name, read_module
from ridgeline.hlo.roofline import Kernel, kernels

HLO_SUFFIX = ".hlo.txt"
MAX_HLO_BYTES = 1 << 30
"""Largest text of a compiled program that is read."""


@dataclass
class Program:
    """One compiled module."""

    module: Module
    num_devices: int
    mesh: Mapping[str, int] | None
    """Axis -> size in mesh order; None when unknown."""
    memory: ProgramMemory | None = None
    """None where the profile has no buffer assignment."""

    @cached_property
    def opcodes(self) -> dict[str, str]:
        """Instruction -> opcode; for an asynchronous wrapper or a fused collective, the opcode of the collective."""
        found: dict[str, str] = {}
        for _, instruction in self.module.instructions():
            opcode = instruction.opcode
            if opcode in ("async-start", "async-update", "async-done", "fusion"):
                inner = [i.opcode for name in instruction.called if name in self.module.computations for i in _body(self.module, name)]
                opcode = next((code for code in inner if is_collective(code)), opcode)
                if "__triton_collective" in instruction.attributes:
                    opcode = "all-reduce"
            found[instruction.name] = opcode
        return found

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        """Instruction -> kernel."""
        return {kernel.name: kernel for kernel in kernels(self.module)}

    @cached_property
    def collectives(self) -> dict[str, Collective]:
        """Instruction -> collective. Without a known mesh there is one axis, `devices`, of all of them."""
        return {c.name: c for c in collectives(self.module, self.mesh or {"devices": self.num_devices})}

    @cached_property
    def groups(self) -> dict[str, np.ndarray]:
        """Instruction -> replica groups, int [groups, members]; without permutes and groups that cannot be parsed."""
        found: dict[str, np.ndarray] = {}
        for _, instruction in self.module.instructions():
            if instruction.name in self.collectives and "replica_groups=" in instruction.attributes:
                groups = replica_groups(instruction.attributes, self.num_devices)
                if groups.size == self.num_devices:
                    found[instruction.name] = groups
        return found

    @cached_property
    def runs(self) -> dict[str, float]:
        """Instruction -> executions per run of the program, where they are certain: not in branches and loops of unknown length."""
        certain = self.module.certain
        return {i.name: self.module.runs[c.name] for c, i in self.module.instructions() if c.name in certain}

    @cached_property
    def live_bytes(self) -> dict[str, int]:
        """Instruction -> memory of the program while it runs, where its allocation is in the schedule; see ProgramMemory."""
        if self.memory is None:
            return {}
        found: dict[str, int] = {}
        for name, live in self.memory.timeline:
            found[name] = max(found.get(name, 0), self.memory.fixed + live)
        return found

    def read_all(self) -> None:
        """Compute everything. Raises what a damaged module raises."""
        for _ in (self.opcodes, self.kernels, self.collectives, self.groups, self.runs):
            pass


@dataclass
class Programs:
    """The modules of a profile."""

    by_key: dict[ProgramKey, Program] = field(default_factory=dict)
    several: frozenset[str] = frozenset()
    """Names that several programs of the profile have."""
    notes: list[str] = field(default_factory=list)

    def find(self, key: ProgramKey) -> Program | None:
        """Return a program; None when its HLO was not saved."""
        return self.by_key.get(key)

    def label(self, key: ProgramKey) -> str:
        """Return its name, with its id where several programs have the name: `jit_dot(16)`."""
        return f"{key.module}({key.program_id})" if key.module in self.several and key.program_id is not None else key.module


def read_programs(hosts: Sequence[Host], directory: Path, num_devices: int, mesh: Mapping[str, int] | None) -> Programs:
    """Read the programs that ran: from the traces, by their id, else from `<module>.hlo.txt` beside them.

    A module in a trace that cannot be read is left out with a note.

    Raises:
      UserError: an `<module>.hlo.txt` is damaged.
    """
    assert mesh is None or math.prod(mesh.values()) == num_devices, (mesh, num_devices)
    ran = {key for host in hosts for key in host.programs_run()}
    found = Programs(several=frozenset(name for name, count in Counter(key.module for key in ran).items() if name and count > 1))
    by_id = _in_traces(hosts, ran, num_devices, mesh, found.notes)
    found.by_key = {key: by_id[key.program_id] for key in ran if key.program_id in by_id}
    complete = {key.module for key in ran} - {key.module for key in ran - found.by_key.keys()}
    for path in sorted(directory.glob("*" + HLO_SUFFIX)):
        if (name := path.name.removesuffix(HLO_SUFFIX)) not in complete:
            program = _text(path, num_devices, mesh)
            found.by_key |= {key: program for key in ran if key.module == name and key not in found.by_key}
    return found


def _in_traces(
    hosts: Sequence[Host], ran: Iterable[ProgramKey], num_devices: int, mesh: Mapping[str, int] | None, notes: list[str]
) -> dict[int | None, Program]:
    """Return the modules in the traces by program id. Hosts of one run have the same programs: the first that has one is read.

    Some versions of XLA number the programs that ran and the saved modules apart (CPU, jax 0.12): a module of another name than the
    program's is not taken, and a program without a module takes the only other module of its name, if no other program could.
    """
    wanted = {key.program_id: key for key in ran}
    found: dict[int | None, Program] = {}
    for host in hosts:
        with open_regular(host.path) as file:

            def content(span: tuple[int, int], file: IO[bytes] = file) -> bytes:
                file.seek(span[0])
                return file.read(span[1] - span[0])

            def read(data: bytes, what: object) -> Program | None:
                try:
                    program = Program(read_module(data), num_devices, mesh, read_memory(data, instruction_names(data)))
                    program.read_all()
                except (ValueError, LookupError, RecursionError, StopIteration) as error:
                    notes.append(f"the HLO of {what} in the trace cannot be read ({error})")
                    return None
                return program

            others: list[tuple[int, int]] = []
            for own, span in host.modules.items():
                key = wanted.get(number := host.program_ids.get(own, own))
                data = b"" if key is None or number in found else content(span)
                if key is None or (data and key.module not in ("", _name(data) or key.module)):
                    others.append(span)
                elif data and (program := read(data, key.module or number)) is not None:
                    found[number] = program
            missing = Counter(key.module for number, key in wanted.items() if number not in found and key.module)
            named = [(span, _name(content(span))) for span in others] if missing else []
            for key in wanted.values():
                spans = [span for span, name in named if name == key.module]
                if key.program_id in found or not missing[key.module] == len(spans) == 1:
                    continue
                if (program := read(content(spans[0]), key.module)) is not None:
                    found[key.program_id] = program
    return found


def _name(data: bytes) -> str | None:
    """Return the name of a module; None for one that is damaged."""
    try:
        return module_name(data)
    except ValueError:
        return None


def _text(path: Path, num_devices: int, mesh: Mapping[str, int] | None) -> Program:
    try:
        return Program(parse(read_limited(path, MAX_HLO_BYTES).decode()), num_devices, mesh)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|send|recv|psum|ppermute)"
    r"(?![a-z])"
)
_CONTAINER = re.compile(r"(while|conditional|call)(?![a-z])")


def is_collective(opcode: str) -> bool:
    """Whether an opcode (or an instruction name with `-` for `_`) is a collective, send or receive, or the start or done of one."""
    return _COLLECTIVE.match(opcode) is not None


def is_container(opcode: str) -> bool:
    """Whether an operation only contains others, which the trace lists separately."""
    return _CONTAINER.match(opcode) is not None


def guessed_opcode(instruction: str) -> str:
    """Guess an opcode from an instruction's name: `all_gather.6` is an `all-gather`."""
    return re.sub(r"(\.\d+|\.clone)+$", "", instruction).replace("_", "-")


def _body(module: Module, computation: str) -> tuple[Instruction, ...]:
    return module.computations[computation].instructions
