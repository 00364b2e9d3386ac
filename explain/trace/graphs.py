"""Kernels of CUDA graphs and the instructions they belong to.

XLA runs stretches of a schedule as CUDA graphs (command buffers), also while profiling. The trace names each of their kernels, but as the
instruction of all of them the graph: `command_buffer_14`. A graph launches its kernels in the order of the schedule, fusions under their
own names, so the kernels of one launch are aligned with the instructions of the computation that they fit best. Kernels of libraries
(cuBLAS, cuDNN) and copies fit calls of that library and instructions that copy. A kernel that fits nothing keeps the name of the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.explain.trace.program import Program, Programs
from ridgeline.explain.trace.read import Host, Ops
from ridgeline.explain.trace.wire import MISSING
from ridgeline.hlo.module import Computation, Instruction, Module

_GRAPH = re.compile(r"command_buffer(_\d+)?$")
_MEMSET = re.compile(r"memset", re.I)
_MEMCPY = re.compile(r"memcpy", re.I)
_CUDNN = re.compile(r"cudnn|fmha|sdpa", re.I)
_CUBLAS = re.compile(r"nvjet|cublas|cutlass|gemm|gemv|splitk|xmma|dot_kernel|reduce_1Block", re.I)
_WITHOUT_WORK = re.compile(
    r"(parameter|constant|get-tuple-element|tuple|bitcast|while|conditional|call|after-all|opt-barrier|partition-id|replica-id|.*-done)$"
)
EXACT, ALIKE, KIND, UNLIKE = 3.0, 2.0, 1.5, -2.0
"""Score of a kernel on an instruction: of its name; of its name but for the number; of its kind; of another kind."""
GOES_ON = 0.1
"""Score of a further kernel of the same call: less than that of a call of its own."""
LEFT_OUT = 0.5
"""Cost of an instruction with work that no kernel is given to."""


def name_instructions(host: Host, programs: Programs) -> None:
    """Give the kernels of CUDA graphs the names of their instructions, in the operations of the host's devices."""
    for device in host.devices:
        ops = device.ops
        graphs = [number for number in np.unique(ops.op) if number != MISSING and _GRAPH.match(host.strings[number])]
        for number in graphs:
            mine = np.flatnonzero(ops.op == number)
            for module, program_id in np.unique(np.stack([ops.module[mine], ops.program[mine]]), axis=1).T.tolist():
                program = programs.find(host.program_key(module, program_id))
                if program is not None:
                    _name(ops, mine[(ops.module[mine] == module) & (ops.program[mine] == program_id)], host.strings, program)


def _name(ops: Ops, rows: np.ndarray, strings: list[str], program: Program) -> None:
    """Rewrite `ops.op` of the kernels of one graph. Launches with the same kernels are aligned once."""
    order = rows[np.argsort(ops.correlation[rows], kind="stable")]  # in a launch by their start
    launches = np.split(order, np.flatnonzero(np.diff(ops.correlation[order])) + 1)
    found: dict[bytes, np.ndarray] = {}
    for launch in launches:
        names = ops.name[launch]
        if (key := names.tobytes()) not in found:
            instructions = align([strings[name] for name in names.tolist()], program.module)
            found[key] = np.array([MISSING if name is None else _index(strings, name) for name in instructions], np.int64)
        known = found[key] != MISSING
        ops.op[launch[known]] = found[key][known]


def _index(strings: list[str], text: str) -> int:
    try:
        return strings.index(text)
    except ValueError:
        strings.append(text)
        return len(strings) - 1


@dataclass(frozen=True)
class _Candidate:
    """An instruction with work, and what its kernels may be called."""

    instruction: Instruction
    names: frozenset[str]
    text: str
    """Custom calls: their target and configuration; else ''."""
    copies: bool
    fills: bool

    def score(self, kernel: str, plain: str) -> float:
        """Return how well a kernel fits; `plain` is its name without the number at its end."""
        if kernel in self.names:
            return EXACT
        if plain in {_plain(name) for name in self.names} or (self.text and _kernel_of(self.text, plain)):
            return ALIKE
        library = _CUDNN if "cudnn" in self.text or "__cudnn" in self.instruction.attributes else _CUBLAS if "cublas" in self.text else None
        if library is not None and library.search(kernel):
            return KIND
        return KIND if (self.copies and _MEMCPY.search(kernel)) or (self.fills and _MEMSET.match(kernel)) else UNLIKE


