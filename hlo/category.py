"""What kind of work an operation is: matmul, attention, convolution, norm, reduction, copy, collective, ... (`CATEGORIES`).

From the HLO where it is known, else from the name of the GPU's kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from ridgeline.hlo.flops import custom_target, kernel_name
from ridgeline.hlo.module import Computation, Instruction, Module

CATEGORIES = (
    "matmul",
    "attention",
    "convolution",
    "norm",
    "reduction",
    "copy",
    "collective",
    "gather or scatter",
    "sort",
    "random numbers",
    "elementwise",
    "custom call",
    "other",
)
_TARGETS = {
    "attention": r"fmha|flash|attention|sdpa|splash",
    "convolution": r"conv",
    "norm": r"norm",
    "matmul": r"cublas|gemm|matmul|onednn|cutlass|ScaledDot|grouped|expert_weight",
    "sort": r"sort|topk|top_k",
    "random numbers": r"threefry|philox|random",
}
_KERNELS = _TARGETS | {
    "convolution": r"conv|winograd|fprop|dgrad|wgrad",
    "matmul": r"cublas|gemm|matmul|cutlass|nvjet|Cijk_|xmma|wgmma|splitK|dot",
    "collective": r"nccl|rccl|nvshmem|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all",
    "reduction": r"reduc",
    "copy": r"memcpy|memset|copy|transpose|concatenate|dynamic.?(update.?)?slice|\bpad\b",
    "gather or scatter": r"gather|scatter",
    "elementwise": r"loop_|elementwise|broadcast|convert|select|add|multiply|exponential|tanh",
}
_OPCODES = {
    "matmul": {"dot", "scaled-dot", "ragged-dot"},
    "convolution": {"convolution"},
    "collective": {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast", "send", "recv"),
    },
    "sort": {"sort", "topk"},
    "reduction": {"reduce", "reduce-window", "select-and-scatter"},
    "gather or scatter": {"gather", "scatter"},
    "random numbers": {"rng", "rng-bit-generator", "rng-get-and-update-state"},
}
"""In the order of weight: a fusion is what the first of its instructions in this order is."""
_COPIES = frozenset(
    {"copy", "copy-start", "copy-done", "transpose", "reshape", "bitcast", "bitcast-convert", "slice", "dynamic-slice", "pad", "reverse"}
    | {"dynamic-update-slice", "concatenate", "broadcast", "iota", "parameter", "constant", "tuple", "get-tuple-element"}
)
_NORM = re.compile(r"norm(?!al)", re.I)
_GLOBAL_NORM = re.compile(r"global_norm|grad_norm|clip_by", re.I)


def category(module: Module, instruction: Instruction) -> str:
    """Return the category of an instruction outside fusions."""
    inside = list(_inside(module, instruction))
    for name in map(_of_target, inside):
        if name in ("attention", "convolution", "matmul", "norm"):
            return name
    arrays = [each for each in inside if any(math.prod(shape.dims) > 1 for shape in each.shapes)] or inside  # without index arithmetic
    opcodes = {re.sub(r"-(start|done)$", "", each.opcode) for each in arrays}
    kinds = [kind for kind, members in _OPCODES.items() if opcodes & members]
    if kinds and kinds[0] in ("matmul", "convolution", "collective"):
        return kinds[0]
    if "reduction" in kinds and _is_norm(inside):
        return "norm"
    if kinds:
        return kinds[0]
    if "custom-call" in opcodes:
        return next(name for name in map(_of_target, inside) if name)
    return "copy" if opcodes <= _COPIES else "elementwise"


def kernel_category(name: str) -> str:
    """Guess the category of a GPU's kernel from its name; `other` where it shows none."""
    return next((kind for kind, pattern in _KERNELS.items() if re.search(pattern, name, re.I)), "other")


def _of_target(instruction: Instruction) -> str:
    """Return the category of a custom call; '' for other instructions."""
    if instruction.opcode != "custom-call":
        return ""
    target = custom_target(instruction)
    found = next((kind for kind, pattern in _TARGETS.items() if re.search(pattern, target, re.I)), None)
    if found is None:  # Pallas kernels have one target
        found = next((kind for kind, pattern in _TARGETS.items() if re.search(pattern, kernel_name(instruction), re.I)), None)
    return found or "custom call"


def _is_norm(inside: Iterable[Instruction]) -> bool:
    """Whether the path of an operation names a normalization layer (`norm`, `LayerNorm_0`, `rms_norm`), not the norm of gradients."""
    return any(_NORM.search(each.op_name) and not _GLOBAL_NORM.search(each.op_name) for each in inside)


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield an instruction, and for a fusion the instructions in it."""
    if not instruction.opcode.startswith("fusion"):
        yield instruction
        return
    for name in instruction.called:
        computation: Computation | None = module.computations.get(name)
        for inner in computation.instructions if computation is not None else ():
            yield from _inside(module, inner)
