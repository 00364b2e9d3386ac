"""Runs of the trainer with one fault planted in its mechanism.

    python faults.py JOBS.json CACHE                     several runs in this process, one after another
    python faults.py FAULT.json CACHE -m ridgeline train .. one command, with a fault: of one rank, or of a run that will not end well
    python faults.py --analyze RUN RUN ...               analyze the captures of runs

Nothing of the project is replaced by a stand-in: its functions are wrapped, so that a read takes longer, a disk is slow, a host waits.
JOBS.json is a list of {"config": {...}, "fault": name or null, "arguments": {...}, "analyze": bool}, or null: say `ready` on stdout and
wait for a line on stdin. FAULT.json is one of them without the config. A capture is analyzed by its run where `analyze` says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

SO_MAX_PACING_RATE = 47
"""Of Linux, for TCP on every interface, the loopback included; Python has no name for it."""


def _before(owner: Any, name: str, action: Callable[..., None]) -> Any:
    """Call `action` with the same arguments before each call of a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    return patch.object(owner, name, wrapped)


def slow_rows(seconds: float) -> Any:
    """Every row takes this long to read, as from a file system under load."""
    from ridgeline.loaders.loader import StepRows

    return _before(StepRows, "__getitem__", lambda self, step: None if isinstance(step, slice) else time.sleep(seconds * len(self._rows)))


def stuck_read(step: int) -> Any:
    """The read of the batch of a step never comes back."""
    from ridgeline.loaders.loader import StepRows

    return _before(StepRows, "__getitem__", lambda self, at: time.sleep(3600) if not isinstance(at, slice) and int(at) == step else None)


def slow_disk(bytes_per_s: float) -> Any:
    """A file system that gives back what was written at this rate, when a save checks it."""
    from ridgeline.trainer.checkpoint import integrity

    original = integrity.digest_files

    def slow(root: Path, names: Any, **kwargs: Any) -> Any:
        names = list(names)
        time.sleep(sum((root / name).stat().st_size for name in names) / bytes_per_s)
        return original(root, names, **kwargs)

    return patch.object(integrity, "digest_files", slow)


def slow_compiler(seconds: float) -> Any:
    """The step takes this much longer to compile: a deeper model's, at no cost."""
    from ridgeline.trainer import run

    return _before(run, "compile_in_parts", lambda function, name, args, parts: time.sleep(seconds if name == "train_step" else 0.0))


def drifting_shape(start: int, depth: int) -> Any:
    """A statistic under jit is taken over one token more at each step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ridgeline.trainer.loop import Loop

    @jax.jit
    def token_statistics(x: Any) -> Any:
        for _ in range(depth):
            x = jnp.tanh(jnp.cumsum(jnp.sort(x)) / x.size)
        return x.mean()

    lengths = iter(range(start, sys.maxsize))
    return _before(Loop, "_next_batch", lambda self, batches: token_statistics(jax.device_put(np.ones(next(lengths), np.float32))))


def reading_host(share: float) -> Any:
    """The host reads the loss of each step as soon as it is dispatched, and then works for this share of the time it waited."""
    import jax

    from ridgeline.trainer.loop import Loop

    original = Loop.run

    def run(self: Any, state: Any, start_step: int) -> Any:
        step = self.train_step

        def read(state: Any, batch: Any) -> Any:
            state, metrics = step(state, batch)
            began_s = time.monotonic()
            jax.device_get(metrics["loss"])
            time.sleep(share * (time.monotonic() - began_s))
            return state, metrics

        self.train_step = read
        return original(self, state, start_step)

    return patch.object(Loop, "run", run)


def spiking(step: int, factor: float) -> Any:
    """The parameters are multiplied before a step, as by a flipped bit of an exponent."""
    import dataclasses

    import jax

    from ridgeline.trainer.loop import Loop

    original = Loop.run

    def run(self: Any, state: Any, start_step: int) -> Any:
        train_step, multiply = self.train_step, jax.jit(lambda params: jax.tree.map(lambda p: p * factor, params))

        def spike(state: Any, batch: Any) -> Any:
            if self._pending is not None and self._pending.step == step:
                with jax.transfer_guard("allow"):
                    state = dataclasses.replace(state, params=multiply(state.params))
            return train_step(state, batch)

        self.train_step = spike
        return original(self, state, start_step)

    return patch.object(Loop, "run", run)


def late(seconds: float, start: int) -> Any:
    """The host comes this much later to each step from one on: it has other things to do."""
    from ridgeline.trainer.loop import Loop

    return _before(Loop, "_before_step", lambda self, step: time.sleep(seconds if step >= start else 0.0))


def absent(step: int, how: str) -> Any:
    """The process is alive, and never comes to a step: it waits, or computes, or holds the lock of Python (its threads do not run)."""
    import ctypes

    from ridgeline.trainer.loop import Loop

    def away(self: Any, at: int) -> None:
        while at >= step:
            if how == "holds the lock":
                ctypes.PyDLL(None).sleep(3600)
            time.sleep(3600 if how == "waits" else 0.0)

    return _before(Loop, "_before_step", away)


def slow_link(bytes_per_s: float) -> Any:
    """The kernel sends this process's share of every collective at this rate: a link that is slower than its neighbors."""
    from ridgeline.trainer.loop import Loop

    done: set[int] = set()

    def pace(self: Any, step: int) -> None:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                if not stat.S_ISSOCK((status := os.stat(int(name))).st_mode) or status.st_ino in done:
                    continue
                done.add(status.st_ino)
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(bytes_per_s))

    return _before(Loop, "_before_step", pace)


