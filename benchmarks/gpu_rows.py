"""The rows of `benchmarks/gpu.py`: what each one trains, its prediction, and its measurement in its own process."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkout import ROOT

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.load import load
from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.search import Candidate, search_scale

MICROBATCH_TOKENS = 131_072
"""Maximum tokens per microbatch to try."""
WARMUP_STEPS = 3
MEASURED_S = 8.0
MOST_STEPS, LEAST_STEPS = 40, 5
EIGHT_BIT_KERNEL = "__cublas$lt$matmul$f8"


@dataclass(frozen=True)
class Row:
    """One measurement: a model at a sequence length."""

    name: str
    model: str
    seq_len: int
    target: str
    """The target of the row, as text."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    ceiling: float | None = None
    """Share of the measured matmul rate."""
    fit_layers: bool = False
    """Use as many layers as fit; see `choose`."""
    overrides: tuple[str, ...] = ()
    accumulation: int = 1
    """Microbatches of a step."""
    over: tuple[str, float] | None = None
    """(row, ratio): required tokens/s relative to another row."""
    peer: bool = True
    """Whether PyTorch trains the same shape in the same run."""
    leading: bool = False
    """Measured and profiled first; its peers run before our other rows."""

    @property
    def fp8(self) -> bool:
        """Whether the layers multiply in float8; its peer then does too."""
        return "precision.matmul=fp8" in self.overrides


AMBITION = {"mfu": 0.55, "ceiling": 0.70, "target": "55 % causal MFU, 70 % of the ceiling"}
ROWS: tuple[Row, ...] = (
    Row("1b-1k", "llama-3.2-1b", 1024, "65,000 tokens/s (48,081 in print)", tokens_per_s=65_000, leading=True),
    Row("1b-8k", "llama-3.2-1b", 8192, **AMBITION),
    Row("3b-4k", "llama-3.2-3b", 4096, **AMBITION),
    Row("8b-4k", "llama-3.1-8b", 4096, fit_layers=True, leading=True, **AMBITION),
    Row("8b-8k", "llama-3.1-8b", 8192, fit_layers=True, **AMBITION),
    Row("8b-4k-fp8", "llama-3.1-8b", 4096, "1.3 x bf16", over=("8b-4k", 1.3), fit_layers=True, leading=True,
        overrides=("precision.matmul=fp8",)),
    Row("1b-8k-packed", "llama-3.2-1b", 8192, "packed documents (Pallas attention) cost under 10 %", over=("1b-8k", 0.9), peer=False,
        overrides=("data.document_masking=true",)),
    Row("1b-1k-unrolled", "llama-3.2-1b", 1024, "without the scan's copies: 3 % more", over=("1b-1k", 1.03), peer=False,
        overrides=("compute.scan_layers=false",)),
    Row("moe-4k", "qwen3-30b-a3b", 4096, "8 layers, 128 experts, 8 per token: 40 % MFU of the active parameters", mfu=0.40, peer=False,
        overrides=("model.num_layers=8",)),
    Row("1b-1k-accumulated", "llama-3.2-1b", 1024, "4 microbatches per step: within 3 %", over=("1b-1k", 0.97), peer=False, accumulation=4),
    Row("1b-1k-deterministic", "llama-3.2-1b", 1024, "runtime.deterministic costs under 15 %", over=("1b-1k", 0.85), peer=False,
        overrides=("runtime.deterministic=true",)),
)  # fmt: skip
TINY = ("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16", "model.mlp_dim=128",
        "model.vocab_size=512")  # fmt: skip


def row_config(row: Row, *, layers: int | None = None, rows: int = 1, tiny: bool = False, more: tuple[str, ...] = ()) -> Config:
    """Return the config of a row: one device, random tokens, AdamW, float32 parameters, bf16 arithmetic, and the row's overrides."""
    seq_len = min(row.seq_len, 64) if tiny else row.seq_len
    settings = [
        f"data.seq_len={seq_len}", f"data.batch_size={rows}", "data.document_masking=false", "mesh.fsdp=1", "precision.compute=bfloat16",
        "schedule.kind=constant", *(TINY if tiny else ()), *row.overrides, *([f"model.num_layers={layers}"] if layers else []), *more,
        *(["compute.attention.backend=auto"] if tiny else []),  # a CPU has no GPU kernels
    ]  # fmt: skip
    return load(ROOT / f"configs/models/{row.model}.yaml", settings).config


