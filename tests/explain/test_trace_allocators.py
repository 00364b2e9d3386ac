"""The memory of the allocators over time: drawn sequences of allocations, as XLA's allocator records them."""

import csv
import json
import random

import pytest

from ridgeline.cli.main import run as ridge
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.perfetto import trace_events
from tests.explain.xspace import event, gpu, host, kernel, step, write

BF16, F32 = 14, 1


class Allocator:
    """An allocator whose state after every event is known; `early` bytes are in use before the capture."""

    def __init__(self, name, limit, early, seed):
        self.name, self.limit, self.early, self.draw = name, limit, early, random.Random(seed)
        self.live, self.events, self.in_use_at = {}, [], []
        self.lifetime_peak = early + self.draw.randrange(2 * early + 1)

    @property
    def in_use(self):
        return self.early + sum(size for size, *_ in self.live.values())

    def step(self, time_us):
        freed = self.live and self.draw.random() < 0.45
        if freed:
            address = self.draw.choice(sorted(self.live))
            size, operation, data_type, shape = self.live.pop(address)
            operation, data_type, shape = "", 0, ""  # the allocator does not know what it frees
        else:
            address = max(self.live, default=2**40) + 256
            size, operation = self.draw.randrange(1, 40) * 256, self.draw.choice(["jit_step", "jit_f", ""])
            data_type, shape = self.draw.choice([BF16, F32]), self.draw.choice(["[8,128]", "[]", ""])
            self.live[address] = (size, operation, data_type, shape)
        self.lifetime_peak = max(self.lifetime_peak, self.in_use)
        share = self.draw.choice([0, 0.25, 0.123457, float("nan")])
        stats = {"allocator_name": self.name, "bytes_reserved": 0, "bytes_allocated": self.in_use} | {
            "bytes_available": self.limit - self.in_use, "peak_bytes_in_use": self.lifetime_peak, "requested_bytes": size - 3
        }  # fmt: skip
        if share == share:
            stats["fragmentation"] = share
        what = {"allocation_bytes": size, "addr": address, "tf_op": operation, "data_type": data_type, "shape": shape, "id": 0}
        self.events.append(event("MemoryDeallocation" if freed else "MemoryAllocation", time_us, time_us, **stats, **what))
        self.in_use_at.append((time_us, self.in_use, dict(self.live), share))


def capture(path, allocators, count=300):
    """Two steps on a GPU; the events of the allocators are on two threads, mixed."""
    for number in range(count):
        for each in allocators:
            each.step(10 + number)
    every = [one for each in allocators for one in each.events]
    marks = [step(s, 200 * s, 200 * s + 190) for s in range(2)]
    work = [kernel("gemm", 200 * s + 20, 200 * s + 150, "dot.1") for s in range(2)]
    return write(path / "node.xplane.pb", [gpu(0, {"Stream #1": work}), host({"python": [*marks, *every[::2]], "loader": every[1::2]})])


@pytest.mark.parametrize("seed", range(4))
def test_the_peak_what_holds_it_and_the_curve_are_those_of_the_events(tmp_path, seed):
    drawn = [Allocator("GPU_0_bfc", 10**6, 50_000, seed), Allocator("xla_gpu_host_bfc", 10**7, 0, seed + 100)]
    trace = capture(tmp_path, drawn)
    profile = load_profile(find_capture(trace))
    found = {each.allocator: each for each in analyze(profile).allocators}
    assert set(found) == {"GPU_0_bfc", "xla_gpu_host_bfc"}
    for each in drawn:
        mine = found[each.name]
        time_us, in_use, live, share = max(each.in_use_at, key=lambda at: at[1])
        assert (mine.peak.in_use_bytes, mine.peak.time_s) == (in_use, pytest.approx(time_us * 1e-6))
        assert mine.peak.fragmentation == (None if share != share else pytest.approx(share, abs=1e-6))
        assert (mine.capacity_bytes, mine.lifetime_peak_bytes, mine.early_bytes) == (each.limit, each.lifetime_peak, each.early)
        assert mine.allocations + mine.frees == len(each.events)
        held = {}
        for size, operation, data_type, shape in live.values():
            key = operation or "unknown", {BF16: "bf16", F32: "f32"}[data_type], shape
            held[key] = held.get(key, 0) + size
        assert [h.bytes for h in mine.held] == sorted(held.values(), reverse=True)[:5]
        assert all(held[h.operation, h.data_type, h.shape] == h.bytes for h in mine.held)
        assert max(at.in_use_bytes for at in mine.timeline) == in_use and len(mine.timeline) <= 200
        drawn_at = {round(time_us * 1e6): in_use for time_us, in_use, *_ in each.in_use_at}
        assert all(drawn_at[round(at.time_s * 1e12)] == at.in_use_bytes for at in mine.timeline)


