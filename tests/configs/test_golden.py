"""The resolved text of every shipped config, so that a changed default shows in review.

Regenerate with `python tests/configs/test_golden.py`, and read the difference before committing it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.configs.compose import shipped_names
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.load import load

GOLDEN = Path(__file__).parent / "golden"


def golden_path(name: str) -> Path:
    return GOLDEN / f"{name}.yaml"


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_config_resolves_to_its_golden_file(name: str) -> None:
    path = golden_path(name)
    assert path.is_file(), f"no golden file for {name}: run `python tests/configs/test_golden.py`"
    assert to_yaml(load(name).config) == path.read_text(), f"{name} resolves differently: run `python tests/configs/test_golden.py`, review"


def test_no_golden_file_is_left_over() -> None:
    assert sorted(str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.yaml")) == shipped_names()


def regenerate() -> None:
    for stale in GOLDEN.rglob("*.yaml"):
        stale.unlink()
    for name in shipped_names():
        golden_path(name).parent.mkdir(parents=True, exist_ok=True)
        golden_path(name).write_text(to_yaml(load(name).config))


if __name__ == "__main__":
    regenerate()
