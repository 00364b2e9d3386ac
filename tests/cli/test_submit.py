"""`ridge submit` without a Slurm: dry runs, what is refused, what is written, the snapshot of the code, containers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.cli import main as cli
from ridgeline.configs.cluster import load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.launch.slurm import container, snapshot
from ridgeline.launch.slurm import submit as slurm
from ridgeline.launch.slurm.script import Job, job_script
from ridgeline.launch.slurm.shape import job_shape, placed
from ridgeline.launch.slurm.state import JobState
from ridgeline.launch.slurm.submit import Submitter, sbatch, training_job, with_environment, write
from ridgeline.rundir import jobs as places
from ridgeline.rundir.provenance import PACKAGES

ROOT = Path(__file__).parents[2]
CONFIG = """\
name: tiny
model: {vocab_size: 512, num_layers: 2, embed_dim: 32, num_heads: 4, mlp_dim: 64, max_seq_len: 64}
data: {train: [{path: corpus}], seq_len: 32, batch_size: 8}
"""
SUBMIT = ["submit", "tiny.yaml", "--cluster", "local", "--nodes", "2"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "NCCL_", "RIDGE_")):
            monkeypatch.delenv(name)
    Path("tiny.yaml").write_text(CONFIG)


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that notes its arguments and environment and answers as a federated Slurm does; the controller forgets every job."""
    directory = tmp_path / "bin"
    directory.mkdir()
    program = directory / "sbatch"
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/sbatch.args\nenv > {tmp_path}/sbatch.env\necho "17;site"\n')
    program.chmod(0o755)
    (directory / "scontrol").write_text('#!/bin/bash\necho "slurm_load_jobs error: Invalid job id specified" >&2\nexit 1\n')
    (directory / "scontrol").chmod(0o755)
    (directory / "sacct").write_text("#!/bin/bash\nexit 1\n")
    (directory / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return tmp_path


def by(workdir: Path) -> Submitter:
    return Submitter({"PATH": os.environ["PATH"]}, workdir, datetime(2026, 11, 21, tzinfo=UTC), "ridgeline", sys.executable)


def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SUBMIT, "--dry-run", "--time", "1:00:00", "trainer.steps=7"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("#!/bin/bash\n# Trains 'tiny'.\n# 2 nodes of local x 1 process = 2 devices.\n")
    assert "#SBATCH --time=01:00:00\n" in shown.out
    assert subprocess.run(["bash", "-n"], input=shown.out, text=True, capture_output=True).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_a_dry_run_shows_the_script_of_a_job_that_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["submit", "tiny.yaml", "--cluster", "mn5-acc", "-N", "1", "--dry-run", "run_dir=/dev/shm/r"]) == 2
    shown = capsys.readouterr()
    assert "#SBATCH --partition=acc\n" in shown.out
    lines = shown.err.splitlines()
    assert lines[0].startswith("ridge: error: mn5-acc ")
    keys = [line.removeprefix("ridge: error:").split(":")[0].split()[-1] for line in lines]
    assert keys == ["--account", "--qos", "--time", "/dev/shm/r"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "tiny.yaml", "-N", "2"], "missing option '--cluster' / '-c'"),
        (["submit", "tiny.yaml", "-c", "local"], "missing option '--nodes' / '-N'"),
        (["submit", "tiny.yaml", "-c", "local", "-N", "0"], "invalid value for '--nodes' / '-N': 0 is not in the range 1<=x<=1048576"),
        (["submit", "tiny.yaml", "-c", "lcoal", "-N", "2"], "cluster 'lcoal' not found; did you mean 'local'? (shipped: "),
        ([*SUBMIT, "--time", "1h"], "--time '1h' "),
        ([*SUBMIT, "--cluster-set", "slurm.acount=x"], "override 'slurm.acount=x': slurm.acount: unknown key; did you mean 'account'?"),
        ([*SUBMIT, "trainer.stpes=1"], "override 'trainer.stpes=1': trainer.stpes: unknown key; did you mean 'steps'?"),
        ([*SUBMIT, "mesh.fsdp=4"], "mesh.fsdp=4 does not match 2 devices; "),
        (["submit", "missing.yaml", "-c", "local", "-N", "2"], "config 'missing.yaml' not found"),
        (["status", "nowhere"], "nowhere is "),
        (["status", "."], "no job was submitted from . (looked for slurm/jobs.jsonl)"),
        (["logs", "."], "no job was submitted from ."),
        (["cancel", "."], "no job was submitted from ."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"ridge: error: {message}")
    assert shown.err.count("\n") == 1


