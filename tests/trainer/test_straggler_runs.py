"""Two real processes, one of them slowed: it is named within 20 steps. Alone on the machine (make test-injections)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ridgeline.launch.cluster.network import free_port
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import event_file, read_events
from tests.sampling import FULL
from tests.slurm.jobs import environment

ROOT, START, STEPS = Path(__file__).parents[2], 40, 62
CONFIG = """\
name: slow
run_dir: {directory}/run
model: {{vocab_size: 264, num_layers: {layers}, embed_dim: {width}, num_heads: 2, mlp_dim: {mlp}, max_seq_len: 128}}
precision: {{compute: float32}}
mesh: {{data: 2}}
data: {{train: [{{path: {directory}/tokens}}], seq_len: 128, batch_size: 8}}
trainer: {{steps: {steps}, log_every: 50}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
"""


SIZES = {"short": (2, 128, 256), "long": (4, 256, 768)}
"""Steps of 0.08 and 0.4 s of CPU time: layers, width, width of the MLP. The host's noise of a long step is a fifth of a short one's."""
DRAWN = np.random.default_rng(16).uniform(0.10, 0.16, 2).tolist()
"""Shares of a step: 0.134 and 0.126."""
MORE_CASES = [("short", 0.0), ("short", DRAWN[0]), ("long", DRAWN[1]), ("long", 0.10)]
CASES = [("long", 0.0), ("long", 0.16), *(MORE_CASES if FULL else [])]
"""10 % is named in 95 of 100 windows of recorded noise (test_stragglers.py); a busier machine may need a step more: 16 % per commit."""


@pytest.mark.parametrize(("steps", "share"), CASES)
def test_a_slowed_process_is_named_within_20_steps(tmp_path: Path, steps: str, share: float) -> None:
    layers, width, mlp = SIZES[steps]
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n * n}\n" for n in range(3000)))
    prepare(PrepareSettings((tmp_path / "text.txt",), tmp_path / "tokens", "bytes"), workers=1)
    (tmp_path / "slow.yaml").write_text(CONFIG.format(directory=tmp_path, steps=STEPS, layers=layers, width=width, mlp=mlp))
    words = ["-m", "ridgeline", "train", str(tmp_path / "slow.yaml"), "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    script = str(Path(__file__).with_name("straggler_run.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(share * index), str(START), str(tmp_path / f"own.{index}"), *words, "--process", str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment()},
            cwd=ROOT,
        )
        for index in range(2)
    ]
    output = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    named = [event.fields for event in read_events(event_file(tmp_path / "run", 0)) if event.kind == "straggler"]
    if not share:
        assert named == [], "\n".join(output)
        return
    added = [added_s / (own_s - added_s) for step, own_s, added_s in json.loads((tmp_path / "own.1").read_text()) if step >= START]
    assert np.median(added) == pytest.approx(share, abs=0.005)  # what is injected is the share of the whole step
    assert [fields["rank"] for fields in named] == ["process 1"], "\n".join(output)
    assert START < named[0]["step"] <= START + 20
