"""Seconds from process start to the first finished step: `python tests/bench/startup.py [--repeats 3]`.

`ridge train` and a hand-written script of the same model are started in turn, cold (no compilation cache). Required: at most 10 s for
4 layers of width 512, vocabulary 32,000, batch 4 x 512. "again, cached" is the second start with one compilation cache: its compile is to
take under a tenth of the first's. The processor seconds of the children are printed too: other jobs disturb
them least (ours include the whole two-step run and its last checkpoint).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from loaders.prepare import PrepareSettings, prepare
from perf.events import event_file, read_events

ROOT = Path(__file__).parents[2]
REQUIRED_S = 10.0
PARTS = ("launch", "init", "compile", "first_step")


def write_config(directory: Path) -> Path:
    """Prepare this project's own sources as a corpus and write the config beside it."""
    texts = directory / "texts"
    texts.mkdir()
    for number, source in enumerate(sorted((ROOT / "trainer").glob("*.py"))):
        (texts / f"{number}.txt").write_text(source.read_text())
    prepare(PrepareSettings((texts,), directory / "corpus", "bytes"), workers=1)
    shape = {"num_layers": 4, "embed_dim": 512, "num_heads": 8, "mlp_dim": 1376, "vocab_size": 32000, "max_seq_len": 512}
    config = {
        "model": shape,
        "precision": {"compute": "float32"},
        "data": {"train": [{"path": str(directory / "corpus")}], "batch_size": 4, "seq_len": 512},
        "trainer": {"steps": 2},
        "schedule": {"kind": "constant"},
    }
    path = directory / "startup.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(command: list[str]) -> tuple[float, float, str]:
    """Run a child; return when it was started (wall clock, s), the processor seconds it took, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return start_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def ours(config: Path, name: str, *overrides: str) -> dict[str, float]:
    """Start `ridge train` and read the parts of its beginning from the run's event log."""
    ridge = str(Path(sys.executable).with_name("ridge"))
    start_s, cpu_s, _ = start([ridge, "train", str(config), f"run_dir={config.parent / name}", *overrides])
    ends = [e for e in read_events(event_file(config.parent / name, 0)) if e.kind in ("phase_end", "phase_total")]
    first = next(e for e in ends if e.fields["phase"] == "first_step")
    parts = dict.fromkeys(PARTS, 0.0)
    for event in ends:
        if event.fields["phase"] in parts and event.time_s <= first.time_s:
            parts[event.fields["phase"]] += event.fields["duration_s"]
    total_s = first.time_s - start_s
    return {**parts, "other": total_s - sum(parts.values()), "total": total_s, "cpu": cpu_s}


def hand_written() -> dict[str, float]:
    """Start the hand-written script, which is told when and prints its parts."""
    _, cpu_s, out = start([sys.executable, str(Path(__file__).with_name("handwritten_startup.py")), str(time.time())])
    parts: dict[str, float] = json.loads(out)
    return {**parts, "other": 0.0, "total": sum(parts.values()), "cpu": cpu_s}


def main() -> int:
    """Print medians and one JSON line; 1 when the best start of ours takes longer than required."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"ridge train": [], "again, cached": [], "hand-written": []}
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name))
        for repeat in range(args.repeats):
            found["ridge train"].append(ours(config, f"run{repeat}"))
            found["hand-written"].append(hand_written())
            cache = f"runtime.compilation_cache={config.parent / f'cache{repeat}'}"
            ours(config, f"filling{repeat}", cache)
            found["again, cached"].append(ours(config, f"cached{repeat}", cache))
    columns = (*PARTS, "other", "total", "cpu")
    medians = {name: {part: statistics.median(r[part] for r in runs) for part in columns} for name, runs in found.items()}
    print(f"{'median seconds':16}" + "".join(f"{part:>12}" for part in columns))
    for name, parts in medians.items():
        print(f"{name:16}" + "".join(f"{parts[part]:12.2f}" for part in columns))
    best_s = min(r["total"] for r in found["ridge train"])
    ratio = medians["ridge train"]["total"] / medians["hand-written"]["total"]
    print(f"ridge / hand-written {ratio:.2f}; best start {best_s:.2f} s, required {REQUIRED_S:.0f} s")
    print(json.dumps({"medians": medians, "ratio": ratio, "best_s": best_s, "runs": found}))
    return int(best_s > REQUIRED_S)


if __name__ == "__main__":
    sys.exit(main())
