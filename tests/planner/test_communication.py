"""Collective costs: the textbook formulas, orders that must hold for any numbers, published measurements, refusals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.cluster import load_cluster
from configs.errors import UserError
from planner.calibration import load_calibration
from planner.communication import OPS, bus_factor, time_s
from planner.links import CommGroup, Fabric, Link, Span

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
    assert time_s(op, size, group, "pipelined").seconds <= hierarchical * (1 + 1e-9)
    best = Link("best", "nvlink", fast.bandwidth_bytes_per_s, 0.0)
    assert hierarchical >= time_s(op, size, flat(group.size, best), "ring").seconds * (1 - 1e-9)


@given(st.sampled_from(OPS), st.floats(1, 1e12), st.integers(2, 4096), st.sampled_from([1, 8, 64]))
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


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    group = flat(64, NETWORK)
    assert time_s("all-reduce", 1e3, group).algorithm == "tree"
    assert time_s("all-reduce", 1e9, group).algorithm == "ring"


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
        (("all-reduce", N, flat(8), "in-switch"), "whose switch can reduce"),
    ],
)
def test_nonsense_is_refused_with_what_is_allowed(arguments, message):
    with pytest.raises(UserError, match=message):
        time_s(*arguments)


# Measured bus bandwidth in GB/s, which the shipped curves were read from or must agree with.
MEASURED = [
    ("dgx-h200", "all-reduce", 8, 1 << 20, 39.93, "ml-engineering, 8x H200"),
    ("dgx-h200", "all-reduce", 8, 64 << 20, 346.51, "ml-engineering, 8x H200"),
    ("dgx-h200", "all-reduce", 8, 1 << 30, 463.58, "ml-engineering, 8x H200"),
    ("dgx-h200", "all-gather", 8, 16 << 30, 361.4, "ml-engineering, section SHARP"),
    ("dgx-a100", "all-reduce", 8, 64 << 20, 171.54, "ml-engineering, 8x A100"),
    ("dgx-a100", "all-reduce", 8, 1 << 30, 229.04, "ml-engineering, 8x A100"),
    ("dgx-b200", "all-reduce", 32, 4 << 30, 377.34, "ml-engineering, 4 nodes of 8 B200"),
    ("dgx-b200", "all-reduce", 32, 1 << 30, 361.99, "ml-engineering, 4 nodes of 8 B200"),
]


@pytest.mark.parametrize(("cluster", "op", "devices", "size", "measured", "source"), MEASURED)
def test_calibrated_predictions_meet_published_measurements(cluster, op, devices, size, measured, source):
    fabric = Fabric.from_cluster(load_cluster(cluster).config, load_calibration(), num_devices=devices)
    assert time_s(op, size, fabric.group(1, devices)).bus_bandwidth / 1e9 == pytest.approx(measured, rel=0.1), source


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
