"""The documentation site builds without a warning, and has every command, every key and every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Strict: a broken link or anchor, or a page that is in no menu, is an error."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_every_command_has_a_section(site: Path) -> None:
    from ridgeline.cli.main import ridge
    from scripts.docs_site import walk

    text = (site / "reference/cli/index.html").read_text()
    for path, _ in walk(ridge):
        assert f'id="{path.replace(" ", "-")}"' in text, path


def test_every_key_has_a_row_with_its_source_line(site: Path) -> None:
    from ridgeline.configs.fields import schema_keys

    text = (site / "reference/config/index.html").read_text()
    for key, _ in schema_keys():
        if key[-1] not in "]>":
            assert f"<code>{key.rpartition('.')[2]}</code>" in text, key
    rows = re.findall(r"<td><code>(\w+)</code></td>.*?<code>(configs/\w+\.py):(\d+)</code>", text, re.DOTALL)
    assert len(rows) > 150
    for name, file, number in rows:
        assert (ROOT / file).read_text().splitlines()[int(number) - 1].lstrip().startswith(f"{name}: ")


def test_readme_is_the_first_page_and_pictures_are_there(site: Path) -> None:
    text = (site / "index.html").read_text()
    for source in re.findall(r'<img[^>]* src="([^"]+)"', text):
        assert (site / source).is_file(), source
    assert 'class="mermaid"' in (site / "ARCHITECTURE/index.html").read_text()
