"""The report of the step a run compiled: compile.json of the run directory, with the names of `ridge compile --json` as far as it goes.

What takes long is left to `ridge compile`: buffers at the peak, the roofline walk and the played schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from ridgeline.hlo.collectives import Collective
from ridgeline.hlo.parse import Module, Source
from ridgeline.hlo.roofline import kernels, total_flops


def compile_record(mesh: Mapping[str, int], module: Module, sizes: Any, found: Sequence[Collective]) -> dict[str, Any]:
    """Return the figures of a compiled step.

    Args:
      mesh: axis -> devices.
      module: its parsed HLO.
      sizes: jax's memory analysis of it, per device.
      found: its collectives.
    """
    return {
        "argument_bytes": sizes.argument_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
        "flops": total_flops(kernels(module)),
        "mesh": dict(mesh),
        "versions": {"jax": version("jax"), "jaxlib": version("jaxlib")},
        "collectives": [collective_json(collective) for collective in found],
        "uncounted_loops": module.unknown_loops,
    }


def collective_json(collective: Collective) -> dict[str, Any]:
    """Return one collective as plain values."""
    return {
        "kind": collective.kind,
        "axes": list(collective.axes) if collective.axes is not None else None,
        "dtype": collective.dtype,
        "bytes": collective.bytes,
        "count": collective.count,
        "overlapped": overlapped(collective),
        "name": collective.name,
        "op_name": collective.op_name,
        "source": source_text(collective.source),
    }


def overlapped(collective: Collective) -> bool:
    """Whether compute is scheduled between the start and the done of a collective."""
    return collective.asynchronous and collective.compute_between > 0


def source_text(source: Source | None) -> str | None:
    """Return file:line of a source line."""
    return None if source is None else f"{source.file}:{source.line}"
