"""The format of calibration files: measured rates of devices and links, read and merged.

The shipped file (planner/calibration.yaml) has published measurements with their sources. `ridge calibrate` writes a file of the same
format for the machine it runs on. `planner.calibration` turns a file into predicted rates.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError, field_validator, model_validator

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.fields import Slot
from ridgeline.configs.section import Fraction, Name, PositiveFloat, PositiveInt, Section
from ridgeline.configs.validation_errors import validation_error
from ridgeline.configs.yaml_tree import plain, read_file
from ridgeline.planner.layer_costs import LayerPoint

DTYPE_BYTES = {"float32": 4.0, "tfloat32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5}
"""Bytes of a matmul input, by the dtypes of peak_flops in the hardware catalogue."""
SHIPPED = Path(__file__).with_name("calibration.yaml")
Point = TypeVar("Point", bound="_Measured")
Rate = PositiveFloat | None


class _Measured(Section):
    """One measurement: an absolute rate, or a share of the device's datasheet peak."""

    device: Name | None = None
    """Name in the hardware catalog. null: any device without entries of its own (then only `share` is allowed)."""
    source: str
    """Where the number was published, or how it was measured."""
    share: Fraction | None = None
    """Fraction of the datasheet peak, 0 to 1."""


class MatmulPoint(_Measured):
    """Measured rate of an [M, K] x [K, N] matmul."""

    dtype: Name
    """dtype of the inputs, as in peak_flops of the hardware catalog."""
    m: PositiveInt
    """M: rows of the result."""
    n: PositiveInt
    """N: columns of the result."""
    k: PositiveInt
    """K: the contracted dim."""
    tflop_per_s: Rate = None
    """1e12 FLOP/s; a multiply-add counts as 2."""

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in DTYPE_BYTES:
            raise unknown_name("dtype", dtype, DTYPE_BYTES)
        return dtype

    @model_validator(mode="after")
    def _one_rate(self) -> MatmulPoint:
        return _exactly_one(self, "tflop_per_s")


class AttentionPoint(_Measured):
    """Measured rate of fused attention, forward plus backward, in FLOPs as planner.flops counts them (backward is twice forward)."""

    seq_len: PositiveInt
    """Sequence length in tokens."""
    head_dim: PositiveInt
    """Width of one head."""
    tflop_per_s: Rate = None
    """1e12 FLOP/s in a 16-bit dtype."""

    @model_validator(mode="after")
    def _one_rate(self) -> AttentionPoint:
        return _exactly_one(self, "tflop_per_s")


class MemoryPoint(_Measured):
    """Measured device memory bandwidth of streaming kernels."""

    gb_per_s: Rate = None
    """GB/s (1e9), reads plus writes."""

    @model_validator(mode="after")
    def _one_rate(self) -> MemoryPoint:
        return _exactly_one(self, "gb_per_s")


class LinkCurve(Section):
    """Measured bandwidth of one kind of link, by message size."""

    kind: Name
    """nvlink, pcie, network or memory, as in cluster files."""
    device: Name | None = None
    """Device the curve was measured with; null: any device without a curve of its own."""
    in_switch: bool = False
    """True: all-reduces that the switch computes; false: ring algorithms."""
    points: list[tuple[PositiveFloat, PositiveFloat]] = []
    """(bytes one device sends in the whole collective, fraction of the link's peak), latency excluded.
    With in_switch: the bytes of the tensor instead."""
    measured: list[tuple[PositiveFloat, PositiveFloat]] = []
    """As `points`, with GB/s (1e9) instead of the fraction; values above the link's peak count as the peak."""
    source: str
    """Where the numbers were published, or how they were measured."""

    @model_validator(mode="after")
    def _has_points(self) -> LinkCurve:
        if bool(self.points) == bool(self.measured):
            raise ValueError("give either points (fractions of the peak) or measured (GB/s)")
        sizes = [size for size, _ in self.points or self.measured]
        if len(set(sizes)) != len(sizes):
            raise ValueError("a message size is listed twice")
        if any(share > 1 for _, share in self.points):
            raise ValueError("points: a fraction is above 1 (is the link's bandwidth in the cluster file that of one direction?)")
        return self

    def shares(self, peak_bytes_per_s: float) -> list[tuple[float, float]]:
        """Return (bytes, fraction of this peak) pairs."""
        return self.points or [(size, min(1.0, rate * 1e9 / peak_bytes_per_s)) for size, rate in self.measured]


