"""The layers above the step: the loader alone, the training loop on real data, saves and restores. All files go to a scratch directory."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import CheckpointConfig, Config, EvaluationConfig, ProfilerConfig
from ridgeline.loaders.loader import build_loader
from ridgeline.measure.loader import bench
from ridgeline.measure.session import Session
from ridgeline.measure.timing import agreed
from ridgeline.observe.goodput import watch
from ridgeline.observe.profiler import Profiler
from ridgeline.observe.progress import build_progress
from ridgeline.observe.step_timer import StepTimer
from ridgeline.observe.writers import build_writers
from ridgeline.rundir.events import EventLog, event_file
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.batches import local_rows, to_global
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.evaluation import Evaluator
from ridgeline.trainer.grace import Grace
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.run import data_seed
from ridgeline.trainer.stop import Stop
from ridgeline.trainer.watchdog import HANG_EXIT_CODE, Watchdog

LOADER_ROUND_S = 0.5
PROBE_BATCHES = 3
MOST_BATCHES = 200
MOST_AHEAD = 16
"""So many batches that were read ahead are used up before a round of the loop, at most."""


@dataclass(frozen=True)
class LoaderTimes:
    """The loader alone: nothing but the next batch is waited for."""

    batch_s: list[float]
    """Seconds per batch of this process, by round."""
    tokens_per_s: list[float]
    """Of this process."""
    first_batch_s: float
    """From opening the corpora."""
    batches: int
    """Of a round."""


@dataclass(frozen=True)
class LoopTimes:
    """A round of the loop on real data, with its log lines; without evaluations, saves and captures."""

    step_s: float
    """Seconds per step."""
    wait_s: float
    """The part of them spent waiting for the next batch."""
    log_lines: int
    """Log records written in them."""


@dataclass(frozen=True)
class CheckpointTimes:
    """Saves and restores of the whole state."""

    blocking_s: list[float]
    """Training stood still, by save."""
    write_s: list[float]
    """From the start of the save to its seal."""
    restore_s: list[float]
    """Read and verified (from the page cache, where the file system has one)."""
    size_bytes: int


class LoaderRounds:
    """Reads batches as fast as they come. Raises UserError for data that is missing or does not fit."""

    def __init__(self, config: Config) -> None:
        self._read = functools.partial(bench, config.data, seed=data_seed(config), processes=jax.process_count())
        probe = self._read(batches=PROBE_BATCHES)
        batches = agreed(max(PROBE_BATCHES, min(MOST_BATCHES, round(LOADER_ROUND_S / max(probe.wall_s / PROBE_BATCHES, 1e-6)))))
        self.times = LoaderTimes([], [], probe.first_batch_s, batches)

    def round(self) -> None:
        """Read the batches of a round."""
        found = self._read(batches=self.times.batches)
        self.times.batch_s.append(found.wall_s / found.batches)
        self.times.tokens_per_s.append(found.tokens_per_s)


@contextlib.contextmanager
def scratch(config: Config) -> Iterator[Path]:
    """Make a directory on the file system of the run directory, the same for all processes, and remove it afterwards.

    Raises UserError where none can be made. The run directory itself is neither made nor touched.
    """
    parent = config.directory.absolute().parent
    while not parent.is_dir():
        parent = parent.parent

    def make() -> str:
        try:
            return tempfile.mkdtemp(prefix=".ridge-bench-", dir=parent)
        except OSError as error:
            raise UserError(f"cannot write to {parent}, where the run directory {config.directory} is to be: {error.strerror}") from None

    agreement = Agreement("bench-scratch")
    directory = Path(agreement.first(make))
    with _ending_like_ctrl_c():
        try:
            yield directory
        finally:
            agreement.first(lambda: shutil.rmtree(directory, ignore_errors=True))


@contextlib.contextmanager
def _ending_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does: a job that is cancelled leaves no checkpoint behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def loop_round(session: Session, directory: Path) -> LoopTimes:
    """Run the training loop itself on the config's data for a round of steps; the session's steps have begun.

    The steps before them take what the loader had read ahead while nobody asked for it; the last of all waits for no next batch.
    """
    data = session.config.data
    ahead = min(data.prefetch + max(data.threads, data.workers) + 1, MOST_AHEAD)  # read, being read, and on the devices
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
        loader = build_loader(config.data, seed=data_seed(config), vocab_size=config.model.vocab_size, rows=rows)
        stack.callback(loader.close)
        watchdog = Watchdog(config.trainer.hang_timeout_s, directory / f"stacks.{process}.txt", HANG_EXIT_CODE, events.emit)
        stack.callback(watchdog.close)
        progress = build_progress(config.trainer.steps, process=process, stream=io.StringIO())
        stack.callback(progress.close)
        loop = Loop(
            config=config,
            train_step=session.step,
            param_norm=session.norm,
            put=lambda batch: to_global(batch, partitioner),
            loader=loader,
            evaluator=Evaluator(config, partitioner, session.parts.evaluation_step),
            checkpointer=Checkpointer(directory / "none", config.checkpoint),
            save_metadata=lambda step: {},
            timer=timer,
            writer=writer,
            progress=progress,
            profiler=Profiler(config.profiler, directory, process=process, num_processes=jax.process_count()),
            events=events,
            stop=Stop(),
            watchdog=watchdog,
            grace=Grace(None, progress.note),
            goodput=watch(events, directory, 0, session.mesh.size) if process == 0 else None,
        )
        session.keep_state(loop.run(session.take_state(), 0).state)
    return LoopTimes(
        step_s=statistics.fmean(timer.steps_s[ahead:-1]),
        wait_s=statistics.fmean(timer.waits_s[ahead:-1]),
        log_lines=sum(step % config.trainer.log_every == 0 for step in range(ahead + 2, config.trainer.steps)),
    )


def measure_checkpoint(session: Session, directory: Path) -> CheckpointTimes:
    """Save the state `repeats` times and restore it as often, with the config's settings (retention aside: one is kept)."""
    config = session.config.checkpoint.model_copy(update={"keep_last": 1, "keep_every": 0})
    checkpointer = Checkpointer(directory / "checkpoints", config)
    state, tokenizer = session.take_state(), {"kind": "bench", "config": session.config.name}
    checkpointer.save(1, state, tokenizer, block=True)  # first touches of host memory
    blocking_s, write_s = [], []
    for step in range(2, session.repeats + 2):
        blocking_s.append(checkpointer.save(step, state, tokenizer).blocking_s)
        checkpointer.wait()
        write_s.append(checkpointer.last_write_s() or 0.0)
    checkpointer.close()
    newest = checkpoint_dirs.step_dir(checkpointer.directory, session.repeats + 1)
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    del state
    restore_s = []
    for _ in range(session.repeats):
        restored, seconds = _restore(directory, config, session)
        restore_s.append(seconds)
        session.keep_state(restored)
        del restored
    return CheckpointTimes(blocking_s, write_s, restore_s, size)


def _restore(directory: Path, config: CheckpointConfig, session: Session) -> tuple[Any, float]:
    session.keep_state(None)
    reader = Checkpointer(directory / "checkpoints", config, read_only=True)
    begun = time.perf_counter()
    state, _ = reader.restore(session.parts.abstract)
    return state, time.perf_counter() - begun


def _loop_config(config: Config, steps: int) -> Config:
    """The same run, this long, without what happens between steps."""
    trainer = config.trainer.model_copy(
        update={
            "steps": steps,
            "stop_after_s": None,
            "max_bad_steps": steps,  # a state that has seen random tokens may be anything: its values are nobody's concern here
        }
    )
    return config.model_copy(
        update={
            "trainer": trainer,
            "evaluation": EvaluationConfig(),
            "checkpoint": config.checkpoint.model_copy(update={"every": 0, "every_minutes": 0.0, "final": False}),
            "profiler": ProfilerConfig(),
            "logging": config.logging.model_copy(update={"wandb_project": None}),  # a benchmark publishes nothing
        }
    )


class _RecordingTimer(StepTimer):
    """Keeps every step's time and wait; the first step, which loads the program, is in neither."""

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
