"""Speed on one real GPU: every row predicted by the planner, trained by us and by PyTorch in the same run, held against its target.

`python tests/bench/gpu.py [ROW ...] [--output DIR] [--budget-s 580] [--no-peer] [--no-profile] [--tiny]`

Needs one NVIDIA GPU and no network; ten minutes. Without row names all are run, in order, and what the budget leaves no time for is
named. Each row runs in a process of its own (memory is not shared, a crash is a row of the table); the matmul ceiling is measured first,
in the same run. `--tiny` trains toy shapes on the CPU: a check of the script itself. Writes gpu.json and, per row, the profile with its
step ledger. The last thing printed is the table; the exit code is 1 when a row missed its target or failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_rows import ROWS, Row, choose, flops_per_token, row_config

from configs.cluster import load_cluster
from configs.schema import Config
from launch import environment
from launch.cluster.detect import describe
from planner.calibration import load_calibration
from planner.hardware import find_hardware

HERE = Path(__file__).resolve().parent
CEILING = """
import json, sys
from launch.calibration import matmul_flops_per_s, memory_bytes_per_s
import jax
size = int(sys.argv[1])
rate = max(matmul_flops_per_s("bfloat16", (size,) * 3) for _ in range(3))
bandwidth = memory_bytes_per_s(size * size * 16)
print(json.dumps({"device": jax.local_devices()[0].device_kind, "matmul_flops_per_s": rate, "memory_bytes_per_s": bandwidth}))
"""
ATTEMPTS = 3
"""Our own row is tried with fewer rows per step when it runs out of memory."""


class Bench:
    """One run of the script: its clock, its directory and what it found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.monotonic()
        self.output: Path = args.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.ceiling: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.args.budget_s) - (time.monotonic() - self.begun)

    def say(self, words: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self.begun:4.0f} s] {words}", flush=True)

    def child(self, program: list[str], job: dict[str, Any] | None, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a child with what is left of the budget."""
        text = None if job is None else json.dumps(job)
        path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            return subprocess.run(
                [sys.executable, *program], input=text, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **env},
                timeout=max(5.0, self.left_s), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(program, 124, "", "out of time")

    def measure_ceiling(self) -> None:
        """Measure what the device can do at best: an 8192-cubed bf16 matmul, and the memory."""
        done = self.child(["-c", CEILING, "512" if self.args.tiny else "8192"], None, {})
        if done.returncode:
            raise SystemExit(f"no device to measure: {last_line(done.stderr)}")
        self.ceiling = json.loads(done.stdout.strip().splitlines()[-1])
        rates = self.ceiling["matmul_flops_per_s"] / 1e12, self.ceiling["memory_bytes_per_s"] / 1e9
        self.say(f"{self.ceiling['device']}: matmul {rates[0]:.0f} TFLOP/s, memory {rates[1]:.0f} GB/s")

    def run_row(self, row: Row) -> dict[str, Any]:
        """Predict, train ours, train the peer; return everything about the row."""
        result: dict[str, Any] = {"row": row.name, "target": row.target}
        self.results.append(result)
        if self.left_s < 20:
            return result | {"error": "not run: the budget is spent"}
        config, predicted = self.planned(row)
        result |= {
            "rows": config.data.batch_size, "seq_len": config.data.seq_len, "layers": config.model.num_layers,
            "remat": config.compute.remat.policy, "predicted": predicted,
        }  # fmt: skip
        expected = (
            f", predicted {predicted['tokens_per_s']:,.0f} tokens/s and {predicted['memory_bytes'] / 1e9:.0f} GB" if predicted else ""
        )
        self.say(
            f"{row.name}: {config.model.num_layers} layers, {config.data.batch_size} x {config.data.seq_len},"
            f" remat {result['remat']}{expected}"
        )
        result |= self.train(row, config)
        if row.peer and not self.args.no_peer and "error" not in result:
            result["peer"] = self.train_peer(config)
        return result

    def planned(self, row: Row) -> tuple[Config, dict[str, float]]:
        """Choose layers, rows and rematerialisation, and predict."""
        if self.args.tiny:
            return row_config(row, rows=2, tiny=True), {}
        cluster = load_cluster(self.args.cluster).config.model_copy(update={"devices_per_node": 1, "links": []})
        config, best = choose(row, cluster, load_calibration(self.args.calibration))
        predicted = {
            "tokens_per_s": best.step.tokens_per_s,
            "step_s": best.step.step_s,
            "mfu": best.step.mfu,
            "memory_bytes": best.memory.total_bytes,
        }
        return config, predicted

    def train(self, row: Row, config: Config) -> dict[str, Any]:
        """Train our model in a child; with fewer rows where memory runs out."""
        settings = environment.prepare(config, describe({}), env := dict(os.environ))
        for attempt in range(ATTEMPTS):
            output = self.output / f"{row.name}.json"
            output.unlink(missing_ok=True)
            profile = None if self.args.no_profile else str(self.output / row.name)
            job = {"config": config.model_dump(mode="json"), "output": str(output), "profile": profile, "steps": self.args.steps}
            done = self.child([str(HERE / "gpu_rows.py")], job, env)
            if done.returncode == 0:
                found = json.loads(output.read_text())
                tokens = config.data.batch_size * config.data.seq_len
                return found | {
                    "rows": config.data.batch_size, "tokens_per_s": tokens / found["step_s"], "attempts": attempt + 1,
                    "environment": [f"{s.name}={s.value}" for s in settings if s.chosen == "ridge"],
                    "achieved_flops_per_s": flops_per_token(config) * tokens / found["step_s"],
                }  # fmt: skip
            if "RESOURCE_EXHAUSTED" not in done.stderr or config.data.batch_size == 1:
                break
            fewer = max(1, config.data.batch_size * 3 // 4)
            self.say(f"{row.name}: out of memory with {config.data.batch_size} rows; trying {fewer}")
            config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": fewer})})
        (self.output / f"{row.name}.err").write_text(done.stderr)
        return {"error": last_line(done.stderr)}

    def train_peer(self, config: Config) -> dict[str, Any]:
        """Train the same shapes with PyTorch, parameters as ours; the rows per step are PyTorch's own best guess: ours, or what fits."""
        if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
            return {"error": "torch or transformers is not installed"}
        m = config.model
        model = {**m.model_dump(mode="json"), "num_kv_heads": m.kv_heads, "head_dim": m.head_width}
        best: dict[str, Any] = {"error": "not run: the budget is spent"}
        for mode in ("autocast",) if self.args.tiny else ("autocast", "bf16"):
            if self.left_s < 30:
                break
            output = self.output / f"torch-{mode}.json"
            output.unlink(missing_ok=True)
            job = {
                "model": model, "seq_len": config.data.seq_len, "rows": config.data.batch_size, "mode": mode, "output": str(output),
                "compile": not self.args.tiny, "checkpointing": config.compute.remat.policy != "none", "steps": self.args.steps,
                "measured_s": 5.0,
            }  # fmt: skip
            done = self.child([str(HERE / "gpu_torch.py")], job, {})
            if done.returncode:
                best = {"error": last_line(done.stderr), "mode": mode} if "tokens_per_s" not in best else best
                continue
            found = json.loads(output.read_text()) | {"mode": mode}
            found["tokens_per_s"] = found["rows"] * config.data.seq_len / found["step_s"]
            self.say(f"  PyTorch, {mode}: {found['rows']} rows, {found['tokens_per_s']:,.0f} tokens/s")
            best = max(best, found, key=lambda each: each.get("tokens_per_s", 0.0))
        return best

    def judge(self, row: Row, result: dict[str, Any]) -> None:
        """Add MFU, share of the ceiling, ratios, and what was missed."""
        if "tokens_per_s" not in result:
            result["missed"] = [result.get("error", "no result")]
            return
        hardware = find_hardware(self.ceiling["device"])
        achieved = result["achieved_flops_per_s"]
        result["ceiling"] = achieved / self.ceiling["matmul_flops_per_s"]
        result["mfu"] = None if hardware is None or "bfloat16" not in hardware.peak_flops else achieved / hardware.peak_flops["bfloat16"]
        peer = result.get("peer", {}).get("tokens_per_s")
        result["against_peer"] = result["tokens_per_s"] / peer if peer else None
        reached = {"tokens_per_s": row.tokens_per_s, "mfu": row.mfu, "ceiling": row.ceiling, "against_peer": 1.0 if peer else None}
        missed = [
            f"{key} {number(result[key], 0, '.4g')} < {least:.4g}" for key, least in reached.items() if least and (result[key] or 0) < least
        ]
        if row.over is not None:
            other = next((r.get("tokens_per_s") for r in self.results if r["row"] == row.over[0]), None)
            result["over"] = result["tokens_per_s"] / other if other else None
            if result["over"] is None or result["over"] < row.over[1]:
                missed.append(f"{row.over[0]}: " + (f"ratio {result['over']:.2f} < {row.over[1]}" if other else "not measured in this run"))
        result["missed"] = missed

    def table(self) -> str:
        """Return the short table that is printed last."""
        figures = f"{'tok/s':>10}{'planned':>10}{'MFU':>7}{'ceiling':>9}{'GB':>6}{'torch':>10}{'ratio':>7}"
        head = f"{'row':14}{'shape':>16}{'remat':>8}{figures}  target"
        lines = [head]
        for r in self.results:
            shape = f"{r.get('layers', '')}L {r.get('rows', '')}x{r.get('seq_len', '')}"
            planned = (r.get("predicted") or {}).get("tokens_per_s")
            peak = r.get("peak_bytes")
            cells = [
                f"{r['row']:14}{shape:>16}{r.get('remat', ''):>8}", number(r.get("tokens_per_s"), 10, ",.0f"), number(planned, 10, ",.0f"),
                number(r.get("mfu"), 7, ".1%"), number(r.get("ceiling"), 9, ".1%"), number(peak and peak / 1e9, 6, ".0f"),
                number((r.get("peer") or {}).get("tokens_per_s"), 10, ",.0f"), number(r.get("against_peer"), 7, ".2f"),
            ]  # fmt: skip
            missed = r.get("missed", [])
            lines.append("".join(cells) + ("  reached: " + r["target"] if not missed else "  MISSED: " + "; ".join(missed)))
        return "\n".join(lines)

    def save(self) -> None:
        """Write everything."""
        versions = {}
        for name in ("jax", "jaxlib", "flax", "optax", "torch", "transformers"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = None
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": sys.argv, "python": platform.python_version(),
            "versions": versions, "ceiling": self.ceiling, "rows": self.results,
        }  # fmt: skip
        (self.output / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")


def number(value: float | None, width: int, form: str) -> str:
    """Format a figure, or a dash."""
    return f"{'-' if value is None else format(value, form):>{width}}"


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no word"


def main(arguments: list[str] | None = None) -> int:
    """Run the rows; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row.name for row in ROWS)}; default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--budget-s", type=float, default=580.0)
    parser.add_argument("--cluster", default="dgx-h200", help="cluster file whose device is planned for")
    parser.add_argument("--calibration", help="calibration of this machine (ridge calibrate); default: published figures")
    parser.add_argument("--steps", type=int, help="measured steps per row; default: about eight seconds")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on the CPU")
    args = parser.parse_args(arguments)
    known = {row.name: row for row in ROWS}
    for name in args.rows:
        if name not in known:
            parser.error(f"no row '{name}'; there are {', '.join(known)}")
    if args.tiny:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    bench = Bench(args)
    bench.measure_ceiling()
    for row in [known[name] for name in args.rows] or ROWS:
        try:
            result = bench.run_row(row)
        except Exception as error:  # one row must not take the others with it
            result = {"error": f"{type(error).__name__}: {error}"}
        bench.results[-1].update(result)
        bench.judge(row, bench.results[-1])
        bench.save()
        rate = bench.results[-1].get("tokens_per_s")
        bench.say(f"{row.name}: " + (f"{rate:,.0f} tokens/s" if rate else bench.results[-1].get("error", "?")))
    print(bench.table())
    return int(any(result["missed"] for result in bench.results))


if __name__ == "__main__":
    sys.exit(main())
