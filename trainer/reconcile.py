"""The plan of a run beside the step it compiled: memory and communication, each difference explained; plan.json of the run directory.

Written when a run starts, so that what was measured can be compared with what was expected, together with the step's own report
(compile.json, trainer/aot/record.py). `ridge compile` shows the same rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.hlo.collectives import Collective, collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import Hardware, find_hardware
from ridgeline.planner.memory import MemoryEstimate, memory_per_device
from ridgeline.planner.step_time import step_time
from ridgeline.trainer.aot.record import compile_record
from ridgeline.trainer.aot.traffic import SMALL_BYTES, Traffic, compare_traffic, expected
from ridgeline.trainer.checkpoint.integrity import write_atomically

CLOSE = 0.05
"""Memory this close to the plan agrees: the accuracy the model is held to."""
SHIPPED = {"a100-80gb": "dgx-a100", "h100-sxm": "dgx-h100", "h200-sxm": "dgx-h200", "b200": "dgx-b200", "gb200": "gb200-nvl72"}
"""Device -> the shipped cluster file whose links are assumed for a run that names none."""


def memory_rows(estimate: MemoryEstimate, argument_bytes: int, temp_bytes: int) -> list[dict[str, Any]]:
    """Return planned and compiled bytes of arguments, temporaries and both together, with an explanation of each difference.

    What donated outputs share with arguments counts once, as in the plan.
    """
    fullest = max((p for p in estimate.components.items() if p[0] not in _NOT_TEMPORARY), key=lambda p: p[1].bytes)[0]
    temporaries = f"the plan's fullest moment is '{estimate.moment}', most of it {fullest.replace('_', ' ')}"
    planned_peak, compiled_peak = estimate.compiled_bytes, argument_bytes + temp_bytes
    return [
        _memory_row("arguments", estimate.argument_bytes, argument_bytes, "state and batch: only padding of shards can differ"),
        _memory_row(
            "temporaries", estimate.temp_bytes, temp_bytes, f"{temporaries}; the compiler schedules and combines by rules of its own"
        ),
        _memory_row("step", planned_peak, compiled_peak, "arguments and temporaries"),
    ]


_NOT_TEMPORARY = ("parameters", "moments", "batch", "runtime_reserve", "fragmentation")


def _memory_row(what: str, planned: int, compiled: int, why: str) -> dict[str, Any]:
    difference = compiled - planned
    agrees = abs(difference) <= max(SMALL_BYTES, CLOSE * planned)
    share = f"{difference / planned:+.1%}" if planned else "not planned"
    return {
        "what": what,
        "planned_bytes": planned,
        "compiled_bytes": compiled,
        "difference_bytes": difference,
        "agrees": agrees,
        "explanation": "as planned" if agrees else f"{share}: {why}",
    }


def traffic_rows(traffic: Sequence[Traffic], found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Return planned and compiled bytes of every kind of collective over every set of axes, with an explanation of each difference."""
    return [
        {
            "where": row.where,
            "kind": row.kind,
            "axes": list(row.axes),
            "planned_bytes": row.planned_bytes,
            "compiled_bytes": row.compiled_bytes,
            "difference_bytes": row.excess_bytes,
            "agrees": row.agrees,
            "explanation": _explain(row, found),
        }
        for row in traffic
    ]


