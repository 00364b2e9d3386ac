"""Cost of observing the training loop: `python benchmarks/observing.py`. Best of several repeats, in microseconds.

Required: at most 20 us per event.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import checkout  # noqa: F401  # before ridgeline

from ridgeline.configs.schema import LoggingConfig, ProfilerConfig
from ridgeline.observe.profiler import Profiler, step_annotation
from ridgeline.observe.step_timer import StepTimer
from ridgeline.observe.writers import build_writers
from ridgeline.rundir.events import EventLog
from ridgeline.rundir.metrics import METRICS

EVENT_LIMIT_US = 20.0


def best_us(work: Callable[[], object], number: int, repeats: int = 7) -> float:
    """Time of one call, microseconds."""
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        for _ in range(number):
            work()
        times_s.append((time.perf_counter() - start_s) / number)
    return min(times_s) * 1e6


def main() -> int:
    """Print the table; return 1 when an event costs more than the limit."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        log = EventLog(run_dir / "events.jsonl", run="bench")
        writer = build_writers(LoggingConfig(), run_dir, name="bench", run="bench", config={})
        values = {name: 1.0 for name in METRICS if "<" not in name}
        timer = StepTimer(tokens_per_step=1, num_devices=1, flops_per_token=1.0, peak_flops=1.0)
        profiler = Profiler(ProfilerConfig(), run_dir)

        def phase() -> None:
            with log.phase("data_wait"):
                pass

        def annotate() -> None:
            with step_annotation(1):
                pass

        def step() -> None:
            timer.waited(1e-6)
            timer.step()

        def window() -> None:
            for _ in range(10):
                step()
            timer.report()

        event_us = best_us(lambda: log.emit("step", step=1, loss=1.5), 2000)
        rows = {
            "one event": event_us,
            "one phase (two events)": best_us(phase, 1000),
            "step timer, per step": best_us(step, 2000),
            "step timer, window of 10 with report": best_us(window, 200),
            "profiler, per step, idle": best_us(lambda: profiler.before_step(1, lambda: None), 2000),
            "step annotation, no profile": best_us(annotate, 2000),
            f"a log line of {len(values)} metrics (JSONL and TensorBoard)": best_us(lambda: writer.write(1, values), 200),
        }
        writer.close()
        log.close()
    for what, cost_us in rows.items():
        print(f"{what:<52}{cost_us:>9.2f} us")
    print(f"event cost {event_us:.1f} us, limit {EVENT_LIMIT_US:.0f} us: {'ok' if event_us <= EVENT_LIMIT_US else 'TOO SLOW'}")
    return int(event_us > EVENT_LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