def test_submitting_needs_sbatch_and_prints_the_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr(snapshot, "code_state", lambda: "ridgeline")
    monkeypatch.setattr(snapshot, "take_snapshot", lambda target: target.mkdir())
    assert cli.run(SUBMIT) == 2
    error = capsys.readouterr().err
    assert error.startswith("ridge: error: sbatch is not on PATH: ") and "runs/tiny/slurm/1/job.sh" in error
    assert Path("runs/tiny/slurm/1/job.sh").is_file()


def test_what_is_submitted_is_written_beside_the_script(fake_sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SUBMIT, "trainer.steps=7", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    directory = fake_sbatch / "runs/tiny/slurm/1"
    assert printed == {"job": "17", "run_dir": str(fake_sbatch / "runs/tiny"), "script": str(directory / "job.sh")}
    assert stat.S_IMODE((directory / "job.sh").stat().st_mode) == 0o755
    config = load(directory / "config.yaml").config
    assert config.trainer.steps == 7
    assert config.run_dir == fake_sbatch / "runs/tiny"
    assert config.mesh.fsdp == 2, "-1 is resolved against the devices of the job"
    assert load_cluster(str(directory / "cluster.yaml")).config.name == "local"
    assert (fake_sbatch / "sbatch.args").read_text().splitlines() == ["--parsable", str(directory / "job.sh")]
    record = places.read_jobs(fake_sbatch / "runs/tiny")[0]
    assert (record.job, record.slurm_cluster, record.kind, record.submission) == ("17", "site", "train", 1)
    assert cli.run(SUBMIT) == 0
    assert [record.submission for record in places.read_jobs(fake_sbatch / "runs/tiny")] == [1, 2]


@pytest.mark.parametrize(
    "moved",
    [
        "runs/tiny/slurm",
        "runs/s/slurm",
        "runs/s/000",
        "runs/s/000/slurm",
        *(f"runs/{run}/slurm/job-18.log" for run in ("tiny", "s", "s/000")),
    ],
)
def test_nothing_is_submitted_through_a_link(fake_sbatch: Path, moved: str, capsys: pytest.CaptureFixture[str]) -> None:
    (fake_sbatch / "elsewhere").mkdir()
    place = fake_sbatch / moved
    place.parent.mkdir(parents=True)
    place.symlink_to(fake_sbatch / "elsewhere")
    Path("sweep.yaml").write_text("name: s\nconfig: tiny.yaml\ngrid: {trainer.steps: [1, 2]}\n")
    sweep = ["sweep", "sweep.yaml", "--cluster", "local", "--nodes", "1"]
    assert cli.run(SUBMIT if "tiny" in moved else sweep) == 2
    assert f"{place} is a symbolic link" in capsys.readouterr().err
    assert not list((fake_sbatch / "elsewhere").iterdir())
    assert not (fake_sbatch / "sbatch.args").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_the_job_script_writes_nothing_through_a_link(tmp_path: Path, exists: bool) -> None:
    """Its record of the environment and of the attempt, by the script's own lines."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "slurm/1").mkdir(parents=True)
    if exists:
        victim.write_text("mine")
    for name in ("slurm/1/environment-17-0.txt", "attempts.jsonl", "nodes.jsonl"):
        (run / name).symlink_to(victim)
    cluster = load_cluster("local").config
    config = load("tiny.yaml", [f"run_dir={run}", "elastic.min_nodes=1"]).config
    script = job_script(training_job(placed(config, cluster), cluster, job_shape(cluster, 2, None), by(tmp_path)))
    parts = [
        script[script.index("# Record of the environment") : script.index("# Run the stages")],
        script[script.index("CHECKPOINT=$(find") : script.index("# scontrol fails")],
    ]
    variables = f"RUN={run}; JOB={run}/slurm/1; PYTHON=true; SLURM_JOB_ID=17; SLURM_JOB_NODELIST=n; BEGIN=1; END=2; CODE=0"
    subprocess.run(["bash", "-c", "\n".join([variables, *parts])], check=False, capture_output=True)
    assert (victim.read_text() == "mine") if exists else not victim.exists()


def test_variables_that_override_a_script_are_hidden_from_sbatch_and_written_into_the_script(
    fake_sbatch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "SBATCH_ACCOUNT": "proj42",
        "SBATCH_TIMELIMIT": "1",
        "SLURM_NTASKS": "9",
        "SLURM_CONF": "/c",
        "NCCL_DEBUG": "INFO",
    }.items():
        monkeypatch.setenv(name, value)
    assert cli.run(SUBMIT) == 0
    script = Path("runs/tiny/slurm/1/job.sh").read_text()
    assert "#SBATCH --account=proj42\n" in script
    assert "export NCCL_DEBUG=INFO " in script
    seen = dict(line.split("=", 1) for line in (fake_sbatch / "sbatch.env").read_text().splitlines() if "=" in line)
    assert {name for name in seen if name.startswith(("SBATCH_", "SLURM_"))} == {"SLURM_CONF"}


def test_a_second_job_of_a_run_is_refused_while_the_first_waits_or_runs(tmp_path: Path) -> None:
    places.record_job(tmp_path, places.JobRecord("17", "t", "train", "local", None, 1, {}))

    def now(state: str) -> None:
        slurm.refuse_second_job(tmp_path, lambda job, slurm_cluster: [JobState(job, state)])

    for state in ("PENDING", "RUNNING", "COMPLETING"):
        with pytest.raises(UserError, match=f"^job 17 of {tmp_path} is {state}: .*ridge cancel"):
            now(state)
    for state in ("COMPLETED", "FAILED", "CANCELLED", "FORGOTTEN"):
        now(state)


def test_options_of_the_command_line_win_over_variables_and_files() -> None:
    Path("site.yaml").write_text("base: [clusters/mn5-acc]\nslurm: {account: file}\n")
    environment = {"SBATCH_ACCOUNT": "shell", "SBATCH_QOS": "shell"}
    site = with_environment(load_cluster("site.yaml").config, environment)
    assert (site.slurm.account, site.slurm.qos) == ("file", "shell")


def test_sbatchs_error_is_printed_unchanged(tmp_path: Path) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/bash\necho 'sbatch: error: Batch job submission failed: Invalid account' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(
        UserError, match=r"^sbatch refused the job: sbatch: error: Batch job submission failed: Invalid account; the script is x$"
    ):
        sbatch(Path("x"), {"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def test_submitting_imports_no_jax() -> None:
    code = f"import sys, ridgeline.cli.main as c; c.run({[*SUBMIT, '--dry-run']!r}); print('@' + ' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    modules = {name.partition(".")[0] for name in done.stderr.rpartition("@")[2].split()}
    assert "pydantic" in modules
    assert not modules & {"jax", "jaxlib", "flax", "numpy", "tokenizers"}


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "-C", str(directory), *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small git checkout with the packages of the project, one of them changed since the commit."""
    source = tmp_path / "my source"  # a path with a space
    (source / "ridgeline").mkdir(parents=True)
    (source / "ridgeline" / "__init__.py").write_text("")
    for package in PACKAGES:
        (source / package).mkdir()
        (source / package / "__init__.py").write_text("")
        (source / "ridgeline" / package).symlink_to(f"../{package}")
    (source / ".gitignore").write_text("*.log\n")
    (source / "notes.txt").write_text("not code")
    git(source, "init")
    git(source, "add", ".")
    git(source, "commit", "-m", "first")
    return source


def test_a_snapshot_holds_the_code_as_it_is(checkout: Path, tmp_path: Path) -> None:
    (checkout / "launch/__init__.py").write_text("changed = 1\n")
    (checkout / "models/new.py").write_text("new = 1\n")
    (checkout / "models/run.log").write_text("ignored")
    (checkout / "explain/__init__.py").unlink()
    target = tmp_path / "code"
    described = snapshot.take_snapshot(target, checkout)
    assert (target / "ridgeline/launch/__init__.py").read_text() == "changed = 1\n"
    assert (target / "ridgeline/models/new.py").is_file()
    for absent in ("ridgeline/models/run.log", "notes.txt", "ridgeline/notes.txt", "ridgeline/explain/__init__.py", ".git", "models"):
        assert not (target / absent).exists()
    assert described["dirty"] is True
    assert len(described["commit"]) == 40
    assert "+changed = 1" in (target / "git.diff").read_text()
    assert json.loads((target / "snapshot.json").read_text()) == described
    (checkout / "launch/__init__.py").write_text("changed = 2\n")
    assert (target / "ridgeline/launch/__init__.py").read_text() == "changed = 1\n"


def test_a_snapshot_of_installed_packages_has_no_commit(checkout: Path, tmp_path: Path) -> None:
    installed = tmp_path / "venv/site-packages"
    installed.parent.mkdir()
    (checkout / ".git").rename(tmp_path / "venv/.git")  # a checkout around it is not its own
    checkout.rename(installed)
    (installed / "models/__pycache__").mkdir()
    (installed / "models/__pycache__/a.pyc").write_text("")
    described = snapshot.take_snapshot(tmp_path / "code", installed)
    assert (described["commit"], described["dirty"], described["diff"]) == (None, False, None)
    assert (tmp_path / "code/ridgeline/configs/__init__.py").is_file()
    assert not (tmp_path / "code/ridgeline/models/__pycache__").exists()


def test_a_checkout_without_a_commit_is_copied_like_an_installed_package(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / ".git")
    git(checkout, "init")
    assert snapshot.take_snapshot(tmp_path / "code", checkout)["commit"] is None
    assert (tmp_path / "code/ridgeline/models/__init__.py").is_file()


RUN_IN_SNAPSHOT = """
import sys
from pathlib import Path
import ridgeline.cli.main, ridgeline.configs.schema
from ridgeline.configs.load import load
from ridgeline.launch.slurm.script import fill
from ridgeline.launch.slurm.snapshot import take_snapshot
load("quickstart")
names = "count_nodes each_start elastic exit_codes final grace_s lost max_failures max_restarts "
names += "pause_s preempted quick_s request_nodes stages until_done watch"
assert fill("supervise.sh", dict.fromkeys(names.split(), "1"))
print(ridgeline.cli.main.__file__, ridgeline.configs.schema.__file__, sep="\\n")
if len(sys.argv) > 1:
    take_snapshot(Path(sys.argv[1]))
"""


def run_in_snapshot(code: Path, *arguments: Path) -> None:
    """Import the snapshot at `code` by itself, read its data files, and check where the modules come from."""
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", RUN_IN_SNAPSHOT, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(code / "ridgeline/cli/main.py"), str(code / "ridgeline/configs/schema.py")]


def content(code: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(code)): path.read_bytes() for path in (code / "ridgeline").rglob("*") if path.suffix in (".py", ".yaml", ".sh")
    }


