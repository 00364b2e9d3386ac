"""Planned against compiled memory and planned against simulated step time, on configs drawn at random over every knob that changes memory.

`python benchmarks/plan_vs_compile.py [--seed N] [--count N] [--near-capacity] [--experts | --long | --stages] [--json FILE [--continue]]`

Each config is compiled for its GPU on this machine (`ridge compile`, extra `aot`; 10 to 30 s each). The tables: per config the planned and
compiled GB per device, the planned step and the compiled schedule simulated at the planner's rates; then the error by knob; then median,
90th percentile and worst, and the configs that were planned to fit and do not. `--continue` takes what FILE has as compiled, and plans it
again. `--near-capacity` draws only configs that need 75 to 100 % of a device, `--experts` only models with experts, half of them with
packed rows, with mesh.expert, capacities, both exchanges and mesh.context; `--long` only rows of 131,072 to 1,048,576 tokens over
mesh.context, half of them packed, of dense models and of models with experts; `--stages` only models over mesh.pipeline, dense and with
experts, with one chunk of layers per stage and with two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline
import jax.numpy as jnp

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.models.attention.dispatch import resolve_backend
from ridgeline.models.attention.interface import AttentionRequest
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import check_block_scaled, hardware
from ridgeline.planner.layouts import Layout
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.search import evaluate
from ridgeline.planner.step_time import Machine

MODELS = [
    *("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-7b", "llama-2-13b", "llama-3.1-70b"),
    *("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b", "gpt2-xl"),
    *("gemma2-2b", "gemma2-9b", "gemma3-4b", "gemma3-12b", "olmo2-1b", "olmo2-7b", "olmo3-7b", "glm4-9b", "phi4-14b", "mistral-nemo-12b"),
]
EXPERT_MODELS = [
    *("mixtral-8x7b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-30b-a3b", "qwen3-235b-a22b"),
    *("gpt-oss-20b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v2-lite", "llama-4-scout-17b-16e"),
]
LONG_MODELS = ["llama-3.1-8b", "llama-3.1-70b", "llama-3.2-3b", "qwen3-8b", "qwen3-32b", "mistral-nemo-12b", "qwen3-30b-a3b"]
CLUSTERS = {"dgx-h100": 4, "dgx-h200": 2, "dgx-a100": 2, "dgx-b200": 1, "mn5-acc": 2, "gb200-nvl72": 1}
"""Cluster -> how often it is drawn."""
MATMULS = {"fp8": 2, "fp8_delayed": 2, "mxfp8": 1, "nvfp4": 1}
"""precision.matmul -> how often it is drawn, of 16."""
KNOBS: dict[str, list[tuple[tuple[str, ...], int]]] = {
    "remat": [
        (("compute.remat.policy=none",), 2),
        (("compute.remat.policy=attention-only",), 2),
        (("compute.remat.policy=dots",), 2),
        (("compute.remat.policy=names", "compute.remat.names=[query,key,value,attention_out]"), 1),
        (("compute.remat.policy=names", "compute.remat.names=[mlp_gate,mlp_up]"), 1),
        (("compute.remat.policy=full",), 3),
        (("compute.remat.policy=offload", "compute.remat.names=[block_input]"), 1),
        (("compute.remat.policy=offload", "compute.remat.names=[query,mlp_up]"), 1),
    ],
    "attention": [((), 8), (("compute.attention.backend=pallas",), 1)],
    "packing": [(("data.document_masking=false",), 2), ((), 1)],
    "matmul": [((), 10), *(((f"precision.matmul={kind}",), weight) for kind, weight in MATMULS.items())],
    "params": [((), 4), (("precision.params=bfloat16", "precision.stochastic_rounding=true"), 1)],
    "gradients": [((), 3), (("precision.gradients=bfloat16",), 1)],
    "moments": [((), 3), (("precision.moments=bfloat16",), 1), (("precision.moments=int8",), 1)],
    "optimizer": [((), 5), *(((f"optimizer.kind={kind}",), 1) for kind in ("muon", "lion", "sgd", "adafactor"))],
    "loss_chunk": [((), 4), (("compute.loss_chunk=4096",), 1), (("compute.loss_chunk=8192",), 1)],
    "tensor_overlap": [((), 4), (("compute.tensor_overlap=ring",), 1)],
}
"""Knob -> its settings, each with its weight; () is the default."""
EXPERT_KNOBS: dict[str, list[tuple[tuple[str, ...], int]]] = {
    "capacity": [((), 3), *(((f"compute.experts.capacity_factor={factor}",), 1) for factor in (1.0, 1.25, 2.0))],
    "exchange": [((), 2), (("compute.experts.exchange=gather",), 1), (("compute.experts.exchange=all_to_all",), 1)],
}
"""Further knobs of models with experts."""
CONTEXT_KNOBS: dict[str, list[tuple[tuple[str, ...], int]]] = {
    "context method": [((), 2), (("compute.attention.context=ring",), 1), (("compute.attention.context=all_to_all",), 1)],
}
"""Further knobs where rows are sharded over mesh.context."""
HALF_PACKED = {"packing": [(("data.document_masking=false",), 1), ((), 1)]}
"""The knob of packed rows of models with experts and of long rows."""
NEAR = (0.75, 1.0)
SENSIBLE = (0.3, 1.05)
"""Range of the planned bytes, as a share of the usable memory of a device, that is drawn."""


def chosen(rng: random.Random, options: dict[str, int]) -> str:
    return rng.choices(list(options), list(options.values()))[0]


def check_attention(config: Config) -> None:
    """Raise UserError where the attention backend does not support the model on NVIDIA GPUs."""
    model, packed = config.model, config.data.document_masking
    request = AttentionRequest(
        platform="gpu",
        dtype=jnp.dtype(config.precision.compute),
        head_dim=model.head_width,
        num_heads=model.num_heads,
        num_kv_heads=model.kv_heads,
        sliding_window=model.local_span,
        packed=packed,
        softcap=model.attention_softcap,
        sinks=model.attention_sinks,
    )
    resolve_backend(config.compute.attention.backend, request)


def draw(rng: random.Random, kind: str) -> dict[str, Any] | None:
    """Draw one config of a kind: dense, experts, long or stages; None where the draw breaks a rule of the schema."""
    cluster_name = chosen(rng, CLUSTERS)
    cluster = load_cluster(cluster_name).config
    model = rng.choice({"dense": MODELS, "experts": EXPERT_MODELS, "long": LONG_MODELS, "stages": [*MODELS, *EXPERT_MODELS]}[kind])
    nodes = 2 ** rng.randrange(0, 7)
    devices = nodes * cluster.devices_per_node
    tensor = rng.choice([1, 1, 1, 1, 2, 4, 8])
    if devices % tensor or tensor > cluster.devices_per_node:
        return None
    data = 2 ** rng.randrange(0, 4) if rng.random() < 0.4 else 1
    routed = model in EXPERT_MODELS and kind != "long"
    expert = rng.choice([1, 1, 2, 4, 8, 16]) if routed else 1
    contexts = {"experts": lambda: rng.choice([1, 1, 1, 2, 4]), "long": lambda: 2 ** rng.randrange(1, 6)}
    context = contexts.get(kind, lambda: 1)()
    pipeline, chunks = (rng.choice([2, 2, 4, 8]), rng.choice([1, 1, 2])) if kind == "stages" else (1, 1)
    if devices // tensor % (data * expert * context * pipeline):
        return None
    fsdp = devices // tensor // data // expert // context // pipeline
    sizes = {"pipeline": pipeline, "data": data, "fsdp": fsdp, "context": context, "tensor": tensor, "expert": expert}
    seq_len, rows, micro = 2 ** rng.randrange(10, 16), 2 ** rng.randrange(0, 5), 2 ** rng.randrange(0, 3)
    if kind == "long":
        seq_len, rows = 2 ** rng.randrange(17, 21), 1
    if kind == "stages":
        micro *= pipeline  # with fewer microbatches most stages wait
    batch = data * fsdp * expert * rows * micro
    settings: dict[str, str] = {}
    overrides = [f"data.seq_len={seq_len}", f"model.max_seq_len={max(seq_len, 1024)}", f"data.batch_size={batch}"]
    overrides += [f"trainer.accumulation={micro}", *(f"mesh.{axis}={size}" for axis, size in sizes.items())]
    overrides += [f"mesh.pipeline_chunks={chunks}"] * (chunks > 1)
    knobs = KNOBS | (HALF_PACKED if kind in ("experts", "long") else {}) | (EXPERT_KNOBS if routed else {})
    for knob, options in (knobs | (CONTEXT_KNOBS if context > 1 else {})).items():
        picked = rng.choices([given for given, _ in options], [weight for _, weight in options])[0]
        if knob == "optimizer" and any("moments=int8" in other for other in overrides):
            picked = ()
        settings[knob] = " ".join(item.split("=")[-1] for item in picked if "stochastic" not in item) or "default"
        overrides += picked
    # Drawn apart, so that seeds give the other knobs that they gave before this one.
    zero_stage = 2 if data > 1 and "optimizer.kind=muon" not in overrides and random.Random(str(overrides)).random() < 0.5 else 0
    overrides.append(f"mesh.zero_stage={zero_stage}")
    row = {"model": model, "cluster": cluster_name, "nodes": nodes, "devices": devices, "overrides": overrides}
    row |= {"knobs": {**settings, "expert": str(expert), "context": str(context), "microbatches": str(micro), "tensor": str(tensor),
                      "fsdp=1": str(fsdp == 1), "model": model,
                      "seq_len": str(seq_len), "device": cluster_name, "zero_stage": str(zero_stage),
                      **({"pipeline": str(pipeline), "chunks": str(chunks)} if kind == "stages" else {})}}  # fmt: skip
    try:
        config = load(f"models/{model}", overrides).config
        check_devices(config, devices)
        check_attention(config)
        if config.precision.block_scaled is not None:
            check_block_scaled(hardware(cluster.device), config.precision.block_scaled)
        machine = Machine(cluster, load_calibration(None), devices)
        stages = {"pipeline": pipeline, "pipeline_chunks": chunks}
        layout = Layout(data, fsdp, tensor, micro, config.compute.remat, context, zero_stage, expert, **stages)
        memory = memory_per_device(config, sizes, gpu=True, device=hardware(cluster.device))
        candidate = evaluate(config, layout, memory, machine, 1e12, nodes)
    except (UserError, ValueError):
        return None
    usable = hardware(cluster.device).memory_bytes * cluster.utilisation_cap
    return row | {
        "planned_bytes": memory.total_bytes,
        "share": memory.total_bytes / usable,
        "planned_step_bytes": memory.compiled_bytes,
        "planned_argument_bytes": memory.argument_bytes,
        "device_bytes": hardware(cluster.device).memory_bytes,
        "planned_step_s": candidate.step.step_s,
        "planned_breakdown_s": candidate.step.breakdown_s,
        "planned_components": memory.bytes_by_component(),
        "planned_peak_at": memory.peak_at,
        "layout": layout.text(),
    }


def drawn(seed: int, count: int, between: tuple[float, float], kind: str = "dense") -> Iterator[dict[str, Any]]:
    rng, found = random.Random(seed), 0
    while found < count:
        row = draw(rng, kind)
        if row is not None and between[0] <= row["share"] <= between[1]:
            found += 1
            yield row


def compiled(row: dict[str, Any], kernels: Path) -> dict[str, Any]:
    """Return the row with what the compiler made of it. Compiled kernels are kept in a directory: a third of the time less."""
    command = ["compile", f"models/{row['model']}", "--cluster", row["cluster"], "--nodes", str(row["nodes"]), "--json", *row["overrides"]]
    command.append(f"--xla-flag=--xla_gpu_kernel_cache_file={kernels / row['cluster']}")
    done = subprocess.run([sys.executable, "-m", "ridgeline", *command], capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        return row | {"error": (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]}
    report = json.loads(done.stdout)
    roofline = report["roofline"]
    return row | {
        "fits": report["fits"],
        "step_bytes": report["argument_bytes"] + report["temp_bytes"],
        "argument_bytes": report["argument_bytes"],
        "peak_bytes": report["peak_bytes"],
        "played_step_s": roofline["step_s"],
        "exposed_s": roofline["exposed_communication_s"],
        "communication_s": roofline["communication_s"],
        "overlapped_share": report["overlapped_share"],
        "buffers": report["largest_buffers"][:12],
    }


def config_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells one row's config from another's."""
    return row["model"], row["cluster"], row["nodes"], *row["overrides"]


