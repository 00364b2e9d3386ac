"""The minutes of a borrowed GPU in a fixed order: every step is one command of at most ten minutes, and all results are in one directory.

`python benchmarks/gpu_session.py [STEP | next | list] [--output DIR] [--tiny]`

`next` (default) runs the first step that is not complete; a step that was cut off runs again and continues where it can. Needs one NVIDIA
GPU, no network and no installation of this project (packages: gpu_needs.py). `--tiny` rehearses the steps on a CPU. DIR/session.json has
the state, DIR/STEP.log the output of a step. Exit code: that of the step; 124 when it ran into its time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkout import ROOT

BENCH = "benchmarks/gpu.py"
LIMIT_S = 590.0
CUT_OFF = 124
MARGIN_S = 20.0
"""Left to a benchmark for ending by itself before the limit of its step."""


@dataclass(frozen=True)
class Step:
    """One command, or several in a row. `{output}` is the directory of the session."""

    name: str
    what: str
    commands: tuple[tuple[str, ...], ...]
    expected_s: float
    complete: tuple[int, ...] = (0,)
    """Exit codes after which it does not run again."""


RIDGE = ("-m", "ridgeline")
MEASURE = (BENCH, "--output", "{output}/bench", "--limit-s", "{bench_s}")
STEPS = (
    Step("bench", "the leading rows, ours then peers, with profiles", (MEASURE,), 400, complete=(0, 1, 3)),
    Step("numerics", "kernels and training steps against a CPU", (
        ("benchmarks/gpu_numerics.py", "--output", "{output}/numerics.json"),
    ), 200),
    Step("resume", "training that is killed and resumed, against one that is not", (
        ("benchmarks/gpu_resume.py", "--output", "{output}/resume", "--steps", "120"),
    ), 110),
    Step("doctor", "the machine is fit; its rates for the planner", (
        (*RIDGE, "doctor", "--quick"), (*RIDGE, "calibrate", "--output", "{output}/calibration.yaml"),
    ), 180),
    Step("bench-2", "the rows and peers that did not fit", ((*MEASURE, "--continue"),), 570, complete=(0, 1, 3)),
    Step("bench-3", "what is left of them", ((*MEASURE, "--continue"),), 570, complete=(0, 1, 3)),
    Step("remat", "the cost of each rematerialization policy", (
        (*RIDGE, "bench", "remat", "models/llama-3.2-1b", "data.seq_len=4096", "--into", "{output}/calibration.yaml"),
    ), 300),
)  # fmt: skip
"""In order of importance. Analysis of the captures, and planned against compiled and measured, need no GPU: docs/PERFORMANCE.md."""
TINY = {"remat": (*RIDGE, "bench", "remat", "quickstart", "data.seq_len=64", "--into", "{output}/calibration.yaml")}


class Session:
    """The state of the steps in a directory."""

    def __init__(self, output: Path, tiny: bool) -> None:
        self.output, self.tiny = output.absolute(), tiny
        self.output.mkdir(parents=True, exist_ok=True)
        self.file = self.output / "session.json"
        self.state: dict[str, list[dict[str, Any]]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def is_complete(self, step: Step) -> bool:
        """Whether its last attempt ended with a code after which it does not run again."""
        attempts = self.state.get(step.name, [])
        return bool(attempts) and attempts[-1]["exit_code"] in step.complete

    def commands(self, step: Step, limit_s: float) -> list[list[str]]:
        """Return the command lines of a step; a benchmark that was cut off continues."""
        values = {"output": str(self.output), "bench_s": str(limit_s - MARGIN_S)}
        lines = [TINY[step.name]] if self.tiny and step.name in TINY else step.commands
        made = [[sys.executable, *(part.format(**values) for part in line)] for line in lines]
        for line in made:
            if self.tiny and line[1].endswith(".py"):
                line.append("--tiny")
            if line[1] == BENCH and "--continue" not in line and (self.output / "bench/gpu.json").exists():
                line.append("--continue")
        return made

    def run(self, step: Step, limit_s: float) -> int:
        """Run a step within the limit; record and return its exit code."""
        begun, code = time.monotonic(), 0
        print(f"{step.name}: {step.what}; about {step.expected_s:.0f} s, at most {limit_s:.0f}", flush=True)
        self.record(step, {"exit_code": None, "seconds": None})  # a killed session leaves the step incomplete
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **({"JAX_PLATFORMS": "cpu"} if self.tiny else {})}
        with (self.output / f"{step.name}.log").open("a") as log:
            for command in self.commands(step, limit_s):
                log.write(f"$ {' '.join(command)}\n")
                log.flush()
                code = _follow(command, env, log, limit_s - (time.monotonic() - begun))
                if code:
                    break
        self.state[step.name].pop()
        self.record(step, {"exit_code": code, "seconds": round(time.monotonic() - begun, 1)})
        print(f"{step.name}: exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
        return code

    def record(self, step: Step, attempt: dict[str, Any]) -> None:
        """Append an attempt to session.json."""
        self.state.setdefault(step.name, []).append(attempt)
        self.file.write_text(json.dumps(self.state, indent=1) + "\n")

    def table(self) -> str:
        """Return the steps with their state."""
        lines = []
        for step in STEPS:
            last = (self.state.get(step.name) or [None])[-1]
            state = "open" if last is None else "complete" if self.is_complete(step) else f"exit code {last['exit_code']}, runs again"
            lines.append(f"{step.name:10}{step.expected_s:5.0f} s  {state:24}{step.what}")
        return "\n".join(lines)


def _follow(command: Sequence[str], env: dict[str, str], log: Any, limit_s: float) -> int:
    """Run a command; print its output and write it to the log. All its processes are killed at the limit."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    timed_out = []

    def end() -> None:
        timed_out.append(True)
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(1.0, limit_s), end)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
    return CUT_OFF if timed_out else code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step, or print all of them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [step.name for step in STEPS]
    parser.add_argument("step", nargs="?", default="next", choices=[*names, "next", "list"])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time limit of a step")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU")
    args = parser.parse_args(arguments)
    session = Session(args.output, args.tiny)
    if args.step == "list":
        print(session.table())
        return 0
    step = next((s for s in STEPS if s.name == args.step or (args.step == "next" and not session.is_complete(s))), None)
    if step is None:
        print("all steps are complete")
        return 0
    return session.run(step, args.limit_s)


if __name__ == "__main__":
    sys.exit(main())
