"""Training speed on one GPU: planner prediction, our trainer, PyTorch and MaxText in one run, each row compared with its target.

`python benchmarks/gpu.py [ROW ...] [--output DIR] [--limit-s 600] [--continue] [--no-peer] [--no-profile] [--tiny]`

Needs one NVIDIA GPU and no network. Without ROW names, all rows run in order of importance (gpu_budget.py). Rows that are not expected to
fit into the time limit are skipped and listed; `--continue` runs them in a second call. Each row runs in its own process, so that memory is
not shared and a crash is only a row of the table. Matmul ceilings are measured first, in the same run. Peers that are not installed are
skipped and listed. `--tiny` trains toy shapes on a CPU, to test this script. gpu.json is rewritten after every part; the profile of a row
is stored beside it. The table is printed last. Exit code: 1 when a row missed its target or failed, else 3 when something was skipped, else
0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline
import gpu_needs  # noqa: F401  # first: reports missing packages
from gpu_budget import OURS, PEERS, Budget, Part, expected_s, in_order
from gpu_peers import OUT_OF_TIME, absent, last_line, measure_peer
from gpu_rows import EIGHT_BIT_KERNEL, ROWS, Row, choose, flops_per_token, least_s_per_token, row_config

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.schema import Config
from ridgeline.launch import environment
from ridgeline.launch.cluster.detect import describe
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.hardware import find_hardware

HERE = Path(__file__).resolve().parent
CEILING = """
import json, sys
from ridgeline.measure.calibration import matmul_flops_per_s, memory_bytes_per_s
import jax
size = int(sys.argv[1])
rate = max(matmul_flops_per_s("bfloat16", (size,) * 3) for _ in range(3))
bandwidth = memory_bytes_per_s(size * size * 16)
print(json.dumps({"device": jax.local_devices()[0].device_kind, "matmul_flops_per_s": rate, "memory_bytes_per_s": bandwidth}))
"""
CEILING_8_BIT = f"""
import functools, json, sys
import jax
from ridgeline.measure.pieces import NARROW
from ridgeline.measure.timer import median_s
from ridgeline.models.matmul import fp8
size = int(sys.argv[1])
make = jax.jit(lambda seed: fp8.quantize(jax.random.normal(jax.random.key(seed), (size, size), "bfloat16"), fp8.VALUES))
left, right = make(0), make(1)
multiply = jax.jit(functools.partial(NARROW["float8"], jax.default_backend())).lower(left, right).compile()
rate = max(2 * size**3 / median_s(lambda: multiply(left, right)) for _ in range(3))
print(json.dumps({{"rate": rate, "kernel": "{EIGHT_BIT_KERNEL}" in multiply.as_text()}}))
"""
RECORD = "gpu.json"
CEILING_TIMEOUT_S = 60.0
"""Time limit for measuring the ceiling, which every row needs, independent of --limit-s."""
ATTEMPTS = 3
"""Attempts of our side; each retry after an out-of-memory error uses fewer rows per step."""


class Bench:
    """One run of the script: its time budget, output directory and results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.budget = args, Budget(args.limit_s, time.monotonic)
        self.output: Path = args.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.ceiling: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []
        self.absent = {side: why for side in PEERS if (why := absent(side)) is not None and not args.no_peer}
        """Peer -> why it cannot run on this machine."""
        self.configs: dict[str, tuple[Config, dict[str, float]]] = {}
        """Row name -> config, predictions."""

    def log(self, line: str) -> None:
        """Print a progress line."""
        print(f"[{self.budget.spent_s:4.0f} s] {line}", flush=True)

    def child(
        self, program: list[str], job: dict[str, Any] | None, env: dict[str, str], least_s: float = 5.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a child process within the remaining budget."""
        text = None if job is None else json.dumps(job)
        try:
            return subprocess.run(
                [sys.executable, *program], input=text, capture_output=True, text=True, env={**os.environ, **env},
                timeout=max(least_s, self.budget.left_s), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(program, 124, "", OUT_OF_TIME)

    def measure_ceiling(self, rows: Sequence[Row]) -> None:
        """Measure the ceilings of the device: an 8192-cubed matmul in bf16, in float8 if a row needs it, and memory bandwidth."""
        size = "512" if self.args.tiny else "8192"
        done = self.child(["-c", CEILING, size], None, {}, CEILING_TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"no device to measure: {last_line(done.stderr)}")
        self.ceiling = json.loads(done.stdout.strip().splitlines()[-1])
        rates = self.ceiling["matmul_flops_per_s"] / 1e12, self.ceiling["memory_bytes_per_s"] / 1e9
        self.log(f"{self.ceiling['device']}: matmul {rates[0]:.0f} TFLOP/s, memory {rates[1]:.0f} GB/s")
        narrow = [row for row in rows if row.fp8]
        if narrow:
            _, env = environment_of(row_config(narrow[0]))
            done = self.child(["-c", CEILING_8_BIT, size], None, env, CEILING_TIMEOUT_S)
            found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {"error": last_line(done.stderr)}
            if found.get("kernel") or self.args.tiny:
                self.ceiling["float8_flops_per_s"] = found["rate"]
                self.log(f"matmul in float8 {found['rate'] / 1e12:.0f} TFLOP/s")
            else:
                self.log(f"no ceiling in float8: {found.get('error', 'XLA did not use an 8-bit kernel for the matmul')}")

    def run_part(self, part: Part) -> None:
        """Measure one side of a row, or skip it."""
        row = part.row
        config, predicted = self.configs.setdefault(row.name, self.planned(row))
        result = self.result_of(row)
        step_s = predicted.get("step_s", 1.0)
        profile = row.leading and not self.args.no_profile
        expected = expected_s(part, layers=config.model.num_layers, step_s=step_s, profile=profile, tiny=self.args.tiny)
        why = self.unmeasurable(part) or self.budget.refusal(part.side, expected)
        if why:
            self.budget.leave_out(part.name, why)
            self.log(f"{part.name}: skipped, {why}")
            return
        begun = self.budget.spent_s
        if part.side == OURS:
            result |= self.train(row, config, profile)
        else:
            peer = self.train_peer(part, self.trained(row))
            result.setdefault("peers", {})[part.side] = peer
            result["peer"] = max(result["peers"].values(), key=lambda each: each.get("tokens_per_s", 0.0))
        self.budget.finished(part.side, expected, self.budget.spent_s - begun)

    def unmeasurable(self, part: Part) -> str | None:
        """Return why a part has no meaning; None if it has."""
        if part.side != OURS and "tokens_per_s" not in self.result_of(part.row):
            return "ours was not measured"
        base = None if self.args.rows else part.row.over  # a requested row is measured even without the row it is compared with
        if part.side == OURS and base is not None and not any(r["row"] == base[0] and "tokens_per_s" in r for r in self.results):
            return f"{base[0]}, which it is compared with, was not measured"
        return None

    def failed(self, row: Row, why: str) -> None:
        """Record that a row could not start, or failed with an error of this script."""
        if not any(r["row"] == row.name for r in self.results):
            self.results.append({"row": row.name, "target": row.target})
        self.result_of(row)["error"] = why

    def result_of(self, row: Row) -> dict[str, Any]:
        """Return the result of a planned row, created by the first call."""
        found = next((r for r in self.results if r["row"] == row.name), None)
        if found is None:
            config, predicted = self.configs[row.name]
            self.results.append(found := {
                "row": row.name, "target": row.target, "rows": config.data.batch_size, "seq_len": config.data.seq_len,
                "layers": config.model.num_layers, "remat": config.compute.remat.policy, "predicted": predicted,
            })  # fmt: skip
        return found

    def trained(self, row: Row) -> Config:
        """Return the config our side was trained with, which has fewer rows than planned if memory ran out."""
        config = self.configs[row.name][0]
        return config.model_copy(update={"data": config.data.model_copy(update={"batch_size": self.result_of(row)["rows"]})})

    def planned(self, row: Row) -> tuple[Config, dict[str, float]]:
        """Choose layers, rows and rematerialization policy, and predict the speed."""
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

    def train(self, row: Row, config: Config, profiled: bool) -> dict[str, Any]:
        """Train our model in a child process, with fewer rows after an out-of-memory error."""
        predicted = self.configs[row.name][1]
        expected = f", predicted {predicted['tokens_per_s']:,.0f} tokens/s" if predicted else ""
        shape = f"{config.model.num_layers} layers, {config.data.batch_size} x {config.data.seq_len}"
        self.log(f"{row.name}: {shape}, remat {config.compute.remat.policy}{expected}")
        settings, env = environment_of(config.model_copy(update={"run_dir": self.output / row.name}))
        for attempt in range(ATTEMPTS):
            output = self.output / f"{row.name}.json"
            output.unlink(missing_ok=True)
            profile = str(self.output / row.name) if profiled else None
            job = {"config": config.model_dump(mode="json"), "output": str(output), "profile": profile, "steps": self.args.steps}
            done = self.child([str(HERE / "gpu_rows.py")], job, env)
            if done.returncode == 0:
                found = json.loads(output.read_text())
                tokens = config.data.batch_size * config.data.seq_len
                return found | {
                    "rows": config.data.batch_size, "tokens_per_s": tokens / found["step_s"], "attempts": attempt + 1,
                    "environment": [s.text for s in settings if s.chosen == "ridge"],
                    "achieved_flops_per_s": flops_per_token(config) * tokens / found["step_s"],
                }  # fmt: skip
            if "RESOURCE_EXHAUSTED" not in done.stderr or config.data.batch_size == 1:
                break
            fewer = max(1, config.data.batch_size * 3 // 4)
            self.log(f"{row.name}: out of memory with {config.data.batch_size} rows; trying {fewer}")
            config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": fewer})})
        (self.output / f"{row.name}.err").write_text(done.stderr)
        return {"error": last_line(done.stderr)}

    def train_peer(self, part: Part, config: Config) -> dict[str, Any]:
        """Train the same shapes with a peer. The rows per step are ours, or as many as fit."""
        hardware = find_hardware(self.ceiling["device"])
        _, env = environment_of(config)
        return {"software": part.side} | measure_peer(
            self, part, config, step_s=self.result_of(part.row)["step_s"], env=env, tiny=self.args.tiny, steps=self.args.steps,
            memory_bytes=hardware.memory_bytes if hardware is not None and not self.args.tiny else None,
        )  # fmt: skip

    def judge(self, row: Row, result: dict[str, Any]) -> None:
        """Add MFU, share of the ceiling, ratios and missed targets."""
        if "tokens_per_s" not in result:
            result["missed"] = [result["error"]] if "error" in result else []
            return
        ceilings = {"bfloat16": self.ceiling["matmul_flops_per_s"], "float8": self.ceiling.get("float8_flops_per_s")}
        known = {dtype: rate for dtype, rate in ceilings.items() if rate}
        narrow = self.configs[row.name][0].precision.eight_bit
        least_s = None if narrow and "float8" not in known else least_s_per_token(self.configs[row.name][0], known)
        result["ceiling"] = least_s and least_s * result["tokens_per_s"]
        hardware = find_hardware(self.ceiling["device"])
        achieved = result["achieved_flops_per_s"]
        result["mfu"] = None if hardware is None or "bfloat16" not in hardware.peak_flops else achieved / hardware.peak_flops["bfloat16"]
        for found in result.get("peers", {}).values():
            if "tokens_per_s" in found and result["mfu"] is not None:
                found["mfu"] = result["mfu"] * found["tokens_per_s"] / result["tokens_per_s"]
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
        if result.get("eight_bit_kernels") == 0 and not self.args.tiny:
            missed.append("no 8-bit kernel in the compiled step: it multiplied in 16 bits")
        result["missed"] = missed

    def table(self) -> str:
        """Return the final table."""
        figures = f"{'tok/s':>10}{'planned':>10}{'MFU':>7}{'ceiling':>9}{'GB':>6}{'peer':>10}{'ratio':>7}"
        head = f"{'row':20}{'shape':>16}{'remat':>8}{figures}  target"
        lines = [head]
        for r in self.results:
            shape = f"{r.get('layers', '')}L {r.get('rows', '')}x{r.get('seq_len', '')}"
            planned = (r.get("predicted") or {}).get("tokens_per_s")
            peak = r.get("peak_bytes")
            cells = [
                f"{r['row']:20}{shape:>16}{r.get('remat', ''):>8}", number(r.get("tokens_per_s"), 10, ",.0f"), number(planned, 10, ",.0f"),
                number(r.get("mfu"), 7, ".1%"), number(r.get("ceiling"), 9, ".1%"), number(peak and peak / 1e9, 6, ".0f"),
                number((r.get("peer") or {}).get("tokens_per_s"), 10, ",.0f"), number(r.get("against_peer"), 7, ".2f"),
            ]  # fmt: skip
            missed = r.get("missed", [])
            reached = "  reached: " + r["target"] if "tokens_per_s" in r else "  skipped"
            lines.append("".join(cells) + (reached if not missed else "  MISSED: " + "; ".join(missed)))
        lines += [f"skipped: {part}: {why}" for part, why in self.budget.left_out]
        lines += [peer_line(r, side, peer) for r in self.results for side, peer in r.get("peers", {}).items()]
        lines += [f"{side}: not measured, {why}" for side, why in self.absent.items()]
        return "\n".join(lines)

    def save(self) -> None:
        """Write gpu.json."""
        versions = {}
        for name in ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "maxtext"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = None
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": sys.argv, "python": platform.python_version(),
            "versions": versions, "ceiling": self.ceiling, "rows": self.results, "left_out": self.budget.left_out,
            "absent": self.absent,
        }  # fmt: skip
        (self.output / RECORD).write_text(json.dumps(record, indent=1) + "\n")

    def take_up(self) -> None:
        """Load the rows that an earlier call measured, with the ceilings of that call."""
        record = json.loads((self.output / RECORD).read_text())
        self.results += [r for r in record["rows"] if "tokens_per_s" in r]


def number(value: float | None, width: int, form: str) -> str:
    """Format a figure, or a dash."""
    return f"{'-' if value is None else format(value, form):>{width}}"


def peer_line(result: dict[str, Any], side: str, peer: dict[str, Any]) -> str:
    """Return the result of a peer for one row, as text."""
    name = f"{result['row']}, {side}:"
    if "tokens_per_s" not in peer:
        return f"{name} {peer['error']}"
    how = ", ".join(str(peer[key]) for key in ("attention", "remat") if key in peer)
    return (
        f"{name} {peer['rows']} rows{how and ', ' + how}: {peer['tokens_per_s']:,.0f} tokens/s,"
        f" MFU {number(peer.get('mfu'), 0, '.1%')}, ours {result['tokens_per_s'] / peer['tokens_per_s']:.2f} times that"
    )


def environment_of(config: Config) -> tuple[list[environment.Setting], dict[str, str]]:
    """Return the settings of a run of this config, and its environment variables."""
    settings = environment.prepare(config, describe({}), env := dict(os.environ))
    return settings, env


def main(arguments: list[str] | None = None) -> int:
    """Run the rows and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(row.name for row in ROWS)}; default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit; rows that are not expected to fit are skipped")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="measure what an earlier call with this --output skipped")
    parser.add_argument("--cluster", default="dgx-h200", help="cluster whose device is used for the prediction")
    parser.add_argument("--calibration", help="calibration file of this machine, from `ridge calibrate`; default: published rates")
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
    if args.go_on and not (args.output / RECORD).is_file():
        parser.error(f"--continue: there is no {args.output / RECORD}")
    bench, rows = Bench(args), [known[name] for name in args.rows] or list(ROWS)
    if args.go_on:
        bench.take_up()
    measured = {r["row"] for r in bench.results}
    bench.measure_ceiling(rows)
    peers = [] if args.no_peer else [side for side in PEERS if side not in bench.absent]
    for part in in_order(rows, peers=peers, explicit=bool(args.rows)):
        if part.row.name in measured and (part.side == OURS or part.side in bench.result_of(part.row).get("peers", {})):
            continue
        try:
            bench.run_part(part)
        except Exception as error:  # a failed row must not end the others
            bench.failed(part.row, f"{type(error).__name__}: {error}")
        result = bench.result_of(part.row)
        bench.judge(part.row, result)
        bench.save()
        if part.side == OURS and not any(part.name == name for name, _ in bench.budget.left_out):
            rate = result.get("tokens_per_s")
            bench.log(f"{part.row.name}: " + (f"{rate:,.0f} tokens/s" if rate else result.get("error", "?")))
    print(bench.table())
    return 1 if any(result.get("missed") for result in bench.results) else 3 if bench.budget.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
