"""The job script for every shipped cluster, so that a changed script shows in review; all of them are valid bash.

Regenerate with `python tests/launch/test_submit_golden.py`, and read the difference before committing it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ridgeline.configs.cluster import cluster_names, load_cluster
from ridgeline.configs.load import load
from ridgeline.launch import exit_codes
from ridgeline.launch.slurm.script import job_script
from ridgeline.launch.slurm.shape import job_shape
from ridgeline.launch.slurm.submit import Submitter, training_job

GOLDEN = Path(__file__).parent / "golden" / "submit"
GUIDE = Path(__file__).parents[2] / "docs/guides/slurm.md"
EXPLAINED = Path(__file__).parents[2] / "docs/guides/job-script.md"
BLOCK = re.compile(r'```bash title="job\.sh"\n(.*?)```\n', re.DOTALL)
OWN = re.compile(r'```bash title="own\.sh"\n(.*?)```\n', re.DOTALL)
BY = Submitter(
    environment={"NCCL_DEBUG": "INFO", "HOME": "/home/me", "WANDB_API_KEY": "abcdef012345"},
    workdir=Path("/home/me/project"),
    now=datetime(2026, 11, 21, 7, 0, tzinfo=UTC),
    code="ridgeline 0.1.0, commit 0123456789ab",
    python="/home/me/project/.venv/bin/python",
)
SITE = ["slurm.account=proj42", "slurm.qos=normal"]
CONTAINERS = {
    "dgx-h100-pyxis": (
        "dgx-h100",
        ["software.container={runtime: pyxis, image: nvcr.io#ridge/train:26.11, mounts: [/lustre/raw:/raw:ro]}"],
    ),
    "mn5-acc-apptainer": (
        "mn5-acc",
        [
            "software.container={runtime: apptainer, image: /gpfs/images/ridge.sif, arguments: [--writable-tmpfs]}",
            "software.modules=[singularity/4.1.5, cuda/12.8]",
            "software.setup=['ulimit -n 65536']",
            "software.environment={NCCL_SOCKET_IFNAME: ib0}",
        ],
    ),
}
ELASTIC = {"local-elastic": ["elastic.min_nodes=1", "elastic.spares=1"]}
"""Case -> overrides of the config."""
CASES = {name: (name, []) for name in cluster_names()} | CONTAINERS | {"local-elastic": ("local", [])}
PLAIN_BY = replace(BY, environment={})


def script(case: str, by: Submitter = BY) -> str:
    cluster_name, overrides = CASES[case]
    cluster = load_cluster(cluster_name, [*SITE, *overrides]).config
    config = load("quickstart", ["run_dir=/shared/runs/quickstart", *ELASTIC.get(case, [])]).config
    return job_script(training_job(config, cluster, job_shape(cluster, 2, "12:00:00"), by))


@pytest.mark.parametrize("case", CASES)
def test_the_script_of_a_shipped_cluster_is_its_golden_file(case: str) -> None:
    path = GOLDEN / f"{case}.sh"
    assert path.is_file(), f"no golden file for {case}: run `python tests/launch/test_submit_golden.py`"
    assert script(case) == path.read_text(), f"the script for {case} changed: run `python tests/launch/test_submit_golden.py`, review"


def test_no_golden_script_is_left_over() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.sh")) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_valid_bash(case: str) -> None:
    done = subprocess.run(["bash", "-n", GOLDEN / f"{case}.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    """Without shellcheck only CI refuses: it is no dependency of the project."""
    if shutil.which("shellcheck") is None:
        assert os.environ.get("CI") != "true", "CI installs shellcheck (.ci/run)"
        return
    done = subprocess.run(["shellcheck", "--shell=bash", *sorted(GOLDEN.glob("*.sh"))], capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize("case", CASES)
def test_nothing_secret_of_the_submitting_shell_is_in_the_script(case: str) -> None:
    text = (GOLDEN / f"{case}.sh").read_text()
    assert "export NCCL_DEBUG=INFO " in text
    assert "abcdef012345" not in text
    assert "WANDB_API_KEY" not in text


def sections(text: str) -> list[str]:
    """Cut a script at its empty lines."""
    return [f"{part.strip(chr(10))}\n" for part in text.split("\n\n")]


def test_the_guide_explains_the_whole_script() -> None:
    shown = BLOCK.findall(EXPLAINED.read_text())
    assert shown == sections(script("mn5-acc", PLAIN_BY)), (
        "docs/guides/job-script.md shows another script: run `python tests/launch/test_submit_golden.py`"
    )


def test_the_guide_has_every_exit_code() -> None:
    codes = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", GUIDE.read_text(), re.MULTILINE)} == codes


def test_the_guides_own_script_is_valid() -> None:
    (text,) = OWN.findall(GUIDE.read_text())
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    if shutil.which("shellcheck") is not None:
        assert subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True).stdout == ""


def regenerate() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for stale in GOLDEN.glob("*.sh"):
        stale.unlink()
    for case in CASES:
        (GOLDEN / f"{case}.sh").write_text(script(case))
    parts = iter(sections(script("mn5-acc", PLAIN_BY)))
    EXPLAINED.write_text(BLOCK.sub(lambda _: f'```bash title="job.sh"\n{next(parts)}```\n', EXPLAINED.read_text()))
    assert next(parts, None) is None, "the script has more sections than the guide explains"


if __name__ == "__main__":
    regenerate()
