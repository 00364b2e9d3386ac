"""One import name, `ridgeline`, however it is installed and whatever lies in the working directory or on PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ridgeline import PACKAGE
from ridgeline.rundir.provenance import PACKAGES

ROOT = PACKAGE.parent
SUFFIXES = (".py", ".yaml", ".csv", ".sh", ".bash", ".in", ".css", ".js", ".html")


def run(*arguments: str | Path, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(list(map(str, arguments)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of this checkout: building leaves files behind."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "data", "build", "tests", "benchmarks", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    output = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", output, source, cwd=output)
    assert done.returncode == 0, done.stderr
    (found,) = output.glob("ridgeline-*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as pip puts it into a site directory."""
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with packages of the same names as the folders of this repository; importing one fails."""
    for name in (*PACKAGES, "perf", "tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the foreign package {name} was imported')\n")
    return tmp_path


def test_the_wheel_holds_every_file_of_every_package_under_one_name(site: Path) -> None:
    ours = {
        f"{package}/{path.relative_to(PACKAGE / package)}"
        for package in PACKAGES
        for path in (PACKAGE / package).rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }
    assert len(ours) > 300
    assert ours <= {str(path.relative_to(site / "ridgeline")) for path in (site / "ridgeline").rglob("*")}
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"ridgeline"}


@pytest.mark.parametrize("where", ["working directory", "PYTHONPATH"])
@pytest.mark.parametrize("installed", ["wheel", "checkout"])
def test_foreign_packages_of_the_same_names_do_no_harm(installed: str, where: str, site: Path, hostile: Path, tmp_path: Path) -> None:
    ours = site if installed == "wheel" else ROOT
    cwd, path = (hostile, ours) if where == "working directory" else (ours.parent, Path(f"{hostile}{os.pathsep}{ours}"))
    every = "; ".join(f"import ridgeline.{name}" for name in PACKAGES)
    origin = "; print(*{m.__file__ for n, m in __import__('sys').modules.items() if n.startswith('ridgeline.') and m.__file__}, sep='\\n')"
    done = run(sys.executable, "-c", f"{every}; import ridgeline.cli.main, ridgeline.configs.schema{origin}", cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(ours / "ridgeline")) for line in done.stdout.split("\n") if line)
    shown = run(sys.executable, "-m", "ridgeline", "config", "show", "models/llama-3.2-1b", cwd=cwd, path=path)
    assert shown.returncode == 0, shown.stderr
    assert "num_layers: 16" in shown.stdout


def test_the_installed_command_runs_in_a_hostile_directory(hostile: Path) -> None:
    command = Path(sys.executable).parent / "ridge"
    done = run(command, "plan", "models/llama-3.2-1b", "--cluster", "dgx-h100", "--nodes", "1", cwd=hostile, path=hostile)
    assert done.returncode == 0, done.stderr
