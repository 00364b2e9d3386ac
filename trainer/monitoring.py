"""What a run records while it trains: metrics, profiles, device clocks, goodput. Opened before the loop, closed after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from ridgeline.configs.schema import Config
from ridgeline.observe.clocks import ClockWatch, watch_clocks
from ridgeline.observe.goodput import LiveGoodput, watch
from ridgeline.observe.profiler import Profiler, StartAnalysis
from ridgeline.observe.progress import Progress
from ridgeline.observe.step_timer import StepTimer
from ridgeline.observe.writers import build_writers
from ridgeline.planner.flops import config_flops_per_token
from ridgeline.planner.hardware import matmul_dtype, peak_flops
from ridgeline.rundir.events import EventLog, read_last_events
from ridgeline.rundir.startup import startup_metrics
from ridgeline.trainer.checkpoint.reader import error_text
from ridgeline.trainer.hooks import Recorder
from ridgeline.trainer.start import StartedRun


@dataclass(frozen=True)
class Monitoring:
    """The open recorders of one start."""

    recorder: Recorder
    profiler: Profiler
    clocks: ClockWatch
    goodput: LiveGoodput | None
    """In process 0, where the earlier event log is readable."""
    startup: Callable[[], dict[str, float]] | None
    """Returns the durations of this start, by phase. Process 0 only."""

    @classmethod
    def begin(
        cls,
        config: Config,
        mesh: jax.sharding.Mesh,
        run: StartedRun,
        events: EventLog,
        progress: Progress,
        start_step: int,
        hlo_text: Callable[[], str],
        analyze: StartAnalysis | None,
    ) -> Monitoring:
        """Open the recorders. hlo_text: returns the compiled step, for captures; analyze: starts the analysis of a capture."""
        process, timer = jax.process_index(), step_timer(config, mesh.size)
        writer = build_writers(
            config.logging,
            run.path,
            name=config.name,
            run=run.id,
            config=config.model_dump(mode="json"),
            process=process,
            restart=run.restart,
            resume_step=start_step or None,
            guard=run.lease.check_log,
        )
        writer.flush()  # opens the files now: otherwise the first write would lengthen a step
        profiler = Profiler(
            config.profiler,
            run.path,
            process=process,
            num_processes=jax.process_count(),
            restart=run.restart,
            hlo_text=hlo_text,
            step_time_s=timer.usual_step_s,
            analyze=analyze,
        )
        profiler.install_signal()

        def startup() -> dict[str, float]:
            try:
                return startup_metrics(read_last_events(events.path), run.restart)
            except Exception as error:  # whatever a damaged log contains: it ends no run
                progress.note(f"no start-up metrics: {error_text(error)}")
                return {}

        clocks = watch_clocks(jax.local_devices(), events)
        recorder = Recorder(events, writer, progress, timer)
        goodput = _goodput(events, run, start_step, mesh.size, progress) if process == 0 else None
        return cls(recorder, profiler, clocks, goodput, startup if process == 0 else None)

    def close(self) -> None:
        """Close clocks, profiler and writers, in this order."""
        self.clocks.close()
        self.profiler.close()
        self.recorder.writer.close()


def step_timer(config: Config, num_devices: int) -> StepTimer:
    """Build the step timer: tokens and FLOPs per step, and the datasheet peak of the device where it is known."""
    dtype = matmul_dtype(config.precision.compute, config.compute.matmul_precision)
    kind = jax.devices()[0].device_kind
    return StepTimer(
        tokens_per_step=config.data.batch_size * config.data.seq_len,
        num_devices=num_devices,
        flops_per_token=config_flops_per_token(config).total,
        peak_flops=peak_flops(kind, dtype),
        float8_peak_flops=peak_flops(kind, "float8") if config.precision.matmul != "compute" else None,
    )


def _goodput(events: EventLog, run: StartedRun, start_step: int, num_devices: int, progress: Progress) -> LiveGoodput | None:
    """Start the live goodput ledger. Returns None where the log of earlier starts is damaged: that does not end a run."""
    try:
        return watch(events, run.path, start_step, num_devices)
    except Exception as error:  # whatever a damaged log contains
        progress.note(f"no goodput metrics: {error_text(error)}")
        return None
