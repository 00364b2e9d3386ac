"""What the datasheets promise: peak FLOP/s of a device by dtype. An unknown device has none; nothing is guessed or borrowed."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

CATALOGUE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True)
class Hardware:
    """One device of the catalogue (planner/hardware.yaml)."""

    name: str
    kinds: tuple[str, ...]
    """Regular expressions over the whole `device_kind` of JAX."""
    peak_flops: dict[str, float]
    """Dense peak FLOP/s by dtype of the matmul inputs."""
    source: str


@functools.cache
def catalogue() -> tuple[Hardware, ...]:
    """Read the catalogue."""
    entries = YAML(typ="safe").load(CATALOGUE)
    return tuple(
        Hardware(name, tuple(e["kinds"]), {dtype: float(peak) for dtype, peak in e["peak_flops"].items()}, e["source"])
        for name, e in entries.items()
    )


def find_hardware(device_kind: str) -> Hardware | None:
    """Find the catalogue entry of a JAX `device_kind`; None when it is not listed."""
    matches = [h for h in catalogue() if any(re.fullmatch(kind, device_kind) for kind in h.kinds)]
    assert len(matches) <= 1, f"{device_kind!r} matches {[m.name for m in matches]} in {CATALOGUE.name}"
    return matches[0] if matches else None


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the dense datasheet peak in FLOP/s of one device.

    Args:
      device_kind: `jax.Device.device_kind`.
      dtype: of the matmul inputs: float32 (plain units), tfloat32, bfloat16, float16, float8, float4. See `matmul_dtype`.

    Returns:
      FLOP/s, or None when the device or the dtype is not in the catalogue.
    """
    hardware = find_hardware(device_kind)
    return None if hardware is None else hardware.peak_flops.get(dtype)


def matmul_dtype(compute: str, matmul_precision: str) -> str:
    """Name the arithmetic an NVIDIA GPU uses for matmuls of a compute dtype.

    XLA runs float32 matmuls in TF32 at `default` and `high` precision and in plain float32 at `highest` (jax.lax.Precision).
    """
    return "tfloat32" if compute == "float32" and matmul_precision != "highest" else compute
