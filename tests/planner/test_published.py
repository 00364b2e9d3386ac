"""Published runs reproduced; `python -m ridgeline.planner.published > docs/PLANNED_VS_PUBLISHED.md` renews the page."""

from pathlib import Path

from ridgeline.planner.published import AIM, markdown, predictions

PAGE = Path(__file__).parents[2] / "docs" / "PLANNED_VS_PUBLISHED.md"
POWER_CAPPED = "500 W"


def test_published_throughput_is_predicted_within_the_aim_where_the_hardware_is_in_the_catalog():
    rows = [row for row in predictions() if POWER_CAPPED not in row.differs]
    assert len(rows) >= 15
    assert {row.name: row.error for row in rows if abs(row.error) > AIM} == {}


def test_a_part_capped_below_the_catalogs_is_predicted_too_fast():
    capped = [row for row in predictions() if POWER_CAPPED in row.differs]
    assert capped and all(row.error > AIM for row in capped)


def test_the_page_shows_the_current_predictions():
    assert PAGE.read_text() == markdown(), "run: python -m ridgeline.planner.published > docs/PLANNED_VS_PUBLISHED.md"
