"""Every marker is declared: a second try of what failed runs without the plugin that declares its own."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_marker_of_a_test_is_declared():
    declared = {
        line.split(":")[0] for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    }
    built_in = {"parametrize", "usefixtures", "filterwarnings", "skipif", "timeout"}
    used = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"pytest\.mark\.(\w+)", path.read_text())}
    assert used - built_in - declared == set()


@pytest.mark.xdist_group("together")
def test_groups_reach_the_workers(request):
    """pytest-xdist writes the group behind a test's name; where it does not, each worker compiles everything again."""
    grouped = getattr(request.config.option, "loadgroup", False)
    assert not grouped or request.node.nodeid.endswith("@together")
