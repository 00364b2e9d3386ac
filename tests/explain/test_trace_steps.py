"""Assigning device work to steps: every kind of evidence, the host ahead of the device, cut traces."""

import pytest

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import event, gpu, host, kernel, step, write

STREAM = "Stream #14(Kernel)"


def report_of(tmp_path, *planes):
    return to_json(analyze(load_profile(find_capture(write(tmp_path / "host0.xplane.pb", planes)))))


def bounds(report):
    """Step -> (total, compute) in microseconds."""
    return {s["step"]: (round(s["total_s"] * 1e6, 6), round(s["compute_s"] * 1e6, 6)) for s in report["steps"]}


def ahead(correlated=True, steps=3, kernels=2):
    """The host launches a step every 10 us and is then far ahead: each step takes the device 100 us (two kernels of 45)."""
    main = [step(s, 10 * s, 10 * s + 8) for s in range(steps)]
    launches, ops = [], []
    for s in range(steps):
        for k in range(kernels):
            number = kernels * s + k + 1
            launches.append(event("cuLaunchKernelEx", 10 * s + 1 + k, 10 * s + 2 + k, correlation_id=number))
            begin = 20 + 100 * s + 50 * k
            ops.append(kernel(f"gemm_{k}", begin, begin + 45, f"dot.{k}", number if correlated else None))
    return [gpu(0, {STREAM: ops}), host({"python": main, "Host Threads/7": launches})]


def test_launches_tell_the_step_when_the_host_runs_ahead(tmp_path):
    report = report_of(tmp_path, *ahead())
    assert report["step_assignment"] == [{"method": "launch correlation", "covered": 1.0}]
    # step 0 from its annotation to the end of its work at 115; the others from there to the end of theirs
    assert bounds(report) == {0: (115, 90), 1: (100, 90), 2: (100, 90)}
    assert report["summary"]["total_s"]["p50"] == pytest.approx(100e-6)
    assert report["summary"]["total_s"]["mean"] == pytest.approx(105e-6)


def test_without_correlation_the_executions_of_the_program_are_counted(tmp_path):
    report = report_of(tmp_path, *ahead(correlated=False))
    assert report["step_assignment"] == [{"method": "program id", "covered": 1.0}]
    assert bounds(report) == {0: (115, 90), 1: (100, 90), 2: (100, 90)}


def test_a_few_missing_correlations_do_not_matter(tmp_path):
    planes = ahead(kernels=10)
    ops = planes[0].lines[STREAM]
    del ops[13][3]["correlation_id"]
    report = report_of(tmp_path, *planes)
    ((found,),) = [report["step_assignment"]]
    assert found["method"] == "launch correlation"
    assert found["covered"] == pytest.approx(29 / 30)


def test_run_ids_tell_the_step_on_the_cpu_backend(tmp_path):
    main = [step(s, 10 * s, 10 * s + 8) for s in range(2)]
    calls = [event("CommonPjRtLoadedExecutable::Execute (jit_f)", 10 * s + 1, 10 * s + 5, run_id=70 + s) for s in range(2)]
    ops = [event("dot.1", 6 + 60 * s, 60 + 60 * s, hlo_op="dot.1", hlo_module="jit_f", run_id=70 + s, device_ordinal=0) for s in range(2)]
    report = report_of(tmp_path, host({"python": sorted(main + calls, key=lambda e: e[1]), "tf_XLAExecute/4": ops}))
    assert report["step_assignment"][0]["method"] == "run id"
    assert bounds(report) == {0: (60, 54), 1: (60, 54)}


