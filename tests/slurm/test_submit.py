"""`ridge submit`, `status`, `logs`, `cancel`, `sweep` and `submit-data` on a real Slurm."""

from __future__ import annotations

import filecmp
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.xla_flags import QUICK_XLA

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/slurm.md"
RIDGE = Path(sys.executable).with_name("ridge")
CONFIG = """\
name: tiny
model: {{vocab_size: 258, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_seq_len: 32}}
precision: {{compute: float32}}
data: {{train: [{{path: corpus}}], seq_len: 32, batch_size: 8}}
schedule: {{kind: constant}}
trainer: {{steps: 10, log_every: 5}}
checkpoint: {{every: 5}}
logging: {{tensorboard: false}}
runtime: {{compilation_cache: {programs}}}
"""
READ = ["--input", "texts", "--include", "**/*.py", "--tokenizer", "bytes", "--shards", "6"]


@pytest.fixture
def work(tmp_path: Path, programs: Path) -> Path:
    """A directory with texts and a tiny config."""
    (tmp_path / "texts").mkdir()
    for index in range(60):
        (tmp_path / f"texts/m{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * 20)
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(programs=programs))
    return tmp_path


def ridge(slurm: Any, work: Path, *arguments: str, check: bool = True, **environment: str) -> str:
    """Run a command as a user on the login node; return what it prints."""
    env = {"XLA_FLAGS": QUICK_XLA} | environment  # not the virtual devices of the other tests
    done = slurm.run(RIDGE, *arguments, cwd=work, check=check, timeout_s=900, env=env)
    return done.stdout if check else done.stdout + done.stderr


def answer(slurm: Any, work: Path, *arguments: str, **environment: str) -> Any:
    return json.loads(ridge(slurm, work, *arguments, "--json", **environment))


@pytest.fixture
def corpus(slurm: Any, work: Path) -> Path:
    ridge(slurm, work, "data", "prepare", *READ, "--output", "corpus")
    return work / "corpus"


@pytest.fixture
def site(tmp_path: Path) -> str:
    """A site directory with the example package of plug-ins, as a user's environment has it."""
    shutil.copytree(ROOT / "examples/ridgeline_example", tmp_path / "source")  # building leaves files behind
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", tmp_path / "site", tmp_path / "source"], check=True, timeout=300)
    return str(tmp_path / "site")


