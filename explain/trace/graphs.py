"""Kernels of CUDA graphs and the instructions they belong to.

XLA runs stretches of a schedule as CUDA graphs (command buffers), also while profiling. The trace names each of their kernels, but as the
instruction of all of them the graph: `command_buffer_14`. A graph launches its kernels in the order of the schedule, fusions under their
own names, so the kernels of one launch are aligned with the instructions of the computation that they fit best. Kernels of libraries
(cuBLAS, cuDNN, CUB, NCCL) and copies fit calls of that library and instructions that copy. A kernel that fits nothing keeps the name of the
graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.explain.trace.program import Program, Programs
from ridgeline.explain.trace.read import Host, Ops
from ridgeline.explain.trace.wire import MISSING
from ridgeline.hlo.module import Instruction, Module

_GRAPH = re.compile(r"command_buffer(_\d+)?$")
_MEMSET = re.compile(r"memset", re.I)
_MEMCPY = re.compile(r"memcpy", re.I)
_SORT = re.compile(r"sort(_\d+)*$")
_LIBRARIES = {
    "cudnn": re.compile(r"cudnn|fmha|sdpa", re.I),
    "cublas": re.compile(r"nvjet|cublas|cutlass|gemm|gemv|splitk|xmma|dot_kernel|reduce_1Block", re.I),
    "cub_": re.compile(r"cub::", re.I),
}
"""Part of the target of a custom call -> its kernels."""
_SECOND = re.compile(r"splitk\w*reduce|reduce_1Block", re.I)
"""Kernels of cuBLAS that follow another one of the same call."""
_COLLECTIVES = {
    "all-reduce": "allreduce",
    "all-gather": "allgather",
    "reduce-scatter": "reducescatter",
    "collective-broadcast": "broadcast",
    **dict.fromkeys(("all-to-all", "ragged-all-to-all", "collective-permute", "send", "recv"), "sendrecv"),
}
"""Opcode -> part of the name of NCCL's kernel, in lower case."""
_WITHOUT_WORK = re.compile(
    r"(parameter|constant|get-tuple-element|tuple|bitcast|while|conditional|call|after-all|opt-barrier|partition-id|replica-id|.*-done)$"
)
EXACT, SHARED, ALIKE, KIND = 5.0, 4.75, 4.0, 3.5
"""Score of a kernel on an instruction: of its name; of an equal one's, whose kernel XLA uses for both; of its name but for the number; of
its kind. A kernel without an instruction: 0."""
GOES_ON = 3.2
"""Score of a further kernel of the same call: less than of its first one, but not by as much as leaving out an instruction costs."""
LEFT_OUT, LEFT_OUT_COPY = 0.5, 0.1
"""Cost of an instruction with work that no kernel is given to, and of one that may launch nothing."""


def name_instructions(host: Host, programs: Programs) -> None:
    """Give the kernels of CUDA graphs the names of their instructions, in the operations of the host's devices."""
    graphs = [number for number, text in enumerate(host.strings) if _GRAPH.match(text)]
    numbers = {text: number for number, text in enumerate(host.strings)} if graphs else {}
    known: dict[int, list[Schedule]] = {}
    for device in host.devices:
        ops = device.ops
        for number in graphs:
            mine = np.flatnonzero(ops.op == number)
            for module, program_id in np.unique(np.stack([ops.module[mine], ops.program[mine]]), axis=1).T.tolist():
                program = programs.find(host.program_key(module, program_id))
                if program is not None:
                    rows = mine[(ops.module[mine] == module) & (ops.program[mine] == program_id)]
                    _name(ops, rows, host.strings, numbers, _schedules_of(program, known))


def _schedules_of(program: Program, known: dict[int, list[Schedule]]) -> list[Schedule]:
    if id(program) not in known:
        known[id(program)] = list(schedules(program.module))
    return known[id(program)]


def _name(ops: Ops, rows: np.ndarray, strings: list[str], numbers: dict[str, int], candidates: Sequence[Schedule]) -> None:
    """Rewrite `ops.op` of the kernels of one graph. Launches with the same kernels are aligned once."""
    order = rows[np.argsort(ops.correlation[rows], kind="stable")]  # in a launch by their start
    launches = np.split(order, np.flatnonzero(np.diff(ops.correlation[order])) + 1)
    found: dict[bytes, np.ndarray] = {}
    for launch in launches:
        names = ops.name[launch]
        if (key := names.tobytes()) not in found:
            instructions = align([strings[name] for name in names.tolist()], candidates)
            for name in instructions:
                if name is not None and name not in numbers:
                    numbers[name] = len(strings)
                    strings.append(name)
            found[key] = np.array([MISSING if name is None else numbers[name] for name in instructions], np.int64)
        known = found[key] != MISSING
        ops.op[launch[known]] = found[key][known]


