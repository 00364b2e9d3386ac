"""Names ranks that compute more slowly than the others while the run trains (docs/guides/faulty-devices.md).

Ranks take their steps together, so that the step time is equal on all of them. What differs is the time that a rank computes itself:

* on CPUs, the CPU time per step of XLA's compute threads and of the main thread. Not of the process: gloo polls while it waits;
* on GPUs, the time of a small program without collectives, on each device, before every second step, or less often (PROBE_SHARE).

Each process publishes its newest times in JAX's coordination service (a key per process, from a thread); process 0 compares them. There is
no collective and no wait for another process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ridgeline.configs.fault_schema import StragglersConfig
from ridgeline.observe.clocks import ClockWatch
from ridgeline.rundir.bad_nodes import add_bad_nodes, node_name, read_bad_nodes, restarts_without_them
from ridgeline.rundir.device_state import DeviceState
from ridgeline.trainer.agreement import coordination_client
from ridgeline.trainer.hooks import Recorder
from ridgeline.trainer.loop import Hook, StepResult

EVENT, END_EVENT, REPLACED_EVENT = "straggler", "straggler_end", "straggler_replaced"
REASON = "straggler:"
"""How the reasons of replaced nodes begin in bad_nodes."""
WINDOW = 15
"""Newest times of a rank that are compared; of the program on GPUs, which runs before every PROBE_EVERY-th step, half as many."""
PUBLISH_EVERY, PROBE_EVERY = 2, 2
NAMED_SHARE, ENDED_SHARE = 0.7, 0.5
"""A rank is named from this part of the threshold on, so that one exactly at the threshold is named in spite of noise; it is no longer slow
below the other part, from WINDOW steps after it was named on: until then the window has steps from before."""
ERRORS = 3.6
"""The typical excess must be this many times its standard error above 0: noise does not name a rank."""
RELATED = 2
"""Windows that tell how the noise of successive steps is related."""
HISTORY = RELATED * WINDOW
"""Newest times of a rank, at steps that all ranks have, that are used."""
LATE = WINDOW
"""Times beside these: another process may have published fewer steps."""
FAR = 2.5
"""Standard deviations beyond which a value counts as this far in the relation of steps."""
LEAST_SHARE, MOST_SHARE = 0.45, 2.0
"""Limits of the standard error over that of independent steps."""
PROBE_SHARE = 0.005
"""Most of the time of steps that the program on GPUs may take: before short steps it runs less often."""
PROBE_DIM, PROBE_REPEATS = 2048, 8
Times = Mapping[str, Mapping[int, float]]
"""Rank -> step -> its own time in seconds."""
Values = NDArray[np.float64]


def excesses(times: Times, window: int) -> dict[str, Values]:
    """Return, for each rank, its own time over the median of the others minus 1, at the steps that all ranks have, newest last.

    Empty where there are fewer than `window` such steps, or a single rank. The median of the others, at the same step, cancels what changes
    for all.
    """
    common = sorted(set.intersection(*(set(own) for own in times.values()))) if times else []
    count, steps = len(times), common[-HISTORY:]
    if count < 2 or len(common) < window:
        return {}
    own = np.array([[times[name][step] for step in steps] for name in times])
    order = np.argsort(own, 0)
    place, ordered = np.argsort(order, 0), np.take_along_axis(own, order, 0)

    def without(index: int) -> Values:
        """Return, for each rank, the time at this place of the order without it."""
        return np.where(place <= index, ordered[index + 1], ordered[index])

    others = (without((count - 2) // 2) + without((count - 1) // 2)) / 2
    return dict(zip(times, own / np.maximum(others, 1e-9) - 1, strict=True))


def typical(values: Values) -> tuple[Values, Values]:
    """Return the typical value of the last axis, the median of the means of all pairs, and its standard error.

    The median of pairs is as robust as is needed here against single slow steps, and of normal noise it needs two thirds of the values
    that the plain median needs (Hodges and Lehmann, doi 10.1214/aoms/1177704172). Its standard error is that of normal noise whose pairs
    have the same quartiles: sqrt(pi / 3) * sd / sqrt(n), sd = sqrt(2) * 1.4826 * half the distance of the quartiles.
    """
    first, second = np.triu_indices(values.shape[-1])
    low, middle, high = np.quantile((values[..., first] + values[..., second]) / 2, (0.25, 0.5, 0.75), axis=-1)
    return middle, math.sqrt(math.pi / 3) * math.sqrt(2) * 1.4826 * (high - low) / 2 / math.sqrt(values.shape[-1])


def error_share(values: Values, window: int) -> Values:
    """Return the standard error of the mean of `window` successive values of the last axis over that of independent ones.

    The clock is read while XLA's threads are in the next step: what one step has too much, the next one has too little, and the mean is
    known better than by independent steps. Noise that lasts for steps makes it worse. For a correlation r of neighbors alone it is
    sqrt(1 + 2 r (1 - 1 / window)) (Bartlett 1946). r is that of all windows, each about its mean, which makes it smaller by 1 / window;
    values far from the median count as less far. 1 where there are fewer than RELATED windows: r would be noise.
    """
    count = values.shape[-1] // window
    if count < RELATED:
        return np.ones(values.shape[:-1])
    windows = values[..., values.shape[-1] - count * window :].reshape(*values.shape[:-1], count, window)
    away = windows - np.median(windows, -1, keepdims=True)
    limit = FAR * 1.4826 * np.median(np.abs(away), -1, keepdims=True)
    away = np.clip(away, -limit, limit)
    away -= away.mean(-1, keepdims=True)
    related, square = (away[..., 1:] * away[..., :-1]).sum((-2, -1)), (away**2).sum((-2, -1))
    correlation = np.where(square > 0, related / np.where(square > 0, square, 1.0) + 1 / window, 0.0)
    share: Values = np.sqrt(np.clip(1 + 2 * correlation * (1 - 1 / window), LEAST_SHARE**2, MOST_SHARE**2))
    return share


def slow_ranks(found: Mapping[str, Values], threshold: float, window: int = WINDOW) -> tuple[dict[str, float], dict[str, float]]:
    """Return rank -> typical excess of all ranks, and of those that are slower than the others by about `threshold` or more.

    The newest `window` excesses decide. Logarithms are averaged: as ratios, times that are twice and half of the others' would not cancel.
    """
    if not found:
        return {}, {}
    all_logs = np.log(np.maximum(1 + np.array(list(found.values())), 1e-9))
    logs, error = typical(all_logs[:, -window:])
    error = error * error_share(all_logs, window)
    excess = dict(zip(found, np.expm1(logs).tolist(), strict=True))
    slow = (logs >= math.log1p(NAMED_SHARE * threshold)) & (logs >= ERRORS * error)
    return excess, {name: excess[name] for name, is_slow in zip(found, slow, strict=True) if is_slow}


def probe_interval(probe_s: float, step_s: float) -> int:
    """Return the steps from one probe to the next, a power of 2, so that ranks with other times have most of their probes in common."""
    steps = max(PROBE_EVERY, probe_s / (PROBE_SHARE * step_s)) if step_s > 0 else PROBE_EVERY
    return int(2 ** math.ceil(math.log2(steps)))


class Probe:
    """A program without collectives on each local device: its time is the speed of that device."""

    def __init__(self, devices: Sequence[Any], dim: int = PROBE_DIM) -> None:
        with jax.transfer_guard("allow"):
            self._inputs = [jax.device_put(np.full((dim, dim), 1 / dim, jnp.bfloat16), device) for device in devices]
        self._run = jax.jit(lambda x: jax.lax.fori_loop(0, PROBE_REPEATS, lambda _, y: y @ x, x))
        self.times()  # compiles

    def times(self) -> list[float]:
        """Return the time on each device, in seconds. All devices run at once."""
        times = []
        for x in self._inputs:
            jax.block_until_ready(self._run(x))  # the device is idle and its clock up
            start_s = time.perf_counter()
            jax.block_until_ready(self._run(x))
            times.append(time.perf_counter() - start_s)
        return times


class ComputeClock:
    """CPU time of XLA's compute threads and of the main thread, in seconds (/proc/PID/task/TID/schedstat, in ns)."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks, self._counts = tasks, dict[str, bool]()

    def __call__(self) -> float:
        """Return the time so far."""
        total_ns = 0
        for task in os.listdir(self._tasks):
            try:
                if task not in self._counts:
                    self._counts[task] = task == str(os.getpid()) or (self._tasks / task / "comm").read_text().startswith("tf_XLA")
                if self._counts[task]:
                    total_ns += int((self._tasks / task / "schedstat").read_text().split()[0])
            except OSError:  # the thread has ended
                self._counts.pop(task, None)
        return total_ns / 1e9