def test_snapshots_of_a_checkout_and_of_an_installed_package_run_by_themselves(tmp_path: Path) -> None:
    installed, copy = tmp_path / "my venv/site-packages", tmp_path / "a job/code"
    installed.parent.mkdir()
    snapshot.take_snapshot(installed)  # a snapshot has the layout of an installed package: plain directories, no links
    (installed / snapshot.SNAPSHOT).unlink()
    copy.parent.mkdir()
    run_in_snapshot(installed, copy)
    run_in_snapshot(copy)
    assert content(copy) == content(installed)
    assert json.loads((copy / snapshot.SNAPSHOT).read_text())["source"] == str(installed)


def test_a_working_directory_with_a_space_is_one_argument(tmp_path: Path) -> None:
    directory = tmp_path / "my project"
    directory.mkdir()
    site, config = load_cluster("local").config, load("tiny.yaml", ["run_dir=/data/runs/x"]).config
    text = job_script(training_job(placed(config, site), site, job_shape(site, 1, "60"), by(directory)))
    assert f'#SBATCH --chdir="{directory}" ' in text


def job(tmp_path: Path, *cluster_set: str) -> slurm.Job:
    site = load_cluster("mn5-acc", ["slurm.account=a", "slurm.qos=q", *cluster_set]).config
    config = load("tiny.yaml", ["data.train.0.path=/data/corpus", "run_dir=/data/runs/x", "init_from=/hf/model"]).config
    return training_job(placed(config, site), site, job_shape(site, 1, "60"), by(Path("/home/me")))


