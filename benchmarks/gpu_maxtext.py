"""The same model in MaxText: its own training loop on random tokens, timed by our clock. Run by `benchmarks/gpu.py`.

MaxText (PyPI, Python 3.12 or newer) is called as its users call it: `initialize` and `run` of `maxtext.trainers.pre_train.train`, as of
0.2.5. The function that runs one step is wrapped to read our clock, with the device idle, after the warm-up and after each round of steps.
The time includes the rest of its loop (batches, metrics), as for PyTorch.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkout import leave_directory

WARMUP_STEPS, ROUNDS = 4, 3
LEAST_TOKENS = 8192
"""Minimum tokens per step; before going below, policies that recompute more are tried."""
NEEDS = ("maxtext", "transformers")
ENVIRONMENT = {"DECOUPLE_GCLOUD": "TRUE"}
"""MaxText's own switch to run without Google Cloud."""
POLICIES = ("minimal_with_context", "save_dot_with_context_except_mlp", "full")
"""`remat_policy`, the fastest first: save all matmul results, save those of attention, save only the layer inputs."""


@dataclass(frozen=True)
class Attempt:
    """One combination of settings to try."""

    attention: str
    remat: str
    rows: int


def missing() -> str | None:
    """Return why MaxText cannot run here; None if it can."""
    if all(importlib.util.find_spec(name) is not None for name in NEEDS):
        return None
    return "not installed (Python 3.12 or newer: pip install maxtext; without a network: benchmarks/gpu_needs.py)"


def kernels(gpu: bool) -> tuple[str, ...]:
    """Return the values of `attention` to try, the fastest first; Transformer Engine's only if it is installed."""
    engine = ("cudnn_flash_te",) if importlib.util.find_spec("transformer_engine") is not None else ()
    return (*engine, "cudnn_flash_jax", "dot_product") if gpu else ("dot_product",)


def token_bytes(model: dict[str, Any], remat: str) -> float:
    """Return the activation bytes per token of a step.

    Logits in 16 bits, in float32, and both gradients (12 V); in each layer its input and what the policy keeps, in 16 bits.
    """
    width, hidden = model["embed_dim"], model["mlp_dim"]
    query, key = model["num_heads"] * model["head_dim"], model["num_kv_heads"] * model["head_dim"]
    attention = 2 * query + 2 * key + width
    kept = {"minimal_with_context": attention + 2 * hidden + width, "save_dot_with_context_except_mlp": attention, "full": 0}[remat]
    return 12.0 * model["vocab_size"] + model["num_layers"] * 2.0 * (width + kept)


def state_bytes(model: dict[str, Any]) -> float:
    """Return the bytes of parameters, two moments and gradients in float32, and of a copy of the parameters in 16 bits."""
    width, query = model["embed_dim"], model["num_heads"] * model["head_dim"]
    attention = 2 * width * (query + model["num_kv_heads"] * model["head_dim"])
    tables = model["vocab_size"] * width * (1 if model["tie_embeddings"] else 2)
    return 18.0 * (tables + model["num_layers"] * (attention + 3 * width * model["mlp_dim"]))


def attempts(model: dict[str, Any], seq_len: int, rows: int, memory_bytes: float | None, attention: str) -> Iterator[Attempt]:
    """Yield what to try with a kernel, the fastest first; the next one is for a caller whose last ran out of memory.

    At most `rows`, of which as many as should fit (nine tenths of the memory), then two thirds of that, with the policy that keeps most and
    still fits `LEAST_TOKENS`; then the next policy. memory_bytes None: unlimited.
    """
    for remat in POLICIES:
        fitting = rows if memory_bytes is None else int((0.9 * memory_bytes - state_bytes(model)) / (token_bytes(model, remat) * seq_len))
        last = remat == POLICIES[-1]
        count = min(rows, max(fitting, 1 if last else 0))
        while count and (last or count * seq_len >= min(LEAST_TOKENS, rows * seq_len)):
            yield Attempt(attention, remat, count)
            count = count * 2 // 3


