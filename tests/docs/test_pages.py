"""What single pages promise beyond their commands: shell completion, offline installation, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.launch import exit_codes
from scripts.refresh_docs import ROOT


def complete(shell: str, line: str = "ridge") -> str:
    """What `ridge` prints for a shell: its script (`_source`) or the completions of a line."""
    words = line.split(" ")
    position = len(words) - 1
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'ridge'; from ridgeline.cli.main import main; main()"],
        env=os.environ
        | {"_RIDGE_COMPLETE": shell, "PYTHONPATH": str(ROOT)}
        | {"COMP_WORDS": line, "COMP_CWORD": words[position] if shell.startswith("fish") else str(position)},
        capture_output=True,
        text=True,
    )
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_there(shell: str) -> None:
    script = complete(f"{shell}_source")
    assert "_ridge_completion" in script
    assert f"{shell}_complete" in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_groups_and_options_complete(shell: str) -> None:
    assert "diagnose" in complete(f"{shell}_complete", "ridge diag")
    assert "matmul" in complete(f"{shell}_complete", "ridge bench mat")
    if shell != "fish":  # which passes the line up to the word only
        assert "--cluster" in complete(f"{shell}_complete", "ridge plan --clu")


def test_the_guides_list_every_exit_code() -> None:
    codes = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    text = (ROOT / "docs/guides/configs.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


def test_the_offline_commands_install_from_a_directory_alone(tmp_path: Path) -> None:
    """The shape of docs/guides/install.md, with the project's own wheel in place of all wheels (no network is used)."""
    text = (ROOT / "docs/guides/install.md").read_text()
    assert "pip download --dest wheelhouse -c constraints.txt" in text
    assert "pip install --no-index --find-links wheelhouse -c constraints.txt" in text
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = tmp_path / "clone"
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    source.mkdir()
    subprocess.run(["tar", "x"], input=archive, cwd=source, check=True)
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "wheelhouse"), str(source)]
    subprocess.run(wheel, check=True, cwd=tmp_path)
    target = tmp_path / "site"
    command = [*pip, "install", "--quiet", "--no-index", "--find-links", "wheelhouse", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, "--no-deps", "--target", str(target), "ridgeline"], check=True, cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "plan", "models/gpt2", "--cluster", "local", "--top", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (target / "ridgeline/configs/models/gpt2.yaml").is_file()


def run_notebook(name: str) -> None:
    """Run all code cells, in order, in one namespace."""
    cells = json.loads((ROOT / "docs/notebooks" / name).read_text())["cells"]
    namespace: dict[str, object] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are not stored"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)


def test_the_notebook_of_profiles_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run_notebook("profiles.ipynb")
    printed = capsys.readouterr().out
    assert " steps, median " in printed  # five or six: a slow first one is left out as warm-up
    assert "f32 [128, 64] x [64, 128]" in printed
    assert "jit_train_step: peak" in printed
    assert "tables/operations.parquet" in printed


def test_the_notebook_of_the_api_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run_notebook("python_api.ipynb")
    printed = capsys.readouterr().out
    assert "did you mean 'steps'" in printed
    assert "step 40: training loss" in printed
    assert "'3 times 4 is " in printed
