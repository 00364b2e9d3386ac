"""The collective that a process waits in, read from its stacks: real processes over gloo, of which one does not come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.launch.cluster.network import free_port
from ridgeline.trainer.native_waits import KINDS, NativeWaits
from tests.sampling import drawn

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", drawn(list(KINDS), 2))
def test_the_first_collective_of_a_program_that_the_other_process_does_not_come_to_is_told(kind: str) -> None:
    port, script = free_port(), str(Path(__file__).with_name("native_wait_run.py"))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, script, str(port), str(rank), kind] for rank in (0, 1)]
    first, second = (
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    )
    try:
        output, errors = first.communicate(timeout=200)
    finally:
        second.kill()
        second.communicate()
    [line] = [line for line in output.splitlines() if line.startswith("{")] or [errors]
    found = json.loads(line)
    assert found["idle"] is None
    assert found["told"] == found["program"][0]
    assert found["told"].startswith(f"{kind} ") and len(found["program"]) == 3


def test_a_process_in_no_collective_tells_none() -> None:
    waits = NativeWaits()
    assert waits.collective() is None
    waits.prepare()
    assert waits.collective() is None
