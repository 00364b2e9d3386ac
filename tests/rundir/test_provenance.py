"""What is recorded of the environment of a run."""

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
