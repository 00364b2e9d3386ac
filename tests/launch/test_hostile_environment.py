"""Environment variables with any content: a described cluster or one line, in bounded time and memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Mapping

import pytest

from ridgeline.cli.commands.train import GRACE, _grace_s
from ridgeline.configs.environment import MOST
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.schema import RuntimeConfig
from ridgeline.launch.cluster import slurm
from ridgeline.launch.cluster.detect import LOCAL_PROCESS, LOCAL_PROCESSES, describe, summary
from ridgeline.launch.cluster.network import split_port
from ridgeline.launch.cluster.slurm_nodes import expand
from ridgeline.launch.environment import PINNED_LIMIT, Host, choose
from ridgeline.observe.clocks import visible
from ridgeline.rundir.bad_nodes import node_name, restarts_without_them
from ridgeline.rundir.lease import this_process
from tests.launch.test_cluster_detect import step

OTHERS = {
    "Open MPI": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.0.0.1:4711",
        "PMIX_NAMESPACE": "prterun-x@1",
        "MASTER_ADDR": "node01",
    },
    "PMI": {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "RIDGE_COORDINATOR": "node01:1234"},
    "PALS": {"PALS_SIZE": "4", "PALS_RANKID": "2", "PALS_LOCAL_SIZE": "2", "PALS_LOCAL_RANKID": "0", "MASTER_ADDR": "node01"},
    "Kubernetes": {
        "JOB_COMPLETION_INDEX": "1",
        "RIDGE_PROCESSES": "4",
        "NNODES": "4",
        "HOSTNAME": "train-1",
        "JOBSET_NAME": "train",
        "JAX_COORDINATOR_ADDRESS": "train-0:1234",
        "JAX_PROCESS_ID": "1",
        "JAX_NUM_PROCESSES": "4",
    },
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": "29500",
    },
    "ridge launch": {LOCAL_PROCESSES: "2", LOCAL_PROCESS: "1"},
}
"""Launcher -> what it sets."""
ALSO = {
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_DISTRIBUTION": "cyclic",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    GRACE: "30",
}
NUMBERS = [
    "",
    "0",
    "-1",
    "1",
    "3",
    "7",
    "65536",
    "1" + "0" * 12,
    "9" * 30,
    "9" * 5000,
    "1e3",
    "0x4",
    " 4",
    "4 ",
    "٤",
    "²",
    "1.5",
    "nan",
    "inf",
]
LISTS = [
    ",",
    "0,",
    ",,1",
    "node[1-3",
    "n[3-1]",
    "n[1-99999999999]",
    "n[1-2000]m[1-2000]",
    "2(x3)",
    "1(x" + "9" * 11 + ")",
    "2(x",
    "[" * 3000,
]
TEXTS = ["x" * 100_000, "a\nb", "\x1b[31m", "node01:", ":1", "[::1]:99999", "node01:99999", "tcp://", "\udcff", "::", "{}", "%s", "../../x"]


def hostile(rng: random.Random) -> dict[str, str]:
    """Return the variables of some launchers, some of them missing, some with other content."""
    env: dict[str, str] = {}
    for made in rng.sample([step(rng.randrange(4)), *OTHERS.values()], rng.choice((1, 1, 1, 2))):
        env |= made
    env |= {name: value for name, value in ALSO.items() if rng.random() < 0.3}
    for name in rng.sample(sorted(env), min(len(env), rng.choice((1, 1, 2, 4)))):
        if rng.random() < 0.25:
            del env[name]
        else:
            env[name] = rng.choice(rng.choice((NUMBERS, NUMBERS, LISTS, TEXTS)))
    return env


def read(env: Mapping[str, str], resolves: bool) -> None:
    """Read all that a start reads."""
    runtime = RuntimeConfig()
    slurm.cpus_per_task(env)
    slurm.node_list(env)
    node_name(env)
    restarts_without_them(env)
    this_process(60.0, env)
    found = describe(
        env,
        hostnames=lambda text: (expand(text), "test"),
        addresses=lambda host: (["10.0.0.1"] * resolves, "test"),
        ancestry=lambda: ["bash", "slurmstepd"],
        gpus=lambda: 4,
    )
    assert 0 <= found.process < found.processes
    assert all(0 < port < 65536 for port in found.ports)
    assert found.devices.error is None or "\n" not in found.devices.error[1]
    assert all("\n" not in line and "\x1b" not in line for line in summary(found, runtime, env))


def test_any_variables_give_a_cluster_or_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(10**6)
    rng, refused = random.Random(seed), 0
    for number in range(1500):
        env = hostile(rng)
        tracemalloc.start()
        begin_s = time.thread_time()
        try:
            read(env, resolves=rng.random() < 0.7)
            message = ""
        except UserError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {number}: {env}") from error
        refused += message != ""
        assert "\n" not in message and len(message) < 1000, (seed, number, env)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 300e6, (seed, number, peak_bytes, env)
        assert time.thread_time() - begin_s < 20, (seed, number, env)
    assert 100 < refused < 1400
    for text in (*NUMBERS, *LISTS):
        monkeypatch.setenv(GRACE, text)
        try:
            grace_s = _grace_s()
        except UserError:
            continue
        assert grace_s is not None and 0 <= grace_s < float("inf"), text


def test_numbers_within_values_are_whole_numbers_or_refused() -> None:
    config = load("quickstart", []).config
    for number in NUMBERS:
        size = int(number) if number.isascii() and number.isdigit() and len(number) < 30 else None
        assert split_port(f"node01:{number}") == (("node01", size) if size is not None and 0 < size < 65536 else None), number
        assert visible({0: "GPU-a", 3: "GPU-b"}, number) == ([size] if size in (0, 3) else []), number
        if size is None or not 158 <= size <= MOST:
            with pytest.raises(UserError) as refused:
                choose(Host(None, "9.9", None, 158), config, {PINNED_LIMIT: number}, lambda flags: [])
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 500, number
        else:
            (kept,) = choose(Host(None, "9.9", None, 158), config, {PINNED_LIMIT: number}, lambda flags: [])
            assert kept.value == number
