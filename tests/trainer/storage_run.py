"""Runs under storage trouble, one after another in this process: argv = directory, corpus, cases (JSON). Prints a JSON object per case.

A case: target, kind, delay_ms, begin and end (steps; begin 0: before the start, end null: until the run has ended).
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import jax

from ridgeline.configs.schema import Config
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.loop import Loop
from ridgeline.trainer.run import train
from tests.trainer.storage_trouble import Trouble

STEPS, EVERY, DATA_AWAY_S = 14, 2, 1.5
root, corpus, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
trouble = Trouble()
case: dict = {}
hits = 0


def config(run: Path, steps: int, local: Path | None = None) -> Config:
    return Config.model_validate(
        {
            "name": "small",
            "run_dir": str(run),
            "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 32},
            "precision": {"compute": "float32"},
            "data": {"train": [{"path": str(corpus)}], "seq_len": 32, "batch_size": 8, "prefetch": 1, "threads": 1},
            "schedule": {"kind": "constant"},
            "trainer": {"steps": steps, "log_every": 1},
            "checkpoint": {"every": EVERY, "local": {"directory": None if local is None else str(local), "every": 1}},
            "logging": {"tensorboard": True},
            "runtime": {"lease_timeout_s": 1.0},
        }
    )


def targets(run: Path, local: Path) -> dict[str, list[Path]]:
    logs = [run / name for name in ("events.jsonl", "metrics.jsonl", "train.log", "tensorboard")]
    return {"checkpoints": [run / "checkpoints"], "logs": logs, "run": [run], "data": [corpus], "local": [local]}


def begin(prefixes: list[Path]) -> None:
    trouble.begin(case["kind"], prefixes, case["delay_ms"])


def end() -> None:
    global hits
    hits += trouble.end()


def digest(state) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(jax.random.key_data(leaf).tobytes() if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.tobytes())
    return found.hexdigest()


def good(run: Path) -> list[int]:
    """Return the complete steps, each verified."""
    steps = dirs.complete_steps(run / "checkpoints")
    assert all(integrity.verify(dirs.step_dir(run / "checkpoints", step)) == [] for step in steps), steps
    return steps


before = Loop._before_step
_prefixes: list[Path] = []


def before_step(self: Loop, step: int) -> None:
    if case and step == case["begin"]:
        begin(_prefixes)
        if case["target"] == "data":  # the loop waits for it, and comes to no other step
            threading.Timer(DATA_AWAY_S, end).start()
    if case and step == case["end"]:
        end()
    before(self, step)
    if case:
        time.sleep(0.02)  # a step of a real model takes longer than a read ahead


Loop._before_step = before_step  # type: ignore[method-assign]
logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
reference = digest(train(config(root / "reference", STEPS), command=["test"]).state)
for number, drawn in enumerate(cases):
    run, local = root / f"{number}", root / f"{number}.local"
    local.mkdir()
    with_local = local if drawn["target"] == "local" else None
    _prefixes = targets(run, local)[drawn["target"]]
    hits, outcome, text, state = 0, "finished", "", None
    if drawn["begin"] == 0:
        train(config(run, 4, with_local), command=["test"])
    case, started_s = drawn, time.monotonic()
    if drawn["begin"] == 0:
        begin(_prefixes)
    try:
        state = train(config(run, STEPS, with_local), command=["test"]).state
    except Exception as error:
        outcome, text = type(error).__name__, str(error)
    took_s = time.monotonic() - started_s
    end()
    case = {}
    kept = good(run)
    log = (run / "train.log").read_text().splitlines() if (run / "train.log").exists() else []
    if state is None:
        state = train(config(run, STEPS, with_local), command=["test"]).state
    found = {
        "number": number,
        "outcome": outcome,
        "text": text,
        "hits": hits,
        "took_s": round(took_s, 2),
        "kept": kept,
        "aside": sorted(path.name for path in (run / "checkpoints").glob("*.bad-*")),
        "warnings": [line for line in log if "warning" in line.lower()],
        "equal": digest(state) == reference,
        "good": good(run),
    }
    print("FOUND " + json.dumps(drawn | found), flush=True)
sys.stdout.flush()
os._exit(0)  # threads of Orbax that wait for a failed save would hold up the exit
