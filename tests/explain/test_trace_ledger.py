"""The step ledger on hand-written traces with answers worked out by hand (times in microseconds)."""

import random
from collections import defaultdict

import pytest

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import event, gpu, host, kernel, step, write

COMPUTE = "Stream #14(Kernel)"
NCCL = "Stream #22(Kernel)"
COPY = "Stream #16(MemcpyH2D,MemcpyD2H)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def report_of(tmp_path, *hosts, names=("host0", "host1", "host2"), hlo=None):
    for name, planes in zip(names, hosts, strict=False):
        write(tmp_path / "capture" / f"{name}.xplane.pb", planes)
    if hlo is not None:
        (tmp_path / "capture" / "jit_train_step.hlo.txt").write_text(hlo)
    return to_json(analyze(load_profile(find_capture(tmp_path / "capture"))))


def micro(ledger):
    keys = ("total_s", "compute_s", "communication_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
    values = tuple(round(ledger[key] * 1e6, 6) for key in keys)
    assert sum(ledger["idle_by_cause"].values()) == pytest.approx(ledger["idle_s"])
    assert ledger["compute_s"] + ledger["exposed_communication_s"] + ledger["exposed_copy_s"] + ledger["idle_s"] == pytest.approx(
        ledger["total_s"]
    )
    assert abs(ledger["residual_s"]) < 1e-12
    return values


CASES = {
    "communication partly hidden by compute": (
        {COMPUTE: [kernel("gemm", 0, 10), kernel("gemm", 20, 30)], NCCL: [kernel(ALL_REDUCE, 5, 25)]},
        (30, 20, 20, 10, 0, 0),
    ),
    "two streams computing at once count once": (
        {COMPUTE: [kernel("gemm", 0, 10)], "Stream #15(Kernel)": [kernel("loop_fusion", 4, 16)]},
        (16, 16, 0, 0, 0, 0),
    ),
    "copies are exposed where nothing computes or communicates": (
        {
            COMPUTE: [kernel("gemm", 0, 10)],
            NCCL: [kernel(ALL_REDUCE, 12, 20)],
            COPY: [kernel("MemcpyH2D", 8, 14, memcpy_details="kind_src:pinned kind_dst:device size:64 dest:0 async:1")],
        },
        (20, 10, 8, 8, 2, 0),
    ),
    "a copy to a peer is communication": (
        {COMPUTE: [kernel("gemm", 0, 4)], COPY: [kernel("MemcpyP2P", 4, 10, memcpy_details="kind_src:device kind_dst:device size:8")]},
        (10, 4, 6, 6, 0, 0),
    ),
    "idle time between kernels": (
        {COMPUTE: [kernel("gemm", 0, 4), kernel("gemm", 9, 10)]},
        (10, 5, 0, 0, 0, 5),
    ),
    "a collective that only the HLO names": (
        {COMPUTE: [kernel("gemm", 0, 4, "dot.1"), kernel("fusion_kernel", 4, 9, "all-reduce-start.3")]},
        (9, 4, 5, 5, 0, 0),
    ),
    "a whole CUDA graph is compute": (
        {COMPUTE: [event("CudaGraphExecution", 0, 6, cuda_graph_exec_id=3, correlation_id=9), kernel("gemm", 6, 8)]},
        (8, 8, 0, 0, 0, 0),
    ),
    "kernels inside a CUDA graph count by themselves": (
        {COMPUTE: [kernel("gemm", 0, 3, cuda_graph_id=3), kernel(ALL_REDUCE, 3, 7, cuda_graph_id=3)]},
        (7, 3, 4, 4, 0, 0),
    ),
    "names of AMD's runtime and RCCL": (
        {
            COMPUTE: [kernel("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", 0, 10)],
            NCCL: [kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 10, 14), kernel("rcclKernel_x", 14, 15)],
            COPY: [
                kernel("CopyDeviceToHost", 15, 17),
                kernel("__amd_rocclr_copyBuffer", 17, 18),
                kernel("MemcpyD2D", 18, 19, memcpy_details="kind:Unknown size:4 dest:0 async:1"),
            ],
        },
        (19, 10, 5, 5, 4, 0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trace_without_steps_is_accounted_for_over_its_span(tmp_path, case):
    streams, expected = CASES[case]
    report = report_of(tmp_path, [gpu(0, streams)])
    (device,) = report["devices"]
    assert micro(device) == expected
    assert device["device"] == "host0/gpu:0"
    assert [s["step"] for s in report["steps"]] == [None]


def test_derived_lines_and_the_profilers_own_do_not_count(tmp_path):
    streams = {
        COMPUTE: [kernel("gemm", 0, 4), kernel("gemm", 9, 10)],
        "Steps": [event("1", 0, 10)],
        "XLA Modules": [event("jit_train_step", 0, 10)],
        "CUPTI overhead": [event("Overhead", 4, 9)],
    }
    assert micro(report_of(tmp_path, [gpu(0, streams)])["devices"][0]) == (10, 5, 0, 0, 0, 5)


def test_idle_time_is_given_over_the_devices_own_span_and_that_of_its_host(tmp_path):
    planes = [gpu(0, {COMPUTE: [kernel("gemm", 0, 10)]}), gpu(1, {COMPUTE: [kernel("gemm", 4, 6), kernel("gemm", 7, 8)]})]
    devices = report_of(tmp_path, planes)["devices"]
    assert [micro(device) for device in devices] == [(10, 10, 0, 0, 0, 0), (4, 3, 0, 0, 0, 1)]
    spans = [tuple(round(d[key] * 1e6) for key in ("span_s", "span_idle_s", "capture_s", "capture_idle_s")) for d in devices]
    assert spans == [(10, 0, 10, 0), (4, 1, 10, 7)]


def test_nested_thunks_of_the_cpu_backend_count_by_their_parts(tmp_path):
    def op(name, start, end, ordinal=0):
        return event(name, start, end, hlo_op=name, hlo_module="jit_f", program_id=1, run_id=5, device_ordinal=ordinal)

    threads = {
        "tf_XLAEigen/1": [op("while.1", 0, 20), op("dot.2", 0, 6), op("all-reduce.3", 6, 12), event("end: all-reduce.3", 12, 12.5)],
        "tf_XLAEigen/2": [op("dot.4", 14, 18), op("copy.5", 18, 19), event("Rendezvous", 6, 12, id=3), op("dot.2", 2, 20, ordinal=1)],
        "python": [event("PjitFunction(f)", 0, 1)],
    }
    first, second = report_of(tmp_path, [host(threads)])["devices"]  # over their own spans, as nothing marks steps
    assert micro(first) == (20, 10, 6, 6, 1, 3)  # the while itself is nothing: from 12 to 14 and from 19 on the device idles
    assert micro(second) == (18, 18, 0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_an_operation_of_the_cpu_backend_goes_on_to_its_marker(tmp_path, seed):
    """A device runs drawn operations on one thread; some return at once and go on in the pool, whose threads write their markers."""
    draw = random.Random(seed)
    lines = {f"tf_XLAEigen/{thread}": [] for thread in range(3)}
    busy, now, ended = {0: [], 1: []}, {0: 0, 1: 0}, defaultdict(int)
    for device in [0, 1, *draw.choices([0, 1], k=draw.randrange(5, 40))]:
        name = f"{draw.choice(['dot', 'copy_fusion'])}.{device}{draw.randrange(3)}"
        start = max(now[device], ended[name]) + draw.randrange(0, 5)
        now[device] = start + draw.randrange(1, 5)
        goes_on = draw.choice([0, 0, draw.randrange(1, 20)])
        ended[name] = now[device] + goes_on
        stats = {"hlo_op": name, "hlo_module": "jit_f", "program_id": 1, "run_id": 5, "device_ordinal": device}
        lines[f"tf_XLAEigen/{device}"].append(event(name, start, now[device], **stats))
        lines[f"tf_XLAEigen/{2 if goes_on else device}"].append(event(f"end: {name}", ended[name], ended[name]))
        busy[device].append((start, ended[name]))
    report = report_of(tmp_path, [host({**lines, "python": [event("PjitFunction(f)", 0, 1)]})])
    covered = [{n for start, end in busy[device] for n in range(start, end)} for device in (0, 1)]
    spans = [max(at) + 1 - min(at) for at in covered]
    assert [micro(device)[::5] for device in report["devices"]] == [(span, span - len(at)) for span, at in zip(spans, covered, strict=True)]


@pytest.mark.parametrize(
    ("waiting", "ledger"),
    [
        ([("fusion.2", 10, 12), ("fusion.3", 12, 13)], (13, 13, 0, 0, 0, 0)),  # the dot went on to 10, where another thread ended it
        ([("all-reduce.2", 1, 12), ("fusion.3", 12, 13)], (13, 2, 11, 11, 0, 0)),  # its thread was in a collective, not in the dot
        ([("all-reduce.2", 1, 100), ("fusion.3", 130, 131)], (131, 2, 99, 99, 0, 30)),  # the same, with a pause before what waited
        ([], (13, 13, 0, 0, 0, 0)),
    ],
)
def test_a_marker_behind_the_operations_that_waited_is_late(tmp_path, waiting, ledger):
    stats = {"hlo_module": "jit_f", "program_id": 1, "run_id": 5, "device_ordinal": 0}
    other = [event(name, start, end, hlo_op=name, **stats) for name, start, end in waiting]
    last = waiting[-1][2] if waiting else 13
    lines = {"tf_XLAEigen/1": [event("dot.1", 0, 1, hlo_op="dot.1", **stats)], "tf_XLAEigen/2": [*other, event("end: dot.1", last, last)]}
    report = report_of(tmp_path, [host({**lines, "python": [event("PjitFunction(f)", 0, 1)]})])
    assert micro(report["devices"][0]) == ledger


def test_an_operation_ends_where_its_device_begins_it_again(tmp_path):
    stats = {"hlo_op": "dot.1", "hlo_module": "jit_f", "program_id": 1, "run_id": 5, "device_ordinal": 0}
    runs = [event("dot.1", 0, 1, **stats), event("dot.1", 5, 6, **stats)]
    lines = {"tf_XLAEigen/1": runs, "tf_XLAEigen/2": [event("end: dot.1", 8, 8), event("end: dot.1", 9, 9)]}
    report = report_of(tmp_path, [host({**lines, "python": [event("PjitFunction(f)", 0, 1)]})])
    assert [(each["op"], round(each["time_s"] * 1e6, 6)) for each in report["operations"]] == [("dot.1", 9)]


def test_the_idle_time_is_split_by_what_the_host_did(tmp_path):
    main = [
        step(1, 0, 10),
        event("PjitFunction(train_step)", 1, 5),
        event("PrefetchDatasetIterator.__next__", 10, 30),
        event("backend_compile_and_load", 30, 34),
        event("save_checkpoint", 34, 40),
        step(2, 42, 50),
        event("PjitFunction(train_step)", 43, 48),
    ]
    ops = [kernel("gemm", 5, 12, "dot.1", 1), kernel("gemm", 48, 60, "dot.1", 2)]
    launches = [event("cuLaunchKernel", 4, 5, correlation_id=1), event("cuLaunchKernel", 47, 48, correlation_id=2)]
    report = report_of(tmp_path, [gpu(0, {COMPUTE: ops}), host({"python": main, "Host Threads/7": launches})])
    (device,) = report["devices"]
    assert micro(device) == (60, 19, 0, 0, 0, 41)
    causes = {cause: round(s * 1e6, 6) for cause, s in device["idle_by_cause"].items()}
    assert causes == {"data_wait": 18, "compile": 4, "checkpoint": 6, "launch": 4 + 5, "blocked": 0, "other": 1 + 2 + 1}
    assert [s["step"] for s in report["steps"]] == [1, 2]


def test_phases_of_the_event_log_tell_what_the_host_did(tmp_path):
    from ridgeline.rundir.events import EventLog, event_file
    from tests.explain.xspace import Plane

    run = tmp_path / "run"
    begun_s = 1_795_000_000.0
    now = iter([begun_s, begun_s + 10e-6, begun_s + 40e-6])
    log = EventLog(event_file(run, 0), run="r", clock=lambda: next(now), monotonic=lambda: 0.0)
    (run / "run.json").write_text("{}")
    with log.phase("save"):
        pass
    log.close()
    lines = event_file(run, 0).read_text().splitlines()
    event_file(run, 0).write_text("\n".join([*lines[:-1], lines[-1].replace('"duration_s":0.0', '"duration_s":0.00003')]) + "\n")
    planes = [
        gpu(0, {COMPUTE: [kernel("gemm", 0, 10), kernel("gemm", 50, 60)]}),
        Plane("Task Environment", {}, {"profile_start_time": round(begun_s * 1e9)}),
    ]
    directory = run / "tensorboard" / "plugins" / "profile" / "steps1-1"
    write(directory / "host0.xplane.pb", planes)
    (device,) = to_json(analyze(load_profile(find_capture(run))))["devices"]
    assert device["idle_by_cause"]["checkpoint"] == pytest.approx(30e-6, abs=1e-6)
    assert device["idle_s"] == pytest.approx(40e-6)
