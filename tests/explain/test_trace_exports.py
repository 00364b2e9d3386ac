"""What leaves an analysis: full tables, a comparison of captures, a merged trace for Perfetto."""

import csv
import gzip
import json

import pytest

from ridgeline.cli.main import run as ridge
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.comparison import compare_captures
from ridgeline.explain.trace.load import load_profile
from ridgeline.explain.trace.perfetto import trace_events
from ridgeline.explain.trace.tables import tables
from ridgeline.rundir.events import EventLog, event_file
from tests.explain.xspace import Plane, gpu, host, kernel, metadata, step, write

STEPS = 5
BEGUN_S = 1_795_000_000.0
HLO = """HloModule jit_train_step, is_scheduled=true, num_partitions=2

ENTRY %main (p: bf16[64,64]) -> bf16[128,64] {
  %p = bf16[64,64] parameter(0)
  %dot.1 = bf16[64,64] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp(mlp)/dot" source_file="mlp.py" source_line=7}
  ROOT %all-gather.1 = bf16[128,64] all-gather(%dot.1), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true
}
"""  # noqa: E501


def planes(compute_us):
    """Five steps on two GPUs, of a matmul and an all-gather after it."""
    ops = [kernel("gemm", 100 * s, 100 * s + compute_us, "dot.1") for s in range(STEPS)]
    talk = [kernel("ncclKernel", 100 * s + compute_us, 100 * s + compute_us + 10, "all-gather.1") for s in range(STEPS)]
    marks = [step(s, 100 * s, 100 * s + 100) for s in range(STEPS)]
    devices = [gpu(n, {"Stream #1": ops, "Stream #2": talk}) for n in range(2)]
    clock = Plane("Task Environment", {}, {"profile_start_time": round(BEGUN_S * 1e9)})
    return [*devices, host({"python": marks}), metadata({7: HLO}), clock]


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """A run with a capture, whose event log has a save of 30 us from 10 us before the capture; and a faster and an equal capture."""
    root = tmp_path_factory.mktemp("captures")
    run = root / "run"
    now = iter([BEGUN_S - 10e-6, BEGUN_S - 10e-6, BEGUN_S + 20e-6])
    mono = iter([0.0, 0.0, 30e-6])
    log = EventLog(event_file(run, 0), run="r", clock=lambda: next(now), monotonic=lambda: next(mono))
    (run / "run.json").write_text("{}")
    with log.phase("save"):
        pass
    log.close()
    write(run / "tensorboard" / "plugins" / "profile" / "steps0-4" / "node.xplane.pb", planes(60))
    for name, compute_us in (("fast", 30), ("same", 60)):
        write(root / name / "node.xplane.pb", planes(compute_us))
    return root


def analyzed(path):
    profile = load_profile(find_capture(path))
    return profile, analyze(profile)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_have_every_row_and_the_numbers_of_the_analysis(captures, tmp_path, form, capsys):
    import pyarrow.parquet

    assert ridge(["analyze", str(captures / "run"), "--top", "1", "--tables", str(tmp_path / "t"), "--format", form]) == 0
    assert f"wrote {tmp_path / 't' / f'operations.{form}'}" in capsys.readouterr().out
    expected = tables(analyzed(captures / "run")[1])
    assert {path.stem for path in (tmp_path / "t").iterdir()} == set(expected)
    assert {"steps", "devices", "components", "operations", "matmuls", "collectives", "message_sizes", "hosts"} <= set(expected)
    for name, rows in expected.items():
        path = tmp_path / "t" / f"{name}.{form}"
        if form == "parquet":
            assert pyarrow.parquet.read_table(path).to_pylist() == rows
            continue
        with path.open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [list(row) for row in read] == [list(row) for row in rows]
        for row, other in zip(read, rows, strict=True):
            assert all(
                row[key] == "" if value is None else float(row[key]) == value
                for key, value in other.items()
                if not isinstance(value, str | bool)
            )
    assert len(expected["steps"]) == 2 * STEPS
    assert expected["matmuls"][0]["m"] == 64
    assert expected["operations"][0]["matmul"] == "1x64x64x64"