@dataclass(eq=False)
class Stragglers(Hook):
    """Measures the own time of this process's ranks, publishes it, and in process 0 names slow ranks.

    A rank is a process on CPUs, a device on GPUs. `close` ends the thread.
    """

    config: StragglersConfig
    recorder: Recorder
    clocks: ClockWatch
    probe: Probe | None
    """On GPUs; None: the CPU time of computations counts."""
    run: str
    """Identifies this start among the keys of the coordination service."""
    run_dir: Path
    in_job: bool = field(default_factory=restarts_without_them)
    """Whether a job script starts the run again without bad nodes."""
    cpu_clock: Callable[[], float] = field(default_factory=ComputeClock)
    _own: deque[tuple[int, list[float]]] = field(default_factory=lambda: deque(maxlen=HISTORY + LATE), init=False)
    _last_s: float | None = field(default=None, init=False)
    _named: dict[str, float] = field(default_factory=dict, init=False)
    _since: dict[str, int] = field(default_factory=dict, init=False)
    """Named rank -> step at which it was named."""
    _replaced: bool = field(default=False, init=False)
    """What can be done about stragglers of this start is done."""
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    _due: int | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _step_s: float = field(default=0.0, init=False)
    _probe_s: float = field(default=0.0, init=False)
    _probed: list[float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Start the thread that publishes and compares."""
        self._changed = threading.Condition()
        self._node = node_name()
        self._thread = threading.Thread(target=self._work, name="stragglers", daemon=True)
        self._thread.start()

    def before_step(self, step: int, read_previous: Callable[[], None]) -> None:
        """On GPUs, run the probe before some steps, when the devices are idle. Its time is in no step's."""
        if self.probe is None or step % probe_interval(self._probe_s, self._step_s):
            return
        read_previous()
        with self.recorder.timer.paused():
            start_s = time.perf_counter()
            self._probed = self.probe.times()
            self._probe_s = time.perf_counter() - start_s

    def on_result(self, result: StepResult) -> None:
        """Keep the own times of this step; have them published after every PUBLISH_EVERY-th step."""
        now_s = self.cpu_clock()
        own = self._probed if self.probe is not None else None if self._last_s is None or result.first else [now_s - self._last_s]
        self._last_s, self._probed, self._step_s = now_s, None, result.duration_s
        with self._changed:
            if own is not None:
                self._own.append((result.step, [float(f"{own_s:.5g}") for own_s in own]))
            # process 0, which compares, a step later: by then the others have published
            if result.step % PUBLISH_EVERY == (jax.process_index() == 0):
                self._due = result.step
                self._changed.notify()
            metrics = dict(self._metrics)
        if result.param_norm is not None and metrics:
            self.recorder.writer.write(result.step, metrics)

    def close(self, step: int) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None or self._closed)
                if self._closed:
                    return
                step, self._due, own = self._due, None, list(self._own)
            assert step is not None
            try:
                found = self._exchange(own)
                if found:
                    self._compare(step, found)
            except Exception as error:  # it must not end a run
                self.recorder.progress.note(f"stragglers are not looked for any more: {type(error).__name__}: {error}")
                return

    def _exchange(self, own: Sequence[tuple[int, list[float]]]) -> list[dict[str, Any]]:
        """Publish this process's times; in process 0 return those of all processes."""
        process = jax.process_index()
        states = [state_text(state) for state in self.clocks.newest]
        mine = {"process": process, "node": self._node, "own": own, "states": states}
        client = coordination_client()
        if client is None:
            return [mine]
        prefix = f"ridge/stragglers/{self.run}"
        client.key_value_set(f"{prefix}/{process}", json.dumps(mine), allow_overwrite=True)
        if process != 0:
            return []
        return [json.loads(value) for _, value in client.key_value_dir_get(prefix)]

    def _compare(self, step: int, published: Sequence[Mapping[str, Any]]) -> None:
        """In process 0: name ranks that have become slow, and those that no longer are."""
        times, about = dict[str, dict[int, float]](), dict[str, tuple[Mapping[str, Any], int]]()
        if len(published) < jax.process_count():
            return
        for one in published:
            ranks = len(one["own"][0][1]) if one["own"] else 0
            for rank in range(ranks):
                name = f"process {one['process']}" + (f", its device {rank}" if self.probe is not None else "")
                times[name] = {at: own[rank] for at, own in one["own"]}
                about[name] = one, rank
        window = WINDOW if self.probe is None else WINDOW // PROBE_EVERY
        found = excesses(times, window)
        if not found:
            return
        typical_excess, slow = slow_ranks(found, self._threshold, window)
        worst = max(typical_excess.values())
        wait_s = self._step_s * max(0.0, worst) / (1 + max(0.0, worst))
        with self._changed:
            self._metrics = {"train_straggler/excess": max(0.0, worst), "train_straggler/wait_s": wait_s}
        for name, excess in slow.items():
            if name not in self._named:
                one, rank = about[name]
                states = one["states"]
                state = states[rank] if rank < len(states) else "" if not states else states[0]
                fields = {"rank": name, "node": one["node"], "excess": excess, "wait_s": wait_s, "state": state}
                self.recorder.events.emit(EVENT, step=step, **fields)
                self.recorder.progress.note(
                    f"step {step}: straggler: {name} (node {one['node']}) computes {excess:.0%} longer than the others"
                    f"{', ' + state if state else ''}; they wait about {1e3 * wait_s:.3g} ms per step"
                )
        for name in self._named.keys() - slow.keys():
            if typical_excess[name] < ENDED_SHARE * self._threshold and step - self._since[name] >= WINDOW:
                self.recorder.events.emit(END_EVENT, step=step, rank=name)
                self.recorder.progress.note(f"step {step}: {name} is no longer slower than the others")
            else:
                slow[name] = self._named[name]
        self._named = slow
        self._since = {name: self._since.get(name, step) for name in slow}
        still_slow = [name for name in slow if typical_excess[name] >= ENDED_SHARE * self._threshold]
        self._replace(step, {name: about[name][0]["node"] for name in still_slow})

    @property
    def _threshold(self) -> float:
        assert self.config.threshold is not None
        return self.config.threshold

    def _replace(self, step: int, slow: Mapping[str, str]) -> None:
        """End the run without the nodes (rank -> node) that have been slow for long, by SIGTERM to this process."""
        after = self.config.replace_after
        due = {name: node for name, node in slow.items() if after is not None and step - self._since[name] >= after}
        if not due or self._replaced:
            return
        self._replaced, note = True, self.recorder.progress.note
        nodes = sorted(set(due.values()))
        earlier = [why for why in read_bad_nodes(self.run_dir).values() if why.startswith(REASON)]
        if not self.in_job:
            note(f"{', '.join(nodes)} cannot be replaced (stragglers.replace_after): this is no Slurm job")
        elif len(earlier) + len(nodes) > self.config.max_replaced:
            note(f"{', '.join(nodes)} stays: {len(earlier)} nodes have been replaced (stragglers.max_replaced)")
        else:
            reasons = {node: f"{REASON} {self._named[name]:.0%} slower for {step - self._since[name]} steps" for name, node in due.items()}
            add_bad_nodes(self.run_dir, reasons, datetime.now().astimezone())
            self.recorder.events.emit(REPLACED_EVENT, step=step, nodes=nodes)
            note(f"step {step}: the run saves and is requeued without {', '.join(nodes)} (stragglers.replace_after)")
            os.kill(os.getpid(), signal.SIGTERM)


def state_text(state: DeviceState) -> str:
    """Return clock, temperature and reasons of a device as text, what is known of them."""
    parts = []
    if state.clock_mhz is not None:
        parts.append(f"{state.clock_mhz:.0f} MHz" + (f" of {state.rated_mhz:.0f}" if state.rated_mhz else ""))
    if state.temperature_c is not None:
        parts.append(f"{state.temperature_c:.0f} °C")
    return ", ".join([*parts, *state.reasons])
