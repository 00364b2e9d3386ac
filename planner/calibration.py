"""Predicted rates of devices and links: datasheet peaks times measured efficiency (planner/calibration_file.py).

    calibration = load_calibration()
    calibration.matmul_flops_per_s(device, "bfloat16", m, n, k)      # at most the peak of the catalog
    calibration.attention_flops_per_s(device, "bfloat16", seq_len, head_dim)
    calibration.memory_bytes_per_s(device)
    calibration.layer(device, local)                                  # measured cost of remat policies, or None

Matmul rate: `explained_share` gives the fraction of the peak that the shape allows:
* waves: M x N is split into output tiles, one per core at a time; the last wave is partly empty, and edge tiles are partly padding;
* depth: each tile has a start and an end without multiplications, which matter when K is small;
* roofline: at most intensity times memory bandwidth, intensity = 2*M*N*K / bytes of both inputs and the result.
Measured rates are divided by it, the quotient is interpolated between shapes, and multiplied by it again. A measured shape is reproduced
exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.planner.calibration_file import DTYPE_BYTES, CalibrationFile, read_with_shipped
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.layer_costs import LayerPoint, LayerShape, find_point
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.software import DEFAULT_SOFTWARE, Software, software

TILES = ((128, 256), (256, 128), (128, 128))
"""Output tiles of the large kernels of cuBLAS and CUTLASS since Ampere; the best fitting one is used."""
DEPTH_OVERHEAD = 64
"""Start and end of a tile, as the extent of K that could have been multiplied in that time."""

MatmulShape = tuple[int, int, int]
"""M, N, K."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Interpolation of positive values over sizes: a power law between neighboring points, constant outside them.

    If time grows with size at the measured points, it also does between them.
    """

    log_sizes: tuple[float, ...]
    log_values: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Build the curve through (size, value) points, all positive, with distinct sizes."""
        ordered = sorted(points)
        assert ordered, "a curve has at least one point"
        return cls(tuple(math.log(size) for size, _ in ordered), tuple(math.log(value) for _, value in ordered))

    def at(self, size: float) -> float:
        """Return the value at a size."""
        sizes, values = self.log_sizes, self.log_values
        x = math.log(size) if size > 0 else sizes[0]
        if x <= sizes[0]:
            return math.exp(values[0])
        if x >= sizes[-1]:
            return math.exp(values[-1])
        i = bisect_right(sizes, x)
        weight = (x - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return math.exp(values[i - 1] + weight * (values[i] - values[i - 1]))


@dataclass(frozen=True)
class Calibration:
    """The rates that a prediction uses."""

    name: str
    file: CalibrationFile
    software: Software = field(default_factory=software)
    """Training software whose steps are predicted; the rates above are those of kernels in isolation."""
    _rates: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False, repr=False)

    def matmul_flops_per_s(self, device: Hardware, dtype: str, m: int, n: int, k: int) -> float:
        """Return the predicted rate of one matmul in FLOP/s, at most the peak (nominal devices: at most the best measured rate).

        Raises UserError when the catalog has no peak for the dtype, or the calibration has no matmul entry for the device.
        """
        key = (device.name, dtype, m, n, k)
        if key not in self._rates:
            self._rates[key] = self._matmul_rate(device, dtype, (m, n, k))
        return self._rates[key]

    def _matmul_rate(self, device: Hardware, dtype: str, shape: MatmulShape) -> float:
        peak, memory = _peak(device, dtype), self.memory_bytes_per_s(device)
        own = [p for p in self.file.matmul if p.device == device.name]
        points = [p for p in own if p.dtype == dtype] or own or [p for p in self.file.matmul if p.device is None]
        if not points:
            raise UserError(f"calibration '{self.name}' has no matmul entry for {device.name} and none for any device")
        measured = []
        for point in points:
            other_peak = device.peak_flops.get(point.dtype, peak)
            share = point.share or _flops(point.tflop_per_s) / other_peak
            other = (point.m, point.n, point.k)
            measured.append((other, share / explained_share(device, other_peak, memory, point.dtype, other)))
        explained = explained_share(device, peak, memory, dtype, shape)
        most = max(1.0, *(share for _, share in measured)) if device.nominal else 1.0
        return peak * min(most, explained * _interpolate(measured, shape))

    def attention_flops_per_s(self, device: Hardware, dtype: str, seq_len: int, head_dim: int) -> float:
        """Return the rate of fused attention, forward plus backward, in FLOP/s (see AttentionPoint)."""
        peak = _peak(device, dtype)
        points = [p for p in self.file.attention if p.device == device.name] or [p for p in self.file.attention if p.device is None]
        if not points:
            raise UserError(f"calibration '{self.name}' has no attention entry for {device.name} and none for any device")
        nearest = min({p.head_dim for p in points}, key=lambda width: abs(math.log(width / head_dim)))
        shares = [(p.seq_len, p.share or _flops(p.tflop_per_s) / peak) for p in points if p.head_dim == nearest]
        return peak * min(1.0, Curve.through(shares).at(seq_len))

    def memory_bytes_per_s(self, device: Hardware) -> float:
        """Return the device memory bandwidth of streaming kernels, bytes/s."""
        points = [p for p in self.file.memory if p.device == device.name] or [p for p in self.file.memory if p.device is None]
        if not points:
            raise UserError(f"calibration '{self.name}' has no memory entry for {device.name} and none for any device")
        point = points[-1]
        return device.memory_bandwidth_bytes_per_s * point.share if point.share else (point.gb_per_s or 0) * 1e9

    def layer(self, device: Hardware, local: LocalSizes) -> LayerPoint | None:
        """Return the measured cost of a layer of this shape on this device by rematerialization policy; None: not measured."""
        if not any(point.device == device.name for point in self.file.layers):
            return None
        return find_point(self.file.layers, device.name, LayerShape.of(local, gpu=device.tensor_cores))

    def link_curve(self, kind: str, device: str, peak_bytes_per_s: float) -> Curve | None:
        """Return the fraction of a link's peak that ring algorithms reach, by bytes sent; None: no measurement of this kind."""
        return self._curve(kind, device, peak_bytes_per_s, in_switch=False)

    def in_switch_curve(self, device: str, peak_bytes_per_s: float) -> Curve | None:
        """Return the fraction of NVLink's peak that all-reduces in the switch reach, by tensor bytes; None: no measurement."""
        return self._curve("nvlink", device, peak_bytes_per_s, in_switch=True)

    def _curve(self, kind: str, device: str, peak_bytes_per_s: float, *, in_switch: bool) -> Curve | None:
        curves = [curve for curve in self.file.links if curve.kind == kind and curve.in_switch == in_switch]
        chosen = [curve for curve in curves if curve.device == device] or [curve for curve in curves if curve.device is None]
        if not chosen:
            return None
        points = _monotonic_in_time(chosen[-1].shares(peak_bytes_per_s))
        size, share = points[0]
        if size > 1:  # a message smaller than the smallest measured one takes as long as that one
            points = [(1.0, share / size), *points]
        return Curve.through(points)

    @property
    def sources(self) -> list[str]:
        """Every source once, in the order of the file."""
        file = self.file
        measured = [*file.matmul, *file.attention, *file.memory]
        return list(dict.fromkeys([*(point.source for point in measured), *(curve.source for curve in file.links)]))


