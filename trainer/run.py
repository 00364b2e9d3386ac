"""A training run, from the config to the last checkpoint: the way can be read here in one sitting.

config -> data manifests -> mesh -> model -> run directory -> state (new or restored) -> compiled step -> loader -> loop
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.loaders.loader import build_loader, read_manifests
from ridgeline.loaders.manifest import TokenizerInfo, check_tokenizer, read_manifest
from ridgeline.observe.clock_watch import watch_clocks
from ridgeline.observe.compilation import compile_in_parts
from ridgeline.observe.goodput import LiveGoodput, watch
from ridgeline.observe.profiler import Profiler, StartAnalysis
from ridgeline.observe.progress import Progress, build_progress
from ridgeline.observe.recompile import CompilerWatch, Program
from ridgeline.observe.startup import record_start
from ridgeline.observe.step_timer import StepTimer
from ridgeline.observe.writers import build_writers
from ridgeline.planner.flops import train_flops_per_token
from ridgeline.planner.hardware import matmul_dtype, peak_flops
from ridgeline.rundir.events import EventLog, event_file, read_events
from ridgeline.rundir.startup import startup_metrics
from ridgeline.sharding.mesh import NodeOf, build_mesh, describe_mesh, node_of
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from ridgeline.trainer import config_guard
from ridgeline.trainer.agreement import Agreement, coordination_client
from ridgeline.trainer.batches import local_rows, to_global
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.finite import NumericalFailure, all_finite
from ridgeline.trainer.evaluation import Evaluator
from ridgeline.trainer.grace import Grace, last_write_s
from ridgeline.trainer.loop import Loader, Loop, Outcome
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.peers import lost_peer
from ridgeline.trainer.pretrained import holds_only_params, start_from
from ridgeline.trainer.program_cache import ProgramCache, program_facts
from ridgeline.trainer.reconcile import record_plan
from ridgeline.trainer.run_dir import RunDir, open_run_dir
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import ModelSpec, TrainState, abstract_state, init_program, model_spec
from ridgeline.trainer.step import make_evaluation_step, make_train_step, param_norm
from ridgeline.trainer.stop import Stop, StopAsked, in_thread
from ridgeline.trainer.watchdog import HANG_EXIT_CODE, Watchdog

T = TypeVar("T")


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
    """Train to the last step, or until asked to stop; return how it ended, None for a run that is complete already.

    Starts the run of `config.directory`, or continues it from its newest good checkpoint. `facts` (kind -> fields) of the start go into
    the event log, and the phases `before` it was open: (name, begin, end) by the monotonic clock, s, one after another; the rest is launch.
    `from_step`: continue from the checkpoint of this step instead, and set later ones aside (process 0's value counts).
    `stop`: the request to stop, already installed (None: Ctrl-C and SIGTERM from here on); `grace_s`: time a job has to end once asked.
    `analyze`: starts the analysis of each captured profile (observe.profiler).

    Raises UserError for bad input, NumericalFailure (with the steps saved) and CheckpointError for runs that cannot go on, and StopAsked
    when asked to stop before the first step: nothing needs saving then, but threads may still be at work, so leave by `os._exit`.
    """
    process = jax.process_index()
    progress = build_progress(config.trainer.steps, process=process)
    own_stop = stop is None
    stop = Stop().install() if stop is None else stop
    stop.say_through(progress.note)
    try:
        with stop.raising():
            from_step = Agreement("from-step").first(lambda: _check_step(config, from_step))
            tokenizer = check_data(config)
            parts = prepare(config)
            run = open_run_dir(config, command=command, log=progress.note)
            events = EventLog(event_file(run.path, process), process, run=run.id, restart=run.restart)
            record_start(events, before, facts or {})
        try:
            stop.share(coordination_client(), process, jax.process_count(), f"{run.id}.{run.restart}")
            watchdog = Watchdog(config.trainer.hang_timeout_s, run.path / f"stacks.{process}.txt", HANG_EXIT_CODE, events.emit)
            programs = build_programs(config, parts, progress.note)
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
                    programs.forget()
                raise
            finally:
                watchdog.close()
        except StopAsked as asked:
            stop.give_up()
            events.emit("stopped_early", signal=asked.signal.name)
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
    run: RunDir
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
    """The step to restart from; None: the newest good one."""
    recorder: threading.Thread | None = None
    """Writes down what was compiled."""
    loop: Loop | None = None

    @property
    def began(self) -> bool:
        """Whether a step was made."""
        return self.loop is not None and self.loop.began

    def train(self) -> Outcome | None:
        """Make or restore the state, compile, and run the loop; None for a run that is complete already."""
        config, steps = self.config, self.config.trainer.steps
        with self.stop.raising(), self.watchdog.phase("start-up"):
            reached = self.checkpointer.latest_step() if self.from_step is None else self.from_step
            if reached is not None and reached >= steps:
                self.progress.note(f"{self.run.path}: complete at step {reached}; raise trainer.steps (now {steps}) to train on")
                return None
            state, start_step = in_thread(self._first_state)
            if jax.process_index() == 0:
                shutil.copytree(config.data.train[0].path / "tokenizer", self.run.path / "tokenizer", dirs_exist_ok=True)
            programs = in_thread(self._compile)
            self._record_plan(programs[0])
            _say_what_runs(config, self.parts, self.progress)
        with self.watchdog.phase("waiting for the other processes to compile"):
            self.stop.begin_together()
        if self.from_step is not None:
            self.checkpointer.set_later_aside(self.from_step)
        rows = local_rows(config.data.batch_size, self.parts.partitioner)
        loader = build_loader(config.data, seed=data_seed(config), vocab_size=config.model.vocab_size, rows=rows, start_step=start_step)
        try:
            return self._loop(*programs, loader, state, start_step)
        except NumericalFailure as failure:
            failure.steps = self.checkpointer.steps()
            raise
        finally:
            loader.close()

    def _first_state(self) -> tuple[TrainState, int]:
        """Return the newest good state or the initial one, and its step."""
        config, parts, checkpointer = self.config, self.parts, self.checkpointer
        state, start_step = _restore(parts, checkpointer, self.tokenizer, self.events, self.progress, self.from_step)
        if state is None:
            with self.events.phase("init"):
                state = self.compiler.program(parts.make_state, "init")()
                source = self.run.path if checkpointer.has_checkpoints() else config.init_from
                if source is not None:
                    state = start_from(source, config.model, self.tokenizer.sha256, parts.spec, state)
                    self.progress.note(f"starting from the parameters of {source}")
                jax.block_until_ready(state)
        return state, start_step

    def _compile(self) -> tuple[Program, Program]:
        """Compile the step, and the norm of the parameters."""
        parts = self.parts
        step = self.compiler.program(parts.train_step, "train_step", parts.abstract, abstract_batch(self.config, parts.partitioner))
        return step, self.compiler.program(jax.jit(param_norm), "param_norm", parts.abstract.params)

    def _record_plan(self, step: Program) -> None:
        """Leave plan.json and compile.json in the run directory, while the run goes on; a run does not end over them."""
        if jax.process_index() != 0:
            return
        device = self.parts.mesh.devices.flat[0]
        record = functools.partial(record_plan, device_kind=device.device_kind, gpu=device.platform == "gpu", parts=step.parts)

        def work() -> None:
            refusal = record(self.run.path, self.config, dict(self.parts.mesh.shape), step.compiled)
            if refusal is not None:
                self.progress.note(refusal)

        self.recorder = threading.Thread(target=work, name="plan", daemon=True)
        self.recorder.start()

    def _loop(self, train_step: Program, norm: Program, loader: Loader, state: TrainState, start_step: int) -> Outcome:
        config, parts, run, events, progress = self.config, self.parts, self.run, self.events, self.progress
        timer = step_timer(config, parts)
        writer = build_writers(
            config.logging,
            run.path,
            name=config.name,
            run=run.id,
            config=config.model_dump(mode="json"),
            process=jax.process_index(),
            restart=run.restart,
            resume_step=start_step or None,
        )
        writer.flush()  # opens the files now: the first write would otherwise lengthen a step
        profiler = Profiler(
            config.profiler,
            run.path,
            process=jax.process_index(),
            num_processes=jax.process_count(),
            restart=run.restart,
            hlo_text=train_step.as_text,
            step_time_s=timer.usual_step_s,
            analyze=self.analyze,
        )
        profiler.install_signal()
        clocks = watch_clocks(jax.local_devices(), events)
        grace = Grace(self.grace_s, progress.note, self.checkpointer.last_write_s)
        grace.begin(last_write_s(events.path))  # process 0 tells of saves, and prints
        self.loop = loop = Loop(
            config=config,
            train_step=train_step,
            param_norm=norm,
            put=lambda rows: to_global(rows, parts.partitioner),
            loader=loader,
            evaluator=Evaluator(config, parts.partitioner, self.compiler.program(parts.evaluation_step, "evaluation_step")),
            checkpointer=self.checkpointer,
            save_metadata=lambda step: save_metadata(config, step, self.tokenizer),
            timer=timer,
            writer=writer,
            progress=progress,
            profiler=profiler,
            events=events,
            stop=self.stop,
            watchdog=self.watchdog,
            grace=grace,
            goodput=self._watch_goodput(start_step),
            startup=self._startup_metrics if jax.process_index() == 0 else None,
            compiler=self.compiler,
            clocks=clocks,
        )
        self.compiler.start()
        settle = self.checkpointer.wait
        try:
            outcome = loop.run(state, start_step)
        except Exception as error:
            if lost_peer(error, jax.process_count()) is not None:
                settle = self.checkpointer.leave
            raise
        finally:
            self.compiler.close()
            with events.phase("teardown"), self.watchdog.phase("teardown"):
                if self.recorder is not None:
                    self.recorder.join()
                clocks.close()
                profiler.close()
                writer.close()
                settle()
        self.checkpointer.close()
        return outcome

    def _startup_metrics(self) -> dict[str, float]:
        """Return where the time of this start went; a damaged record of earlier starts does not end a run."""
        try:
            return startup_metrics(read_events(self.events.path), self.run.restart)
        except UserError as error:
            self.progress.note(f"no account of the start in TensorBoard: {error}")
            return {}

    def _watch_goodput(self, start_step: int) -> LiveGoodput | None:
        """Keep the run ledger up in process 0; a damaged record of earlier starts does not end a run."""
        if jax.process_index() != 0:
            return None
        try:
            return watch(self.events, self.run.path, start_step, self.parts.mesh.size)
        except UserError as error:
            self.progress.note(f"no goodput in TensorBoard: {error}")
            return None


def _restore(
    parts: Prepared, checkpointer: Checkpointer, tokenizer: TokenizerInfo, events: EventLog, progress: Progress, step: int | None
) -> tuple[TrainState | None, int]:
    """Return the state of `step` (None: the newest good one) and its step, or (None, 0) for a new run, also one with only parameters."""
    if not checkpointer.has_checkpoints() or holds_only_params(checkpointer):
        return None, 0
    with events.phase("restore") as record:
        state, metadata = checkpointer.restore(parts.abstract, step)
        record["step"] = metadata["step"]
    config_guard.check_tokenizer(metadata.get("tokenizer"), tokenizer.sha256, str(checkpointer.directory))
    progress.note(f"resuming from the checkpoint of step {metadata['step']}")
    return state, int(metadata["step"])


def _check_step(config: Config, step: int | None) -> int | None:
    """Process 0: refuse a step to restart from that is not there, before anything is written; return it. Raises UserError."""
    if step is not None:
        checkpoint_dirs.check_complete(config.directory.absolute() / "checkpoints", step)
    return step


def save_metadata(config: Config, step: int, tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Return what a checkpoint says of itself beside its arrays."""
    return {
        "kind": "train",
        "data_position": step,
        "config_sha256": hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
        "tokenizer": tokenizer.sha256,
        "mesh": config.mesh.sizes,
    }


def check_data(config: Config) -> TokenizerInfo:
    """Open every manifest of the config before anything is built; return the tokenizer they share."""
    manifests = read_manifests(config.data)
    manifests += [(path, read_manifest(path)) for path in config.evaluation.sets.values()]
    return check_tokenizer(manifests, config.model.vocab_size)


def _say_what_runs(config: Config, parts: Prepared, progress: Progress) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(parts.abstract.params))
    tokens = config.data.batch_size * config.data.seq_len
    progress.note(
        f"{config.name}: {config.model.family}, {count:,} parameters, {tokens:,} tokens per step; {describe_mesh(parts.mesh)}; "
        f"run directory {config.directory}"
    )


