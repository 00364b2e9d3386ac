"""The real Slurm cluster that these tests share. `make test-slurm` installs Slurm where it may."""

import os
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, running

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.timeout(1500))  # whole jobs, requeued several times, on two cores


@pytest.fixture(scope="session")
def slurm_session(tmp_path_factory):
    if missing := SlurmCluster.missing():
        why = f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurmctld slurmd slurm-client munge"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_session):
    """A cluster of four idle nodes without jobs."""
    yield slurm_session
    slurm_session.clear()
