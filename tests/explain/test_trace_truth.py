"""Totals against independent ones: HTA's definitions worked out cell by cell from the raw events, and xprof's kernel statistics."""

import json
import random
import re
from collections import defaultdict

import jax
import pytest
from jax.profiler import ProfileData

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import event, gpu, host, kernel, step, write

STEPS, LENGTH_US = 4, 200
DETAILS = "regs:32 static_shared:0 dynamic_shared:0 grid:1,1,1 block:128,1,1 occ_pct:50"
NAMES = {
    "compute": ["gemm_bf16", "loop_fusion", "softmax"],
    "communication": ["ncclDevKernel_AllReduce_Sum", "ncclDevKernel_AllGather"],
    "copy": ["MemcpyD2H", "Memset"],
}


@pytest.fixture(params=range(4))
def trace(request, tmp_path):
    """Kernels at random on three streams of two devices, each launched in the step it runs in."""
    rng = random.Random(request.param)
    planes, launches, number = [], [], 0
    for ordinal in range(2):
        streams = {}
        for stream, kind in enumerate(("compute", "communication", "copy")):
            events, now = [], 1
            while now < STEPS * LENGTH_US - 40:
                start = now + rng.randint(0, 25)
                end = start + rng.randint(1, 30)
                if start // LENGTH_US != end // LENGTH_US:  # work of a step ends in it
                    now = (end // LENGTH_US) * LENGTH_US + 1
                    continue
                number += 1
                name = rng.choice(NAMES[kind])
                stats = (
                    {"memcpy_details": "kind:D2H size:4"} if name == "MemcpyD2H" else {"memset_details": "size:4"} if kind == "copy" else {}
                )
                events.append(kernel(name, start, end, "", number, kernel_details=DETAILS, tf_op=f"jit(f)/{name}", **stats))
                launches.append(
                    event("cuLaunchKernelEx", start // LENGTH_US * LENGTH_US, start // LENGTH_US * LENGTH_US + 1, correlation_id=number)
                )
                now = end
            streams[f"Stream #{stream + 1}({kind})"] = events
        planes.append(gpu(ordinal, streams))
    marks = [step(s, s * LENGTH_US, s * LENGTH_US + 1) for s in range(STEPS)]
    planes.append(host({"python": marks, "Host Threads/7": sorted(launches, key=lambda e: e[1])}))
    return write(tmp_path / "node.xplane.pb", planes)


def cells_of(path):
    """Device -> kind -> the set of whole microseconds in which a kernel of the kind runs, and the same kernels' totals by name."""
    cells, totals = {}, {}
    kinds = {name: kind for kind, names in NAMES.items() for name in names}
    for plane in ProfileData.from_file(str(path)).planes:
        if found := re.fullmatch(r"/device:GPU:(\d+)", plane.name):
            mine = cells.setdefault(int(found[1]), {kind: set() for kind in NAMES})
            for line in plane.lines:
                for e in line.events:
                    first, last = round(e.start_ns / 1e3), round(e.end_ns / 1e3)
                    mine[kinds[e.name]] |= set(range(first, last))
                    count, spent = totals.get(e.name, (0, 0))
                    totals[e.name] = (count + 1, spent + last - first)
    return cells, totals


def test_shares_are_those_of_htas_definitions(trace):
    """HTA: idle is no kernel at all; compute time any compute kernel; non-compute the rest; overlap is communication under compute."""
    report = to_json(analyze(load_profile(find_capture(trace))))
    cells, _ = cells_of(trace)
    for device in report["devices"]:
        mine = cells[int(device["device"].rpartition(":")[2])]
        first, last = 0, max(max(cell) for cell in mine.values()) + 1
        busy = set().union(*mine.values())
        hta = {
            "compute_s": len(mine["compute"]),
            "communication_s": len(mine["communication"]),
            "exposed_communication_s": len(mine["communication"] - mine["compute"]),
            "exposed_copy_s": len(mine["copy"] - mine["compute"] - mine["communication"]),
            "idle_s": last - first - len(busy),
            "total_s": last - first,
            "overlapped_communication_s": len(mine["communication"] & mine["compute"]),
        }
        assert {key: round(device[key] * 1e6, 6) for key in hta} == hta
        non_compute = hta["exposed_communication_s"] + hta["exposed_copy_s"]  # HTA's name for both
        assert hta["compute_s"] + non_compute + hta["idle_s"] == hta["total_s"]


def test_kernel_times_equal_those_of_xprof(trace):
    from xprof.convert import raw_to_tool_data

    table, _ = raw_to_tool_data.xspace_to_tool_data([str(trace)], "kernel_stats", {})
    found = json.loads(table)
    columns = [column["id"] for column in found["cols"]]
    rows = [dict(zip(columns, (cell["v"] for cell in row["c"]), strict=True)) for row in found["rows"]]
    xprof = {row["kernel_name"]: (row["occurrences"], pytest.approx(row["total_duration_us"])) for row in rows}
    _, totals = cells_of(trace)
    assert totals == {name: xprof[name] for name in totals}  # the oracle reads the file as the test does
    report = to_json(analyze(load_profile(find_capture(trace))))
    scale = STEPS * len(report["devices"])
    ours = {o["kernel_name"]: (round(o["runs"] * scale), o["time_s"] * scale * 1e6) for o in report["operations"]}
    assert set(ours) == set(NAMES["compute"])
    assert ours == {name: xprof[name] for name in ours}


def busy_s(spans):
    """The length of the union of (start, end) in nanoseconds, in seconds."""
    busy_ns, reach = 0.0, 0.0
    for start, end in sorted(spans):
        busy_ns += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return busy_ns / 1e9


def test_a_real_capture_is_as_busy_as_its_raw_events(capture_dir):
    """Nested thunks of the CPU backend are left out, each stretch counts once. Markers `end:` lengthen operations that go on in the thread
    pool; markers behind an operation that was over add less than if every operation went on to its marker."""
    (path,) = capture_dir.glob("*.xplane.pb")
    spans, markers = defaultdict(list), defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for e in line.events:
                op = str(dict(e.stats).get("hlo_op", ""))
                if e.name.startswith("end: "):
                    markers[e.name.removeprefix("end: ")].append(e.start_ns)
                elif op and not re.match(r"(while|call|conditional)(?![a-z])", op):
                    spans[e.name].append((e.start_ns, e.end_ns))
    least_s = busy_s(span for name in spans for span in spans[name])
    marked = {name: len(markers[name]) == len(found) for name, found in spans.items()}
    assert sum(marked.values()) > len(spans) / 2
    most_s = busy_s(
        (start, max(end, marker))
        for name, found in spans.items()
        for (start, end), marker in zip(sorted(found), sorted(markers[name]) if marked[name] else [0.0] * len(found), strict=True)
    )
    (device,) = to_json(analyze(load_profile(find_capture(capture_dir))))["devices"]
    ours_s = device["compute_s"] + device["exposed_communication_s"] + device["exposed_copy_s"]
    assert 0 < least_s * 0.999 <= ours_s <= most_s * 1.001