def _kernel_of(text: str, plain: str) -> bool:
    """Whether the configuration of a custom call names the kernel, as those of Pallas do."""
    return len(plain) > 3 and re.search(rf'name = \\?"{re.escape(plain)}|name":"{re.escape(plain)}', text) is not None


def _plain(name: str) -> str:
    return re.sub(r"[_.]+\d+$", "", name)


def align(kernels: Sequence[str], module: Module) -> list[str | None]:
    """Return the instruction of each kernel of a launch, in order; None: no instruction fits it."""
    # A memset before a kernel of a library clears the workspace of the same call.
    ahead = [
        bool(_MEMSET.match(k)) and bool(_CUDNN.search(n) or _CUBLAS.search(n)) for k, n in zip(kernels, [*kernels[1:], ""], strict=True)
    ]
    work = [kernel for kernel, clears in zip(kernels, ahead, strict=True) if not clears]
    best: list[str | None] = [None] * len(work)
    most = 0.0
    for candidates in _schedules(module):
        score, names = _aligned(work, candidates)
        if score > most:
            best, most = names, score
    return [best[index] for index in np.cumsum([0, *(not clears for clears in ahead)])[:-1].tolist()]


def _schedules(module: Module) -> Iterator[list[_Candidate]]:
    """Yield the instructions with work of each computation that is scheduled: the entry, bodies of loops, branches."""
    pending, seen = [module.entry], set()
    while pending:
        name = pending.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        computation = module.computations[name]
        for instruction in computation.instructions:
            if instruction.opcode in ("while", "conditional", "call"):
                pending.extend(instruction.called)
        if found := [_candidate(module, computation, i) for i in computation.instructions if not _WITHOUT_WORK.match(i.opcode)]:
            yield found


def _candidate(module: Module, computation: Computation, instruction: Instruction) -> _Candidate:
    own = [instruction.name, *re.findall(r'deduplicated_name="([^"]*)"', instruction.attributes)]
    names = frozenset(re.sub(r"[.\-]", "_", name) for name in own)
    roots = [module.computations[name].instructions[-1] for name in instruction.called if name in module.computations]
    copies = any(i.opcode in ("copy", "copy-start", "dynamic-slice", "dynamic-update-slice", "bitcast") for i in (instruction, *roots))
    fills = any(i.opcode in ("broadcast", "constant") for i in (instruction, *roots))
    called = instruction.opcode == "custom-call" or "kind=kCustom" in instruction.attributes
    return _Candidate(instruction, names, instruction.attributes if called else "", copies, fills)


def _aligned(kernels: Sequence[str], candidates: Sequence[_Candidate]) -> tuple[float, list[str | None]]:
    """Return the best score and the instructions. Each kernel goes to the instruction of the one before it or to a later one."""
    names = {kernel: re.sub(r"[.\-]", "_", kernel) for kernel in set(kernels)}
    scores = {k: np.array([c.score(n, _plain(n)) for c in candidates]) for k, n in names.items()}
    goes_on = {k: np.where((s > 0) & (s <= KIND), GOES_ON, UNLIKE) for k, s in scores.items()}
    skipped = np.cumsum([0.0 if _may_vanish(c) else LEFT_OUT for c in candidates])
    width = len(candidates)
    total, back = scores[kernels[0]], []
    for kernel in kernels[1:]:
        from_before = np.full(width, -np.inf)
        ahead = total + skipped
        leader = np.maximum.accumulate(ahead)
        which = np.maximum.accumulate(np.where(ahead >= leader, np.arange(width), 0))
        from_before[1:] = leader[:-1] - skipped[:-1] + scores[kernel][1:]
        stays = total + goes_on[kernel]
        back.append(np.where(stays >= from_before, np.arange(width), np.concatenate([[0], which[:-1]])))
        total = np.maximum(stays, from_before)
    at = int(total.argmax())
    score, path = float(total[at]), [at]
    for step in reversed(back):
        path.append(at := int(step[at]))
    fits = [(scores[kernel][index] > 0, candidates[index].instruction.name) for kernel, index in zip(kernels, path[::-1], strict=True)]
    return score, [name if fit else None for fit, name in fits]


def _may_vanish(candidate: _Candidate) -> bool:
    """Whether an instruction may launch nothing: copies that became unnecessary, results without elements."""
    return candidate.copies or candidate.instruction.opcode in ("iota", "broadcast", "rng-bit-generator") or not candidate.instruction.bytes
