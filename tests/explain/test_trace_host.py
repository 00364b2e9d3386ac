"""What the host did while devices were idle: data waits, blocked threads, the Python frames of the capture, compilations."""

import random

import pytest

from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.host import ACTIVITIES
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.python_frames import own_frame
from ridgeline.rundir.analysis import to_json
from ridgeline.rundir.events import EventLog, event_file
from tests.explain.xspace import Plane, event, gpu, host, kernel, step, write

STREAM = "Stream #14(Kernel)"
PLACES = {
    "data_wait": [("$builtins next", "$loader.py:7 __next__", "$time sleep"), ("$input.py:30 get_next_batch", "$queue.py:154 get")],
    "blocked": [("$train.py:50 report", "$time sleep"), ("$train.py:60 stop", "$threading.py:604 wait", "$_thread.lock acquire")],
    "checkpoint": [("$checkpoint_manager.py:80 save", "$time sleep")],
    "launch": [("$train.py:9 call", "PjitFunction(train_step)", "$pjit.py:250 cache_miss")],
    "other": [("$train.py:70 log", "$json.py:3 dumps"), ("$contextlib.py:130 __enter__", "$builtins next")],
}
"""Cause -> nested calls on the main thread, the outermost first."""


def report_of(tmp_path, *planes, **options):
    return to_json(analyze(load_profile(find_capture(write(tmp_path / "host0.xplane.pb", planes))), **options))


def nested(names, start, end):
    return [event(name, start + k / 100, end - k / 100) for k, name in enumerate(names)]


@pytest.mark.parametrize("seed", range(8))
def test_idle_time_goes_to_what_the_host_did_and_to_its_place_in_the_program(tmp_path, seed):
    """One device that works 30 us in every step, and a host that does drawn things of drawn lengths in between."""
    draw = random.Random(seed)
    main, ops, launches, now = [], [], [], 0
    expected, places = dict.fromkeys(ACTIVITIES, 0) | {"other": 0}, {}
    for number in range(6):
        main += [step(number, now, now + 4)]
        launches.append(event("cuLaunchKernel", now, now + 1, correlation_id=number + 1))
        ops.append(kernel("gemm", now, now + 30, "dot.1", number + 1))
        now += 30
        for _ in range(draw.randint(1, 3)):
            cause = draw.choice(list(PLACES))
            names, length = draw.choice(PLACES[cause]), draw.randint(40, 400)
            main += nested(names, now, now + length)
            if number < 5:  # the last step ends with its work
                expected[cause] += length
                place = next((name[1:] for name in reversed(names) if own_frame(name)), None)
                if place:
                    places[place] = places.get(place, 0) + length
            now += length
    report = report_of(tmp_path, gpu(0, {STREAM: ops}), host({"python": main, "Host Threads/7": launches}), warm_up=0)
    (device,), (found,) = report["devices"], report["hosts"]
    causes = {cause: round(seconds * 1e6) for cause, seconds in device["idle_by_cause"].items()}
    assert causes == pytest.approx(expected, abs=1)
    assert sum(device["idle_by_cause"].values()) == pytest.approx(device["idle_s"])
    assert {each["source"]: round(each["idle_s"] * 1e6) for each in found["idle_sources"]} == pytest.approx(places, abs=1)
    for each in found["idle_sources"]:
        assert any(each["source"] in [name[1:] for name in names] for names in PLACES[each["cause"]])


def test_nested_frames_share_their_time_with_the_innermost(tmp_path):
    main = [event("$train.py:1 main", 0, 1000), event("$train.py:20 outer", 100, 600), event("$data.py:5 inner", 200, 300)]
    ops = [kernel("gemm", 0, 50), kernel("gemm", 900, 1000)]
    report = report_of(tmp_path, gpu(0, {STREAM: ops}), host({"python": main}))
    places = {each["source"]: round(each["idle_s"] * 1e6) for each in report["hosts"][0]["idle_sources"]}
    assert places == {"train.py:20 outer": 400, "train.py:1 main": 50 + 300, "data.py:5 inner": 100}


