"""Runs of a tiny model on the Slurm of these tests, and their comparison with an uninterrupted run."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.phases import phases
from tests.xla_flags import QUICK_XLA

STRIKE = Path(__file__).with_name("strike.py")
RIDGE = Path(sys.executable).with_name("ridge")
CONFIG = """\
name: {name}
run_dir: {run_dir}
model: {{vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}}
precision: {{compute: float32}}
data: {{train: [{{path: {corpus}/train}}], seq_len: 32, batch_size: 8}}
evaluation: {{sets: {{held: {corpus}/held}}, every: 12, max_batches: 2}}
trainer: {{steps: {steps}, log_every: 1}}
checkpoint: {{every: 20}}
logging: {{tensorboard: false}}
runtime: {{rendezvous_timeout_s: 300, compilation_cache: {programs}}}
"""
STEPS = 60
"""Steps of the interrupted runs and of the reference run."""


@dataclass
class Run:
    """A run and its job."""

    slurm: Any
    directory: Path
    job: str

    @property
    def log(self) -> str:
        """Output of job script and ranks."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("slurm/job-*.log")))

    def events(self, process: int = 0) -> list[Event]:
        path = event_file(self.directory, process)
        return read_events(path) if path.exists() else []

    def step(self) -> int:
        """Return the last logged step."""
        return max((event.fields["step"] for event in self.events() if event.kind == "step"), default=0)

    def saved(self) -> int:
        """Return the step of the newest checkpoint; 0 without."""
        return max((int(path.name[5:]) for path in (self.directory / "checkpoints").glob("step_*") if path.name[5:].isdigit()), default=0)

    def reaches(self, step: int, timeout_s: float = 900) -> None:
        self.slurm.until(lambda: self.step() >= step, timeout_s, f"step {step}\n{self.log}")

    def nodes(self) -> list[str]:
        """Return the names of the job's nodes, current or at its end."""
        return self.slurm.run("scontrol", "show", "hostnames", self.slurm.job(self.job)["NodeList"]).stdout.split()

    def nodes_once_running(self) -> list[str]:
        self.slurm.wait_for_job(self.job, "RUNNING")
        return self.nodes()

    def restarts(self) -> int:
        return int(self.slurm.job(self.job)["Restarts"])

    def finishes(self, timeout_s: float = 900) -> None:
        """Wait until the job has completed successfully."""
        state = self.slurm.wait_for_job(self.job, timeout_s=timeout_s)
        assert state == "COMPLETED", self.log

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every array of the newest checkpoint."""
        return arrays(self.directory)

    def nothing_was_lost(self) -> None:
        """Assert that every start continued from the last step of the previous one, so that each step ran once."""
        made = 0
        for event in self.events():
            if event.kind == "phase_end" and event.fields["phase"] == "restore" and event.fields["outcome"] == "ok":
                assert event.fields["step"] == made, self.log
            if event.kind == "step":
                assert event.fields["step"] == made + 1, self.log
                made = event.fields["step"]

    def codes(self) -> list[int]:
        """Return the exit codes of srun, by start, as the job script recorded them."""
        file = self.directory / "attempts.jsonl"
        return [json.loads(line)["exit_code"] for line in file.read_text().splitlines()] if file.exists() else []


def prepare_corpus(directory: Path) -> Path:
    """Prepare a tiny corpus with a held-out set; return the directory of both."""
    (directory / "texts").mkdir()
    for index in range(40):
        (directory / f"texts/{index}.txt").write_text(f"def f{index}(x):\n    return x + {index}\n" * 30)
    prepare(PrepareSettings((directory / "texts",), directory / "sets", "bytes", holdouts={"held": 0.25}, shards=2), workers=1)
    return directory / "sets"


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """Return every array of the newest checkpoint of a run directory, read without the mesh it was saved with."""
    import tensorstore as ts

    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    store = {"driver": "ocdbt", "base": f"file://{newest}/state/"}
    keys = [key.decode() for key in ts.KvStore.open(store).result().list().result()]
    names = [key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")]
    specs = {name: {"driver": "zarr3", "kvstore": {**store, "path": f"{name}/"}} for name in names}
    return {name: np.asarray(ts.open(spec).result().read().result()) for name, spec in specs.items()}


def assert_bitwise_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert len(one) > 20
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def environment() -> dict[str, str]:
    """Return overrides of variables that a job must not inherit: the virtual devices of the other tests."""
    return {"XLA_FLAGS": QUICK_XLA, "JAX_PLATFORMS": "cpu"}


def write_config(directory: Path, corpus: Path, name: str, steps: int, programs: Path | None) -> Path:
    path = directory / f"{name}.yaml"
    path.write_text(CONFIG.format(name=name, run_dir=directory / name, corpus=corpus, steps=steps, programs=programs or "null"))
    return path


def interpreter(
    directory: Path,
    name: str,
    strikes: Sequence[Any] = (),
    pace_s: float = 0.0,
    hold_at: int | None = None,
    step_s: float = 0.0,
    env: Mapping[str, str] | None = None,
    slow: tuple[str, float, int] | None = None,
    flip: tuple[str, int, str, int, int] | None = None,
    shell: str = "",
) -> Path:
    """Write the `python` of a job's tasks: this interpreter, with strike.py before the command, the variables of `env`, after `shell`."""
    plan, python = directory / f"{name}.plan.json", directory / f"{name}.python"
    content = {"strikes": list(strikes), "pace_s": pace_s, "hold_at": hold_at, "step_s": step_s, "slow": slow, "flip": flip}
    plan.write_text(json.dumps(content))
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in (env or {}).items())
    python.write_text(
        f'#!/bin/bash\n[ "$1" = -m ] || exec {shlex.quote(sys.executable)} "$@"\n{exports}{shell}\n'
        f'exec {shlex.quote(sys.executable)} {shlex.quote(str(STRIKE))} {shlex.quote(str(plan))} "$@"\n'
    )
    python.chmod(0o755)
    return python