def test_a_container_mounts_what_the_run_reads_and_writes(tmp_path: Path) -> None:
    text = job_script(job(tmp_path, "software.container={runtime: pyxis, image: i.sqsh, mounts: [/a:/b]}"))
    assert "--container-mounts=/data/corpus:/data/corpus,/data/runs/x:/data/runs/x,/hf/model:/hf/model,/home/me:/home/me,/a:/b" in text, (
        "data, run, start parameters, working directory, and the cluster file's own"
    )
    assert text.count("--container-image=i.sqsh") == 2, "the preflight runs in the container too"
    assert "PYTHON=python3\n" in text
    text = job_script(job(tmp_path, "software.container={runtime: apptainer, image: i.sif}", "software.python=/opt/python"))
    assert text.count("apptainer exec \\\n        --nv \\\n        --bind /data/corpus:/data/corpus,") == 2
    assert "PYTHON=/opt/python\n" in text
    assert "--container-" not in text


def test_a_directory_inside_another_is_mounted_once() -> None:
    site = load_cluster("local", ["software.container={runtime: pyxis, image: i}"]).config.software.container
    assert site is not None
    assert container.mounts(site, [Path("/a/b"), Path("/a"), Path("/ab")]) == ["/a:/a", "/ab:/ab"]


def test_software_comes_before_anything_runs_and_failing_ends_the_job(tmp_path: Path) -> None:
    text = job_script(
        job(tmp_path, "software.modules=[cuda/12.8, nccl]", "software.setup=['. /venv/bin/activate']", "software.environment={A: x y}")
    )
    assert text.startswith("#!/bin/bash -l\n"), "a login shell knows `module`"
    order = [
        "set -e",
        "module purge",
        "module load cuda/12.8 nccl",
        ". /venv/bin/activate",
        "export A='x y'",
        "export PYTHONPATH=",
        "set +e",
        "preflight() {",
    ]
    positions = [text.index(f"\n{line}") for line in order]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("slurm.gpu_type=h100", "#SBATCH --gres=gpu:h100:4 "),
        ("slurm.gpu_request=gpus-per-node", "#SBATCH --gpus-per-node=4 "),
        ("slurm.requeue=false", "#SBATCH --no-requeue"),
        ("slurm.reservation=r", "#SBATCH --reservation=r\n"),
        ("slurm.constraint=c", "#SBATCH --constraint=c\n"),
        ("slurm.memory=100G", "#SBATCH --mem=100G "),
        ("slurm.options=[--mail-type=FAIL]", "#SBATCH --mail-type=FAIL\n"),
        ("slurm.signal_grace_s=600", "#SBATCH --signal=TERM@600 "),
        ("slurm.tasks_per_node=1", "#SBATCH --cpus-per-task=80 "),
        ("slurm.srun_options=[--mpi=none]", "--cpus-per-task=20 --mpi=none \\\n"),
    ],
)
def test_every_setting_of_the_cluster_file_reaches_the_script(tmp_path: Path, setting: str, line: str) -> None:
    assert line not in job_script(job(tmp_path))
    assert line in job_script(job(tmp_path, setting))