def test_the_events_are_in_the_tables_the_trace_and_the_output_and_are_no_host_activity(tmp_path, capsys):
    allocator = Allocator("GPU_0_bfc", 10**6, 0, 7)
    trace = capture(tmp_path, [allocator])
    assert ridge(["analyze", str(trace), "--tables", str(tmp_path / "t"), "--perfetto", str(tmp_path / "p.json")]) == 0
    shown = capsys.readouterr().out
    assert "memory of the allocators during the capture" in shown and "in use at the peak of GPU_0_bfc: " in shown
    with (tmp_path / "t" / "allocator_timeline.csv").open() as file:
        rows = list(csv.DictReader(file))
    peak = max(in_use for _, in_use, *_ in allocator.in_use_at)
    assert max(float(row["in_use_bytes"]) for row in rows) == peak
    assert {path.stem for path in (tmp_path / "t").iterdir()} >= {"allocators", "held_memory"}
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "GPU_0_bfc: memory in use"]
    assert [c["args"]["bytes"] for c in counters] == [in_use for _, in_use, *_ in allocator.in_use_at]
    assert [c["ts"] for c in counters] == sorted(c["ts"] for c in counters)
    assert any(e["name"] == "GPU_0_bfc: fragmentation" and 0 <= e["args"]["share"] <= 1 for e in events)
    assert not any(e["name"].startswith("Memory") for e in events)
    profile = load_profile(find_capture(trace))
    assert list(trace_events(profile, analyze(profile)))
    assert not any("Memory" in profile.hosts[0].host.strings[n] for t in profile.hosts[0].host.threads for n in t.name.tolist())


@pytest.mark.parametrize(
    "stats",
    [
        {"bytes_allocated": 512, "addr": 2**63 + 256, "allocation_bytes": 512},
        {"bytes_allocated": 512, "allocator_name": 12345678, "tf_op": 7, "shape": 99999, "data_type": 300},
        {"bytes_allocated": 512, "index_on_host": 3, "bytes_reserved": 1024, "fragmentation": float("inf")},
        {"bytes_allocated": 512, "fragmentation": 7, "bytes_available": 10},
    ],
)
def test_events_with_other_or_missing_statistics_are_read_too(tmp_path, stats):
    marks = [step(s, 100 * s, 100 * s + 90) for s in range(2)]
    work = [kernel("gemm", 100 * s + 20, 100 * s + 60, "dot.1") for s in range(2)]
    memory = [event("MemoryDeallocation", 1, 1, bytes_allocated=0, addr=5), event("MemoryAllocation", 30, 30, **stats)]
    memory.append(event("MemoryAllocation", 40, 40, other=1))
    trace = write(tmp_path / "node.xplane.pb", [gpu(0, {"Stream #1": work}), host({"python": [*marks, *memory]})])
    found = analyze(load_profile(find_capture(trace))).allocators
    assert max(each.peak.in_use_bytes for each in found) == 512 + stats.get("bytes_reserved", 0)
    assert ridge(["analyze", str(trace)]) == 0
