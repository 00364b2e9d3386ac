"""`ridge scale` and `ridge ladder` through a real Slurm: submitted, waited for, broken off and taken up again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.jobs import CONFIG, RIDGE, environment, interpreter, prepare_corpus


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Path:
    """A directory with a corpus and a config."""
    path = tmp_path_factory.mktemp("scale")
    corpus = prepare_corpus(path)
    shared = CONFIG.format(name="tiny", run_dir=path / "unused", corpus=corpus, steps=8, programs=programs)
    (path / "tiny.yaml").write_text(shared.replace("every: 12", "every: 0").replace("checkpoint: {every: 20}", "checkpoint: {every: 0}"))
    return path


def test_two_scales_are_submitted_once_waited_for_and_compared(slurm: Any, work: Path) -> None:
    python = interpreter(work, "scale")
    command = [
        *(RIDGE, "scale", work / "tiny.yaml", "--cluster", "local", "--nodes", "1,2", "-o", work / "study", "--time", "20"),
        *("--no-preflight", "--price", "2", "--json", "--cluster-set", f"software.python={python}"),
    ]
    first = slurm.popen("env", *(f"{name}={value}" for name, value in environment().items()), *command, cwd=work)
    said = []
    for line in first.stdout:
        said.append(line)
        if "devices-2.1: job" in line and "submitted" in line:
            break
    first.send_signal(signal.SIGINT)
    said.append(first.communicate(timeout=900)[0])
    assert first.returncode == 130, "".join(said)

    done = slurm.run(*command, env=environment(), cwd=work, timeout_s=900)
    assert "submitted" not in done.stderr, "pending and running jobs must not be submitted again"
    rows = {row["devices"]: row for row in json.loads(done.stdout)["rows"]}
    assert [rows[devices]["nodes"] for devices in (1, 2)] == [1, 2]
    for devices in (1, 2):
        run = work / f"study/runs/devices-{devices}.1"
        assert len((run / "slurm/jobs.jsonl").read_text().splitlines()) == 1
        assert json.loads((run / "run.json").read_text())["starts"][0]["processes"] == devices
        assert rows[devices]["failure"] is None
        assert rows[devices]["tokens_per_s"] > 0
        assert rows[devices]["usd"] == pytest.approx(devices * rows[devices]["time_s"] / 3600 * 2)
    assert rows[2]["mesh"] == "fsdp=2"


def test_a_ladder_is_one_job_array_that_is_waited_for(slurm: Any, work: Path) -> None:
    python = interpreter(work, "ladder")
    command = [
        *(RIDGE, "ladder", work / "tiny.yaml", "--sizes", "8,16", "--tokens-per-parameter", "0.4", "--cluster", "local", "--nodes", "1"),
        *("-o", work / "ladder", "--time", "20", "--no-preflight", "--json", "--cluster-set", f"software.python={python}"),
    ]
    first = slurm.popen("env", *(f"{name}={value}" for name, value in environment().items()), *command, cwd=work)
    said = []
    for line in first.stdout:
        said.append(line)
        if "2 of 2 runs submitted" in line:
            break
    first.send_signal(signal.SIGINT)
    said.append(first.communicate(timeout=900)[0])
    assert first.returncode == 130, "".join(said)

    done = slurm.run(*command, env=environment(), cwd=work, timeout_s=900)
    assert "submitted" not in done.stderr.replace("finished or submitted", ""), "pending and running jobs must not be submitted again"
    found = json.loads(done.stdout)
    assert [row["size"] for row in found["rows"]] == ["8x1", "16x1"] and [row["failure"] for row in found["rows"]] == [None, None]
    assert (found["loss_of"], found["where"]) == ("held", "Slurm, local")
    assert len((work / "ladder/slurm/jobs.jsonl").read_text().splitlines()) == 1
