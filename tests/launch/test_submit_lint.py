"""What `ridge submit` refuses or warns of before a job waits in the queue."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.configs.cluster import ClusterConfig, cluster_names, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.mesh import with_mesh
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm import filesystems, lint
from ridgeline.launch.slurm.elastic import elastic_job
from ridgeline.launch.slurm.filesystems import Mount
from ridgeline.launch.slurm.lint import Finding
from ridgeline.launch.slurm.shape import job_shape, placed
from ridgeline.launch.slurm.units import format_time, parse_memory_bytes, parse_time_s
from ridgeline.planner.hardware import hardware
from ridgeline.planner.memory import memory_per_device
from ridgeline.planner.policy import elastic_config

SHARED = [Mount(Path("/"), "overlay"), Mount(Path("/gpfs"), "gpfs"), Mount(Path("/home"), "ext4"), Mount(Path("/ram"), "tmpfs")]


@pytest.fixture(autouse=True)
def _writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every directory as it is named: these paths exist on no test machine."""
    monkeypatch.setattr(filesystems, "existing_parent", lambda path: path)
    monkeypatch.setattr(filesystems, "writable", lambda path: "readonly" not in path.parts)


def findings(
    cluster: str = "mn5-acc",
    nodes: int = 2,
    time: str | None = "12:00:00",
    *,
    cluster_set: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
) -> list[Finding]:
    site = load_cluster(cluster, ["slurm.account=a", "slurm.qos=q", *cluster_set]).config
    config = load("models/llama-3.2-1b", ["run_dir=/gpfs/runs/r", "data.batch_size=64", *overrides]).config
    return lint.lint(placed(config, site), site, job_shape(site, nodes, time), SHARED)


def errors(found: list[Finding]) -> list[str]:
    return [finding.message for finding in found if finding.error]


def warnings(found: list[Finding]) -> list[str]:
    return [finding.message for finding in found if not finding.error]


@pytest.mark.parametrize("cluster", [name for name in cluster_names() if name != "local"])
def test_a_sound_job_has_no_finding_on_any_cluster(cluster: str) -> None:
    assert findings(cluster) == []