def paced(seconds: float, start_s: float = 0.0) -> Any:
    """A step takes at least this long, whatever it computes, and the start takes `start_s` longer: a larger model's, at no cost."""
    import jax

    from ridgeline.trainer import run
    from ridgeline.trainer.loop import Loop

    last_s = 0.0

    def wait(self: Any) -> None:
        nonlocal last_s
        if self._pending is not None:
            jax.block_until_ready(self._pending.metrics)
            time.sleep(max(0.0, last_s + seconds - time.monotonic()))
            last_s = time.monotonic()

    pace = _before(Loop, "_read_pending", wait)
    start = _before(run, "check_data", lambda config: time.sleep(start_s))
    stack = contextlib.ExitStack()
    stack.enter_context(pace)
    stack.enter_context(start)
    return stack


def killed(step: int, pace_s: float) -> Any:
    """The process is killed when it has made this many steps, at its first start."""
    from ridgeline.trainer.loop import Loop

    def kill(self: Any) -> None:
        if self._pending is not None:
            time.sleep(pace_s)
            if self._pending.step == step and self.events.restart == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return _before(Loop, "_read_pending", kill)


FAULTS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        slow_rows,
        stuck_read,
        slow_disk,
        slow_compiler,
        drifting_shape,
        reading_host,
        spiking,
        late,
        absent,
        slow_link,
        paced,
        killed,
    )
}


def planted(job: dict[str, Any]) -> Any:
    """Plant the fault of a job, and leave its capture to whoever analyzes later where it does not do so itself."""
    stack, name = contextlib.ExitStack(), job.get("fault")
    if not job.get("analyze", True):
        stack.enter_context(_no_analysis())
    if name:
        stack.enter_context(FAULTS[name](**job.get("arguments", {})))
    return stack


def _no_analysis() -> Any:
    from ridgeline.explain.trace import background

    return patch.object(background, "start", lambda directory, num_traces: subprocess.Popen(["true"]))


def analyze_runs(runs: Sequence[Path]) -> None:
    """Analyze what no run has: each by itself would start a process, and wait for it while nothing else may run."""
    from ridgeline.explain.trace.analysis import analyze
    from ridgeline.explain.trace.capture import find_capture
    from ridgeline.explain.trace.load import load_profile
    from ridgeline.explain.trace.publish import publish

    os.nice(5)
    for run in runs:
        if (run / "tensorboard" / "plugins" / "profile").is_dir() and not any(run.glob("tensorboard/plugins/profile/*/analysis.json")):
            capture = find_capture(run)
            publish(capture, analyze(load_profile(capture)))


def use_cache(cache: str) -> None:
    """Compile each program once for all runs."""
    import jax

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def main() -> None:
    """Run what the arguments say. Loading the libraries is no part of any run."""
    if sys.argv[1] == "--analyze":
        analyze_runs([Path(run) for run in sys.argv[2:]])
        return
    plan, cache = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    use_cache(cache)

    from ridgeline.cli.commands.train import report_end
    from ridgeline.configs.schema import Config
    from ridgeline.rundir import startup
    from ridgeline.trainer import run

    if not isinstance(plan, list):
        began_s = time.monotonic()
        sys.argv = ["ridge", *sys.argv[5:]]
        from ridgeline.cli.main import main as ridge

        with patch.object(startup, "process_age_s", lambda: time.monotonic() - began_s), planted(plan):
            ridge()
        return
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        for job in plan:
            if job is None:
                print("ready", file=output, flush=True)
                if not sys.stdin.readline():
                    return  # nobody is there any more
                continue
            began_s, used_s = time.monotonic(), time.process_time()
            with patch.object(startup, "process_age_s", lambda began_s=began_s: time.monotonic() - began_s), planted(job):
                config = Config.model_validate(job["config"])
                outcome = run.train(config, command=["test"])
            if outcome is not None:
                report_end(config.directory, outcome)
            took_s, used_s = time.monotonic() - began_s, time.process_time() - used_s
            print(f"{job['config']['name']} took {took_s:.1f} s, {used_s:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