def test_an_executors_run_id_is_no_launch_on_a_lone_cpu_device(tmp_path):
    """As the CPU backend writes it for one device: the call has no run id, the executor's wait has, after the next step's annotation."""
    main = [step(7, 0, 5), step(8, 6, 8), step(9, 60, 62)]
    runs = [(7, 6, 58), (8, 64, 118), (9, 120, 170)]  # step 8 begins after the annotation of step 9
    waits = [event("ThunkExecutor::Execute (wait for completion)", a, b, run_id=70 + s, device_ordinal=0) for s, a, b in runs]
    ops = [
        event(f"dot.{k}", a + 20 * k, a + 20 * k + 18, hlo_op=f"dot.{k}", hlo_module="jit_f", program_id=1, run_id=70 + s, device_ordinal=0)
        for s, a, _ in runs
        for k in range(2)
    ]
    report = report_of(tmp_path, host({"python": main, "tf_XLAPjRtCpuClient/1": waits, "tf_XLAEigen/2": ops}))
    assert [s["step"] for s in report["steps"]] == [7, 8, 9]
    assert report["notes"][:1] != ["step 8 is only partly in the trace and left out"]
    assert {s["step"]: round(s["compute_s"] * 1e6) for s in report["steps"]} == {7: 36, 8: 36, 9: 36}
    assert report["step_assignment"][0]["method"] == "program id"


def test_with_no_evidence_time_decides(tmp_path):
    ops = [kernel("a", 1, 5), kernel("b", 11, 17), kernel("b", 17, 19)]
    report = report_of(tmp_path, gpu(0, {STREAM: ops}), host({"python": [step(4, 0, 10), step(5, 10, 20)]}))
    assert report["step_assignment"][0]["method"] == "time"
    assert bounds(report) == {4: (10, 4), 5: (10, 8)}


def test_a_partial_step_is_left_out_with_a_note(tmp_path):
    planes = ahead(steps=4, kernels=10)
    planes[0].lines[STREAM] = planes[0].lines[STREAM][:33]
    report = report_of(tmp_path, *planes)
    assert [s["step"] for s in report["steps"]] == [0, 1, 2]
    assert "step 3 is only partly in the trace and left out" in report["notes"]
    assert report["devices"][0]["steps"] == 3


def test_steps_that_only_one_host_has_are_left_out(tmp_path):
    for name, count in (("host0", 3), ("host1", 2)):
        write(tmp_path / "capture" / f"{name}.xplane.pb", ahead(steps=count))
    report = to_json(analyze(load_profile(find_capture(tmp_path / "capture"))))
    assert [s["step"] for s in report["steps"]] == [0, 1]
    assert [d["device"] for d in report["devices"]] == ["host0/gpu:0", "host1/gpu:0"]
    assert [h["devices"] for h in report["hosts"]] == [["host0/gpu:0"], ["host1/gpu:0"]]


def test_the_queue_and_the_launch_rate_of_a_host(tmp_path):
    (found,) = report_of(tmp_path, *ahead())["hosts"]
    assert found["launches"] == 6
    assert found["launches_per_s"] == pytest.approx(6 / 315e-6)
    # launched at 2,3 | 12,13 | 22,23, begun at 20,70 | 120,170 | 220,270
    waits = [18, 67, 108, 157, 198, 247]
    assert found["launch_to_start_s"] == pytest.approx(sum(waits) / 6 * 1e-6)
    assert found["queue_depth_mean"] == pytest.approx(sum(waits) / 315)


def test_a_wait_that_starves_the_device_is_named_with_its_line(tmp_path):
    def frame(name, start, end):
        return event(name, start, end)

    main = [
        step(0, 0, 100),
        frame("$train.py:42 log_loss", 20, 160),
        frame("$/venv/site-packages/jax/_src/array.py:300 __float__", 30, 150),
        event("np.asarray(jax.Array)", 40, 140),
        step(1, 300, 400),
        event("np.asarray(jax.Array)", 410, 480),  # the device goes on at once: harmless
        step(2, 500, 600),
    ]
    ops = [kernel("a", 10, 140, "dot.1", 1), kernel("a", 320, 500, "dot.1", 2), kernel("a", 501, 600, "dot.1", 3)]
    launches = [event("cuLaunchKernel", t, t + 1, correlation_id=i) for i, t in ((1, 5), (2, 310), (3, 500))]
    report = report_of(
        tmp_path, gpu(0, {STREAM: ops}), host({"python": sorted(main, key=lambda e: (e[1], -e[2])), "Host Threads/7": launches})
    )
    (sync,) = report["hosts"][0]["syncs"]
    assert (sync["what"], sync["source"], sync["count"]) == ("np.asarray(jax.Array)", "train.py:42", 1)
    assert sync["wait_s"] == pytest.approx(100e-6)
    assert sync["idle_after_s"] == pytest.approx(100e-6)  # of 180: without the wait the host would have come 100 earlier