def strikes_made(directory: Path, name: str) -> list[str]:
    """Return the places of the strikes, in order."""
    return [json.loads(line)["place"] for line in (directory / f"{name}.plan.strikes").read_text().splitlines()]


def submit(
    slurm: Any,
    directory: Path,
    corpus: Path,
    name: str,
    *,
    steps: int,
    nodes: int = 2,
    minutes: str = "30",
    strikes: Sequence[Any] = (),
    pace_s: float | None = None,
    cluster: Sequence[str] = (),
    overrides: Sequence[str] = (),
    programs: Path | None = None,
    hold: bool = True,
    step_s: float = 0.0,
    env: Mapping[str, str] | None = None,
    slow: tuple[str, float, int] | None = None,
    flip: tuple[str, int, str, int, int] | None = None,
    preflight: bool = False,
    shell: str = "",
) -> Run:
    """Submit a run with `ridge submit`.

    pace_s: a pause per step of a run that will be disturbed; with `hold` its first start does not end before SIGTERM. programs: the
    compilation cache. step_s: a pause within each step. env: variables of the ranks. slow: node, additional
    share of its computing time, and the step from which on it is slow. flip: node, step, beginning of the name of an array, element and
    bit: what is flipped in the memory of the node's device before that step. shell: lines of the shell that starts each task.
    """
    held = None if pace_s is None or not hold else steps - 2
    python = interpreter(directory, name, strikes, pace_s or 0.0, held, step_s, env, slow, flip, shell)
    settings = [f"software.python={python}", *cluster]
    told = slurm.run(
        RIDGE,
        "submit",
        write_config(directory, corpus, name, steps, programs),
        *("-c", "local", "-N", nodes, "--time", minutes, *([] if preflight else ["--no-preflight"]), "--json"),
        *(part for setting in settings for part in ("--cluster-set", setting)),
        *overrides,
        env=environment(),
        cwd=directory,
    )
    return Run(slurm, directory / name, json.loads(told.stdout)["job"])


def sweep(
    slurm: Any,
    directory: Path,
    corpus: Path,
    name: str,
    *,
    count: int,
    steps: int,
    pace_s: float,
    at_once: int,
    programs: Path | None = None,
) -> list[Run]:
    """Submit an array of one-node runs with `ridge sweep`; they differ only in the number of kept checkpoints.

    pace_s, programs: as of `submit`.
    """
    python = interpreter(directory, name, (), pace_s, steps - 2)
    config = write_config(directory, corpus, name, steps, programs)
    file = directory / f"{name}.sweep.yaml"
    file.write_text(
        f"name: {name}\nconfig: {config.name}\nmax_running: {at_once}\ngrid: {{checkpoint.keep_last: {list(range(2, 2 + count))}}}\n"
    )
    told = slurm.run(
        *(RIDGE, "sweep", file, "-c", "local", "--time", "30", "--no-preflight", "--json"),
        *("--cluster-set", f"software.python={python}"),
        env=environment(),
        cwd=directory,
    )
    job = json.loads(told.stdout)["job"]
    return [Run(slurm, directory / "runs" / name / f"{index:03d}", f"{job}_{index}") for index in range(count)]


def start_s(run: Run) -> float:
    """Return the seconds of a run's only start from the begin of its process to the end of its first step."""
    log = phases(run.events())
    first = next(phase for phase in log if phase.name == "first_step")
    return first.start_s + first.duration_s - log[0].start_s


@dataclass
class Moment:
    """Moment of a strike: after a logged step, or (step 0) at a share of the time to the first step."""

    share: float = 0.0
    step: int = 0


def strike_each(slurm: Any, runs: Sequence[Run], moments: Sequence[Moment], start_s: float, timeout_s: float) -> None:
    """Have Slurm signal the ranks of every run once, at its moment or as soon after it as possible.

    start_s: what a start takes to its first step, until one of these runs has made its own; then what the newest of them took.
    """
    waiting = {run.job: (run, moment) for run, moment in zip(runs, moments, strict=True)}
    begun: dict[str, float] = {}
    started: set[str] = set()

    def strike_those_due() -> bool:
        nonlocal start_s
        steps = slurm.run("squeue", "--steps", "-h", "-o", "%i").stdout.split()
        for job, (run, moment) in list(waiting.items()):
            if f"{job}.0" not in steps:
                continue
            since_s = time.monotonic() - begun.setdefault(job, time.monotonic())
            made = run.step()
            if made and job not in started:
                started.add(job)
                start_s = since_s
            if made >= moment.step if moment.step else since_s >= moment.share * start_s:
                # name the step: for a task of an array scancel mistakes a delivered signal for a refused one and repeats it
                slurm.run("scancel", "--signal=TERM", f"{job}.0", check=False)
                del waiting[job]
        return not waiting

    slurm.until(strike_those_due, timeout_s, "every run struck")


def ranks(run: Run) -> dict[int, int]:
    """Return process -> pid of the current start."""
    found = {}
    for process in range(4):
        opened = [event.fields["pid"] for event in run.events(process) if event.kind == "open"]
        if opened and os.path.exists(f"/proc/{opened[-1]}"):
            found[process] = opened[-1]
    return found


def lines_about(log: str, words: str) -> list[str]:
    return [line for line in log.splitlines() if re.search(words, line)]


def codes_said(log: str) -> list[int]:
    """Return the exit codes of ranks that srun reported."""
    return [int(code) for code in re.findall(r"Exited with exit code (\d+)", log)]
