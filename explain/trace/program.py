"""The compiled programs of a profile: opcodes, kernels with FLOPs and bytes, collectives with their groups, by instruction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.hlo.collectives import Collective, collectives, replica_groups
from ridgeline.hlo.module import Instruction, Module
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import Kernel, kernels

HLO_SUFFIX = ".hlo.txt"


@dataclass
class Program:
    """One compiled module."""

    module: Module
    num_devices: int
    mesh: Mapping[str, int] | None
    """Axis -> size in mesh order; None when unknown."""

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


@dataclass
class Programs:
    """The modules saved beside a profile, by name."""

    by_name: dict[str, Program] = field(default_factory=dict)

    def find(self, module: str) -> Program | None:
        """Return a module by its name in the trace; None when its HLO was not saved."""
        return self.by_name.get(module)


def read_programs(directory: Path, num_devices: int, mesh: Mapping[str, int] | None) -> Programs:
    """Read every `<module>.hlo.txt` beside a profile.

    Raises:
      UserError: a file is damaged.
    """
    found = Programs()
    assert mesh is None or math.prod(mesh.values()) == num_devices, (mesh, num_devices)
    for path in sorted(directory.glob("*" + HLO_SUFFIX)):
        try:
            module = parse(path.read_text())
        except (ValueError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        found.by_name[path.name.removesuffix(HLO_SUFFIX)] = Program(module, num_devices, mesh)
    return found


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
