"""The links under a mesh axis: which levels of the interconnect a group of devices spans, and how fast each is.

    fabric = Fabric.from_cluster(cluster, calibration, num_devices=64)
    fabric.group(axis_stride=1, axis_size=8)          # tensor: 8 neighbours in the device order
    fabric.axes_group(sizes, ("data", "fsdp"))        # any mesh axes together, strides worked out

A mesh axis of size n whose neighbours are s devices apart joins the devices o, o+s, ..., o+(n-1)*s. Device order is that of the mesh
(MESH_AXES, slowest first) laid over nodes in order, so an axis stays inside a domain of d devices as long as n*s <= d.
`planner.communication.time_s` turns a group into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig, LinkLevel
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MESH_AXES
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.curve import Curve

GB = 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the interconnect as one device sees it."""

    name: str
    kind: str
    """nvlink, pcie, network or memory."""
    bandwidth_bytes_per_s: float
    """Peak of one device in one direction, its share of the node's network ports included."""
    latency_s: float
    """One hop of a small message."""
    reached: Curve | None = None
    """Share of the peak reached, by the bytes a device sends in one collective; None: all of it (the alpha-beta model as in textbooks)."""
    in_switch: Curve | None = None
    """Where the switch reduces (NVLink SHARP): share of the peak reached by an all-reduce, by its bytes; None: the switch cannot."""

    def seconds(self, sent_bytes: float) -> float:
        """Time to send this many bytes in one direction, latency apart."""
        share = 1.0 if self.reached is None else self.reached.at(sent_bytes)
        return sent_bytes / (self.bandwidth_bytes_per_s * share)


@dataclass(frozen=True, slots=True)
class Span:
    """How a group lies on one level: `fan_out` domains of the level inside, joined by `link`."""

    link: Link
    fan_out: int


@dataclass(frozen=True, slots=True)
class CommGroup:
    """Devices that communicate: levels innermost first, only those the group crosses; fan-outs multiply to the size."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Devices in the group."""
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
    """The interconnect of a job: levels innermost first, with the devices one domain of each joins (the last: all)."""

    links: tuple[Link, ...]
    domains: tuple[int | None, ...]
    """None: this level joins every device of the job."""

    @classmethod
    def from_cluster(cls, cluster: ClusterConfig, calibration: Calibration | None = None, *, num_devices: int | None = None) -> Fabric:
        """Build the fabric of a cluster file.

        Args:
          cluster: its `links` are per device and direction; a network level is cut to the device's share of `nic_gb_per_s`, because all
            devices of a node communicate at once (SPMD).
          calibration: achieved shares of the peaks; None: links run at their peak.
          num_devices: devices of the job; a job smaller than a node has the ports to itself. None: whole nodes.
        """
        active = min(cluster.devices_per_node, num_devices or cluster.devices_per_node)
        links = tuple(_link(level, cluster, calibration, active) for level in cluster.links)
        joins_all = [level.devices is None or (num_devices is not None and num_devices <= level.devices) for level in cluster.links]
        return cls(links, tuple(None if every else level.devices for level, every in zip(cluster.links, joins_all, strict=True)))

    def group(self, axis_stride: int, axis_size: int) -> CommGroup:
        """Return the group of one mesh axis: `axis_size` devices, each `axis_stride` apart in the device order."""
        return self._group([(axis_stride, axis_size)])

    def axes_group(self, sizes: Mapping[str, int], axes: Iterable[str]) -> CommGroup:
        """Return the group of mesh axes taken together, e.g. ("data", "fsdp"), on a mesh of these axis sizes."""
        strides = axis_strides(sizes)
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
                f"the cluster's outermost level joins fewer devices ({last}) than the job has; leave it out (all devices) or raise it"
            )
        return CommGroup(tuple(spans))


def axis_strides(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many devices apart the neighbours of each mesh axis are: the product of the faster axes."""
    strides, stride = {}, 1
    for axis in reversed(MESH_AXES):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _members(stride: int, size: int, domain: int | None) -> int:
    """Devices of an axis that share every domain of `domain` devices (None: all devices).

    An axis whose length does not divide the domain straddles its edges; what then counts is the run that every group keeps together.
    """
    if domain is None:
        return size
    if stride >= domain or domain % stride:
        return 1  # not dividing, the axis drifts over the edges: some neighbours are always apart
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
