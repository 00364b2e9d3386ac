"""Sampled source lines, and real captures: where the loop waits and why devices idle."""

import json
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ProfilerConfig
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import Frames, load_profile, read_frames
from ridgeline.observe.frames import Sampler, own_line
from ridgeline.observe.profiler import Profiler, annotation, step_annotation
from ridgeline.rundir.analysis import to_json


def test_the_line_of_a_frame_is_that_outside_of_libraries():
    frame = sys._getframe()
    assert own_line(frame) == f"{__file__}:{frame.f_lineno}"
    assert json.dumps([1], default=str)
    found = []
    json.dumps([object()], default=lambda _: found.append(own_line(sys._getframe().f_back)))
    line = found[0]
    assert line.split(":")[0] == __file__  # not json's encoder


def test_a_sampler_records_where_its_thread_was():
    sampler, released = Sampler(period_s=1e-4), threading.Event()
    sampler.start()
    threading.Thread(target=lambda: (_until_most(sampler, HERE), released.set())).start()
    _wait(released)
    stretches = sampler.stop()
    assert Frames(stretches).most_often(0, 2**63) == HERE
    assert all(begin <= end for begin, end, _ in stretches)
    assert Sampler().stop() == []


def _wait(released):
    assert released.wait(60), "the samples never showed the line that waits"


HERE = f"{__file__}:{_wait.__code__.co_firstlineno + 1}"


def _until_most(sampler, line):
    """Return once the last stretch is at this line and longer than all others together."""
    while True:
        found = list(sampler._found)
        lengths = [end - begin + 1 for begin, end, _ in found]
        if found and found[-1][2] == line and lengths[-1] > sum(lengths[:-1]):
            return


def test_the_line_with_most_time_between_two_moments_counts():
    frames = Frames([(0, 10, "a:1"), (20, 60, "b:2"), (70, 70, "c:3")])
    assert frames.most_often(0, 40) == "b:2"
    assert frames.most_often(0, 25) == "a:1"
    assert frames.most_often(65, 75) == "c:3"
    assert frames.most_often(61, 69) is None


def test_damaged_samples_are_one_line(tmp_path):
    path = tmp_path / "node.xplane.pb"
    assert read_frames(path) is None
    (tmp_path / "node.frames.json").write_text("[[1, 2]]")
    with pytest.raises(UserError, match=r"frames\.json cannot be read"):
        read_frames(path)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A real capture of a loop that reads a result in every step, then waits for data: the device has nothing to do meanwhile."""
    directory = tmp_path_factory.mktemp("faulty")

    def work(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x)

    compiled = jax.jit(work).lower(jnp.ones((192, 192))).compile()
    profiler = Profiler(ProfilerConfig(start_step=2, num_steps=3), directory, hlo_text=compiled.as_text)
    x, event = jnp.ones((192, 192)), threading.Event()
    for number in range(6):
        profiler.before_step(number, drain=lambda: None)
        with step_annotation(number):
            x = compiled(x)
        _ = float(x[0, 0])  # the planted wait
        with annotation("ridge.data_wait"):
            event.wait(0.15)
    profiler.close(6)
    line = next(n for n, text in enumerate(open(__file__), 1) if text.strip().startswith("_ = float("))  # noqa: SIM115
    return directory, line


def test_a_real_wait_is_named_with_its_source_line(faulty):
    directory, line = faulty
    report = to_json(analyze(load_profile(find_capture(directory))))
    syncs = report["hosts"][0]["syncs"]
    assert f"{__file__}:{line}" in {sync["source"] for sync in syncs}
    worst = max(syncs, key=lambda sync: sync["idle_after_s"])
    assert worst["source"] == f"{__file__}:{line}"


def test_idle_time_of_a_real_capture_goes_to_the_wait_for_data(faulty):
    report = to_json(analyze(load_profile(find_capture(faulty[0]))))
    (device,) = report["devices"]
    # the waits between steps are 0.15 s each at the least; those after the last captured step are outside
    assert device["idle_by_cause"]["data_wait"] >= 2 * 0.15 * 0.99
    assert sum(device["idle_by_cause"].values()) == pytest.approx(device["idle_s"])
    assert report["hosts"][0]["longest_gap_cause"] == "data_wait"
