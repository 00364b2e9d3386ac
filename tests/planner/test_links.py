"""Which levels a mesh axis spans, and the share of the network a device has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.cluster import ClusterConfig, LinkLevel, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.links import Fabric, axis_strides

RAILS = ClusterConfig(
    name="rails",
    device="h100-sxm",
    devices_per_node=8,
    cores_per_node=64,
    memory_per_node_gib=512.0,
    links=[
        LinkLevel(name="nvlink", kind="nvlink", devices=8, bandwidth_gb_per_s=450.0, latency_us=2.0),
        LinkLevel(name="rail", devices=64, bandwidth_gb_per_s=50.0, latency_us=4.0),
        LinkLevel(name="spine", bandwidth_gb_per_s=25.0, latency_us=6.0),
    ],
    nic_gb_per_s=200.0,
)


def fan_outs(fabric, stride, size):
    return {span.link.name: span.fan_out for span in fabric.group(stride, size).spans}


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [
        (1, 1, {}),
        (1, 8, {"nvlink": 8}),
        (2, 4, {"nvlink": 4}),
        (1, 16, {"nvlink": 8, "rail": 2}),
        (4, 16, {"nvlink": 2, "rail": 8}),
        (8, 8, {"rail": 8}),
        (8, 32, {"rail": 8, "spine": 4}),
        (64, 4, {"spine": 4}),
        (1, 512, {"nvlink": 8, "rail": 8, "spine": 8}),
        (1, 6, {"nvlink": 2, "spine": 3}),  # straddles nodes: only pairs are always together
    ],
)
def test_an_axis_spans_the_levels_its_devices_lie_on(stride, size, expected):
    assert fan_outs(Fabric.from_cluster(RAILS), stride, size) == expected


def test_a_job_inside_one_domain_never_leaves_it():
    assert fan_outs(Fabric.from_cluster(RAILS, num_devices=6), 1, 6) == {"nvlink": 6}
    assert fan_outs(Fabric.from_cluster(RAILS, num_devices=48), 1, 48) == {"nvlink": 8, "rail": 6}


def test_devices_of_a_node_share_its_ports():
    names = {link.name: link.bandwidth_bytes_per_s for link in Fabric.from_cluster(RAILS).links}
    assert names == {"nvlink": 450e9, "rail": 25e9, "spine": 25e9}  # 200 GB/s over 8 devices
    alone = Fabric.from_cluster(RAILS, num_devices=2).links
    assert [link.bandwidth_bytes_per_s for link in alone] == [450e9, 50e9, 25e9]


sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4, 8]) for axis in MESH_AXES})


@given(sizes)
def test_strides_are_those_of_the_device_order(mesh):
    strides = axis_strides(mesh)
    assert strides["expert"] == 1
    assert strides["tensor"] == mesh["expert"]
    product = 1
    for size in mesh.values():
        product *= size
    assert strides["pipeline"] * mesh["pipeline"] == product


@given(sizes, st.sets(st.sampled_from(MESH_AXES)))
def test_axes_together_have_all_their_devices(mesh, axes):
    total = 1
    for size in mesh.values():
        total *= size
    group = Fabric.from_cluster(RAILS, num_devices=total).axes_group(mesh, axes)
    expected = 1
    for axis in axes:
        expected *= mesh[axis]
    assert group.size == expected
    assert all(span.fan_out > 1 for span in group.spans)


def test_neighboring_axes_together_are_one_long_axis():
    mesh = {"pipeline": 1, "data": 8, "fsdp": 16, "context": 1, "tensor": 4, "expert": 1}
    fabric = Fabric.from_cluster(RAILS)
    assert fabric.axes_group(mesh, ("data", "fsdp")) == fabric.group(4, 128)


def test_a_cluster_whose_last_level_is_too_small_is_refused():
    links = [LinkLevel(name="nvlink", kind="nvlink", devices=8, bandwidth_gb_per_s=450.0, latency_us=2.0)]
    fabric = Fabric.from_cluster(RAILS.model_copy(update={"links": links}))
    with pytest.raises(UserError, match=r"links\.\d+\.devices=\d+: the outermost level"):
        fabric.group(1, 16)


@pytest.mark.parametrize("name", ["mn5-acc", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "dgx-a100", "generic", "local"])
def test_shipped_clusters_agree_with_the_hardware_catalog(name):
    from ridgeline.planner.hardware import hardware

    cluster = load_cluster(name).config
    device = hardware(cluster.device)
    for level in cluster.links:
        if level.kind == "nvlink":
            assert level.bandwidth_gb_per_s * 1e9 == device.link_bandwidth_bytes_per_s
        if level.kind == "network" and cluster.nic_gb_per_s is not None:
            assert level.bandwidth_gb_per_s * cluster.devices_per_node == cluster.nic_gb_per_s
    assert cluster.sources or name == "local"


@pytest.mark.parametrize(("devices", "together"), [(72, 72), (144, 72), (256, 64), (1024, 64), (4 * 19, 72)])
def test_a_job_takes_equal_parts_of_racks(devices, together):
    """Racks of 18 nodes with 4 GPUs: 64 nodes take 16 of each; 19 nodes cannot be divided."""
    fabric = Fabric.from_cluster(load_cluster("gb200-nvl72").config, num_devices=devices)
    assert fabric.domains[0] in (together, None) and (fabric.domains[0] is None) == (devices == 72)
