"""Runs of two real processes of which one hangs at a drawn step: in its loader, in a file system, or before a collective.

Each is ended by the deadline of its phase with exit code HANG, and the report names the process and what it waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster.network import free_port
from ridgeline.rundir.events import event_file, read_events
from ridgeline.trainer.checkpoint import directories as dirs
from tests import sampling
from tests.slurm.jobs import prepare_corpus
from tests.trainer import storage_trouble
from tests.xla_flags import QUICK_XLA

ROOT = Path(__file__).parents[2]
LIMIT_S, SAVE_S, LATE_S = 5.0, 4.0, 5.0
"""Deadlines of a step and of a save; how late the watchdog of a loaded machine may be."""
REPORT_S = 60.0
"""From the deadline to the end of all processes: stacks and report (trainer/watchdog.py), and the end of the others."""
CONFIG = """\
name: hang
run_dir: {run_dir}
model: {{vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}}
precision: {{compute: float32}}
data: {{train: [{{path: {corpus}}}], seq_len: 32, batch_size: 8, prefetch: 1, threads: 1}}
trainer: {{steps: 1000000, log_every: 1, hang_timeout_s: 300}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
runtime: {{platform: cpu, rendezvous_timeout_s: 60}}
"""
DEADLOCK = """
    # In the process of a loader's worker: the read of a batch takes two locks in one order while a thread takes them in the other.
    import multiprocessing, os, sys, threading, time

    def plant():
        while "ridgeline.loaders.loader" not in sys.modules or not hasattr(sys.modules["ridgeline.loaders.loader"], "StepRows"):
            time.sleep(0.001)
        rows, first, second = sys.modules["ridgeline.loaders.loader"].StepRows, threading.Lock(), threading.Lock()
        read = rows.__getitem__

        def other():
            with second:
                time.sleep(0.1)
                first.acquire()

        def deadlocked_read(self, at):
            if not isinstance(at, slice) and int(at) == int(os.environ["DEADLOCK_AT"]):
                with first:
                    threading.Thread(target=other, daemon=True).start()
                    time.sleep(0.05)
                    second.acquire()
            return read(self, at)

        rows.__getitem__ = deadlocked_read

    if "DEADLOCK_AT" in os.environ and "--multiprocessing-fork" in sys.orig_argv:
        threading.Thread(target=plant, daemon=True).start()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus")) / "train"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs: each test has the same."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return storage_trouble.build(tmp_path_factory.mktemp("library"))


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{sampling.seed()} {request.node.name}")


@dataclass
class Run:
    """Two processes of a run, and what they left."""

    directory: Path
    ranks: list[subprocess.Popen[str]]
    workers: list[int] = field(default_factory=list)
    """Processes of loaders that are stopped."""

    def steps(self) -> int:
        log = event_file(self.directory, 0)
        return max((event.fields["step"] for event in read_events(log) if event.kind == "step"), default=0) if log.exists() else 0

    def reaches(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < until_s and [rank.poll() for rank in self.ranks] == [None, None], self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.parent.glob("output.*")))

    def ends(self, limit_s: float, frozen: int | None = None) -> None:
        """Wait until both have ended, by `limit_s` and REPORT_S from now. `frozen`: the process that cannot end itself."""
        until_s = time.monotonic() + limit_s + LATE_S + REPORT_S
        try:
            for number, rank in enumerate(self.ranks):
                if number != frozen:
                    rank.wait(timeout=max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"not ended by the watchdog:\n{self.logs()}")
        finally:
            self.kill()
        codes = {number: rank.returncode for number, rank in enumerate(self.ranks) if number != frozen}
        assert exit_codes.HANG in codes.values(), self.logs()
        if codes.get(1) == -signal.SIGABRT:  # by JAX, where process 0 was faster (launch/cluster/link.py, GRACE_S)
            del codes[1]
        assert set(codes.values()) <= {exit_codes.HANG, exit_codes.LOST_PEER}, self.logs()

    def kill(self) -> None:
        for pid in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def hangs(self, phase: str, limit_s: float) -> None:
        """Expect that the hangs were noticed in this phase, at its deadline."""
        found = [
            event.fields
            for process in (0, 1)
            if (log := event_file(self.directory, process)).exists()
            for event in read_events(log)
            if event.kind == "hang"
        ]
        assert found, self.logs()
        for hang in found:
            assert hang["phase"] == phase, found
            assert limit_s <= hang["silent_s"] < limit_s + LATE_S, found

    def report(self) -> list[str]:
        """Return the lines of the only report."""
        (path,) = self.directory.glob("hang.*.txt")
        lines = path.read_text().splitlines()
        assert lines[0] in self.logs()
        return lines


