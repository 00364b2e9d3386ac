"""FLOPs of matmuls, convolutions and attention: of instructions, library calls, and custom kernels that state theirs.

Other operations count as 0: their time is that of their memory traffic. The FLOPs of a custom kernel that may contain matmuls and states
nothing are unknown.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ridgeline.hlo.module import Computation, Instruction, Shape

COUNTED = frozenset({"dot", "scaled-dot", "ragged-dot", "convolution", "custom-call"})
"""Opcodes that may have FLOPs."""


@dataclass(frozen=True)
class Matmul:
    """The shape of a matmul: `batch` matmuls of [m, k] and [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


def flops_of(computation: Computation, instruction: Instruction) -> float | None:
    """Return the FLOPs of one execution; None: a custom kernel that may contain matmuls and does not state its FLOPs."""
    found = matmul(computation, instruction)
    if found is not None:
        return found.flops
    target = custom_target(instruction)
    if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution(computation, instruction, target)
    if not target or _WITHOUT.search(target):
        return 0.0
    if "fmha" in target:
        return _attention(computation, instruction, target)
    stated = _STATED.search(instruction.attributes.replace(r"\22", '"'))
    return float(stated.group(1)) if stated else None


def custom_target(instruction: Instruction) -> str:
    """Return what a custom call calls; '' for other instructions."""
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes) if instruction.opcode == "custom-call" else None
    return found.group(1) if found else ""


def kernel_name(instruction: Instruction) -> str:
    """Return the last part of the path of an operation; of a kernel of Pallas, which all have one target, its name."""
    return instruction.op_name.removesuffix("/pallas_call").rpartition("/")[2]


_WITHOUT = re.compile(
    r"shard|annotate|placement|barrier|MoveTo|^Pin|Unpin|AllocateBuffer|SliceToDynamic|PadToStatic|^X64|^Assume|TopK|sort|threefry|philox"
    r"|callback|print|debug|^xla\.sdy|cudnn\$norm",
    re.I,
)
"""Custom calls without matmuls: they sort, copy, place, annotate, draw random numbers or call the host."""
_STATED = re.compile(r'serialized_metadata = "\{[^}]*"flops": ?"(\d+)"')
"""FLOPs in the metadata of a pallas_call: JSON inside an MLIR string, where a quotation mark is written \\22."""


GROUPED = ("expert_matmul", "expert_weight_gradient")
"""Kernels of models/moe/grouped_matmul.py: rows [R, I] times the matrices of their experts, and inputs [R, I] times gradients [R, O]."""


def grouped_matmul(computation: Computation, instruction: Instruction) -> tuple[Matmul, float] | None:
    """Return the shape of the matmul of experts, and the share of the rows of its buffers that it reads; None for other instructions.

    The buffers have room for the worst case. The kernel states the FLOPs of the blocks that have rows (`filled_share`).
    """
    name = kernel_name(instruction)
    stated = (
        _STATED.search(instruction.attributes.replace(r"\22", '"')) if name in GROUPED and instruction.opcode == "custom-call" else None
    )
    if stated is None:
        return None
    buffer = next(shape for shape in computation.operand_shapes(instruction) if len(shape.dims) == 2 and shape.dtype[:1] in ("f", "b"))
    result = instruction.shapes[0].dims
    if name == GROUPED[0]:  # [R, O]
        rows, outputs = result
        inputs = math.prod(buffer.dims) // rows
    else:  # [I, E, O]
        inputs, _, outputs = result
        rows = math.prod(buffer.dims) // inputs
    used = round(float(stated.group(1)) / (2 * inputs * outputs))
    shape = Matmul(1, used, outputs, inputs) if name == GROUPED[0] else Matmul(1, inputs, outputs, used)
    return shape, min(1.0, used / rows)