def align(kernels: Sequence[str], candidates: Sequence[Schedule]) -> list[str | None]:
    """Return the instruction of each kernel of a launch, in order; None: no instruction fits it."""
    ahead = _ahead(kernels)
    work = [kernel for kernel, with_next in zip(kernels, ahead, strict=True) if not with_next]
    _, best = max((schedule.align(work) for schedule in candidates), key=lambda found: found[0], default=(0.0, [None] * len(work)))
    return [best[index] for index in np.cumsum([0, *(not with_next for with_next in ahead)])[:-1].tolist()]


def _ahead(kernels: Sequence[str]) -> list[bool]:
    """Whether each kernel belongs to the instruction of the next one: the memset before a kernel of a library, which clears its workspace
    (CUB: several), and copies before a sort, which sorts in place."""
    found = [False] * len(kernels)
    leader = len(kernels) - 1
    for at in range(len(kernels) - 2, -1, -1):
        kernel, target = kernels[at], kernels[leader]
        if _MEMSET.match(kernel):
            followed = leader == at + 1 and any(library.search(target) for library in _LIBRARIES.values())
            found[at] = followed or _LIBRARIES["cub_"].search(target) is not None
        elif _MEMCPY.match(kernel):
            found[at] = _SORT.match(target) is not None
        if not found[at]:
            leader = at
    return found


@dataclass(frozen=True)
class _Candidate:
    """An instruction with work, and what its kernels may be called."""

    instruction: Instruction
    names: frozenset[str]
    """Of its kernel, if it has one of its own."""
    shared: str
    """What it and equal instructions have in common; '' without any."""
    written: frozenset[str]
    """Names of kernels in the configuration of a custom call, as those of Pallas have."""
    kinds: frozenset[str]
    """What it does, as `_kinds` of a kernel: parts of _LIBRARIES and _COLLECTIVES, copy, fill."""
    several: bool
    """Whether it may launch several kernels."""

    @property
    def may_vanish(self) -> bool:
        """Whether it may launch nothing: copies that became unnecessary, results without elements."""
        own = self.instruction
        return "copy" in self.kinds or own.opcode in ("iota", "broadcast", "rng-bit-generator") or not own.bytes


def _kinds(kernel: str) -> set[str]:
    """Return what a kernel does, as far as its name shows it."""
    found = {name for name, library in _LIBRARIES.items() if library.search(kernel)}
    if kernel.lower().startswith("nccl"):
        found |= {part for part in _COLLECTIVES.values() if part in kernel.lower()}
    return found | {kind for kind, pattern in (("copy", _MEMCPY), ("fill", _MEMSET)) if pattern.match(kernel)}


