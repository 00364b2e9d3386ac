"""Run the peers of a row of `benchmarks/gpu.py`: the same shapes in PyTorch and MaxText, each attempt in its own process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import checkout  # noqa: F401  # before ridgeline
import gpu_maxtext
from gpu_budget import MAXTEXT, TORCH, TORCH_BF16, TORCH_FP8, Part

from ridgeline.configs.schema import Config

HERE = Path(__file__).resolve().parent
MEASURED_S = 5.0
MODES = {TORCH: "autocast", TORCH_BF16: "bf16", TORCH_FP8: "fp8"}
"""Side -> mode of gpu_torch.py."""
MOST_ATTEMPTS = 4
"""Maximum attempts; every attempt that runs out of memory costs a compilation."""


OUT_OF_TIME = "out of time"
"""The error of a child process that exceeded its time."""


class Runner(Protocol):
    """What peers use of the script: child processes, progress lines, the output directory."""

    output: Path

    def child(self, program: list[str], job: dict[str, Any] | None, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a child process within the remaining budget."""
        ...

    def log(self, line: str) -> None:
        """Print a progress line."""
        ...


def absent(side: str) -> str | None:
    """Return why a side cannot run on this machine; None if it can."""
    if side == MAXTEXT:
        return gpu_maxtext.missing()
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def measure_peer(
    runner: Runner,
    part: Part,
    config: Config,
    *,
    step_s: float,
    env: Mapping[str, str],
    memory_bytes: float | None,
    tiny: bool,
    steps: int | None,
) -> dict[str, Any]:
    """Train the shapes of `config` with the software of the part; return its results, with `tokens_per_s`, or `error`.

    step_s: a step of ours. env: the variables that ours ran with; MaxText gets the same. memory_bytes: of the GPU; None on a CPU.
    """
    m = config.model
    job = {
        "model": {**m.model_dump(mode="json"), "num_kv_heads": m.kv_heads, "head_dim": m.head_width}, "seq_len": config.data.seq_len,
        "rows": config.data.batch_size, "measured_s": MEASURED_S,
    }  # fmt: skip
    if part.side == MAXTEXT:
        job["per_round"] = gpu_maxtext.steps_per_round(step_s, MEASURED_S, steps)
        found = _maxtext(runner, part, job, dict(env), memory_bytes)
    else:
        from ridgeline.models.huggingface.convert import hf_config  # imports JAX

        described = hf_config(m, "float32", {})
        job |= {"hf": described, "compile": not tiny, "checkpointing": config.compute.remat.policy != "none", "steps": steps}
        found = _torch(runner, part, job)
    if "error" in found:
        runner.log(f"{part.name}: {found['error']}")
        return found
    found["tokens_per_s"] = found["rows"] * config.data.seq_len / found["step_s"]
    runner.log(f"{part.name}: {found['rows']} rows, {found['tokens_per_s']:,.0f} tokens/s")
    return found


def _torch(runner: Runner, part: Part, job: dict[str, Any]) -> dict[str, Any]:
    mode = MODES[part.side]
    return _run(runner, "gpu_torch.py", job | {"mode": mode}, {}, f"{part.row.name}-torch-{mode}")[0] | {"mode": mode}


def _maxtext(runner: Runner, part: Part, job: dict[str, Any], env: dict[str, str], memory_bytes: float | None) -> dict[str, Any]:
    """Try kernels in order until one works, each with settings that should fit, and smaller ones after an out-of-memory error."""
    job, done = job | {"directory": str(runner.output / "maxtext")}, 0
    found: dict[str, Any] = {"error": "nothing was tried"}
    for kernel in gpu_maxtext.kernels(memory_bytes is not None):
        for attempt in gpu_maxtext.attempts(job["model"], job["seq_len"], job["rows"], memory_bytes, kernel):
            if done == MOST_ATTEMPTS:
                return found
            done += 1
            tried = dataclasses.asdict(attempt)
            result, words = _run(
                runner,
                "gpu_maxtext.py",
                job | {"attempt": tried, "rows": attempt.rows},
                env | gpu_maxtext.ENVIRONMENT,
                f"{part.row.name}-maxtext",
            )
            found = tried | result
            if "error" not in result:
                return found
            runner.log(f"{part.name}: {attempt.rows} rows, {attempt.attention}, {attempt.remat}: {result['error']}")
            if words == OUT_OF_TIME:
                return found
            if "RESOURCE_EXHAUSTED" not in words:
                break
    return found


def _run(runner: Runner, program: str, job: dict[str, Any], env: dict[str, str], name: str) -> tuple[dict[str, Any], str]:
    """Run a child process once; return its result or error, and its stderr."""
    output = runner.output / f"{name}.json"
    output.unlink(missing_ok=True)
    done = runner.child([str(HERE / program)], job | {"output": str(output)}, env)
    if done.returncode:
        (runner.output / f"{name}.err").write_text(done.stderr)
        return {"error": last_line(done.stderr)}, done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    return {"rows": job["rows"]} | found, done.stderr


def last_line(text: str) -> str:
    """Return the last non-empty line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no word"
