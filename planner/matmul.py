"""The rate of a matmul by its shape: what the shape explains, and what measured shapes tell about the rest.

What the shape explains, as a share of the peak:
* waves: M x N is cut into output tiles, one per core at a time; the last wave is partly empty, and edge tiles are partly padding;
* depth: a tile starts and ends without multiplying, which a small K does not hide;
* roofline: no more than intensity times memory bandwidth, intensity = 2*M*N*K / bytes of both inputs and the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.planner.hardware import Hardware

TILES = ((128, 256), (256, 128), (128, 128))
"""Output tiles of the large kernels of cuBLAS and CUTLASS since Ampere; the best fitting one is taken."""
DEPTH_OVERHEAD = 64
"""Start and end of a tile, in units of K it could have multiplied meanwhile."""
DTYPE_BYTES = {"float32": 4.0, "tfloat32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5}

Shape = tuple[int, int, int]


def intensity_flops_per_byte(dtype: str, m: int, n: int, k: int) -> float:
    """Return FLOPs per byte of device memory: 2*M*N*K over the bytes of both inputs and the result, each moved once."""
    return 2 * m * n * k / (DTYPE_BYTES[dtype] * (m * k + k * n + m * n))


def explained_share(device: Hardware, peak: float, memory_bytes_per_s: float, dtype: str, shape: Shape) -> float:
    """Return the share of the peak that the shape alone allows."""
    m, n, k = shape
    roofline = min(1.0, intensity_flops_per_byte(dtype, m, n, k) * memory_bytes_per_s / peak)
    if not device.tensor_cores:
        return roofline
    waves = max(_wave_share(m, n, tile_m, tile_n, device.cores) for tile_m, tile_n in TILES)
    return min(roofline, waves * k / (k + DEPTH_OVERHEAD))


def _wave_share(m: int, n: int, tile_m: int, tile_n: int, cores: int) -> float:
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    return m * n / (math.ceil(tiles / cores) * cores * tile_m * tile_n)


def rest(measured: Sequence[tuple[Shape, float]], shape: Shape) -> float:
    """Interpolate the part that shapes do not explain: inverse square distance in log2 of M, N, K; a measured shape gives its own."""
    weights = []
    for other, value in measured:
        distance = sum(math.log2(a / b) ** 2 for a, b in zip(other, shape, strict=True))
        if distance < 1e-12:
            return value
        weights.append((1 / distance, value))
    return sum(weight * value for weight, value in weights) / sum(weight for weight, _ in weights)
