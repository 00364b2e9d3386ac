"""Efficiency factors: what devices and links reach of their datasheets, from measurements.

The shipped file (planner/calibration.yaml) holds published measurements with their sources; `ridge calibrate` measures a machine and
writes a file of the same form. `load_calibration(path)` lays the second over the first: an entry of the file wins where it is about the
same device (matmul, attention, memory) or the same kind of link; everything else stays as shipped.

    calibration = load_calibration()
    calibration.matmul_flops_per_s(device, "bfloat16", m, n, k)      # at most the peak of the catalogue
    calibration.attention_flops_per_s(device, "bfloat16", seq_len, head_dim)
    calibration.memory_bytes_per_s(device)
    calibration.layer(device, local)                                  # what remat policies cost, where measured, else None

Matmul rate: `planner.matmul` says what a shape allows; the measured points are divided by that, interpolated, and multiplied with it again.
Measured shapes are reproduced exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError, model_validator

from ridgeline.configs.errors import UserError
from ridgeline.configs.fields import Slot
from ridgeline.configs.problems import validation_error
from ridgeline.configs.schema import Fraction, Name, PositiveFloat, PositiveInt, Section
from ridgeline.configs.tree import plain, read_file
from ridgeline.planner import matmul
from ridgeline.planner.curve import Curve
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.layer_costs import LayerPoint, LayerShape, find_point
from ridgeline.planner.local import LocalSizes

SHIPPED = Path(__file__).with_name("calibration.yaml")
Point = TypeVar("Point", bound="_Measured")
Rate = PositiveFloat | None


class _Measured(Section):
    """One measurement: an absolute rate, or a share of the device's datasheet peak."""

    device: Name | None = None
    """Catalogue name; null: any device without entries of its own (shares only)."""
    source: str
    """Where the figure was published, or how it was measured."""
    share: Fraction | None = None
    """Share of the peak."""


class MatmulPoint(_Measured):
    """Rate of an [M, K] x [K, N] matmul."""

    dtype: Name
    """Of the inputs, as in the catalogue's peak_flops."""
    m: PositiveInt
    """Rows of the result."""
    n: PositiveInt
    """Columns of the result."""
    k: PositiveInt
    """Contracted dimension."""
    tflop_per_s: Rate = None
    """1e12 FLOP/s, a multiply-add as 2."""

    @model_validator(mode="after")
    def _one_rate(self) -> MatmulPoint:
        return _exactly_one(self, "tflop_per_s")


class AttentionPoint(_Measured):
    """Rate of fused attention, forward and backward together, in planner.flops' count (backward twice forward, what the mask leaves)."""

    seq_len: PositiveInt
    """Tokens."""
    head_dim: PositiveInt
    """Width of a head."""
    tflop_per_s: Rate = None
    """1e12 FLOP/s in 16-bit."""

    @model_validator(mode="after")
    def _one_rate(self) -> AttentionPoint:
        return _exactly_one(self, "tflop_per_s")


class MemoryPoint(_Measured):
    """Device memory bandwidth reached by streaming kernels."""

    gb_per_s: Rate = None
    """1e9 bytes/s, reads and writes added."""

    @model_validator(mode="after")
    def _one_rate(self) -> MemoryPoint:
        return _exactly_one(self, "gb_per_s")


class LinkCurve(Section):
    """Bandwidth reached on one kind of link, by message size."""

    kind: Name
    """nvlink, pcie, network or memory, as in cluster files."""
    device: Name | None = None
    """Only between these devices; null: any device without a curve of its own."""
    in_switch: bool = False
    """Of an all-reduce added up by the switch; false: of ring algorithms."""
    points: list[tuple[PositiveFloat, PositiveFloat]] = []
    """(bytes one device sends in the whole collective, share of the link's peak reached, latency apart).
    In the switch: bytes of the tensor instead."""
    measured: list[tuple[PositiveFloat, PositiveFloat]] = []
    """The same with GB/s (1e9) instead of a share; above the link's peak they count as the peak."""
    source: str
    """Where the figures were published, or how they were measured."""

    @model_validator(mode="after")
    def _has_points(self) -> LinkCurve:
        if bool(self.points) == bool(self.measured):
            raise ValueError("give either points (shares) or measured (GB/s)")
        sizes = [size for size, _ in self.points or self.measured]
        if len(set(sizes)) != len(sizes):
            raise ValueError("no size twice")
        if any(share > 1 for _, share in self.points):
            raise ValueError("points: no share above 1 (is the link's bandwidth in the cluster file that of one direction?)")
        return self

    def shares(self, peak_bytes_per_s: float) -> list[tuple[float, float]]:
        """Return (bytes, share of this peak)."""
        return self.points or [(size, min(1.0, rate * 1e9 / peak_bytes_per_s)) for size, rate in self.measured]