@pytest.fixture
def start(corpus: Path, cache: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run of two processes: the step from which on deadlines hold, settings, and of each process its environment and its fault."""
    started: list[Run] = []

    def begin(
        step: int,
        *settings: str,
        environments: Mapping[int, Mapping[str, str]] | None = None,
        faults: Mapping[int, dict[str, object]] | None = None,
    ) -> Run:
        config = tmp_path / "config.yaml"
        config.write_text(CONFIG.format(run_dir=tmp_path / "run", corpus=corpus))
        port, ranks = free_port(), []
        for process in (0, 1):
            fault = tmp_path / f"fault.{process}.json"
            deadlines = {"step": step, "limit_s": LIMIT_S, "save_s": SAVE_S}
            fault.write_text(json.dumps(deadlines | (faults or {}).get(process, {})))
            place = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(process)]
            command = [sys.executable, "-m", "tests.trainer.hang_run", fault, cache, "train", config, *place, *settings]
            own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            env = {**os.environ, **own, **(environments or {}).get(process, {})}
            with (tmp_path / f"output.{process}").open("w") as output:
                ranks.append(subprocess.Popen([*map(str, command)], env=env, cwd=ROOT, text=True, stdout=output, stderr=subprocess.STDOUT))
        started.append(Run(tmp_path / "run", ranks))
        return started[-1]

    yield begin
    for run in started:
        run.kill()


def loader_workers(rank: subprocess.Popen[str]) -> dict[str, int]:
    """Return name -> process id of the worker processes of a rank's loader."""
    children = [int(pid) for file in Path(f"/proc/{rank.pid}/task").glob("*/children") for pid in file.read_text().split()]
    return {name: pid for pid in children if (name := Path(f"/proc/{pid}/comm").read_text().strip()).startswith("loader-")}


@pytest.mark.parametrize("workers", sampling.drawn([1, 3], 1))
def test_a_stopped_worker_of_a_loader_is_named(workers: int, start: Callable[..., Run], draw: random.Random) -> None:
    rank, worker, step = draw.randrange(2), draw.randrange(min(1, workers - 1), workers), draw.randint(5, 30)
    run = start(step, f"data.workers={workers}")
    run.reaches(lambda: run.steps() > step)
    pids = loader_workers(run.ranks[rank])
    assert sorted(pids) == [f"loader-{number}" for number in range(workers)]
    run.workers = [pids[f"loader-{worker}"]]
    os.kill(run.workers[0], signal.SIGSTOP)
    run.ends(LIMIT_S)
    run.hangs("a step", LIMIT_S)
    name = rf"loader worker {worker} \(pid {run.workers[0]}\), which is stopped"
    first, *rest = run.report()
    assert re.match(rf"suspect: process {rank} .*, which does not wait for the others, and waits for {name}$", first)
    assert any("_next_batch" in line for line in rest)
    assert any("_read_pending" in line or "jax/_src/stages.py" in line for line in rest)  # XLA on CPUs may wait while it starts a step


@pytest.mark.parametrize("workers", sampling.drawn([1, 2], 1))
def test_a_deadlocked_worker_of_a_loader_is_named_with_its_stacks(
    workers: int, start: Callable[..., Run], tmp_path: Path, draw: random.Random
) -> None:
    rank, step = draw.randrange(2), draw.randint(5, 30) | (workers - 1)  # of two workers the second: the first is a likely mistake
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(DEADLOCK))
    run = start(
        step - 1,
        f"data.workers={workers}",
        environments={rank: {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}", "DEADLOCK_AT": str(step)}},
    )
    run.reaches(lambda: run.steps() >= step - 1)
    run.ends(LIMIT_S)
    run.hangs("a step", LIMIT_S)
    name = rf"loader worker {step % workers} \(pid \d+\), which waits in its own code"
    assert re.match(rf"suspect: process {rank} .*, which does not wait for the others, and waits for {name}$", run.report()[0])
    assert "deadlocked_read" in (run.directory / f"stacks.{rank}.txt").read_text().partition(f"loader worker {step % workers}:")[2]


@pytest.mark.parametrize("workers", sampling.drawn([0, 2], 1))
def test_a_file_system_of_the_data_that_is_stuck_is_named(
    workers: int, start: Callable[..., Run], library: Path, corpus: Path, tmp_path: Path, draw: random.Random
) -> None:
    rank, step, control = draw.randrange(2), draw.randint(5, 30), tmp_path / "control"
    run = start(step, f"data.workers={workers}", environments={rank: storage_trouble.environment(library, control)})
    run.reaches(lambda: run.steps() > step)
    storage_trouble.Trouble(control).begin("stuck", [corpus])
    run.ends(LIMIT_S)
    run.hangs("a step", LIMIT_S)
    worker = r"loader worker \d \(pid \d+\), which waits for " if workers else ""
    call = rf"{worker}\w+ of {re.escape(str(corpus))}"
    assert re.match(rf"suspect: process {rank} .*, which does not wait for the others, and waits for {call}", run.report()[0])


def test_a_file_system_of_the_checkpoints_that_is_stuck_is_named(
    start: Callable[..., Run], library: Path, tmp_path: Path, draw: random.Random
) -> None:
    """The save hangs in the background, or where it stops training; the next one waits for it."""
    rank, saves, control = draw.randrange(2), draw.randint(1, 3), tmp_path / "control"
    run = start(20 * saves + 1, "checkpoint.every=20", environments={rank: storage_trouble.environment(library, control)})
    checkpoints = run.directory / "checkpoints"
    run.reaches(lambda: len(dirs.complete_steps(checkpoints)) >= saves)
    time.sleep(draw.random() / 10)
    storage_trouble.Trouble(control).begin("stuck", [checkpoints])
    run.ends(SAVE_S)
    run.hangs("save", SAVE_S)
    assert re.match(rf"suspect: process {rank} .* waits for .*\w+ of {re.escape(str(checkpoints))}", run.report()[0])


def test_a_run_directory_that_is_stuck_in_process_0_leaves_the_report_in_its_output(
    start: Callable[..., Run], library: Path, tmp_path: Path, draw: random.Random
) -> None:
    step, control = draw.randint(5, 30), tmp_path / "control"
    run = start(step, environments={0: storage_trouble.environment(library, control)})
    run.reaches(lambda: run.steps() > step)
    storage_trouble.Trouble(control).begin("stuck", [run.directory])
    run.ends(LIMIT_S)
    assert not list(run.directory.glob("hang.*.txt"))
    said = (tmp_path / "output.0").read_text()
    assert re.search(rf"^suspect: process 0 .* waits for .*\w+ of {re.escape(str(run.directory))}/", said, re.MULTILINE)


@pytest.mark.parametrize("how", sampling.drawn(["waits", "computes", "holds the lock"], 1))
def test_a_process_that_does_not_enter_a_collective_is_named(how: str, start: Callable[..., Run], draw: random.Random) -> None:
    rank, step = draw.randrange(2), draw.randint(3, 30)
    run = start(step - 1, faults={rank: {"fault": "absent", "arguments": {"step": step, "how": how}}})
    run.reaches(lambda: run.steps() >= step - 1)
    frozen = rank if how == "holds the lock" else None  # ended by faulthandler, after trainer.watchdog.FALLBACK_S
    run.ends(LIMIT_S, frozen)
    run.hangs("a step", LIMIT_S)
    first, second, *rest = run.report()
    why = "does not wait for the others" if frozen is None else "does not answer: .*holds Python's lock.*"
    assert re.match(rf"suspect: process {rank} on \S+, which {why}$", first)
    reached = (
        rf"not reached by process {rank} on \S+, which has not begun step {step + 1}"
        if frozen is None
        else rf"unknown of process {rank} on \S+"
    )
    # read from the stacks of the process that waits; the number is that of the compiled step, where this is the first one
    where = r"(\S+) (\S+) over \w+, [\d.]+ \w+, \S+:\d+ \(number 1 of \d+ of the step\)"
    assert re.match(rf"process {1 - rank} on \S+ waits in {where}; {reached}$", second), second
    assert frozen is not None or any("away" in line for line in rest)
