"""Published runs reproduced; `python -m ridgeline.planner.published > docs/PLANNED_VS_PUBLISHED.md` renews the page."""

from collections import Counter
from pathlib import Path

from ruamel.yaml import YAML

from ridgeline.planner import ranges
from ridgeline.planner.published import SOURCES, TO_EXPLAIN, Errors, explanation, held_out, markdown, published_runs, ranges_csv
from ridgeline.planner.software import software_names

PAGE = Path(__file__).parents[2] / "docs" / "PLANNED_VS_PUBLISHED.md"
DOCUMENTS = YAML(typ="safe").load(SOURCES)


def test_held_out_runs_are_predicted_within_the_goal():
    errors = Errors.of(held_out())
    assert errors.runs >= 100 and errors.median <= 0.07 and errors.p90 <= 0.15


def test_runs_whose_recipe_is_not_predicted_as_a_whole_are_in_no_error_and_say_why():
    lacking = [run for run in published_runs() if run.lacks]
    assert {run.lacks for run in lacking} == set(DOCUMENTS["lacks"]) and not {found.run for found in held_out()} & set(lacking)
    assert not any(run.sets for run in lacking)


def test_held_out_runs_far_off_are_explained():
    assert [found.run for found in held_out() if abs(found.error) > TO_EXPLAIN and explanation(found.run) == "not explained"] == []


def test_the_runs_cover_hardware_scale_layouts_precisions_and_row_lengths():
    runs = published_runs()
    assert len({DOCUMENTS["sources"][run.source]["project"] for run in runs}) >= 8
    assert {"a100-40gb", "a100-80gb", "h100-sxm", "h200-sxm", "b200", "gb200", "gb300"} <= {run.device for run in runs}
    assert {1, 2048} <= {run.devices for run in runs}
    assert any("tensor=8" in run.mesh for run in runs) and {"fp8", "mxfp8", "nvfp4"} <= {run.matmul for run in runs}
    assert max(run.seq_len for run in runs) == 2**20 and {2**n for n in range(12, 21)} <= {run.seq_len for run in runs}


def test_every_run_is_read_from_a_source_and_stated_once():
    runs = published_runs()
    assert {run.source for run in runs} == set(DOCUMENTS["sources"])
    assert {run.software for run in runs} <= set(software_names())
    assert [run for run, count in Counter(runs).items() if count > 1] == []
    sets, tests = ({run.software for run in runs if run.sets == which} for which in (True, False))
    assert sets <= tests, "every software that is fitted has held-out runs"


def test_the_ranges_follow_from_the_held_out_runs():
    assert ranges.FILE.read_text() == ranges_csv(), "run: python -m ridgeline.planner.published ranges > planner/ranges.csv (in two steps)"


def test_the_page_shows_the_current_predictions():
    assert PAGE.read_text() == markdown(), "run: python -m ridgeline.planner.published > docs/PLANNED_VS_PUBLISHED.md"
