"""Bytes that the kernels of a compiled step move, compared with the minimum that each part of the model needs.

`python benchmarks/kernels.py [ROW...] [--device h200-sxm] [--layers 4] [--variant NAME KEY=VALUE ...] [--kernels 20] [--json FILE]`

Needs no GPU: the rows of benchmarks/gpu.py are compiled ahead of time (extra `aot`). Times are the planner's: a matmul runs at the
calibrated rate of a cubic matmul with the same FLOPs, everything else at the achieved memory bandwidth. Without a GPU, XLA does not
autotune matmuls; the elementwise kernels, the copies of the scan and the buffers are those of a real run. `least_bytes` derives the minimum
of each part. Excess is the bytes above it; its share refers to the whole step of this many layers.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline
from gpu_rows import ROWS, row_config

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import Kernel, kernels
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import Hardware, hardware
from ridgeline.planner.local import LocalSizes
from ridgeline.trainer.aot.compile import Compiled, Request, compile_many

BATCHES = {"1b-1k": 64, "1b-8k": 8, "3b-4k": 8, "8b-4k": 6, "8b-8k": 3, "1b-8k-packed": 8}
"""Rows per device, as docs/PERFORMANCE.md predicts them."""
LAYERS = 4
MATMULS, STACKS, ZEROS, OTHER = "matmuls and attention", "copies to and from the stacked arrays of the scan", "zeros", "other"
NORM, ROTARY, GATE, LOSS, EMBED, UPDATE = "norm and residual", "rotary", "gate", "softmax of the loss", "embedding", "optimizer"


def group(kernel: Kernel) -> str:
    """Return the part of the model that an elementwise kernel belongs to, by its name and named scopes."""
    if kernel.flops or "xla.gpu.triton" in kernel.name or "dot_product_attention" in kernel.name:
        return MATMULS
    if re.search(r"dynamic[_-](update[_-])?slice", kernel.name):
        return STACKS
    if kernel.name.startswith("loop_broadcast"):
        return ZEROS
    fixed = {"loss": LOSS, "embed": EMBED, "optimizer": UPDATE, "norm": NORM}
    if kernel.component in fixed:
        return fixed[kernel.component]
    if re.search(r"(attention|mlp)/add$", kernel.op_name):
        return NORM  # the residual add
    return {"attention": ROTARY, "mlp": GATE}.get(kernel.component, OTHER)


def least_bytes(config: Config) -> dict[tuple[str, str], float]:
    """Bytes of a step by (part, forward | backward), each array read or written once in its stored dtype.

    M tokens, D width, F MLP width, V vocabulary, P parameters; e bytes of the compute dtype.
    Norm and residual, per half of a block: read stream and update, write stream and normed (4 MDe); backward: read the gradients of both
    and the stream, write the gradient (4 MDe). Rotary: read and write queries and keys. Gate: read gate and up, write their product
    (3 MFe); backward: read both and the product's gradient, write both gradients and the product, which is not kept (6 MFe).
    Loss: read float32 logits for their sum, again for the gradient, write that in 16 bits (10 MV); the first write belongs to the
    product. Embedding: read rows of the float32 table; backward: zero its gradient, add to rows. Optimizer: read gradient, parameter and
    two moments, write the latter three, and the gradient once more for the norm (32 P in float32).
    """
    local = LocalSizes.of(config, {})
    tokens, width, vocab, size = local.tokens, local.model.embed_dim, local.model.padded_vocab_size, local.compute_itemsize
    layers, stream = local.model.num_layers, local.stream_bytes
    gates = 2 if local.model.gated_mlp else 1
    turned = 2 * (local.query_bytes + local.key_bytes) if local.model.position == "rope" else 0
    return {
        (NORM, "forward"): layers * 8.0 * stream + 2 * stream,
        (NORM, "backward"): layers * 8.0 * stream + 3 * stream,
        (ROTARY, "forward"): float(layers * turned),
        (ROTARY, "backward"): float(layers * turned),
        (GATE, "forward"): layers * (gates + 1.0) * local.hidden_bytes,
        (GATE, "backward"): layers * (2.0 * gates + 2) * local.hidden_bytes,
        (LOSS, "forward"): 10.0 * tokens * vocab,
        (EMBED, "forward"): tokens * width * (4.0 + size),
        (EMBED, "backward"): 4.0 * vocab * width + tokens * width * (8.0 + size),
        (UPDATE, "update"): 32.0 * local.parameters,
    }


def seconds(kernel: Kernel, device: Hardware) -> float:
    """Time of all runs of a kernel at the planner's rates."""
    rates = load_calibration()
    side = max(1, round((kernel.flops / 2) ** (1 / 3)))
    compute_s = kernel.flops / rates.matmul_flops_per_s(device, "bfloat16", side, side, side) if kernel.flops else 0.0
    return kernel.count * max(compute_s, kernel.bytes / rates.memory_bytes_per_s(device))


