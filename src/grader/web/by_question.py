"""All answers to one item of the rubric."""

from typing import Any

import streamlit as st

from grader.errors import GraderError
from grader.grading import Grade, for_graders, override
from grader.points import plain
from grader.store import Assignment, Database
from grader.web.session import all_grades, decide, field, who

_STUDENT, _POINTS, _WHY = "question-student", "question-points", "question-why"


def by_question(database: Database, chosen: Assignment) -> None:
    found = all_grades(database, chosen)
    if not found:
        return
    item = st.selectbox("Item", [one.id for one in found[0].rubric.items])
    rubric_item = found[0].rubric.item(item)
    st.text(f"{rubric_item.title} ({plain(rubric_item.points)} points)")
    if words := for_graders(rubric_item):
        st.code("\n".join(words), language=None, wrap_lines=True)
    only_open = st.checkbox("Only open ones")
    answers = [row for one in found if (row := _row(one, item)) and not (only_open and row["status"] != "needs review")]
    st.dataframe(answers, hide_index=True, height=min(560, 38 + 35 * len(answers)))
    _set_points(database, found, item)


def _row(grade: Grade, item: str) -> dict[str, Any] | None:
    """None: this work was graded by a rubric without the item."""
    verdict = next((one for one in grade.verdicts if one.item_id == item), None)
    if verdict is None:
        return None
    return {
        "student": grade.submission.pseudonym,
        "points": float(verdict.points),
        "status": verdict.status.replace("_", " "),
        "reason": verdict.reason,
        "evidence": "\n".join(one.quote for one in verdict.evidence if one.quote)[:300],
    }


def _set_points(database: Database, found: list[Grade], item: str) -> None:
    works = {one.submission.pseudonym: one for one in found}
    with st.form("by-question"):
        first, second, third = st.columns([2, 1, 4])
        first.selectbox("Student", list(works), key=_STUDENT)
        second.text_input("Points", key=_POINTS)
        third.text_input("Reason", key=_WHY)
        st.form_submit_button("Set points", on_click=decide, args=(_give, database, works, item))


def _give(database: Database, works: dict[str, Grade], item: str) -> str:
    name, points = field(_STUDENT, ""), str(field(_POINTS, "")).strip()
    if name not in works:
        raise GraderError(f"{name} has no grade here")
    override(database, works[name], item, points, who(), field(_WHY, ""))
    return f"{name}, {item}: {points} points."