def test_tables_that_cannot_be_written_are_one_line(captures, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert ridge(["analyze", str(captures / "run"), "--tables", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert "cannot write tables to" in error and len(error.splitlines()) == 1


def test_two_captures_are_compared_where_they_differ(captures, capsys):
    (_, base), (_, fast) = analyzed(captures / "run"), analyzed(captures / "fast")
    found = compare_captures(base, fast)
    parts = {part.name: (part.base_s, part.time_s) for part in found.parts}
    assert parts["compute"] == (pytest.approx(60e-6), pytest.approx(30e-6))
    assert found.components[0].name == "mlp, forward"
    assert found.components[0].change_s == pytest.approx(-30e-6)
    assert found.operations[0].name == "matmul, forward, mlp.py:7"
    assert [c.change_s for c in found.collectives] == pytest.approx([0], abs=1e-12)
    assert ridge(["analyze", str(captures / "fast"), "--against", str(captures / "run")]) == 0
    shown = capsys.readouterr().out
    assert "mlp, forward" in shown and "-30 us" in shown
    assert ridge(["analyze", str(captures / "fast"), "--against", str(captures / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"][0]["name"] == "mlp, forward"


def test_equal_captures_differ_in_nothing(captures):
    (_, base), (_, same) = analyzed(captures / "run"), analyzed(captures / "same")
    found = compare_captures(base, same)
    assert found.verdict.startswith("cannot tell: +0.0%")
    assert all(d.change_s == 0 for d in [*found.parts, *found.components, *found.operations, *found.collectives])


def test_a_merged_trace_has_devices_host_and_phases_on_one_clock(captures, tmp_path):
    profile, analysis = analyzed(captures / "run")
    events = list(trace_events(profile, analysis))
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {"node/gpu:0", "node/gpu:1", "process 0"} <= set(names.values())
    (save,) = [e for e in events if e.get("cat") == "phase"]
    assert (save["ts"], save["dur"]) == (pytest.approx(0, abs=1), pytest.approx(30))
    kernels = sorted((e for e in events if names.get(e["pid"]) == "node/gpu:0" and e["ph"] == "X"), key=lambda e: e["ts"])
    assert [e["name"] for e in kernels] == ["dot.1", "all-gather.1"] * STEPS
    assert [e["cat"] for e in kernels] == ["compute", "communication"] * STEPS
    assert kernels[0]["ts"] == pytest.approx(10, abs=1)  # the save began 10 us before
    assert kernels[0]["args"] | {"flops": 2.0 * 64**3, "source": "mlp.py:7", "pass": "forward", "kernel": "gemm"} == kernels[0]["args"]
    assert [e["args"]["step"] for e in events if e.get("cat") == "host"] == list(range(STEPS))
    for name, opened in (("t.json", open), ("t.json.gz", gzip.open)):
        assert ridge(["analyze", str(captures / "run"), "--perfetto", str(tmp_path / name)]) == 0
        with opened(tmp_path / name, "rt") as file:
            assert len(json.load(file)["traceEvents"]) == len(events)


def test_a_merged_trace_aligns_hosts_and_does_without_a_clock(tmp_path):
    """The second host's clock is 5 ms ahead."""
    for name, ahead_ns in (("host0", 0), ("host1", 5_000_000)):
        talk = [kernel("ncclKernel", 1000 * s, 1000 * s + 200, "all-reduce.1") for s in range(3)]
        work = [kernel("gemm", 1000 * s + 300, 1000 * s + 400, "dot.1") for s in range(3)]
        marks = host({"python": [step(s, 1000 * s, 1000 * s + 900) for s in range(3)]}, start_ns=ahead_ns)
        write(tmp_path / f"{name}.xplane.pb", [gpu(0, {"Stream #1": talk + work}, start_ns=ahead_ns), marks])
    events = list(trace_events(*analyzed(tmp_path)))
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    starts = {
        name: sorted(e["ts"] for e in events if e["ph"] == "X" and names[e["pid"]] == name) for name in ("host0/gpu:0", "host1/gpu:0")
    }
    assert starts["host0/gpu:0"] == pytest.approx(starts["host1/gpu:0"])