def test_a_sound_job_on_the_local_cluster_may_write_anywhere() -> None:
    assert findings("local", 4, None, overrides=("run_dir=/tmp/r", "model.num_layers=2", "model.embed_dim=64")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster_set": ("nodes=1",)}, r"--nodes 2: mn5-acc allows at most 1 \(nodes\)"),
        ({"cluster_set": ("slurm.max_nodes=1",)}, r"--nodes 2: mn5-acc allows at most 1 \(slurm.max_nodes\)"),
        (
            {"cluster_set": ("slurm.cpus_per_task=21",)},
            r"4 tasks x 21 cores .* 80 cores .*; slurm.cpus_per_task=20 fits",
        ),
        ({"cluster_set": ("slurm.cpus_per_task=10",)}, r"mn5-acc .* 20 cores per device: 80 for 4, not 40 \(4 tasks x 10\)"),
        ({"cluster_set": ("slurm.account=null",)}, r"mn5-acc .* --account: .* slurm.account .*"),
        ({"cluster_set": ("slurm.qos=null",)}, r"mn5-acc .* --qos: .*"),
        ({"time": None}, r"mn5-acc .* --time: .*"),
        ({"time": "3-0"}, r"--time 3-00:00:00 .* mn5-acc, 2-00:00:00 \(slurm.max_time\)"),
        ({"time": "5"}, r"--time 00:05:00 .* 300 s .*\(slurm.signal_grace_s\)"),
        ({"cluster_set": ("slurm.max_time=two days",)}, r"slurm.max_time 'two days' .*\(MINUTES, .*"),
        ({"cluster_set": ("slurm.memory=481G",)}, r"slurm.memory=481G .* 515 GB of a node"),
        ({"cluster_set": ("slurm.memory=all",)}, r"slurm.memory 'all' .*480G.*"),
        ({"cluster_set": ("slurm.tasks_per_node=3", "slurm.cores_per_device=null")}, r"4 devices per node .* 3 tasks"),
        ({"overrides": ("mesh.fsdp=4",)}, r"mesh.fsdp=4 does not match 8 devices; set mesh.data=2 or mesh.fsdp=8"),
        ({"overrides": ("data.batch_size=4",)}, r"data.batch_size: .* \(on 8 devices\)"),
        ({"overrides": ("run_dir=/gpfs/readonly/r",)}, r"run directory /gpfs/readonly/r: /gpfs/readonly/r .*"),
        ({"overrides": ("run_dir=/tmp/r",)}, r"run directory /tmp/r: /tmp .*run_dir.*"),
        ({"overrides": ("run_dir=/dev/shm/r",)}, r"run directory /dev/shm/r: /dev/shm .*"),
        ({"overrides": ("run_dir=/ram/r",)}, r"run directory /ram/r: /ram \(tmpfs\) .*"),
        ({"overrides": ("run_dir=/home/r",)}, r"run directory /home/r: /home \(ext4\) .*"),
        ({"overrides": ("run_dir=/elsewhere/r",)}, r"run directory /elsewhere/r: / \(overlay\) .*"),
        ({"overrides": ("run_dir='/gpfs/my runs/r'",)}, r"run directory '/gpfs/my runs/r': .*letters, digits and .*"),
    ],
)
def test_an_error_is_one_line_with_the_key_and_what_is_allowed(change: dict[str, object], message: str) -> None:
    found = errors(findings(**change))  # type: ignore[arg-type]
    assert len(found) == 1, found
    assert re.fullmatch(message, found[0]), found[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster_set": ("slurm.exclusive=false",)}, r"slurm.exclusive is false: .*"),
        ({"time": "15"}, r"slurm.signal_grace_s .* 300 s of 00:15:00.*"),
        (
            {"cluster": "dgx-h100", "cluster_set": ("slurm.cpus_per_task=7",)},
            r".* 56 of the 112 cores of a node.*",
        ),
        ({"nodes": 1, "overrides": ("run_dir=/home/r",)}, r"run directory /home/r: /home \(ext4\) .*"),
    ],
)
def test_a_warning_does_not_refuse(change: dict[str, object], message: str) -> None:
    found = findings(**change)  # type: ignore[arg-type]
    assert errors(found) == []
    assert len(warnings(found)) == 1, found
    assert re.fullmatch(message, warnings(found)[0]), found


def large(name: str, nodes: int, *cluster_set: str, overrides: tuple[str, ...] = ()) -> list[Finding]:
    site = load_cluster("mn5-acc", ["slurm.account=a", "slurm.qos=q", *cluster_set]).config
    fits = ("compute.remat.policy=full", "trainer.accumulation=1")
    config = load(name, ["run_dir=/gpfs/runs/r", "data.batch_size=1024", *fits, *overrides]).config
    return lint.lint(config, site, job_shape(site, nodes, "1-0"), SHARED)


def test_a_save_that_may_exceed_the_grace_is_a_warning() -> None:
    assert warnings(large("models/llama-3.1-405b", 256)) == []
    found = warnings(large("models/llama-3.1-405b", 256, "storage.write_gb_per_s=10"))
    assert len(found) == 1
    # 405.85e9 parameters x 12 bytes at 10e9 bytes/s
    assert "487 s at 10 GB/s" in found[0] and "slurm.signal_grace_s=300 " in found[0]
    # with adapters 2 bytes per frozen parameter, and state of the adapters only: 81 s
    assert warnings(large("models/llama-3.1-405b", 256, "storage.write_gb_per_s=10", overrides=("lora.rank=16",))) == []


def test_host_memory_must_hold_the_copy_of_an_asynchronous_save() -> None:
    found = warnings(large("models/llama-3.1-405b", 8))
    # 405.85e9 x 12 bytes / 8 nodes
    assert any("609 GB" in line and "515 GB" in line and "checkpoint.asynchronous=false" in line for line in found)