class HostPoint(Section):
    """Measured rates of the host."""

    copy_gb_per_s: PositiveFloat | None = None
    """GB/s (1e9) from host memory to one device; null: not measured, the datasheet's value is used."""
    input_tokens_per_s: PositiveFloat | None = None
    """Tokens per second and host of the input pipeline; null: not measured, the planner's default is used."""
    dispatch_us: PositiveFloat | None = None
    """Microseconds of host time to dispatch one compiled step; null: not measured."""
    source: str = ""
    """How it was measured."""


class CalibrationFile(Section):
    """A calibration file."""

    name: str = "calibration"
    """Name printed with every prediction that uses this file."""
    matmul: list[MatmulPoint] = []
    """Matmul rates."""
    attention: list[AttentionPoint] = []
    """Rates of fused attention."""
    memory: list[MemoryPoint] = []
    """Device memory bandwidths."""
    links: list[LinkCurve] = []
    """Link bandwidths by message size."""
    host: HostPoint = HostPoint()
    """Host rates."""
    layers: list[LayerPoint] = []
    """Cost of each rematerialization policy by layer shape, from `ridge bench remat --into FILE` (planner/layer_costs.py)."""


def read_with_shipped(path: Path | None) -> CalibrationFile:
    """Read a file merged over the shipped one; None: the shipped one alone. Raises UserError with file and line."""
    return _shipped() if path is None else _merged(_shipped(), _read(path))


def read_own(path: Path) -> CalibrationFile:
    """Read a machine's file without the shipped measurements; a missing file is an empty one. Raises UserError for an invalid file."""
    return _read(path) if path.exists() else CalibrationFile(name=path.stem)


def write_calibration(path: Path, measured: CalibrationFile) -> None:
    """Write a calibration file. Raises UserError when it cannot be written."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 160
    try:
        with path.open("w") as file:
            file.write(
                "# Written by ridge calibrate. --calibration uses these figures in place of the shipped ones (planner/calibration.py).\n"
            )
            yaml.dump(measured.model_dump(mode="json", exclude_defaults=True), file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def add_layer(file: CalibrationFile, point: LayerPoint) -> CalibrationFile:
    """Return the file with a layer measurement added; it replaces an earlier one of the same shape and device."""
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


def _merged(shipped: CalibrationFile, own: CalibrationFile) -> CalibrationFile:
    """Merge a machine's file over the shipped one.

    Its entries replace the shipped ones of the same device (matmul, attention, memory) or the same kind of link.
    """
    devices = {(type(p), p.device) for p in (*own.matmul, *own.attention, *own.memory)}
    kinds = {(curve.kind, curve.in_switch) for curve in own.links}
    return CalibrationFile(
        name=own.name,
        matmul=[p for p in shipped.matmul if (MatmulPoint, p.device) not in devices] + own.matmul,
        attention=[p for p in shipped.attention if (AttentionPoint, p.device) not in devices] + own.attention,
        memory=[p for p in shipped.memory if (MemoryPoint, p.device) not in devices] + own.memory,
        links=[curve for curve in shipped.links if (curve.kind, curve.in_switch) not in kinds] + own.links,
        host=own.host if own.host != HostPoint() else shipped.host,
        layers=shipped.layers + own.layers,
    )


def _exactly_one(point: Point, rate: str) -> Point:
    if (point.share is None) == (getattr(point, rate) is None):
        raise ValueError(f"give either share or {rate}")
    if point.device is None and point.share is None:
        raise ValueError("an entry for any device (no `device`) needs share, not an absolute rate")
    return point
