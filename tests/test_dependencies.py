"""The lock file, the pins of the tests and the page of licenses agree with pyproject.toml and with what is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ridgeline import PACKAGE

ROOT = PACKAGE.parent
LOCK = (ROOT / "requirements.lock").read_text()
PERMISSIVE = ("Apache", "BSD", "MIT", "MPL", "Mozilla", "PSF", "Python Software Foundation", "ISC", "Zlib", "CC0", "CNRI", "AFL")


def requirements(lines: list[str]) -> list[Requirement]:
    return [item for item in map(Requirement, lines) if item.marker is None or item.marker.evaluate()]


def pins(text: str) -> dict[str, str]:
    found = requirements([line.rstrip("\\ ") for line in text.splitlines() if line[:1].isalnum()])
    return {canonicalize_name(item.name): str(item.specifier).removeprefix("==") for item in found}


def test_the_lock_has_every_dependency_within_its_bounds() -> None:
    locked = pins(LOCK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for item in requirements([*project["project"]["dependencies"], *project["build-system"]["requires"]]):
        assert item.specifier.contains(locked[canonicalize_name(item.name)]), item
    # ... and what these need in turn, so that `pip install --require-hashes` finds nothing unlisted.
    for name in locked:
        for item in map(Requirement, metadata.requires(name) or []):
            if item.marker is None or item.marker.evaluate({"extra": ""}):
                assert item.specifier.contains(locked[canonicalize_name(item.name)], prereleases=True), (name, item)


def test_every_locked_package_has_hashes_and_is_what_the_tests_run_with() -> None:
    tested = pins((ROOT / "constraints.txt").read_text())
    for name, version in pins(LOCK).items():
        assert tested[name] == version == metadata.version(name)
    blocks = [block for block in LOCK.replace("\\\n", " ").splitlines() if block[:1].isalnum()]
    assert len(blocks) > 100
    for block in blocks:
        assert "--hash=sha256:" in block


def test_the_page_of_licenses_is_current_and_every_license_is_permissive() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/licenses.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/LICENSES.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")][1:]
    if sys.version_info < (3, 12):  # of which interpreter the page is
        assert done.stdout == page
    assert {row[0] for row in rows} >= set(pins(LOCK))
    for name, _, license, _ in rows:
        assert any(word in license for word in PERMISSIVE), f"{name}: {license}"
        assert not any(word in license for word in ("GPL", "AGPL", "Commercial", "Proprietary")), f"{name}: {license}"
