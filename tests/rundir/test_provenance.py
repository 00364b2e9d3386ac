"""What is recorded of the environment of a run."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from ridgeline.rundir.provenance import packages


def test_packages_have_the_names_and_versions_that_python_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this environment, one whose description has lines that look like fields, an old format, and a half-removed one."""
    made = {"made-1.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: Made.Up\nVersion: 1.0+cuda12\n\nName: other\nVersion: 2\n"}
    made |= {"old.egg-info/PKG-INFO": "Name: old\r\nVersion: 3\r\n\r\nSummary\r\n", "gone-4.dist-info/RECORD": ""}
    for name, text in made.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(text.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    found = packages()
    assert found == {d.name: d.version for d in distributions() if d.name}
    assert found["Made.Up"] == "1.0+cuda12" and found["old"] == "3" and "other" not in found
    assert list(found) == sorted(found, key=str.lower)


CHECKOUT = """
import contextlib, io, json, sys
from importlib.metadata import MetadataPathFinder, PackageNotFoundError, version
from pathlib import Path

found = MetadataPathFinder.find_distributions
hidden = lambda *arguments, **named: (each for each in found(*arguments, **named) if each.name != "ridgeline")
MetadataPathFinder.find_distributions = hidden
try:
    version("ridgeline")
    sys.exit("it is still installed")
except PackageNotFoundError:
    pass

import jax, numpy as np
from ridgeline.cli.main import run
from ridgeline.configs.schema import CheckpointConfig
from ridgeline.launch.slurm.snapshot import code_state
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer

checkpoints = Checkpointer(Path(sys.argv[1]), CheckpointConfig(), log=None)
state = {"w": jax.numpy.arange(6.0)}
checkpoints.save(3, state, {}, block=True)
restored, metadata = checkpoints.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    status = run(["--version"])
versions = [metadata["versions"]["ridgeline"], code_state().version, printed.getvalue()]
print(json.dumps([status, metadata["step"], restored["w"].tolist(), versions]))
"""


def test_a_checkout_that_is_not_installed_saves_and_has_the_version_unknown(tmp_path: Path) -> None:
    """Who writes a version or prints one: checkpoints, the code of a submitted job, `ridge --version`."""
    arguments = [sys.executable, "-c", CHECKOUT, str(tmp_path / "checkpoints")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 3, [0, 1, 2, 3, 4, 5], ["unknown", "unknown", "ridgeline unknown\n"]]