def summary(name: str, errors: list[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return f"{name:28}{len(errors):>5}{statistics.median(errors):>+9.1%}{p90:>8.1%}{sizes[-1]:>8.1%}"


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments and run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--near-capacity", action="store_true")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--experts", dest="kind", action="store_const", const="experts", default="dense")
    kinds.add_argument("--long", dest="kind", action="store_const", const="long")
    kinds.add_argument("--stages", dest="kind", action="store_const", const="stages")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    args = parser.parse_args(arguments)
    if args.goes_on and (args.json is None or not args.json.is_file()):
        parser.error("--continue needs --json FILE, with a file of an earlier campaign")
    with tempfile.TemporaryDirectory() as kernels:
        return campaign(args, Path(kernels))


def campaign(args: argparse.Namespace, kernels: Path) -> int:
    """Compile what is drawn and print the tables; return 1 when a config that was planned to fit does not."""
    rows, by_knob = [], defaultdict(list)
    before = {config_of(row): row for row in json.loads(args.json.read_text())} if args.goes_on else {}
    print(f"{'config':64}{'planned GB':>11}{'compiled':>9}{'error':>8}{'planned s':>11}{'played':>9}{'error':>8}{'hidden':>8}")
    for given in drawn(args.seed, args.count, NEAR if args.near_capacity else SENSIBLE, args.kind):
        row = before[config_of(given)] | given if config_of(given) in before else compiled(given, kernels)
        rows.append(row)
        name = f"{row['model']} {row['cluster']} x{row['devices']} {row['layout']} {row['knobs']['remat']}"
        if "error" in row:
            print(f"{name:64} {row['error']}", flush=True)
        else:
            memory, time = row["step_bytes"] / row["planned_step_bytes"] - 1, row["planned_step_s"] / row["played_step_s"] - 1
            row |= {"memory_error": memory, "time_error": time}
            for knob, value in row["knobs"].items():
                by_knob[f"{knob} {value}"].append(memory)
            print(
                f"{name:64}{row['planned_step_bytes'] / 1e9:>11.1f}{row['step_bytes'] / 1e9:>9.1f}{memory:>+8.1%}"
                f"{row['planned_step_s']:>11.2f}{row['played_step_s']:>9.2f}{time:>+8.1%}{row['overlapped_share']:>8.0%}",
                flush=True,
            )
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    made = [row for row in rows if "error" not in row]
    if not made:
        return 1
    print(f"\n{'compiled / planned - 1':28}{'runs':>5}{'median':>9}{'p90':>8}{'worst':>8}")
    for name in sorted(by_knob):
        print(summary(name, by_knob[name]))
    print(summary("memory, all", [row["memory_error"] for row in made]))
    print(summary("step time, all", [row["time_error"] for row in made]))
    wrong = [row for row in made if row["share"] <= 1 and not row["fits"]]
    for row in wrong:
        print(f"planned to fit, refused: {row['model']} --cluster {row['cluster']} --nodes {row['nodes']} {' '.join(row['overrides'])}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
