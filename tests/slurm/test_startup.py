"""Where the time from `srun` to the first step goes, on a real Slurm."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.rundir.events import event_file, read_events
from ridgeline.rundir.phases import phases
from tests.xla_flags import QUICK_XLA

RIDGE = Path(sys.executable).with_name("ridge")
ENV = {"XLA_FLAGS": QUICK_XLA}
CONFIG = """\
name: tiny
model: {vocab_size: 258, num_layers: 2, embed_dim: 32, num_heads: 4, mlp_dim: 64, max_seq_len: 64}
precision: {compute: float32}
data: {train: [{path: corpus}], seq_len: 64, batch_size: 16}
trainer: {steps: 6, log_every: 1}
checkpoint: {every: 3}
logging: {tensorboard: false}
runtime: {platform: cpu}
"""


@pytest.fixture(scope="module")
def work(slurm_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and a config."""
    path = tmp_path_factory.mktemp("runtime")
    (path / "texts").mkdir()
    for index in range(40):
        (path / f"texts/m{index}.txt").write_text(f"def f{index}(x):\n    return x + {index}\n" * 30)
    (path / "tiny.yaml").write_text(CONFIG)
    slurm_session.run(RIDGE, "data", "prepare", "--input", "texts", "--tokenizer", "bytes", "--output", "corpus", cwd=path, env=ENV)
    return path


def train(work: Path, run: str, *overrides: str) -> list[str]:
    return [str(RIDGE), "train", "tiny.yaml", f"run_dir={run}", *overrides]


def test_the_time_from_srun_to_the_first_step_is_accounted_for(slurm: Any, work: Path) -> None:
    start_s = time.time()
    slurm.run("srun", "-N2", "-n2", *train(work, "timed"), cwd=work, env=ENV, timeout_s=900)
    found = [
        p
        for p in phases(read_events(event_file(work / "timed", 0)))
        if p.name in ("launch", "import", "rendezvous", "init", "compile", "first_step")
    ]
    assert {p.name for p in found} == {"launch", "import", "rendezvous", "init", "compile", "first_step"}
    first = next(p for p in found if p.name == "first_step")
    end_s = first.start_s + first.duration_s
    elapsed_s = end_s - start_s
    # The union: compiles lie within init, and some run beside each other or, of the evaluation, on after the first step.
    named_s, until_s = 0.0, start_s
    for p in sorted(found, key=lambda p: p.start_s):
        phase_end_s = min(p.start_s + p.duration_s, end_s)
        named_s += max(0.0, phase_end_s - max(p.start_s, until_s))
        until_s = max(until_s, phase_end_s)
    print(
        {p.name: round(p.duration_s, 2) for p in found},
        f"srun to first step {elapsed_s:.2f} s, unnamed {elapsed_s - named_s:.2f} s",
        file=sys.stderr,
    )
    assert 0 < named_s <= elapsed_s + 0.5
    assert named_s > 0.7 * elapsed_s
