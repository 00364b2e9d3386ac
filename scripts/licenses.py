"""Write the table of docs/LICENSES.md: every package of requirements.lock that this interpreter installs, with its license.

Usage: python scripts/licenses.py > docs/LICENSES.md, in an environment with the default installation (`make lock` runs it).
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
# Licenses of the dependencies

What `make install` installs on Linux with Python 3.11, and the license that each package states in its metadata. `make lock` writes
this page. Newer versions of Python get other versions of a few packages (`requirements.lock`).

| package | version | license | dependency |
|---|---|---|---|
"""
LONG = 60
"""Characters: a longer License field is the license's text, not its name."""


def locked(text: str) -> list[Requirement]:
    """Return the requirements of a lock file that apply to this interpreter."""
    lines = (line.rstrip("\\ ") for line in text.splitlines() if line[:1].isalnum())
    return [item for item in map(Requirement, lines) if item.marker is None or item.marker.evaluate()]


def license_of(distribution: metadata.Distribution) -> str:
    """Return the name of a package's license; "" where neither its metadata nor its license file name one."""
    package = distribution.metadata
    if expression := package.get("License-Expression"):
        return expression
    names = [line.rpartition(" :: ")[2] for line in package.get_all("Classifier", []) if line.startswith("License :: OSI Approved :: ")]
    stated = (package.get("License") or "").strip()
    if names or 0 < len(stated) <= LONG:
        return " and ".join(names) or stated
    files = [distribution.read_text(f"{folder}{name}") for name in package.get_all("License-File", []) for folder in ("", "licenses/")]
    text = next((text for text in (stated, *files) if text), "")
    return next((name for name in ("MIT License", "Apache License") if name in text[:200]), "")


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, version, license, "direct" or ""), sorted by name. Raises PackageNotFoundError where one is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {canonicalize_name(Requirement(item).name) for item in project["dependencies"]}
    for item in locked((ROOT / "requirements.lock").read_text()):
        name = canonicalize_name(item.name)
        yield name, str(item.specifier).removeprefix("=="), license_of(metadata.distribution(name)), "direct" if name in direct else ""


def main() -> int:
    """Print the page; exit code 1 where a package names no license."""
    table = list(rows())
    print(HEAD + "\n".join(f"| {' | '.join(re.sub(r'[|]', '/', cell) for cell in row)} |" for row in table))
    unnamed = [name for name, _, license, _ in table if not license]
    if unnamed:
        print(f"licenses.py: no license in the metadata of {', '.join(unnamed)}", file=sys.stderr)
    return 1 if unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
