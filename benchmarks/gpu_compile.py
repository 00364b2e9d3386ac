"""Compile every row of `benchmarks/gpu.py` for GPUs that are not there, to find early what does not compile or fit.

`python benchmarks/gpu_compile.py [ROW ...] [--device h200 h100] [--output FILE]`

For each device the planner chooses rows and layers as gpu.py does; the step is compiled with the XLA flags of a run. The table compares the
planned with the compiled memory, and names what the installed jaxlib did not accept. One compilation at a time, 10 to 60 s each on two
cores. Needs XLA's CUDA plugin, ptxas, cuBLAS and cuDNN (`trainer/aot/compile.py`) and the packages of a run. Exit code: 1 when a row did
not compile, does not fit, lost a flag, or has no 8-bit kernel where it must have one; else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline
import gpu_needs  # noqa: F401  # reports missing packages
from gpu_rows import EIGHT_BIT_KERNEL, ROWS, Row, choose

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.launch import environment
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.search import capacity_bytes
from ridgeline.planner.step_time import Machine
from ridgeline.trainer.aot.compile import Request, compile_ahead
from ridgeline.trainer.aot.report import build_report

GB = 1e9


def one_device(name: str) -> ClusterConfig:
    """Return the node of a shipped cluster with one device, as the planner of gpu.py sees it."""
    return load_cluster(f"dgx-{name}").config.model_copy(update={"devices_per_node": 1, "links": []})


def dropped_flags(config: Config, device: str) -> list[str]:
    """Return the flags of a run that the installed jaxlib does not support: another process parses them."""
    return [setting.name for setting in environment.settings_on(config, device) if setting.chosen == "dropped"]


def compile_row(row: Row, place: ClusterConfig, timeout_s: float) -> dict[str, Any]:
    """Return planned and compiled figures of a row on a device, or `error`."""
    rates = load_calibration(None)
    found: dict[str, Any] = {"row": row.name, "device": place.device}
    try:
        config, best = choose(row, place, rates)
    except RuntimeError as error:
        return found | {"error": str(error)}
    found |= {
        "layers": config.model.num_layers, "rows": config.data.batch_size, "seq_len": config.data.seq_len,
        "planned_bytes": best.memory.total_bytes, "planned_step_s": best.step.step_s,
    }  # fmt: skip
    flags, level = environment.run_flags(config, place.device)
    found["dropped"] = dropped_flags(config, place.device)
    request = Request.on(config, place, 1, xla_flags=flags, optimization_level=level)
    try:
        compiled = compile_ahead(request, timeout_s=timeout_s)
    except UserError as error:
        return found | {"error": str(error)}
    report = build_report(request, place, compiled, rates)
    return found | {
        "compiled_bytes": report.needed_bytes, "capacity_bytes": capacity_bytes(Machine(place, rates, 1)),
        "fits": report.fits, "compile_s": compiled.compile_s, "versions": compiled.versions, "flags": list(flags),
        "scatters": compiled.hlo_text.count(" scatter("), "sorts": compiled.hlo_text.count(" sort("),
        "eight_bit_kernels": compiled.hlo_text.count(EIGHT_BIT_KERNEL) if config.precision.eight_bit else None,
        "simulated_step_s": report.schedule.step_s,
    }  # fmt: skip


def wrong(found: dict[str, Any]) -> str | None:
    """Return what is wrong with a row; None if nothing is."""
    if "error" in found:
        return str(found["error"])
    if found["dropped"]:
        return f"jaxlib does not support {', '.join(found['dropped'])}"
    if found["eight_bit_kernels"] == 0:
        return "no 8-bit kernel: it multiplies in 16 bits"
    return None if found["fits"] else f"{found['compiled_bytes'] / GB:.1f} GB do not fit"


def line(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    head = f"{found['row']:20}{found['device']:10}"
    if "compiled_bytes" not in found:
        return f"{head}FAILED: {wrong(found)}"
    shape = f"{found['layers']}L {found['rows']}x{found['seq_len']}"
    times = f"{found['planned_step_s'] * 1e3:9,.0f}{found['simulated_step_s'] * 1e3:11,.0f}"
    sizes = f"{found['planned_bytes'] / GB:9.1f}{found['compiled_bytes'] / GB:10.1f}{found['compile_s']:7.0f}"
    return f"{head}{shape:>14}{times}{sizes}  {wrong(found) or 'ok'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the rows and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row.name for row in ROWS)}; default: all")
    parser.add_argument("--device", nargs="+", default=["h200", "h100"], choices=["h200", "h100"])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-compile.json"))
    parser.add_argument("--timeout-s", type=float, default=600.0, help="time limit of one compilation")
    args = parser.parse_args(arguments)
    known = {row.name: row for row in ROWS}
    for name in args.rows:
        if name not in known:
            parser.error(f"no row '{name}'; there are {', '.join(known)}")
    results: list[dict[str, Any]] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'row':20}{'device':10}{'shape':>14}{'plan ms':>9}{'simulated':>11}{'plan GB':>9}{'compiled':>10}{'s':>7}")
    for device in args.device:
        place = one_device(device)
        for row in [known[name] for name in args.rows] or ROWS:
            results.append(compile_row(row, place, args.timeout_s))
            print(line(results[-1]), flush=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(wrong(found) for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
