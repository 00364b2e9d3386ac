"""Collectives: wire and waiting, stragglers, clocks of several hosts, bandwidths; and components from the HLO."""

from pathlib import Path

import pytest

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.planner.hardware import hardware
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import gpu, host, kernel, step, write

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
HLO = Path(__file__).with_name("trace_gpu.hlo.txt").read_text()


def capture(tmp_path, *hosts, hlo=None):
    for number, planes in enumerate(hosts):
        write(tmp_path / "capture" / f"host{number}.xplane.pb", planes)
    if hlo is not None:
        (tmp_path / "capture" / "jit_train_step.hlo.txt").write_text(hlo)
    return find_capture(tmp_path / "capture")


def device(ordinal, arrive, end, *, start_ns=0, steps=1, period=1000):
    """Compute until `arrive`, then an all-reduce until `end`, every `period` us."""
    compute = [kernel("gemm", period * s, period * s + arrive, "dot.2") for s in range(steps)]
    talk = [kernel(NCCL, period * s + arrive, period * s + end, "all-reduce-start.1") for s in range(steps)]
    return gpu(ordinal, {"Stream #14(Kernel)": compute, "Stream #22(Kernel)": talk}, start_ns=start_ns)


def test_waiting_is_separated_from_transfer_and_the_last_rank_is_named(tmp_path):
    planes = [device(0, 100, 200), device(1, 100, 200), device(2, 180, 200), device(3, 110, 200)]
    report = to_json(analyze(load_profile(capture(tmp_path, planes))))
    (traffic,) = report["collectives"]
    assert traffic["kind"] == "all-reduce"
    assert traffic["time_s"] == pytest.approx((100 + 100 + 20 + 90) / 4 * 1e-6)
    assert traffic["wait_s"] == pytest.approx((80 + 80 + 0 + 70) / 4 * 1e-6)
    assert traffic["wire_s"] == pytest.approx(20e-6)
    (straggler,) = report["stragglers"]
    assert (straggler["host"], straggler["device"], straggler["last_share"]) == ("host0", "host0/gpu:2", 1.0)
    assert straggler["cost_s"] == pytest.approx(70e-6)  # what it alone is to blame for: the second to last came at 110


def test_ranks_that_take_turns_in_being_last_are_no_stragglers(tmp_path):
    def turns(ordinal, arrivals):
        talk = [kernel(NCCL, 1000 * s + a, 1000 * s + 200, "all-reduce-start.1") for s, a in enumerate(arrivals)]
        return gpu(ordinal, {"Stream #22(Kernel)": talk})

    report = to_json(
        analyze(load_profile(capture(tmp_path, [turns(0, [100, 190, 100]), turns(1, [190, 100, 100]), turns(2, [100, 100, 190])])))
    )
    assert report["stragglers"] == []


def test_only_the_members_of_a_group_wait_for_each_other(tmp_path):
    planes = [device(0, 100, 140), device(1, 120, 140), device(2, 180, 200), device(3, 150, 200)]
    report = to_json(analyze(load_profile(capture(tmp_path, planes, hlo=HLO))))
    (traffic,) = report["collectives"]
    assert traffic["wait_s"] == pytest.approx((20 + 0 + 0 + 30) / 4 * 1e-6)
    size = 1024 * 1024 * 2
    assert (traffic["layer"], traffic["phase"], traffic["group_size"], traffic["bytes"]) == ("attention", "backward", 2, size)
    assert traffic["algorithm_bandwidth"] == pytest.approx(size / 20e-6)
    assert traffic["bus_bandwidth"] == pytest.approx(size / 20e-6)  # 2 (n-1)/n is 1 for two


def test_clocks_of_hosts_are_aligned_on_the_ends_of_shared_collectives(tmp_path):
    """The second host's clock is 5 ms ahead, and its device really does come last by 60 us."""
    first = [device(0, 100, 200, steps=3), host({"python": [step(s, 1000 * s, 1000 * s + 900) for s in range(3)]})]
    second = [
        device(0, 160, 200, steps=3, start_ns=5_000_000),
        host({"python": [step(s, 1000 * s, 1000 * s + 900) for s in range(3)]}, start_ns=5_000_000),
    ]
    second[0].lines = {name: [(n, a + 3, b + 3, s) for n, a, b, s in events] for name, events in second[0].lines.items()}
    report = to_json(analyze(load_profile(capture(tmp_path, first, second))))
    (traffic,) = report["collectives"]
    assert traffic["wait_s"] == pytest.approx((60 + 0) / 2 * 1e-6)
    assert [s["device"] for s in report["stragglers"]] == ["host1/gpu:0"]
    assert report["clock_offsets_s"]["host1"] == pytest.approx(5e-3 + 3e-6)


