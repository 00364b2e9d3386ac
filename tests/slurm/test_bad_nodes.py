"""Nodes that are slow, hold wrong bits, or fail the preflight, on a real Slurm: named and excluded; the job goes on on others, bitwise."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.launch.exit_codes import BAD_NODE, CORRUPTION, DONE, PREEMPTED
from ridgeline.rundir.bad_nodes import read_bad_nodes
from tests.slurm import jobs

STEPS = jobs.STEPS
WAIT = "slurm.srun_options=[--wait=15]"
Arrays = Mapping[str, np.ndarray]


def test_a_node_that_is_slow_for_long_is_replaced(slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays) -> None:
    """One of the two nodes computes three times as long: named, added to bad_nodes, and the job goes on on another node, bitwise."""
    # sqrt(3) - 1 is midway: steps of a few ms on a busy machine differ by more than the default of 10 % between nodes that are not slow
    overrides = ["stragglers.replace_after=3", f"stragglers.threshold={math.sqrt(3) - 1:.2f}"]
    own = {"pace_s": 0.1, "hold": False, "programs": programs, "overrides": overrides}
    run = jobs.submit(slurm, tmp_path, corpus, "slow", steps=STEPS, cluster=[WAIT], slow=("node02", 2.0, 3), **own)
    run.finishes()
    assert run.restarts() == 1, run.log
    assert "node02" not in run.nodes() and len(run.nodes()) == 2, run.log
    assert run.codes() == [PREEMPTED, DONE], run.log
    assert re.fullmatch(r"straggler: \d+% slower for \d+ steps", read_bad_nodes(run.directory)["node02"]), run.log
    [named] = [event for event in run.events() if event.kind == "straggler"]
    assert named.fields["node"] == "node02" and named.fields["step"] <= 23
    run.nothing_was_lost()
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_node_with_a_flipped_bit_is_excluded_and_the_steps_since_the_last_good_check_are_repeated(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays
) -> None:
    """Found before the checkpoint of step 40 is saved: the run goes on from that of step 20."""
    element, bit = (int(x) for x in np.random.default_rng().integers(0, (1 << 20, 32)))
    run = jobs.submit(
        slurm,
        tmp_path,
        corpus,
        "flipped",
        steps=STEPS,
        cluster=[WAIT],
        programs=programs,
        overrides=["corruption_check.every=15"],
        flip=("node02", 33, "opt_state", element, bit),
    )
    run.finishes()
    assert run.codes() == [CORRUPTION, DONE], run.log
    [found] = [event.fields for event in run.events() if event.kind == "corruption"]
    assert (found["step"], found["check"], found["good_step"], found["nodes"]) == (33, "memory", 30, ["node02"]), (found, element, bit)
    assert list(read_bad_nodes(run.directory)) == ["node02"]
    assert "node02" not in run.nodes() and len(run.nodes()) == 2, run.log
    [restored] = [e.fields for e in run.events() if e.kind == "phase_end" and e.fields["phase"] == "restore" and e.restart == 1]
    assert restored["step"] == 20, run.log
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_node_that_fails_the_preflight_is_excluded_before_the_first_step(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays
) -> None:
    """node02 has another version of a library: doctor names it, the job is requeued without it."""
    shadow = tmp_path / "shadow" / "flax-0.0.1.dist-info"
    shadow.mkdir(parents=True)
    (shadow / "METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 0.0.1\n")
    other = f'if [ "$SLURMD_NODENAME" = node02 ]; then export PYTHONPATH="{shadow.parent}:$PYTHONPATH"; fi'
    # the preflight must not judge how busy this machine's disk is
    cluster = [WAIT, "storage.write_gb_per_s=0.001"]
    run = jobs.submit(slurm, tmp_path, corpus, "unfit", steps=STEPS, cluster=cluster, programs=programs, preflight=True, shell=other)
    run.finishes()
    assert run.codes() == [BAD_NODE, DONE], run.log
    assert "flax 0.0.1 here" in read_bad_nodes(run.directory)["node02"]
    assert list(read_bad_nodes(run.directory)) == ["node02"]
    assert "node02" not in run.nodes() and len(run.nodes()) == 2, run.log
    assert run.restarts() == 1, run.log
    jobs.assert_bitwise_equal(run.arrays(), reference)
