"""plan.json and compile.json of a run: the plan compared with the compiled step, and the figures of the compiled step.

Written at every start, so that measurements can be compared with them. compile.json has the keys of `ridge compile --json`, without what
takes long to compute: buffers at the peak, the roofline and the simulated schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.hlo.collectives import Collective, collectives
from ridgeline.hlo.module import Module, Source
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import kernels, total_flops
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.planner.hardware import Hardware, find_hardware
from ridgeline.planner.links import assumed_cluster
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.step_time import step_time
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.files import write_record
from ridgeline.rundir.records import COMPILE_FILE, PLAN_FILE, CompiledCollective, CompileRecord, PlannedCollective, PlanRecord, StepSizes
from ridgeline.trainer.plan_comparison import compare_traffic, memory_rows, traffic_rows


def record_plan(
    run_dir: Path,
    config: Config,
    mesh: Mapping[str, int],
    compiled_step: Any,
    *,
    device_kind: str,
    gpu: bool,
    parts: Mapping[str, Any] | None = None,
) -> str | None:
    """Write plan.json and compile.json of a compiled step. Return None, or why they could not be written: this never raises.

    Args:
      mesh: axis -> devices, all axes.
      compiled_step: the result of jax's `.lower(...).compile()`.
      device_kind: JAX's name of the devices that run it; looked up in the hardware catalog.
      gpu: whether they are GPUs.
      parts: the source of the compiled step and the seconds of each part of its compilation (observe.compilation).
    """
    name = PLAN_FILE
    try:
        module, sizes = parse(compiled_step.as_text()), compiled_step.memory_analysis()
        found = collectives(module, mesh)
        made = build_plan(run_dir, config, mesh, sizes, found, device_kind=device_kind, gpu=gpu)
        write_record(run_dir / name, made)
        name = COMPILE_FILE
        more = {"traffic": made.communication, "memory": made.memory, "device": device_kind, **(parts or {})}
        write_record(run_dir / name, compile_record(mesh, module, sizes, found).model_copy(update=more))
    except Exception as error:
        return f"no {name}: {type(error).__name__}: {error}"
    return None


def build_plan(
    run_dir: Path, config: Config, mesh: Mapping[str, int], sizes: Any, found: Sequence[Collective], *, device_kind: str, gpu: bool
) -> PlanRecord:
    """Return the contents of plan.json. `sizes`: memory analysis of the step; `found`: its collectives; others as in `record_plan`."""
    estimate = memory_per_device(config, mesh, gpu=gpu, device=find_hardware(device_kind))
    traffic = compare_traffic(config, mesh, found, gpu=gpu)
    return PlanRecord(
        mesh=dict(mesh),
        devices=math.prod(mesh.values()),
        device=device_kind,
        memory_bytes=estimate.total_bytes,
        components=estimate.bytes_by_component(),
        collectives=tuple(
            PlannedCollective(what=p.what, where=p.where, kind=p.kind, axes=p.axes, bytes=p.bytes, count=p.count)
            for p in compiled_collectives(config, mesh, gpu=gpu)
        ),
        compiled=_sizes(sizes),
        memory=tuple(memory_rows(estimate, sizes.argument_size_in_bytes, sizes.temp_size_in_bytes)),
        communication=tuple(traffic_rows(traffic, found)),
        **_predicted_time(run_dir, config, mesh, find_hardware(device_kind)),
    )


def _sizes(analysis: Any) -> StepSizes:
    """Return the record of jax's memory analysis."""
    return StepSizes(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
    )


def _predicted_time(run_dir: Path, config: Config, mesh: Mapping[str, int], device: Hardware | None) -> dict[str, Any]:
    """Return the predicted step time and the cluster whose links it assumes, or why there is none."""
    if device is None or device.nominal:
        return {
            "no_step_s": "this device is not in the hardware catalog" if device is None else "the peaks of this device are only nominal"
        }
    cluster = _cluster(run_dir, device)
    if cluster is None:
        return {"no_step_s": f"no cluster file has the links between devices of kind {device.name}"}
    predicted = step_time(config, mesh, cluster, load_calibration())
    return {"step_s": predicted.step_s, "breakdown_s": predicted.breakdown_s, "mfu": predicted.mfu, "cluster": cluster.name}


def _cluster(run_dir: Path, device: Hardware) -> ClusterConfig | None:
    """Return the cluster file that the run was submitted with, else the one whose links the catalog assumes for this device."""
    try:
        cluster = RunDir(run_dir).cluster
    except UserError:
        cluster = None  # a damaged file must not end a run
    return cluster if cluster is not None and cluster.device == device.name else assumed_cluster(device)


def compile_record(mesh: Mapping[str, int], module: Module, sizes: Any, found: Sequence[Collective]) -> CompileRecord:
    """Return the figures of a compiled step for compile.json.

    Args:
      mesh: axis -> devices.
      module: its parsed HLO.
      sizes: jax's memory analysis of it, per device.
      found: its collectives.
    """
    return CompileRecord(
        **dict(_sizes(sizes)),
        flops=total_flops(kernels(module)),
        mesh=dict(mesh),
        versions={"jax": version("jax"), "jaxlib": version("jaxlib")},
        collectives=tuple(compiled_collective(collective) for collective in found),
        uncounted_loops=tuple(module.unknown_loops),
    )


def compiled_collective(collective: Collective) -> CompiledCollective:
    """Return the record of one collective."""
    return CompiledCollective(
        kind=collective.kind,
        axes=collective.axes,
        dtype=collective.dtype,
        bytes=collective.bytes,
        count=collective.count,
        overlapped=overlapped(collective),
        name=collective.name,
        op_name=collective.op_name,
        source=source_text(collective.source),
    )


def overlapped(collective: Collective) -> bool:
    """Return whether compute is scheduled between the start and the done operation of a collective."""
    return collective.asynchronous and collective.compute_between > 0


def source_text(source: Source | None) -> str | None:
    """Return file:line of a source line."""
    return None if source is None else f"{source.file}:{source.line}"
