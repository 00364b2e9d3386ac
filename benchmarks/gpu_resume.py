"""Kill a training run, resume it, and compare it bitwise with a run that was not killed: on a GPU, or with `--tiny` on a CPU.

`python benchmarks/gpu_resume.py [--output DIR] [--steps 300] [--tiny] [--plain]`

Trains a small model on the source files of Python's own `json` and `email` packages, in three starts: one without interruption; one that
is killed with SIGKILL after the checkpoint of a third of its steps; and its second start. Each runs with runtime.deterministic=true, unless
`--plain`. The exported weights must be equal byte for byte and the logged losses of all steps equal. Needs no network. Exit code: 1 when
they differ or a command failed.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkout import ROOT

RIDGE = (sys.executable, "-m", "ridgeline")
KILL_TIMEOUT_S = 300.0
MODEL = ("model.num_layers=8", "model.embed_dim=1024", "model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=64",
         "model.mlp_dim=4096", "precision.compute=bfloat16", "data.seq_len=256", "data.batch_size=64")  # fmt: skip
TINY = ("model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "model.num_kv_heads=2", "model.mlp_dim=64", "data.seq_len=64",
        "data.batch_size=2", "runtime.platform=cpu")  # fmt: skip


def prepare(corpus: Path) -> None:
    """Write the corpus: bytes of Python's sources, which are on every machine."""
    sources = [str(Path(module.__file__ or "").parent) for module in (json, email)]
    inputs = [part for source in sources for part in ("--input", source)]
    select = ("--include", "**/*.py", "--exclude", "__pycache__")
    _run((*RIDGE, "data", "prepare", *inputs, *select, "--tokenizer", "bytes", "--output", str(corpus)))


def train_command(run: Path, corpus: Path, args: argparse.Namespace) -> list[str]:
    """Return the command that starts or resumes a run."""
    every = args.steps // 3
    settings = [
        f"run_dir={run}", "name=resume", f"data.train=[{{path: {corpus / 'train' if (corpus / 'train').is_dir() else corpus}}}]",
        "evaluation.sets={}", "evaluation.every=0", "model.vocab_size=512", f"trainer.steps={args.steps}", "trainer.log_every=1",
        f"checkpoint.every={every}", "optimizer.kind=adamw", "optimizer.learning_rate=1e-3", *(TINY if args.tiny else MODEL),
        *([] if args.plain else ["runtime.deterministic=true"]),
    ]  # fmt: skip
    return [*RIDGE, "train", "configs/quickstart.yaml", *settings]


def train_and_kill(command: Sequence[str], run: Path, after: int) -> None:
    """Start a run and kill it when a step after the checkpoint of step `after` was logged. Raises SystemExit if that does not happen."""
    with (run.parent / f"{run.name}.killed.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if max(losses(run), default=0) > after and (run / "checkpoints" / f"step_{after:08}" / "integrity.json").exists():
                break
            time.sleep(0.02)
        if process.poll() is not None:
            raise SystemExit(f"the run ended with exit code {process.returncode} before it could be killed: {log.name}")
        late = time.monotonic() >= deadline
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if late:
            raise SystemExit(f"no checkpoint of step {after} within {KILL_TIMEOUT_S:.0f} s: {log.name}")


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss of a run's metrics.jsonl; of a step that was computed twice the second."""
    file = run / "metrics.jsonl"
    found: dict[int, float] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            record: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # the run is writing it
            continue
        if "train/loss" in record:
            found[record["step"]] = record["train/loss"]
    return found


def restored_step(run: Path) -> int | None:
    """Return the step of the checkpoint that the last start of a run read; None if it read none."""
    steps = []
    for line in (run / "events.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the line that the killed start was writing
            record = json.loads(line)
            if record.get("phase") == "restore" and "step" in record:
                steps.append(record["step"])
    return steps[-1] if steps else None


def exported(run: Path, directory: Path) -> str:
    """Return the SHA-256 of a run's exported weights."""
    _run((*RIDGE, "convert", "to-hf", str(run), str(directory)))
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:5])}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the three starts and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-resume"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="a toy model on the CPU")
    parser.add_argument("--plain", action="store_true", help="without runtime.deterministic")
    args = parser.parse_args(arguments)
    output = args.output.absolute()
    shutil.rmtree(output, ignore_errors=True)  # its own results only: a step of a session that was cut off starts again
    output.mkdir(parents=True)
    corpus, whole, killed = output / "corpus", output / "whole", output / "killed"
    prepare(corpus)
    begun = time.monotonic()
    _run(train_command(whole, corpus, args))
    print(f"uninterrupted: {args.steps} steps in {time.monotonic() - begun:.0f} s", flush=True)
    train_and_kill(train_command(killed, corpus, args), killed, args.steps // 3)
    reached = max(losses(killed))
    _run(train_command(killed, corpus, args))
    from_step = restored_step(killed)
    expected, found = losses(whole), losses(killed)
    differing = [step for step in sorted(expected) if expected[step] != found.get(step)]
    same = exported(whole, output / "whole-hf") == exported(killed, output / "killed-hf")
    result = {
        "steps": len(expected),
        "killed_at": reached,
        "resumed_from": from_step,
        "differing_losses": differing,
        "weights_equal": same,
        "plain": args.plain,
    }
    (output / "resume.json").write_text(json.dumps(result, indent=1) + "\n")
    verdict = f"weights {'equal' if same else 'DIFFER'}, {len(differing)} of {len(expected)} losses differ"
    print(f"killed at step {reached}, resumed from step {from_step}: {verdict}")
    resumed = from_step is not None and from_step >= args.steps // 3  # a run that begins again would be equal too
    return 0 if same and resumed and not differing and len(expected) == args.steps else 1


if __name__ == "__main__":
    sys.exit(main())
