"""The discrete-event simulation of campaigns: many trials of many choices at once, each an element of arrays [choices, trials].

From one event to the next the job repeats the same cycle of steps and a save, so that time is computed in closed form: the number of
iterations is the number of events, not of saves or steps. The next event is the earliest of all failures, planned interruptions,
preemptions and new stragglers (independent Poisson processes: one exponential gap at the sum of their rates, then the kind in proportion
to its rate), the time limit of the job, the discovery of a straggler, and the return of a node. Failures hit the job while it holds its
nodes: in start-up and restore too (Campaign.spared_until_save: not before the first save of a start), but not in the queue.

With Campaign.schedule the interruptions come at given times instead.

Event k of every choice uses the same random numbers (common random numbers), so choices differ by what they do, not by their luck.

With failures alone and fixed times this is the model of J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
dumps, FGCS 22(3), 2006; its expected wall time is the one of `daly_wall_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.planner.campaign.model import PARTS, Campaign, Choice, Floats, Outcome
from ridgeline.planner.policy import MAX_FAILURES, elastic_size, requeue_pause_s

MOST_EVENTS_FACTOR, MOST_EVENTS = 5, 1000
"""A trial is given up after this many times the expected events, plus as many."""
_EPSILON = 1e-9
_RING_SPARE = 64


def daly_wall_s(*, work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected wall time of a job with exponential failures at any time, also in saves and restarts (Daly 2006, equation 20):
    M * exp(R/M) * (exp((tau + delta)/M) - 1) * work/tau."""
    attempts = math.expm1((interval_s + save_s) / mtbf_s) * work_s / interval_s
    return mtbf_s * math.exp(restart_s / mtbf_s) * attempts


@dataclass(frozen=True)
class _Kind:
    """A kind of event."""

    name: str
    per_s: float = 0.0
    detection_s: float = 0.0
    graceful: bool = False
    """The job saves first."""
    replaces: bool = False
    outage_s: float = 0.0
    loses_memory: bool = False
    """The copies in the memory of the nodes are gone."""
    interrupts: bool = True
    requeues: bool = True
    """Goes through the scheduler's queue."""


def _kinds(made: Campaign) -> list[_Kind]:
    """Return the random kinds, then those that happen at known times (`_AT`)."""
    kinds = []
    for one in made.classes:
        per_s = one.per_hour(made.nodes, made.devices_per_node) / 3600
        detection_s = made.step_limit_s if one.found_by == "watchdog" else made.detection_s
        wait = one.after == "wait"
        kinds.append(
            _Kind(
                one.name,
                per_s,
                0.0 if one.after == "planned" else detection_s,
                graceful=one.after == "planned",
                replaces=one.after == "replace",
                outage_s=made.outage_s if wait else 0.0,
                loses_memory=wait,
            )
        )
    kinds.append(_Kind("preemption", made.preemptions_per_s, graceful=True, loses_memory=True))
    kinds.append(_Kind("slow", made.straggler_per_s, interrupts=False))
    kinds.append(_Kind("time_limit", graceful=True, loses_memory=True))
    kinds.append(_Kind("straggler", graceful=True, replaces=True))
    kinds.append(_Kind("grow", graceful=True))
    return kinds


_AT = ("time_limit", "straggler", "grow")


