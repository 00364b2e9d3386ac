"""Every benchmark starts from a bare checkout: from any directory, without installation and without PYTHONPATH."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
START_ALL = """
import runpy, sys
from pathlib import Path

search_path = sys.path[1:]
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    sys.path[:] = [str(Path(path).parent), *search_path]  # as for a script
    sys.modules.pop("checkout", None)
    try:
        runpy.run_path(path, run_name="__main__" if "ArgumentParser" in Path(path).read_text() else "imported")
    except SystemExit as end:
        assert end.code in (0, None), (path, end.code)
import ridgeline
print("from", ridgeline.__path__[0])
"""


def modules(path: Path) -> list[str]:
    """The modules that a file imports at its top level, in order."""
    body = ast.parse(path.read_text()).body
    found = [
        [alias.name for alias in n.names] if isinstance(n, ast.Import) else [n.module or ""]
        for n in body
        if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    return [name for names in found for name in names]


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_the_checkout_is_found_before_ridgeline_is_imported(path: Path) -> None:
    names = modules(path)
    ours = [index for index, name in enumerate(names) if name.split(".")[0] in ("ridgeline", "tests")]
    if ours:
        assert "checkout" in names[: ours[0]]


def test_all_start_elsewhere_without_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise ImportError('not the package of ridgeline')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-c",
        START_ALL,
        *(str(path) for path in BENCHMARKS if path.stem != "handwritten_startup"),
    ]  # a plain script of startup.py
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"from {ROOT / 'ridgeline'}"
