"""Seconds from process start to the end of the first step: `python benchmarks/startup.py [--repeats 3]`.

Starts `ridge train` and a hand-written script of the same model alternately, without a compilation cache. Required: at most 10 s for 4
layers of width 512, vocabulary 32,000, batch 4 x 512. Then starts one config twice with one compilation cache: "first, cache" fills it and
"second, cache" uses it. Required: the second start spends less than a tenth of the first's time on tracing, lowering, compiling and
loading, for the step alone and for all programs. CPU seconds of the child processes are printed too, because other load affects them least
(ours include the whole two-step run and its last checkpoint).
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
from checkout import ROOT

from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import event_file, read_events
from ridgeline.rundir.phases import phases
from ridgeline.rundir.startup import startup_parts

REQUIRED_S = 10.0
RATIO = 0.1
PARTS = ("launch", "import", "init", "trace", "lower", "compile", "load", "first_step", "other")
MAKING = ("trace", "lower", "compile", "load")


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
    """Run a child; return when it was started (wall clock, s), its CPU seconds, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return start_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def ours(config: Path, name: str, *overrides: str) -> dict[str, float]:
    """Start `ridge train`; return the parts of its beginning, and of its step's program, from the run's event log."""
    start_s, cpu_s, _ = start([sys.executable, "-m", "ridgeline", "train", str(config), f"run_dir={config.parent / name}", *overrides])
    events = read_events(event_file(config.parent / name, 0))
    parts = startup_parts(events, 0)
    assert parts is not None, "a first step was made"
    found = phases(events)
    step = next(p for p in found if p.name == "compile" and p.fields["program"] == "train_step")
    first = next(p for p in found if p.name == "first_step")
    total_s = first.start_s + first.duration_s - start_s
    missing = total_s - sum(parts.values())  # before the process's clock begins
    parts["other"] = parts.get("other", 0.0) + missing
    return {name: parts.get(name, 0.0) for name in PARTS} | {"step": step.duration_s, "total": total_s, "cpu": cpu_s}


def hand_written() -> dict[str, float]:
    """Start the hand-written script with the current time; it prints its parts."""
    _, cpu_s, out = start([sys.executable, str(Path(__file__).with_name("handwritten_startup.py")), str(time.time())])
    parts: dict[str, float] = json.loads(out)
    return dict.fromkeys((*PARTS, "step"), 0.0) | parts | {"total": sum(parts.values()), "cpu": cpu_s}


def main() -> int:
    """Print medians and one JSON line; return 1 when our best start or the second start with a cache takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"ridge train": [], "hand-written": [], "first, cache": [], "second, cache": []}
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name))
        for repeat in range(args.repeats):
            found["ridge train"].append(ours(config, f"run{repeat}"))
            found["hand-written"].append(hand_written())
            cache = f"runtime.compilation_cache={config.parent / f'cache{repeat}'}"
            found["first, cache"].append(ours(config, f"filling{repeat}", cache))
            found["second, cache"].append(ours(config, f"cached{repeat}", cache))
    columns = (*PARTS, "step", "total", "cpu")
    medians = {name: {part: statistics.median(r[part] for r in runs) for part in columns} for name, runs in found.items()}
    print(f"{'median seconds':16}" + "".join(f"{part:>11}" for part in columns))
    for name, parts in medians.items():
        print(f"{name:16}" + "".join(f"{parts[part]:11.2f}" for part in columns))
    best_s = min(r["total"] for r in found["ridge train"])
    ratio = medians["ridge train"]["total"] / medians["hand-written"]["total"]
    pairs = list(zip(found["first, cache"], found["second, cache"], strict=True))
    again = {
        "step": statistics.median(second["step"] / first["step"] for first, second in pairs),
        "all programs": statistics.median(_making_s(second) / _making_s(first) for first, second in pairs),
    }
    print(f"ridge / hand-written {ratio:.2f}; best start {best_s:.2f} s, required {REQUIRED_S:.0f} s")
    print(f"second start: {', '.join(f'{what} {share:.1%}' for what, share in again.items())} of the first, required {RATIO:.0%}")
    print(json.dumps({"medians": medians, "ratio": ratio, "best_s": best_s, "again": again, "runs": found}))
    return int(best_s > REQUIRED_S or max(again.values()) >= RATIO)


def _making_s(run: dict[str, float]) -> float:
    return sum(run[part] for part in MAKING)


if __name__ == "__main__":
    sys.exit(main())
