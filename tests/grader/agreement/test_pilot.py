"""A human's table beside the machine's points."""

from pathlib import Path

from grader.agreement import pilot_report, read_hand_grades
from grader.export import as_csv, item_table
from grader.grading import grades
from tests.support.grade_books import graded_book


def test_a_table_of_export_puts_work_in_its_own_band(tmp_path: Path) -> None:
    """Four works: 6, 6, 2 and 2 of the 6 points that are decided. Total and percent are no items."""
    found = grades(*graded_book(tmp_path))
    report = pilot_report(found, read_hand_grades(as_csv(item_table(found, {}))))
    strong = sum(one.score.total == 6 for one in found)
    counts = {name: one.count for name, one in report.bands.items()}
    assert counts == {"under 60 %": 2 * (4 - strong), "60 to 85 %": 0, "85 % and more": 2 * strong}
    assert 0 < strong < 4