def table(config: Config, compiled: Compiled, device: Hardware) -> dict[str, Any]:
    """Return the totals of the step, its parts with their excess over the minimum, and its kernels."""
    found = kernels(parse(compiled.hlo_text))
    step_s = math.fsum(seconds(kernel, device) for kernel in found)
    bandwidth = load_calibration().memory_bytes_per_s(device)
    moved: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for kernel in found:
        part = "backward" if kernel.part == "recompute" else kernel.part
        name = group(kernel)
        row = moved[name, "" if name in (MATMULS, STACKS, ZEROS, OTHER) else part]
        row[0] += 1
        row[1] += seconds(kernel, device)
        row[2] += kernel.bytes * kernel.count
    least = least_bytes(config)
    parts = []
    for (name, part), (count, time_s, size) in sorted(moved.items(), key=lambda item: -item[1][1]):
        excess = None if name == MATMULS else size - least.get((name, part), 0.0)
        share = None if excess is None else excess / bandwidth / step_s
        parts.append(
            {"part": f"{name} {part}".strip(), "kernels": count, "seconds": time_s, "bytes": size, "excess": excess, "share": share}
        )
    listed = [
        {"kernel": k.name, "part": f"{group(k)}, {k.part}", "runs": k.count, "bytes": k.bytes, "flops": k.flops,
         "share": seconds(k, device) / step_s, "op": k.op_name[-60:]}
        for k in sorted(found, key=lambda k: -seconds(k, device))
    ]  # fmt: skip
    return {"step_s": step_s, "bytes": math.fsum(k.bytes * k.count for k in found), "allocated_bytes": compiled.allocated_bytes,
            "parts": parts, "kernels": listed}  # fmt: skip


def gigabytes(size: float | None) -> str:
    """GB (1e9) with one decimal."""
    return "" if size is None else f"{size / 1e9:.1f}"


def show(name: str, found: dict[str, Any], most: int) -> None:
    """Print one step."""
    step = f"{found['step_s'] * 1e3:.0f} ms, {gigabytes(found['bytes'])} GB moved, {gigabytes(found['allocated_bytes'])} GB of memory"
    share = Column("share", "of the step", lambda value: "" if value is None else f"{value:.1%}")
    columns: list[Column | str] = [
        "part",
        "kernels",
        Column("seconds", "ms", lambda value: f"{value * 1e3:.1f}"),
        Column("bytes", "GB", gigabytes),
        Column("excess", "excess GB", gigabytes),
        share,
    ]
    print_table(columns, found["parts"], title=f"{name}: {step}")
    if most:
        wide = [Column("runs", "runs", "{:g}".format), Column("bytes", "GB each", lambda value: f"{value / 1e9:.2f}")]
        print_table(["kernel", "part", *wide, share, "op"], found["kernels"][:most], title=f"{name}: longest kernels")


def main(arguments: list[str] | None = None) -> int:
    """Compile the rows and their variants, print a table each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(BATCHES)} (default: 1b-1k and 8b-4k)")
    parser.add_argument("--device", default="h200-sxm")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--variant", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"), help="also with these overrides"
    )
    parser.add_argument("--kernels", type=int, default=0, help="list this many kernels of each step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    device, cases = hardware(args.device), {}
    for name in args.rows or ["1b-1k", "8b-4k"]:
        if name not in BATCHES:
            parser.error(f"unknown row {name} (allowed: {', '.join(BATCHES)})")
        row = next(row for row in ROWS if row.name == name)
        for title, *changes in [("", *()), *args.variant]:
            more = ("compute.remat.policy=none", *changes)
            cases[f"{name} {title}".strip()] = row_config(row, layers=args.layers, rows=BATCHES[name], more=more)
    results = {}
    for (name, config), compiled in zip(
        cases.items(), compile_many([Request(config, device, 1, 1) for config in cases.values()]), strict=True
    ):
        if isinstance(compiled, UserError):
            print(f"{name}: {compiled}")
            continue
        results[name] = table(config, compiled, device)
        show(name, results[name], args.kernels)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(len(results) < len(cases))


if __name__ == "__main__":
    sys.exit(main())