def compiling(start, threads=True, frames=True):
    """One recompilation of `train_step` that takes 100 us, as the events of three threads."""
    main = [
        *([event("$train.py:33 loop", start - 2, start + 130)] if frames else []),
        event("PjitFunction(train_step)", start, start + 120),
        event("PjitFunction(train_step)", start, start + 120),
        event("lower_sharding_computation", start + 5, start + 20),
        event("backend_compile_and_load", start + 25, start + 105),
    ]
    pool = [event("XlaCompile", start + 26, start + 100), event("backend_compile", start + 30, start + 104)] if threads else []
    return main, pool


@pytest.mark.parametrize("seed", range(6))
def test_one_recompilation_is_one_with_its_function_place_and_step(tmp_path, seed):
    draw = random.Random(seed)
    marks = [step(number, 1000 * number, 1000 * number + 900) for number in range(8)]
    ops = [kernel("gemm", 1000 * number + 500, 1000 * number + 900, "dot.1", number + 1) for number in range(8)]
    launches = [event("cuLaunchKernel", 1000 * number + 400, 1000 * number + 401, correlation_id=number + 1) for number in range(8)]
    chosen = sorted(draw.sample(range(8), draw.randint(1, 3)))
    frames = draw.random() < 0.5
    both = [compiling(1000 * number + 50, threads=draw.random() < 0.7, frames=frames) for number in chosen]
    main = sorted([e for m, _ in both for e in m] + marks, key=lambda e: (e[1], -e[2]))
    planes = [gpu(0, {STREAM: ops}), host({"python": main, "pool/3": [e for _, p in both for e in p], "Host Threads/7": launches})]
    (found,) = report_of(tmp_path, *planes)["hosts"]
    (compiled,) = found["compilations"]
    assert (compiled["program"], compiled["count"], compiled["step"]) == ("train_step", len(chosen), chosen[0])
    assert compiled["source"] == ("train.py:33" if frames else None)
    assert compiled["duration_s"] == pytest.approx(100e-6 * len(chosen))


def test_compilations_outside_of_calls_are_one_where_they_overlap(tmp_path):
    main = [step(0, 0, 50), event("lower_sharding_computation", 1, 4), event("backend_compile", 5, 30), event("XlaCompile: jit_f", 6, 29)]
    main += [event("backend_compile", 35, 40)]
    report = report_of(tmp_path, gpu(0, {STREAM: [kernel("a", 41, 50)]}), host({"python": main}))
    (found,) = report["hosts"][0]["compilations"]
    assert (found["program"], found["count"], found["step"]) == ("backend_compile", 2, 0)
    assert found["duration_s"] == pytest.approx(30e-6)


def test_a_compilation_of_the_event_log_is_not_listed_again(tmp_path):
    begun_s = 1_795_000_000.0
    run = tmp_path / "run"
    log = EventLog(event_file(run, 0), run="r", clock=lambda: begun_s + 1160e-6, monotonic=lambda: 0.0)
    (run / "run.json").write_text("{}")
    log.emit("recompilation", program="train_step", duration_s=110e-6, step=1, arguments=[], source="train.py:40")
    log.close()
    main = [step(0, 0, 900), step(1, 1000, 1900), *compiling(1050)[0]]
    clock = Plane("Task Environment", {}, {"profile_start_time": round(begun_s * 1e9)})
    ops = [kernel("gemm", 500, 900, "dot.1"), kernel("gemm", 1500, 1900, "dot.1")]
    directory = run / "tensorboard" / "plugins" / "profile" / "steps0-1"
    write(directory / "host0.xplane.pb", [gpu(0, {STREAM: ops}), host({"python": main}), clock])
    (found,) = to_json(analyze(load_profile(find_capture(run))))["hosts"]
    (compiled,) = found["compilations"]
    assert (compiled["program"], compiled["source"], compiled["captured"]) == ("train_step", "train.py:40", True)
