"""Assigning device work to steps: every kind of evidence, the host ahead of the device, cut traces."""

import random
import statistics

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.read import ProgramKey, read_hosts
from ridgeline.rundir.analysis import to_json
from tests.explain.xspace import event, gpu, host, kernel, step, write

STREAM = "Stream #14(Kernel)"


def report_of(tmp_path, *planes, **options):
    return to_json(analyze(load_profile(find_capture(write(tmp_path / "host0.xplane.pb", planes))), **options))


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
    report = report_of(tmp_path, *planes, warm_up=0)
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


def test_a_wait_that_ends_while_the_device_works_is_harmless(tmp_path):
    assert waits(tmp_path, [(20, 150)], STEPS) == ([], 130)
    assert waits(tmp_path, [(20, 150)], [(10, 149), (149, 200), (1010, 1200)]) == ([], 130)


def test_a_wait_idles_no_device_while_another_one_works(tmp_path):
    main = [step(0, 0, 900), event("np.asarray(jax.Array)", 20, 205), step(1, 1000, 1900)]
    planes = [gpu(0, {STREAM: [kernel("a", *t) for t in STEPS]}), gpu(1, {STREAM: [kernel("a", 10, 990), kernel("a", 1010, 1900)]})]
    (found,) = report_of(tmp_path, *planes, host({"python": main}))["hosts"]
    assert found["syncs"] == []


def test_programs_of_one_name_are_different_programs_and_hosts_agree_on_them(tmp_path):
    """Five `jit_dot` of other shapes on two hosts, the second of which compiled something else before them."""
    for name, shift in (("host0", 0), ("host1", 3)):
        ops = [event("gemm", 10 * p, 10 * p + p + 1, hlo_op="dot.1", hlo_module="jit_dot", program_id=20 + p + shift) for p in range(5)]
        more = [event("gemm", 90, 91, hlo_op="dot.1", hlo_module="jit_first", program_id=20)] if shift else []
        write(tmp_path / f"{name}.xplane.pb", [gpu(0, {STREAM: ops + more})])
    hosts = read_hosts(find_capture(tmp_path).traces)
    assert [found.program_ids for found in hosts] == [{}, {23 + p: 20 + p for p in range(5)}]
    for found in hosts:
        ops = found.devices[0].ops
        keys = [found.program_key(*pair) for pair in zip(ops.module.tolist(), ops.program.tolist(), strict=True)]
        assert keys[:5] == [ProgramKey("jit_dot", 20 + p) for p in range(5)]


def loop(draw, names=("train", "evaluate")):
    """Draw a training loop in epochs with evaluations in between: the planes, and what the device does in each training step.

    The host launches each call in its annotation and runs ahead; the device works through the calls one after another. Numbers of steps
    restart in every epoch. Returns the planes, [number, total, compute] of every training step in microseconds, and the totals of the
    evaluation steps.
    """
    marks, launches, ops, calls = [], [], [], []
    host_us, device_us = 0, 20
    for _ in range(draw.randint(2, 3)):
        calls += [("train", s, draw.randint(60, 90)) for s in range(draw.randint(2, 4))]
        calls += [("evaluate", s, draw.randint(10, 20)) for s in range(draw.randint(0, 6))]
    for correlation, (name, number, length) in enumerate(calls):
        marks.append(event(names[name == "evaluate"], host_us, host_us + 4, step_num=number, _r=1))
        marks.append(event(f"PjitFunction({name})", host_us + 0.5, host_us + 3))
        launches.append(event("cuLaunchKernel", host_us + 1, host_us + 2, correlation_id=correlation))
        program = {"hlo_op": "dot.1", "hlo_module": f"jit_{name}", "program_id": len(name), "correlation_id": correlation}
        ops.append(event("gemm", device_us, device_us + length, **program))
        host_us, device_us = host_us + 5, device_us + length + draw.randint(0, 5)
    ends = [round(op[2]) for op in ops]
    begins = [0, *(max(end, 5 * (i + 1)) for i, end in enumerate(ends[:-1]))]
    stops = [*begins[1:], max(ends[-1], host_us - 1)]
    found = [(name, number, stop - begin, length) for (name, number, length), begin, stop in zip(calls, begins, stops, strict=True)]
    planes = [gpu(0, {STREAM: ops}), host({"python": marks, "Host Threads/7": launches})]
    return planes, [each[1:] for each in found if each[0] == "train"], [each[1:] for each in found if each[0] == "evaluate"]


