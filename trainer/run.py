"""A training run, from the config to the last checkpoint.

config -> data manifests -> mesh, model and step functions (prepare.py) -> run directory -> state (new or restored) -> compiled step
-> loader -> loop with its hooks
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ridgeline.configs.schema import Config
from ridgeline.loaders.loader import build_loader
from ridgeline.loaders.manifest import TokenizerInfo, check_same_tokenizer
from ridgeline.observe.compilation import CompilerWatch, Program, compile_in_parts
from ridgeline.observe.profiler import StartAnalysis
from ridgeline.observe.progress import Progress, build_progress
from ridgeline.rundir.events import EventLog, event_file
from ridgeline.rundir.startup import record_start
from ridgeline.sharding.mesh import describe_mesh
from ridgeline.trainer.agreement import Agreement, coordination_client
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.finite import all_finite
from ridgeline.trainer.evaluation import Evaluator
from ridgeline.trainer.failures import NumericalFailure, lost_peer
from ridgeline.trainer.hooks import CompilationStep, Evaluation, Heartbeat, MetricLog, NonFiniteSteps, Profiling, Saving
from ridgeline.trainer.loop import Hook, Loader, Loop, Outcome
from ridgeline.trainer.monitoring import Monitoring
from ridgeline.trainer.plan_record import record_plan
from ridgeline.trainer.prepare import Prepared, check_data, data_seed, prepare
from ridgeline.trainer.pretrained import holds_only_params, start_from
from ridgeline.trainer.program_cache import open_program_cache
from ridgeline.trainer.start import StartedRun, start_run
from ridgeline.trainer.state import TrainState
from ridgeline.trainer.step import abstract_batch, local_rows, param_norm, to_global
from ridgeline.trainer.stop import GracePeriod, Stop, StopRequested, in_thread, last_write_s
from ridgeline.trainer.watchdog import HANG_EXIT_CODE, Watchdog


def train(
    config: Config,
    *,
    command: Sequence[str],
    before: Sequence[tuple[str, float, float]] = (),
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    stop: Stop | None = None,
    grace_s: float | None = None,
    analyze: StartAnalysis | None = None,
    from_step: int | None = None,
) -> Outcome | None:
    """Train to the last step, or until a stop is requested. Return how the run ended; None if it was complete already.

    Starts the run in `config.directory`, or resumes it from its newest good checkpoint.

    Args:
      command: as typed; recorded in the run directory.
      before: phases of this start before the event log was open: (name, begin, end), monotonic seconds, in order; the rest is `launch`.
      facts: events of this start, kind -> fields.
      stop: an installed Stop; None: Ctrl-C and SIGTERM are handled from here on.
      grace_s: seconds between the stop signal and the end of the job.
      analyze: starts the analysis of each captured profile (observe.profiler).
      from_step: resume from the checkpoint of this step instead, and set later ones aside (process 0's value counts).

    Raises:
      UserError: bad input.
      NumericalFailure: the run cannot continue; `.steps` are the saved steps.
      CheckpointError: checkpoints cannot be saved or loaded.
      StopRequested: a stop was requested before the first step. Nothing needs saving, but threads may be working: exit by `os._exit`.
    """
    process = jax.process_index()
    progress = build_progress(config.trainer.steps, process=process)
    own_stop = stop is None
    stop = Stop().install() if stop is None else stop
    stop.log = progress.note
    try:
        with stop.raising():
            from_step = Agreement("from-step").first(lambda: _check_step(config, from_step))
            tokenizer = check_data(config)
            parts = prepare(config)
            run = start_run(config, command=command, log=progress.note)
            events = EventLog(event_file(run.path, process), process, run=run.id, restart=run.restart)
            record_start(events, before, facts or {})
        try:
            stop.share(coordination_client(), process, jax.process_count(), f"{run.id}.{run.restart}")
            watchdog = Watchdog(config.trainer.hang_timeout_s, run.path / f"stacks.{process}.txt", HANG_EXIT_CODE, events.emit)
            programs = open_program_cache(config, parts.mesh, progress.note)
            compiler = CompilerWatch(events, progress.note, compile_in_parts if programs is None else programs.compile)
            check = compiler.program(jax.jit(all_finite), "all_finite")
            checkpointer = Checkpointer(run.checkpoints, config.checkpoint, events=events, log=progress.note, check=check)
            session = _Session(
                config, parts, run, tokenizer, events, progress, stop, watchdog, checkpointer, grace_s, analyze, compiler, from_step
            )
            try:
                outcome = session.train()
            except jax.errors.JaxRuntimeError:
                if programs is not None and not session.began:
                    programs.remove_loaded()
                raise
            finally:
                watchdog.close()
        except StopRequested as request:
            stop.abandon()
            events.emit("stopped_early", signal=request.signal.name)
            raise
        finally:
            stop.unshare()
            events.close()
    finally:
        progress.close()
        if own_stop:
            stop.uninstall()
    return outcome


@dataclass
class _Session:
    """One start of a run, from its directory to its end."""

    config: Config
    parts: Prepared
    run: StartedRun
    tokenizer: TokenizerInfo
    events: EventLog
    progress: Progress
    stop: Stop
    watchdog: Watchdog
    checkpointer: Checkpointer
    grace_s: float | None
    analyze: StartAnalysis | None
    compiler: CompilerWatch
    from_step: int | None = None
    """The step to resume from; None: the newest good one."""
    plan_thread: threading.Thread | None = None
    """Writes plan.json and compile.json."""
    loop: Loop | None = None

    @property
    def began(self) -> bool:
        """Whether the first step is done."""
        return self.loop is not None and self.loop.began

    def train(self) -> Outcome | None:
        """Create or restore the state, compile, and run the loop. Return None if the run is complete already."""
        config, steps = self.config, self.config.trainer.steps
        with self.stop.raising(), self.watchdog.phase("start-up"):
            reached = self.checkpointer.latest_step() if self.from_step is None else self.from_step
            if reached is not None and reached >= steps:
                self.progress.note(f"{self.run.path}: complete at step {reached}; raise trainer.steps (now {steps}) to train on")
                return None
            state, start_step = in_thread(self._first_state)
            if jax.process_index() == 0:
                shutil.copytree(config.data.train[0].path / "tokenizer", self.run.path / "tokenizer", dirs_exist_ok=True)
            train_step, norm = in_thread(self._compile)
            self._record_plan(train_step)
            self._log_model()
        with self.watchdog.phase("waiting for the other processes to compile"):
            self.stop.begin_together()
        if self.from_step is not None:
            self.checkpointer.set_later_aside(self.from_step)
        rows = local_rows(config.data.batch_size, self.parts.partitioner)
        loader = build_loader(config.data, seed=data_seed(config), vocab_size=config.model.vocab_size, rows=rows, start_step=start_step)
        try:
            return self._run_loop(train_step, norm, loader, state, start_step)
        except NumericalFailure as failure:
            failure.steps = self.checkpointer.steps()
            raise
        finally:
            loader.close()

    def _first_state(self) -> tuple[TrainState, int]:
        """Return the restored state or the initial one, and its step."""
        config, parts, checkpointer = self.config, self.parts, self.checkpointer
        if checkpointer.has_checkpoints() and not holds_only_params(checkpointer):
            return self._restore()
        with self.events.phase("init"):
            state = self.compiler.program(parts.make_state, "init")()
            source = self.run.path if checkpointer.has_checkpoints() else config.init_from
            if source is not None:
                state = start_from(source, config.model, self.tokenizer.sha256, parts.spec, state)
                self.progress.note(f"starting from the parameters of {source}")
            jax.block_until_ready(state)
        return state, 0

    def _restore(self) -> tuple[TrainState, int]:
        """Return the state of `from_step` (None: the newest good one), and its step."""
        with self.events.phase("restore") as record:
            state, metadata = self.checkpointer.restore(self.parts.abstract, self.from_step)
            record["step"] = metadata["step"]
        check_same_tokenizer(metadata.get("tokenizer"), self.tokenizer.sha256, str(self.checkpointer.directory))
        self.progress.note(f"resuming from the checkpoint of step {metadata['step']}")
        return state, int(metadata["step"])

    def _compile(self) -> tuple[Program, Program]:
        """Compile the train step, and the norm of the parameters."""
        parts = self.parts
        step = self.compiler.program(parts.train_step, "train_step", parts.abstract, abstract_batch(self.config, parts.partitioner))
        return step, self.compiler.program(jax.jit(param_norm), "param_norm", parts.abstract.params)

    def _record_plan(self, step: Program) -> None:
        """Write plan.json and compile.json in a thread. A failure is reported and does not end the run."""
        if jax.process_index() != 0:
            return
        device = self.parts.mesh.devices.flat[0]
        record = functools.partial(record_plan, device_kind=device.device_kind, gpu=device.platform == "gpu", parts=step.parts)

        def work() -> None:
            error = record(self.run.path, self.config, dict(self.parts.mesh.shape), step.compiled)
            if error is not None:
                self.progress.note(error)

        self.plan_thread = threading.Thread(target=work, name="plan", daemon=True)
        self.plan_thread.start()

    def _log_model(self) -> None:
        config, count = self.config, sum(leaf.size for leaf in jax.tree.leaves(self.parts.abstract.params))
        tokens = config.data.batch_size * config.data.seq_len
        self.progress.note(
            f"{config.name}: {config.model.family}, {count:,} parameters, {tokens:,} tokens per step; {describe_mesh(self.parts.mesh)}; "
            f"run directory {config.directory}"
        )

    def _hooks(self, monitoring: Monitoring) -> list[Hook]:
        """Return everything that reacts to steps, in the order in which the loop calls it."""
        config, recorder = self.config, monitoring.recorder
        evaluation_step = self.compiler.program(self.parts.evaluation_step, "evaluation_step")
        grace = GracePeriod(self.grace_s, self.progress.note, self.checkpointer.last_write_s)
        if (write_s := last_write_s(self.events.path)) is not None:  # in process 0, which records saves
            grace.saved(write_s)
        nonfinite = NonFiniteSteps(config.trainer.max_bad_steps, recorder)
        return [
            Profiling(monitoring.profiler, recorder),
            CompilationStep(self.compiler),
            Heartbeat(self.watchdog, self.progress),
            nonfinite,
            MetricLog(config, recorder, monitoring.goodput, monitoring.startup, monitoring.clocks),
            Evaluation(config, Evaluator(config, self.parts.partitioner, evaluation_step), recorder, self.stop, self.watchdog),
            Saving(config, self.checkpointer, self._metadata, nonfinite, recorder, self.watchdog, grace),
        ]

    def _metadata(self, step: int) -> dict[str, Any]:
        return save_metadata(self.config, step, self.tokenizer)

    def _run_loop(self, train_step: Program, norm: Program, loader: Loader, state: TrainState, start_step: int) -> Outcome:
        monitoring = Monitoring.begin(
            self.config, self.parts.mesh, self.run, self.events, self.progress, start_step, train_step.as_text, self.analyze
        )
        self.loop = Loop(
            config=self.config.trainer,
            train_step=train_step,
            param_norm=norm,
            put=lambda rows: to_global(rows, self.parts.partitioner),
            loader=loader,
            stop=self.stop,
            events=self.events,
            timer=monitoring.recorder.timer,
            hooks=self._hooks(monitoring),
        )
        self.compiler.start()
        self.watchdog.step(None)
        self.progress.start(start_step)
        settle = self.checkpointer.wait
        try:
            outcome = self.loop.run(state, start_step)
        except Exception as error:
            if lost_peer(error, jax.process_count()) is not None:
                settle = self.checkpointer.abandon
            raise
        finally:
            self.compiler.close()
            with self.events.phase("teardown"), self.watchdog.phase("teardown"):
                if self.plan_thread is not None:
                    self.plan_thread.join()
                monitoring.close()
                settle()
        self.checkpointer.close()
        return outcome


def _check_step(config: Config, step: int | None) -> int | None:
    """Return `step` if its checkpoint is complete (None: as it is). Process 0, before anything is written. Raises UserError."""
    if step is not None:
        checkpoint_dirs.check_complete(config.directory.absolute() / "checkpoints", step)
    return step


def save_metadata(config: Config, step: int, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Return the metadata that a checkpoint stores beside its arrays."""
    return {
        "kind": "train",
        "data_position": step,
        "config_sha256": hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
        "tokenizer": tokenizer.sha256,
        "mesh": config.mesh.sizes,
    }
