"""Time the loader and the training loop on real data, in rounds. All files go to a scratch directory."""

from __future__ import annotations

import contextlib
import functools
import io
import statistics
from dataclasses import dataclass
from pathlib import Path

import jax

from ridgeline.configs.schema import Config, EvaluationConfig, ProfilerConfig
from ridgeline.loaders.loader import build_loader
from ridgeline.measure.loader import measure_loader
from ridgeline.measure.step import Session
from ridgeline.measure.timer import agreed
from ridgeline.observe.goodput import watch
from ridgeline.observe.progress import build_progress
from ridgeline.observe.step_timer import StepTimer
from ridgeline.observe.writers import build_writers
from ridgeline.rundir.events import EventLog, event_file
from ridgeline.trainer.hooks import Heartbeat, MetricLog, NonFiniteSteps, Recorder
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.prepare import data_seed
from ridgeline.trainer.reference import open_pairs
from ridgeline.trainer.step import local_rows, to_global
from ridgeline.trainer.stop import Stop
from ridgeline.trainer.watchdog import HANG_EXIT_CODE, Watchdog

LOADER_ROUND_S = 0.5
PROBE_BATCHES = 3
MOST_BATCHES = 200
MOST_AHEAD = 16
"""At most this many prefetched batches are consumed before a round of the loop."""


@dataclass(frozen=True)
class LoopTimes:
    """One round of the loop on real data, with its log lines but without evaluations, saves and profiler captures."""

    step_s: float
    """Seconds per step."""
    wait_s: float
    """Part of `step_s` spent waiting for the next batch."""
    log_lines: int
    """Log records written during the round."""


@dataclass(frozen=True)
class LoaderTimes:
    """Rounds of the loader alone, in this process."""

    batch_s: list[float]
    """Seconds per batch, one entry per round."""
    tokens_per_s: list[float]
    first_batch_s: float
    """From opening the corpora to the first batch."""
    batches: int
    """Per round."""


class LoaderRounds:
    """Reads batches as fast as the loader delivers them. Raises UserError for missing or unusable data."""

    def __init__(self, config: Config) -> None:
        self._read = functools.partial(measure_loader, config.data, seed=data_seed(config), processes=jax.process_count())
        probe = self._read(batches=PROBE_BATCHES)
        batches = agreed(max(PROBE_BATCHES, min(MOST_BATCHES, round(LOADER_ROUND_S / max(probe.wall_s / PROBE_BATCHES, 1e-6)))))
        self.times = LoaderTimes([], [], probe.first_batch_s, batches)

    def round(self) -> None:
        """Read the batches of one round."""
        found = self._read(batches=self.times.batches)
        self.times.batch_s.append(found.wall_s / found.batches)
        self.times.tokens_per_s.append(found.tokens_per_s)


def loop_round(session: Session, directory: Path) -> LoopTimes:
    """Run the training loop on the config's data for one round of steps. Call `session.begin_steps` first.

    The first steps, which consume prefetched batches, and the last one, which does not wait for a next batch, are not counted.
    """
    data = session.config.data
    ahead = min(data.prefetch + max(data.threads, data.workers) + 1, MOST_AHEAD)  # prefetched, being read, and on the devices
    config = _loop_config(session.config, 1 + ahead + session.steps_per_round() + 1)
    directory.mkdir(exist_ok=True)
    partitioner, process = session.parts.partitioner, jax.process_index()
    rows = local_rows(config.data.batch_size, partitioner)
    timer = _RecordingTimer(config.data.batch_size * config.data.seq_len, session.mesh.size)
    with contextlib.ExitStack() as stack:
        events = stack.enter_context(contextlib.closing(EventLog(event_file(directory, process), process, run="bench")))
        writer = build_writers(config.logging, directory, name=config.name, run="bench", config={}, process=process)
        stack.callback(writer.close)
        writer.flush()
        pairs = open_pairs(config, lambda line: None) or None
        loader = build_loader(
            config.data,
            seed=data_seed(config),
            vocab_size=config.model.vocab_size,
            rows=rows,
            pairs=pairs,
            distillation=config.distillation,
            mtp_layers=config.model.mtp_layers,
        )
        stack.callback(loader.close)
        watchdog = Watchdog(config.trainer.hang_timeout_s, directory / f"stacks.{process}.txt", HANG_EXIT_CODE, events.emit)
        stack.callback(watchdog.close)
        progress = build_progress(config.trainer.steps, process=process, stream=io.StringIO())
        stack.callback(progress.close)
        recorder = Recorder(events, writer, progress, timer)
        loop = Loop(
            config=config.trainer,
            train_step=session.step,
            param_norm=session.norm,
            put=lambda batch: to_global(batch, partitioner),
            loader=loader,
            stop=Stop(),
            events=events,
            timer=timer,
            hooks=[
                Heartbeat(watchdog, progress),
                NonFiniteSteps(config.trainer.max_bad_steps, recorder),
                MetricLog(config, recorder, watch(events, directory, 0, session.mesh.size) if process == 0 else None),
            ],
        )
        watchdog.step(None)
        session.keep_state(loop.run(session.take_state(), 0).state)
    return LoopTimes(
        step_s=statistics.fmean(timer.steps_s[ahead:-1]),
        wait_s=statistics.fmean(timer.waits_s[ahead:-1]),
        log_lines=sum(step % config.trainer.log_every == 0 for step in range(ahead + 2, config.trainer.steps)),
    )


def _loop_config(config: Config, steps: int) -> Config:
    """Return the config with this many steps and without evaluations, saves and profiling."""
    trainer = config.trainer.model_copy(
        update={
            "steps": steps,
            "stop_after_s": None,
            "max_bad_steps": steps,  # the state has seen random tokens: a NaN must not stop the benchmark
        }
    )
    return config.model_copy(
        update={
            "trainer": trainer,
            "evaluation": EvaluationConfig(),
            "checkpoint": config.checkpoint.model_copy(update={"every": 0, "every_minutes": 0.0, "final": False}),
            "profiler": ProfilerConfig(),
            "logging": config.logging.model_copy(update={"wandb_project": None}),  # a benchmark does not publish
        }
    )


class _RecordingTimer(StepTimer):
    """Keeps the time and the data wait of every step except the first, which loads the program."""

    def __init__(self, tokens_per_step: int, num_devices: int) -> None:
        super().__init__(tokens_per_step=tokens_per_step, num_devices=num_devices, flops_per_token=None, peak_flops=None)
        self.steps_s, self.waits_s, self._wait_s = list[float](), list[float](), 0.0

    def start(self) -> None:
        super().start()
        self.steps_s, self.waits_s, self._wait_s = [], [], 0.0

    def waited(self, duration_s: float) -> None:
        super().waited(duration_s)
        self._wait_s += duration_s

    def step(self) -> float:
        seconds = super().step()
        self.steps_s.append(seconds)
        self.waits_s.append(self._wait_s)
        self._wait_s = 0.0
        return seconds