@pytest.mark.parametrize("seed", range(8))
def test_steps_are_windows_of_the_annotation_that_launches_the_main_program(tmp_path, seed):
    """Numbers that restart give as many steps as there are windows; ledger, components and operations are of the same ones."""
    planes, training, evaluation = loop(random.Random(seed))
    report = report_of(tmp_path, *planes, warm_up=0)
    assert (report["unit"], report["marker"], report["main_program"]) == ("step", "train", "jit_train")
    assert [(s["step"], round(s["total_s"] * 1e6), round(s["compute_s"] * 1e6)) for s in report["steps"]] == training
    assert len({s["window"] for s in report["steps"]}) == len(training)
    mean_s = sum(compute for _, _, compute in training) / len(training) * 1e-6
    assert report["summary"]["compute_s"]["mean"] == pytest.approx(mean_s)
    assert sum(c["time_s"] for c in report["components"]) == pytest.approx(mean_s)
    assert [(o["module"], o["runs"]) for o in report["operations"]] == [("jit_train", 1.0)]
    if evaluation:
        assert any("'train', which launch 100% of the time of jit_train; others: 'evaluate' 0%" in note for note in report["notes"])
        chosen = report_of(tmp_path, *planes, warm_up=0, annotation="evaluate")
        assert [(s["step"], round(s["total_s"] * 1e6), round(s["compute_s"] * 1e6)) for s in chosen["steps"]] == evaluation
    with pytest.raises(UserError, match="unknown step annotation 'trian'; did you mean 'train'"):
        report_of(tmp_path, *planes, annotation="trian")


def test_the_innermost_annotation_around_the_launches_counts_whatever_the_order_of_their_names(tmp_path):
    def both(inner, outer):
        planes, training, _ = loop(random.Random(3), names=(inner, "other"))
        planes[1].lines["python"] = [event(outer, 0, 500, step_num=0, _r=1), *planes[1].lines["python"]]
        return report_of(tmp_path, *planes, warm_up=0), training

    for inner, outer in (("a", "b"), ("b", "a")):
        report, training = both(inner, outer)
        assert (report["marker"], len(report["steps"])) == (inner, len(training))


@pytest.mark.parametrize("seed", range(6))
def test_without_launches_the_calls_or_executions_of_the_main_program_choose_the_annotation(tmp_path, seed):
    planes, training, evaluation = loop(random.Random(seed))
    if len(training) != len(evaluation):  # then their numbers are enough
        planes[1].lines["python"] = [each for each in planes[1].lines["python"] if each[3]]
    for op in planes[0].lines[STREAM]:
        del op[3]["correlation_id"]
    report = report_of(tmp_path, *planes, warm_up=0)
    assert report["marker"] == "train"
    assert [(s["step"], round(s["compute_s"] * 1e6)) for s in report["steps"]] == [(number, compute) for number, _, compute in training]


@pytest.mark.parametrize("seed", range(8))
def test_without_annotations_the_executions_of_the_main_program_are_the_steps(tmp_path, seed):
    """Drawn programs with loops, rare branches and several kernels per instruction; some run ids; another program in between."""
    draw = random.Random(seed)
    loops, count = draw.randint(2, 5), draw.randint(2, 7)
    body = [("dot.2", "gemm"), ("dot.2", "splitK"), ("add.3", "fusion")]
    ops, now, starts, busy = [], 0, [], []

    def run(op, name, length, module, **more):
        nonlocal now
        ops.append(event(name, now, now + length, hlo_op=op, hlo_module=module, program_id=3, **more))
        now += length
        return length

    for execution in range(count):
        run_id = {"run_id": 1000 + execution} if seed % 2 else {}
        starts.append(now)
        spent = sum(run(op, "k", 30, "jit_step", **run_id) for op in ("copy.1", "mul.4"))
        spent += sum(run(op, name, draw.randint(5, 9), "jit_step", **run_id) for _ in range(loops) for op, name in body)
        if execution == 1:
            spent += run("branch.9", "rare", 4, "jit_step", **run_id)
        last = now
        now += draw.randint(0, 9)
        if draw.random() < 0.5 and execution < count - 1:
            spent += run("neg.1", "other", 3, "jit_other")
        busy.append(spent)
    report = report_of(tmp_path, gpu(0, {STREAM: ops}), warm_up=0)
    assert (report["unit"], report["marker"]) == ("execution", "jit_step")
    ends = [*starts[1:], last]
    totals = [(None, end - start, spent) for start, end, spent in zip(starts, ends, busy, strict=True)]
    assert [(s["step"], round(s["total_s"] * 1e6), round(s["compute_s"] * 1e6)) for s in report["steps"]] == totals
    assert report["devices"][0]["assignment"] == "executions"


