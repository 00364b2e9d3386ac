"""`ridge diagnose` and `ridge report` on a captured profile without a run directory."""

import json

import pytest

from ridgeline.cli.main import run as ridge
from tests.explain.xspace import event, gpu, host, kernel, step, write

STREAM = "Stream #1(Kernel)"


@pytest.fixture
def capture(tmp_path):
    """Six steps of 100 us: 40 us of compute, then a data loader of 50 us."""
    main = [step(s, 100 * s, 100 * s + 2) for s in range(6)] + [
        event("$loader.py:7 __next__", 100 * s + 45, 100 * s + 95) for s in range(6)
    ]
    ops = [kernel("gemm", 100 * s, 100 * s + 40, "dot.1", s + 1) for s in range(6)]
    launches = [event("cuLaunchKernel", 100 * s, 100 * s + 1, correlation_id=s + 1) for s in range(6)]
    return write(
        tmp_path / "plugins" / "profile" / "1" / "node.xplane.pb",
        [gpu(0, {STREAM: ops}), host({"python": sorted(main, key=lambda e: e[1]), "Host Threads/7": launches})],
    )


@pytest.mark.parametrize("up", [0, 1, 4])
def test_a_capture_is_diagnosed_by_its_steps(capture, capsys, up):
    path = [capture, *capture.parents][up]  # the file, its directory, the log directory
    assert ridge(["diagnose", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["goodput"]) == (str(path), None)
    first = found["findings"][0]
    assert first["rule"] == "input pipeline"
    assert first["command"] is None  # the run is unknown
    assert ridge(["diagnose", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "capture of 6 step(s); start-up, saves and metrics of the run are unknown" in shown
    assert "goodput" not in shown


def test_a_capture_is_reported_by_its_steps(capture, capsys):
    assert ridge(["report", str(capture)]) == 0
    page = (capture.parent / "report.html").read_text()
    for part in ("Inside a step", "loader.py:7", "Diagnosis", "Main finding"):
        assert part in page
    assert ridge(["report", str(capture.parents[2]), "-o", str(capture.parent / "other.html")]) == 2
    assert "run.json" in capsys.readouterr().err


def test_a_directory_without_run_and_capture_is_still_refused(tmp_path, capsys):
    for command in ("diagnose", "report"):
        assert ridge([command, str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