def load_calibration(path: str | Path | None = None, software_name: str = DEFAULT_SOFTWARE) -> Calibration:
    """Load the shipped calibration, or a file of `ridge calibrate` merged over it.

    `software_name`: an entry of planner/software.yaml. Raises UserError with file and line, or with the nearest name.
    """
    file = read_with_shipped(None if path is None else Path(path))
    return Calibration(file.name, file, software(software_name))


def intensity_flops_per_byte(dtype: str, m: int, n: int, k: int) -> float:
    """Return FLOPs per byte of device memory: 2*M*N*K over the bytes of both inputs and the result, each moved once."""
    return 2 * m * n * k / (DTYPE_BYTES[dtype] * (m * k + k * n + m * n))


def explained_share(device: Hardware, peak: float, memory_bytes_per_s: float, dtype: str, shape: MatmulShape) -> float:
    """Return the fraction of the peak that the shape of a matmul allows (see the module docstring)."""
    m, n, k = shape
    roofline = min(1.0, intensity_flops_per_byte(dtype, m, n, k) * memory_bytes_per_s / peak)
    if not device.tensor_cores:
        return roofline
    waves = max(_wave_share(m, n, tile_m, tile_n, device.cores) for tile_m, tile_n in TILES)
    return min(roofline, waves * k / (k + DEPTH_OVERHEAD))


def _wave_share(m: int, n: int, tile_m: int, tile_n: int, cores: int) -> float:
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    return m * n / (math.ceil(tiles / cores) * cores * tile_m * tile_n)


def _interpolate(measured: Sequence[tuple[MatmulShape, float]], shape: MatmulShape) -> float:
    """Interpolate values of matmul shapes, weighted by inverse square distance in log2 of M, N, K; exact at a measured shape."""
    weights = []
    for other, value in measured:
        distance = sum(math.log2(a / b) ** 2 for a, b in zip(other, shape, strict=True))
        if distance < 1e-12:
            return value
        weights.append((1 / distance, value))
    return sum(weight * value for weight, value in weights) / sum(weight for weight, _ in weights)


def _monotonic_in_time(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (size, fraction of the peak) by rising size, adjusted so that no message takes longer than a larger one.

    Measurements can contradict that, by rounding or where a library changes its protocol: the smaller message then gets the time of the
    larger one.
    """
    kept: list[tuple[float, float]] = []
    for size, share in sorted(points, reverse=True):
        kept.append((size, max(share, kept[-1][1] * size / kept[-1][0]) if kept else share))
    return kept[::-1]


def _peak(device: Hardware, dtype: str) -> float:
    peak = device.peak_flops.get(dtype)
    if peak is None:
        raise UserError(f"{device.name} has no peak for {dtype} in the hardware catalog (it has: {', '.join(device.peak_flops)})")
    return peak


def _flops(tflop_per_s: float | None) -> float:
    assert tflop_per_s is not None
    return tflop_per_s * 1e12
