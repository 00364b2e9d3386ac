"""A borrowed GPU's minutes: steps run in a fixed order, one that was cut off runs again, and one that is complete does not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with small steps."""
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_session

    steps = (
        gpu_session.Step("first", "prints and ends", (("-c", "print('whole')"),), 1),
        gpu_session.Step("second", "its child outlives the limit", (("-c", SLEEPS), ("-c", "print('never')")), 1),
        gpu_session.Step("third", "misses a target", (("-c", "raise SystemExit(1)"),), 1, complete=(0, 1)),
    )
    monkeypatch.setattr(gpu_session, "STEPS", steps)
    return gpu_session


SLEEPS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'])"


def test_steps_run_in_order_and_a_cut_off_one_again(session: Any, tmp_path: Path) -> None:
    def ran(*more: str) -> int:
        code: int = session.main(["--output", str(tmp_path), *more])
        return code

    assert ran() == 0
    assert "whole" in (tmp_path / "first.log").read_text()
    assert ran("--limit-s", "4") == session.CUT_OFF
    log = (tmp_path / "second.log").read_text()
    pid = int(next(line for line in log.splitlines() if line.isdecimal()))
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        ended = not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
        if ended:
            break
        time.sleep(0.05)
    assert ended, "the child of the command is ended too"
    assert "never" not in log.replace("print('never')", "")
    assert ran("--limit-s", "4") == session.CUT_OFF, "the same step again"
    assert [each["exit_code"] for each in json.loads((tmp_path / "session.json").read_text())["second"]] == [124, 124]
    assert ran("third") == 1
    table = session.Session(tmp_path, tiny=False).table().splitlines()
    assert [line.split()[0] for line in table] == ["first", "second", "third"]
    assert ["complete" in line for line in table] == [True, False, True] and "exit code 124, runs again" in table[1]


def test_every_step_is_a_command_that_exists_and_a_benchmark_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from gpu_session import LIMIT_S, STEPS, Session

    from ridgeline.cli.main import ridge

    session = Session(tmp_path, tiny=False)
    assert sum(step.expected_s for step in STEPS[:5]) < 40 * 60
    for step in STEPS:
        assert step.expected_s <= LIMIT_S < 600
        for _, *command in session.commands(step, LIMIT_S):
            if command[0].endswith(".py"):
                assert (BENCH.parent / command[0]).is_file()
            else:
                assert command[:2] == ["-m", "ridgeline"] and ridge.get_command(None, command[2]) is not None  # type: ignore[arg-type]
    bench = next(step for step in STEPS if step.name == "bench")
    assert "--continue" not in session.commands(bench, LIMIT_S)[0]
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/gpu.json").write_text("{}")
    assert session.commands(bench, LIMIT_S)[0][-1] == "--continue", "it was cut off"


def test_a_set_of_packages_must_be_named() -> None:
    run = [sys.executable, str(BENCH / "gpu_needs.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "bench | train | maxtext" in done.stderr
    listed = subprocess.run([*run, "train"], capture_output=True, text=True, check=True).stdout.split()
    assert len(listed) == len({name.split("==")[0] for name in listed}) == 13, "one version of each"
