"""Runs started with srun: detected, connected, equal to a single process; invalid starts are refused."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.launch import exit_codes
from ridgeline.launch.cluster import slurm_nodes
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.phases import phases
from tests.xla_flags import QUICK_XLA

ROOT = Path(__file__).parents[2]
RIDGE = Path(sys.executable).with_name("ridge")
CONFIG = """\
name: detection
model: {{vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}}
precision: {{compute: float32}}
data: {{train: [{{path: {corpus}}}], seq_len: 32, batch_size: 8}}
schedule: {{kind: constant}}
trainer: {{steps: 4, log_every: 1}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
runtime: {{platform: cpu, compilation_cache: {programs}}}
"""
QUICKSTART = """\
base: [{root}/configs/quickstart.yaml]
data: {{train: [{{path: {corpus}}}]}}
evaluation: {{sets: {{validation: {corpus}}}, every: 0}}
schedule: {{warmup_steps: 1}}
trainer: {{steps: 4, log_every: 1}}
checkpoint: {{every: 0, final: false}}
logging: {{tensorboard: false}}
runtime: {{platform: cpu}}
"""
"""The quickstart's model and settings on a small text, for a few steps."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Path:
    directory = tmp_path_factory.mktemp("detection")
    (directory / "text.txt").write_text((ROOT / "cli" / "main.py").read_text())
    prepare(PrepareSettings((directory / "text.txt",), directory / "c", "bytes"), workers=1)
    file = directory / "config.yaml"
    file.write_text(CONFIG.format(corpus=directory / "c", programs=programs))
    (directory / "quickstart.yaml").write_text(QUICKSTART.format(root=ROOT, corpus=directory / "c"))
    return file


@pytest.fixture(scope="module")
def quickstart(config: Path) -> Path:
    return config.with_name("quickstart.yaml")


def train(config: Path, run_dir: Path, *overrides: str) -> list[str]:
    # the variables of the test suite itself would give every process eight devices
    return ["/usr/bin/env", f"XLA_FLAGS={QUICK_XLA}", str(RIDGE), "train", str(config), f"run_dir={run_dir}", *overrides]


def losses(run_dir: Path) -> list[float]:
    return [event.fields["loss"] for event in events(run_dir) if event.kind == "step"]


def events(run_dir: Path) -> list[Event]:
    return read_events(event_file(run_dir, 0))


@pytest.fixture(scope="module")
def single(quickstart: Path, shared: Any) -> list[float]:
    """Losses of one process with four devices, outside of Slurm."""

    def make(directory: Path) -> Path:
        subprocess.run(train(quickstart, directory / "run", "runtime.cpu_devices=4"), check=True, timeout=900, capture_output=True)
        return directory / "run"

    run_dir = shared.once("single", make)
    assert len(losses(run_dir)) == 4
    return losses(run_dir)


@pytest.mark.parametrize(("nodes", "devices"), [(4, 1), (2, 4)], ids=["N4x1", "N2x4"])
def test_srun_alone_trains_as_a_single_process_does(
    slurm: Any, quickstart: Path, single: list[float], tmp_path: Path, nodes: int, devices: int
) -> None:
    begin = time.time()
    done = slurm.run("srun", f"-N{nodes}", *train(quickstart, tmp_path / "run", f"runtime.cpu_devices={devices}"), timeout_s=900)
    assert losses(tmp_path / "run") == pytest.approx(single, rel=1e-5)
    assert done.stdout.count("step 4/4") == 1, "one run, not copies"
    assert "(Slurm step)" in done.stdout
    met = next(event.fields["described"] for event in events(tmp_path / "run") if event.kind == "cluster")
    assert (met["processes"], met["nodes"], met["coordinator"]) == (nodes, nodes, "node01")
    assert met["addresses"] == [slurm.address("node01")]
    _startup_adds_up(events(tmp_path / "run"), begin)


def _startup_adds_up(log: list[Event], begin_s: float) -> None:
    """Break the time from srun to the end of the first step down, and hold the parts against the whole."""
    first = next(phase for phase in phases(log) if phase.name == "first_step")
    before = [phase for phase in phases(log) if phase.start_s + phase.duration_s <= first.start_s + first.duration_s + 1e-3]
    whole_s = first.start_s + first.duration_s - begin_s
    parts_s: dict[str, float] = {"srun": min(phase.start_s for phase in before) - begin_s}
    for phase in before:
        parts_s[phase.name] = parts_s.get(phase.name, 0.0) + phase.own_s
    print(f"srun to first step: {whole_s:.1f} s = " + ", ".join(f"{name} {value:.1f}" for name, value in parts_s.items()))
    assert {"srun", "launch", "rendezvous", "init", "compile", "first_step"} <= parts_s.keys()
    assert all(value >= 0 for value in parts_s.values()), parts_s
    assert 0.8 * whole_s <= sum(parts_s.values()) <= 1.02 * whole_s, parts_s


def test_two_jobs_and_two_steps_at_once_on_the_same_nodes_do_not_mix(slurm: Any, config: Path, tmp_path: Path) -> None:
    def command(name: str, seed: int) -> str:
        return " ".join(train(config, tmp_path / name, f"seed={seed}"))

    # a job of two steps, and another of one, all on node01 and node02 at the same time
    steps = f"srun -N2 -n2 --overlap {command('a', 1)} & a=$!; srun -N2 -n2 --overlap {command('b', 2)} & b=$!; wait $a && wait $b"
    first = slurm.popen("salloc", "-N2", "-n2", "--nodelist=node[01-02]", "bash", "-c", steps)
    second = slurm.popen("srun", "-N2", "-n2", "--nodelist=node[01-02]", *train(config, tmp_path / "c", "seed=3"))
    outputs = [process.communicate(timeout=900)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], "\n".join(outputs)
    coordinators = set()
    seen = []
    for name in "abc":
        log = events(tmp_path / name)
        coordinators.add(next(event.fields["joined"]["coordinator"] for event in log if event.kind == "cluster"))
        assert next(event.fields["described"]["processes"] for event in log if event.kind == "cluster") == 2
        seen.append(losses(tmp_path / name))
    assert len(coordinators) == 3, "one port each"
    assert all(len(values) == 4 for values in seen)
    assert seen[0] != seen[1] != seen[2], "each its own seed"


def test_several_tasks_without_srun_are_refused_at_once(slurm: Any, config: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{' '.join(train(config, tmp_path / 'run'))}\n")
    out = tmp_path / "out"
    job = slurm.sbatch(script, "-N2", "-n2", f"--output={out}")
    assert slurm.wait_for_job(job, timeout_s=900) == "FAILED"
    assert slurm.job(job)["ExitCode"] == f"{exit_codes.USAGE}:0"
    (line,) = [line for line in out.read_text().splitlines() if line.startswith("ridge: error")]
    assert "this job has 2 tasks, but srun did not start this process" in line
    assert "srun ridge train" in line
    shell = slurm.run("salloc", "-N2", "-n2", *train(config, tmp_path / "run"), check=False)
    assert shell.returncode == exit_codes.USAGE
    assert "srun did not start this process" in shell.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_that_was_never_started_is_named_on_every_other(slurm: Any, config: Path, tmp_path: Path) -> None:
    words = " ".join(train(config, tmp_path / "run", "runtime.rendezvous_timeout_s=30"))
    done = slurm.run("srun", "-N3", "--label", "bash", "-c", f"[ $SLURM_PROCID = 1 ] && exit 0; exec {words}", check=False)
    assert done.returncode == exit_codes.LOST_PEER
    said = re.findall(r"^(\d): ridge: stopped: process 1 on node02 .*within 30 s", done.stderr, re.M)
    assert sorted(said) == ["0", "2"], done.stderr


def test_tasks_that_do_not_fit_the_mesh_are_refused_on_every_rank(slurm: Any, config: Path, tmp_path: Path) -> None:
    done = slurm.run("srun", "-N3", "--label", *train(config, tmp_path / "run", "mesh.fsdp=4"), check=False)
    assert done.returncode == exit_codes.USAGE
    assert sorted(re.findall(r"^(\d): ridge: error: .*3 processes .*3 devices", done.stderr, re.M)) == ["0", "1", "2"], done.stderr


def test_a_heterogeneous_step_and_a_container_without_scontrol_train(slurm: Any, config: Path, tmp_path: Path) -> None:
    # a step of two components; without scontrol the flag provides the address
    words = " ".join(train(config, tmp_path / "run", "trainer.steps=1", "mesh.fsdp=1", "mesh.data=3", "data.batch_size=6"))
    hidden = f"PATH=/nonexistent exec {words} --coordinator {slurm.address('node01')}"
    done = slurm.run("srun", "-n1", "-N1", "/bin/bash", "-c", hidden, ":", "-n2", "-N2", "/bin/bash", "-c", hidden, timeout_s=900)
    assert "own parser, scontrol gave no answer" not in done.stdout, "the flag names the coordinator"
    met = next(event.fields["described"] for event in events(tmp_path / "run") if event.kind == "cluster")
    assert (met["processes"], met["nodes"], met["hosts"]) == (3, 3, ["node01", "node02", "node03"])


def test_our_parser_of_node_lists_agrees_with_scontrol(slurm_session: Any) -> None:
    number = st.integers(0, 300).map(str) | st.integers(0, 40).map(lambda value: f"{value:03d}")
    span = st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(1, 4)).map(lambda t: f"{t[0]:0{t[2]}d}-{t[0] + t[1]:0{t[2]}d}")
    bracket = st.lists(number | span, min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")
    name = st.text("abgnx", min_size=1, max_size=3)
    # the scontrol of 22.05 reads no suffix after a bracket (its answer is empty); its order for three brackets is undocumented
    one = st.tuples(name, bracket).map("".join)
    two = st.tuples(name, bracket, name, bracket).map("".join)
    plain = st.tuples(name, number).map("".join)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(one | two | plain, min_size=1, max_size=3).map(",".join))
    def agrees(text: str) -> None:
        answer = slurm_session.run("scontrol", "show", "hostnames", text).stdout.split()
        assert slurm_nodes.expand(text) == answer

    agrees()
    three = "r[1-2]c[0-1]n[01-03],login"
    assert sorted(slurm_nodes.expand(three)) == sorted(slurm_session.run("scontrol", "show", "hostnames", three).stdout.split())