class HostPoint(Section):
    """What the host delivers to one device."""

    copy_gb_per_s: PositiveFloat | None = None
    """1e9 bytes/s from host memory to the device; null: not measured."""
    input_tokens_per_s: PositiveFloat | None = None
    """Tokens per second and host of the input pipeline; null: not measured."""
    dispatch_us: PositiveFloat | None = None
    """Host time to start one compiled step; null: not measured."""
    source: str = ""
    """How it was measured."""


class CalibrationFile(Section):
    """A calibration file."""

    name: str = "calibration"
    """Shown beside every prediction made with it."""
    matmul: list[MatmulPoint] = []
    attention: list[AttentionPoint] = []
    memory: list[MemoryPoint] = []
    links: list[LinkCurve] = []
    host: HostPoint = HostPoint()
    layers: list[LayerPoint] = []
    """What rematerialisation costs by shape of layer (`ridge bench remat --into FILE`): planner/layer_costs.py."""


@dataclass(frozen=True)
class Calibration:
    """The factors a prediction is made with."""

    name: str
    file: CalibrationFile
    _rates: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False, repr=False)

    def matmul_flops_per_s(self, device: Hardware, dtype: str, m: int, n: int, k: int) -> float:
        """Return the predicted rate of one matmul in FLOP/s, never above the peak (devices without one: above the best measured).

        Raises UserError when neither the catalogue nor the file knows the dtype on this device.
        """
        key = (device.name, dtype, m, n, k)
        if key not in self._rates:
            self._rates[key] = self._matmul_rate(device, dtype, (m, n, k))
        return self._rates[key]

    def _matmul_rate(self, device: Hardware, dtype: str, shape: matmul.Shape) -> float:
        peak, memory = _peak(device, dtype), self.memory_bytes_per_s(device)
        own = [p for p in self.file.matmul if p.device == device.name]
        points = [p for p in own if p.dtype == dtype] or own or [p for p in self.file.matmul if p.device is None]
        if not points:
            raise UserError(f"calibration '{self.name}' has no matmul entry for {device.name} nor one for any device")
        measured = []
        for point in points:
            other_peak = device.peak_flops.get(point.dtype, peak)
            share = point.share or _flops(point.tflop_per_s) / other_peak
            other = (point.m, point.n, point.k)
            measured.append((other, share / matmul.explained_share(device, other_peak, memory, point.dtype, other)))
        explained = matmul.explained_share(device, peak, memory, dtype, shape)
        most = max(1.0, *(share for _, share in measured)) if device.nominal else 1.0
        return peak * min(most, explained * matmul.rest(measured, shape))

    def matmul_share(self, device: Hardware, dtype: str, m: int, n: int, k: int) -> float:
        """Return the predicted rate as a share of the datasheet peak."""
        return self.matmul_flops_per_s(device, dtype, m, n, k) / _peak(device, dtype)

    def attention_flops_per_s(self, device: Hardware, dtype: str, seq_len: int, head_dim: int) -> float:
        """Return the rate of fused attention, forward and backward together, in FLOP/s (see AttentionPoint)."""
        peak = _peak(device, dtype)
        points = [p for p in self.file.attention if p.device == device.name] or [p for p in self.file.attention if p.device is None]
        if not points:
            raise UserError(f"calibration '{self.name}' has no attention entry for {device.name} nor one for any device")
        nearest = min({p.head_dim for p in points}, key=lambda width: abs(math.log(width / head_dim)))
        shares = [(p.seq_len, p.share or _flops(p.tflop_per_s) / peak) for p in points if p.head_dim == nearest]
        return peak * min(1.0, Curve.through(shares).at(seq_len))

    def memory_bytes_per_s(self, device: Hardware) -> float:
        """Return the device memory bandwidth that streaming kernels reach, bytes/s."""
        points = [p for p in self.file.memory if p.device == device.name] or [p for p in self.file.memory if p.device is None]
        if not points:
            raise UserError(f"calibration '{self.name}' has no memory entry for {device.name} nor one for any device")
        point = points[-1]
        return device.memory_bandwidth_bytes_per_s * point.share if point.share else (point.gb_per_s or 0) * 1e9

    def layer(self, device: Hardware, local: LocalSizes) -> LayerPoint | None:
        """Return what a layer of this shape was measured to cost on this device by rematerialisation policy; None: not measured."""
        if not any(point.device == device.name for point in self.file.layers):
            return None
        return find_point(self.file.layers, device.name, LayerShape.of(local, gpu=device.tensor_cores))

    def link_curve(self, kind: str, device: str, peak_bytes_per_s: float) -> Curve | None:
        """Return the share of a link's peak reached by ring algorithms, by bytes sent; None: nothing known of this kind."""
        return self._curve(kind, device, peak_bytes_per_s, in_switch=False)

    def in_switch_curve(self, device: str, peak_bytes_per_s: float) -> Curve | None:
        """Return the share of NVLink's peak reached by all-reduces in the switch, by their bytes; None: nothing known."""
        return self._curve("nvlink", device, peak_bytes_per_s, in_switch=True)

    def _curve(self, kind: str, device: str, peak_bytes_per_s: float, *, in_switch: bool) -> Curve | None:
        curves = [curve for curve in self.file.links if curve.kind == kind and curve.in_switch == in_switch]
        chosen = [curve for curve in curves if curve.device == device] or [curve for curve in curves if curve.device is None]
        if not chosen:
            return None
        points = _never_quicker(chosen[-1].shares(peak_bytes_per_s))
        size, share = points[0]
        if size > 1:  # a message smaller than the smallest measured takes as long as that one
            points = [(1.0, share / size), *points]
        return Curve.through(points)

    @property
    def sources(self) -> list[str]:
        """Every source, once, in the order of the file."""
        file = self.file
        measured: list[_Measured] = [*file.matmul, *file.attention, *file.memory]
        return list(dict.fromkeys([*(point.source for point in measured), *(curve.source for curve in file.links)]))


