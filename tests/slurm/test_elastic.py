"""Elastic jobs on a real Slurm: fewer nodes after losses, all of them again when they return, and a spare in the same allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.rundir.allocations import read_allocations
from ridgeline.rundir.jobs import read_attempts
from tests.slurm import jobs

WAIT = "slurm.srun_options=[--wait=5]"
MODEL = ("model.embed_dim=24", "model.mlp_dim=48", "data.batch_size=24", "checkpoint.every=5")


def losses(run: jobs.Run) -> dict[int, float]:
    """Return step -> loss; of a repeated step the last one."""
    return {event.fields["step"]: event.fields["loss"] for event in run.events() if event.kind == "step"}


def undisturbed(slurm: Any, directory: Path, corpus: Path, programs: Path, steps: int) -> dict[int, float]:
    """Return the losses of one process on one device, without a job."""
    (directory / "alone").mkdir()
    config = jobs.write_config(directory / "alone", corpus, "alone", steps, programs)
    slurm.run(jobs.RIDGE, "train", config, *MODEL, env=jobs.environment(), cwd=directory)
    return losses(jobs.Run(slurm, directory / "alone" / "alone", ""))


def assert_equal_losses(run: jobs.Run, expected: dict[int, float]) -> None:
    found = losses(run)
    assert found.keys() == expected.keys(), run.log
    np.testing.assert_allclose([found[step] for step in sorted(found)], [expected[step] for step in sorted(found)], rtol=2e-5)


def starts(run: jobs.Run) -> int:
    """Return the number of starts that have made a step."""
    return len({event.restart for event in run.events() if event.kind == "step"})


def makes_a_step(run: jobs.Run, start: int) -> None:
    run.slurm.until(lambda: starts(run) >= start, 300, f"a step of start {start}\n{run.log}")
    before = run.saved()
    run.slurm.until(lambda: run.saved() > before, 300, f"a checkpoint of start {start}\n{run.log}")


def test_a_job_goes_on_with_three_and_two_nodes_and_with_four_again(slurm: Any, tmp_path: Path, corpus: Path, programs: Path) -> None:
    """node04 and node03 are lost, one after the other: the job restarts in its allocation. Both return: it is requeued for 4 nodes."""
    steps = 120
    overrides = [*MODEL, "elastic.min_nodes=2", "elastic.grow_minutes=0.05"]
    run = jobs.submit(
        slurm,
        tmp_path,
        corpus,
        "elastic",
        steps=steps,
        nodes=4,
        pace_s=0.2,
        hold=False,
        cluster=[WAIT],
        programs=programs,
        overrides=overrides,
    )
    makes_a_step(run, 1)
    slurm.stop_node("node04")
    makes_a_step(run, 2)
    assert run.restarts() == 0, "in the same allocation"
    slurm.stop_node("node03")
    makes_a_step(run, 3)
    assert run.restarts() == 0
    for node in ("node03", "node04"):
        slurm.start_node(node)
    run.finishes()
    assert [allocation.nodes for allocation in read_allocations(run.directory)] == [4, 3, 2, 4], run.log
    record = json.loads((run.directory / "run.json").read_text())
    assert [start["devices"]["count"] for start in record["starts"]] == [4, 3, 2, 4]
    assert_equal_losses(run, undisturbed(slurm, tmp_path, corpus, programs, steps))
    told = slurm.run(jobs.RIDGE, "status", run.directory).stdout
    assert "4 -> 3 -> 2 -> 4 nodes" in told, told
    told = slurm.run(jobs.RIDGE, "goodput", run.directory).stdout
    assert "on fewer nodes than requested" in told, told


def test_a_job_whose_script_is_lost_with_its_node_goes_on_on_others(slurm: Any, tmp_path: Path, corpus: Path, programs: Path) -> None:
    """node01 runs the job script: a process on another node finds it gone and has the job requeued."""
    steps, overrides = 40, [*MODEL, "elastic.min_nodes=2"]
    run = jobs.submit(
        slurm,
        tmp_path,
        corpus,
        "scriptless",
        steps=steps,
        nodes=3,
        pace_s=0.2,
        hold=False,
        cluster=[WAIT],
        programs=programs,
        overrides=overrides,
    )
    makes_a_step(run, 1)
    slurm.stop_node("node01")
    run.finishes()
    assert run.restarts() == 1, run.log
    used = read_allocations(run.directory)
    assert [one.nodes for one in used] == [3, 3] and "node01" not in used[-1].names, run.log
    assert_equal_losses(run, undisturbed(slurm, tmp_path, corpus, programs, steps))


def test_a_spare_replaces_a_lost_node_without_a_new_wait(slurm: Any, tmp_path: Path, corpus: Path, programs: Path) -> None:
    steps = 40
    overrides = [*MODEL, "elastic.spares=1"]
    run = jobs.submit(
        slurm,
        tmp_path,
        corpus,
        "spare",
        steps=steps,
        nodes=2,
        pace_s=0.2,
        hold=False,
        cluster=[WAIT],
        programs=programs,
        overrides=overrides,
    )
    makes_a_step(run, 1)
    slurm.stop_node("node02")
    run.finishes()
    assert run.restarts() == 0
    used = read_allocations(run.directory)
    assert [(one.job, one.names, one.spare_names) for one in used] == [
        (int(run.job), "node01,node02", "node03"),
        (int(run.job), "node01,node03", ""),
    ]
    first, second = read_attempts(run.directory)
    assert second.begin - first.end < 60, "no time in the queue"
    assert_equal_losses(run, undisturbed(slurm, tmp_path, corpus, programs, steps))
