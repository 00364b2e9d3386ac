"""The example configs of real size: one per shipped cluster of GPUs, some compiled for it as their own first lines submit them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from tests.sampling import drawn

ROOT = Path(__file__).parents[2]
SUBMIT = re.compile(r"ridge submit (.*)")
RECIPES = {path.stem: match.group(1) for path in (ROOT / "configs/examples").glob("*.yaml") if (match := SUBMIT.search(path.read_text()))}
WITHOUT_GPUS, TEMPLATE = "local", "generic"


def test_each_shipped_cluster_of_gpus_has_one() -> None:
    clusters = {command.partition("--cluster ")[2].split()[0] for command in RECIPES.values()}
    assert clusters == {path.stem for path in (ROOT / "configs/clusters").glob("*.yaml")} - {WITHOUT_GPUS, TEMPLATE}


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(sorted(RECIPES), 1))
def test_it_fits_as_compiled_with_the_planned_memory_and_collectives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(ROOT)
    config, *options = shlex.split(RECIPES[name])
    assert Path(config).stem == name
    assert cli.run(["compile", config, *options, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] and made["unplanned"] == [] and made["warnings"] == []
    [step] = [row for row in made["memory"] if row["what"] == "step"]
    assert abs(step["compiled_bytes"] / step["planned_bytes"] - 1) < 0.05, step
