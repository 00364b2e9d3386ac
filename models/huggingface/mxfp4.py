"""Reading of weights that are quantized to MXFP4: blocks of 32 e2m1 elements with one e8m0 scale each (OCP Microscaling Formats 1.0).

A checkpoint has NAME_blocks [E, O, I / 32, 16], bytes with two elements each, the lower four bits first, and NAME_scales [E, O, I / 32],
exponents of 2 with a bias of 127, in place of the matrices NAME [E, I, O].

Legend: E experts, I inputs, O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.models.huggingface.safetensors_stream import FLOAT_DTYPES, StoredTensor

ELEMENTS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Value of each of the 16 elements: sign, two bits of exponent, one of mantissa."""
BLOCK = 32
"""Elements of a block."""
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Matrices [E, I, O] in a file: as `StoredTensor`, dequantized where they are read."""

    blocks: StoredTensor
    scales: StoredTensor
    dtype = "BF16"
    """Safetensors name of the dtype that has every value exactly: an element has two significant bits."""

    @property
    def file(self) -> Path:
        """The file of the elements."""
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        """E, I, O."""
        experts, outputs, blocks, _ = self.blocks.shape
        return (experts, blocks * BLOCK, outputs)

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the block that `index` (one unit-step slice per dim) selects, bfloat16; only its quantized blocks are read."""
        bounds = [slice(*s.indices(dim)[:2]) for s, dim in zip(index or (slice(None),) * 3, self.shape, strict=True)]
        experts, inputs, outputs = bounds
        if inputs.start >= inputs.stop:
            return np.empty([max(0, s.stop - s.start) for s in bounds], FLOAT_DTYPES[self.dtype])
        first = inputs.start // BLOCK
        whole = slice(first, -(-inputs.stop // BLOCK))
        values_EOI = dequantized(self.blocks.read((experts, outputs, whole, slice(None))), self.scales.read((experts, outputs, whole)))
        return values_EOI[..., inputs.start - first * BLOCK : inputs.stop - first * BLOCK].swapaxes(1, 2)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values [..., I] in bfloat16 of bytes [..., I / 32, 16] and scales [..., I / 32], both uint8.

    The largest scales give values that are infinite or NaN.
    """
    pairs = np.stack([ELEMENTS[blocks & 0x0F], ELEMENTS[blocks >> 4]], axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        values = pairs.reshape(*blocks.shape[:-1], BLOCK) * np.exp2(scales.astype(np.float32) - 127)[..., None]
        return values.reshape(*blocks.shape[:-2], blocks.shape[-2] * BLOCK).astype(FLOAT_DTYPES[Mxfp4Tensor.dtype])


def with_dequantized(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Return the tensors with each pair NAME_blocks, NAME_scales as one called NAME. Raises UserError for a pair that does not fit."""
    found: dict[str, StoredTensor | Mxfp4Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors:
            continue
        if not name.endswith(_BLOCKS):
            found[name] = tensor
            continue
        matrix = name.removesuffix(_BLOCKS)
        scales = tensors.get(matrix + _SCALES)
        if scales is None:
            raise UserError(f"{tensor.file}: tensor '{name}' has no '{matrix}{_SCALES}'")
        fits = len(tensor.shape) == 4 and tensor.shape[-1] == BLOCK // 2 and tensor.shape[:-1] == scales.shape
        if not fits or (tensor.dtype, scales.dtype) != ("U8", "U8"):
            raise UserError(
                f"{tensor.file}: '{name}' {list(tensor.shape)} ({tensor.dtype}) and '{matrix}{_SCALES}' {list(scales.shape)} "
                f"({scales.dtype}) are no MXFP4 weights (only U8, [experts, outputs, blocks, {BLOCK // 2}] and [experts, outputs, blocks])"
            )
        found[matrix] = Mxfp4Tensor(tensor, scales)
    return found
