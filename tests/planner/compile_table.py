"""Compile rows of the tables of compiled steps again: `python tests/planner/compile_table.py TABLE.json [--having TEXT]`.

Rows (config, overrides, mesh) whose text holds TEXT, all without it, are compiled for H100s (block-scaled matmuls: GB200s; a row with the
key cluster: for the GPUs of that) on this machine and written back with what came out; add a row with these keys to have it measured, and
`"heap_at": {}` for its heap at the points of the plan. A row takes 5 to 30 s.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import Config
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.heap import read_heap
from ridgeline.hlo.parse import parse
from ridgeline.launch.environment import run_flags
from ridgeline.trainer.aot.compile import Compiled, Request, compile_many

CLUSTER, DEVICES_PER_NODE = "dgx-h100", 8
BLOCK_SCALED_CLUSTER = "gb200-nvl72"
"""Hopper has no block-scaled matmuls."""
SIZES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")
SMALL_BYTES = 1e6
"""Collectives that move less in a step are left out."""
AT_ONCE = 6
"""Rows per process: what is done is written before the next are begun."""


def resolved(case: dict[str, Any]) -> Config:
    """Return the config of a row."""
    mesh = [f"mesh.{axis}={size}" for axis, size in {"fsdp": 1, **case["mesh"]}.items()]
    return load(case["config"], [*case["overrides"], *mesh, "precision.compute=bfloat16"]).config


def request(case: dict[str, Any], how: str) -> Request:
    """Return what to compile, with the flags that the table says."""
    devices, config = math.prod(case["mesh"].values()), resolved(case)
    name = case.get("cluster", BLOCK_SCALED_CLUSTER if config.precision.block_scaled else CLUSTER)
    cluster = load_cluster(name).config.model_copy(update={"devices_per_node": min(devices, DEVICES_PER_NODE), "nodes": None})
    nodes = -(-devices // DEVICES_PER_NODE)
    if "flags of a run" in how:
        flags, level = run_flags(config, cluster.device)
        return Request.on(config, cluster, nodes, xla_flags=flags, optimization_level=level)
    return Request.on(config, cluster, nodes, optimization_level="O1" if "OPTIMIZATION_LEVEL=O1" in how else None)


def measured(case: dict[str, Any], compiled: Compiled) -> dict[str, Any]:
    """Return the row with the sizes and collectives of its compiled step."""
    moved: dict[str, float] = defaultdict(float)
    module = parse(compiled.hlo_text)
    for each in collectives(module, compiled.mesh):
        assert each.computation in module.certain, f"{each.name}: in a loop of unknown count"  # those of attention have none
        moved[f"{each.kind} {'+'.join(each.axes or ('?',))}"] += each.total_bytes
    rows = {name: int(size) for name, size in sorted(moved.items()) if size >= SMALL_BYTES}
    heap_at = {}
    if "heap_at" in case:
        heap = read_heap(compiled.buffers_text or "", compiled.live_ranges_text or "")
        heap_at = {"heap_at": {point: heap.live[position] for point, position in heap.peaks(module).items()}}
    return {
        **{key: case[key] for key in ("config", "overrides", "mesh", "cluster") if key in case},
        **{name: getattr(compiled, name) for name in SIZES},
        **heap_at,
        "collectives": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Compile and write; 1 when a row did not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--having", default="")
    args = parser.parse_args(arguments)
    table = json.loads(args.table.read_text())
    how, cases = table["how"], table["cases"]
    at_once = 1 if "flags of a run" in how else AT_ONCE  # flags belong to the process
    chosen = [n for n, case in enumerate(cases) if args.having in json.dumps([case[k] for k in ("config", "overrides", "mesh")])]
    failed = 0
    for first in range(0, len(chosen), at_once):
        some = chosen[first : first + at_once]
        for number, result in zip(some, compile_many([request(cases[n], how) for n in some]), strict=True):
            if isinstance(result, UserError):
                failed = 1
                print(number, result, flush=True)
                continue
            before, cases[number] = cases[number], measured(cases[number], result)
            was = f"{before['temp_bytes'] / 1e9:.2f}" if "temp_bytes" in before else "new"
            print(f"{number:3} {cases[number]['temp_bytes'] / 1e9:7.2f} GB ({was}) {before['config']} {before['overrides']}", flush=True)
        rows = ",\n".join(json.dumps(case) for case in cases)
        args.table.write_text(f'{{\n"how": {json.dumps(how)},\n"cases": [\n{rows}\n]}}\n')
    return failed


if __name__ == "__main__":
    sys.exit(main())
