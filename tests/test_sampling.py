"""Each commit runs a part of the longest files, another commit another part, and all commits together everything."""

import math

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