def batches_per_device(seq_len: int) -> Iterator[int]:
    """Return the rows per device to try: powers of two, and the values halfway between them."""
    rows = 1
    while rows * seq_len <= MICROBATCH_TOKENS:
        yield rows
        if rows >= 2 and rows * 3 // 2 * seq_len <= MICROBATCH_TOKENS:
            yield rows * 3 // 2
        rows *= 2


def choose(row: Row, cluster: ClusterConfig, calibration: Calibration) -> tuple[Config, Candidate]:
    """Let the planner choose rows and rematerialization policy on one device, and the layers if the row does not set them.

    Layers: the most at which a step is within a hundredth of the best MFU, down to half the model: the last ones fit only when the whole
    forward pass is computed twice. Raises RuntimeError when nothing fits.
    """
    full = row_config(row).model.num_layers
    found: list[tuple[Config, Candidate]] = []
    for layers in range(full, full // 2 - 1, -1) if row.fit_layers else (full,):
        for rows in batches_per_device(row.seq_len):
            config = row_config(row, layers=layers, rows=rows * row.accumulation)
            tokens = float(config.data.batch_size) * config.data.seq_len * 1000
            for candidate in search_scale(config, cluster, calibration, 1, tokens).candidates:
                if candidate.layout.accumulation == row.accumulation:
                    found.append((candidate.layout.apply(config), candidate))
    if not found:
        raise RuntimeError(f"{row.name}: {row.model} does not fit")
    best = max(candidate.step.mfu for _, candidate in found)
    good = [each for each in found if each[1].step.mfu >= 0.99 * best]
    return max(good, key=lambda each: (each[0].model.num_layers, each[1].step.mfu))


def flops_per_token(config: Config) -> float:
    """Return the training FLOPs per token: causal, without recomputation."""
    return train_flops_per_token(config.model, config.data.seq_len).total


def least_s_per_token(config: Config, ceilings: Mapping[str, float]) -> float:
    """Return the seconds for the training FLOPs of a token at the measured ceilings, the layers' matmuls at that of their dtype.

    ceilings: FLOP/s by arithmetic, `bfloat16` and, where measured, `float8`. Raises KeyError for an arithmetic without one.
    """
    flops = train_flops_per_token(config.model, config.data.seq_len)
    matmuls = flops.attention_projections + flops.mlp
    narrow = "float8" if config.precision.matmul != "compute" else "bfloat16"
    return matmuls / ceilings[narrow] + (flops.total - matmuls) / ceilings["bfloat16"]


def measure(config: Config, profile: Path | None, steps: int | None) -> dict[str, Any]:
    """Train on random tokens; return times, memory, losses, and the step ledger of two profiled steps. Imports JAX.

    Steps are dispatched one after another and waited for once, as the training loop does; the first few are not counted.
    """
    import jax
    import numpy as np

    from ridgeline.sharding.mesh import build_mesh
    from ridgeline.sharding.partition import Partitioner
    from ridgeline.sharding.rules import Rules
    from ridgeline.trainer.optimizers import build_optimizer
    from ridgeline.trainer.schedules import build_schedule
    from ridgeline.trainer.state import abstract_state, init_state, model_spec
    from ridgeline.trainer.step import make_train_step

    begun = time.perf_counter()
    partitioner = Partitioner(build_mesh(config.mesh, jax.devices()[:1]), Rules.from_config(config.mesh))
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    abstract = abstract_state(config, spec, optimizer, partitioner)
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    state = init_state(config, spec, optimizer, abstract)
    batch = random_batch(config)
    init_s = time.perf_counter() - begun
    step = jax.jit(make_train_step(spec, config, optimizer, schedule, partitioner), donate_argnums=0)
    begun = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - begun

    times: list[float] = []
    for _ in range(WARMUP_STEPS):
        begun = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - begun)
    count = steps or max(LEAST_STEPS, min(MOST_STEPS, round(MEASURED_S / times[-1])))
    losses, rounds = [float(metrics["loss"])], []
    for _ in range(3):  # three rounds, for the spread
        begun = time.perf_counter()
        for _ in range(max(1, count // 3)):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(state)
        rounds.append((time.perf_counter() - begun) / max(1, count // 3))
        losses.append(float(metrics["loss"]))
    memory = jax.local_devices()[0].memory_stats() or {}
    result: dict[str, Any] = {
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
        "init_s": init_s,
        "compile_s": compile_s,
        "first_step_s": times[0],
        "step_s": statistics.median(rounds),
        "spread": (max(rounds) - min(rounds)) / statistics.median(rounds),
        "losses": losses,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "compiled_bytes": _compiled_bytes(compiled),
    }
    if config.precision.eight_bit:  # without an 8-bit kernel, XLA silently uses 16 bits
        result["eight_bit_kernels"] = compiled.as_text().count(EIGHT_BIT_KERNEL)
    assert all(np.isfinite(losses)), losses
    if profile is not None:
        result["ledger"] = _profiled(compiled, state, batch, config, profile)
    return result


def random_batch(config: Config, seed: int = 0) -> dict[str, Any]:
    """Return [B, T] random tokens on the device; two documents per row if documents are masked."""
    import jax
    import numpy as np

    rows, length = config.data.batch_size, config.data.seq_len
    tokens = np.random.default_rng(seed).integers(0, config.model.vocab_size, (rows, length + 1), dtype=np.int32)
    position = np.arange(length, dtype=np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((rows, length), np.float32),
        "positions": np.broadcast_to(position % (length // 2) if config.data.document_masking else position, (rows, length)),
        "segment_ids": np.broadcast_to(1 + (position >= length // 2) if config.data.document_masking else np.int32(1), (rows, length)),
    }
    return {name: jax.device_put(np.ascontiguousarray(x)) for name, x in batch.items()}


def _compiled_bytes(compiled: Any) -> int | None:
    found = compiled.memory_analysis()
    return None if found is None else int(found.argument_size_in_bytes + found.temp_size_in_bytes)


def _profiled(compiled: Any, state: Any, batch: Any, config: Config, directory: Path) -> dict[str, Any]:
    """Profile two steps and return the shares of the step ledger and the time by component."""
    import jax

    from ridgeline.configs.schema import ProfilerConfig
    from ridgeline.explain.trace.analysis import analyze
    from ridgeline.explain.trace.capture import find_capture
    from ridgeline.explain.trace.load import load_profile
    from ridgeline.observe.profiler import Profiler, step_annotation
    from ridgeline.rundir.analysis import to_json

    profiler = Profiler(ProfilerConfig(start_step=0, num_steps=2), directory, hlo_text=compiled.as_text)
    for index in range(2):
        profiler.before_step(index, lambda: None)  # every step below is waited for
        with step_annotation(index):
            state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics)
    jax.block_until_ready(state)
    capture = profiler.close(2)
    assert capture is not None
    found = to_json(analyze(load_profile(dataclasses.replace(find_capture(capture), config=config))))
    (directory / "ledger.json").write_text(json.dumps(found, indent=1))
    device = found["devices"][0]
    keys = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
    components = sorted(found["components"], key=lambda each: -each.get("time_s", each.get("seconds", 0.0)))[:8]
    return {"shares": {key: device[key] / device["total_s"] for key in keys}, "components": components}


def main() -> None:
    """Child process: read a job as JSON from standard input, write the result to the file it names."""
    job = json.loads(sys.stdin.read())
    config = Config.model_validate(job["config"])
    profile = Path(job["profile"]) if job["profile"] else None
    Path(job["output"]).write_text(json.dumps(measure(config, profile, job["steps"])))


if __name__ == "__main__":
    main()
