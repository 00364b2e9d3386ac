"""Overhead of the training loop over a minimal hand-written loop around the same compiled step: `python benchmarks/loop.py [--repeats 5]`.

Both loops run the same program on batches of the same loader, alternating in one process, and both read the loss of step s-1 while step s
runs. The minimal loop does nothing else; ours logs (metrics.jsonl, TensorBoard, events, a line of text), handles signals and profile
requests, and times every step. Required: at most 3 % overhead for steps of about 20 ms, and at most 1 % for 200 ms. With a step that
returns immediately (`nothing`), the host overhead per step is measured in microseconds.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from checkout import ROOT

from ridgeline.configs.schema import Config
from ridgeline.loaders.loader import Loader, build_loader
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.observe.profiler import Profiler
from ridgeline.observe.progress import build_progress
from ridgeline.observe.writers import build_writers
from ridgeline.rundir.events import EventLog
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.evaluation import Evaluator
from ridgeline.trainer.hooks import Evaluation, Heartbeat, MetricLog, NonFiniteSteps, Profiling, Recorder, Saving
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.monitoring import step_timer
from ridgeline.trainer.prepare import prepare as prepare_run
from ridgeline.trainer.step import abstract_batch, local_rows, param_norm, to_global
from ridgeline.trainer.stop import GracePeriod, Stop
from ridgeline.trainer.watchdog import HANG_EXIT_CODE, Watchdog

SHAPES: dict[str, dict[str, Any]] = {
    "20 ms": {"model": {"embed_dim": 64, "mlp_dim": 192, "num_layers": 2}, "batch_size": 4, "seq_len": 128, "steps": 100, "limit": 1.03},
    "200 ms": {"model": {"embed_dim": 192, "mlp_dim": 512, "num_layers": 4}, "batch_size": 8, "seq_len": 256, "steps": 20, "limit": 1.01},
}


def make_config(directory: Path, shape: dict[str, Any]) -> Config:
    """A run on a byte corpus of our own sources, with TensorBoard and a log line every ten steps."""
    corpus = directory / "corpus"
    if not corpus.exists():
        prepare(PrepareSettings((ROOT / "trainer",), corpus, "bytes"), workers=1)
    return Config.model_validate(
        {
            "name": "loop",
            "run_dir": str(directory / "run"),
            "model": {"vocab_size": 4096, "num_heads": 4, "max_seq_len": 256, **shape["model"]},
            "precision": {"compute": "float32"},
            "data": {"train": [{"path": str(corpus)}], "batch_size": shape["batch_size"], "seq_len": shape["seq_len"]},
            "trainer": {"steps": shape["steps"], "log_every": 10},
            "checkpoint": {"every": 0, "final": False},
        }
    )


class Contest:
    """One compiled step, driven by either loop."""

    def __init__(self, config: Config, directory: Path, instant: bool = False) -> None:
        self.config, self.directory = config, directory
        self.parts = prepare_run(config)
        self.state = self.parts.make_state()
        batch = abstract_batch(config, self.parts.partitioner)
        self.step = self.parts.train_step.lower(self.parts.abstract, batch).compile()
        self.norm = jax.jit(param_norm).lower(self.parts.abstract.params).compile()
        self.rows = local_rows(config.data.batch_size, self.parts.partitioner)
        if instant:
            names = ("loss", "z_loss", "accuracy", "grad_norm", "learning_rate", "weight", "skipped", "bad_in_a_row")
            metrics = {name: jnp.zeros(()) for name in names}
            norm = jnp.zeros(())
            self.step = lambda state, batch: (state, metrics)
            self.norm = lambda params: norm

    def loader(self) -> Loader:
        return build_loader(self.config.data, seed=0, vocab_size=self.config.model.vocab_size, rows=self.rows)

    def put(self, rows: Any) -> Any:
        return to_global(rows, self.parts.partitioner)

    def bare(self) -> float:
        """Seconds per step of the hand-written loop, without its first step."""
        loader = self.loader()
        state, previous, start_s = self.state, None, 0.0
        batch = self.put(next(loader))
        for index in range(self.config.trainer.steps):
            state, metrics = self.step(state, batch)
            if previous is not None:
                float(previous["loss"])
            previous = metrics
            batch = self.put(next(loader))
            if index == 0:
                float(metrics["loss"])
                start_s = time.perf_counter()
        jax.block_until_ready(previous)
        duration_s = time.perf_counter() - start_s
        loader.close()
        self.state = state
        return duration_s / (self.config.trainer.steps - 1)

    def ours(self, name: str) -> float:
        """Seconds per step of the training loop, from the end of its first step to the end of its last."""
        directory = self.directory / name
        events = EventLog(directory / "events.jsonl")
        writer = build_writers(self.config.logging, directory, name="loop", run="bench", config={})
        writer.flush()
        loader = self.loader()
        timer, progress, stop = (
            step_timer(self.config, self.parts.mesh.size),
            build_progress(self.config.trainer.steps, stream=io.StringIO()),
            Stop(),
        )
        recorder = Recorder(events, writer, progress, timer)
        nonfinite = NonFiniteSteps(self.config.trainer.max_bad_steps, recorder)
        watchdog = Watchdog(None, directory / "stacks.txt", HANG_EXIT_CODE, events.emit)
        evaluator = Evaluator(self.config, self.parts.partitioner, self.parts.evaluation_step)
        checkpointer = Checkpointer(directory / "checkpoints", self.config.checkpoint)
        loop = Loop(
            config=self.config.trainer,
            train_step=self.step,
            param_norm=self.norm,
            put=self.put,
            loader=loader,
            stop=stop,
            events=events,
            timer=timer,
            hooks=[
                Profiling(Profiler(self.config.profiler, directory), recorder),
                Heartbeat(watchdog, progress),
                nonfinite,
                MetricLog(self.config, recorder),
                Evaluation(self.config, evaluator, recorder, stop, watchdog),
                Saving(self.config, checkpointer, lambda step: {}, nonfinite, recorder, watchdog, GracePeriod(None, progress.note)),
            ],
        )
        marks: list[float] = []
        loop._end_first_step = _then(loop._end_first_step, lambda: marks.append(time.perf_counter()))  # type: ignore[method-assign]
        self.state = loop.run(self.state, 0).state
        duration_s = time.perf_counter() - marks[0]
        for part in (writer, loader, events):
            part.close()
        return duration_s / (self.config.trainer.steps - 1)


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def main() -> int:
    """Print a table and a JSON line; 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    found, failed = {}, False
    print(f"{'steps of':10}{'bare ms':>10}{'ours ms':>10}{'ratio':>8}   (medians of {repeats} runs each, in turn; ratio pair by pair)")
    with tempfile.TemporaryDirectory() as temporary:
        for label, shape in SHAPES.items():
            contest = Contest(make_config(Path(temporary), shape), Path(temporary))
            contest.bare()
            pairs = [(contest.bare(), contest.ours(f"{label}-{index}")) for index in range(repeats)]
            ratio = statistics.median(ours / bare for bare, ours in pairs)
            bare_s, ours_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            found[label] = {"bare_s": bare_s, "ours_s": ours_s, "ratio": ratio, "limit": shape["limit"]}
            failed |= ratio > shape["limit"]
            print(f"{label:10}{bare_s * 1e3:10.2f}{ours_s * 1e3:10.2f}{ratio:8.3f}   at most {shape['limit']}")
        shape = {**SHAPES["20 ms"], "steps": 2000}
        contest = Contest(make_config(Path(temporary), shape), Path(temporary), instant=True)
        pairs = [(contest.bare(), contest.ours(f"nothing-{index}")) for index in range(3)]
        bare_s, ours_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        found["nothing"] = {"bare_s": bare_s, "ours_s": ours_s, "added_us_per_step": (ours_s - bare_s) * 1e6}
        print(
            f"{'nothing':10}{bare_s * 1e3:10.3f}{ours_s * 1e3:10.3f}   the loop adds {(ours_s - bare_s) * 1e6:.0f} us of host time per step"
        )
    print(json.dumps(found))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