def load_calibration(path: str | Path | None = None) -> Calibration:
    """Load the shipped calibration, or a file of `ridge calibrate` over it. Raises UserError naming file and line."""
    shipped = _shipped()
    if path is None:
        return Calibration(shipped.name, shipped)
    own = _read(Path(path))
    return Calibration(own.name, _over(shipped, own))


def read_own(path: Path) -> CalibrationFile:
    """Return a machine's file alone, without the shipped figures; an empty one where there is none. Raises UserError for a broken one."""
    return _read(path) if path.exists() else CalibrationFile(name=path.stem)


def add_layer(file: CalibrationFile, point: LayerPoint) -> CalibrationFile:
    """Return the file with this measurement of a layer, in place of an earlier one of the same shape and device."""
    others = [other for other in file.layers if (other.device, other.shape) != (point.device, point.shape)]
    return file.model_copy(update={"layers": [*others, point]})


@functools.cache
def _shipped() -> CalibrationFile:
    return _read(SHIPPED)


def _read(path: Path) -> CalibrationFile:
    if not path.is_file():
        raise UserError(f"calibration '{path}' not found (ridge calibrate --output FILE writes one)")
    tree = read_file(path)
    try:
        return CalibrationFile.model_validate(plain(tree), strict=False)
    except ValidationError as error:
        raise validation_error(error, tree, Slot(CalibrationFile)) from None


def _over(under: CalibrationFile, own: CalibrationFile) -> CalibrationFile:
    """Lay a measured file over the shipped one."""
    devices = {(type(p), p.device) for p in (*own.matmul, *own.attention, *own.memory)}
    kinds = {(curve.kind, curve.in_switch) for curve in own.links}
    return CalibrationFile(
        name=own.name,
        matmul=[p for p in under.matmul if (MatmulPoint, p.device) not in devices] + own.matmul,
        attention=[p for p in under.attention if (AttentionPoint, p.device) not in devices] + own.attention,
        memory=[p for p in under.memory if (MemoryPoint, p.device) not in devices] + own.memory,
        links=[curve for curve in under.links if (curve.kind, curve.in_switch) not in kinds] + own.links,
        host=own.host if own.host != HostPoint() else under.host,
        layers=under.layers + own.layers,
    )


def _never_quicker(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (size, share of the peak) by rising size such that no message takes longer than a larger one.

    Measured points may say so, by rounding or where a library changes its protocol: the smaller message then gets the larger one's time.
    """
    kept: list[tuple[float, float]] = []
    for size, share in sorted(points, reverse=True):
        kept.append((size, max(share, kept[-1][1] * size / kept[-1][0]) if kept else share))
    return kept[::-1]


def _exactly_one(point: Point, rate: str) -> Point:
    if (point.share is None) == (getattr(point, rate) is None):
        raise ValueError(f"give either share or {rate}")
    if point.device is None and point.share is None:
        raise ValueError("an entry for any device gives its share of the peak")
    return point


def _peak(device: Hardware, dtype: str) -> float:
    peak = device.peak_flops.get(dtype)
    if peak is None:
        raise UserError(f"{device.name} has no peak for {dtype} in the hardware catalogue (it has: {', '.join(device.peak_flops)})")
    return peak


def _flops(tflop_per_s: float | None) -> float:
    assert tflop_per_s is not None
    return tflop_per_s * 1e12
