"""Cluster files: the shipped ones, a site's own, and every mistake in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.configs.cluster import ClusterConfig, cluster_names, load_cluster
from ridgeline.configs.compose import CLUSTERS
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError

SHIPPED = {"mn5-acc", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "dgx-a100", "generic", "local"}
MINIMAL = """\
name: site
device: h100-sxm
devices_per_node: 8
cores_per_node: 96
memory_per_node_gib: 1024
links:
  - {name: nvlink, kind: nvlink, devices: 8, bandwidth_gb_per_s: 450, latency_us: 1.9}
  - {name: network, bandwidth_gb_per_s: 50, latency_us: 5}
"""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_promised_clusters_are_shipped() -> None:
    assert set(cluster_names()) == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_cluster_is_consistent(name: str) -> None:
    config = load_cluster(name).config
    assert config.name == name
    assert config.description
    tasks = config.slurm.tasks_per_node or config.devices_per_node
    assert config.devices_per_node % tasks == 0
    assert config.cores_per_node % tasks == 0, "every process gets the same cores"
    if config.slurm.cores_per_device is not None:
        assert config.slurm.cores_per_device * config.devices_per_node == config.cores_per_node
    assert config.links[-1].devices is None or name == "local", "the last level joins the whole cluster"
    if config.nic_gb_per_s is not None:
        network = next(level for level in config.links if level.kind == "network")
        assert network.bandwidth_gb_per_s * config.devices_per_node == pytest.approx(config.nic_gb_per_s), (
            "each device has its share of the ports"
        )


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_cluster_written_out_loads_back_equal(name: str) -> None:
    config = load_cluster(name).config
    Path("cluster.yaml").write_text(to_yaml(config))
    assert load_cluster("cluster.yaml").config == config


def test_what_the_generic_file_shows_commented_out_is_the_default() -> None:
    text = (CLUSTERS / "generic.yaml").read_text()
    body = text[text.index("name: generic") :]
    shown, count = re.subn(r"^( *)# ((?:\w+: \S|container:|  \w+: ).*)$", r"\1\2", body, flags=re.MULTILINE)
    assert count >= 20
    without_container = re.sub(r"^  container:.*\n(?:    .*\n?)*", "", shown, flags=re.MULTILINE)
    Path("all.yaml").write_text(without_container)
    assert load_cluster("all.yaml").config == load_cluster("generic").config
    Path("container.yaml").write_text(shown)
    container = load_cluster("container.yaml").config.software.container
    assert container is not None
    assert (container.mounts, container.arguments) == ([], [])


def test_a_sites_file_builds_on_a_shipped_one_and_overrides_win() -> None:
    Path("site.yaml").write_text("base: [clusters/mn5-acc]\nname: site\nslurm: {account: bsc1}\n")
    found = load_cluster("site", ["slurm.qos=acc_debug", "slurm.max_restarts=3"])
    assert found.path == Path("site.yaml")
    assert (found.config.slurm.account, found.config.slurm.qos, found.config.slurm.max_restarts) == ("bsc1", "acc_debug", 3)
    assert found.config.slurm.partition == "acc"
    assert found.config.devices_per_node == 4


def test_a_directory_of_the_sites_own_files_comes_before_the_shipped_ones(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "dgx-h100.yaml").write_text("base: [clusters/dgx-h100]\nnodes: 12\n")
    environment = {"RIDGE_CLUSTERS": str(own)}
    assert load_cluster("dgx-h100", environment=environment).config.nodes == 12
    assert load_cluster("dgx-h100", environment={}).config.nodes is None
    assert load_cluster("dgx-a100", environment=environment).config.nodes is None


def test_an_unknown_cluster_is_named_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"cluster 'dgx-h10' not found; did you mean 'dgx-h100'\? \(shipped: dgx-a100, .*; or a YAML file\)"
    ):
        load_cluster("dgx-h10")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("slurm: {acount: me}", r"site.yaml:9: slurm.acount: unknown key; did you mean 'account'\? \(allowed: partition, .*"),
        ("slurm: {requires: [acount]}", r"site.yaml:9: slurm.requires.0: must be 'partition', 'account', 'qos' or 'time', got 'acount'"),
        ("slurm: {max_nodes: 0}", r"site.yaml:9: slurm.max_nodes: must be at least 1, got 0"),
        ("slurm: {gpu_request: gpu}", r"site.yaml:9: slurm.gpu_request: must be 'gres', 'gpus-per-node' or 'none', got 'gpu'"),
        (
            "software: {container: {runtime: docker, image: a}}",
            r"site.yaml:9: software.container.runtime: must be 'pyxis' or 'apptainer'.*",
        ),
        ("software: {container: {runtime: pyxis}}", r"site.yaml:9: software.container.image: required, but missing"),
        ("price_per_device_hour_usd: -1", r"site.yaml:9: price_per_device_hour_usd: must be at least 0.0, got -1"),
        ("storage: {write_gb_per_s: 0}", r"site.yaml:9: storage.write_gb_per_s: must be greater than 0.0, got 0"),
    ],
)
def test_a_mistake_names_file_line_and_what_is_allowed(extra: str, message: str) -> None:
    Path("site.yaml").write_text(MINIMAL + extra + "\n")
    with pytest.raises(UserError, match=f"^{message}$"):
        load_cluster("site.yaml")


def test_a_wrong_override_is_named() -> None:
    with pytest.raises(UserError, match=r"override 'slurm.acount=me': slurm.acount: unknown key; did you mean 'account'"):
        load_cluster("local", ["slurm.acount=me"])


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("[]", "links: "),
        (
            "[{name: a, bandwidth_gb_per_s: 1, latency_us: 1}, {name: b, bandwidth_gb_per_s: 1, latency_us: 1}]",
            "links.0.devices: only the last level",
        ),
        (
            "[{name: a, devices: 8, bandwidth_gb_per_s: 1, latency_us: 1}, {name: b, devices: 12, bandwidth_gb_per_s: 1, latency_us: 1}]",
            "links.1.devices: 12 must be a multiple of the 8",
        ),
    ],
)
def test_levels_that_do_not_nest_are_refused(links: str, message: str) -> None:
    head = MINIMAL[: MINIMAL.index("links:")]
    Path("site.yaml").write_text(f"{head}links: {links}\n")
    with pytest.raises(UserError, match=rf"^site.yaml:6: {re.escape(message)}"):
        load_cluster("site.yaml")


def test_every_key_of_the_schema_has_a_docstring() -> None:
    def check(section: type) -> None:
        for name, info in section.model_fields.items():  # type: ignore[attr-defined]
            inner = info.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                check(inner)
            else:
                assert info.description, f"{section.__name__}.{name}"

    check(ClusterConfig)