def _explain(row: Traffic, found: Sequence[Collective]) -> str:
    if row.agrees:
        return "as planned"
    if row.excess_bytes < 0:
        return "the compiler needs fewer: it joined some, replaced them by another kind, or counts of an unrolled loop are unknown"
    group = [c for c in found if c.kind == row.kind and (c.axes or ("?",)) == row.axes]
    largest = max(group, key=lambda c: c.total_bytes)
    place = f"{largest.source.file}:{largest.source.line}" if largest.source else largest.op_name or largest.name
    reason = "nothing of this kind is planned" if not row.planned_bytes else "more than planned"
    return f"{reason}: the largest is {largest.bytes / 1e6:.1f} MB x {largest.count:g} at {place}"


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
    """Write <run_dir>/plan.json and compile.json for a step that was just compiled; return why there are none, or None.

    It never raises: a run does not end over a comparison.

    Args:
      mesh: axis -> devices, all axes.
      compiled_step: what jax's `.lower(...).compile()` returned.
      device_kind: of the devices that run it, as JAX names them; it is looked up in the catalogue.
      gpu: whether they are GPUs.
      parts: where the step came from and the seconds of each part (observe.compilation).
    """
    name = "plan.json"
    try:
        module, sizes = parse(compiled_step.as_text()), compiled_step.memory_analysis()
        found = collectives(module, mesh)
        made = build_plan(run_dir, config, mesh, sizes, found, device_kind=device_kind, gpu=gpu)
        write_atomically(run_dir / name, json.dumps(made, indent=1).encode())
        name = "compile.json"
        rows = {"traffic": made["communication"], "memory": made["memory"]}
        report = compile_record(mesh, module, sizes, found) | rows | {"device": device_kind, **(parts or {})}
        write_atomically(run_dir / name, json.dumps(report, indent=1).encode())
    except Exception as error:
        return f"no {name}: {type(error).__name__}: {error}"
    return None


def build_plan(
    run_dir: Path, config: Config, mesh: Mapping[str, int], sizes: Any, found: Sequence[Collective], *, device_kind: str, gpu: bool
) -> dict[str, Any]:
    """Return what plan.json holds: `sizes` from the step's memory analysis, the collectives `found` in it, the rest as of `record_plan`."""
    estimate = memory_per_device(config, mesh, gpu=gpu)
    traffic = compare_traffic(config, mesh, found, gpu=gpu)
    made: dict[str, Any] = {
        "mesh": dict(mesh),
        "devices": math.prod(mesh.values()),
        "device": device_kind,
        "memory_bytes": estimate.total_bytes,
        "components": estimate.bytes_by_component(),
        "collectives": [
            {"what": p.what, "where": p.where, "kind": p.kind, "axes": list(p.axes), "bytes": p.bytes, "count": p.count}
            for p in expected(config, mesh, gpu=gpu)
        ],
        "compiled": {
            "argument_bytes": sizes.argument_size_in_bytes,
            "output_bytes": sizes.output_size_in_bytes,
            "alias_bytes": sizes.alias_size_in_bytes,
            "temp_bytes": sizes.temp_size_in_bytes,
        },
        "memory": memory_rows(estimate, sizes.argument_size_in_bytes, sizes.temp_size_in_bytes),
        "communication": traffic_rows(traffic, found),
    }
    return made | _predicted_time(run_dir, config, mesh, find_hardware(device_kind))


def _predicted_time(run_dir: Path, config: Config, mesh: Mapping[str, int], device: Hardware | None) -> dict[str, Any]:
    """Return the predicted step time and what its links are those of, or why there is none."""
    if device is None or device.nominal:
        return {"no_step_s": "the datasheet of this device is not known" if device is None else "the peaks of this device are only nominal"}
    cluster = _cluster(run_dir, device)
    if cluster is None:
        return {"no_step_s": f"no cluster file tells the links between devices of kind {device.name}"}
    predicted = step_time(config, mesh, cluster, load_calibration())
    return {"step_s": predicted.step_s, "breakdown_s": predicted.breakdown_s, "mfu": predicted.mfu, "cluster": cluster.name}


def _cluster(run_dir: Path, device: Hardware) -> ClusterConfig | None:
    """Return the cluster file the run was submitted with, else the shipped one of the same device."""
    for file in sorted(run_dir.glob("slurm/*/cluster.yaml"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            cluster = load_cluster(str(file)).config
        except UserError:
            continue
        if cluster.device == device.name:
            return cluster
    return load_cluster(SHIPPED[device.name]).config if device.name in SHIPPED else None
