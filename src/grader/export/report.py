"""A student's report: one HTML file without scripts or links to other files. Everything in it is escaped."""

from decimal import Decimal
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from grader.grading import Grade
from grader.points import plain
from grader.scoring import Component

_TEMPLATES = Path(__file__).parent / "templates"


def report_html(grade: Grade, title: str, name: str) -> str:
    """`name`: the pseudonym, or the student's own after a reveal. Private notes of the instructor stay out, and so
    do the names of graders and what the machine gave."""
    return _template().render(
        title=title,
        name=name,
        grade=grade,
        score=grade.score,
        groups=_groups(grade),
        comments=grade.review.comments,
        hints=_hints(grade),
        reasons={item: given.why for item, given in grade.review.points.items()},
        feedback=grade.feedback,
        draft=not grade.approved,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["points"] = _shown
    return environment.get_template("report.html")


def _shown(points: Decimal) -> str:
    return plain(points)


def _hints(grade: Grade) -> dict[str, str]:
    """What the rubric says to those who lost points of an item."""
    lost = {one.item_id for one in grade.verdicts if one.status in ("partial", "not_earned")}
    return {item.id: item.feedback for item in grade.rubric.items if item.feedback and item.id in lost}


def _groups(grade: Grade) -> list[tuple[str, list[Component]]]:
    """In the order of the rubric; caps, late policy and the like at the end."""
    groups: dict[str, list[Component]] = {}
    for component in grade.score.components:
        groups.setdefault(component.group, []).append(component)
    return list(groups.items())
