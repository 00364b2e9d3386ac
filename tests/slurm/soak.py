"""A run under a seeded schedule of faults on the Slurm of these tests, and the prediction of its goodput by `ridge simulate`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.planner.campaign.model import Campaign, Choice, Outcome
from ridgeline.planner.campaign.trials import simulate
from ridgeline.planner.failure_catalog import FailureClass
from ridgeline.planner.policy import requeue_pause_s
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import event_file, read_last_events
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger
from ridgeline.trainer.checkpoint import directories as dirs
from tests.slurm import jobs
from tests.trainer.storage_trouble import Trouble

MINUTES, MEASURE_MINUTES = float(os.environ.get("SOAK_MINUTES", "1")), 20.0
"""Length of the run; from `MEASURE_MINUTES` on the times of its prediction are measured first."""
STEP_S, SAVE_EVERY, HANG_S, PHASE_S, WAIT_S = 0.2, 20, 8.0, 60.0, 5
"""Seconds of a step (a pause), steps between saves, the watchdog's limits of a step and of other phases, and how long srun waits for the
other ranks."""
FAILURES = ("kill", "stop", "node down", "corrupt")
"""Faults that end a start without a save."""
KINDS = (*FAILURES, "preempt", "fill disk", "slow link")
TAIL_BYTES = 1 << 14
"""How much of the event log is read twice a second: this must not slow the ranks down."""
FULL_S, SLOW_S, SLOW_MS, NODE_AWAY_S = 4.0, 8.0, 5, 25.0


@dataclass
class Fault:
    """A fault that was injected."""

    kind: str
    time_s: float
    restart: int
    step: int
    """Last logged step at that time."""
    recovered_s: float | None = None
    """From the fault to the first step beyond it that counts; None: the run had ended."""
    lost_steps: int = 0
    """Steps that were repeated."""


@dataclass
class Sample:
    """What the ranks hold at one time, and the disk. Bytes, and counts."""

    restart: int
    step: int
    rss: list[int]
    files: list[int]
    threads: list[int]
    disk: int


@dataclass
class Soak:
    """A run of `steps` on a cluster that meets faults, none in its last steps. `control`: of the storage trouble of its ranks."""

    slurm: Any
    run: jobs.Run
    control: Path
    rng: random.Random
    steps: int
    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    _returning: list[tuple[float, str]] = field(default_factory=list)
    _saved: int = 0
    _pids: dict[int, dict[int, int]] = field(default_factory=dict)
    _victims: Counter[str] = field(default_factory=Counter)

    def step_now(self) -> tuple[int, int]:
        """Return the current restart and its last logged step; step 0 before its first."""
        events = read_last_events(event_file(self.run.directory, 0), TAIL_BYTES)
        restart = events[-1].restart if events else -1
        return restart, max((event.fields["step"] for event in events if event.kind == "step" and event.restart == restart), default=0)

    def until_done(self, schedule: Iterator[tuple[float, str]], timeout_s: float) -> None:
        """Inject each fault of (seconds in which the run could meet one, kind), until the job has ended."""
        begin_s, due, exposed_s, before_s = time.time(), next(schedule), 0.0, time.time()
        while (state := self.slurm.job_state(self.run.job)) != "COMPLETED":
            assert state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED", "NODE_FAIL", "REQUEUE_HOLD"), self.run.log[-4000:]
            assert time.time() - begin_s < timeout_s, f"not within {timeout_s:.0f} s\n{self.run.log[-4000:]}"
            if state == "REQUEUE_HOLD":  # after five lost batch scripts, a number that is fixed in Slurm 22.05; as an administrator would
                self.slurm.run("scontrol", "release", self.run.job, check=False)
            self._bring_back()
            restart, step = self.step_now()
            pids = self._ranks(restart) if step else {}
            if pids and not self._interrupted(restart):
                self._sample(restart, step, pids)
            now_s = time.time()
            if pids and self._has_saved() and step < self.steps - SAVE_EVERY // 2:
                exposed_s += now_s - before_s
                if exposed_s >= due[0]:
                    self.inject(due[1])
                    due = next(schedule)
                    now_s = time.time()
            before_s = now_s
            time.sleep(0.5)
        self.bring_all_back()

    def bring_all_back(self) -> None:
        """Start the nodes that are down: they would miss in what comes next."""
        for _, name in self._returning:
            self.slurm.start_node(name)
        self._returning.clear()

    def inject_at(self, step: int, kind: str) -> None:
        """Inject a fault once the run has made this step, and all nodes are there: a preemption needs them."""

        def due() -> bool:
            self._bring_back()
            return self.step_now()[1] >= step and len(jobs.ranks(self.run)) == 2 and not self._returning

        self.slurm.until(due, 400, f"step {step}")
        self.inject(kind)

    def inject(self, kind: str) -> None:
        """Inject a fault now."""
        restart, step = self.step_now()
        self.faults.append(Fault(kind, time.time(), restart, step))
        print(f"  {kind} at step {step} of start {restart + 1}", flush=True)
        {
            "kill": self._kill,
            "stop": lambda: self._signal(signal.SIGSTOP),
            "node down": self._node_down,
            "corrupt": self._corrupt,
            "preempt": self._preempt,
            "fill disk": self._fill_disk,
            "slow link": self._slow_link,
        }[kind]()
        if kind in FAILURES or kind == "preempt":
            self._saved = self.run.saved()

    def _ranks(self, restart: int) -> dict[int, int]:
        """Return process -> pid of the current start while both live; {} otherwise."""
        if restart not in self._pids:
            self._pids = {restart: jobs.ranks(self.run)}
        pids = self._pids[restart]
        return pids if len(pids) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in pids.values()) else {}

    def _interrupted(self, restart: int) -> bool:
        """Whether a start has met its end: a stopped rank holds what it had open, which may be the files of a save."""
        return any(fault.restart == restart and fault.kind not in ("fill disk", "slow link") for fault in self.faults)

    def _has_saved(self) -> bool:
        """Whether there are two checkpoints, and one since the last interruption: five starts without a new one end a job."""
        steps = dirs.complete_steps(self.run.directory / "checkpoints")
        return len(steps) == 2 and steps[-1] > self._saved

    def _next_victim(self, kind: str, of: Sequence[Any]) -> Any:
        """Return one of two ranks or nodes, each in its turn: how long a recovery takes depends on which one it is."""
        self._victims[kind] += 1
        return sorted(of)[self._victims[kind] % len(of)]

    def _signal(self, number: signal.Signals) -> None:
        pids = jobs.ranks(self.run)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[self._next_victim(number.name, list(pids))], number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _node_down(self) -> None:
        name = self._next_victim("node down", self.run.nodes())
        self.slurm.stop_node(name)
        self._returning.append((time.time() + NODE_AWAY_S, name))

    def _bring_back(self) -> None:
        for when_s, name in [one for one in self._returning if one[0] <= time.time()]:
            self.slurm.start_node(name)
            self._returning.remove((when_s, name))

    def _corrupt(self) -> None:
        """Flip a bit of the newest checkpoint, and kill a rank: the next start has to find it and take the one before."""
        root = self.run.directory / "checkpoints"
        files = [path for path in dirs.step_dir(root, dirs.complete_steps(root)[-1]).rglob("*") if path.is_file() and path.stat().st_size]
        path = self.rng.choice(sorted(files))
        content = bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(content)
        self._kill()

    def _preempt(self) -> None:
        script = self.run.directory.parent / "urgent.sh"
        script.write_text("#!/bin/bash\nsleep 1\n")
        self.slurm.sbatch(script, "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null")

    def _fill_disk(self) -> None:
        """Fill the disk of the checkpoints until a save has failed."""
        failed = self._failed_saves()
        with self._trouble("full", [str(self.run.directory / "checkpoints")]):
            self._until(lambda: self._failed_saves() > failed, 4 * SAVE_EVERY * STEP_S)

    def _slow_link(self) -> None:
        with self._trouble("slow", ["socket:"], SLOW_MS):
            self._until(lambda: False, SLOW_S)

    @contextlib.contextmanager
    def _trouble(self, kind: str, prefixes: Sequence[str], delay_ms: int = 0) -> Iterator[None]:
        trouble = Trouble(self.control)
        trouble.begin(kind, [Path(prefix) for prefix in prefixes], delay_ms)
        try:
            yield
        finally:
            assert trouble.end(), f"{kind}: no system call met it"

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        end_s = time.time() + timeout_s
        while not condition() and time.time() < end_s and self.slurm.job_state(self.run.job) == "RUNNING":
            time.sleep(0.3)

    def _failed_saves(self) -> int:
        return sum(event.kind == "checkpoint_failed" for event in self.run.events())

    def _sample(self, restart: int, step: int, pids: Mapping[int, int]) -> None:
        rss, files, threads = list[int](), list[int](), list[int]()
        for pid in pids.values():
            with contextlib.suppress(OSError, KeyError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines if ":" in line)
                rss.append(int(status["VmRSS"].split()[0]) * 1024)
                threads.append(int(status["Threads"]))
                files.append(len(os.listdir(f"/proc/{pid}/fd")))
        if len(files) == 2:
            disk = 0
            for directory, _, names in os.walk(self.run.directory / "checkpoints"):  # checkpoints are deleted meanwhile
                for name in names:
                    with contextlib.suppress(OSError):
                        disk += os.lstat(os.path.join(directory, name)).st_size
            self.samples.append(Sample(restart, step, rss, files, threads, disk))

    def settle(self) -> None:
        """Fill in what each fault cost, from the event log."""
        events = self.run.events()
        for fault in self.faults:
            later = [event for event in events if event.time_s > fault.time_s]
            restored = [e for e in later if e.kind == "phase_end" and e.fields["phase"] == "restore" and e.fields["outcome"] == "ok"]
            interrupted = fault.kind in FAILURES or fault.kind == "preempt"
            made = max((e.fields["step"] for e in events if e.kind == "step" and e.restart == fault.restart), default=fault.step)
            if interrupted and restored:
                fault.lost_steps = max(0, made - restored[0].fields["step"])
            beyond = [e for e in later if e.kind == "step" and e.fields["step"] > (made if interrupted else fault.step)]
            fault.recovered_s = beyond[0].time_s - fault.time_s if beyond else None

    def ledger(self) -> Ledger:
        """Return the ledger of the run, its waits in the queue included."""
        run = RunDir.open(self.run.directory)
        return run_ledger(run.events, queue_waits(run, run.events))


def faults(rng: random.Random, gap_s: Callable[[], float], kinds: Sequence[str] = KINDS) -> Iterator[tuple[float, str]]:
    """Yield faults without end, with these gaps, and kinds of which each comes once before one comes again.

    The schedule is one that has been going on: the first fault comes after the rest of the gap that lies around a random moment (a long gap
    does so more often than a short one). So in any time T one expects T / mean gap faults, as in the simulation; half a fault less if the
    first one came after a whole gap.
    """
    gaps = [gap_s() for _ in range(1000)]
    due_s, deck = rng.choices(gaps, weights=gaps)[0] * rng.random(), list[str]()
    while True:
        deck = deck or rng.sample(kinds, len(kinds))
        yield due_s, deck.pop()
        due_s += gap_s()


@dataclass(frozen=True)
class Times:
    """Seconds measured on a short run that meets faults: what a prediction needs."""

    step_s: float
    save_s: float
    write_s: float
    restore_s: float
    startup_s: float
    compile_s: float
    away_s: Mapping[str, float]
    """Kind (kill, stop, node down, preempt) -> from the fault to the next start."""
    slow_s: float
    """By which steps took longer while the network was slow."""


TYPICAL = Times(
    step_s=0.205,
    save_s=0.16,
    write_s=0.44,
    restore_s=0.05,
    startup_s=9.3,
    compile_s=1.4,
    away_s={"kill": 25.0, "stop": 53.0, "node down": 40.0, "preempt": 10.0},
    slow_s=4.0,
)
"""Measured on two cores beside other tests; a sample of a few minutes is predicted from these."""


def measure(soak: Soak) -> Times:
    """Return the times of a run that met a slow network and each other kind of fault several times: how long Slurm takes to give up a
    node varies by a minute."""
    events, ledger = soak.run.events(), soak.ledger()
    later = [piece for piece in ledger.stretches if piece.restart > 0]
    starts = ledger.starts - 1

    def per_start(category: str) -> float:
        return sum(piece.duration_s for piece in later if piece.category == category) / starts

    steps = [(e.restart, e.fields["step"], e.time_s) for e in events if e.kind == "step"]
    usual_s = statistics.median(b[2] - a[2] for a, b in pairwise(steps) if a[0] == b[0])
    slow_from_s = next(fault.time_s for fault in soak.faults if fault.kind == "slow link")
    slow_s = max(0.0, SLOW_S - usual_s * sum(slow_from_s < time_s <= slow_from_s + SLOW_S for _, _, time_s in steps))
    saved = [e.fields["total_s"] for e in events if e.kind == "checkpoint_saved"]
    saves = sum(e.kind == "phase_start" and e.fields["phase"] == "save" for e in events)
    ready_s = per_start("startup") + per_start("unexplained") + per_start("compile") + per_start("restore")
    away_s = defaultdict[str, list[float]](list)
    for fault in soak.faults:
        if fault.kind != "slow link":
            first_s = next(time_s for restart, _, time_s in steps if restart > fault.restart)
            away_s[fault.kind].append(first_s - fault.time_s - ready_s)
    return Times(
        step_s=(ledger.seconds["productive"] - slow_s) / ledger.steps,
        save_s=ledger.seconds["checkpoint"] / saves,
        write_s=statistics.median(saved),
        restore_s=per_start("restore"),
        startup_s=per_start("startup") + per_start("unexplained"),
        compile_s=per_start("compile"),
        away_s={kind: statistics.mean(times_s) for kind, times_s in away_s.items()},
        slow_s=slow_s,
    )


def predict(times: Times, steps: int, schedule: Sequence[tuple[float, str]]) -> Outcome:
    """Return what the simulation makes of a run of `steps` under a schedule of faults, (seconds in which the run could meet one, kind).

    Here and in the simulation a start is spared until its first save. The clock of the schedule stands still while a disk is full or a
    network slow. The simulation knows no slow network: those steps are work. It has one time of a requeue, and one of detection for all
    processes that exit: the mean over the schedule, with what a preemption takes longer, and the interval that is repeated because a
    corrupted checkpoint is passed over.
    """
    interval_s = SAVE_EVERY * times.step_s
    met = Counter(kind for due_s, kind in schedule if due_s <= steps * times.step_s)
    pause_s = float(requeue_pause_s(1, 0.0))
    away_s = {**times.away_s, "corrupt": times.away_s["kill"] + interval_s + times.save_s}
    requeue_s = max(0.0, min(away_s["preempt"], *(away_s[kind] - pause_s for kind in FAILURES)))
    exits = {kind: met[kind] for kind in FAILURES if kind != "stop"}
    found_s = sum(count * (away_s[kind] - requeue_s - pause_s) for kind, count in exits.items())
    found_s += met["preempt"] * (away_s["preempt"] - requeue_s)
    interruptions, still_s = list[tuple[float, str]](), 0.0
    for due_s, kind in schedule:
        still_s += {"fill disk": FULL_S, "slow link": SLOW_S}.get(kind, 0.0)
        if kind in (*FAILURES, "preempt"):
            interruptions.append((due_s + still_s, "preemption" if kind == "preempt" else kind))
    made = Campaign(
        work_s=steps * times.step_s + met["slow link"] * times.slow_s,
        nodes=2,
        devices_per_node=1,
        classes=tuple(
            FailureClass(kind, "job", 0.0, "restart", "watchdog" if kind == "stop" else "exit", "the schedule") for kind in FAILURES
        ),
        step_limit_s=away_s["stop"] - requeue_s - pause_s,
        save_s=times.save_s,
        write_s={"shared": times.write_s, "local": 0.0},
        restore_s={"shared": times.restore_s, "local": 0.0},
        detection_s=found_s / max(1, sum(exits.values())),
        requeue_s=requeue_s,
        startup_s=times.startup_s,
        compile_s=times.compile_s,
        spared_until_save=True,
        schedule=tuple(interruptions),
    )
    [outcome] = simulate(made, [Choice(interval_s, spares=0)], trials=1, seed=0)
    return outcome
