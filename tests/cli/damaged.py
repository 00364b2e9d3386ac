"""Damaged files: a small real run, a sweep, a study and what else commands read; the ways to damage them; and the commands.

`python -m tests.cli.damaged --cases 2000 --seed 1` runs a long campaign; tests/cli/test_damaged_runs.py runs a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.cli.main import run as ridge
from tests.cli.outside import changes, own_places, state

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    2**63,
    float("nan"),
    float("-inf"),
    "",
    "x",
    "NaN",
    "x" * 3000,
    "a\nb\x1b[31m\0",
    "\ud800",
    [],
    [None],
    [{}],
    {},
    {"x": {"y": []}},
)
LIMIT_S = 30
SCONTROL = """#!/bin/sh
echo "JobId=12 JobState=RUNNING Reason=None Priority=1 NodeList=n1 Restarts=0 RunTime=00:01:00 TimeLimit=01:00:00 ExitCode=0:0"
"""
"""Slurm's answer about the job of the run."""
MEMORY_BYTES = 6 << 30


@dataclass(frozen=True)
class Case:
    """One damaged file and one command."""

    file: str
    """Relative to the root."""
    damage: str
    apply: Callable[[Path], None]
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.damage}: ridge {' '.join(self.command)}"


def make_run(root: Path) -> None:
    """Train a small model with a capture, a save and an evaluation in ROOT/run; store two benchmark results in ROOT/bench."""
    from ridgeline.configs.load import load
    from ridgeline.loaders.prepare import PrepareSettings, prepare
    from ridgeline.rundir import bench_results
    from ridgeline.rundir.jobs import JobRecord, record_job

    texts = root / "texts"
    texts.mkdir(parents=True)
    (texts / "a.txt").write_text("some text to train on, line after line\n" * 60)
    prepare(PrepareSettings((texts,), root / "corpus", "bytes"), workers=1)
    config = root / "small.yaml"
    config.write_text(
        json.dumps(
            {
                "name": "small",
                "run_dir": str(root / "run"),
                "model": {"vocab_size": 258, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 16},
                "data": {"train": [{"path": str(root / "corpus")}], "seq_len": 16, "batch_size": 8},
                "evaluation": {"sets": {"same": str(root / "corpus")}, "max_batches": 1},
                "trainer": {"steps": 8, "log_every": 1},
                "schedule": {"warmup_steps": 0},
                "profiler": {"start_step": 5, "num_steps": 2},
                "checkpoint": {"every": 4},
            }
        )
    )
    code, text = call(["train", str(config)])
    assert code == 0, text
    code, text = call(["analyze", str(root / "run"), "--save"])
    assert code == 0, text
    cluster = root / "run/slurm/1/cluster.yaml"
    cluster.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "configs/clusters/dgx-h100.yaml", cluster)
    record_job(root / "run", JobRecord("12", "2026-01-02T03:04:05+00:00", cluster="dgx-h100", submission=1))
    (root / "run/slurm/job-12.log").write_text("ridge: step 1\n0: loss 5.0\n1: loss 5.0\n")
    attempt = {"job": 12, "begin": 1.0, "end": 2.0, "exit_code": 0, "restart": 0, "checkpoint": "8"}
    (root / "run/attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    shutil.copytree(root / "run", root / "other")
    other = root / "other/config.yaml"
    other.write_text(other.read_text().replace("batch_size: 8", "batch_size: 16", 1))
    (root / "bin").mkdir()
    (root / "bin/scontrol").write_text(SCONTROL)
    (root / "bin/scontrol").chmod(0o755)
    resolved = load(str(config), ()).config
    device = bench_results.Device("cpu", "cpu", 1, 1)
    from datetime import UTC, datetime

    for number in range(3):
        now = datetime(2026, 1, 2, 3, 4, number, tzinfo=UTC)
        made = bench_results.provenance(resolved, command=["ridge", "bench", "step"], overrides=[], device=device, now=now)
        found = {"task": "step", "series": {"step": [0.1 + 0.001 * number, 0.11, 0.12]}}
        bench_results.write(root / f"bench/{number}.json", found, resolved, made)


def make_others(root: Path) -> None:
    """Beside the run: a sweep with a finished, a failed and a missing point, a study, a cluster and a calibration file."""
    from ridgeline.rundir.jobs import JobRecord, record_job

    sweep, project = root / "sweep", Path(__file__).parents[2]
    shutil.copytree(root / "run", sweep / "000", ignore=shutil.ignore_patterns("checkpoints", "profiles", "tensorboard", "slurm"))
    (sweep / "sweep.json").write_text(json.dumps({"name": "small", "points": [{"seed": seed} for seed in range(3)]}))
    (sweep / "000/slurm").mkdir()
    (sweep / "000/slurm/job-13_0.log").write_text("0: loss 5.0\n")
    (sweep / "failures").mkdir()
    (sweep / "failures/001.json").write_text(json.dumps({"trial": "001", "reason": "out of memory", "exit_code": 1}))
    when = "2026-01-02T03:04:05+00:00"
    record_job(sweep, JobRecord("13", when, kind="sweep", cluster="dgx-h100", submission=1, details={"points": [0]}))
    grid = {"name": "small", "config": "small.yaml", "directory": str(sweep), "grid": {"seed": [0, 1, 2]}}
    (root / "sweep.yaml").write_text(json.dumps(grid))
    shutil.copy(project / "configs/clusters/dgx-h100.yaml", root / "cluster.yaml")
    point = {"device": "h100-sxm", "dtype": "bfloat16", "m": 4096, "n": 4096, "k": 4096, "tflop_per_s": 600.0, "source": "measured"}
    link = {"kind": "nvlink", "measured": [[1e6, 10.0], [1e8, 300.0]], "source": "measured"}
    rates = {"name": "here", "matmul": [point], "links": [link], "host": {"dispatch_us": 100.0}}
    (root / "calibration.yaml").write_text(json.dumps(rates))
    code, text = call(["scale", "--from", str(root / "run"), "-o", str(root / "study"), "--warmup", "1"])
    assert code == 0, text


def commands(root: Path) -> list[tuple[str, ...]]:
    """The commands that read the run and write nothing into it."""
    run, other, out = str(root / "run"), str(root / "other"), str(root / "out")
    return [
        ("status", run),
        ("logs", run),
        ("logs", run, "--rank", "0", "-n", "1"),
        ("goodput", run),
        ("goodput", run, "--json"),
        ("timeline", run, "-o", f"{out}.json"),
        ("timeline", run, "-o", f"{out}.html"),
        ("analyze", run),
        ("analyze", run, "--json"),
        ("diagnose", run),
        ("diagnose", run, "--json"),
        ("diagnose", run, other),
        ("report", run, "-o", f"{out}.html"),
        ("report", other, run, "-o", f"{out}.html"),
        ("config", "diff", run, other),
        ("config", "show", f"{run}/config.yaml"),
        ("runs", str(root)),
        ("runs", str(root), "--json", "--sort", "loss"),
        ("scale", "--from", run, "--warmup", "1"),
        ("checkpoint", "list", run),
        ("checkpoint", "list", run, "--json"),
    ]


def model_commands(root: Path) -> list[tuple[str, ...]]:
    """The commands that load the model of the run."""
    run = str(root / "run")
    return [
        ("evaluate", run),
        ("generate", run, "--prompt", "x", "--max-tokens", "1"),
        ("convert", "to-hf", run, str(root / "exported")),
    ]


def other_commands(root: Path) -> dict[str, list[tuple[str, ...]]]:
    """The commands that read the files beside the run, by the first part of their names."""
    sweep, study, out = str(root / "sweep"), str(root / "study"), str(root / "out.html")
    table = ("sweep", f"{sweep}.yaml", "--table")
    of_sweep = [
        table,
        (*table, "--json"),
        ("sweep", f"{sweep}.yaml", "--local", "--dry-run"),
        ("status", sweep),
        ("status", f"{sweep}/000"),
    ]
    texts, corpus = str(root / "texts"), str(root / "corpus")
    return {
        "sweep": [*of_sweep, ("logs", f"{sweep}/000"), ("runs", sweep)],
        "sweep.yaml": of_sweep[:3],
        "study": [("report", study, "-o", out), ("diagnose", study), ("diagnose", study, "--json")],
        "cluster.yaml": [("plan", str(root / "small.yaml"), "--cluster", str(root / "cluster.yaml"))],
        "calibration.yaml": [("plan", str(root / "small.yaml"), "--cluster", "dgx-h100", "--calibration", str(root / "calibration.yaml"))],
        "corpus": [("data", "inspect", corpus), ("data", "prepare", "-i", texts, "--tokenizer", "bytes", "-o", corpus)],
        "bench": bench_commands(root),
    }


def bench_commands(root: Path) -> list[tuple[str, ...]]:
    """The commands that read stored benchmark results."""
    bench = str(root / "bench")
    return [
        ("bench", "compare", f"{bench}/0.json", f"{bench}/1.json"),
        ("bench", "compare", bench, f"{bench}/2.json", "--json"),
        ("bench", "template", "x", "--baseline", f"{bench}/0.json", "--new", f"{bench}/1.json"),
    ]


def read_by(root: Path, file: str, models: bool) -> list[tuple[str, ...]]:
    """The commands that may read a file; models: also those that load the model."""
    place = Path(file)
    if place.parts[0] == "run":
        of_model = models and (place.name in ("config.yaml", "run.json") or place.parts[1] in ("checkpoints", "tokenizer"))
        return [*commands(root), *(model_commands(root) if of_model else [])]
    return other_commands(root)[place.parts[0]]


def damageable(root: Path) -> list[str]:
    """Files that commands read, relative to the root; not the payload of checkpoints."""
    tops = [root / part for part in ("run", *other_commands(root))]
    found = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top]) if path.is_file() and not path.is_symlink()]
    kept = [str(path.relative_to(root)) for path in found if path.suffix != ".array_record" and not path.name.startswith("lock")]
    return sorted(name for name in kept if "/checkpoints/" not in name or (name.endswith((".json",)) and "/state/" not in name))


