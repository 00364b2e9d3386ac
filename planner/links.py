"""The links that a mesh axis uses: which levels of the interconnect a group of devices spans, and how fast each is.

    fabric = Fabric.from_cluster(cluster, calibration, num_devices=64)
    fabric.group(axis_stride=1, axis_size=8)          # tensor: 8 neighbors in the device order
    fabric.axes_group(sizes, ("data", "fsdp"))        # any mesh axes together, with their strides

A mesh axis of size n whose neighbors are s devices apart joins the devices o, o+s, ..., o+(n-1)*s. Devices are ordered as in the mesh
(MESH_AXES, slowest first), node by node, so an axis stays inside a domain of d devices as long as n*s <= d.
`planner.communication.time_s` computes the time of a collective on a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig, LinkLevel, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.calibration import Calibration, Curve
from ridgeline.planner.hardware import Hardware

GB = 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the interconnect as one device sees it."""

    name: str
    kind: str
    """nvlink, pcie, network or memory."""
    bandwidth_bytes_per_s: float
    """Peak of one device in one direction; at most its share of the node's network ports."""
    latency_s: float
    """Latency of one hop."""
    reached: Curve | None = None
    """Fraction of the peak that is reached, by the bytes a device sends in one collective; None: the whole peak (alpha-beta model)."""
    in_switch: Curve | None = None
    """All-reduce in the switch (NVLink SHARP): fraction of the peak that is reached, by tensor bytes; None: not supported."""

    def seconds(self, sent_bytes: float) -> float:
        """Return the time to send this many bytes in one direction, without latency."""
        share = 1.0 if self.reached is None else self.reached.at(sent_bytes)
        return sent_bytes / (self.bandwidth_bytes_per_s * share)


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a group on one level: `fan_out` domains of the next inner level, connected by `link`."""

    link: Link
    fan_out: int


@dataclass(frozen=True, slots=True)
class CommGroup:
    """Devices that communicate: the levels they span, innermost first. The product of the fan-outs is the number of devices."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(span.fan_out for span in self.spans)

    @property
    def slowest(self) -> Link | None:
        """The link with the lowest bandwidth; None for a group of one."""
        return min((span.link for span in self.spans), key=lambda link: link.bandwidth_bytes_per_s, default=None)

    @classmethod
    def flat(cls, link: Link, size: int) -> CommGroup:
        """Build a group whose devices are all on one level."""
        return cls((Span(link, size),) if size > 1 else ())


@dataclass(frozen=True, slots=True)
class Fabric:
    """The interconnect of a job: its levels, innermost first, and the devices in one domain of each."""

    links: tuple[Link, ...]
    domains: tuple[int | None, ...]
    """None: this level connects all devices of the job."""

    @classmethod
    def from_cluster(cls, cluster: ClusterConfig, calibration: Calibration | None = None, *, num_devices: int | None = None) -> Fabric:
        """Build the fabric of a cluster file.

        Args:
          cluster: its `links` are per device and direction. A network level is limited to the device's share of `nic_gb_per_s`, because
            all devices of a node communicate at the same time (SPMD).
          calibration: fractions of the peaks that are reached; None: links run at their peak.
          num_devices: devices of the job; a job smaller than a node shares the ports among its own devices. None: whole nodes.
        """
        active = min(cluster.devices_per_node, num_devices or cluster.devices_per_node)
        links = tuple(_link(level, cluster, calibration, active) for level in cluster.links)
        domains = [_domain(level, cluster, num_devices) for level in cluster.links]
        connects_all = [level.devices is None or (num_devices is not None and num_devices <= level.devices) for level in cluster.links]
        return cls(links, tuple(None if every else domain for domain, every in zip(domains, connects_all, strict=True)))

    def group(self, axis_stride: int, axis_size: int) -> CommGroup:
        """Return the group of one mesh axis: `axis_size` devices, each `axis_stride` apart in the device order."""
        return self._group([(axis_stride, axis_size)])

    def axes_group(self, sizes: Mapping[str, int], axes: Iterable[str], order: Sequence[str] = MESH_AXES) -> CommGroup:
        """Return the group of mesh axes taken together, e.g. ("data", "fsdp"), on a mesh of these axis sizes. order: as in axis_strides."""
        strides = axis_strides(sizes, order)
        return self._group([(strides[axis], sizes[axis]) for axis in axes if sizes[axis] > 1])

    def _group(self, axes: list[tuple[int, int]]) -> CommGroup:
        spans, inside = [], 1
        for link, domain in zip(self.links, self.domains, strict=True):
            members = math.prod(_members(stride, size, domain) for stride, size in axes)
            assert members % inside == 0, (axes, self.domains)
            if members > inside:
                spans.append(Span(link, members // inside))
            inside = members
        if inside != math.prod(size for _, size in axes):
            last = f"links.{len(self.links) - 1}.devices={self.domains[-1]}"
            raise UserError(
                f"{last}: the outermost level connects fewer devices than the job has; raise it, or set it to null (all devices)"
            )
        return CommGroup(tuple(spans))


def assumed_cluster(device: Hardware) -> ClusterConfig | None:
    """Return the shipped cluster whose links the catalog assumes for this device, with the device itself; None: no links are assumed."""
    if device.assumed_cluster is None:
        return None
    return load_cluster(device.assumed_cluster, [f"device={device.name}"]).config


def axis_strides(sizes: Mapping[str, int], order: Sequence[str] = MESH_AXES) -> dict[str, int]:
    """Return the distance of neighbors along each mesh axis in the device order: the product of the faster axes.

    order: the axes, slowest-varying first.
    """
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _domain(level: LinkLevel, cluster: ClusterConfig, num_devices: int | None) -> int | None:
    """Return the devices of a job in one domain of a level.

    Of racks of several nodes a job takes as many nodes each as divide its own evenly (Slurm: --segment), so that mesh axes stay inside
    them: 16 of 18 for 64 nodes. Without such a number of at least half a rack it fills them.
    """
    per_node = cluster.devices_per_node
    if level.devices is None or level.kind != "nvlink" or num_devices is None or level.devices <= per_node:
        return level.devices
    nodes, rack = num_devices // per_node, level.devices // per_node
    even = max((part for part in range(1, rack + 1) if nodes and nodes % part == 0), default=rack)
    return per_node * even if 2 * even >= rack else level.devices


def _members(stride: int, size: int, domain: int | None) -> int:
    """Return how many neighbors of an axis are always in the same domain of `domain` devices (None: all devices).

    An axis that does not divide the domain crosses its boundaries; then the count is that of the runs which stay together in every group.
    """
    if domain is None:
        return size
    if stride >= domain or domain % stride:
        return 1  # if the stride does not divide the domain, some neighbors are in different domains
    return math.gcd(size, domain // stride)


def _link(level: LinkLevel, cluster: ClusterConfig, calibration: Calibration | None, active: int) -> Link:
    bandwidth = level.bandwidth_gb_per_s * GB
    if level.kind == "network" and cluster.nic_gb_per_s is not None:
        bandwidth = min(bandwidth, cluster.nic_gb_per_s * GB / active)
    reduces = level.in_switch_reduction and calibration is not None
    return Link(
        level.name,
        level.kind,
        bandwidth,
        level.latency_us * 1e-6,
        calibration.link_curve(level.kind, cluster.device, bandwidth) if calibration else None,
        calibration.in_switch_curve(cluster.device, bandwidth) if calibration and reduces else None,
    )