def matmul(computation: Computation, instruction: Instruction) -> Matmul | None:
    """Return the shape of a dot or a library's matmul, or of one of experts; None for other instructions."""
    opcode, target = instruction.opcode, custom_target(instruction)
    if (grouped := grouped_matmul(computation, instruction)) is not None:
        return grouped[0]
    if opcode == "ragged-dot":
        lhs, rhs, *_ = computation.operand_shapes(instruction)
        depth = _dims(r"lhs_contracting_dims=\{([\d,]*)\}", instruction)
        k = math.prod(lhs.dims[d] for d in depth)
        return Matmul(1, math.prod(lhs.dims) // max(1, k), rhs.dims[-1], k)
    if "blockScaledDot" in target:  # [1, M, K] x [1, N, K]
        out, k = instruction.shapes[0].dims, computation.operand_shapes(instruction)[0].dims[-1]
        return Matmul(math.prod(out[:-2]), out[-2], out[-1], k)
    if opcode in ("dot", "scaled-dot"):
        contracted = _dims(r"lhs_contracting_dims=\{([\d,]*)\}", instruction)
        batched = _dims(r"lhs_batch_dims=\{([\d,]*)\}", instruction)
    elif target.startswith("__cublas") or "onednn$matmul" in target:
        contracted = _dims(r'lhs_contracting_dimensions": ?\["?([\d", ]*)\]', instruction)
        batched = _dims(r'lhs_batch_dimensions": ?\["?([\d", ]*)\]', instruction)
    else:
        return None
    lhs = computation.operand_shapes(instruction)[0]
    batch, k = (math.prod(lhs.dims[d] for d in dims) for dims in (batched, contracted))
    m = math.prod(lhs.dims) // max(1, batch * k)
    return Matmul(batch, m, math.prod(instruction.shapes[0].dims) // max(1, batch * m), k)


def _dims(pattern: str, instruction: Instruction) -> list[int]:
    found = re.search(pattern, instruction.attributes)
    return [int(dim) for dim in re.findall(r"\d+", found.group(1))] if found else []


def _attention(computation: Computation, instruction: Instruction, target: str) -> float | None:
    """Return the FLOPs of fused attention: two matmuls forward (QK, PV), five backward, without what a causal mask or a window skips:
    of T keys a query sees T/2 on average, or W - W*W/(2T) with a window of W."""
    scores = re.search(r'"intermediate_tensor_shape": ?\{[^}]*?"dimensions": ?\[([^\]]*)\]', instruction.attributes)
    if not scores:
        return None
    dims = [int(d) for d in re.findall(r"\d+", scores.group(1))]
    width = computation.operand_shapes(instruction)[0].dims[-1]
    matmuls = 5 if "Backward" in target else 2
    causal = 0.5 if '"mask_type": "CAUSAL"' in instruction.attributes or '"mask_type":"CAUSAL"' in instruction.attributes else 1.0
    window = re.search(r'"sliding_window_length": ?"?(\d+)', instruction.attributes)
    if window and 0 < int(window.group(1)) < dims[-1]:
        share = int(window.group(1)) / dims[-1]
        causal = share - share * share / 2
    return 2.0 * math.prod(dims) * width * matmuls * causal


def _convolution(computation: Computation, instruction: Instruction, target: str) -> float | None:
    """Return the FLOPs of a convolution; products with padding and with the holes of a dilated input do not count.

    cuDNN's backward convolutions keep the window and labels of the forward one: input, kernel and result change places.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    first, second, *_ = computation.operand_shapes(instruction)
    result = instruction.shapes[0]
    if not labels:
        return None
    lhs, rhs, out = first, second, result
    if "Backward" in target:
        lhs, rhs, out = (result, second, first) if "BackwardInput" in target else (first, result, second)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", (re.search(r"window=\{([^}]*)\}", instruction.attributes) or ["", ""])[1]))
    groups = int(instruction.attribute("batch_group_count") or 1)
    inputs, kernels, outputs = labels.groups()
    spatial = [dim for dim in kernels if dim.isdigit()]
    pairs = math.prod(_valid_pairs(dim, _dim(lhs, inputs, dim), _dim(out, outputs, dim), window) for dim in spatial)
    channels = _dim(rhs, kernels, "i") * _dim(out, outputs, "f")
    return 2.0 * pairs * channels * _dim(lhs, inputs, "b") / groups


def _dim(shape: Shape, labels: str, name: str) -> int:
    return shape.dims[labels.index(name)]


def _valid_pairs(dim: str, size: int, outputs: int, window: dict[str, str]) -> int:
    """Return the number of pairs of an output and a kernel position whose input exists, along one spatial dimension."""

    def at(key: str, default: int) -> int:
        parts = window.get(key, "").split("x")
        return int(parts[int(dim)]) if int(dim) < len(parts) and parts[int(dim)] else default

    pads = re.findall(r"(-?\d+)_(-?\d+)", window.get("pad", ""))
    low = int(pads[int(dim)][0]) if int(dim) < len(pads) else 0
    width, stride, spread, holes = at("size", 1), at("stride", 1), at("lhs_dilate", 1), at("rhs_dilate", 1)
    count = 0
    for position in range(width):
        offset = position * holes - low  # the output o reads input (o * stride + offset) / spread
        step = spread // math.gcd(stride, spread)
        start = next((o for o in range(min(outputs, step)) if (o * stride + offset) % spread == 0), None)
        if start is None:
            continue
        least = max(0, -((offset + start * stride) // (step * stride)))
        most = ((size - 1) * spread - offset - start * stride) // (step * stride)
        count += max(0, min(most, (outputs - 1 - start) // step) - least + 1)
    return count
