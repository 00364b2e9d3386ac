"""Keeps JAX from loading its CUDA plugin on a machine without NVIDIA hardware.

The extra `aot` installs the plugin to compile for GPUs elsewhere. Without a GPU, JAX prints a traceback when it loads the plugin, and then
uses the CPU as it should. On a machine with NVIDIA hardware nothing is hidden, so that a missing driver is reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_NVIDIA = "0x10de"
_DEVICE_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg")
"""Of a driver or a container; of Tegra, whose GPU is no PCI device; of the Windows subsystem for Linux."""
_CUDA = ("cuda", "gpu")


def has_nvidia_hardware(root: Path = Path("/")) -> bool:
    """Return whether the machine has an NVIDIA device, with or without a driver."""
    if (root / "proc/driver/nvidia").exists() or any(file for name in _DEVICE_FILES for file in (root / "dev").glob(name)):
        return True
    return any(path.read_text().strip() == _NVIDIA for path in (root / "sys/bus/pci/devices").glob("*/vendor"))


def hide_unusable_cuda_plugin(env: Mapping[str, str] = os.environ) -> None:
    """Put empty modules in place of JAX's CUDA plugin where it cannot work.

    No effect once JAX is imported, or if JAX_PLATFORMS names CUDA.
    """
    if "jax" in sys.modules or any(name in env.get("JAX_PLATFORMS", "").split(",") for name in _CUDA) or has_nvidia_hardware():
        return
    for major in (12, 13):
        package = f"jax_cuda{major}_plugin"
        if (spec := PathFinder.find_spec(package)) is None:
            continue
        empty, plugin = ModuleType(package), ModuleType(f"jax_plugins.xla_cuda{major}")
        empty.__spec__, empty.__path__ = spec, []
        plugin.__dict__["initialize"] = lambda: None
        sys.modules |= {package: empty, plugin.__name__: plugin}