def arguments(model: dict[str, Any], seq_len: int, attempt: Attempt, steps: int, directory: str, hardware: str) -> list[str]:
    """Return MaxText's settings for our shape: bf16 arithmetic, float32 parameters, AdamW, random tokens in unpacked rows, no files.

    model: of our config, `num_kv_heads` and `head_dim` resolved. hardware: gpu or cpu.
    """
    settings: dict[str, Any] = {
        "run_name": "peer", "base_output_directory": directory, "hardware": hardware, "skip_jax_distributed_system": True,
        "decoder_block": "llama2", "base_emb_dim": model["embed_dim"], "base_num_decoder_layers": model["num_layers"],
        "base_num_query_heads": model["num_heads"], "base_num_kv_heads": model["num_kv_heads"], "head_dim": model["head_dim"],
        "base_mlp_dim": model["mlp_dim"], "vocab_size": model["vocab_size"], "logits_via_embedding": model["tie_embeddings"],
        "normalize_embedding_logits": False, "normalization_layer_epsilon": model["norm_eps"],
        "rope_max_timescale": round(model["rope_theta"]), "per_device_batch_size": attempt.rows, "max_target_length": seq_len,
        "dtype": "bfloat16", "weight_dtype": "float32", "attention": attempt.attention, "remat_policy": attempt.remat, "scan_layers": True,
        "opt_type": "adamw", "gradient_clipping_threshold": 1.0, "enable_dropout": False, "dataset_type": "synthetic", "packing": False,
        "steps": steps, "enable_checkpointing": False, "enable_tensorboard": False, "log_config": False, "jax_cache_dir": "",
        "enable_goodput_recording": False, "monitor_goodput": False,
    }  # fmt: skip
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def steps_per_round(step_s: float, measured_s: float, requested: int | None) -> int:
    """Return the steps per round. `step_s`: step time of our side, as an estimate for the peer's."""
    return requested or max(2, min(14, round(measured_s / ROUNDS / step_s)))


@dataclass
class Clock:
    """Reads the clock after the first step, after the warm-up and after every round, with the device idle."""

    per_round: int
    wait: Callable[[Any], Any]
    now: Callable[[], float] = time.perf_counter
    done: int = 0
    first: float = 0.0
    marks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def around(self, iteration: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap the function that runs one step: its first argument holds the state, its result the loss."""

        def timed(device_state: dict[str, Any], *others: Any) -> dict[str, Any]:
            metrics = iteration(device_state, *others)
            self.done += 1
            counted = self.done - WARMUP_STEPS
            if self.done == 1 or (counted >= 0 and counted % self.per_round == 0):
                self.wait(device_state["state"])
                self.read(float(metrics["scalar"]["learning/loss"]))
            return metrics

        return timed

    def read(self, loss: float) -> None:
        """Record the time and the loss."""
        self.losses.append(loss)
        if self.done == 1:
            self.first = self.now()
        else:
            self.marks.append(self.now())

    def rounds(self) -> list[float]:
        """Return the seconds per step of each round."""
        return [(after - before) / self.per_round for before, after in itertools.pairwise(self.marks)]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train with the settings of one attempt; return step time, spread, memory and losses."""
    begun = time.perf_counter()
    import jax
    import maxtext
    from maxtext.trainers.pre_train import train

    attempt = Attempt(**job["attempt"])
    steps = WARMUP_STEPS + ROUNDS * job["per_round"]
    hardware = "gpu" if jax.default_backend() == "gpu" else "cpu"
    settings = arguments(job["model"], job["seq_len"], attempt, steps, job["directory"], hardware)
    config, recorder = train.initialize(["train", str(Path(maxtext.__file__).parent / "configs/base.yml"), *settings])
    clock = Clock(job["per_round"], jax.block_until_ready)
    train.training_loop_iteration = clock.around(train.training_loop_iteration)
    import_s, began = time.perf_counter() - begun, time.perf_counter()
    train.run(config, recorder)
    rounds = clock.rounds()
    assert len(rounds) == ROUNDS, f"{clock.done} steps of {steps}"
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "import_s": import_s,
        "compile_s": clock.first - began,
        "step_s": statistics.median(rounds),
        "spread": (max(rounds) - min(rounds)) / statistics.median(rounds),
        "losses": clock.losses,
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }


def main() -> None:
    """Child process: read a job as JSON from standard input, write the result to the file it names."""
    leave_directory()
    job = json.loads(sys.stdin.read())
    Path(job["output"]).write_text(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