def test_a_submitted_run_trains_to_its_end_with_plugins(slurm: Any, work: Path, corpus: Path, site: str) -> None:
    # the preflight, which runs here, must not judge how busy this machine's disk is
    settings = ["--time", "20", "--cluster-set", "storage.write_gb_per_s=0.001"]
    plugins = ["model.family=parallel", "optimizer.kind=signum", "schedule.kind=inverse_sqrt", 'logging.metrics=["train/bits"]']
    submit = ["submit", "tiny.yaml", "-c", "local", "-N", "2", *settings, "trainer.steps=12", "mesh.fsdp=2", *plugins]
    told = answer(slurm, work, *submit, PYTHONPATH=site)
    (work / "tiny.yaml").write_text("later edits do not reach a submitted job")
    state = slurm.wait_for_job(told["job"])
    log = ridge(slurm, work, "logs", "runs/tiny")
    assert state == "COMPLETED", log
    fields = slurm.job(told["job"])
    assert (fields["TimeLimit"], fields["NumNodes"], fields["Requeue"], fields["WorkDir"]) == ("00:20:00", "2", "1", str(work))

    shown = answer(slurm, work, "status", "runs/tiny")
    assert [(job["state"], job["exit_code"], job["restarts"]) for job in shown["jobs"]] == [("COMPLETED", 0, 0)]
    assert (shown["progress"]["step"], shown["progress"]["steps"]) == (12, 12)
    assert "step 12/12" in ridge(slurm, work, "logs", "runs/tiny", "--rank", "0")
    assert "step 12/12" not in ridge(slurm, work, "logs", "runs/tiny", "--rank", "1")
    assert "step 12/12" in ridge(slurm, work, "logs", "runs/tiny", "--follow"), "following an ended job prints it all and returns"

    run = json.loads((work / "runs/tiny/run.json").read_text())
    assert run["starts"][0]["processes"] == 2
    lines = [json.loads(line) for line in (work / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [5, 10, 12]
    assert [line["train/bits"] for line in trained] == pytest.approx([line["train/loss"] / math.log(2) for line in trained])
    assert run["starts"][0]["git"]["snapshot"] == str(work / "runs/tiny/slurm/1/code"), "the snapshot ran, not the working tree"
    environment = (work / f"runs/tiny/slurm/1/environment-{told['job']}-0.txt").read_text()
    assert f"SLURM_JOB_ID={told['job']}\n" in environment
    assert "no pending or running job" in ridge(slurm, work, "cancel", "runs/tiny")


def test_waiting_and_running_jobs_are_cancelled(slurm: Any, work: Path, corpus: Path) -> None:
    endless = ["-c", "local", "-N", "4", "--cluster-set", "slurm.exclusive=true", "trainer.steps=1000000", "--no-preflight"]
    running = answer(slurm, work, "submit", "tiny.yaml", *endless)["job"]
    waiting = answer(slurm, work, "submit", "tiny.yaml", *endless, "name=other")["job"]
    slurm.wait_for_job(running, "RUNNING")
    assert f"job {waiting} of {work}/runs/other is PENDING" in ridge(
        slurm, work, "submit", "tiny.yaml", *endless, "name=other", check=False
    )
    assert answer(slurm, work, "status", "runs/other")["jobs"][0]["state"] == "PENDING"
    assert "no log yet (PENDING)" in ridge(slurm, work, "logs", "runs/other", check=False)
    assert answer(slurm, work, "cancel", "runs/other") == {"saving": [], "cancelled": [waiting], "processes": []}
    assert slurm.wait_for_job(waiting) == "CANCELLED"
    slurm.until(lambda: "step 5/" in (work / f"runs/tiny/slurm/job-{running}.log").read_text(), 900, "training")
    assert answer(slurm, work, "cancel", "runs/tiny") == {"saving": [running], "cancelled": [], "processes": []}
    slurm.wait_for_job(running)
    shown = answer(slurm, work, "status", "runs/tiny")
    assert [(job["exit_code"], job["restarts"]) for job in shown["jobs"]] == [(75, 0)], "saved, and not requeued"
    saved = max(int(path.name.removeprefix("step_")) for path in (work / "runs/tiny/checkpoints").glob("step_*"))
    assert 5 <= shown["progress"]["step"] <= saved < 1000000


def test_status_tells_held_and_blocked_jobs_from_those_that_wait_their_turn(slurm: Any, work: Path, corpus: Path) -> None:
    def submitted(name: str, *settings: str) -> str:
        command = ["submit", "tiny.yaml", "-c", "local", "--time", "20", "--no-preflight", f"name={name}", "checkpoint.every=10"]
        return str(answer(slurm, work, *command, *settings)["job"])

    def shown(name: str) -> dict[str, Any]:
        (job,) = answer(slurm, work, "status", f"runs/{name}")["jobs"]
        return dict(job)

    filler = slurm.run("sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000", cwd=work).stdout.strip()
    slurm.wait_for_job(filler, "RUNNING")
    held = submitted("held", "-N", "1", "--cluster-set", 'slurm.options=["--hold"]')
    waits = submitted("waits", "-N", "4")
    job = shown("held")
    assert (job["state"], job["reason"], job["waiting"]) == ("PENDING", "JobHeldUser", "held")
    line = ridge(slurm, work, "status", "runs/held").splitlines()[-2]
    assert line == f"job {held}: pending (JobHeldUser): held: by its user; `scontrol release {held}` releases it"
    assert f"PENDING (JobHeldUser)): held: by its user; `scontrol release {held}`" in ridge(slurm, work, "logs", "runs/held", check=False)

    slurm.until(lambda: shown("waits")["reason"] == "Resources", 60, "the scheduler's reason")
    assert (shown("waits")["waiting"], shown("waits")["advice"]) == ("queued", None)
    assert f"job {waits}: pending (Resources): it starts by itself" in ridge(slurm, work, "status", "runs/waits")
    slurm.run("scontrol", "hold", waits)
    assert shown("waits")["waiting"] == "held"

    never = submitted("never", "-N", "1", "--cluster-set", f'slurm.options=["--dependency=afterok:{waits}"]')
    slurm.until(lambda: shown("never")["reason"] == "Dependency", 60, "the scheduler's reason")
    assert shown("never")["waiting"] == "queued"
    slurm.run("scancel", waits)
    slurm.until(lambda: shown("never")["reason"] == "DependencyNeverSatisfied", 60, "the scheduler's reason")
    assert shown("never")["waiting"] == "blocked"
    (command,) = re.findall(r"`(scontrol [^`]*)`", ridge(slurm, work, "status", "runs/never"))
    slurm.run(*command.split())
    slurm.until(lambda: shown("never")["waiting"] == "queued", 60, "the dependency to be dropped")
    slurm.run("scancel", never)

    (work / "sweep.yaml").write_text("name: s\nconfig: tiny.yaml\ngrid: {seed: [1, 2]}\n")
    array = answer(slurm, work, "sweep", "sweep.yaml", "-c", "local", "--no-preflight", "--cluster-set", 'slurm.options=["--hold"]')["job"]
    table = answer(slurm, work, "status", "runs/s")
    assert [row["state"] for row in table] == ["held", "held"]
    assert f"`scontrol release {array}_1`" in table[1]["problem"]
    assert "nothing to do" in ridge(slurm, work, "sweep", "sweep.yaml", "-c", "local", "--no-preflight"), (
        "held points are not submitted again"
    )
    slurm.run("scancel", array)

    slurm.run("scancel", filler)
    slurm.run(*re.findall(r"`(scontrol [^`]*)`", shown("held")["advice"])[0].split())
    assert slurm.wait_for_job(held) == "COMPLETED", ridge(slurm, work, "logs", "runs/held")
    assert (shown("held")["waiting"], shown("held")["advice"], shown("held")["exit_code"]) == (None, None, 0)


def test_the_guides_own_script_requeues_after_saving_and_not_after_scancel(slurm: Any, work: Path, corpus: Path) -> None:
    (text,) = re.findall(r'```bash title="own\.sh"\n(.*?)```\n', GUIDE.read_text(), re.DOTALL)
    fitted = {
        "=4\n": "=1\n",
        "=20\n": "=2\n",
        "=12:00:00\n": "=20\n",
        "#SBATCH --gres=gpu:4\n": "",
        "source .venv/": f"source {RIDGE.parents[1]}/",
        "my.yaml": "tiny.yaml",
    }
    for theirs, ours in fitted.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    (work / "own.sh").write_text(text)
    job = slurm.run("sbatch", "--parsable", "own.sh", cwd=work, env={"XLA_FLAGS": QUICK_XLA}).stdout.strip()
    log = work / f"my-run-{job}.log"

    def reached(words: str) -> None:
        slurm.until(lambda: log.exists() and words in log.read_text(), 900, words)

    reached("step 5/20000")
    slurm.run("scancel", "--signal=TERM", job)  # as preemption and the time limit do: to the ranks
    reached("resuming from the checkpoint of step")
    assert slurm.job(job)["Restarts"] == "1"
    slurm.run("scancel", job)
    assert slurm.wait_for_job(job) == "CANCELLED"
    assert slurm.job(job)["Restarts"] == "1"


def test_a_sweep_survives_a_failing_point_and_repeats_only_that(slurm: Any, work: Path, corpus: Path) -> None:
    (work / "sweep.yaml").write_text(
        "name: s\nconfig: tiny.yaml\nmax_running: 2\nlist:\n  - {seed: 1}\n  - {seed: 2, data: {train: [{path: later}]}}\n  - {seed: 3}\n"
    )
    submit = ["sweep", "sweep.yaml", "-c", "local", "--no-preflight"]
    first = answer(slurm, work, *submit)
    assert first["points"] == [0, 1, 2]
    slurm.until(lambda: not slurm.run("squeue", "-h", "-j", first["job"], check=False).stdout.strip(), 900, "the array to end")
    table = answer(slurm, work, "sweep", "sweep.yaml", "--table")
    assert [row["state"] for row in table] == ["finished", "failed", "finished"], ridge(slurm, work, "logs", "runs/s/001")
    assert [row["step"] for row in table] == [10, None, 10]
    assert table[1]["exit_code"] == 2
    assert "later" in ridge(slurm, work, "logs", "runs/s/001"), "the log of a point is in its run directory"
    assert table[0]["loss"] != table[2]["loss"]

    (work / "corpus").rename(work / "later")
    second = answer(slurm, work, *submit)
    assert second["points"] == [1]
    slurm.wait_for_job(second["job"])
    again = answer(slurm, work, "sweep", "sweep.yaml", "--table")
    assert [row["state"] for row in again] == ["finished"] * 3
    assert [again[i] for i in (0, 2)] == [table[i] for i in (0, 2)]
    assert "nothing to do" in ridge(slurm, work, *submit)


def test_a_corpus_of_an_array_is_byte_for_byte_that_of_one_process(slurm: Any, work: Path, corpus: Path) -> None:
    submit = ["submit-data", "-c", "local", "--slices", "3", *READ, "--output", "array"]
    (work / "texts").rename(work / "away")
    assert "input not found: texts" in ridge(slurm, work, *submit, check=False), "mistakes are found before the queue"
    (work / "away").rename(work / "texts")

    first = answer(slurm, work, *submit)
    slurm.run("scancel", f"{first['array']}_2")
    slurm.until(lambda: not slurm.run("squeue", "-h").stdout.strip(), 900, "the jobs to end")
    if slurm.job_state(first["merge"]) == "COMPLETED":
        pytest.fail("the merge ran although a slice was cancelled")
    assert not (work / "array/manifest.json").exists()

    second = answer(slurm, work, *submit)
    assert slurm.wait_for_job(second["merge"]) == "COMPLETED"
    logs = "".join(path.read_text() for path in (work / "array.jobs/slurm").glob(f"job-{second['array']}_*.log"))
    assert "0 shards made, 2 kept" in logs, "finished slices are not made again"
    names = sorted(str(path.relative_to(corpus)) for path in corpus.rglob("*") if path.is_file() and ".prepare" not in path.parts)
    assert len([name for name in names if name.endswith(".array_record")]) == 6
    same, different, missing = filecmp.cmpfiles(corpus, work / "array", names, shallow=False)
    assert (different, missing) == ([], [])
    assert same == names
    assert [job["state"] for job in answer(slurm, work, "status", "array.jobs")["jobs"]][-1] == "COMPLETED"