def test_the_preflight_can_be_left_out(tmp_path: Path) -> None:
    assert " -m ridgeline doctor " in job_script(job(tmp_path))
    assert " -m ridgeline doctor " not in job_script(job(tmp_path, "slurm.preflight_minutes=0"))


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    site = load_cluster("local").config
    config = placed(load("tiny.yaml").config, site)
    with pytest.raises(UserError, match=r"^cannot write the job into .*runs/tiny/slurm/1: Not a directory$"):
        write(training_job(config, site, job_shape(site, 1, None), by(tmp_path)), config)


def test_the_recorded_environment_is_what_a_run_depends_on(tmp_path: Path) -> None:
    text = job_script(job(tmp_path))
    block = text[text.index("{\n  echo") : text.index('} > "$ENVIRONMENT"')]
    script = "set -u\n" + block + "}\n"
    recorded = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "XLA_FLAGS": "--a --b", "NCCL_DEBUG": "INFO"}
    secrets = ["WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL", "GITHUB_PAT", "REGISTRY_AUTH", "COOKIES", "PLAIN", "JAXOTHER", "MY_JAX_A"]
    secrets += ["SLURM_JWT", "RIDGE_SECRET", "TF_TOKEN_app", "NVIDIA_API_KEY"]
    environment = {**recorded, "JAX_TWO": "one\nDATABASE=x", "PYTHON": sys.executable, **dict.fromkeys(secrets, "hidden\nhidden")}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {f"{name}={value}" for name, value in recorded.items()} <= set(lines)
    assert "JAX_TWO=one DATABASE=x" in lines
    assert not [line for line in lines if "hidden" in line]