def step_timer(config: Config, parts: Prepared) -> StepTimer:
    """Build the step timer: tokens and FLOPs of a step, and the peak of the device where the datasheet is known."""
    dtype = matmul_dtype(config.precision.compute, config.compute.matmul_precision)
    kind = jax.devices()[0].device_kind
    return StepTimer(
        tokens_per_step=config.data.batch_size * config.data.seq_len,
        num_devices=parts.mesh.size,
        flops_per_token=train_flops_per_token(config.model, config.data.seq_len).total,
        peak_flops=peak_flops(kind, dtype),
        float8_peak_flops=peak_flops(kind, "float8") if config.precision.matmul != "compute" else None,
    )


@dataclass(frozen=True)
class Prepared:
    """A run up to its first step: everything that is built before the loop."""

    mesh: jax.sharding.Mesh
    partitioner: Partitioner
    spec: ModelSpec
    abstract: TrainState
    train_step: Any
    """jit of the step, state donated; not compiled yet."""
    evaluation_step: Any
    make_state: Any
    """jit of () -> the state of step 0."""


def build_programs(config: Config, parts: Prepared, say: Callable[[str], None]) -> ProgramCache | None:
    """Open the store of compiled programs; None for a config without a compilation cache."""
    if config.runtime.compilation_cache is None:
        return None
    return ProgramCache(config.runtime.compilation_cache, program_facts(config, parts.mesh), list(parts.mesh.devices.flat), say)


