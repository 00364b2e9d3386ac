"""XLA profile capture: by step from the config, or on demand by SIGUSR1 or a file `profile` in the run directory.

A capture is written for TensorBoard's profile plugin to `<run_dir>/tensorboard/plugins/profile/<capture>/<host>.xplane.pb`. <capture>
names the steps, so that all processes choose the same name without communication. Beside it are the optimized HLO of the profiled
program (`<module>.hlo.txt`: raw GPU traces contain only the names of ops), samples of the main thread (observe.frames) and `capture.json`.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ProfilerConfig
from ridgeline.observe import frames
from ridgeline.rundir.captures import FRAMES_SUFFIX, log_directory, profile_root
from ridgeline.rundir.files import discard, refuse_links, write_atomically

_log = logging.getLogger("ridgeline")
StartAnalysis = Callable[[Path, int], "subprocess.Popen[bytes]"]
POLL_S = 1.0
"""Shortest time between two checks for the request file, to spare shared file systems."""
LAST_WAIT_S = 60.0
"""Longest wait for the analysis of a profile at the end of a run."""


def step_annotation(step: int) -> Any:
    """Return the context manager that marks one training step in a profile; takes about 1 us without a profile."""
    import jax

    return jax.profiler.StepTraceAnnotation("train", step_num=step)


def annotation(name: str) -> Any:
    """Return the context manager that marks an activity of the loop, as `ridge.save` (explain.trace.host.ACTIVITIES)."""
    import jax

    return jax.profiler.TraceAnnotation(name)


class Profiler:
    """Begins and ends captures at step boundaries.

    The loop calls `before_step(step, drain)` before it dispatches a step and `close()` at the end. `drain` waits for all dispatched work,
    so that a capture contains whole steps. The time of a call belongs to no step.

    Every process captures its own devices at `start_step`. A requested capture is taken by one process: the one that received the signal,
    or process 0 for the file.

    Args:
      config: when to capture and how long.
      run_dir: the run directory.
      process, num_processes: index of this process and number of processes. Only process 0 writes the HLO.
      restart: restart number of the run; part of the capture's name when not 0.
      hlo_text: returns the optimized HLO of the step (`compiled.as_text()`), or None when there is none.
      step_time_s: returns the median step time without a profiler, or None when not known yet.
      clock: monotonic seconds.
      analyze: (directory of the capture, number of traces in it) -> process that analyzes it; called in process 0; None: captures are
        not analyzed.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        run_dir: Path,
        *,
        process: int = 0,
        num_processes: int = 1,
        restart: int = 0,
        hlo_text: Callable[[], str | None] = lambda: None,
        step_time_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        analyze: StartAnalysis | None = None,
    ) -> None:
        self._analyze, self._analyses = analyze, list[subprocess.Popen[bytes]]()
        self._config, self._run_dir = config, run_dir
        self._process, self._num_processes, self._restart = process, num_processes, restart
        self._hlo_text, self._step_time_s, self._clock = hlo_text, step_time_s, clock
        self._signaled = False
        self._previous_handler: Any = None
        self._next_poll_s = clock()
        self._usual_step_s: float | None = None
        self._first_step = self._stop_step = 0
        self._sampler = frames.Sampler()
        discard(self._scratch)  # of a start that was killed
        self.active = False
        """Whether a capture is running."""

    @property
    def request_file(self) -> Path:
        """Creating this file requests a capture; it is removed when the capture begins."""
        return self._run_dir / "profile"

    @property
    def _scratch(self) -> Path:
        """Directory where a capture is written before it is moved to its place; each process has its own."""
        return self._run_dir / f".profile.{self._process}"

    def install_signal(self) -> None:
        """Request a capture on SIGUSR1 (main thread only)."""
        self._previous_handler = signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signaled = True

    def before_step(self, step: int, drain: Callable[[], None]) -> Path | None:
        """Begin or end a capture that is due before `step` is dispatched; return the directory of a capture that ended."""
        if self._analyses:
            self._analyses = [analysis for analysis in self._analyses if analysis.poll() is None]  # reaps those that have ended
        finished = None
        if self.active:
            if step < self._stop_step:
                return None
            drain()
            finished = self._stop(step)
        if step == self._config.start_step or self._requested():
            drain()
            self._start(step)
        return finished

    def _requested(self) -> bool:
        """Whether a capture was requested since the last call."""
        if self._signaled:
            self._signaled = False
            return True
        now_s = self._clock()
        if self._process != 0 or now_s < self._next_poll_s:
            return False
        self._next_poll_s = now_s + POLL_S
        if not self.request_file.exists():
            return False
        self.request_file.unlink(missing_ok=True)
        return True

    def _start(self, step: int) -> None:
        import jax

        self._usual_step_s = self._step_time_s()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python call events flood the trace and slow the loop
        options.session_id = "capture"
        discard(self._scratch)  # a killed process may have left one
        try:
            jax.profiler.start_trace(self._scratch, profiler_options=options)
        except RuntimeError as error:  # another profiler has the only session
            _log.warning("no profile at step %d: %s", step, error)
            return
        self._first_step, self._stop_step = step, step + self._config.num_steps
        self._sampler = frames.Sampler()
        self._sampler.start()
        self.active = True

    def _stop(self, step: int) -> Path | None:
        import jax

        self.active = False
        sampled = self._sampler.stop()
        try:
            jax.profiler.stop_trace()
            directory = self._publish(step, sampled)
            if self._process == 0:
                self._describe(directory, step)
                if self._analyze is not None:
                    planned = self._first_step == self._config.start_step  # by all processes; a requested one is of this process only
                    self._analyses.append(self._analyze(directory, self._num_processes if planned else 1))
        except (RuntimeError, OSError, UserError) as error:
            _log.warning("the profile of steps %d to %d could not be written: %s", self._first_step, step - 1, error)
            return None
        finally:
            discard(self._scratch)
        return directory

    def _publish(self, stop_step: int, sampled: list[tuple[int, int, str]]) -> Path:
        """Move the capture to its place; with several processes the process index is appended to the host name."""
        restart = f"-restart{self._restart}" if self._restart else ""
        directory = profile_root(self._run_dir) / f"steps{self._first_step:07d}-{stop_step - 1:07d}{restart}"
        refuse_links(directory, below=log_directory(self._run_dir))
        directory.mkdir(parents=True, exist_ok=True)
        suffix = f"-p{self._process:05d}" if self._num_processes > 1 else ""
        for file in (self._scratch / "plugins" / "profile" / "capture").iterdir():
            kind = next((k for k in (".xplane.pb", ".trace.json.gz") if file.name.endswith(k)), "")
            if kind == ".xplane.pb":
                write_atomically(directory / (file.name.removesuffix(kind) + suffix + FRAMES_SUFFIX), json.dumps(sampled).encode())
            file.replace(directory / (file.name.removesuffix(kind) + suffix + kind))
        return directory

    def _describe(self, directory: Path, stop_step: int) -> None:
        """Write the HLO and capture.json beside the profile."""
        import jax

        hlo = self._hlo_text()
        module = hlo_module_name(hlo) if hlo else None
        if hlo and module:
            write_atomically(directory / f"{module}.hlo.txt", hlo.encode())
        record = {
            "first_step": self._first_step,
            "num_steps": stop_step - self._first_step,
            "unprofiled_step_time_s": self._usual_step_s,
            "program": module,
            "device_kind": jax.local_devices()[0].device_kind,
            "num_devices": jax.device_count(),
            "num_processes": self._num_processes,
            "jax": jax.__version__,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        write_atomically(directory / "capture.json", (json.dumps(record, indent=1) + "\n").encode())

    def close(self, step: int | None = None) -> Path | None:
        """End a running capture (steps before `step` are done) and restore the handler of SIGUSR1."""
        finished = self._stop(self._stop_step if step is None else step) if self.active else None
        if self._previous_handler is not None:
            signal.signal(signal.SIGUSR1, self._previous_handler)
            self._previous_handler = None
        self._finish_analyses()
        return finished

    def _finish_analyses(self) -> None:
        """Wait for running analyses: they are killed when the job ends."""
        for analysis in self._analyses:
            try:
                analysis.wait(LAST_WAIT_S)
            except subprocess.TimeoutExpired:
                analysis.kill()
                analysis.wait()
                _log.warning("a profile was not analyzed in time: run `ridge analyze %s`", self._run_dir)
        self._analyses.clear()


def hlo_module_name(hlo: str) -> str:
    """Return the module name in the first line of an HLO text (`HloModule jit_step, is_scheduled=true, ...`)."""
    match = re.match(r"HloModule ([\w.\-]+)", hlo)
    assert match, f"not an HLO text: {hlo[:60]!r}"
    return match.group(1)
