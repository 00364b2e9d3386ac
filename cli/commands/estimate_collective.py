"""`ridge estimate collective`: the time of one collective by the alpha-beta model."""

from __future__ import annotations

import click

from ridgeline.cli.options import BYTE, BYTES_PER_S, SECONDS_OR_ZERO, WHOLE
from ridgeline.cli.printing.estimate import Result, print_results, result_options
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.communication import time_s
from ridgeline.planner.links import CommGroup, Fabric, Link, Span

NCCL_TESTS = "NCCL tests, doc/PERFORMANCE.md"
SCALING_BOOK = "JAX scaling book, chapters Training and GPUs"


@click.command()
@click.option("--op", required=True, metavar="OP", help="all-reduce, all-gather, reduce-scatter, all-to-all or point-to-point.")
@click.option(
    "--bytes",
    "size",
    type=BYTE,
    required=True,
    help="Size of the full tensor (all-to-all, point-to-point: of one device's tensor), such as 58MB.",
)
@click.option("--devices", type=WHOLE, required=True, help="Number of devices in the group.")
@click.option("--latency-s", type=SECONDS_OR_ZERO, help="Latency of one hop.")
@click.option("--bandwidth", type=BYTES_PER_S, help="Bandwidth of one device in one direction, such as 450GB/s.")
@click.option("--algorithm", help="ring (default), tree or recursive-halving. With --cluster: the algorithm NCCL would choose.")
@click.option("--nodes", type=WHOLE, help="Hierarchical over this many nodes with DEVICES/NODES devices each.")
@click.option("--node-latency-s", type=SECONDS_OR_ZERO, help="Latency of one hop between nodes.")
@click.option("--node-bandwidth", type=BYTES_PER_S, help="Bandwidth of one device between nodes, in one direction.")
@click.option("--cluster", help="Use the links of this cluster with their achieved bandwidths.")
@click.option("--stride", type=WHOLE, default=1, show_default=True, help="With --cluster: distance between neighbors in the device order.")
@click.option("--calibration", help="With --cluster: calibration file from `ridge calibrate`.")
@result_options
def collective(
    op: str,
    size: float,
    devices: int,
    latency_s: float | None,
    bandwidth: float | None,
    algorithm: str | None,
    nodes: int | None,
    node_latency_s: float | None,
    node_bandwidth: float | None,
    cluster: str | None,
    stride: int,
    calibration: str | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Estimate the time of one collective by the alpha-beta model, on one level of links or over nodes."""
    if devices < 2:
        raise UserError(f"--devices {devices}: a collective needs at least 2 devices")
    by_hand = (latency_s, bandwidth, nodes, node_latency_s, node_bandwidth)
    if cluster is not None:
        if any(value is not None for value in by_hand):
            raise UserError("--cluster defines the links; leave out --latency-s, --bandwidth, --nodes and --node-...")
        cost = time_s(op, size, cluster_group(cluster, calibration, stride, devices), algorithm)
    else:
        if calibration is not None or stride != 1:
            raise UserError("--calibration and --stride need --cluster")
        if latency_s is None or bandwidth is None:
            raise UserError("give --latency-s and --bandwidth, or --cluster")
        group = two_level_group(devices, latency_s, bandwidth, nodes, node_latency_s, node_bandwidth)
        wanted = algorithm or "ring"
        if len(group.spans) > 1 and wanted in PHASES:
            cost = time_s(op, size, group, "hierarchical", phases=wanted)
        else:
            cost = time_s(op, size, group, wanted)
    formula, source = FORMULAS[op, cost.algorithm]
    print_results(
        [
            Result("seconds", cost.seconds, "s", formula, source),
            Result("algorithm_bandwidth", cost.algorithm_bandwidth, "bytes/s", "bytes / seconds", NCCL_TESTS),
            Result("bus_bandwidth", cost.bus_bandwidth, "bytes/s", BUS.get(op, BUS["all-gather"]), NCCL_TESTS),
            Result("algorithm", cost.algorithm),
            Result("bottleneck_link", cost.bottleneck_link),
        ],
        as_json=as_json,
        explain=explain,
        more={"by_link": cost.by_link},
    )


PHASES = ("ring", "tree", "recursive-halving")
NCCL = "NCCL, src/graph/tuning.cc; nccl-tests issue 160"
SANDERS = "Sanders, Speck, Träff, Parallel Computing 35, 2009, as in NCCL since 2.4"
MPICH = "Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005"
_ONE_WAY = "(p-1)*latency + (p-1)/p * bytes/bandwidth"
FORMULAS = {
    **{(op, "ring"): (_ONE_WAY, MPICH) for op in ("all-gather", "reduce-scatter", "all-to-all")},
    **{(op, "recursive-halving"): ("log2(p)*latency + (p-1)/p * bytes/bandwidth", MPICH) for op in ("all-gather", "reduce-scatter")},
    ("all-reduce", "ring"): ("2*(p-1)*latency + 2*(p-1)/p * bytes/bandwidth", MPICH),
    ("all-reduce", "recursive-halving"): ("2*log2(p)*latency + 2*(p-1)/p * bytes/bandwidth", MPICH),
    ("all-reduce", "tree"): ("2*log2(p)*(latency + bytes/bandwidth)", MPICH),
    ("all-reduce", "in-switch"): ("2*latency + bytes/bandwidth: every device sends its tensor once, the switch reduces", "NVLink SHARP"),
    ("all-reduce", "hierarchical"): (
        "reduce-scatter(G, n) + all-reduce(M, n/G) + all-gather(G, n), G devices per node, M nodes, n bytes",
        SCALING_BOOK,
    ),
    ("all-gather", "hierarchical"): ("all-gather(M, n/G) + all-gather(G, n), G devices per node, M nodes, n bytes", SCALING_BOOK),
    ("reduce-scatter", "hierarchical"): ("reduce-scatter(G, n) + reduce-scatter(M, n/G)", SCALING_BOOK),
    **{
        (op, "rail-ring"): ("all hops + max over levels of rounds*(p-1)/p * n/q / bandwidth, q devices inside the level", NCCL)
        for op in ("all-reduce", "all-gather", "reduce-scatter")
    },
    ("all-reduce", "double-tree"): ("2*(G-1) + 2*log2(M) hops + max(transfer inside, 2*n/G / bandwidth outside)", SANDERS),
    ("all-to-all", "hierarchical"): (
        "inside: (G-1)*latency + (G-1)/p * n/bandwidth; outside: (p-G)*latency + (p-G)/p * n/bandwidth",
        "each pair of devices exchanges n/p bytes over the innermost level that joins it",
    ),
    ("point-to-point", "hierarchical"): ("latency + bytes/bandwidth of the outermost link", MPICH),
    ("point-to-point", "ring"): ("latency + bytes/bandwidth", MPICH),
}
BUS = {
    "all-reduce": "algorithm_bandwidth * 2*(p-1)/p",
    "all-gather": "algorithm_bandwidth * (p-1)/p",
    "point-to-point": "algorithm_bandwidth",
}


def two_level_group(
    devices: int, latency_s: float, bandwidth: float, nodes: int | None, node_latency_s: float | None, node_bandwidth: float | None
) -> CommGroup:
    """Build the group of `devices` on one level, or divided evenly over `nodes`.

    Raises UserError for devices that are not a multiple of the nodes, and for an incomplete network description.
    """
    inner = Link("node", "nvlink", bandwidth, latency_s)
    outer_given = node_latency_s is not None or node_bandwidth is not None
    if nodes is None:
        if outer_given:
            raise UserError("--node-latency-s and --node-bandwidth need --nodes")
        return CommGroup.flat(inner, devices)
    if devices % nodes:
        below, above = devices // nodes * nodes, -(-devices // nodes) * nodes
        near = f"{above}" if below == 0 else f"{below} or {above}"
        raise UserError(f"--devices {devices} is not a multiple of --nodes {nodes} (nearest: {near} devices)")
    if node_latency_s is None or node_bandwidth is None:
        raise UserError("--nodes needs --node-latency-s and --node-bandwidth")
    outer = Link("network", "network", node_bandwidth, node_latency_s)
    return CommGroup(tuple(span for span in (Span(inner, devices // nodes), Span(outer, nodes)) if span.fan_out > 1))


def cluster_group(name: str, calibration: str | None, stride: int, devices: int) -> CommGroup:
    """Build the group of `devices` devices, `stride` places apart in the device order of a cluster."""
    cluster = load_cluster(name).config
    fabric = Fabric.from_cluster(cluster, load_calibration(calibration), num_devices=stride * devices)
    return fabric.group(stride, devices)
