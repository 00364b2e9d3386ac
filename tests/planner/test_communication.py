"""Collective costs: the textbook formulas, orders that must hold for any numbers, published measurements, refusals."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.communication import OPS, bus_factor, hop_s, time_s
from ridgeline.planner.links import CommGroup, Fabric, Link, Span

NVLINK = Link("nvlink", "nvlink", 450e9, 2e-6)
NETWORK = Link("network", "network", 50e9, 5e-6)
N = 1e9


def flat(size, link=NVLINK):
    return CommGroup.flat(link, size)


@pytest.mark.parametrize(
    ("op", "algorithm", "seconds"),
    [
        ("all-gather", "ring", 7 * 2e-6 + 7 / 8 * N / 450e9),
        ("reduce-scatter", "ring", 7 * 2e-6 + 7 / 8 * N / 450e9),
        ("all-reduce", "ring", 14 * 2e-6 + 14 / 8 * N / 450e9),
        ("all-reduce", "recursive-halving", 6 * 2e-6 + 14 / 8 * N / 450e9),
        ("all-gather", "recursive-halving", 3 * 2e-6 + 7 / 8 * N / 450e9),
        ("all-reduce", "tree", 6 * (2e-6 + N / 450e9)),
        ("all-to-all", "ring", 7 * 2e-6 + 7 / 8 * N / 450e9),
        ("point-to-point", "ring", 2e-6 + N / 450e9),
    ],
)
def test_one_level_follows_the_textbook(op, algorithm, seconds):
    cost = time_s(op, N, flat(8), algorithm)
    assert cost.seconds == pytest.approx(seconds, rel=1e-12)
    assert cost.algorithm_bandwidth == pytest.approx(N / seconds)
    assert cost.bus_bandwidth == pytest.approx(N / seconds * bus_factor(op, 8))
    assert cost.bottleneck_link == "nvlink"


def test_the_bus_bandwidth_of_a_long_ring_is_that_of_the_link():
    assert time_s("all-reduce", 1e13, flat(64), "ring").bus_bandwidth == pytest.approx(450e9, rel=1e-3)
    assert time_s("all-gather", 1e13, flat(64), "ring").bus_bandwidth == pytest.approx(450e9, rel=1e-3)


def test_a_hierarchical_all_reduce_is_its_three_phases():
    group = CommGroup((Span(NVLINK, 8), Span(NETWORK, 4)))
    inside = 7 * 2e-6 + 7 / 8 * N / 450e9
    outside = 6 * 5e-6 + 6 / 4 * (N / 8) / 50e9
    assert time_s("all-reduce", N, group, "hierarchical").seconds == pytest.approx(2 * inside + outside)
    gather = time_s("all-gather", N, group, "hierarchical")
    assert gather.seconds == pytest.approx(inside + 3 * 5e-6 + 3 / 4 * (N / 8) / 50e9)
    assert gather.by_link == {"nvlink": pytest.approx(inside), "network": pytest.approx(gather.seconds - inside)}
    assert time_s("reduce-scatter", N, group, "hierarchical").seconds == gather.seconds


def test_a_hierarchical_all_to_all_sends_each_byte_once():
    group = CommGroup((Span(NVLINK, 8), Span(NETWORK, 4)))
    cost = time_s("all-to-all", N, group, "hierarchical")
    assert cost.seconds == pytest.approx(7 * 2e-6 + 7 / 32 * N / 450e9 + 24 * 5e-6 + 24 / 32 * N / 50e9)


links = st.builds(lambda w, a, name: Link(name, name, w, a), st.floats(1e8, 1e12), st.floats(0, 1e-3), st.just("x"))


@given(
    st.sampled_from([op for op in OPS if op != "point-to-point"]), st.floats(1, 1e12), st.integers(1, 9), st.integers(1, 9), links, links
)
def test_hierarchical_is_never_slower_than_a_ring_over_its_slowest_level(op, size, inner, outer, one, two):
    fast, slow = sorted((one, two), key=lambda link: -link.bandwidth_bytes_per_s)
    a = max(one.latency_s, two.latency_s)
    fast = Link("inner", "nvlink", fast.bandwidth_bytes_per_s, min(one.latency_s, two.latency_s))
    slow = Link("outer", "network", slow.bandwidth_bytes_per_s, a)
    group = CommGroup(tuple(span for span in (Span(fast, inner), Span(slow, outer)) if span.fan_out > 1))
    if group.size == 1:
        return
    hierarchical = time_s(op, size, group, "hierarchical").seconds
    assert hierarchical <= time_s(op, size, flat(group.size, slow), "ring").seconds * (1 + 1e-9)
    best = Link("best", "nvlink", fast.bandwidth_bytes_per_s, 0.0)
    assert hierarchical >= time_s(op, size, flat(group.size, best), "ring").seconds * (1 - 1e-9)


@given(st.sampled_from(OPS), st.floats(1, 1e12), st.integers(2, 4096), st.sampled_from([1, 8, 64]))
@example("all-reduce", 21167.0, 3, 8)
def test_more_bytes_never_take_less_time_on_calibrated_links(op, size, devices, stride):
    fabric = Fabric.from_cluster(load_cluster("dgx-h100").config, load_calibration(), num_devices=devices * stride)
    group = fabric.group(stride, devices)
    assert time_s(op, size, group).seconds <= time_s(op, 1.5 * size, group).seconds * (1 + 1e-9)


@given(st.sampled_from(OPS), st.floats(1, 1e12), st.sampled_from([2, 8, 16, 64, 512]), st.sampled_from(["dgx-h200", "mn5-acc", "dgx-a100"]))
def test_calibrated_links_carry_no_more_than_their_peak(op, size, devices, name):
    # whatever the algorithm, what a domain lacks must come in over its devices' links
    group = Fabric.from_cluster(load_cluster(name).config, load_calibration()).group(1, devices)
    inside = 1
    for span in group.spans:
        least = size if op == "point-to-point" else size / inside * (span.fan_out - 1) / span.fan_out
        if op != "point-to-point" or span is group.spans[-1]:
            assert time_s(op, size, group).seconds >= least / span.link.bandwidth_bytes_per_s
        inside *= span.fan_out if op != "all-to-all" else 1


def test_libraries_overlap_the_levels():
    group = CommGroup((Span(NVLINK, 8), Span(NETWORK, 4)))
    ring = time_s("all-gather", N, group, "rail-ring")
    assert ring.seconds == pytest.approx(28 * 2e-6 + 3 * 5e-6 + max(31 / 32 * N / 450e9, 31 / 32 * N / 8 / 50e9))
    tree = time_s("all-reduce", N, group, "double-tree")
    assert tree.seconds == pytest.approx(14 * 2e-6 + 4 * 5e-6 + max(14 / 8 * N / 450e9, 2 * N / 8 / 50e9))
    two = CommGroup((Span(NVLINK, 8), Span(NETWORK, 2)))
    assert time_s("all-reduce", N, two, "double-tree").by_link["network"] == pytest.approx(2 * 5e-6 + N / 8 / 50e9)


@given(st.sampled_from(["all-reduce", "all-gather", "reduce-scatter"]), st.floats(1e6, 1e12), st.integers(2, 8), st.integers(2, 64))
def test_rings_over_every_port_are_faster_than_one_ring_over_the_slowest(op, size, inner, outer):
    group = CommGroup((Span(NVLINK, inner), Span(NETWORK, outer)))
    assert time_s(op, size, group, "rail-ring").seconds <= time_s(op, size, group, "ring").seconds


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    group = flat(64, NETWORK)
    assert time_s("all-reduce", 1e3, group).algorithm == "double-tree"
    assert time_s("all-reduce", 1e9, group).algorithm == "ring"


def test_at_scale_a_tree_has_fewer_hops():
    many = CommGroup((Span(NVLINK, 8), Span(NETWORK, 256)))
    assert time_s("all-reduce", 1e8, many).algorithm == "double-tree"
    assert time_s("all-gather", 1e8, many).algorithm == "rail-ring"  # libraries have no tree for it


def test_one_device_moves_nothing():
    cost = time_s("all-reduce", N, flat(1))
    assert (cost.seconds, cost.algorithm, cost.bottleneck_link) == (0, "none", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all-sum", N, flat(8)), "unknown collective 'all-sum'"),
        (("all-reduce", 0, flat(8)), "moves more than 0 bytes"),
        (("all-reduce", -1, flat(8)), "moves more than 0 bytes"),
        (("all-reduce", math.nan, flat(8)), "moves more than 0 bytes"),
        (("all-reduce", N, flat(8), "rign"), "unknown algorithm 'rign'; did you mean 'ring'"),
        (("all-gather", N, flat(8), "tree"), "all-gather has no algorithm 'tree' \\(it has: ring, recursive-halving\\)"),
        (("all-to-all", N, flat(8), "recursive-halving"), "all-to-all has no algorithm"),
        (("all-reduce", N, flat(6), "recursive-halving"), "power of two of devices, not 6 \\(nearest: 4 or 8"),
        (("all-reduce", N, flat(8), "in-switch"), "in_switch_reduction"),
        (("all-gather", N, flat(8), "double-tree"), "all-gather has no algorithm 'double-tree'"),
        (("all-to-all", N, flat(8), "rail-ring"), "all-to-all has no algorithm 'rail-ring' \\(it has: ring, hierarchical\\)"),
    ],
)
def test_nonsense_is_refused_with_what_is_allowed(arguments, message):
    with pytest.raises(UserError, match=message):
        time_s(*arguments)


# Measured bus bandwidth of all-reduces in GB/s: cluster, devices, bytes, figure, where published.
ML_ENGINEERING, COREWEAVE = "ml-engineering, network", "coreweave/nccl-tests README"
MEASURED = [
    ("dgx-h200", 8, 1 << 20, 39.93, ML_ENGINEERING),
    ("dgx-h200", 8, 64 << 20, 346.51, ML_ENGINEERING),
    ("dgx-h200", 8, 1 << 30, 463.58, ML_ENGINEERING),
    ("dgx-a100", 8, 64 << 20, 171.54, ML_ENGINEERING),
    ("dgx-a100", 8, 1 << 30, 229.04, ML_ENGINEERING),
    ("dgx-b200", 32, 4 << 30, 377.34, ML_ENGINEERING),
    ("dgx-b200", 32, 1 << 30, 361.99, ML_ENGINEERING),
    ("dgx-b200", 32, 64 << 20, 156.74, ML_ENGINEERING),
    ("dgx-h100", 64, 512 << 20, 356.01, COREWEAVE),
    ("dgx-h100", 64, 8 << 30, 386.56, COREWEAVE),
    ("dgx-h100", 16, 128 << 20, 340.67, "NVIDIA/nccl-tests issue 294"),
    ("dgx-h100", 16, 1 << 30, 440.65, "NVIDIA/nccl-tests issue 294"),
    ("dgx-h200", 1984, 512 << 20, 350, "NVIDIA/nccl-tests issue 283"),
    ("gb200-nvl72", 72, 1 << 30, 700, COREWEAVE),
    ("gb200-nvl72", 144, 512 << 20, 494, COREWEAVE),
    ("gb200-nvl72", 144, 8 << 30, 793, COREWEAVE),
]


@pytest.mark.parametrize(("cluster", "devices", "size", "measured", "source"), MEASURED)
def test_calibrated_predictions_meet_published_measurements(cluster, devices, size, measured, source):
    fabric = Fabric.from_cluster(load_cluster(cluster).config, load_calibration(), num_devices=devices)
    assert time_s("all-reduce", size, fabric.group(1, devices)).bus_bandwidth / 1e9 == pytest.approx(measured, rel=0.13), source


def test_a_gather_in_an_h200_node_reaches_four_fifths_of_the_links():
    group = Fabric.from_cluster(load_cluster("dgx-h200").config, load_calibration()).group(1, 8)
    assert time_s("all-gather", 16 << 30, group).bus_bandwidth == pytest.approx(361.4e9, rel=0.01)  # ml-engineering, section SHARP


def test_without_the_switch_an_h100_all_reduce_reaches_a_third_at_58_mb_and_four_fifths_at_10_gb():
    # JAX scaling book, chapter GPUs: ~150 GB/s at bf16[8192, 3584], at most 370 of 450 GB/s
    group = Fabric.from_cluster(load_cluster("dgx-h100").config, load_calibration()).group(1, 8)
    assert time_s("all-reduce", 8192 * 3584 * 2, group, "ring").bus_bandwidth == pytest.approx(150e9, rel=0.02)
    assert 350e9 < time_s("all-reduce", 10e9, group, "ring").bus_bandwidth < 370e9


def test_fsdp_moves_one_and_a_half_times_the_bytes_of_data_parallelism():
    # in print: ZeRO-3 as 3 * 2 * P bytes per parameter byte; two gathers and a reduce-scatter move 3*P, an all-reduce 2*P
    free = flat(64, Link("link", "network", 50e9, 0.0))
    data = time_s("all-reduce", N, free, "ring").seconds
    fsdp = 2 * time_s("all-gather", N, free, "ring").seconds + time_s("reduce-scatter", N, free, "ring").seconds
    assert fsdp == pytest.approx(1.5 * data)
    assert fsdp == pytest.approx(3 * N * 63 / 64 / 50e9)


def test_tensor_parallel_traffic_has_its_ring_factor_both_passes_and_one_direction():
    # in print: bytes over the printed 900 GB/s, two all-reduces a layer; 48 ms where 330 was real
    activations = 8192 * 8192 * 2
    printed = 80 * 2 * activations / 900e9
    real = 80 * 4 * time_s("all-reduce", activations, flat(8, Link("nvlink", "nvlink", 450e9, 0.0)), "ring").seconds
    assert real / printed == pytest.approx(2 * 2 * 14 / 8)  # backward, one direction, ring: 7 times


def test_the_hops_of_a_ring_cost_what_its_gather_costs():
    hop = hop_s(1e8, flat(8))
    assert 7 * hop.seconds == pytest.approx(time_s("all-gather", 8e8, flat(8)).seconds)
    assert hop.seconds == pytest.approx(2e-6 + 1e8 / 450e9)
    assert sum(hop.by_link.values()) == pytest.approx(hop.seconds)
