"""CPU seconds of `ridge simulate` for 100,000 GPUs and 90 days: `python benchmarks/simulate.py [CASES] [SEED]`. Required: at most 30 s.

Runs a case without and one with a layout at their usual settings, and CASES drawn ones (default 6): model, batch, cluster, spares, tier,
policy, failure rate, preemptions and time limits. Prints CPU seconds, which other load affects least, wall time, and the worst case. The
requirement is for the less of the two.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
from checkout import ROOT

REQUIRED_S, DAYS = 30.0, 90
DEVICES = (100_000, 102_400)
"""The second number divides batches that are multiples of it, so that the job has layouts, also on fewer nodes."""
PER_NODE = {"dgx-h100": 8, "dgx-b200": 8, "dgx-h200": 8, "gb200-nvl72": 4}
MODELS = {
    "models/llama-3.1-405b": 8192,
    "models/llama-3.1-70b": 8192,
    "models/deepseek-v3-671b": 4096,
    "models/qwen3-235b-a22b": 4096,
}


@dataclass(frozen=True)
class Case:
    """Arguments of `ridge simulate`."""

    model: str
    rows: int
    cluster: str
    devices: int = DEVICES[0]
    options: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        nodes = str(self.devices // PER_NODE[self.cluster])
        job = ["-c", self.cluster, "-N", nodes, "--days", str(DAYS), "--json"]
        return [self.model, f"data.batch_size={self.rows}", f"data.seq_len={MODELS[self.model]}", *job, *self.options]

    @property
    def text(self) -> str:
        return " ".join(self.arguments)


def usual() -> list[Case]:
    """Return a batch without a layout on so many devices, and one with."""
    return [Case("models/llama-3.1-405b", 2048, "dgx-h100"), Case("models/llama-3.1-405b", 102_400, "dgx-h100", 102_400)]


def drawn(source: np.random.Generator) -> Case:
    """Return a case as users may ask for it."""

    def one_of(*values: tuple[str, ...]) -> tuple[str, ...]:
        return values[source.integers(len(values))]

    options = (
        *one_of((), ("--spares", str(source.integers(0, 100)))),
        *one_of((), ("--tier", "local"), ("--tier", "shared")),
        *one_of((), ("--policy", "shrink"), ("--policy", "wait")),
        *one_of((), (), ("--fleet", "rsc-1"), ("--failure-scale", "2")),
        *one_of((), (), ("--preemptions", "5"), ("--time-limit", "1-00:00:00", "--queue-wait", "30m")),
        *one_of((), ("--objective", "time")),
    )
    devices = int(source.choice(DEVICES))
    rows = [2048, 4096, 16_384, 65_536, devices // 8, devices // 4, devices // 2, devices]
    return Case(str(source.choice(list(MODELS))), int(source.choice(rows)), str(source.choice(list(PER_NODE))), devices, options)


def seconds(case: Case) -> tuple[float, float]:
    """Return CPU and wall seconds of one command, and print what it found."""
    before, begin_s = _cpu_s(), time.monotonic()
    command = [sys.executable, "-m", "ridgeline", "simulate", *case.arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wall_s, cpu_s = time.monotonic() - begin_s, _cpu_s() - before
    if done.returncode:
        raise SystemExit(f"{case.text}: {done.stderr}")
    found = json.loads(done.stdout)
    days = found["days"]["p50"]
    layout = found["layout"] or "no layout"
    print(
        f"{cpu_s:5.1f} s CPU {wall_s:5.1f} s wall  {case.text}\n"
        f"    {layout}; {'never done' if days is None else f'{days:.1f} days'}, goodput {found['goodput']['p50']:.1%},"
        f" {found['interruptions']:,.0f} interruptions",
        flush=True,
    )
    return cpu_s, wall_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run all cases and return whether one takes too long."""
    numbers = [int(word) for word in sys.argv[1:]]
    count, seed = (*numbers, *(6, 0)[len(numbers) :])
    source = np.random.default_rng(seed)
    taken = {case: seconds(case) for case in [*usual(), *(drawn(source) for _ in range(count))]}
    worst = max(taken, key=lambda case: min(taken[case]))
    cpu_s, wall_s = taken[worst]
    print(f"worst of {len(taken)}: {cpu_s:.1f} s CPU, {wall_s:.1f} s wall (required: {REQUIRED_S:g} s): {worst.text}")
    return int(min(cpu_s, wall_s) > REQUIRED_S)


if __name__ == "__main__":
    sys.exit(main())
