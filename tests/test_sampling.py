"""Each commit runs a part of the longest files, another commit another part, and all commits together everything."""

import math
import os
import subprocess
import sys

from tests import sampling
from tests.sampling import LONGEST, PAGES, PART, of_commit

FILES = [None, LONGEST.index(PAGES)] * 5 + [LONGEST.index("trainer/test_run")] * 20 + [LONGEST.index("launch/test_link")] * 2
LONG = range(10, 30)


def test_a_part_of_the_longest_files_and_all_of_the_others_run(monkeypatch):
    monkeypatch.setattr(sampling, "FULL", False)
    ran = set()
    for commit in range(30):
        monkeypatch.setattr(sampling, "seed", lambda commit=commit: str(commit))
        kept = of_commit(FILES)
        assert kept[:10] == [True] * 10 and sum(kept[30:]) == 1
        assert sum(kept[number] for number in LONG) == math.ceil(PART * len(LONG)) and kept == of_commit(FILES)
        ran |= {number for number, keep in enumerate(kept) if keep}
    assert ran == set(range(len(FILES)))


def test_everything_runs_with_full(monkeypatch):
    monkeypatch.setattr(sampling, "FULL", True)
    assert all(of_commit(FILES))


def test_every_long_file_exists(request):
    root = request.config.rootpath / "tests"
    assert [name for name in LONGEST if not (root / f"{name}.py").is_file()] == []


def test_pytest_leaves_out_what_was_not_drawn_but_runs_a_named_file_as_a_whole(request):
    def collected(where):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", where]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"FULL": ""}
        done = subprocess.run(command, cwd=request.config.rootpath, env=environment, capture_output=True, text=True, check=False)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("tests/launch/test_link.py"))
        return int(line.rpartition(": ")[2])

    whole = collected("tests/launch/test_link.py")
    assert whole > 10 and collected("tests/launch") == math.ceil(PART * whole)
