"""The reader of profiles against JAX's own, on hand-written and real files, and on damaged ones."""

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.read import WANTED, read_host
from ridgeline.explain.trace.wire import MISSING, Damaged, parse_space, read_space
from tests.explain.xspace import Plane, event, gpu, host, kernel, serialized, step, write

KEPT = WANTED | {"kernel_details", "occupancy"}


def drop_nothing(name):
    return False


def same_as_jax(raw: bytes) -> int:
    """Compare a profile as both read it, event by event; return the number of events."""
    ours, theirs = parse_space(raw, KEPT, drop_nothing), jax.profiler.ProfileData.from_serialized_xspace(raw)
    count = 0
    for plane, other in zip(ours.planes, theirs.planes, strict=True):
        assert plane.name == other.name
        assert plane.stats == {key: value for key, value in other.stats if key in plane.stats}
        for line, their_line in zip(plane.lines, other.lines, strict=True):
            assert line.name == their_line.name
            for row, their_event in enumerate(their_line.events):
                count += 1
                assert ours.strings[line.names[row]] == their_event.name
                assert line.duration_ps[row] / 1e3 == pytest.approx(their_event.duration_ns, abs=0.5)
                assert ours.base_ns + line.start_ps[row] / 1e3 == pytest.approx(their_event.start_ns, abs=0.5)
                stats = dict(their_event.stats)
                for key in KEPT:
                    found = line.stats[key][row] if key in line.stats else MISSING
                    if key not in stats:
                        assert found == MISSING
                    elif isinstance(stats[key], str):
                        assert ours.strings[found] == stats[key]
                    else:
                        assert int(found) % 2**64 == int(stats[key]) % 2**64
            assert len(line.names) == len(list(their_line.events))
    return count


def test_it_reads_a_real_capture_as_jax_does(capture_dir):
    (file,) = capture_dir.glob("*.xplane.pb")
    assert same_as_jax(file.read_bytes()) > 20


values = st.one_of(st.integers(0, 2**64 - 1).filter(lambda n: n != 2**64 - 1), st.sampled_from(["fusion.1", "é", "x" * 300]))
events = st.builds(
    lambda name, start, length, stats: event(name, start, start + length, **stats),
    st.sampled_from(["a", "nccl", "b" * 200]),
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.dictionaries(st.sampled_from(["hlo_op", "correlation_id", "run_id", "kernel_details", "ignored"]), values),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(events, max_size=5), max_size=3), st.integers(0, 2**40))
def test_it_reads_any_profile_as_jax_does(lines, start_ns):
    same_as_jax(serialized([Plane("p", {f"line {i}": line for i, line in enumerate(lines)}, {"gpu_device_name": "X"}, start_ns)]))


def test_long_lines_are_read_in_batches_with_nothing_lost(monkeypatch):
    events = [kernel(f"k{i % 7}", 10 * i, 10 * i + 5, f"fusion.{i % 5}", i + 1) for i in range(300)]
    raw = serialized([gpu(0, {"Stream #1(Kernel)": events})])
    monkeypatch.setattr("ridgeline.explain.trace.wire.BATCH_BYTES", 64)
    assert same_as_jax(raw) == 300


def test_dropped_names_leave_no_events():
    raw = serialized([host({"python": [event("end: x", 0, 1), event("x", 0, 1, hlo_op="x")]})])
    (line,) = parse_space(raw, WANTED, lambda name: name.startswith("end: ")).planes[0].lines
    assert len(line.names) == 1


def test_a_file_cut_anywhere_gives_one_clear_line(tmp_path):
    whole = serialized([gpu(0, {"Stream #1(Kernel)": [kernel("k", 0, 5, "fusion.1", 1), kernel("k", 5, 9, "fusion.2", 2)]})])
    file = tmp_path / "cut.xplane.pb"
    for length in range(1, len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut.xplane.pb is not a complete xplane profile: \S"):
            read_space(file, WANTED, drop_nothing)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"HloModule jit_f\n", "not a complete xplane profile"),
        (b"\x1f\x8b" + bytes(80), "not a complete xplane profile"),
    ],
)
def test_empty_and_foreign_files_are_refused(tmp_path, content, complaint):
    file = tmp_path / "x.xplane.pb"
    file.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        read_space(file, WANTED, drop_nothing)
    with pytest.raises(UserError, match="cannot be read"):
        read_space(tmp_path / "none.xplane.pb", WANTED, drop_nothing)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60))
def test_no_bytes_make_it_fail_otherwise(raw):
    with contextlib.suppress(Damaged):
        parse_space(raw, WANTED, drop_nothing)


def test_the_wall_clock_of_a_capture_is_found(tmp_path):
    planes = [
        host({"python": [step(1, 0, 5)]}, start_ns=1000),
        gpu(0, {"Stream #1(Kernel)": [kernel("k", 0, 5)]}, start_ns=3000),
        Plane("Task Environment", {}, {"profile_start_time": 1_795_000_000_000_000_000}),
    ]
    found = read_host(write(tmp_path / "node07-p00003.xplane.pb", planes))
    assert (found.name, found.process, found.kind) == ("node07-p00003", 3, "gpu")
    assert found.has_wall_clock
    assert found.zero_ns == 1_795_000_000_000_001_000
    assert found.devices[0].ops.start.tolist() == [2_000_000]
    assert np.array_equal(found.threads[0].start, [0])