def test_without_annotations_and_a_main_program_nothing_is_a_step(tmp_path):
    many = [event("gemm", 10 * p, 10 * p + 5, hlo_op="dot.1", hlo_module="jit_dot", program_id=p) for p in range(5)]
    for ops in (many, [kernel("gemm", 0, 5), kernel("gemm", 8, 9)]):
        report = report_of(tmp_path, gpu(0, {STREAM: ops}))
        assert (report["unit"], report["marker"], [s["step"] for s in report["steps"]]) == ("capture", None, [None])
        assert any("not of steps" in note for note in report["notes"])


def test_a_device_that_only_copies_is_left_out_of_the_means(tmp_path):
    copies = [kernel("MemcpyD2H", 0, 400, memcpy_details="kind_src:device kind_dst:pinned size:4")]
    planes = [gpu(0, {STREAM: [kernel("gemm", 100, 130), kernel("gemm", 170, 200)]}), gpu(1, {STREAM: copies})]
    report = report_of(tmp_path, *planes)
    (device,) = report["devices"]
    assert device["device"] == "host0/gpu:0"
    figures = [round(device[key] * 1e6) for key in ("total_s", "idle_s", "span_s", "span_idle_s", "capture_s", "capture_idle_s")]
    assert figures == [100, 40, 100, 40, 400, 340]
    assert any("host0/gpu:1 only copies or communicates" in note for note in report["notes"])


@pytest.mark.parametrize("seed", range(8))
def test_warm_up_is_left_out_of_all_figures_and_outliers_are_named(tmp_path, seed):
    draw = random.Random(seed)
    lengths = [draw.randint(100, 130) for _ in range(12)]
    skewed, slow = draw.random() < 0.7, draw.choice([None, draw.randint(2, 11)])
    if skewed:
        lengths[0] *= 7
    if slow is not None:
        lengths[slow] *= 3
    begins = [sum(lengths[:i]) for i in range(12)]
    marks = [step(40 + i, begin, begin + 5) for i, begin in enumerate(begins)]
    ops = [kernel("gemm", begin + 10, begin + 90, "dot.1", i + 1) for i, begin in enumerate(begins)]
    launches = [event("cuLaunchKernel", begin + 1, begin + 2, correlation_id=i + 1) for i, begin in enumerate(begins)]
    planes = [gpu(0, {STREAM: ops}), host({"python": marks, "Host Threads/7": launches})]
    report = report_of(tmp_path, *planes)
    lengths[-1] = 90  # the last step ends with its work
    usual = sorted(lengths[skewed:])
    assert [each["step"] for each in report["left_out"]] == [40] * skewed
    assert len(report["steps"]) == len(usual)
    assert report["summary"]["total_s"]["mean"] == pytest.approx(sum(usual) / len(usual) * 1e-6)
    assert report["summary"]["total_s"]["p50"] == pytest.approx(statistics.median(usual) * 1e-6, rel=0.05)
    expected = [] if slow in (None, 11) else [40 + slow]
    assert [each["step"] for each in report["outliers"]] == expected
    if expected:
        assert "idle is" in report["outliers"][0]["why"]
    assert [s["step"] for s in report_of(tmp_path, *planes, warm_up=3)["steps"]] == list(range(43, 52))