HOSTILE = "\n#SBATCH --wrap=x\ntouch owned\n"
CONTROL = st.sampled_from(["\n", "\r", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\udc80", "\t"])
PRINTED = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=12)


@pytest.fixture
def plain(tmp_path: Path) -> Job:
    return job(tmp_path)


def with_text(place: str, text: str, plain: Job) -> Job:
    """Return a job with a text in one place."""
    options, software = plain.cluster.slurm, plain.cluster.software
    if place == "workdir":
        return replace(plain, workdir=Path("/w") / text)
    if place == "name":
        return replace(plain, name=text)
    if place == "log":
        return replace(plain, log=f"/runs/{text}/job-%j.log")
    if place == "python":
        return replace(plain, python=text)
    if place == "title":
        return replace(plain, title=text)
    if place == "value":
        return replace(plain, environment={"JAX_A": text})
    if place == "variable":
        return replace(plain, environment={f"JAX_{text}": "1"})
    part: dict[str, object] = {"slurm": options.model_copy(update={place: text})}
    if place == "modules":
        part = {"software": software.model_copy(update={"modules": [text]})}
    return replace(plain, cluster=plain.cluster.model_copy(update=part))


PLACES = ["workdir", "name", "log", "python", "title", "value", "variable", "account", "partition", "qos", "constraint", "modules"]


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=PRINTED, control=CONTROL, after=PRINTED)
def test_control_characters_are_refused_in_one_line_wherever_they_are(
    place: str, before: str, control: str, after: str, plain: Job
) -> None:
    for text in (f"{before}{control}{after}", HOSTILE):
        if place == "workdir" and "\x00" in text:
            continue
        with pytest.raises(UserError, match="job script") as refused:
            job_script(with_text(place, text, plain))
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("place", [place for place in PLACES if place != "variable"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=PRINTED)
def test_printable_text_adds_no_line_and_arrives_unchanged(place: str, text: str, plain: Job) -> None:
    """Quotes, $(), # and spaces: `shlex` reads double quotes and comments as sbatch does."""
    text = text.replace("/", "")
    script = job_script(with_text(place, text, plain))
    assert len(script.split("\n")) == len(job_script(with_text(place, "x", plain)).split("\n"))
    option = {"workdir": "chdir", "name": "job-name", "log": "output"}.get(place, place)
    value = {"workdir": str(Path("/w") / text), "log": f"/runs/{text}/job-%j.log"}.get(place, text)
    found = [shlex.split(line[8:], comments=True) for line in script.splitlines() if line.startswith("#SBATCH ")]
    if place in ("python", "title", "value", "modules"):
        quoted = {"python": f"PYTHON={shlex.quote(text)}", "title": f"# {text}", "value": f"export JAX_A={shlex.quote(text)}"}
        assert quoted.get(place, f"module load {shlex.quote(text)}") in script
    else:
        assert [f"--{option}={value}"] in found


@pytest.mark.parametrize("whom", ["batch shell", "whole job"])
def test_sigterm_to_the_batch_shell_is_a_preemption(whom: str, tmp_path: Path) -> None:
    """The supervision of a job with stages and commands of Slurm of our own: the ranks save, and the job is requeued."""
    tools = {
        "scancel": 'echo "scancel $*"; kill -USR1 "$(cat ranks)"',
        "scontrol": '[ "$1" = show ] && echo "JobState=RUNNING Reason=None Requeue=1 Restarts=0 " || echo "scontrol $*"',
        "ranks": """echo $$ > ranks; trap 'sleep 0.3; exit 75' USR1; trap : TERM; touch ready; while :; do sleep 0.05; done""",
    }
    for name, body in tools.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    text = job_script(job(tmp_path))
    end = text[text.index("# Run the stages, then") :]
    end = end.replace("preflight && train;", "true && bin/ranks;").replace("preflight && train )", "true && bin/ranks )")
    assert "bin/ranks" in end
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "RUN": str(tmp_path)}
    shell = subprocess.Popen(["bash", "-uc", end], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    (os.kill if whom == "batch shell" else os.killpg)(shell.pid, signal.SIGTERM)
    output = shell.communicate(timeout=30)[0]
    assert shell.returncode == 75, output
    assert output.splitlines()[0] == "scancel --signal=TERM 7"
    assert "saved and stopped after SIGTERM" in output
    assert "scontrol requeue 7" in output
    assert json.loads((tmp_path / "attempts.jsonl").read_text())["exit_code"] == 75