def waits(tmp_path, reads, ops):
    """Return what is found of reads at these times, beside a device that works at these times; both in microseconds."""
    main = [step(s, 1000 * s, 1000 * s + 900) for s in range(2)] + [event("np.asarray(jax.Array)", *read) for read in reads]
    kernels = [kernel("gemm", begin, end, "dot.1", number) for number, (begin, end) in enumerate(ops, 1)]
    launches = [event("cuLaunchKernel", begin - 2, begin - 1, correlation_id=number) for number, (begin, _) in enumerate(ops, 1)]
    lines = {"python": sorted(main, key=lambda e: (e[1], -e[2])), "Host Threads/7": launches}
    (found,) = report_of(tmp_path, gpu(0, {STREAM: kernels}), host(lines))["hosts"]
    return [round(sync["idle_after_s"] * 1e6) for sync in found["syncs"]], round(found["waits_s"] * 1e6)


STEPS = [(10, 200), (1010, 1200)]
"""Work of two steps; the host is busy with other things for the rest of their time."""


def test_reading_what_is_ready_while_the_device_idles_is_no_wait(tmp_path):
    assert waits(tmp_path, [(210 + 60 * k, 260 + 60 * k) for k in range(5)], STEPS) == ([], 0)


def test_a_short_read_in_which_the_work_happens_to_end_is_not_charged_with_all_that_follows(tmp_path):
    assert waits(tmp_path, [(170, 220)], STEPS) == ([30], 50)


def test_a_wait_followed_by_reads_of_what_is_there_is_charged_once(tmp_path):
    assert waits(tmp_path, [(20, 205), (210, 250), (255, 300)], STEPS) == ([180], 185)


def test_a_late_wake_up_is_part_of_what_a_wait_costs(tmp_path):
    assert waits(tmp_path, [(100, 700)], STEPS) == ([100], 600)


def test_a_wait_that_ends_while_the_device_goes_on_is_harmless(tmp_path):
    assert waits(tmp_path, [(20, 150)], STEPS) == ([], 130)
    assert waits(tmp_path, [(20, 150)], [(10, 149), (149, 200), (1010, 1200)]) == ([], 130)


def test_a_wait_leaves_nobody_without_work_while_another_device_has_some(tmp_path):
    main = [step(0, 0, 900), event("np.asarray(jax.Array)", 20, 205), step(1, 1000, 1900)]
    planes = [gpu(0, {STREAM: [kernel("a", *t) for t in STEPS]}), gpu(1, {STREAM: [kernel("a", 10, 990), kernel("a", 1010, 1900)]})]
    (found,) = report_of(tmp_path, *planes, host({"python": main}))["hosts"]
    assert found["syncs"] == []


def test_compilations_in_the_loop_are_counted_once_each(tmp_path):
    main = [step(0, 0, 50), event("backend_compile", 5, 30), event("XlaCompile: jit_f", 6, 29), event("backend_compile", 35, 40)]
    report = report_of(tmp_path, gpu(0, {STREAM: [kernel("a", 41, 50)]}), host({"python": main}))
    (found,) = report["hosts"][0]["compilations"]
    assert (found["program"], found["count"]) == ("backend_compile", 2)
    assert found["duration_s"] == pytest.approx(30e-6)