def cases(root: Path, seed: int, only: str = "", models: bool = False) -> Iterator[Case]:
    """Yield drawn cases without end. only: a part of the names of the files to damage; models: with commands that load the model."""
    source = random.Random(seed)
    files = [name for name in damageable(root) if only in name]
    structured = [name for name in files if name.endswith((".json", ".jsonl", ".yaml"))]
    while True:
        file = source.choice(structured if structured and source.random() < 0.8 else files)
        command = source.choice(read_by(root, file, models))
        whole = source.random() < 0.25 or file not in structured
        name, apply = whole_file(source) if whole else _one_value(root / file, source)
        if not (name == "huge" and command[0] == "logs"):  # which prints it
            yield Case(file, name, apply, command)


def whole_file(source: random.Random) -> tuple[str, Callable[[Path], None]]:
    """Return a drawn damage of a whole file: its name, and what makes it."""
    noise = source.randbytes(400)
    share, where = source.random(), source.random()

    def cut(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        for index in range(20):
            if data:
                data[(int(len(data) * where) + index * index) % len(data)] ^= 1 << (index % 8)
        path.write_bytes(data)

    def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
        def apply(path: Path) -> None:
            path.unlink()
            make(path)

        return apply

    def written(data: bytes) -> Callable[[Path], None]:
        return lambda path: (path.write_bytes(data), None)[1]

    return source.choice(
        [
            ("cut", cut),
            ("flipped bits", flip),
            ("missing", lambda path: path.unlink()),
            ("empty", written(b"")),
            ("noise", written(noise)),
            ("noise and newlines", written(b"\n".join(noise[index : index + 9] for index in range(0, 400, 9)) + b"\n")),
            ("null bytes", written(bytes(5000))),
            ("deep", written(b"[" * 50_000 + b"\n")),
            ("deep mapping", written(b'{"a":' * 50_000 + b"\n")),
            ("a list", written(b"[1, 2]\n")),
            ("null", written(b"null\n")),
            ("an empty mapping", written(b"{}\n")),
            ("a long line", written(b"x" * 1_000_000 + b"\n")),
            ("huge", lambda path: os.truncate(path, 4 << 30)),  # sparse
            ("utf-16", lambda path: (path.write_bytes(path.read_bytes().decode("latin-1").encode("utf-16")), None)[1]),
            ("directory", replaced(lambda path: path.mkdir())),
            ("FIFO", replaced(lambda path: os.mkfifo(path))),
            ("endless device", replaced(lambda path: path.symlink_to("/dev/zero"))),
            ("link to itself", replaced(lambda path: path.symlink_to(path))),
            ("dangling link", replaced(lambda path: path.symlink_to("/nowhere/at/all"))),
            ("unreadable memory", replaced(lambda path: path.symlink_to("/proc/self/mem"))),
        ]
    )


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every value below a JSON value."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths_of(below, (*path, key))


def replace_value(value: Any, path: tuple[Any, ...], new: Any) -> None:
    """Replace the value at a path, or remove its key (new is ...)."""
    for key in path[:-1]:
        value = value[key]
    if new is ...:
        del value[path[-1]]
    else:
        value[path[-1]] = new


def _one_value(path: Path, source: random.Random) -> tuple[str, Callable[[Path], None]]:
    """Replace a value of a JSON, JSON lines or YAML file by one of another type, or remove it; in a log in one line, or wherever it is."""
    documents = _documents(path)
    named = {_shape(place): place for document in documents for place in paths_of(document)}
    shape = source.choice(sorted(named))
    at = [(document, place) for document in documents for place in paths_of(document) if _shape(place) == shape]
    new = source.choice((*VALUES, ...))
    chosen = at if source.random() < 0.5 else [source.choice(at)]
    for document, place in chosen[:1] if new is ... and isinstance(chosen[0][1][-1], int) else chosen:
        replace_value(document, place, new)
    text = "\n".join(json.dumps(document) for document in documents) + "\n"
    return f"{shape} = {'removed' if new is ... else repr(new)[:30]} ({len(chosen)}x)", lambda path: (path.write_text(text), None)[1]


def _documents(path: Path) -> list[Any]:
    text = path.read_text()
    if path.suffix == ".yaml":
        from ruamel.yaml import YAML

        return [YAML(typ="safe", pure=True).load(text)]
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def _shape(place: tuple[Any, ...]) -> str:
    """A path without the indices of lists."""
    return ".".join("*" if isinstance(key, int) else key for key in place)


def call(arguments: list[str]) -> tuple[int, str]:
    """Run the command; return its exit code and what it wrote to stderr. An exception passes."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = ridge(arguments)
    return code, errors.getvalue()


def written_by(root: Path, command: tuple[str, ...], cache: Path) -> tuple[Path, ...]:
    """Return what a command may write: its output, the cache and, of the commands here, what a preparation continues."""
    outputs = (root / name for name in ("out.json", "out.html", "exported"))
    return (*outputs, cache, *([root / "corpus"] if command[:2] == ("data", "prepare") else []))


def problem(root: Path, case: Case) -> str | None:
    """Damage the file, run the command, restore the file. root: alone in its directory.

    Return what is wrong with the answer, or what the command changed elsewhere; None when nothing is.
    """
    path = root / case.file
    data, times = path.read_bytes(), path.stat()
    case.apply(path)
    try:
        with own_places(root.parent) as cache:
            writable = written_by(root, case.command, cache)
            before = state(root.parent, writable)
            found = _judge(root, case)
            return found or changes(root.parent, before, state(root.parent, writable))
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        shutil.rmtree(root / "exported", ignore_errors=True)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def guarded(arguments: list[str]) -> tuple[int, str, str | None]:
    """Run the command; return its exit code, what it wrote to stderr, and the exception that it raised instead, with its place."""

    def late(*_: object) -> None:
        raise TimeoutError(f"runs longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        return *call(arguments), None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([frame for frame in frames if "site-packages" not in frame.filename] or list(frames))[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
        return 0, "", f"{type(error).__name__}: {str(error)[:100]!r} at {place}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _judge(root: Path, case: Case) -> str | None:
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{root / 'bin'}:{path}"
    try:
        code, errors, raised = guarded(list(case.command))
    finally:
        os.environ["PATH"] = path
    if raised is not None:
        return raised
    lines = errors.strip().splitlines()
    if code == 2:
        errors_in = [line for line in lines if line.startswith("ridge: error: ")]
        if len(errors_in) != 1 or lines[-1] != errors_in[0]:
            return f"not one line: {lines}"
        if max(map(len, lines)) > 1500:
            return f"a line of {max(map(len, lines))} characters"
        # The values are valid, and the answer is no.
        about_content = ("A comparison changes one thing", "has no log yet", "must be positive and finite", "unknown device")
        elsewhere = case.file == "sweep.yaml" and case.damage.startswith("directory")  # the file names another directory
        if not elsewhere and not any(words in lines[-1] for words in about_content) and str(root) not in lines[-1]:
            return f"does not name the file: {lines[-1]}"
    elif code != 0:
        return f"exit code {code}: {errors[:200]}"
    return None


def campaign(drawn: Iterable[Any], count: int, problem: Callable[[Any], str | None]) -> int:
    """Judge the first `count` of the cases, print each distinct problem once, and return the exit code."""
    found: Counter[str] = Counter()
    start_s, judged = time.monotonic(), 0
    for case in itertools.islice(drawn, count):
        judged += 1
        if (what := problem(case)) is not None:
            found[what] += 1
            if found[what] == 1:
                print(f"{case}\n    {what}", flush=True)
    print(f"{judged} commands, {sum(found.values())} problems of {len(found)} kinds, {time.monotonic() - start_s:.0f} s")
    return int(bool(found))


def main() -> None:
    """Run a campaign and print each distinct problem once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Damage only files with this in their name.")
    parser.add_argument("--top", type=Path, help="Keep and reuse the run in this directory.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = (arguments.top or Path(made)) / "root"
        if not (root / "study").exists():
            make_run(root)
            make_others(root)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        sys.exit(campaign(cases(root, arguments.seed, arguments.only, models=True), arguments.cases, lambda case: problem(root, case)))


if __name__ == "__main__":
    main()
