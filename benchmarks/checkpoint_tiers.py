"""Lost work and stalls of local checkpoints against one tier: `python benchmarks/checkpoint_tiers.py [--kills 4] [--seed 1]`.

Two processes of one node train a model of 100 MB of state. Both are killed at drawn steps and
start again, with three settings in turn, at the same steps: checkpoints in the run directory every 20 steps; these and local ones every 5
steps; checkpoints in the run directory every 5 steps. The figures are those of `ridge goodput`. On one disk the tiers differ by what
training waits for, not by the speed of the disks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from checkout import ROOT

from ridgeline.launch.cluster.network import free_port
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import event_file, read_events

STEPS = 90
SETTINGS = {
    "run directory every 20": {"every": 20},
    "and local every 5": {"every": 20, "local": {"directory": "${env:RIDGE_NODE_DISK}", "every": 5}},
    "run directory every 5": {"every": 5},
}


def write_config(directory: Path, name: str, checkpoint: dict[str, object]) -> Path:
    """Write the config of one setting; return its path."""
    config = {
        "name": name,
        "run_dir": str(directory / name),
        "model": {"num_layers": 4, "embed_dim": 256, "num_heads": 4, "mlp_dim": 1024, "vocab_size": 8192, "max_seq_len": 64},
        "precision": {"compute": "float32"},
        "mesh": {"fsdp": 2},
        "data": {"train": [{"path": str(directory / "corpus")}], "batch_size": 4, "seq_len": 64},
        "trainer": {"steps": STEPS, "log_every": 1},
        "checkpoint": checkpoint,
        "logging": {"tensorboard": False},
        "runtime": {"compilation_cache": str(directory / "programs"), "platform": "cpu"},
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def steps_made(run: Path) -> int:
    """Return the last logged step of process 0."""
    path = event_file(run, 0)
    return max((event.fields["step"] for event in read_events(path) if event.kind == "step"), default=0) if path.exists() else 0


def start(directory: Path, config: Path, kill_at: int | None) -> None:
    """Run both processes to the end, or kill both after a step."""
    words = [sys.executable, "-m", "ridgeline", "train", str(config), "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    processes = []
    (directory / "disk").mkdir(exist_ok=True)
    for number in range(2):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "RIDGE_NODE_DISK": str(directory / "disk")}
        log = (directory / f"{config.stem}.{number}.log").open("a")
        processes.append(subprocess.Popen([*words, "--process", str(number)], stdout=log, stderr=log, env=env, cwd=ROOT))
    while any(process.poll() is None for process in processes):
        if kill_at is not None and steps_made(directory / config.stem) >= kill_at:
            for process in processes:
                process.kill()
        time.sleep(0.02)
    if any(process.returncode not in (0, -signal.SIGKILL) for process in processes):
        raise SystemExit((directory / f"{config.stem}.0.log").read_text())


def main() -> None:
    """Run all settings and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where the checkpoints are (default: the temporary directory)")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    kills = sorted(draw.sample(range(22, STEPS - 2), arguments.kills))
    print(f"killed after steps {kills} of {STEPS}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        texts = directory / "texts"
        texts.mkdir()
        for number, source in enumerate(sorted((ROOT / "trainer").glob("*.py"))):
            (texts / f"{number}.txt").write_text(source.read_text())
        prepare(PrepareSettings((texts,), directory / "corpus", "bytes"), workers=1)
        for setting, checkpoint in SETTINGS.items():
            config = write_config(directory, setting.replace(" ", "-"), checkpoint)
            for kill_at in [*kills, None]:
                start(directory, config, kill_at)
            ridge = [sys.executable, "-m", "ridgeline", "goodput", str(directory / config.stem), "--json"]
            ledger = json.loads(subprocess.run(ridge, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
            seconds = ledger["seconds"]
            loop_s = seconds["productive"] + seconds["lost"] + seconds["checkpoint"]
            print(
                f"{setting:<24} {ledger['lost_steps']:>3} lost steps, {seconds['lost']:.2f} s; saves stopped training for "
                f"{seconds['checkpoint']:.2f} s ({seconds['checkpoint'] / loop_s:.1%} of steps and saves)",
                flush=True,
            )


if __name__ == "__main__":
    main()
