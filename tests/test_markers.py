"""Every marker is declared: a second try of what failed runs without the plugin that declares its own."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_marker_of_a_test_is_declared():
    declared = {
        line.split(":")[0] for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    }
    built_in = {"parametrize", "usefixtures", "filterwarnings", "skipif", "timeout"}
    used = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"pytest\.mark\.(\w+)", path.read_text())}
    assert used - built_in - declared == set()
