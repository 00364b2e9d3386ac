"""Read the text of a compiled HLO module (`compiled.as_text()`), of the CPU or the GPU backend.

A module is computations of instructions in scheduled order. A computation runs as often as its callers make it: the body of a `while`
with a known trip count (a scan over layers) counts that many times, so per-layer work is counted once per layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from ridgeline.hlo.loops import derived_trip_count

BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "f4e2m1fn": 4, "bf16": 16, "c64": 64, "c128": 128}
"""Bits per element of dtypes whose name does not end in them at once (`f32`, `s8`, `f8e4m3fn` do)."""


@dataclass(frozen=True)
class Shape:
    """One array: dtype as HLO writes it (`f32`, `bf16`, `s32`, `pred`) and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        return math.prod(self.dims) * _bits(self.dtype) // 8


@dataclass(frozen=True)
class Source:
    """A line of Python: the innermost frame XLA kept for an instruction."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Instruction:
    """One instruction; `shapes` flattens tuples."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    """Everything after the operand list, as written."""
    parameter_number: int | None = None
    """Of a `parameter`."""
    constant: int | None = None
    """Of a `constant` that is one integer."""
    derived_trip_count: int | None = None
    """Of a `while` whose trip count XLA does not say, but its counter does (hlo.loops)."""
    in_host_memory: bool = False
    """Whether a part of the result lies in host memory."""

    @property
    def bytes(self) -> int:
        """Bytes of the result, all tuple elements together."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """The path of jax transformations, named scopes and primitive, or '' where XLA kept none."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations this instruction runs (condition and body of a while, a fusion's, a branch's, ...)."""
        lists = re.findall(r"(?:calls|branch_computations|called_computations)=\{([^}]*)\}", self.attributes)
        single = re.findall(
            r"(?:to_apply|calls|condition|body|true_computation|false_computation|async_execution)=%?([\w.\-]+)", self.attributes
        )
        return tuple(single) + tuple(name.strip().lstrip("%") for names in lists for name in names.split(",") if name.strip())

    @property
    def trip_count(self) -> int | None:
        """Iterations of a while, when XLA or its counter tells them."""
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else self.derived_trip_count

    def attribute(self, name: str) -> str | None:
        """Return a plain attribute such as `channel_id` or `kind`."""
        found = re.search(rf"(?:^|, ){name}=([^,\s]+)", self.attributes)
        return found.group(1) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Shapes of an instruction's operands, tuples flattened."""
        return tuple(shape for name in instruction.operands for shape in self.by_name[name].shapes)


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    name: str
    computations: dict[str, Computation]
    entry: str
    sources: dict[int, Source] = field(default_factory=dict)
    """stack_frame_id to source line."""

    @cached_property
    def runs(self) -> dict[str, float]:
        """Computation name to how often it runs per call of the module.

        A while of unknown trip count counts once and is named in `unknown_loops`; every branch of a conditional counts once.
        """
        runs = dict.fromkeys(self.computations, 0.0)
        for name in self._callers_first():
            times = 1.0 if name == self.entry else runs[name]
            runs[name] = times
            for instruction in self.computations[name].instructions:
                for callee in instruction.called:
                    loops = (instruction.trip_count or 1) if instruction.opcode == "while" else 1
                    runs[callee] += times * loops
        return runs

    @property
    def unknown_loops(self) -> list[str]:
        """Names of while instructions whose trip count nothing tells."""
        return [i.name for _, i in self.instructions() if i.opcode == "while" and i.trip_count is None]

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction with its computation."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction

    def source(self, instruction: Instruction) -> Source | None:
        """The line of Python an instruction came from, when XLA kept it."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        if direct:
            return Source(direct.group(1), int(direct.group(2)), "")
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.sources.get(int(frame.group(1))) if frame else None

    def largest(self, count: int = 10) -> list[Instruction]:
        """The instructions with the largest single array results outside fusions: what the buffers are made of."""
        fused = {callee for _, i in self.instructions() if i.opcode in ("fusion", "reduce", "all-reduce") for callee in i.called}
        outside = [i for c, i in self.instructions() if c.name not in fused and i.shapes]
        return sorted(outside, key=lambda i: max(shape.bytes for shape in i.shapes), reverse=True)[:count]

    def _callers_first(self) -> list[str]:
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name in seen:
                return
            seen.add(name)
            for instruction in self.computations[name].instructions:
                for callee in instruction.called:
                    visit(callee)
            order.append(name)

        visit(self.entry)
        return order[::-1]


def scope(op_name: str, known: tuple[str, ...] = ("embed", "attention", "mlp", "norm", "unembed", "loss", "optimizer")) -> str | None:
    """Return the innermost known `jax.named_scope` in an op_name path (the name of a jitted function is none)."""
    parts = re.split(r"[/()]", re.sub(r"\bjit\([^()]*\)", "", op_name))
    return next((part for part in reversed(parts) if part in known), None)


def is_backward(op_name: str) -> bool:
    """Say whether an op_name belongs to the transposed (backward) part of a differentiated function."""
    return "transpose(" in op_name


def part_of(op_name: str) -> str:
    """Return forward, backward, recompute or update (everything outside a differentiated function), from an operation's path."""
    if "rematted_computation" in op_name:
        return "recompute"
    if is_backward(op_name):
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


