"""Mesh sizes and device order, on real and on imagined machines."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MESH_AXES, MeshConfig
from ridgeline.sharding.mesh import abstract_mesh, build_mesh, describe_mesh, node_of, order_devices, resolve_sizes, straddling_axes


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    slice_index: int | None = None


@dataclass(frozen=True)
class FakeMesh:
    devices: np.ndarray
    axis_names: tuple[str, ...] = MESH_AXES

    @property
    def shape(self):
        return dict(zip(self.axis_names, self.devices.shape, strict=True))

    @property
    def size(self):
        return self.devices.size


def cluster(hosts: int, per_host: int, shuffle_seed: int = 0) -> list[FakeDevice]:
    devices = [FakeDevice(id=h * per_host + i, process_index=h) for h in range(hosts) for i in range(per_host)]
    return list(np.random.default_rng(shuffle_seed).permutation(np.array(devices, dtype=object)))


def lay_out(devices, **sizes) -> FakeMesh:
    return FakeMesh(order_devices(devices, resolve_sizes(MeshConfig(**sizes), len(devices))))


powers = st.sampled_from([1, 2, 4, 8])


@given(hosts=powers, per_host=powers, tensor=powers, fsdp=powers, seed=st.integers(0, 5))
def test_tensor_neighbors_share_a_host_and_data_is_outermost(hosts, per_host, tensor, fsdp, seed):
    if (hosts * per_host) % (tensor * fsdp) or per_host % tensor:
        return
    mesh = lay_out(cluster(hosts, per_host, seed), tensor=tensor, fsdp=fsdp, data=-1)
    assert sorted(d.id for d in mesh.devices.flat) == list(range(hosts * per_host))
    crossing = straddling_axes(mesh)
    assert "tensor" not in crossing
    if tensor * fsdp <= per_host:
        assert "fsdp" not in crossing
    if hosts > 1 and per_host == tensor * fsdp:
        assert crossing == ["data"]


def test_four_hosts_of_eight():
    mesh = lay_out(cluster(4, 8), data=4, fsdp=2, tensor=4)
    hosts = np.vectorize(lambda d: d.process_index)(mesh.devices)
    assert (hosts == np.arange(4).reshape(1, 4, 1, 1, 1, 1)).all()
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    np.testing.assert_array_equal(ids.ravel(), np.arange(32))


def test_order_does_not_depend_on_the_order_devices_are_listed_in():
    grids = [np.vectorize(lambda d: d.id)(lay_out(cluster(4, 4, seed), fsdp=8, tensor=2).devices) for seed in range(4)]
    assert all((grid == grids[0]).all() for grid in grids)


def test_one_process_per_device_is_grouped_by_node():
    devices = [FakeDevice(id=p, process_index=p, slice_index=p % 2) for p in range(8)]  # ranks dealt out cyclically over two nodes
    mesh = lay_out(devices, data=2, fsdp=1, tensor=4)
    assert straddling_axes(mesh) == ["data"]
    assert node_of(FakeDevice(0, 3)) == 3


def test_tensor_across_nodes_is_in_the_description():
    text = describe_mesh(lay_out(cluster(2, 4), fsdp=1, tensor=8))
    assert "across nodes: tensor (warning" in text
    assert describe_mesh(lay_out(cluster(2, 4), data=2, fsdp=4)) == "mesh data=2 x fsdp=4 on 8 devices, 2 nodes; across nodes: data"
    assert describe_mesh(lay_out(cluster(1, 1))) == "one device"


def test_build_mesh_has_all_axes_with_auto_types():
    mesh = build_mesh(MeshConfig(data=2, tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"pipeline": 1, "data": 2, "fsdp": 2, "context": 1, "tensor": 2, "expert": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert build_mesh(MeshConfig(), jax.devices()[:1]).size == 1


def test_abstract_mesh_needs_no_devices():
    mesh = abstract_mesh(MeshConfig(fsdp=512, tensor=8), 4096)
    assert mesh.size == 4096
    assert mesh.shape["tensor"] == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, "mesh.fsdp=3 does not match 8 devices; set mesh.fsdp=8"),
        (
            {"fsdp": 4, "tensor": 4},
            "mesh.fsdp=4 x mesh.tensor=4 = 16 does not match 8 devices; set mesh.fsdp=2 or mesh.tensor=2",
        ),
        ({"tensor": 3}, "mesh.tensor=3 does not divide 8 devices; set mesh.tensor=4 or mesh.tensor=2"),
        ({"data": -1}, "mesh.data and mesh.fsdp are both -1; only one mesh axis may be -1"),
        ({"fsdp": 0}, "mesh.fsdp=0: must be at least 1, or -1 for the remaining devices"),
        ({"fsdp": 1, "pipeline": 3}, "mesh.pipeline=3 does not match 8 devices; set mesh.pipeline=8"),
        ({"fsdp": 3, "pipeline": -1}, "mesh.fsdp=3 does not divide 8 devices; set mesh.fsdp=4 or mesh.fsdp=2"),
        ({"fsdp": 5, "data": 3, "tensor": 7}, "set mesh.fsdp=-1 and every other axis to 1"),
    ],
)
def test_a_mesh_that_does_not_fit_names_keys_and_sizes_that_work(sizes, message):
    with pytest.raises(UserError) as error:
        build_mesh(MeshConfig(**sizes))
    assert str(error.value).endswith(message)


@given(data=st.integers(1, 9), fsdp=st.integers(1, 9), tensor=st.integers(1, 9), devices=st.integers(1, 64))
def test_every_suggested_size_works(data, fsdp, tensor, devices):
    try:
        resolve_sizes(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)
        assert data * fsdp * tensor == devices
    except UserError as error:
        sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
        suggested = str(error).split("; set ")[1]
        if suggested.startswith("mesh.fsdp=-1"):
            sizes = {"fsdp": -1}
            resolve_sizes(MeshConfig(**sizes), devices)
            return
        for text in suggested.split(" or "):
            axis, _, size = text.removeprefix("mesh.").partition("=")
            resolve_sizes(MeshConfig(**{**sizes, axis: int(size)}), devices)
