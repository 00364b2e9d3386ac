"""Share of communication that overlaps with compute at scale, from ahead-of-time compiled steps.

`python benchmarks/overlap.py [--models 8b 70b 405b] [--devices 64 512 4096] [--json FILE]`

For each model and number of H100, compiles the planner's fastest layout on this machine (`ridge compile`), with ring matmuls where it uses
tensor parallelism. Where the state does not fit, low-precision state is used (NARROW) and the row is marked with a star. Columns: the share
of collective bytes that overlap with compute, and the exposed GB per step and device; the exposed communication time when the compiled
schedule is simulated at the planner's rates, and its share of the step; collectives per layer and microbatch, compared with the minimum;
compile time in seconds.
The minimum, from the plan: the parameters of a layer are gathered once forward and once backward, and their gradients reduced once, over
fsdp and again over data; tensor parallelism gathers and scatters the residual stream around attention and MLP, forward, backward and where
it is recomputed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.load import load
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.collectives import planned_collectives
from ridgeline.planner.search import Candidate, evaluate, search_scale
from ridgeline.planner.step_time import Machine

MODELS = {"8b": "llama-3.1-8b", "70b": "llama-3.1-70b", "405b": "llama-3.1-405b"}
SEQ_LEN, ROWS_PER_DEVICE, LEAST_ROWS = 8192, 1, 256
CLUSTER = "dgx-h100"
NARROW = ("precision.params=bfloat16", "precision.stochastic_rounding=true", "precision.moments=int8", "precision.gradients=bfloat16")
LAYER_COLLECTIVES = 0.1
"""A collective that runs at least this often per layer belongs to the layers; unrolled loops have each of them several times."""
GB = 1e9


def layout(model: str, devices: int, more: tuple[str, ...] = ()) -> tuple[Candidate, list[str]]:
    """Return the planner's fastest layout and the overrides that choose it. Raises LookupError where nothing fits."""
    cluster = load_cluster(CLUSTER).config
    rows = max(LEAST_ROWS, ROWS_PER_DEVICE * devices)
    base = [f"data.seq_len={SEQ_LEN}", f"data.batch_size={rows}", "data.document_masking=false", "precision.compute=bfloat16", *more]
    config = load(f"models/{MODELS[model]}", base).config
    nodes, rates = devices // cluster.devices_per_node, load_calibration(None)
    best = search_scale(config, cluster, rates, nodes, 1e12).best
    if best is None:
        raise LookupError(f"no layout of {devices} {CLUSTER} GPUs holds it")
    chosen = best.layout
    if chosen.tensor > 1:
        base.append("compute.tensor_overlap=ring")
        ringed = load(f"models/{MODELS[model]}", base).config
        best = evaluate(ringed, chosen, best.memory, Machine(cluster, rates, devices), 1e12, nodes)
    mesh = [f"mesh.{axis}={size}" for axis, size in chosen.sizes.items()]
    remat = [
        f"compute.remat.policy={chosen.remat.policy}",
        *([f"compute.remat.names={list(chosen.remat.names)}"] if chosen.remat.names else []),
    ]
    return best, [*base, *mesh, f"trainer.accumulation={chosen.accumulation}", *remat]


def least_per_layer(best: Candidate) -> int:
    """Return the collectives a layer needs per microbatch: one per pass, kind and axes for all parameters, and each one of the stream."""
    planned = planned_collectives(best.parts.config, best.layout.sizes)
    layer = [item for item in planned if item.where == "layer" and not item.replicated]
    streams = [item for item in layer if item.axes == ("tensor",)]
    of_streams = sum(item.count for item in streams) // (best.parts.config.model.num_layers * best.layout.accumulation)
    return len({(item.phase, item.kind, item.axes) for item in layer if item not in streams}) + of_streams


def measure(model: str, devices: int) -> dict[str, Any]:
    """Compile one step; return the row of the table."""
    try:
        star, (best, overrides) = "", layout(model, devices)
    except LookupError:
        star, (best, overrides) = "*", layout(model, devices, NARROW)
    nodes = devices // load_cluster(CLUSTER).config.devices_per_node
    ridge = Path(sys.executable).with_name("ridge")
    command = [str(ridge), "compile", f"models/{MODELS[model]}", "--cluster", CLUSTER, "--nodes", str(nodes), "--json", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ring = ", ring" if best.layout.tensor > 1 and best.parts.config.compute.tensor_overlap == "ring" else ""
    chosen = best.layout
    row: dict[str, Any] = {"model": model + star, "devices": devices, "layout": chosen.text() + ring, "remat": chosen.remat.policy,
                           "accumulation": chosen.accumulation, "planned_step_s": best.step.step_s}  # fmt: skip
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(done.stdout)
    layers = load(f"models/{MODELS[model]}").config.model.num_layers * best.layout.accumulation
    per_layer = sum(c["count"] / layers for c in found["collectives"] if c["count"] >= LAYER_COLLECTIVES * layers)
    roofline = found["roofline"]
    return row | {
        "overlapped_share": found["overlapped_share"],
        "exposed_bytes": sum(c["bytes"] * c["count"] for c in found["collectives"] if not c["overlapped"]),
        "exposed_s": roofline["exposed_communication_s"],
        "communication_s": roofline["communication_s"],
        "played_step_s": roofline["step_s"],
        "per_layer": per_layer,
        "least_per_layer": least_per_layer(best),
        "exposed": roofline["exposed"][:6],
        "unhidden": [c for c in found["collectives"] if not c.get("overlapped", True)][:8],
        "needed_gb": found["needed_bytes"] / 1e9,
        "compile_s": found["compile_s"],
        "lower_s": found["trace_s"] + found["lower_s"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a row per model and scale; return 1 when less than 95 % of the bytes of any row overlap with compute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=[64, 512, 4096])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    times = f"{'waits ms':>10}{'of step':>9}{'step s':>8}"
    figures = f"{'bytes hidden':>13}{'exposed GB':>11}{times}{'per layer':>10}{'least':>6}{'GB':>6}{'compile s':>10}"
    print(f"{'model':6}{'GPUs':>6}  {'layout':34}{'remat':>10}{'micro':>6}{figures}")
    rows = []
    for model in args.models:
        for devices in args.devices:
            try:
                row = measure(model, devices)
            except LookupError as error:
                row = {"model": model, "devices": devices, "error": str(error)}
            rows.append(row)
            if "error" in row:
                print(f"{model:6}{devices:>6}  {row['error']}", flush=True)
                continue
            hidden = f"{row['overlapped_share']:>13.1%}{row['exposed_bytes'] / GB:>11.1f}"
            waits = f"{row['exposed_s'] * 1e3:>10.0f}{row['exposed_s'] / row['played_step_s']:>9.1%}{row['played_step_s']:>8.2f}"
            counts = (
                f"{row['per_layer']:>10.1f}{row['least_per_layer']:>6.0f}{row['needed_gb']:>6.0f}{row['compile_s'] + row['lower_s']:>10.1f}"
            )
            chosen = f"{row['layout']:34}{row['remat']:>10}{row['accumulation']:>6}"
            print(f"{row['model']:6}{devices:>6}  {chosen}{hidden}{waits}{counts}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row.get("overlapped_share", 1.0) < 0.95 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
