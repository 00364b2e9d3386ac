"""`ridge submit-data` without a Slurm: the options of `ridge data prepare` reach the jobs as they were given, mistakes are found now."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.commands.data_prepare import prepare

SUBMIT = ["submit-data", "-c", "local", "--slices", "2"]
OPTIONS = [
    "--input",
    "src",
    "--include",
    "**/*.py",
    "--include",
    "it's *.txt",
    "--tokenizer",
    "bytes",
    "--output",
    "out/corpus",
    "--shards",
    "4",
]


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    for index in range(20):
        Path(f"src/m{index}.py").write_text("x = 1\n" * 50)


def commands(script: str) -> list[list[str]]:
    """Return the arguments of every `data prepare` in a dry run."""
    joined = script.replace("\\\n", "")
    return [
        shlex.split(line.partition(" -m ridgeline data prepare ")[2])
        for line in joined.splitlines()
        if " -m ridgeline data prepare " in line
    ]


def parsed(arguments: list[str]) -> dict[str, Any]:
    return prepare.make_context("prepare", list(arguments)).params


@pytest.mark.parametrize(
    "extra", [[], ["--sft", "--gzip-baseline", "--max-bad", "7", "--holdout", "v=0.1", "--holdout", "w=0.2", "--pack-length", "64"]]
)
def test_the_jobs_prepare_with_the_options_that_were_given(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SUBMIT, *OPTIONS, *extra, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not Path("out").exists()
    assert subprocess.run(["bash", "-n"], input=shown, text=True, capture_output=True).stderr == ""
    slices, merge = (parsed(arguments) for arguments in commands(shown))
    wanted = {**parsed([*OPTIONS, *extra]), "workers": 2}
    assert slices == {**wanted, "slice_text": "$SLURM_ARRAY_TASK_ID/2"}
    assert merge == wanted
    assert shown.count("#SBATCH --array=0-1 ") == 1, "the merge is not an array"
    assert "--signal" not in shown
    assert "gpu" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none", "--tokenizer", "bytes", "--output", "o"], "input not found: none"),
        (["--input", "src", "--tokenizer", "bite", "--output", "o"], "tokenizer not found: bite"),
        (["--input", "src", "--tokenizer", "bytes", "--output", "o", "--format", "jsonk"], "unknown format 'jsonk'"),
        (["--input", "src", "--tokenizer", "bytes", "--output", "o", "--holdout", "v=2"], "holdout 'v=2'"),
        (["--input", "src", "--tokenizer", "bytes", "--output", "o", "--slice", "0/2"], "no such option '--slice'"),
        (["--input", "src", "--tokenizer", "bytes", "--output", "o", "--time", "soon"], "--time 'soon' "),
        (
            ["--input", "src", "--tokenizer", "bytes", "--output", "o", "--shards", "1"],
            "--slices 2: ",
        ),
    ],
)
def test_a_mistake_is_found_before_the_queue(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SUBMIT, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"ridge: error: {message}")
    assert shown.err.count("\n") == 1
    assert not list(Path().glob("o*"))


def test_a_task_requests_cores_and_no_devices(capsys: pytest.CaptureFixture[str]) -> None:
    site = ["submit-data", "-c", "mn5-acc", "--account", "a", "--qos", "q", "--time", "60", "--slices", "2", "--cores", "16"]
    assert cli.run([*site, *OPTIONS, "--dry-run", "--cluster-set", "slurm.single_machine=true"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --cpus-per-task=16 " in shown
    assert "--workers 16" in shown
    assert "--gres" not in shown
