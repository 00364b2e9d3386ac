"""A real Slurm for these tests, one cluster per worker. `make test-slurm` installs Slurm if permitted."""

import os
from pathlib import Path

import pytest

from tests.sampling import drawn
from tests.slurm import jobs
from tests.slurm.cluster import PATIENT_S, USUAL_S, SlurmCluster, running
from tests.slurm.shared import Shared, worker, workers
from tests.slurm.soak import MEASURE_MINUTES, MINUTES

HERE = Path(__file__).parent
LONGEST = (
    "test_a_run_under_faults_ends_bitwise_equal_explained_and_flat",
    "test_a_job_goes_on_with_three_and_two_nodes_and_with_four_again",
    "test_a_job_whose_script_is_lost_with_its_node_goes_on_on_others",
    "test_a_signal_in_every_phase_is_honored_and_nothing_is_lost",
    "test_runs_interrupted_at_random_moments_all_save_and_resume",
    "test_the_time_limit_saves_and_requeues",
    "test_a_rank_that_never_comes_is_named_by_its_host",
    "test_a_node_that_goes_down_is_replaced",
    "test_a_rank_that_is_alive_but_stuck_is_found_by_the_watchdog",
    "test_a_preempted_run_saves_requeues_and_ends_bitwise_equal",
)
"""Started first, so that the workers finish at about the same time."""
MOST = 24
"""Tests that run per commit, and the soak (FULL=1: all)."""


def pytest_collection_modifyitems(config, items):
    own = [item for item in items if HERE in item.path.parents]
    if len(own) > MOST:
        kept = {*drawn(own, MOST), *(item for item in own if item.originalname == LONGEST[0])}
        config.hook.pytest_deselected(items=[item for item in own if item not in kept])
        own = [item for item in own if item in kept]
        items[:] = [item for item in items if HERE not in item.path.parents or item in kept]
    for item in own:
        item.add_marker(pytest.mark.slurm)
        item.add_marker(pytest.mark.timeout(1500))  # whole jobs, requeued several times, on two cores
    if workers() > 1 and len(own) == len(items):
        rank = {name: index for index, name in enumerate(LONGEST)}
        first = sorted(own, key=lambda item: rank.get(item.originalname, len(rank)))
        # --dist worksteal gives each worker a contiguous part of the list
        items[:] = [item for index in range(workers()) for item in first[index :: workers()]]


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return Shared(tmp_path_factory)


@pytest.fixture(scope="session")
def slurm_session(tmp_path_factory, shared):
    if missing := SlurmCluster.missing():
        why = f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurmctld slurmd slurm-client munge"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    # how long Slurm takes to give up a lost node decides the goodput of a long soak
    limits_s = USUAL_S if MINUTES >= MEASURE_MINUTES else PATIENT_S
    with running(tmp_path_factory.mktemp("slurm"), worker() or 0, shared.lock("ports"), limits_s) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_session):
    """A cluster of four idle nodes without jobs."""
    yield slurm_session
    slurm_session.clear()


@pytest.fixture(scope="session")
def corpus(shared):
    """A tiny corpus with a held-out set, shared by all workers."""
    return shared.once("corpus", jobs.prepare_corpus)


@pytest.fixture(scope="session")
def programs(shared):
    """Compilation cache shared by all runs."""
    return shared.path("programs")


@pytest.fixture(scope="session")
def reference(slurm_session, shared, corpus, programs):
    """Final state of an uninterrupted run of two ranks, with which the interrupted runs are compared."""

    def make(directory):
        run = jobs.submit(slurm_session, directory, corpus, "reference", steps=jobs.STEPS, programs=programs)
        run.finishes()
        assert run.restarts() == 0
        return run.directory

    return jobs.arrays(shared.once("reference", make))
