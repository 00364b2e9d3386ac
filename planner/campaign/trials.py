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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.planner.campaign.kinds import AT_KNOWN_TIMES, goes_on, kinds
from ridgeline.planner.campaign.model import PARTS, Campaign, Choice, Floats, Outcome
from ridgeline.planner.policy import MAX_FAILURES, QUICK_S, requeue_pause_s

MOST_EVENTS_FACTOR, MOST_EVENTS = 5, 1000
"""A trial is given up after this many times the expected events, plus as many."""
_EPSILON = 1e-9
_RING_SPARE = 64


def daly_wall_s(*, work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected wall time of a job with exponential failures at any time, also in saves and restarts (Daly 2006, equation 20):
    M * exp(R/M) * (exp((tau + delta)/M) - 1) * work/tau."""
    attempts = math.expm1((interval_s + save_s) / mtbf_s) * work_s / interval_s
    return mtbf_s * math.exp(restart_s / mtbf_s) * attempts


_PART = ("productive", "straggler", "shrunk", "startup", "compile", "restore", "checkpoint", "teardown", "lost", "hang", "queue")
"""The parts in the order of the rows: first those that are carried from one event to the next, then those of a start."""
_PRODUCTIVE, _STRAGGLER, _SHRUNK, _STARTUP, _COMPILE, _RESTORE, _CHECKPOINT, _TEARDOWN, _LOST, _HANG, _QUEUE = range(len(_PART))
_CARRIED = _SHRUNK + 1
_RESULTS = ("spent", "carry", "t_s", "unpaid_s", "stops")
_CHANGING = (
    *_RESULTS,
    *("element", "trial", "interval_s", "cycle_s", "write_s", "restore_s", "spares", "shrink", "saves_per_shared", "pending"),
    *("kept", "kept_shared", "since_shared", "failures", "restarts", "attempt_s", "limit_left_s", "found_left_s", "grow_left_s"),
    *("slowness", "fraction", "replaced", "returned", "oldest_back_s", "met", "exposed_s", "spared_s"),
)
"""Arrays with an element per trial that is not over."""


class _Trials:
    """The state of the trials that are not over. Arrays [N], or [rows, N]: an element is one trial of one choice."""

    def __init__(self, made: Campaign, choices: Sequence[Choice], trials: int, seed: int) -> None:
        self.made, self.rng, self.trials = made, np.random.default_rng(seed), trials
        self.size = len(choices) * trials
        self.element = np.arange(self.size)
        """Number of the element among those of the start: choice * trials + trial."""
        self._kinds(made)
        self._choices(made, choices)
        self.spent = np.zeros((len(PARTS), self.size))
        """Seconds of each part (`_PART`)."""
        self.carry = np.zeros((_CARRIED, self.size))
        """Steps of this start that no checkpoint holds yet, from before its last event: the first parts."""
        self.pending = np.zeros((_RESTORE + 1 - _STARTUP, self.size))
        self.pending[0], self.pending[1] = made.startup_s, made.compile_s
        self.kept, self.kept_shared = self.full(0.0), self.full(0.0)
        """Work that the newest checkpoint holds, of the tier and of shared storage, s at full speed."""
        self.since_shared = self.full(0.0)
        self.failures, self.restarts, self.stops = self.full(0.0), self.full(0.0), self.full(0.0)
        self.attempt_s, self.unpaid_s = self.full(0.0), self.full(0.0)
        self.limit_left_s = self.full(made.time_limit_s)
        self.found_left_s, self.grow_left_s = self.full(math.inf), self.full(math.inf)
        self.slowness, self.fraction = self.full(1.0), self.full(1.0)
        """Time of a step over that without a straggler; number of nodes over all."""
        expected_out = (made.replaced_per_s + made.straggler_per_s) * made.repair_s
        self.slots = 1 << int(2 * expected_out + 10 * math.sqrt(expected_out) + _RING_SPARE).bit_length()
        self.away_since = np.zeros(self.slots * self.size)
        """Times at which nodes were sent to repair: a ring of `slots`, a power of 2, for each element of the start."""
        self.replaced, self.returned = np.zeros(self.size, int), np.zeros(self.size, int)
        self.oldest_back_s = self.full(math.inf)
        """When the node that has been away longest is back; infinite where none is away."""
        self.t_s = self.full(0.0)
        schedule = made.schedule or ()
        self.schedule_s = np.array([*(seconds for seconds, _ in schedule), math.inf])
        self.schedule_kind = np.array([*(self.index[name] for _, name in schedule), 0])
        self.met = np.zeros(self.size, int)
        """Interruptions of the schedule that are over."""
        self.exposed_s = self.full(0.0)
        """Time in which the job could be interrupted."""
        self.spared_s = self._until_save()
        """Time that this start is still spared from random events."""
        self.ended = {name: getattr(self, name).copy() for name in _RESULTS}
        """Results of all elements of the start; of those that are not over, after `end`."""
        self._wait(self.rng.exponential(size=trials), np.ones(self.size, bool))

    def _kinds(self, made: Campaign) -> None:
        self.kinds = kinds(made)
        self.index = {kind.name: i for i, kind in enumerate(self.kinds)}
        rates = np.array([kind.per_s for kind in self.kinds])
        self.rate_per_s = float(rates.sum())
        self.cumulative = np.cumsum(rates) / self.rate_per_s if self.rate_per_s > 0 else np.ones(len(rates))
        self.last_random = len(self.kinds) - len(AT_KNOWN_TIMES) - 1
        self.slow_kind, self.straggler_kind = self.index["slow"], self.index["straggler"]
        self.graceful, self.loses_memory, self.replaces = (
            np.array([getattr(kind, name) for kind in self.kinds]) for name in ("graceful", "loses_memory", "replaces")
        )
        self.detection_s, self.outage_s = (np.array([getattr(kind, name) for kind in self.kinds]) for name in ("detection_s", "outage_s"))
        self.counts = np.zeros(len(self.kinds) * self.size)

    def _choices(self, made: Campaign, choices: Sequence[Choice]) -> None:
        def repeated(values: Sequence[Any]) -> NDArray[Any]:
            return np.repeat(np.array(values), self.trials)

        self.trial = np.tile(np.arange(self.trials), len(choices))
        self.interval_s = repeated([choice.interval_s for choice in choices])
        self.cycle_s = self.interval_s + made.save_s
        self.write_s = repeated([made.write_s[choice.tier] for choice in choices])
        self.restore_s = repeated([made.restore_s[choice.tier] for choice in choices])
        self.spares = repeated([choice.spares for choice in choices])
        self.shrink = repeated([choice.elastic == "shrink" for choice in choices])
        every = [
            max(1, round(made.shared_every_s / (choice.interval_s + made.save_s))) if choice.tier == "local" else 1 for choice in choices
        ]
        self.saves_per_shared = repeated(every)
        sizes = made.shrunk_sizes
        self.least_nodes = min(sizes)
        self.goes_on = goes_on(sizes, made.nodes)
        """By number of missing nodes: on how many the job goes on; 0: it waits."""
        self.grows_at = np.maximum(np.searchsorted(-self.goes_on, -self.goes_on) - 1, 0)
        """By number of missing nodes: the largest number with which it goes on with more."""
        self.changes_size = bool(self.shrink.any()) or self.goes_on[0] < made.nodes

    def full(self, value: float) -> Floats:
        return np.full(self.size, value, np.float64)

    def _until_save(self) -> Floats:
        """Return for how long a start that begins now is spared: until its first checkpoint is written, or not at all."""
        if not self.made.spared_until_save:
            return np.zeros(len(self.element))
        until_s: Floats = self._pending_s() + self.interval_s + self.made.save_s + self.write_s
        return until_s

    def _pending_s(self) -> Floats:
        startup_s, compile_s, restore_s = self.pending
        pending_s: Floats = startup_s + compile_s + restore_s
        return pending_s

    def advance(self) -> None:
        """Go on to the next event of every trial."""
        made = self.made
        gap, which, waits = self.rng.exponential(size=self.trials), self.rng.random(self.trials), self.rng.exponential(size=self.trials)
        kind, gap_s = self._next_event(gap, which)
        speed = self.fraction / self.slowness
        need_s = np.maximum(0.0, made.work_s - self.kept - self.carry[_PRODUCTIVE]) / speed
        saves = np.maximum(1.0, np.ceil(need_s / self.interval_s - _EPSILON))
        ends_s = self._pending_s() + need_s + saves * made.save_s + self.write_s
        done = ends_s <= gap_s
        left_s = np.minimum(ends_s, gap_s)
        self.t_s += left_s
        self.attempt_s += left_s
        self._let_pass(left_s, ~done & (kind <= self.last_random))
        for part, pending_s in enumerate(self.pending, _STARTUP):
            used_s = np.minimum(pending_s, left_s)
            pending_s -= used_s
            left_s = left_s - used_s
            self.spent[part] += used_s
        saved = self._run(left_s, kind, done, speed, need_s, saves)
        if done.any():
            self._drop(done)
            kind, saved = kind[~done], saved[~done]
        self._interrupt(kind, saved, waits)

    def _let_pass(self, left_s: Floats, random: NDArray[np.bool_]) -> None:
        """Let time pass in what has a known time; `random`: the next event is an interruption of the schedule or drawn."""
        made = self.made
        if made.time_limit_s < math.inf:
            self.limit_left_s -= left_s
        self.found_left_s -= left_s
        if self.changes_size:
            self.grow_left_s -= left_s
        if made.schedule is not None or made.spared_until_save:
            self.exposed_s += np.maximum(0.0, left_s - self.spared_s)
            self.spared_s = np.maximum(0.0, self.spared_s - left_s)
            self.met += random

    def _next_event(self, gap: Floats, which: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Return the kind of the next event and the time until it. Arguments: [trials]."""
        if self.made.schedule is not None:
            gap_s, kind = self.schedule_s[self.met] - self.exposed_s, self.schedule_kind[self.met]
        else:
            kind = np.minimum(np.searchsorted(self.cumulative, which, side="right"), self.last_random)[self.trial]
            gap_s = (gap / self.rate_per_s)[self.trial] / self.fraction if self.rate_per_s > 0 else np.full(len(self.trial), math.inf)
        gap_s += self.spared_s
        for name, at_s in zip(AT_KNOWN_TIMES, (self.limit_left_s, self.found_left_s, self.grow_left_s), strict=True):
            [sooner] = (at_s < gap_s).nonzero()
            kind[sooner] = self.index[name]
            gap_s[sooner] = np.maximum(at_s[sooner], 0.0)
        return kind, gap_s

    def _run(
        self, left_s: Floats, kind: NDArray[np.int64], done: NDArray[np.bool_], speed: Floats, need_s: Floats, saves: Floats
    ) -> NDArray[np.bool_]:
        """Account for stretches of steps and saves of `left_s` seconds; return whether a checkpoint was made in this start."""
        made = self.made
        cycles = np.floor(left_s / self.cycle_s)
        into_s = left_s - cycles * self.cycle_s
        steps_s = np.minimum(cycles * self.interval_s + np.minimum(into_s, self.interval_s), need_s)
        stall_s = np.minimum(cycles * made.save_s + np.maximum(0.0, into_s - self.interval_s), left_s - steps_s)
        if done.any():
            steps_s[done] = need_s[done]
            stall_s[done] = saves[done] * made.save_s
        self.spent[_CHECKPOINT] += stall_s
        self.spent[_TEARDOWN] += left_s - steps_s - stall_s
        durable = np.minimum(np.maximum(0.0, np.floor((left_s - self.write_s) / self.cycle_s + _EPSILON)), cycles)
        all_kept = done
        write_s = made.write_s["shared"]
        if made.save_s + write_s <= made.grace_s:
            stopped = self.graceful[kind] & ~done & (self._pending_s() <= 0)
            for part, extra_s in ((_CHECKPOINT, made.save_s), (_TEARDOWN, write_s)):
                self.spent[part] += stopped * extra_s
            self.t_s += stopped * (made.save_s + write_s)
            all_kept = done | stopped
        kept_s = np.where(all_kept, steps_s, np.minimum(durable * self.interval_s, steps_s))
        saved = all_kept | (durable > 0)
        rates = np.stack([speed, self.fraction - speed, 1 - self.fraction])
        begin = self._keep(kept_s, rates, saved)
        self._share(begin, durable, speed, all_kept)
        rest_s = steps_s - kept_s
        [onset] = (~done & (kind == self.slow_kind)).nonzero()
        lost_s = rest_s + (self.carry[_PRODUCTIVE] + self.carry[_STRAGGLER] + self.carry[_SHRUNK])
        lost_s[all_kept] = 0.0
        lost_s[onset] = 0.0
        self.spent[_LOST] += lost_s
        carried = self.carry[:, onset] + rest_s[onset] * rates[:, onset]
        self.carry[:] = 0.0
        self.carry[:, onset] = carried
        return saved

    def _keep(self, kept_s: Floats, rates: Floats, saved: NDArray[np.bool_]) -> Floats:
        """Count steps that a checkpoint holds now, and those carried from before; return the work until this stretch.

        rates: [parts carried, N], what counts of a second of steps at full speed, and the excess for a straggler and for fewer nodes.
        """
        begin: Floats = self.kept + self.carry[_PRODUCTIVE]
        now_s = (kept_s * rates + self.carry) * saved
        self.spent[:_CARRIED] += now_s
        self.kept += now_s[_PRODUCTIVE]
        self.carry *= ~saved
        return begin

    def _share(self, begin: Floats, durable: Floats, speed: Floats, all_kept: NDArray[np.bool_]) -> None:
        """Update what shared storage holds: every `saves_per_shared`-th save, and all saves of a planned stop."""
        total = self.since_shared + durable
        shared = np.floor(total / self.saves_per_shared)
        saves = shared * self.saves_per_shared
        work = np.minimum(begin + (saves - self.since_shared) * self.interval_s * speed, self.kept)
        np.copyto(self.kept_shared, work, where=shared > 0)
        np.copyto(self.kept_shared, self.kept, where=all_kept)
        self.since_shared = (total - saves) * ~all_kept

    def _drop(self, done: NDArray[np.bool_]) -> None:
        """Keep the results of the trials whose work is done, and go on with the others."""
        self._record(done)
        for name in _CHANGING:
            setattr(self, name, getattr(self, name)[..., ~done])

    def _record(self, which: NDArray[np.bool_]) -> None:
        for name, results in self.ended.items():
            results[..., self.element[which]] = getattr(self, name)[..., which]

    def end(self) -> NDArray[np.bool_]:
        """Record the results of the trials whose work is never done; return which these are."""
        self._record(np.ones(len(self.element), bool))
        endless = np.zeros(self.size, bool)
        endless[self.element] = True
        return endless

    def _interrupt(self, kind: NDArray[np.int64], saved: NDArray[np.bool_], waits: Floats) -> None:
        """Do what follows an event: detection, replacement, queue, and the next start."""
        made = self.made
        self.counts[kind * self.size + self.element] += 1
        hit = kind != self.slow_kind
        [onset] = (~hit).nonzero()
        if made.stragglers_found:
            first = onset[self.slowness[onset] == 1.0]
            self.found_left_s[first] = made.straggler_found_s
        self.slowness[onset] = 1 + made.straggler_excess
        self._spend(_HANG, self.detection_s[kind])
        [excluded] = (kind == self.straggler_kind).nonzero()
        self.slowness[excluded] = 1.0
        self.found_left_s[excluded] = math.inf
        [memory_lost] = self.loses_memory[kind].nonzero()
        back = self.kept[memory_lost] - self.kept_shared[memory_lost]
        self.spent[_PRODUCTIVE, memory_lost] -= back
        self.spent[_LOST, memory_lost] += back
        self.kept[memory_lost] -= back
        self.since_shared[memory_lost] = 0.0
        node_s = self._replace(self.replaces[kind].nonzero()[0])
        self._requeue(hit, hit & ~self.graceful[kind], saved, waits, np.maximum(node_s, self.outage_s[kind]))
        self._start(hit, memory_lost)

    def _spend(self, part: int, seconds: Floats) -> None:
        self.spent[part] += seconds
        self.t_s += seconds

    def _wait(self, waits: Floats, hit: NDArray[np.bool_]) -> None:
        """Wait for the scheduler (`waits`: [trials], over the mean); other jobs have the nodes, so the time is not paid."""
        if self.made.queue_wait_s > 0:
            scheduler_s = (waits * self.made.queue_wait_s)[self.trial] * hit
            self._spend(_QUEUE, scheduler_s)
            self.unpaid_s += scheduler_s

    def _replace(self, lost: NDArray[np.int64]) -> Floats:
        """Send nodes to repair, and return how long each trial waits until it has all its nodes; no time for a job that shrinks.

        lost: places of the trials that lose one.
        """
        repair_s = self.made.repair_s
        self.away_since[self._slot(self.replaced[lost], lost)] = self.t_s[lost]
        first = lost[self.replaced[lost] == self.returned[lost]]
        self.oldest_back_s[first] = self.t_s[first] + repair_s
        self.replaced[lost] += 1
        self._return_nodes()
        missing = self._missing()
        node_s = np.zeros(len(missing))
        [short] = missing.nonzero()
        if short.size:
            short = short[~self.shrink[short] | (self.goes_on[np.minimum(missing[short], self.made.nodes)] == 0)]
            last = self._slot(np.maximum(self.replaced[short] - 1 - self.spares[short], 0), short)
            node_s[short] = np.maximum(self.away_since[last] + repair_s - self.t_s[short], 0.0)
        return node_s

    def _slot(self, number: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the times of replacements are in `away_since`, of the trials at `places`."""
        slot: NDArray[np.int64] = (number & self.slots - 1) * self.size + self.element[places]
        return slot

    def _missing(self) -> NDArray[np.int64]:
        missing: NDArray[np.int64] = np.maximum(0, self.replaced - self.returned - self.spares)
        return missing

    def _return_nodes(self) -> None:
        [back] = (self.oldest_back_s <= self.t_s + _EPSILON).nonzero()
        while back.size:
            self.returned[back] += 1
            away_s = self.away_since[self._slot(self.returned[back], back)] + self.made.repair_s
            self.oldest_back_s[back] = np.where(self.returned[back] < self.replaced[back], away_s, math.inf)
            back = back[self.oldest_back_s[back] <= self.t_s[back] + _EPSILON]

    def _requeue(self, hit: NDArray[np.bool_], failed: NDArray[np.bool_], saved: NDArray[np.bool_], waits: Floats, other_s: Floats) -> None:
        """Wait for the next start: the pauses and limits of launch/slurm/supervise.sh, the queue, and the missing node or service."""
        made = self.made
        self.failures *= ~(hit & saved)
        self.failures += failed
        own_s = np.full(len(hit), made.requeue_s, np.float64)
        [quick] = (failed & (self.attempt_s < QUICK_S)).nonzero()
        own_s[quick] += requeue_pause_s(self.failures[quick], self.attempt_s[quick])
        stopped = failed & (self.failures >= MAX_FAILURES)
        if made.max_restarts is not None:
            stopped |= hit & (self.restarts >= made.max_restarts)
        own_s[stopped] = made.resubmit_s
        self._spend(_QUEUE, np.maximum(own_s, other_s) * hit)
        self._wait(waits, hit)
        self.restarts += hit
        self.stops += stopped
        self.restarts[stopped] = 0.0
        self.failures[stopped] = 0.0

    def _start(self, hit: NDArray[np.bool_], memory_lost: NDArray[np.int64]) -> None:
        """Begin the next start of the trials that were interrupted. memory_lost: places of those that read from shared storage."""
        made = self.made
        self._return_nodes()
        restore_s = self.restore_s.copy()
        restore_s[memory_lost] = made.restore_s["shared"]
        np.copyto(self.pending[0], made.startup_s, where=hit)
        np.copyto(self.pending[1], made.compile_s, where=hit)
        np.copyto(self.pending[2], restore_s, where=hit)
        if made.spared_until_save:
            np.copyto(self.spared_s, self._until_save(), where=hit)
        np.copyto(self.limit_left_s, made.time_limit_s, where=hit)
        self.attempt_s *= ~hit
        if self.changes_size:
            self._resize(hit)

    def _resize(self, hit: NDArray[np.bool_]) -> None:
        """Set the size of the next start; the job grows as soon as enough nodes are back for a larger one."""
        made = self.made
        missing = np.minimum(self._missing() * self.shrink, made.nodes)
        np.copyto(self.fraction, np.maximum(self.goes_on[missing], self.least_nodes) / made.nodes, where=hit)
        np.copyto(self.grow_left_s, math.inf, where=hit)
        [fewer] = (hit & (self.fraction < 1)).nonzero()
        last = self._slot(np.maximum(self.replaced - self.spares - self.grows_at[missing] - 1, 0)[fewer], fewer)
        self.grow_left_s[fewer] = np.maximum(self.away_since[last] + made.repair_s - self.t_s[fewer], 0.0)


def expected_events(made: Campaign) -> float:
    """Return the expected number of events in the time of the steps alone."""
    return made.work_s * (sum(kind.per_s for kind in kinds(made)) + 1 / made.time_limit_s)


def simulate(made: Campaign, choices: Sequence[Choice], *, trials: int, seed: int) -> list[Outcome]:
    """Simulate every choice in `trials` trials. The same seed gives the same result, and the same luck for every choice."""
    state = _Trials(made, choices, trials, seed)
    most = int(MOST_EVENTS_FACTOR * expected_events(made)) + MOST_EVENTS
    for _ in range(most):
        if not state.element.size:
            break
        state.advance()
    endless = state.end()
    return [_outcome(made, choice, state, endless, slice(row * trials, (row + 1) * trials)) for row, choice in enumerate(choices)]


def _outcome(made: Campaign, choice: Choice, state: _Trials, endless: NDArray[np.bool_], own: slice) -> Outcome:
    results = {name: values[..., own] for name, values in state.ended.items()}
    spent = {part: results["spent"][row].copy() for row, part in enumerate(_PART)}
    spent["lost"] += np.where(endless[own], results["carry"].sum(0), 0.0)
    wall_s = results["t_s"]
    device_s = (made.nodes + choice.spares) * made.devices_per_node * (wall_s - results["unpaid_s"])
    counts = state.counts.reshape(len(state.kinds), state.size)[:, own]
    return Outcome(
        choice=choice,
        seconds={part: spent[part] for part in PARTS},
        wall_s=np.where(endless[own], math.inf, wall_s),
        device_s=np.where(endless[own], math.inf, device_s),
        events={kind.name: counts[i] for i, kind in enumerate(state.kinds) if kind.interrupts},
        stops=results["stops"],
        ended_s=wall_s.copy(),
    )