def parse(text: str) -> Module:
    """Parse the text of a compiled module. Raises ValueError when it holds no entry computation."""
    computations: dict[str, Computation] = {}
    entry = ""
    name, body = "", None  # type: tuple[str, list[Instruction] | None]
    for line in text.splitlines():
        if body is None:
            header = _HEADER.match(line)
            if header:
                name, body = header.group("name"), []
                entry = name if header.group("entry") else entry
        elif line.startswith("}"):
            computations[name], body = Computation(name, tuple(body)), None
        else:
            instruction = _instruction(line)
            if instruction:
                body.append(instruction)
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    title = re.match(r"HloModule ([^,\s]+)", text)
    return Module(title.group(1) if title else "", _counted(computations), entry, _sources(text))


def _counted(computations: dict[str, Computation]) -> dict[str, Computation]:
    """Add the trip counts that only the counters of loops tell."""
    result = dict(computations)
    for computation in computations.values():
        if any(i.opcode == "while" and i.trip_count is None for i in computation.instructions):
            result[computation.name] = Computation(
                computation.name,
                tuple(
                    replace(i, derived_trip_count=derived_trip_count(computations, computation, i))
                    if i.opcode == "while" and i.trip_count is None
                    else i
                    for i in computation.instructions
                ),
            )
    return result


HOST_MEMORY = ":S(5)}"
"""Memory space 5 in the layout of a shape (xla/service/memory_annotations.h, xla/layout.h)."""
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[((?:<?=?\d+,?)*)\]")
_HEAD = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    shapes = tuple(Shape(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", line[start:end])))
    arguments = line[opcode.end() : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments)) if opcode.group("opcode") not in ("constant", "parameter") else ()
    number = int(arguments) if opcode.group("opcode") == "parameter" and arguments.isdigit() else None
    constant = int(arguments) if opcode.group("opcode") == "constant" and re.fullmatch(r"-?\d+", arguments) else None
    on_host = HOST_MEMORY in line[start:end]
    return Instruction(
        head.group("name"), opcode.group("opcode"), shapes, operands, line[close + 1 :], number, constant, in_host_memory=on_host
    )


def _closing(line: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(line)):
        depth += {"(": 1, ")": -1}.get(line[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in HLO line: {line.strip()[:120]}")


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(dim.strip("<=")) for dim in text.split(",") if dim)


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if not digits:
        raise ValueError(f"unknown HLO dtype '{dtype}'")
    return int(digits.group(1))


def _sources(text: str) -> dict[int, Source]:
    """Resolve the tables FileNames, FunctionNames, FileLocations and StackFrames at the head of the module."""
    files = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M)}
    functions = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FunctionNames"), re.M)}
    places = {
        int(n): Source(files.get(int(f), ""), int(line), functions.get(int(fn), ""))
        for n, f, fn, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", _table(text, "FileLocations"), re.M
        )
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M)
    return {int(n): places[int(place)] for n, place in frames if int(place) in places}


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
    return found.group(1) if found else ""