def test_virtual_devices_must_make_up_the_node() -> None:
    few = ("model.num_layers=2", "model.embed_dim=64", "runtime.cpu_devices=4")
    (error,) = errors(findings("local", 2, None, overrides=few))
    assert all(fact in error for fact in ("runtime.cpu_devices=4", "devices_per_node=1", "--cluster-set devices_per_node=4"))
    assert errors(findings("local", 2, None, overrides=few, cluster_set=("devices_per_node=4",))) == []


def test_several_errors_are_reported_together() -> None:
    assert len(errors(findings(time="3-0", cluster_set=("slurm.account=null", "slurm.memory=1T")))) == 3


def test_the_rest_of_the_mesh_is_resolved_against_the_job() -> None:
    site = load_cluster("mn5-acc").config
    config = load("models/llama-3.2-1b", ["mesh.tensor=4", "mesh.fsdp=-1"]).config
    assert with_mesh(config, job_shape(site, 8, None).devices).mesh.sizes == {**config.mesh.sizes, "fsdp": 8, "tensor": 4}


def test_the_run_directory_is_the_configs_own_or_under_the_clusters_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def directory(overrides: list[str], cluster_set: list[str]) -> Path:
        site: ClusterConfig = load_cluster("local", cluster_set).config
        config: Config = load("quickstart", overrides).config
        return placed(config, site).directory

    assert directory([], []) == tmp_path / "runs/quickstart"
    assert directory([], ["run_root=/gpfs/runs"]) == Path("/gpfs/runs/quickstart")
    assert directory(["run_dir=mine"], ["run_root=/gpfs/runs"]) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:15", 5415),
        ("100:00:00", 360000),
        ("2-0", 172800),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:05", 217805),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time_s(text, "--time") == seconds
    if seconds is not None:
        assert parse_time_s(format_time(seconds), "--time") == seconds