def test_a_straggler_costs_what_it_costs_in_the_median_step(tmp_path):
    """One step in which a device comes 700 us late does not make it a straggler; one that is late in every step is."""
    for lateness, expected in (([0, 0, 700, 0, 0], []), ([40, 40, 700, 40, 40], [("host0/gpu:1", pytest.approx(40e-6))])):
        planes = [device(n, 100, 900, steps=5) for n in range(2)]
        late = planes[1].lines["Stream #22(Kernel)"]
        planes[1].lines["Stream #22(Kernel)"] = [(n, a + by, b, s) for (n, a, b, s), by in zip(late, lateness, strict=True)]
        planes.append(host({"python": [step(s, 1000 * s, 1000 * s + 5) for s in range(5)]}))
        report = to_json(analyze(load_profile(capture(tmp_path, planes))))
        assert [(s["device"], s["cost_s"]) for s in report["stragglers"] if s["device"].endswith("1")] == expected


def test_calls_that_differ_between_devices_are_not_split(tmp_path):
    planes = [device(0, 10, 20, steps=2), device(1, 10, 20, steps=2), host({"python": [step(0, 0, 5), step(1, 1000, 1005)]})]
    del planes[1].lines["Stream #22(Kernel)"][1]
    report = to_json(analyze(load_profile(capture(tmp_path, planes))))
    assert report["collectives"][0]["wait_s"] is None
    assert any("could not be matched" in note for note in report["notes"])


def test_compute_is_divided_by_component_and_pass_with_flops_bytes_and_ceilings(tmp_path):
    us = {"dot.1": (0, 10), "dot.2": (10, 30), "multiply.3": (40, 50), "subtract.4": (50, 55)}
    ops = [kernel(f"{op}_kernel", a, b, op) for op, (a, b) in us.items()]
    talk = [kernel(NCCL, 30, 44, "all-reduce-start.1")]
    planes = [gpu(n, {"Stream #14(Kernel)": ops, "Stream #22(Kernel)": talk}, gpu_device_name="NVIDIA H100 80GB HBM3") for n in range(4)]
    report = to_json(analyze(load_profile(capture(tmp_path, planes, hlo=HLO))))
    h100 = hardware(report["hardware"])
    found = {(c["component"], c["phase"]): c for c in report["components"]}
    assert {key: round(c["time_s"] * 1e6, 6) for key, c in found.items()} == {
        ("mlp", "forward"): 10,
        ("attention", "backward"): 20,
        ("mlp", "recompute"): 10,
        ("optimizer", "update"): 5,
    }
    mlp = found["mlp", "forward"]
    assert mlp["flops"] == 2 * 1024**3
    assert mlp["bytes"] == 3 * 2 * 1024**2
    assert mlp["share"] == pytest.approx(10 / 45)
    least_s = max(2 * 1024**3 / h100.peak_flops["bfloat16"], 3 * 2 * 1024**2 / h100.memory_bandwidth_bytes_per_s)
    assert mlp["ceiling_s"] == pytest.approx(least_s)
    assert mlp["attained"] == pytest.approx(least_s / 10e-6)
    assert mlp["headroom_s"] == pytest.approx(10e-6 - least_s)
    assert found["mlp", "recompute"]["flops"] == 0
    longest = report["operations"][0]
    assert (longest["op"], longest["source"]) == ("dot.2", "models/attention.py:34")
    assert report["collectives"][0]["exposed_s"] == pytest.approx(10e-6)  # 30 to 40: the multiplication hides the rest


def test_without_hlo_the_path_in_the_trace_names_component_and_pass(tmp_path):
    ops = [
        kernel("k1", 0, 6, "fusion.1", tf_op="jit(train_step)/jvp(loss)/add"),
        kernel("k2", 6, 8, "fusion.2", name="jit(train_step)/transpose(jvp(mlp))/mul"),
        kernel("k3", 8, 9, "fusion.3"),
    ]
    report = to_json(analyze(load_profile(capture(tmp_path, [gpu(0, {"Stream #14(Kernel)": ops})]))))
    assert [(c["component"], c["phase"]) for c in report["components"]] == [("loss", "forward"), ("mlp", "backward"), ("other", "unknown")]
    assert report["components"][0]["flops"] is None
    assert report["components"][0]["ceiling_s"] is None
    assert any("no HLO beside the profile" in note for note in report["notes"])
