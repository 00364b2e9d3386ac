"""Judging figures: planted bad ones are seen, by the cluster file's figures and by the peers, and the right node is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.launch.preflight.checks import GPU_LIMITS, Check, Expected, Verdict, judge_rate
from ridgeline.launch.preflight.host import HostFacts
from ridgeline.launch.preflight.judge_devices import DeviceContext, DeviceFacts, judge_devices, judge_joint
from ridgeline.launch.preflight.judge_gpu import judge_gpus
from ridgeline.launch.preflight.judge_host import HostContext, judge_hosts
from ridgeline.launch.preflight.judge_processes import judge_joint_failures
from ridgeline.launch.preflight.nvml import GpuFacts, GpuReport, merge_load, visible
from ridgeline.launch.preflight.probe_runner import ProbeOutcome
from ridgeline.launch.preflight.report import conclude
from ridgeline.planner.calibration import load_calibration

GIB = 2**30
NODES = ("n0", "n1", "n2", "n3")
DGX = load_cluster("dgx-h100").config
H100 = "NVIDIA H100 80GB HBM3"
MESH = {"pipeline": 1, "data": 4, "fsdp": 8, "context": 1, "tensor": 1, "expert": 1}
GOOD = {
    "devices": {"platform": "gpu", "kinds": [H100], "count": 8, "ids": list(range(8))},
    "arithmetic": [],
    "matmul bfloat16": [700e12] * 8,
    "memory bandwidth": [2.8e12] * 8,
    "mesh": MESH,
    "link 0": 42e9,
    "link 1": 42e9,
    "all-reduce data": [[2**20, 1e-4, 5e9], [2**29, 2e-2, 45e9]],
    "all-reduce fsdp": [[2**20, 1e-4, 15e9], [2**29, 2e-3, 440e9]],
}


def context(cluster: ClusterConfig | None = DGX) -> DeviceContext:
    return DeviceContext(cluster, load_calibration())


def by_name(checks: list[Check], name: str) -> dict[str, Check]:
    return {check.node: check for check in checks if check.name == name}


def devices(**planted: dict[str, object]) -> list[Check]:
    """Judge four good nodes of 8 GPUs, with figures of some nodes planted."""
    facts = [DeviceFacts(node, number, {**GOOD, **planted.get(node, {})}) for number, node in enumerate(NODES)]
    return [*judge_devices(facts, context()), *judge_joint(facts, context())]


def test_four_good_nodes_are_fit() -> None:
    checks = devices()
    assert {check.name for check in checks} == {
        "devices",
        "device kind",
        "arithmetic",
        "matmul bfloat16",
        "memory bandwidth",
        "link to neighbours",
        "all-reduce data",
        "all-reduce fsdp",
    }
    assert {check.verdict for check in checks} == {Verdict.OK}
    assert conclude(NODES, checks, 1.0).fit


def test_a_fabric_that_is_slow_everywhere_is_seen_and_no_node_is_blamed() -> None:
    slow = {"all-reduce data": [[2**20, 1e-3, 1e9], [2**29, 2e-1, 8e9]], "link 0": 6e9, "link 1": 6e9}
    checks = devices(**dict.fromkeys(NODES, slow))
    assert all(check.verdict == Verdict.FAIL for check in by_name(checks, "all-reduce data").values())
    assert all(check.verdict == Verdict.FAIL for check in by_name(checks, "link to neighbours").values())
    assert all(check.verdict == Verdict.OK for check in by_name(checks, "all-reduce fsdp").values())
    report = conclude(NODES, checks, 1.0)
    assert not report.fit
    assert report.unfit == {}
    assert set(report.common) == {"all-reduce data", "link to neighbours"}


@pytest.mark.parametrize(
    ("name", "planted"),
    [("matmul bfloat16", [700e12] * 7 + [480e12]), ("memory bandwidth", [2.8e12] * 7 + [1.9e12])],
)
def test_one_slow_device_makes_its_node_unfit(name: str, planted: list[float]) -> None:
    report = conclude(NODES, devices(n2={name: planted}), 1.0)
    assert list(report.unfit) == ["n2"]
    assert "device 7, the slowest of 8" in report.unfit["n2"]
    assert "median of 4 nodes" in report.unfit["n2"]


def test_of_slow_links_the_node_with_both_is_named() -> None:
    # n1 is bad: its neighbors n0 (round 0) and n2 (round 1) are slow with it and fast with their others.
    report = conclude(NODES, devices(n0={"link 0": 9e9}, n1={"link 0": 9e9, "link 1": 9e9}, n2={"link 1": 9e9}), 1.0)
    assert list(report.unfit) == ["n1"]


def test_wrong_products_and_missing_devices_name_the_node() -> None:
    seven = {"platform": "gpu", "kinds": [H100], "count": 7, "ids": list(range(7))}
    report = conclude(NODES, devices(n1={"arithmetic": ["device 3: 1 of 10 products wrong"]}, n3={"devices": seven}), 1.0)
    assert set(report.unfit) == {"n1", "n3"}
    assert "1 missing" in report.unfit["n3"]


def test_a_part_of_a_node_is_judged_by_what_was_allocated() -> None:
    two = {"platform": "gpu", "kinds": [H100], "count": 2, "ids": [0, 1]}
    (check,) = by_name(
        judge_devices([DeviceFacts("n0", 0, {"devices": two})], replace(context(), expected_devices={"n0": 2})), "devices"
    ).values()
    assert check.verdict == Verdict.OK


def test_devices_that_differ_from_the_cluster_file_are_refused() -> None:
    a100 = {"platform": "gpu", "kinds": ["NVIDIA A100-SXM4-80GB"], "count": 8, "ids": list(range(8))}
    check = by_name(devices(n0={"devices": a100}), "device kind")["n0"]
    assert (check.verdict, check.reason) == (Verdict.FAIL, "a100-80gb instead of h100-sxm")


def test_without_cluster_file_or_figure_nothing_passes_unjudged() -> None:
    cpu = {"platform": "cpu", "kinds": ["cpu"], "count": 1, "ids": [0]}
    facts = [DeviceFacts("n0", 0, {"devices": cpu, "matmul float32": [1e11], "memory bandwidth": [1e10]})]
    checks = judge_devices(facts, context(None))
    assert {check.name: check.verdict for check in checks} == dict.fromkeys(
        ("devices", "device kind", "matmul float32", "memory bandwidth"), Verdict.NOT_APPLICABLE
    )
    both = judge_devices([facts[0], replace(facts[0], node="n1", process=1)], context(None))
    assert by_name(both, "matmul float32")["n1"].reason.startswith("compared with peers only: no expected rate for 'cpu'")


def test_a_cpu_is_judged_by_the_calibration_of_the_machine() -> None:
    shipped = load_calibration()
    from ridgeline.planner.calibration import Calibration
    from ridgeline.planner.calibration_file import MatmulPoint, MemoryPoint

    matmul = MatmulPoint(device="cpu", dtype="float32", m=1024, n=1024, k=1024, tflop_per_s=0.2, source="here")
    memory = MemoryPoint(device="cpu", gb_per_s=20.0, source="here")
    own = Calibration("here", shipped.file.model_copy(update={"matmul": [matmul], "memory": [memory]}))
    cpu = {"platform": "cpu", "kinds": ["cpu"], "count": 1, "ids": [0]}
    facts = [DeviceFacts("n0", 0, {"devices": cpu, "matmul float32": [0.01e12], "memory bandwidth": [19e9]})]
    checks = judge_devices(facts, DeviceContext(load_cluster("local").config, own))
    assert by_name(checks, "matmul float32")["n0"].verdict == Verdict.FAIL
    assert by_name(checks, "memory bandwidth")["n0"].verdict == Verdict.OK


def rate(value: float, expected: float | None, peers: list[float]) -> Check:
    return judge_rate("n0", "x", value, "GB/s", expected=Expected(expected, "the figure"), peers=peers, limits=GPU_LIMITS, fix="mend it")


def test_a_rate_is_held_against_figure_and_peers() -> None:
    assert rate(100, 100, [100, 100]).verdict == Verdict.OK
    assert rate(50, 100, [50, 50]).verdict == Verdict.FAIL
    assert not rate(50, 100, [50, 50]).against_peers
    assert rate(75, 100, [100, 100, 75]).verdict == Verdict.FAIL
    assert rate(75, 100, [100, 100, 75]).against_peers
    assert rate(75, 100, [75, 75]).verdict == Verdict.WARN
    assert rate(200, 100, [200, 200]).verdict == Verdict.WARN
    assert rate(5, None, [5]).verdict == Verdict.NOT_APPLICABLE
    assert rate(75, 100, [75]).fix == "mend it"
    assert rate(100, 100, [100]).fix == ""


HOST = HostFacts(
    node="n0",
    process=0,
    versions={"python": "3.11.2", "jax": "0.10.2", "nvidia driver": "570.1"},
    cpus=224,
    cores=112,
    affinity=list(range(224)),
    quota_cpus=None,
    memory_total_bytes=2000 * GIB,
    memory_available_bytes=1900 * GIB,
    memory_limit_bytes=None,
    shm_total_bytes=1000 * GIB,
    shm_free_bytes=1000 * GIB,
    memlock_bytes=None,
    disk={"path": "/scratch/run", "free_bytes": 10**15, "write_bytes_per_s": 4e9, "written_bytes": 2**28, "error": None},
)


def hosts(cluster: ClusterConfig | None = DGX, checkpoint_bytes: int | None = None, **planted: dict[str, object]) -> list[Check]:
    """Judge the hosts of four good nodes, one process each, with facts of some nodes planted."""
    facts = [replace(HOST, node=node, process=number, **planted.get(node, {})) for number, node in enumerate(NODES)]
    return judge_hosts(facts, HostContext(cluster, 4, dict.fromkeys(NODES, 1), checkpoint_bytes))


def test_good_hosts_are_fit() -> None:
    cluster = DGX.model_copy(update={"slurm": DGX.slurm.model_copy(update={"tasks_per_node": 1})})
    checks = hosts(cluster)
    assert {check.verdict for check in checks} == {Verdict.OK}, [check for check in checks if check.verdict != Verdict.OK]


DISK = HOST.disk or {}


@pytest.mark.parametrize(
    ("name", "planted", "verdict", "reason"),
    [
        ("versions", {"versions": {**HOST.versions, "jax": "0.11.0"}}, Verdict.FAIL, "jax 0.11.0 here, 0.10.2 elsewhere"),
        ("versions", {"versions": {"python": "3.11.2", "jax": "0.10.2"}}, Verdict.FAIL, "nvidia driver absent here, 570.1 elsewhere"),
        ("clock", {"clock_offset_s": -30.0, "clock_error_s": 0.01}, Verdict.FAIL, "differs"),
        ("clock", {"clock_offset_s": 2.0, "clock_error_s": 0.01}, Verdict.WARN, "differs"),
        ("clock", {"clock_offset_s": 12.0, "clock_error_s": 12.0}, Verdict.OK, ""),
        ("cores", {"affinity": [0]}, Verdict.FAIL, "the affinity leaves 1 of"),
        ("cores", {"quota_cpus": 2.0}, Verdict.FAIL, "the control group's quota leaves 2 of"),
        ("memory", {"memory_total_bytes": 1500 * GIB}, Verdict.FAIL, "73% of the cluster file's"),
        ("memory", {"memory_limit_bytes": 64 * GIB}, Verdict.WARN, "3% of the cluster file's"),
        ("free memory", {"memory_available_bytes": 900 * GIB}, Verdict.WARN, "available"),
        ("free memory", {"memory_available_bytes": 90 * GIB}, Verdict.FAIL, "available"),
        ("/dev/shm", {"shm_free_bytes": 64 << 20}, Verdict.FAIL, "loader workers"),
        ("/dev/shm", {"shm_free_bytes": 512 << 20}, Verdict.WARN, "loader workers"),
        ("/dev/shm", {"shm_free_bytes": None, "shm_total_bytes": None}, Verdict.FAIL, "no /dev/shm"),
        ("memlock", {"memlock_bytes": 8 << 20}, Verdict.FAIL, "InfiniBand"),
        ("memlock", {"memlock_bytes": 64 * GIB}, Verdict.WARN, "a limit"),
        ("disk space", {"disk": {**DISK, "free_bytes": 10**8}}, Verdict.FAIL, "/scratch/run has 0.1 GB left"),
        ("disk write", {"disk": {**DISK, "write_bytes_per_s": 1e7}}, Verdict.FAIL, "of the median of 4 nodes"),
        ("disk write", {"disk": {**DISK, "write_bytes_per_s": None, "error": "No space left"}}, Verdict.FAIL, "No space left"),
    ],
)
def test_a_planted_trouble_names_its_node_alone(name: str, planted: dict[str, object], verdict: Verdict, reason: str) -> None:
    cluster = DGX.model_copy(update={"slurm": DGX.slurm.model_copy(update={"tasks_per_node": 1})})
    checks = hosts(cluster, n2=planted)
    found = by_name(checks, name)
    assert found["n2"].verdict == verdict
    assert reason in found["n2"].reason
    assert {check.verdict for node, check in found.items() if node != "n2"} == {Verdict.OK}
    if verdict in (Verdict.WARN, Verdict.FAIL):
        assert found["n2"].fix
    assert list(conclude(NODES, checks, 1.0).unfit) == (["n2"] if verdict == Verdict.FAIL else [])


def test_free_space_is_counted_in_checkpoints_of_the_config() -> None:
    disk = {**DISK, "free_bytes": 10**12}
    assert by_name(hosts(checkpoint_bytes=10**11, n0={"disk": disk}), "disk space")["n0"].verdict == Verdict.OK
    assert by_name(hosts(checkpoint_bytes=4 * 10**11, n0={"disk": disk}), "disk space")["n0"].verdict == Verdict.WARN
    assert by_name(hosts(checkpoint_bytes=10**12, n0={"disk": disk}), "disk space")["n0"].verdict == Verdict.FAIL


def test_tasks_bound_to_the_same_cores_are_seen() -> None:
    facts = [replace(HOST, process=task, affinity=[0, 1]) for task in range(8)]
    (check,) = by_name(judge_hosts(facts, HostContext(DGX, 1, {"n0": 8})), "cores").values()
    assert check.verdict == Verdict.FAIL
    assert check.fix == "pass --cpus-per-task=14 to sbatch and to srun"


GPU = GpuFacts(
    index=0,
    uuid="GPU-a",
    name=H100,
    driver="570.1",
    memory_total_bytes=80 * GIB,
    memory_free_bytes=79 * GIB,
    ecc_enabled=True,
    ecc_uncorrected=0,
    ecc_corrected=3,
    remap_pending=False,
    remap_failed=False,
    retired_pending=None,
    throttle_bits=0x04,
    temperature_c=60,
    power_limit_w=700,
    power_default_w=700,
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    nvlinks_active=18,
    nvlinks=18,
)


@pytest.mark.parametrize(
    ("name", "planted", "verdict", "reason"),
    [
        ("device memory", {"memory_free_bytes": 40 * GIB}, Verdict.FAIL, "50% of the memory"),
        ("device memory", {"memory_free_bytes": None}, Verdict.NOT_APPLICABLE, "not reported"),
        ("ecc", {"ecc_uncorrected": 2}, Verdict.FAIL, "2 uncorrected"),
        ("ecc", {"remap_pending": True}, Verdict.FAIL, "needs a reset"),
        ("ecc", {"remap_failed": True}, Verdict.FAIL, "remapping"),
        ("ecc", {"ecc_enabled": False}, Verdict.WARN, "ECC is off"),
        ("ecc", {"ecc_enabled": None, "ecc_uncorrected": None}, Verdict.NOT_APPLICABLE, "no ECC"),
        ("throttle", {"throttle_bits": 0x44}, Verdict.FAIL, "hardware thermal slowdown under load"),
        ("throttle", {"power_limit_w": 500.0}, Verdict.WARN, "power limit 500 W of 700 W"),
        ("gpu links", {"nvlinks_active": 17}, Verdict.FAIL, "17 of 18 NVLinks"),
        ("gpu links", {"nvlinks_active": 0}, Verdict.WARN, "no NVLink is up"),
        ("gpu links", {"pcie_width": 8}, Verdict.FAIL, "8 of 16 lanes"),
        ("gpu links", {"pcie_generation": 3}, Verdict.WARN, "generation 3 of 5"),
    ],
)
def test_a_troubled_gpu_among_good_ones_is_named(name: str, planted: dict[str, object], verdict: Verdict, reason: str) -> None:
    good = [replace(GPU, index=index, uuid=f"GPU-{index}") for index in range(3)]
    assert {check.verdict for check in judge_gpus("n0", GpuReport(tuple(good)))} == {Verdict.OK}
    bad = replace(GPU, index=3, uuid="GPU-3", **planted)
    (check,) = (check for check in judge_gpus("n0", GpuReport((*good, bad))) if check.name == name)
    assert check.verdict == verdict
    assert check.reason.startswith("GPU 3: ")
    assert reason in check.reason


def test_without_nvml_nothing_passes() -> None:
    checks = judge_gpus("n0", GpuReport((), "no NVIDIA driver"))
    assert len(checks) == 4
    assert {(check.verdict, check.reason) for check in checks} == {(Verdict.NOT_APPLICABLE, "no NVIDIA driver")}


def test_throttling_seen_once_under_load_is_kept_and_free_memory_is_that_from_before() -> None:
    sampled = merge_load(merge_load(GPU, replace(GPU, throttle_bits=0x40, temperature_c=90, memory_free_bytes=0)), GPU)
    assert sampled == replace(GPU, throttle_bits=0x44, temperature_c=90)


@pytest.mark.parametrize(
    ("setting", "kept"), [(None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("GPU-1", [1]), ("1,7,2", [1]), ("-1", []), ("NoDevFiles", [])]
)
def test_only_visible_gpus_are_judged(setting: str | None, kept: list[int]) -> None:
    gpus = [replace(GPU, index=index, uuid=f"GPU-{index}") for index in range(3)]
    assert [gpu.index for gpu in visible(gpus, setting)] == kept


def outcome(done: int, **fields: object) -> ProbeOutcome:
    return ProbeOutcome(results={str(number): 0 for number in range(done)}, **fields)  # type: ignore[arg-type]


def test_of_processes_that_wait_for_each_other_the_cause_is_named() -> None:
    node_of = dict(enumerate(NODES))
    waits = outcome(3, hung_in="all-reduce data", hung_s=40.0)
    dead = outcome(3, died_in="all-reduce data", death="killed by signal 9")
    checks = judge_joint_failures({0: waits, 1: waits, 2: dead, 3: waits}, node_of)
    assert list(conclude(NODES, checks, 1.0).unfit) == ["n2"]
    assert by_name(checks, "all-reduce data")["n0"].reason.startswith("waited for n2: ")
    # one node is a measurement behind the others: they wait for it
    behind = outcome(2, hung_in="link 1", hung_s=40.0)
    assert list(conclude(NODES, judge_joint_failures({0: waits, 1: behind, 2: waits, 3: waits}, node_of), 1.0).unfit) == ["n1"]
    # a process that lost its connections ended too, but at a later measurement than the one that hung
    lost = outcome(3, died_in="all-reduce data", death="killed by signal 6")
    assert list(conclude(NODES, judge_joint_failures({0: waits, 1: behind, 2: lost, 3: waits}, node_of), 1.0).unfit) == ["n1"]
    # all are at the same one: no node is the cause
    report = conclude(NODES, judge_joint_failures(dict.fromkeys(range(4), waits), node_of), 1.0)
    assert report.unfit == {}
    assert "within 40 s" in report.common["all-reduce data"]