@pytest.mark.parametrize("text", ["", "1h", "12:00:00:00", "1-", "-1", "1.5", "0", "00:00:00", "a:b"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^--time '{text}'"):
        parse_time_s(text, "--time")


@pytest.mark.parametrize(
    ("text", "size"), [("0", None), ("500", 500 << 20), ("480G", 480 << 30), ("480GB", 480 << 30), ("1t", 1 << 40), ("64K", 64 << 10)]
)
def test_sizes_are_read_as_slurm_reads_them(text: str, size: int | None) -> None:
    assert parse_memory_bytes(text, "memory") == size


def test_mounts_are_read_with_their_escapes_and_the_innermost_wins() -> None:
    text = "rootfs / rootfs rw 0 0\nnfs:/x /with\\040space nfs4 rw 0 0\nnone /with\\040space/in tmpfs rw 0 0\nsrv /data lustre rw 0 0\n"
    mounts = filesystems.parse_mounts(text)
    found = {path: filesystems.mount_of(Path(path), mounts) for path in ("/with space/a", "/with space/in/b", "/data/c", "/database", "/")}
    assert {path: mount.kind if mount else None for path, mount in found.items()} == {
        "/with space/a": "nfs4",
        "/with space/in/b": "tmpfs",
        "/data/c": "lustre",
        "/database": "rootfs",
        "/": "rootfs",
    }
    over = filesystems.parse_mounts("a /data ext4 rw 0 0\nb /data beegfs rw 0 0\n")
    found_last = filesystems.mount_of(Path("/data/x"), over)
    assert found_last is not None
    assert found_last.kind == "beegfs", "a later mount hides an earlier one"


def test_activations_that_the_hosts_cannot_hold_are_refused_before_the_queue() -> None:
    offload = ("model.num_layers=16", "data.seq_len=131072", "compute.remat.policy=offload", "compute.remat.names=[block_input,mlp_up]")
    large = errors(findings(overrides=offload, cluster_set=("memory_per_node_gib=128",)))
    assert len(large) == 1 and re.match(r"compute\.remat\.policy=offload offloads \d+ GB per node, more than the 69 GB ", large[0])
    assert not errors(findings(overrides=(*offload, "trainer.accumulation=8"), cluster_set=("memory_per_node_gib=512",)))


def test_devices_with_too_little_memory_are_named_before_the_queue() -> None:
    """By the estimate of ridge estimate memory; numbers of nodes on which an elastic job would not fit are not used."""
    large = ("model.num_layers=80", "model.embed_dim=8192", "mesh.fsdp=-1", "optimizer.kind=adamw", "data.seq_len=2048")
    (short,) = warnings(findings(nodes=2, overrides=large))
    pattern = r"a device needs ([\d.]+) GB of the 6\d\.\d GB that a run may use .* `ridge plan` with this cluster and --nodes 2 names .*"
    assert re.fullmatch(pattern, short)
    assert findings(nodes=16, overrides=large) == []
    site = load_cluster("mn5-acc", []).config
    config = load("models/llama-3.2-1b", ["run_dir=/gpfs/runs/r", "data.batch_size=64", *large, "elastic.min_nodes=2"]).config
    job = elastic_job(config, site, job_shape(site, 16, None))
    assert job is not None
    capacity = hardware(site.device).memory_bytes * site.utilisation_cap
    whole = with_mesh(config, job_shape(site, 16, None).devices)
    for nodes in (2, 4, 8, 16):
        smaller = elastic_config(whole, nodes, 4)
        fits = memory_per_device(smaller, smaller.mesh.sizes).total_bytes <= capacity
        assert (nodes in job.layouts) == fits
        assert fits or job.without[nodes].startswith("a device needs ")
    assert job.layouts.keys() >= {16} and job.without.keys() >= {2}


def test_numbers_of_nodes_without_a_layout_are_named_before_the_queue() -> None:
    found = findings(nodes=4, overrides=("elastic.min_nodes=2", "elastic.spares=1"))
    assert errors(found) == []
    (warning,) = warnings(found)
    assert re.fullmatch(r"elastic: 3 nodes are not used: no layout on 3 nodes \(12 devices\): data.batch_size=64 .* works\)", warning)
    assert findings(nodes=4, overrides=("elastic.min_nodes=2", "data.batch_size=96")) == []
    assert errors(findings(nodes=2, overrides=("elastic.min_nodes=3",))) == ["elastic.min_nodes=3 exceeds --nodes 2"]
    (limit,) = errors(findings(nodes=4, cluster_set=("slurm.max_nodes=4",), overrides=("elastic.spares=1",)))
    assert limit == "elastic.spares=1: --nodes 4 and spares exceed 4 nodes (slurm.max_nodes)"
    assert len(warnings(findings(nodes=32, overrides=("data.batch_size=128", "elastic.min_nodes=1")))) == lint.SHOWN + 1


@pytest.mark.parametrize(
    ("nodes", "overrides", "wrong"),
    [
        (16, ("data.batch_size=4",), "data.batch_size: 4 rows per microbatch .* do not divide by mesh.fsdp=64 .*"),
        (3, (), "mesh.fsdp: model.embed_dim=2048 does not divide by mesh.fsdp=12 .*"),
        (2, ("mesh.fsdp=4",), "mesh.fsdp=4 does not match 8 devices; .*"),
        (2, ("mesh.fsdp=1", "mesh.tensor=-1", "model.num_heads=12", "model.num_kv_heads=4", "model.head_dim=64"), "mesh.tensor: .*"),
        (2, ("mesh.fsdp=1", "mesh.context=-1", "data.seq_len=1028"), "mesh.context: .*"),
    ],
)
def test_an_elastic_job_with_a_mesh_that_does_not_fit_is_refused_as_any_other(nodes: int, overrides: tuple[str, ...], wrong: str) -> None:
    fixed, elastic = (errors(findings(nodes=nodes, overrides=(*overrides, *more))) for more in ((), ("elastic.min_nodes=1",)))
    assert fixed == elastic
    assert len(fixed) == 1 and re.match(wrong, fixed[0]), fixed
    site = load_cluster("mn5-acc", []).config
    config = load("models/llama-3.2-1b", ["run_dir=/gpfs/runs/r", "data.batch_size=64", *overrides, "elastic.min_nodes=1"]).config
    with pytest.raises(UserError):
        elastic_job(config, site, job_shape(site, nodes, None))
