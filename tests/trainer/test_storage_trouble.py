"""Storage trouble in whole runs: disk full, no inodes, read-only, I/O errors, stale handles, vanished, slow, late and lost renames.

Training goes on with a warning, or ends with one line; earlier checkpoints verify; once the trouble is over the run ends bitwise like one
without trouble. Without root and without mounts: system calls fail in a preloaded library (storage_trouble.c).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.launch.exit_codes import SAVE_FAILURE
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from tests import sampling
from tests.slurm.jobs import prepare_corpus
from tests.trainer import storage_trouble

ROOT = Path(__file__).parents[2]
TARGETS = ("checkpoints", "logs", "run", "data", "local")
DELAY_MS = {"slow": 5, "late": 200}
ENDS_THE_RUN = {("run", "gone")}
"""The lease of a run directory that vanishes counts as removed: that ends the process (tests/rundir/test_lease.py)."""
SILENT = {
    *((target, kind) for target in ("logs", "data") for kind in ("late", "lost")),
    *(("data", kind) for kind in ("full", "inodes", "read_only", "broken", "gone", "stale", "slow")),
    ("logs", "inodes"),
    ("logs", "gone"),
}
"""Trouble that a run may not meet after its first steps: nothing is renamed there, its files are open, or what it needs has been read."""
CASES = [
    {"target": target, "kind": kind, "delay_ms": DELAY_MS.get(kind, 0), "at_start": at_start}
    for target in TARGETS
    for kind in storage_trouble.KINDS[1:]
    if kind != "stuck"  # tests/trainer/test_hang_runs.py
    for at_start in (False, True)
    if (target, kind) not in ENDS_THE_RUN
]


def drawn() -> list[dict[str, Any]]:
    """Return a sample of the cases with moments of their own.

    Saves are every second step, and a third failure in a row ends a run: two steps, or three from an even one on, meet one save or two,
    and the save that is still being written when the trouble begins.
    """
    rng = random.Random(sampling.seed())
    moments = [(begin, begin + rng.randint(2, 3 - begin % 2)) for begin in (rng.randint(3, 7) for _ in CASES)]
    cases = [
        case | ({"begin": 0, "end": None} if case["at_start"] else {"begin": begin, "end": end})
        for case, (begin, end) in zip(CASES, moments, strict=True)
    ]
    return sampling.drawn(cases, 4)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return storage_trouble.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus")) / "train"


def environment(library: Path, control: Path) -> dict[str, str]:
    return storage_trouble.without(os.environ) | storage_trouble.environment(library, control)


def test_runs_go_on_or_end_cleanly_and_resume_bitwise(library: Path, corpus: Path, tmp_path: Path) -> None:
    cases = drawn()
    command = [sys.executable, "-m", "tests.trainer.storage_run", str(tmp_path / "runs"), str(corpus), json.dumps(cases)]
    env = environment(library, tmp_path / "control")
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300 + 30 * len(cases), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(cases)
    for one in found:
        check(one)


def check(one: dict[str, Any]) -> None:
    target, kind, text = one["target"], one["kind"], one["text"]
    assert one["equal"], one
    assert one["good"] == [12, 14], one
    assert not one["aside"], one
    assert one["hits"] or (target, kind) in SILENT, one
    one_line = ("finished", "UserError", "CorpusError", "CheckpointError", *(("OSError",) if one["at_start"] else ()))  # cli/main.py
    assert one["outcome"] in one_line, one
    assert "\n" not in text
    failures = [line for line in one["warnings"] if "FAILED" in line]
    if one["at_start"]:
        assert set(one["kept"]) >= {2, 4} or one["outcome"] == "finished", one
    else:
        assert one["outcome"] == "finished", one
        assert all("training continues" in line for line in failures), one
    if target == "checkpoints" and kind in ("full", "inodes", "read_only", "broken", "stale", "gone", "lost"):
        assert failures or one["outcome"] == "UserError", one


@pytest.mark.parametrize("kind", sampling.drawn(["full", "inodes", "read_only", "broken", "stale", "gone", "lost"], 1))
def test_saves_that_fail_for_good_end_the_process_at_once(kind: str, library: Path, corpus: Path, tmp_path: Path) -> None:
    """With one line. The threads that Orbax leaves of a failed save, which wait for each other for minutes, do not hold it up."""
    run, control = tmp_path / "run", tmp_path / "control"
    (tmp_path / "run.yaml").write_text(
        f"name: run\nrun_dir: {run}\nprecision: {{compute: float32}}\n"
        "model: {vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}\n"
        f"data: {{train: [{{path: {corpus}}}], seq_len: 32, batch_size: 8}}\n"
        "trainer: {steps: 1000000, log_every: 5}\ncheckpoint: {every: 20}\nlogging: {tensorboard: false}\n"
    )
    command, output = [sys.executable, "-m", "ridgeline", "train", str(tmp_path / "run.yaml")], tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, env=environment(library, control), cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: len(dirs.complete_steps(run / "checkpoints")) > 1 or process.poll() is not None)
            storage_trouble.Trouble(control).begin(kind, [run / "checkpoints"])
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == SAVE_FAILURE, errors
    assert [line for line in errors.splitlines() if line.startswith("ridge: ")] == [errors.splitlines()[-1]]
    assert errors.splitlines()[-1].startswith("ridge: stopped: 3 consecutive saves failed, the last with: ")
    kept = dirs.complete_steps(run / "checkpoints")
    assert kept
    assert [integrity.verify(dirs.step_dir(run / "checkpoints", step)) for step in kept] == [[]] * len(kept)


def wait_until(condition: Any) -> None:
    end_s = time.monotonic() + 120
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert condition()
