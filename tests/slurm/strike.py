"""Runs `ridge` as a rank of a test, slowed down or struck at a chosen place: `python strike.py PLAN.json -m ridgeline train ...`.

Functions of the project are wrapped, not replaced, so that a signal arrives during a chosen phase. The plan holds `strikes`, by restart
(null: none), `pace_s`, a pause per step while the loop waits for data, `step_s`, one within the step, and `hold_at`: the first start makes
no step after that one until it has received SIGTERM, `slow`, [node, share, step]: from that step on the ranks of the node compute so much
longer (tests/trainer/straggler_run.py), and `flip`, [node, step, array, element, bit]: before that step a bit of the node's device is
flipped (tests/trainer/bit_flips.py; `array` is the beginning of its name), once.

A strike is [place, how, rank]; `how` is "job" (Slurm signals all ranks, as in a preemption), "rank" (one rank gets SIGTERM), or "never"
(the rank does not start).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARRIVES_WITHIN_S = 600.0
CALL = 5
"""Places passed at each step are struck at this one."""


class Strike:
    """One strike of this start, in the rank it is for."""

    def __init__(self, plan: dict[str, Any], record: Path) -> None:
        restart, rank = int(os.environ.get("SLURM_RESTART_COUNT", "0")), int(os.environ.get("SLURM_PROCID", "0"))
        strikes = plan["strikes"]
        chosen = strikes[restart] if restart < len(strikes) else None
        self.place, self.how, wanted = chosen or (None, None, None)
        if wanted != rank:
            self.place = None
        self.restart, self.record = restart, record
        self.stop: Any = None
        """The process's trainer.stop.Stop, once it is installed."""

    def at(self, place: str) -> None:
        """Strike once, and wait here until the signal has arrived."""
        if place != self.place:
            return
        self.place = None
        with self.record.open("a") as file:
            file.write(json.dumps({"restart": self.restart, "place": place}) + "\n")
        if self.how == "job":
            # in a process group of its own: Slurm signals that of the rank, and with it a scancel that has not ended yet
            subprocess.run(["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]], check=True, start_new_session=True)
        elif self.how == "rank":
            os.kill(os.getpid(), signal.SIGTERM)
        while self.how == "never":
            time.sleep(1)
        self.wait_until_asked()

    def wait_until_asked(self) -> None:
        """Wait until this process has received SIGTERM and, in the loop, all processes have agreed on the step."""
        end = time.monotonic() + ARRIVES_WITHIN_S
        while not self._asked() and time.monotonic() < end:
            time.sleep(0.05)

    def _asked(self) -> bool:
        stop = self.stop
        return stop is not None and stop.requested is not None and (not stop._shared or stop._stop_at is not None)


def wrap(owner: Any, name: str, before: Callable[[], None]) -> None:
    """Call `before` before each call of a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def break_node(slow: Any, flip: Any, flipped: Path) -> None:
    """Make this node slow, or flip a bit in the memory of its device, where the plan says so."""
    sys.path.append(str(Path(__file__).parents[2]))
    node = os.environ["SLURMD_NODENAME"]
    if slow is not None and slow[0] == node:
        importlib.import_module("tests.trainer.straggler_run").slow_down(*slow[1:])
    if flip is not None and flip[0] == node:
        from ridgeline.trainer.checkpoint.payload import named_leaves

        bits = importlib.import_module("tests.trainer.bit_flips")
        _, step, array, element, bit = flip

        def act(state: Any) -> None:
            if flipped.exists():
                return
            flipped.touch()
            leaf = next(leaf for name, leaf in named_leaves(state).items() if name.startswith(array))
            bits.flip(leaf, leaf.addressable_shards[0].device.id, element, bit)

        bits.before_step(step, act)


def install(strike: Strike, plan: dict[str, Any]) -> None:
    """Wrap the places a strike may happen at, without loading JAX."""
    from ridgeline.rundir.events import EventLog
    from ridgeline.trainer.stop import Stop

    take_over = Stop.install

    def found(self: Stop) -> Stop:
        strike.stop = self
        return take_over(self)

    Stop.install = found  # type: ignore[method-assign]

    # in process 0, once all processes have registered: each has installed its handler by then
    wrap(importlib.import_module("ridgeline.launch.cluster.rendezvous_server").Server, "_probe", lambda: strike.at("rendezvous"))
    phase = EventLog.phase

    @contextlib.contextmanager
    def struck_phase(self: EventLog, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        if name in ("init", "restore"):
            break_node(plan["slow"], plan["flip"], strike.record.with_suffix(".flipped"))
        if name == "train":
            install_loop(strike, plan["pace_s"], plan["hold_at"], plan["step_s"])
        with phase(self, name, **fields) as record:
            strike.at(name)
            yield record

    EventLog.phase = struck_phase  # type: ignore[method-assign, assignment]


def install_loop(strike: Strike, pace_s: float, hold_at: int | None, step_s: float) -> None:
    """Wrap the places of the loop: it is loaded by now."""
    from ridgeline.trainer.loop import Loop

    calls = {"data_wait": 0, "step": 0}

    def count(place: str) -> None:
        calls[place] += 1
        if calls[place] == CALL:
            strike.at(place)

    wrap(Loop, "_begin", lambda: strike.at("first_step"))
    take = Loop._next_batch

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        count("data_wait")
        time.sleep(pace_s)
        if strike.restart == 0 and calls["data_wait"] == hold_at:
            strike.wait_until_asked()
        yield next(batches)

    Loop._next_batch = lambda self, batches: take(self, slow(batches))  # type: ignore[method-assign]
    wrap(Loop, "_read_pending", lambda: count("step"))
    if step_s:
        wrap(Loop, "_before_step", lambda: time.sleep(step_s))


def main() -> None:
    """Run the command behind the plan."""
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    sys.argv = ["ridge", *sys.argv[4:]]
    strike = Strike(plan, path.with_suffix(".strikes"))
    strike.at("start")
    install(strike, plan)
    from ridgeline.cli.main import main as ridge

    ridge()


if __name__ == "__main__":
    main()
