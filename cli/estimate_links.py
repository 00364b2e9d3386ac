"""Groups of devices for `ridge estimate collective`: two levels given by hand, or the links of a cluster file."""

from __future__ import annotations

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.links import CommGroup, Fabric, Link, Span


def two_level_group(
    devices: int, latency_s: float, bandwidth: float, nodes: int | None, node_latency_s: float | None, node_bandwidth: float | None
) -> CommGroup:
    """Build the group of `devices` on one level, or spread evenly over `nodes`.

    Raises UserError: devices that are no multiple of the nodes, half a description of the network.
    """
    inner = Link("node", "nvlink", bandwidth, latency_s)
    outer_given = node_latency_s is not None or node_bandwidth is not None
    if nodes is None:
        if outer_given:
            raise UserError("--node-latency-s and --node-bandwidth go with --nodes")
        return CommGroup.flat(inner, devices)
    if devices % nodes:
        below, above = devices // nodes * nodes, -(-devices // nodes) * nodes
        near = f"{above}" if below == 0 else f"{below} or {above}"
        raise UserError(f"--devices {devices} is no multiple of --nodes {nodes} (nearest: {near} devices)")
    if node_latency_s is None or node_bandwidth is None:
        raise UserError("--nodes needs --node-latency-s and --node-bandwidth, those of one device between nodes")
    outer = Link("network", "network", node_bandwidth, node_latency_s)
    return CommGroup(tuple(span for span in (Span(inner, devices // nodes), Span(outer, nodes)) if span.fan_out > 1))


def cluster_group(name: str, calibration: str | None, stride: int, devices: int) -> CommGroup:
    """Build the group of `devices` devices, `stride` places apart in the device order of a cluster."""
    cluster = load_cluster(name).config
    fabric = Fabric.from_cluster(cluster, load_calibration(calibration), num_devices=stride * devices)
    return fabric.group(stride, devices)
