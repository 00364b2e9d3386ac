"""Lost ranks and nodes on a real Slurm: the others exit in bounded time with the cause; the job requeues and finishes, bitwise equal."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.launch.exit_codes import DONE, HANG, LOST_PEER, PREEMPTED, TAKEN_OVER
from tests.slurm import jobs

STEPS, PACE_S = jobs.STEPS, 0.05
WAIT_S = 15
"""How long srun waits for the other ranks once one has ended."""
WAIT = f"slurm.srun_options=[--wait={WAIT_S}]"
GONE = "another process of the run is gone|another task died"
"""ridge's message, or JAX's if its coordination client ends the process first."""
Arrays = Mapping[str, np.ndarray]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_of_a_killed_rank_ends_saying_so(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays, rank: int
) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "killed", steps=STEPS, pace_s=PACE_S, cluster=[WAIT], programs=programs)
    run.reaches(30)
    os.kill(jobs.ranks(run)[rank], signal.SIGKILL)
    run.finishes()
    assert run.restarts() == 1
    said = jobs.lines_about(run.log, f"^{1 - rank}: .*({GONE})")
    assert said, run.log
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_rank_that_is_alive_but_stuck_is_found_by_the_watchdog(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays
) -> None:
    overrides = ["trainer.hang_timeout_s=15"]
    run = jobs.submit(slurm, tmp_path, corpus, "stuck", steps=STEPS, pace_s=PACE_S, cluster=[WAIT], programs=programs, overrides=overrides)
    run.reaches(30)
    os.kill(jobs.ranks(run)[1], signal.SIGSTOP)
    run.finishes()
    assert run.restarts() == 1
    assert jobs.lines_about(run.log, "^0: .*hang: no progress for"), run.log
    stacks, report = (run.directory / "stacks.0.txt").read_text(), (run.directory / "hang.0.txt").read_text().splitlines()
    assert "Thread" in stacks
    assert "libpython" in stacks or "jaxlib" in stacks or ".so" in stacks  # the C frames of py-spy
    assert re.match(r"suspect: process 1 .*, which does not answer", report[0]), report
    waits = r"(process 0 on node01 waits in|the first collective of a step is) (all|reduce|collective)-\S+ .*process 1"
    assert re.match(waits, report[1]), report
    assert [event.fields["phase"] for event in run.events() if event.kind == "hang"] == ["a step"]
    assert HANG in jobs.codes_said(run.log)
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_node_that_goes_down_is_replaced(slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "lost", steps=STEPS, pace_s=PACE_S, cluster=[WAIT], programs=programs)
    run.reaches(30)
    down = run.nodes()[1]
    slurm.stop_node(down)
    run.finishes()
    assert run.restarts() >= 1
    assert down not in run.nodes()
    assert jobs.lines_about(run.log, f"^0: .*({GONE})"), run.log
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_requeued_run_stops_the_one_that_lives_on_behind_lost_node_daemons(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays
) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "fenced", steps=STEPS, pace_s=PACE_S, cluster=[WAIT], programs=programs)
    run.reaches(30)
    first, old = run.nodes(), jobs.ranks(run)
    for node in first:
        slurm.stop_node(node, processes=False)
    run.finishes()
    assert run.restarts() == 1
    assert not set(first) & set(run.nodes())
    assert len(old) == 2 and not [pid for pid in old.values() if Path(f"/proc/{pid}").exists()]
    assert jobs.lines_about(run.log, f"task 0: Exited with exit code {TAKEN_OVER}"), run.log
    restarted = next(index for index, event in enumerate(run.events()) if event.restart == 1)
    assert {event.restart for event in run.events()[restarted:]} == {1}  # the first start wrote nothing more
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_rank_that_never_comes_is_named_by_its_host(slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays) -> None:
    overrides = ["runtime.rendezvous_timeout_s=30"]
    strikes = [["start", "never", 1]]
    run = jobs.submit(
        slurm, tmp_path, corpus, "absent", steps=STEPS, strikes=strikes, cluster=[WAIT], programs=programs, overrides=overrides
    )
    first = run.nodes_once_running()
    run.finishes()
    assert run.restarts() == 1
    assert LOST_PEER in jobs.codes_said(run.log)
    assert jobs.lines_about(run.log, f"^0: ridge: stopped: .*{first[1]}"), run.log
    assert run.codes()[-1] == DONE
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_killed_step_daemon_costs_no_step(slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays) -> None:
    """Its rank lives on, and nobody reads what it prints. srun waits for the daemon for WAIT_S and KillWait after the other rank's end."""
    run = jobs.submit(slurm, tmp_path, corpus, "daemon", steps=STEPS, pace_s=0.1, hold=False, cluster=[WAIT], programs=programs)
    run.reaches(30)
    slurm.kill_step_daemon(run.nodes()[0], run.job)
    slurm.until(lambda: run.step() == STEPS, 60, f"the last step\n{run.log}")
    begin_s = time.monotonic()
    run.finishes()
    print(f"the job ended {time.monotonic() - begin_s:.0f} s after the run")
    assert (run.restarts(), run.codes()) == (0, [DONE])
    assert (run.directory / "train.log").read_text().splitlines()[-1].endswith(f"finished at step {STEPS}")
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_signal_to_the_script_alone_reaches_the_ranks(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays
) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "script", steps=STEPS, pace_s=PACE_S, programs=programs)
    run.reaches(30)
    slurm.run("scancel", "--batch", "--signal=TERM", run.job)
    run.finishes()
    assert (run.restarts(), run.codes()) == (1, [PREEMPTED, DONE])
    run.nothing_was_lost()
    jobs.assert_bitwise_equal(run.arrays(), reference)