class Schedule:
    """The instructions with work of one computation, in order."""

    def __init__(self, candidates: Sequence[_Candidate], shared: Mapping[str, str]) -> None:
        """`shared`: name of a kernel -> `_Candidate.shared` of the instructions whose kernel it may be."""
        self._candidates = candidates
        self._shared = shared
        self._by_name = _positions(candidates, lambda c: c.names)
        self._by_shared = _positions(candidates, lambda c: {c.shared})
        self._by_plain = _positions(candidates, lambda c: c.written | {_plain(name) for name in c.names})
        self._by_kind = _positions(candidates, lambda c: c.kinds)
        self._several = np.array([c.several for c in candidates], bool)
        self._skipped = np.cumsum([LEFT_OUT_COPY if c.may_vanish else LEFT_OUT for c in candidates])
        self._fits: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def fits(self, kernel: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the instructions that a kernel fits, ascending, and its scores: int64 and float64 [n]."""
        if kernel not in self._fits:
            name = _kernel(kernel)
            scores = {at: KIND for kind in _kinds(kernel) for at in self._by_kind.get(kind, ())}
            scores |= dict.fromkeys(self._by_plain.get(_plain(name), ()), ALIKE)
            scores |= dict.fromkeys(self._by_shared.get(self._shared.get(name, "-"), ()), SHARED)
            scores |= dict.fromkeys(self._by_name.get(name, ()), EXACT)
            where = np.array(sorted(scores), np.int64)
            self._fits[kernel] = where, np.array([scores[at] for at in where.tolist()])
        return self._fits[kernel]

    def align(self, kernels: Sequence[str]) -> tuple[float, list[str | None]]:
        """Return the best score and the instructions. A kernel with one goes to the instruction of the one before it or to a later one."""
        best = np.full(len(self._candidates), -np.inf)  # the last kernel with an instruction is at this one
        steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # positions, those of the kernel before (-1: none), whether it is named
        for kernel in kernels:
            where, scores = self.fits(kernel)
            goes_on = EXACT if _SECOND.search(kernel) else GOES_ON
            leader = np.maximum.accumulate(best + self._skipped)
            before = np.maximum(where - 1, 0)
            come = np.where(where > 0, leader[before] - self._skipped[before], -np.inf)
            first = np.where(come > 0, np.searchsorted(leader, leader[before]), -1)
            moves, stays = np.maximum(come, 0.0) + scores, best[where] + np.where(self._several[where], goes_on, -np.inf)
            named = np.maximum(moves, stays) > best[where]
            steps.append((where, np.where(named & (moves >= stays), first, where), named))
            best[where] = np.maximum(best[where], np.maximum(moves, stays))
        at = int(best.argmax())
        score, found = float(best[at]), list[str | None]()
        if score == -np.inf:
            return 0.0, [None] * len(kernels)
        for where, previous, named in reversed(steps):
            index = int(np.searchsorted(where, at)) if at >= 0 else len(where)
            here = index < len(where) and where[index] == at
            found.append(self._candidates[at].instruction.name if here and named[index] else None)
            at = int(previous[index]) if here else at
        return score, found[::-1]


def schedules(module: Module) -> Iterator[Schedule]:
    """Yield each computation that is scheduled and has work: the entry, bodies of loops, branches."""
    shared: dict[str, str] = {}
    for _, instruction in module.instructions():
        if key := instruction.deduplicated_name:
            shared[_kernel(key)] = shared[_kernel(instruction.name)] = key
    pending, seen = [module.entry], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        instructions = module.computations[name].instructions
        for instruction in instructions:
            if instruction.opcode in ("while", "conditional", "call"):
                pending.extend(instruction.called)
        if found := [_candidate(module, i) for i in instructions if not _WITHOUT_WORK.match(i.opcode)]:
            yield Schedule(found, shared)


def _candidate(module: Module, instruction: Instruction) -> _Candidate:
    attributes = instruction.attributes
    roots = [module.computations[name].instructions[-1] for name in instruction.called if name in module.computations]
    called = instruction.opcode == "custom-call" or "kind=kCustom" in attributes
    target = re.search(r'custom_call_target="([^"]*)"|"kind":"(__cudnn[^"]*)"', attributes)
    written = re.findall(r'\bname = \\?"([^"\\]+)|"name":"([^"\\]+)', attributes) if called else []
    opcodes = {i.opcode.removesuffix("-start") for i in (instruction, *roots)}
    kinds = {_COLLECTIVES[opcode] for opcode in opcodes if opcode in _COLLECTIVES}
    kinds |= {name for name in _LIBRARIES if target is not None and name in target[0]}
    kinds |= {"copy"} if opcodes & {"copy", "dynamic-slice", "dynamic-update-slice", "bitcast"} else set()
    kinds |= {"fill"} if opcodes & {"broadcast", "constant"} else set()
    return _Candidate(
        instruction,
        names=frozenset(_kernel(name) for name in (instruction.name, *(i.name for i in roots if i.opcode == "sort"))),
        shared=instruction.deduplicated_name,
        written=frozenset(_plain(_kernel(name)) for names in written for name in names if name),
        kinds=frozenset(kinds),
        several=instruction.opcode == "custom-call" or bool(kinds & _LIBRARIES.keys()) or "sort" in opcodes,
    )


def _positions(candidates: Sequence[_Candidate], names: Callable[[_Candidate], Collection[str]]) -> dict[str, list[int]]:
    """Return name -> positions of the instructions whose kernels may have it, ascending."""
    found: dict[str, list[int]] = {}
    for at, candidate in enumerate(candidates):
        for name in names(candidate):
            found.setdefault(name, []).append(at)
    return found


def _kernel(name: str) -> str:
    """Return the name of the kernel of an instruction."""
    return re.sub(r"[.\-]", "_", name)


def _plain(name: str) -> str:
    """Return a name without the number at its end."""
    return re.sub(r"[_.]+\d+$", "", name)
