"""`ridge report` on the command line; the page itself is tested in tests/explain/test_report.py."""

import pytest

from ridgeline.cli.main import run as ridge
from tests.explain.test_report import run_json
from tests.rundir.test_goodput import healthy, killed_and_resumed


@pytest.fixture
def runs(tmp_path):
    for name, scenario in (("one", healthy), ("two", killed_and_resumed)):
        scenario(tmp_path / name)
        run_json(tmp_path / name, name)
    return str(tmp_path / "one"), str(tmp_path / "two")


def test_one_run_gets_a_page_in_its_directory(runs, tmp_path, capsys):
    assert ridge(["report", runs[0], "--cluster", "dgx-h100"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/one/report.html\n"
    assert "USD</b>" in (tmp_path / "one" / "report.html").read_text()


def test_two_runs_get_a_comparison(runs, tmp_path):
    assert ridge(["report", *runs, "-o", str(tmp_path / "ab.html")]) == 0
    assert "two against one" in (tmp_path / "ab.html").read_text()


def test_bad_input_is_one_line(runs, tmp_path, capsys):
    assert ridge(["report", runs[0], runs[0]]) == 2
    assert "given twice" in capsys.readouterr().err
    assert ridge(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert ridge(["report", runs[0], "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert ridge(["report", runs[0], "--cluster", "nowhere"]) == 2
    assert "cluster 'nowhere' not found" in capsys.readouterr().err
