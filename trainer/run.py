"""A training run, from the config to the last checkpoint.

config -> data manifests -> mesh, model and step functions (prepare.py) -> run directory -> state (new or restored) -> compiled step
-> loader -> loop with its hooks
"""

from __future__ import annotations

import functools
import gc
import os
import shlex
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ridgeline.configs.context import context_method
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.loader import build_loader
from ridgeline.loaders.manifest import TokenizerInfo, check_same_tokenizer
from ridgeline.observe.compilation import CompilerWatch, Program, compile_in_parts
from ridgeline.observe.profiler import StartAnalysis
from ridgeline.observe.progress import Progress, build_progress
from ridgeline.observe.writers import check_writers
from ridgeline.planner.experts import exchange_method
from ridgeline.rundir.directory import REFERENCE_FILE, TRAIN_LOG
from ridgeline.rundir.events import EventLog, event_file
from ridgeline.rundir.lease import JobEnded
from ridgeline.rundir.skipped_batches import SkippedBatches, read_skipped_batches
from ridgeline.rundir.startup import record_start
from ridgeline.sharding.mesh import describe_mesh
from ridgeline.trainer import reference
from ridgeline.trainer.agreement import Agreement, coordination_client
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import identity
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.checkpoint.copies import Copies
from ridgeline.trainer.checkpoint.finite import all_finite
from ridgeline.trainer.checkpoint.integrity import sha256_file
from ridgeline.trainer.checkpoint.local_tier import LocalTier
from ridgeline.trainer.corruption import CorruptionCheck
from ridgeline.trainer.evaluation import Evaluator
from ridgeline.trainer.failures import CheckpointError, CorruptionFound, Link, NumericalFailure, WentBack, lost_peer
from ridgeline.trainer.hang_report import read_position, report_text
from ridgeline.trainer.hooks import CompilationStep, Evaluation, Heartbeat, MetricLog, NonFiniteSteps, Profiling, Saving
from ridgeline.trainer.loop import Hook, Loader, Loop, Outcome
from ridgeline.trainer.loss_spikes import LossSpikes, watch_loss_spikes
from ridgeline.trainer.monitoring import Monitoring
from ridgeline.trainer.native_waits import NativeWaits
from ridgeline.trainer.plan_record import record_plan
from ridgeline.trainer.prepare import Prepared, check_data, data_seed, prepare, start_warnings
from ridgeline.trainer.pretrained import changed_positions, holds_only_params, merged_tokenizer, open_source, start_from
from ridgeline.trainer.program_cache import open_program_cache
from ridgeline.trainer.start import StartedRun, check_restored, check_start, complete_step, keep_tokenizer, start_run
from ridgeline.trainer.state import TrainState
from ridgeline.trainer.step import Batch, abstract_batch, local_rows, param_norm, to_global, with_loss_limit
from ridgeline.trainer.stop import GracePeriod, Stop, StopRequested, in_thread, last_write_s
from ridgeline.trainer.stragglers import Probe, Stragglers
from ridgeline.trainer.text_evaluation import Sampler, TaskEvaluation, TextModel
from ridgeline.trainer.watchdog import HANG_EXIT_CODE, WRITE_S, Watchdog, within


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
    link: Link | None = None,
    job_ended: JobEnded | None = None,
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
      link: watches the other processes; the loss of one is recorded in the event log.
      job_ended: whether the Slurm job of another start has ended (rundir.lease.acquire).

    Raises:
      UserError: bad input.
      NumericalFailure: the run cannot continue; `.steps` are the saved steps.
      CorruptionFound: silent data corruption; the message names the device.
      CheckpointError: checkpoints cannot be saved or loaded.
      StopRequested: a stop was requested before the first step. Nothing needs saving, but threads may be working: exit by `os._exit`.
    """
    process = jax.process_index()
    end = os._exit if link is None else link.exit
    progress = build_progress(config.trainer.steps, process=process)
    own_stop = stop is None
    stop = Stop().install() if stop is None else stop
    stop.log = progress.note
    run: StartedRun | None = None
    outcome: Outcome | None = None
    back = False
    try:
        with stop.raising():
            from_step = Agreement("from-step").first(lambda: _check_step(config, from_step))
            reached = Agreement("complete").first(lambda: complete_step(config, from_step))
            if reached is not None:  # before anything is written: a command that trains nothing changes nothing
                steps = config.trainer.steps
                progress.note(f"{config.directory.absolute()}: complete at step {reached}; raise trainer.steps (now {steps}) to train on")
                return None
            tokenizer = check_data(config)
            reference.check_pairs(config)
            for line in start_warnings(config) if process == 0 else ():
                progress.note(line)
            Agreement("writers").first(lambda: check_writers(config.logging))
            parts = prepare(config)
            opened: list[TextModel] = []
            Agreement("texts").each(lambda: opened.append(TextModel(config, parts.mesh)))
            [texts] = opened
            Agreement("start").first(lambda: check_start(config, parts, tokenizer, from_step))
        while outcome is None:
            with stop.raising():
                run = start_run(config, command=command, log=progress.note, job_ended=job_ended, end=end)
                progress.record(f"start {run.restart + 1}, process {os.getpid()} on {socket.gethostname()}: {shlex.join(command)}")
                progress.keep(run.path / TRAIN_LOG)
                events = EventLog(event_file(run.path, process), process, run=run.id, restart=run.restart, guard=run.lease.check_log)
                if not back:
                    record_start(events, before, facts or {})
                if link is not None:
                    link.record = functools.partial(_record_lost_peer, events)
            try:
                outcome = _Session(
                    config, parts, texts, run, tokenizer, events, progress, stop, end, grace_s, analyze, from_step, link
                ).run_to_end()
            except WentBack as reason:
                progress.note(str(reason))
                run.lease.release()
                from_step, back = None, True
            if outcome is None:
                gc.collect()  # the state of the start that went back, which its frames held
    except BaseException as error:
        expected = isinstance(error, UserError | NumericalFailure | CorruptionFound | CheckpointError | StopRequested)
        progress.record(f"stopped: {error}" if expected else "".join(traceback.format_exception(error)).rstrip())
        raise
    finally:
        if run is not None:
            run.lease.release()
        progress.close()
        if own_stop:
            stop.uninstall()
    return outcome


def _record_lost_peer(events: EventLog, end: Any) -> None:
    events.emit("lost_peer", reason=end.text)


@dataclass
class _Session:
    """One start of a run, from its directory to its end."""

    config: Config
    parts: Prepared
    texts: TextModel
    run: StartedRun
    tokenizer: TokenizerInfo
    events: EventLog
    progress: Progress
    stop: Stop
    end: Callable[[int], Any]
    """Ends the process with an exit code."""
    grace_s: float | None
    analyze: StartAnalysis | None
    from_step: int | None
    """The step to resume from; None: the newest good one."""
    link: Link | None
    watchdog: Watchdog = field(init=False)
    compiler: CompilerWatch = field(init=False)
    checkpointer: Checkpointer = field(init=False)
    started_from: Path | None = None
    """The directory of the model that a new run starts from."""
    plan_thread: threading.Thread | None = None
    """Writes plan.json and compile.json."""
    symbols_thread: threading.Thread | None = None
    """Reads what tells the collective of a hang (trainer/native_waits.py)."""
    loop: Loop | None = None
    step: Program | None = None
    """The compiled train step."""
    restored: Mapping[str, Any] | None = None
    """Metadata of the checkpoint that this start continues from; None for a new state."""
    skipped: SkippedBatches = field(init=False)
    """Batches that the run leaves out."""
    pairs: Mapping[Path, PairSource] = field(default_factory=dict)
    """Path -> source of the corpora and evaluation sets with preference pairs."""

    @functools.cached_property
    def corpora(self) -> dict[str, str]:
        """Path -> identity of the training corpora."""
        return identity.corpora_of(self.config)

    @functools.cached_property
    def bound(self) -> dict[str, Any]:
        """What a checkpoint is bound to, as its metadata stores it. Read once: a file system in trouble must not end the run at a save."""
        bound = identity.describe(self.config, self.run.id, self.tokenizer.sha256, self.run.tokenizer, self.corpora)
        return bound | ({reference.METADATA: sha256_file(self.run.path / REFERENCE_FILE)} if self.pairs else {})

    @property
    def began(self) -> bool:
        """Whether the first step is done."""
        return self.loop is not None and self.loop.began

    def run_to_end(self) -> Outcome:
        """Train, and close the event log whatever happens."""
        config, run, events, progress, process = self.config, self.run, self.events, self.progress, jax.process_index()
        try:
            with events.phase("setup"):
                self.stop.share(coordination_client(), process, jax.process_count(), f"{run.id}.{run.restart}")
                self.watchdog = self._watch()
                programs = open_program_cache(config, self.parts.mesh, progress.note)
                self.compiler = CompilerWatch(events, progress.note, compile_in_parts if programs is None else programs.compile)
                check = self.compiler.program(jax.jit(all_finite), "all_finite")
                self.checkpointer = Checkpointer(
                    run.checkpoints,
                    config.checkpoint,
                    events=events,
                    log=progress.note,
                    check=check,
                    guard=run.lease.check,
                    copies=self._open_copies(),
                    local=self._open_local_tier(),
                )
            try:
                outcome = self._train()
            except jax.errors.JaxRuntimeError:
                if programs is not None and not self.began:
                    programs.remove_loaded()
                raise
            finally:
                self.watchdog.close()
            progress.record(outcome.describe())
            return outcome
        except StopRequested as request:
            self.stop.abandon()
            events.emit("stopped_early", signal=request.signal.name)
            raise
        finally:
            if self.symbols_thread is not None:
                self.symbols_thread.join(WRITE_S)
            if self.plan_thread is not None:
                self.plan_thread.join()  # also of a start that was refused: it writes into the run
            self.stop.unshare()
            events.close()

    def _watch(self) -> Watchdog:
        """Return the watchdog, which reports what all processes are doing before it ends this one."""
        process, link, stacks = jax.process_index(), self.link, self.run.path / f"stacks.{jax.process_index()}.txt"

        def survey() -> None:
            if link is None:
                self._report_hang({process: watchdog.position().model_dump()})
            else:
                link.survey(process)

        config, emit = self.config.trainer, self.events.emit
        watchdog = Watchdog(config.hang_timeout_s, stacks, HANG_EXIT_CODE, emit, deadlines=config.deadlines, survey=survey, end=self.end)
        if link is not None:
            if jax.default_backend() == "cpu":
                waits = NativeWaits()
                watchdog.collective = waits.collective
                self.symbols_thread = threading.Thread(target=waits.prepare, name="symbols", daemon=True)
                self.symbols_thread.start()
            link.position, link.stacks, link.report = watchdog.asked, watchdog.asked_stacks, self._report_hang
        return watchdog

    def _report_hang(self, positions: Mapping[int, object]) -> None:
        """Write what the processes were doing when one of them made no progress; the first report of a start stays."""
        found = {process: read_position(position) for process, position in positions.items()}
        here = f"process {jax.process_index()} on {socket.gethostname()}"
        names = {jax.process_index(): here, **({} if self.link is None else self.link.names)}
        text = report_text(found, names, None if self.step is None else self.step.as_text(), dict(self.parts.mesh.shape))
        path, said = self.run.path / f"hang.{self.run.restart}.txt", list[str]()

        def write() -> None:
            try:
                with path.open("x") as file:
                    file.write(text)
                said.append(f"{text.splitlines()[0]}; {path}")
            except FileExistsError:
                said.append("")

        within(WRITE_S, write)
        line = said[0] if said else f"{path} cannot be written; the report:\n{text.rstrip()}"
        if line:
            sys.stderr.write(f"ridge: hang: {line}\n")

    def _open_copies(self) -> Copies | None:
        """Process 0: begin to copy checkpoints to checkpoint.copy_to. Raises UserError in every process when that URL cannot be used."""
        opened: list[Copies] = []

        def work() -> None:
            config, run = self.config.checkpoint, self.run
            if config.copy_to is not None:
                log, emit = self.progress.note, self.events.emit
                opened.append(Copies(run.path, run.id, config, log=log, emit=emit, guard=run.lease.check))

        Agreement("copies").first(work)
        return opened[0] if opened else None

    def _open_local_tier(self) -> LocalTier | None:
        config, run = self.config.checkpoint.local, self.run
        if config.directory is None:
            return None
        log, emit, first = self.progress.note, self.events.emit, run.restart == 0
        return LocalTier(config, run.id, run.checkpoints, self.parts.abstract, log=log, emit=emit, first_start=first)

    def _train(self) -> Outcome:
        """Create or restore the state, compile, and run the loop."""
        config, deadlines = self.config, self.config.trainer.deadlines
        with self.stop.raising(), self.watchdog.phase("start-up", deadlines.startup_s):
            state, start_step = in_thread(self._first_state)
            if config.preference.loss is not None:
                in_thread(lambda: self._reference(state))
            if jax.process_index() == 0:
                with self.events.phase("setup"):
                    self._keep_tokenizer(start_step)
            with self.progress.phase("compiling the train step"), self.watchdog.phase("compile", deadlines.compile_s):
                train_step, norm = in_thread(self._compile)
            self.step = train_step
            with self.events.phase("setup"):
                self._record_plan(train_step)
                self._log_model()
        with self.events.phase("setup"):
            waiting = "waiting for the other processes to compile"
            with self.progress.phase(waiting, live_only=True), self.watchdog.phase(waiting, deadlines.compile_s):
                self.stop.begin_together()
            _ = self.bound
            if self.from_step is not None:
                self.checkpointer.set_later_aside(self.from_step)
            else:
                self.checkpointer.begin(start_step)
            skipped = Agreement("skipped").first(lambda: read_skipped_batches(self.run.path).model_dump())
            self.skipped = SkippedBatches.model_validate(skipped)
            loader = build_loader(
                config.data,
                seed=data_seed(config),
                vocab_size=config.model.vocab_size,
                rows=local_rows(config.data.batch_size, self.parts.partitioner),
                start_step=start_step,
                pairs=self.pairs or None,
                distillation=config.distillation,
                mtp_layers=config.model.mtp_layers,
                skipped=self.skipped,
            )
            self.watchdog.awaited = loader.awaited_worker
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
        with self.events.phase("setup"):
            resumes = checkpointer.has_local() or (checkpointer.has_checkpoints() and not holds_only_params(checkpointer))
        if resumes:
            return self._restore()
        with self.progress.phase("creating the parameters", live_only=True), self.events.phase("init"):
            state = self.compiler.program(parts.make_state, "init")()
            source = self.run.path if checkpointer.has_checkpoints() else config.init_from
            self.started_from = source
            if source is not None:
                carried = config.init_optimizer and source == config.init_from
                state = start_from(source, config.model, self.tokenizer.sha256, parts.spec, state, config.lora, with_optimizer=carried)
                self.progress.note(f"starting from the parameters{' and the optimizer state' if carried else ''} of {source}")
                for line in changed_positions(source, open_source(source).config.model, config.model):
                    self.progress.note(line)
            jax.block_until_ready(state)
        return state, 0

    def _keep_tokenizer(self, start_step: int) -> None:
        """Process 0: give the run directory its tokenizer, at the start from another model with the files of that model."""
        corpus, source = self.config.data.train[0].path / "tokenizer", self.started_from
        if start_step > 0 or source is None:
            keep_tokenizer(corpus, self.run, self.restored, self.progress.note)
            return
        if source == self.run.path and open_source(source).tokenizer_rule() == self.tokenizer.add_bos:
            return  # an import that is trained itself: its checkpoint is bound to its tokenizer as it is
        merged, notes = merged_tokenizer(self.run.path, corpus, self.tokenizer.add_bos, source)
        for line in notes:
            self.progress.note(line)
        keep_tokenizer(merged, self.run, self.restored, self.progress.note)
        shutil.rmtree(merged)

    def _restore(self) -> tuple[TrainState, int]:
        """Return the state of `from_step` (None: the newest good one), and its step."""
        with self.progress.phase("restoring the checkpoint", live_only=True), self.events.phase("restore") as record:
            state, metadata = self.checkpointer.restore(self.parts.abstract, self.from_step)
            record["step"], record["tier"] = metadata["step"], self.checkpointer.restored_from
            check_same_tokenizer(metadata.get("tokenizer"), self.tokenizer.sha256, str(self.checkpointer.directory))
            check_restored(metadata, self.config, self.corpora, self.progress.note)
        self.restored = metadata
        where = "" if self.checkpointer.restored_from == "shared" else f" on the nodes ({self.checkpointer.restored_from})"
        self.progress.note(f"resuming from the checkpoint of step {metadata['step']}{where}")
        return state, int(metadata["step"])

    def _reference(self, state: TrainState) -> None:
        """Read the log-probabilities of the preference pairs by the model before training, or compute them at the first start."""
        config, run, agreement = self.config, self.run.path, Agreement("reference")
        self.pairs = pairs = reference.open_pairs(config, self.progress.note if jax.process_index() == 0 else lambda line: None)
        if self.restored is not None:
            sha256 = self.restored.get(reference.METADATA)
            agreement.each(lambda: reference.read(run, config, pairs, sha256=sha256))
            return
        weights = reference.digest_params(state.params)
        if agreement.first(lambda: _fits(run, config, pairs, weights)):  # of an earlier start that saved no checkpoint
            agreement.each(lambda: reference.read(run, config, pairs, weights=weights))
            return
        count = sum(source.num_pairs for source in pairs.values())
        with self.progress.phase(f"computing the reference of {count:,} preference pairs"), self.events.phase("evaluation", step=0):
            log_probs = self.compiler.program(self.parts.log_prob_step, "log_prob_step")
            reference.compute(config, self.parts.partitioner, log_probs, state.params, pairs, self._restart_limit)
            agreement.first(lambda: reference.write(run, config, weights, pairs))

    def _restart_limit(self) -> None:
        """Restart the watchdog's limit of the start-up: it made progress."""
        with self.watchdog.phase("start-up", self.config.trainer.deadlines.startup_s):
            pass

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
            f"attention: {self.parts.attention}{self._context_note()}; run directory {config.directory}"
        )

    def _context_note(self) -> str:
        method = context_method(self.config, self.parts.mesh.shape)
        exchange = exchange_method(self.config.model.moe, self.config.compute.experts, self.parts.mesh.shape)
        return (f", {method} over context" if method else "") + (f"; experts: {exchange} over expert" if exchange else "")

    def _corruption_check(self, train_step: Program, start_step: int, monitoring: Monitoring) -> CorruptionCheck | None:
        if self.parts.digests is None:
            return None
        every, limit = self.config.corruption_check.every, self.config.trainer.max_bad_steps
        recorder, digests = monitoring.recorder, self.parts.digests
        return CorruptionCheck(every, digests, train_step, self.checkpointer, recorder, self.run.path, start_step, limit)

    def _stragglers(self, monitoring: Monitoring) -> list[Hook]:
        """Return the hook that names slow ranks, where there is more than one rank to compare."""
        gpu, local = self.parts.mesh.devices.flat[0].platform == "gpu", jax.local_devices()
        threshold, ranks = self.config.stragglers.threshold, len(jax.devices()) if gpu else jax.process_count()
        if threshold is None or ranks == 1:
            return []
        probe = Probe(local) if gpu else None
        name = f"{self.run.id}.{self.run.restart}"
        return [Stragglers(self.config.stragglers, monitoring.recorder, monitoring.clocks, probe, name, self.run.path)]

    def _hooks(self, monitoring: Monitoring, spikes: LossSpikes, corruption: CorruptionCheck | None) -> list[Hook]:
        """Return everything that reacts to steps, in the order in which the loop calls it."""
        config, recorder = self.config, monitoring.recorder
        step, pair_step = (self.compiler.program(self.parts.evaluation_step, name) for name in ("evaluation_step", "pair_evaluation_step"))
        evaluator = Evaluator(config, self.parts.partitioner, step, pairs=self.pairs, pair_step=pair_step)
        grace = GracePeriod(self.grace_s, self.progress.note, self.checkpointer.last_write_s)
        if (write_s := last_write_s(self.events.path)) is not None:  # in process 0, which records saves
            grace.saved(write_s)
        nonfinite = NonFiniteSteps(config.trainer.max_bad_steps, recorder, self.skipped)
        check = None if corruption is None else corruption.check
        return [
            Profiling(monitoring.profiler, recorder),
            CompilationStep(self.compiler),
            Heartbeat(self.watchdog, self.progress),
            *([] if corruption is None else [corruption]),  # before what ends the run on non-finite steps
            nonfinite,
            *self._stragglers(monitoring),
            MetricLog(config, recorder, monitoring.goodput, monitoring.startup, monitoring.clocks, lambda: spikes.count),
            spikes,  # after the record of the step, which may be the last before the run goes back
            Evaluation(config, evaluator, recorder, self.stop, self.watchdog),
            TaskEvaluation(config, self.texts, recorder, self.watchdog, self.compiler),
            Sampler(config, self.texts, recorder, self.watchdog, self.compiler),
            Saving(config, self.checkpointer, lambda step: self._metadata(step, spikes), nonfinite, recorder, self.watchdog, grace, check),
        ]

    def _metadata(self, step: int, spikes: LossSpikes) -> dict[str, Any]:
        return {
            "kind": "train",
            "data_position": self.skipped.batch_of(step),
            "mesh": self.config.mesh.sizes,
            **spikes.metadata(),
            **self.bound,
        }

    def _run_loop(self, train_step: Program, norm: Program, loader: Loader, state: TrainState, start_step: int) -> Outcome:
        with self.events.phase("setup"):
            monitoring = Monitoring.begin(
                self.config, self.parts.mesh, self.run, self.events, self.progress, start_step, train_step.as_text, self.analyze
            )
            corruption = self._corruption_check(train_step, start_step, monitoring)
            recorder, log = monitoring.recorder, self.progress.note
            spikes = watch_loss_spikes(
                self.config.loss_spikes, recorder, self.run, self.checkpointer, self.skipped, start_step, self.restored, log
            )
            spikes.check = None if corruption is None else corruption.check
            hooks = self._hooks(monitoring, spikes, corruption)

            def put(rows: Mapping[str, np.ndarray]) -> Batch:
                batch, limited = to_global(rows, self.parts.partitioner), self.config.loss_spikes.policy == "skip"
                return with_loss_limit(batch, spikes.next_limit(), self.parts.partitioner) if limited else batch

            self.loop = Loop(
                config=self.config.trainer,
                train_step=train_step if corruption is None else corruption.step,
                param_norm=norm,
                put=put,
                loader=loader,
                stop=self.stop,
                events=self.events,
                timer=monitoring.recorder.timer,
                hooks=hooks,
            )
            self.compiler.start()
            self.watchdog.step(None)
            self.progress.start(start_step)
        settle = self.checkpointer.wait
        try:
            outcome = self.loop.run(state, start_step)
        except WentBack:
            self.checkpointer.close(finish_copies=False)
            raise
        except Exception as error:
            if lost_peer(error, jax.process_count()) is not None:
                settle = self.checkpointer.abandon
            raise
        finally:
            self.compiler.close()
            with self.events.phase("teardown"), self.watchdog.phase("teardown", self.config.trainer.deadlines.save_s):
                if self.plan_thread is not None:
                    self.plan_thread.join()
                monitoring.close()
                settle()
        self.checkpointer.close(finish_copies=outcome.stopped_by is None, finished=outcome.finished)
        return outcome


def _check_step(config: Config, step: int | None) -> int | None:
    """Return `step` if its checkpoint is complete (None: as it is). Process 0, before anything is written. Raises UserError."""
    if step is not None:
        checkpoint_dirs.check_complete(config.directory.absolute() / "checkpoints", step)
    return step


def _fits(run: Path, config: Config, pairs: Mapping[Path, PairSource], weights: str) -> bool:
    """Return whether the run directory has the reference of these pairs by these starting parameters."""
    try:
        reference.read(run, config, pairs, weights=weights)
    except UserError:
        return False
    return True
