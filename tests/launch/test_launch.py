"""`ridge launch`, and the roll call of real processes: one run of several processes, and every way it must not start."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ridgeline.configs.schema import Config
from ridgeline.launch import exit_codes, local
from ridgeline.launch.cluster.devices import VISIBLE
from ridgeline.launch.cluster.network import free_port
from ridgeline.launch.trials import local as trials
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.phases import phases
from tests.xla_flags import QUICK_XLA

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "explain" / "faults.py"
CONFIG = """\
name: launch
run_dir: {run_dir}
model: {{vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}}
precision: {{compute: float32}}
data: {{train: [{{path: {corpus}}}], seq_len: 32, batch_size: 8}}
trainer: {{steps: 4, log_every: 1}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
runtime: {{platform: cpu, cpu_devices: 2, rendezvous_timeout_s: 60}}
"""
ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA, "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "text.txt").write_text((ROOT / "cli" / "main.py").read_text())
    prepare(PrepareSettings((directory / "text.txt",), directory / "c", "bytes"), workers=1)
    return directory / "c"


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(run_dir=tmp_path / "run", corpus=corpus))
    return file


def ridge(*words: object, env: Mapping[str, str] = ENV, cwd: Path = ROOT) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ridgeline", *map(str, words)]
    return subprocess.Popen(command, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def train(config: Path, processes: int, process: int, port: int, *more: str, **options: Any) -> subprocess.Popen[str]:
    place = ["--coordinator", f"127.0.0.1:{port}", "--processes", processes, "--process", process]
    return ridge("train", config, *place, *more, **options)


def ends(processes: Sequence[subprocess.Popen[str]], code: int, pattern: str) -> None:
    """Expect all processes to end with a code, each with one line that matches a pattern."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(outputs)
    for output in outputs:
        assert len([line for line in output.splitlines() if re.search(pattern, line)]) == 1, output
        assert "Traceback" not in output


@dataclass
class Started:
    """A run of two local processes that has ended, and the programs it left to the next start."""

    output: str
    logs: list[list[Event]]
    """Events of each process."""
    programs: set[str]
    """Files in the cache of programs."""

    @property
    def compiled(self) -> list[list[tuple[str, str]]]:
        """What each process compiled or loaded."""
        return [[(p.fields["program"], p.fields["source"]) for p in phases(log) if p.name == "compile"] for log in self.logs]

    @property
    def losses(self) -> list[float]:
        """As process 0 logged them."""
        return [event.fields["loss"] for event in self.logs[0] if event.kind == "step"]


def start_two(config: Path, cache: Path, run_dir: Path) -> Started:
    group = ridge("launch", "--processes", "2", config, f"runtime.compilation_cache={cache}", f"run_dir={run_dir}")
    output = group.communicate(timeout=500)[0]
    assert group.returncode == 0, output
    logs = [read_events(event_file(run_dir, process)) for process in (0, 1)]
    return Started(output, logs, {file.name for file in cache.rglob("*") if not file.name.endswith("-atime")})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    directory.chmod(0o700)
    return directory


@pytest.fixture(scope="module")
def first(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """The first start of a config, with nothing compiled."""
    directory = tmp_path_factory.mktemp("first")
    (directory / "config.yaml").write_text(CONFIG.format(run_dir=directory / "run", corpus=corpus))
    return start_two(directory / "config.yaml", cache, directory / "run")


def test_two_local_processes_train_as_one_and_record_how_they_met(first: Started, config: Path, tmp_path: Path) -> None:
    assert "0: step 4/4" in first.output
    assert "1: step" not in first.output
    single = ridge("train", config, f"run_dir={tmp_path / 'single'}", "runtime.cpu_devices=4")
    assert single.communicate(timeout=500)[0] and single.returncode == 0
    runs = [first.logs[0], read_events(event_file(tmp_path / "single", 0))]
    losses = [[event.fields["loss"] for event in events if event.kind == "step"] for events in runs]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    events = runs[0]
    (met,) = [event.fields for event in events if event.kind == "cluster"]
    assert met["described"]["processes"] == 2
    assert met["described"]["derivations"]["processes"] == "--processes"
    assert met["joined"]["coordinator"].startswith("127.0.0.1:")
    (environment,) = [event.fields for event in events if event.kind == "environment"]
    assert {setting["name"] for setting in environment["settings"]} >= {"OMP_NUM_THREADS", "NPROC"}
    assert [event.fields["phase"] for event in events if event.kind == "phase_total"][:4] == [
        "launch",
        "rendezvous",
        "import",
        "rendezvous",
    ]


def test_a_missing_process_ends_the_others_with_its_name(config: Path) -> None:
    port = free_port()
    ends(
        [train(config, 3, process, port, "runtime.rendezvous_timeout_s=4") for process in (0, 2)],
        exit_codes.LOST_PEER,
        r"ridge: stopped: process 1 .*within 4 s; 2 of 3",
    )


def test_a_process_lost_during_a_save_is_named_without_waiting_for_the_save(config: Path, tmp_path: Path) -> None:
    """The save is agreed on by both, so it can end no more: JAX would end process 0 instead, minutes later, with another code."""
    flags = [
        "train",
        config,
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--processes",
        2,
        "trainer.steps=100000",
        "checkpoint.every=20",
    ]
    faults = [
        {
            "fault": "late",
            "arguments": {"start": 21, "seconds": 0.5},
        },  # time to be killed in before the next save, which would wait for this one
        {"fault": "slow_disk", "arguments": {"bytes_per_s": 1}},
    ]
    ranks = []
    for process, fault in enumerate(faults):
        file = tmp_path / f"{process}.json"
        file.write_text(json.dumps(fault))
        command = [sys.executable, FAULTS, file, tmp_path / "cache", "-m", "ridgeline", *flags, "--process", process]
        environment = {**ENV, "PYTHONPATH": str(ROOT)}
        ranks.append(
            subprocess.Popen([*map(str, command)], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    log = event_file(tmp_path / "run", 0)
    until = time.monotonic() + 300
    while not (log.exists() and any(event.kind == "step" and event.fields["step"] > 20 for event in read_events(log))):
        assert time.monotonic() < until and ranks[0].poll() is None
        time.sleep(0.1)
    ranks[1].kill()
    ends(ranks[:1], exit_codes.LOST_PEER, "ridge: stopped: .*another process of the run")
    ranks[1].communicate()


def test_no_process_0_is_reported_with_what_was_tried(config: Path) -> None:
    ends(
        [train(config, 2, 1, free_port(), "runtime.rendezvous_timeout_s=2")],
        exit_codes.LOST_PEER,
        r"process 0 at 127\.0\.0\.1",
    )


def test_other_settings_or_code_in_one_process_are_refused_by_all(config: Path, tmp_path: Path) -> None:
    port = free_port()
    ends(
        [train(config, 2, process, port, f"trainer.steps={4 + process}") for process in range(2)],
        exit_codes.USAGE,
        r"config trainer\.steps is 4 on process 0 on",
    )
    shutil.copytree(ROOT / "ridgeline", tmp_path / "other" / "ridgeline", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other" / "ridgeline" / "trainer" / "loop.py").open("a").write("\n# changed\n")
    port = free_port()
    ends(
        [train(config, 2, 0, port), train(config, 2, 1, port, cwd=tmp_path / "other")],
        exit_codes.USAGE,
        rf"code differs: {re.escape(str(ROOT))} on process 0",
    )


def test_processes_whose_devices_do_not_fit_the_mesh_are_refused_by_all(config: Path) -> None:
    port = free_port()
    ends([train(config, 2, process, port, "mesh.fsdp=8") for process in range(2)], exit_codes.USAGE, r"2 processes .*4 devices \(2 each\)")


def test_a_sigterm_while_waiting_ends_at_once_as_preempted(config: Path) -> None:
    process = train(config, 2, 0, free_port(), "runtime.rendezvous_timeout_s=600")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "waiting for 1 of 2 processes: process 1" in line:
            process.send_signal(signal.SIGTERM)
            break
    assert process.wait(300) == exit_codes.PREEMPTED, "".join(lines) + process.stdout.read()


def test_a_sigterm_before_the_command_is_loaded_is_a_preemption() -> None:
    code = """
import os, signal, types
from ridgeline.cli import main
main.importlib = types.SimpleNamespace(import_module=lambda name: os.kill(os.getpid(), signal.SIGTERM))
main.main(["train", "quickstart"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (exit_codes.PREEMPTED, "ridge: stopped: received SIGTERM; nothing to save yet\n")


def group(*codes: str, out: io.StringIO | None = None) -> local.Group:
    return local.Group([[sys.executable, "-c", code] for code in codes], [os.environ] * len(codes), out or io.StringIO())


def test_the_first_failure_ends_the_others_and_is_the_code() -> None:
    out = io.StringIO()
    stuck = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('stuck', flush=True); time.sleep(600)"
    begin = time.monotonic()
    ended = group("import time; time.sleep(0.5); raise SystemExit(72)", stuck, "import time; time.sleep(600)", out=out).wait(grace_s=1.0)
    assert (ended.code, ended.failed_first) == (72, 0)
    assert time.monotonic() - begin < 60
    assert "1: stuck\n" in out.getvalue()
    assert re.search(r"process 0 .* 72", out.getvalue())


def test_a_killed_process_has_the_shells_code() -> None:
    ended = group("import os; os.kill(os.getpid(), 9)", "import time; time.sleep(600)").wait(grace_s=0.2)
    assert (ended.code, ended.failed_first) == (137, 0)


def test_all_well_is_0() -> None:
    assert group("print(1)", "print(2)").wait() == local.Ended(0)


def test_signals_go_to_all() -> None:
    out = io.StringIO()
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True); time.sleep(600)"
    running = group(code, code, out=out)
    end = time.monotonic() + 60
    while out.getvalue().count("ready") < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    assert running.wait() == local.Ended(75)


def test_gpus_are_shared_evenly() -> None:
    assert [env[VISIBLE] for env in local.environments(2, {}, 4)] == ["0,1", "2,3"]
    assert [env[VISIBLE] for env in local.environments(2, {VISIBLE: "5,7"}, 8)] == ["5", "7"]
    assert VISIBLE not in local.environments(2, {}, None)[0]
    with pytest.raises(ValueError, match=r"4 GPUs .* 3 processes"):
        local.environments(3, {}, 4)


def test_a_second_start_of_two_processes_compiles_nothing(first: Started, cache: Path, config: Path, tmp_path: Path) -> None:
    programs = ["init", "train_step", "param_norm"]
    assert first.compiled == [[(program, "compiled") for program in programs]] * 2
    small = {name.partition("-")[0] for name in first.programs if name.endswith("-cache")}
    assert {"jit_train_step", "jit_param_norm"} <= small, "programs that compile in no time too"
    second = start_two(config, cache, tmp_path / "second")
    assert second.compiled == [[(program, "loaded") for program in programs]] * 2
    assert second.programs == first.programs
    assert second.losses == first.losses


def children() -> set[int]:
    """Return the child processes of this one, without those that have ended."""
    pids = {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}
    return {pid for pid in pids if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"}


def interrupted_start(number: signal.Signals, delay_s: float, start: Callable[[], object]) -> list[int]:
    """Send this process a signal some time after `start` begins; return the processes that `start` leaves behind."""
    before = children()
    for handled in (signal.SIGINT, signal.SIGTERM):  # the signal may arrive before `start` handles it
        signal.signal(handled, signal.default_int_handler)
    sender = threading.Timer(delay_s, os.kill, (os.getpid(), number))
    with contextlib.suppress(KeyboardInterrupt):
        sender.start()
        start()
    sender.join()
    return sorted(children() - before)


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Restore the handlers of the two signals after a test."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers")
def test_a_signal_while_processes_start_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = ["sleep", "60"]
    monkeypatch.setattr(trials, "command", lambda file, processes: sleep)
    trial = trials.LocalTrial("one", Config(), 1, 1, True, tmp_path / "log", lambda: tmp_path / "config.yaml", lambda code: None)
    draw, codes = random.Random(5), []
    for _ in range(40):
        number = draw.choice([signal.SIGINT, signal.SIGTERM])
        assert not interrupted_start(number, draw.uniform(0, 0.004), lambda: trials.run_each([trial], lambda text: None))
        delay_s = draw.uniform(0, 0.01)
        assert not interrupted_start(number, delay_s, lambda: codes.append(local.Group([sleep] * 3, [{}] * 3).wait(grace_s=1).code))
    assert len(codes) > 20 and all(codes)