def prepare(config: Config, devices: Sequence[jax.Device] | None = None, node: NodeOf = node_of) -> Prepared:
    """Build mesh, model description and step functions of a config. Nothing is allocated or compiled.

    `devices`: those of the run, or of a topology that is only compiled for; `node` tells which of them share a node.
    """
    devices = jax.devices() if devices is None else devices
    check_devices(config, len(devices))
    precision = config.compute.matmul_precision
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)
    mesh = build_mesh(config.mesh, devices, node)
    partitioner = Partitioner(mesh, Rules.from_config(config.mesh))
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    abstract = abstract_state(config, spec, optimizer, partitioner)
    step = make_train_step(spec, config, optimizer, schedule, partitioner)
    return Prepared(
        mesh=mesh,
        partitioner=partitioner,
        spec=spec,
        abstract=abstract,
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), None)),
        evaluation_step=jax.jit(make_evaluation_step(spec, config, partitioner)),
        make_state=init_program(config, spec, optimizer, abstract),
    )


def abstract_batch(config: Config, partitioner: Partitioner) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes [B, T] and shardings of a training batch."""
    shape = (config.data.batch_size, config.data.seq_len)
    dtypes = {"tokens": "int32", "targets": "int32", "positions": "int32", "segment_ids": "int32", "weights": "float32"}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.batch_sharding()) for name, dtype in dtypes.items()}


def data_seed(config: Config) -> int:
    """Return the seed of the data order."""
    return config.seed if config.data.seed is None else config.data.seed