class _Trials:
    """The state of all trials. Arrays [C, T] unless said otherwise; [C, 1] for what belongs to a choice."""

    def __init__(self, made: Campaign, choices: Sequence[Choice], trials: int, seed: int) -> None:
        self.made, self.rng = made, np.random.default_rng(seed)
        self.kinds = _kinds(made)
        self.index = {kind.name: i for i, kind in enumerate(self.kinds)}
        self.shape = (len(choices), trials)
        rates = np.array([kind.per_s for kind in self.kinds])
        self.rate_per_s = float(rates.sum())
        self.cumulative = np.cumsum(rates) / self.rate_per_s if self.rate_per_s > 0 else np.ones(len(rates))
        names = ("graceful", "interrupts", "detection_s", "loses_memory", "replaces", "outage_s")
        self.of_kind = {name: np.array([getattr(kind, name) for kind in self.kinds]) for name in names}
        self.last_random = len(self.kinds) - len(_AT) - 1

        def column(values: Sequence[Any]) -> NDArray[Any]:
            return np.array(values)[:, None]

        self.interval_s = column([choice.interval_s for choice in choices])
        self.write_s = column([made.write_s[choice.tier] for choice in choices])
        self.restore_s = column([made.restore_s[choice.tier] for choice in choices])
        self.spares = column([choice.spares for choice in choices])
        goes_on = [elastic_size(made.shrunk_sizes, made.nodes - missing) for missing in range(made.nodes + 1)]
        self.goes_on = np.array(goes_on)
        """By number of missing nodes: on how many the job goes on; 0: it waits."""
        self.grows_at = np.array(
            [next((m for m in range(missing, -1, -1) if goes_on[m] > goes_on[missing]), 0) for missing in range(made.nodes + 1)]
        )
        """By number of missing nodes: the largest number with which it goes on with more."""
        self.shrink = column([choice.elastic == "shrink" for choice in choices])
        every = [
            max(1, round(made.shared_every_s / (choice.interval_s + made.save_s))) if choice.tier == "local" else 1 for choice in choices
        ]
        self.saves_per_shared = column(every)
        self.spent: dict[str, Floats] = {name: self.zeros() for name in PARTS}
        self.carry: dict[str, Floats] = {name: self.zeros() for name in ("productive", "straggler", "shrunk")}
        """Steps of this start that no checkpoint holds yet, from before its last event."""
        self.pending = {"startup": self.full(made.startup_s), "compile": self.full(made.compile_s), "restore": self.zeros()}
        self.counts = np.zeros(len(self.kinds) * len(choices) * trials)
        self.kept, self.kept_shared = self.zeros(), self.zeros()
        """Work that the newest checkpoint holds, of the tier and of shared storage, s at full speed."""
        self.since_shared = self.zeros()
        self.failures, self.restarts, self.stops = self.zeros(), self.zeros(), self.zeros()
        self.attempt_s, self.unpaid_s = self.zeros(), self.zeros()
        self.limit_left_s = self.full(made.time_limit_s)
        self.slow = np.zeros(self.shape, bool)
        self.found_left_s, self.grow_left_s = self.full(math.inf), self.full(math.inf)
        self.fraction = np.ones(self.shape)
        self.active = np.ones(self.shape, bool)
        expected_out = (made.replaced_per_s + made.straggler_per_s) * made.repair_s
        self.slots = int(2 * expected_out + 10 * math.sqrt(expected_out)) + _RING_SPARE
        self.size = len(choices) * trials
        self.elements = np.arange(self.size).reshape(self.shape)
        self.away_since = np.zeros(self.slots * self.size)
        """Times at which nodes were sent to repair: a ring of `slots` for each element."""
        self.replaced = np.zeros(self.shape, int)
        self.returned = np.zeros(self.shape, int)
        self.oldest_back_s = self.full(math.inf)
        """When the node that has been away longest is back; infinite where none is away."""
        self.t_s = self.zeros()
        self.spared_s = self._until_save()
        """Time that this start is still spared from random events."""
        schedule = made.schedule or ()
        self.schedule_s = np.array([*(seconds for seconds, _ in schedule), math.inf])
        self.schedule_kind = np.array([*(self.index[name] for _, name in schedule), 0])
        self.met = np.zeros(self.shape, int)
        """Interruptions of the schedule that are over."""
        self.exposed_s = self.zeros()
        """Time in which the job could be interrupted."""
        self._wait(self.active, self.rng.exponential(size=(1, trials)) * made.queue_wait_s)

    def zeros(self) -> Floats:
        return np.zeros(self.shape)

    def full(self, value: float) -> Floats:
        return np.full(self.shape, value)

    def _until_save(self) -> Floats:
        """Return for how long a start that begins now is spared: until its first checkpoint is written, or not at all."""
        if not self.made.spared_until_save:
            return self.zeros()
        until_s: Floats = sum(self.pending.values()) + self.interval_s + self.made.save_s + self.write_s
        return until_s

    def advance(self) -> None:
        """Go on to the next event of every active trial."""
        size = (1, self.shape[1])
        gap, which, waits = self.rng.exponential(size=size), self.rng.random(size), self.rng.exponential(size=size)
        kind, gap_s = self._next_event(gap, which)
        speed = self.fraction / np.where(self.slow, 1 + self.made.straggler_excess, 1.0)
        need_s = np.maximum(0.0, self.made.work_s - self.kept - self.carry["productive"]) / speed
        saves = np.maximum(1.0, np.ceil(need_s / self.interval_s - _EPSILON))
        ends_s = sum(self.pending.values()) + need_s + saves * self.made.save_s + self.write_s
        done = self.active & (ends_s <= gap_s)
        alive = self.active & np.isfinite(gap_s)
        left_s = np.where(done, ends_s, np.where(alive, gap_s, 0.0))
        self.active &= done | alive
        self.t_s += left_s
        self.attempt_s += left_s
        for name in ("limit_left_s", "found_left_s", "grow_left_s"):
            setattr(self, name, getattr(self, name) - left_s)
        self.exposed_s += np.maximum(0.0, left_s - self.spared_s)
        self.spared_s = np.maximum(0.0, self.spared_s - left_s)
        self.met += self.active & ~done & (kind <= self.last_random)
        for part, pending_s in self.pending.items():
            used_s = np.minimum(pending_s, left_s)
            pending_s -= used_s
            left_s = left_s - used_s
            self.spent[part] += used_s
        saved = self._run(left_s, kind, done, speed, need_s, saves)
        self.active &= ~done
        self._interrupt(kind, saved, waits)

    def _next_event(self, gap: Floats, which: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Return the kind of the next event and the time until it."""
        with np.errstate(divide="ignore"):
            gap_s = (
                np.broadcast_to(gap / self.rate_per_s if self.rate_per_s > 0 else np.full(gap.shape, math.inf), self.shape) / self.fraction
            )
        kind = np.broadcast_to(np.minimum(np.searchsorted(self.cumulative, which, side="right"), self.last_random), self.shape).copy()
        if self.made.schedule is not None:
            gap_s, kind = self.schedule_s[self.met] - self.exposed_s, self.schedule_kind[self.met]
        gap_s = gap_s + self.spared_s
        for name, at_s in zip(_AT, (self.limit_left_s, self.found_left_s, self.grow_left_s), strict=True):
            sooner = at_s < gap_s
            kind[sooner] = self.index[name]
            gap_s = np.where(sooner, np.maximum(at_s, 0.0), gap_s)
        return kind, gap_s

    def _run(
        self, left_s: Floats, kind: NDArray[np.int64], done: NDArray[np.bool_], speed: Floats, need_s: Floats, saves: Floats
    ) -> NDArray[np.bool_]:
        """Account for stretches of steps and saves of `left_s` seconds; return whether a checkpoint was made in this start."""
        made, active = self.made, self.active
        cycle_s = self.interval_s + made.save_s
        cycles = np.floor(left_s / cycle_s)
        into_s = left_s - cycles * cycle_s
        steps_s = np.where(done, need_s, np.minimum(cycles * self.interval_s + np.minimum(into_s, self.interval_s), need_s))
        stall_s = cycles * made.save_s + np.maximum(0.0, into_s - self.interval_s)
        stall_s = np.where(done, saves * made.save_s, np.minimum(stall_s, left_s - steps_s))
        self.spent["checkpoint"] += stall_s
        self.spent["teardown"] += left_s - steps_s - stall_s
        durable = np.minimum(np.maximum(0.0, np.floor((left_s - self.write_s) / cycle_s + _EPSILON)), cycles)
        running = active & (self.pending["restore"] + self.pending["compile"] + self.pending["startup"] <= 0)
        wanted = running & ~done & self.of_kind["graceful"][kind]
        write_s = made.write_s["shared"]
        stopped = wanted & (made.save_s + write_s <= made.grace_s)
        for part, extra_s in (("checkpoint", made.save_s), ("teardown", write_s)):
            self.spent[part] += np.where(stopped, extra_s, 0.0)
        self.t_s += np.where(stopped, made.save_s + write_s, 0.0)
        all_kept = done | stopped
        goes_on = active & ~done & ~self.of_kind["interrupts"][kind]
        kept_s = np.where(all_kept, steps_s, np.minimum(durable * self.interval_s, steps_s))
        saved = all_kept | (durable > 0)
        before = self.kept.copy()
        carried = self.carry["productive"].copy()
        self._keep(kept_s, speed, saved)
        self._share(before + carried, durable, speed, all_kept)
        lost = active & ~all_kept & ~goes_on
        rest_s = np.where(active & ~all_kept, steps_s - kept_s, 0.0)
        self.spent["lost"] += np.where(lost, rest_s + sum(self.carry.values()), 0.0)
        for part, values in self._split(rest_s, speed).items():
            self.carry[part] = np.where(lost, 0.0, self.carry[part] + np.where(goes_on, values, 0.0))
        return saved

    def _split(self, steps_s: Floats, speed: Floats) -> dict[str, Floats]:
        """Divide the wall time of steps: what counts at full speed, and the excess for fewer nodes and for a straggler."""
        shrunk_s = steps_s * (1 - self.fraction)
        return {"productive": steps_s * speed, "shrunk": shrunk_s, "straggler": steps_s * (self.fraction - speed)}

    def _keep(self, kept_s: Floats, speed: Floats, saved: NDArray[np.bool_]) -> None:
        """Count steps that a checkpoint holds now, and those carried from before."""
        parts = self._split(kept_s, speed)
        for part, values in parts.items():
            self.spent[part] += np.where(saved, values + self.carry[part], 0.0)
        self.kept += np.where(saved, parts["productive"] + self.carry["productive"], 0.0)
        for part in parts:
            self.carry[part] = np.where(saved, 0.0, self.carry[part])

    def _share(self, begin: Floats, durable: Floats, speed: Floats, all_kept: NDArray[np.bool_]) -> None:
        """Update what shared storage holds: every `saves_per_shared`-th save, and all saves of a planned stop."""
        total = self.since_shared + durable
        shared = np.floor(total / self.saves_per_shared)
        work = begin + (shared * self.saves_per_shared - self.since_shared) * self.interval_s * speed
        self.kept_shared = np.where(all_kept, self.kept, np.where(shared > 0, np.minimum(work, self.kept), self.kept_shared))
        self.since_shared = np.where(all_kept, 0.0, total - shared * self.saves_per_shared)

    def _interrupt(self, kind: NDArray[np.int64], saved: NDArray[np.bool_], waits: Floats) -> None:
        """Do what follows an event: detection, replacement, queue, and the next start."""
        made, active = self.made, self.active
        self.counts[kind * self.size + self.elements] += active
        onset = active & (kind == self.index["slow"])
        found_s = made.straggler_found_s if made.stragglers_found else math.inf
        self.found_left_s = np.where(onset & ~self.slow, found_s, self.found_left_s)
        self.slow |= onset
        hit = active & self.of_kind["interrupts"][kind]
        self._spend(hit, "hang", self.of_kind["detection_s"][kind])
        excluded = hit & (kind == self.index["straggler"])
        self.slow &= ~excluded
        self.found_left_s = np.where(excluded, math.inf, self.found_left_s)
        memory_lost = hit & self.of_kind["loses_memory"][kind]
        back = np.where(memory_lost, self.kept - self.kept_shared, 0.0)
        self.spent["productive"] -= back
        self.spent["lost"] += back
        self.kept -= back
        self.since_shared = np.where(memory_lost, 0.0, self.since_shared)
        node_s = self._replace(hit & self.of_kind["replaces"][kind])
        self._requeue(hit, ~self.of_kind["graceful"][kind], saved, waits, np.maximum(node_s, self.of_kind["outage_s"][kind]))
        self._start(hit, np.where(memory_lost, made.restore_s["shared"], self.restore_s))

    def _spend(self, where: NDArray[np.bool_], part: str, seconds: Any) -> None:
        value_s = np.where(where, seconds, 0.0)
        self.spent[part] += value_s
        self.t_s += value_s

    def _wait(self, where: NDArray[np.bool_], scheduler_s: Floats) -> None:
        """Wait for the scheduler; other jobs have the nodes, so the time is not paid."""
        self._spend(where, "queue", scheduler_s)
        self.unpaid_s += np.where(where, scheduler_s, 0.0)

    def _replace(self, replaced: NDArray[np.bool_]) -> Floats:
        """Send nodes to repair, and return how long each trial waits until it has all its nodes; no time for a job that shrinks."""
        self.away_since[self._slot(self.replaced)[replaced]] = self.t_s[replaced]
        first = replaced & (self.replaced == self.returned)
        self.oldest_back_s[first] = self.t_s[first] + self.made.repair_s
        self.replaced += replaced
        self._return_nodes()
        missing = self._missing()
        last = self._slot(np.maximum(self.replaced - 1 - self.spares, 0))
        back_s = self.away_since[last] + self.made.repair_s - self.t_s
        large = self.goes_on[np.minimum(missing, self.made.nodes)] == 0
        return np.where((missing > 0) & (~self.shrink | large), np.maximum(back_s, 0.0), 0.0)

    def _slot(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the time of a replacement is in `away_since`."""
        slot: NDArray[np.int64] = number % self.slots * self.size + self.elements
        return slot

    def _missing(self) -> NDArray[np.int64]:
        missing: NDArray[np.int64] = np.maximum(0, self.replaced - self.returned - self.spares)
        return missing

    def _return_nodes(self) -> None:
        while np.any(back := self.oldest_back_s <= self.t_s + _EPSILON):
            self.returned += back
            away_s = np.where(self.returned < self.replaced, self.away_since[self._slot(self.returned)], math.inf)
            self.oldest_back_s = np.where(back, away_s + self.made.repair_s, self.oldest_back_s)

    def _requeue(self, hit: NDArray[np.bool_], failed: NDArray[np.bool_], saved: NDArray[np.bool_], waits: Floats, other_s: Floats) -> None:
        """Wait for the next start: the pauses and limits of launch/slurm/supervise.sh, the queue, and the missing node or service."""
        made = self.made
        self.failures = np.where(hit & failed, np.where(saved, 1.0, self.failures + 1), np.where(hit & saved, 0.0, self.failures))
        limit = math.inf if made.max_restarts is None else made.max_restarts
        stopped = hit & ((failed & (self.failures >= MAX_FAILURES)) | (self.restarts >= limit))
        pause_s = np.where(failed, requeue_pause_s(np.maximum(self.failures, 1.0), self.attempt_s), 0.0)
        own_s = np.where(stopped, made.resubmit_s, made.requeue_s + pause_s)
        self._spend(hit, "queue", np.maximum(own_s, other_s))
        self._wait(hit, np.broadcast_to(waits * made.queue_wait_s, self.shape))
        self.stops += stopped
        self.restarts = np.where(stopped, 0.0, self.restarts + hit)
        self.failures = np.where(stopped, 0.0, self.failures)

    def _start(self, hit: NDArray[np.bool_], restore_s: Floats) -> None:
        """Begin the next start of the trials that were interrupted."""
        made = self.made
        self._return_nodes()
        missing = np.minimum(np.where(self.shrink, self._missing(), 0), made.nodes)
        self.fraction = np.where(hit, np.maximum(self.goes_on[missing], min(made.shrunk_sizes)) / made.nodes, self.fraction)
        for part, seconds in (("startup", made.startup_s), ("compile", made.compile_s), ("restore", restore_s)):
            self.pending[part] = np.where(hit, seconds, self.pending[part])
        self.spared_s = np.where(hit, self._until_save(), self.spared_s)
        self.limit_left_s = np.where(hit, made.time_limit_s, self.limit_left_s)
        self.attempt_s = np.where(hit, 0.0, self.attempt_s)
        # the job grows as soon as enough nodes are back for a larger size
        last = self._slot(np.maximum(self.replaced - self.spares - self.grows_at[missing] - 1, 0))
        back_s = self.away_since[last] + made.repair_s - self.t_s
        self.grow_left_s = np.where(hit, np.where(self.fraction < 1, np.maximum(back_s, 0.0), math.inf), self.grow_left_s)


def expected_events(made: Campaign) -> float:
    """Return the expected number of events in the time of the steps alone."""
    return made.work_s * (sum(kind.per_s for kind in _kinds(made)) + 1 / made.time_limit_s)


def simulate(made: Campaign, choices: Sequence[Choice], *, trials: int, seed: int) -> list[Outcome]:
    """Simulate every choice in `trials` trials. The same seed gives the same result, and the same luck for every choice."""
    state = _Trials(made, choices, trials, seed)
    most = int(MOST_EVENTS_FACTOR * expected_events(made)) + MOST_EVENTS
    for _ in range(most):
        if not state.active.any():
            break
        state.advance()
    return [_outcome(made, choice, state, row) for row, choice in enumerate(choices)]


def _outcome(made: Campaign, choice: Choice, state: _Trials, row: int) -> Outcome:
    spent = {part: values[row].copy() for part, values in state.spent.items()}
    endless = state.active[row]
    spent["lost"] += np.where(endless, sum(values[row] for values in state.carry.values()), 0.0)
    wall_s = state.t_s[row]
    paid_nodes = made.nodes + choice.spares
    device_s = paid_nodes * made.devices_per_node * (wall_s - state.unpaid_s[row])
    counts = state.counts.reshape(len(state.kinds), *state.shape)
    events = {kind.name: counts[i, row] for i, kind in enumerate(state.kinds) if kind.interrupts}
    return Outcome(
        choice=choice,
        seconds=spent,
        wall_s=np.where(endless, math.inf, wall_s),
        device_s=np.where(endless, math.inf, device_s),
        events=events,
        stops=state.stops[row],
        ended_s=wall_s.copy(),
    )
