"""Points and comments of the instructor, item by item."""

import streamlit as st

from grader.grading import Grade, for_graders, override
from grader.points import plain
from grader.rubric import CodeTests, Item
from grader.sandbox import Rerun
from grader.scoring import Component
from grader.store import Assignment, Database, comment_bank, keep_comment, set_comment
from grader.web.session import decide, field, who

_SIGNS = {"earned": "✓", "partial": "◐", "not_earned": "✗", "needs_review": "?"}
_WHOLE = "the whole work"


def show_items(database: Database, grade: Grade, rerun: Rerun | None) -> None:
    items = {item.id: item for item in grade.rubric.items}
    for one in grade.score.components:
        limit = f" of {plain(one.max_points)}" if one.max_points else ""
        sign = _SIGNS.get(one.status or "", "·")
        opened = one.status == "needs_review"
        with st.expander(f"{sign} {_label(one.id)}: {plain(one.points)}{limit}", expanded=opened):
            _show_one(one)
            if item := items.get(one.id):
                if words := for_graders(item):
                    st.code("\n".join(words), language=None, wrap_lines=True)
                _show_hidden_test(item, rerun)
                _override(database, grade, one)


def _show_hidden_test(item: Item, rerun: Rerun | None) -> None:
    """What it said is not in the student's report."""
    said = rerun.tests.get(item.id) if rerun and isinstance(item.check, CodeTests) and item.check.hidden else None
    if said and said.message:
        st.code(f"hidden from the student: {said.message}", language=None, wrap_lines=True)


def _label(item: str) -> str:
    return item.replace("_", r"\_").replace("*", r"\*")


def _show_one(one: Component) -> None:
    st.text(one.title)
    st.text(one.reason)
    quotes = [
        f"cell {place.cell + 1}: {place.quote}" if place.cell is not None else place.quote
        for place in one.evidence
        if place.quote
    ]
    if quotes:
        st.code("\n".join(quotes)[:2000], language=None, wrap_lines=True)


def _override(database: Database, grade: Grade, one: Component) -> None:
    points, why = f"p-{grade.submission.id}-{one.id}", f"w-{grade.submission.id}-{one.id}"
    with st.form(f"points-{grade.submission.id}-{one.id}", border=False):
        first, second = st.columns([1, 3])
        first.text_input("Points", plain(one.points), key=points)
        second.text_input("Reason", key=why)
        left, right = st.columns(2)
        given = _set_points, database, grade, one.id, points, why
        left.form_submit_button("Set points", width="stretch", on_click=decide, args=given)
        right.form_submit_button(
            "Machine's points",
            disabled=one.id not in grade.review.points,
            width="stretch",
            on_click=decide,
            args=(_machines_points, database, grade, one.id, why),
        )


def _set_points(database: Database, grade: Grade, item: str, points: str, why: str) -> str:
    given = str(field(points, "")).strip()
    override(database, grade, item, given, who(), field(why, ""))
    return f"{item}: {given} points."


def _machines_points(database: Database, grade: Grade, item: str, why: str) -> str:
    override(database, grade, item, None, who(), field(why, ""))
    return f"{item}: the machine's points again."


def comments(database: Database, chosen: Assignment, grade: Grade) -> None:
    """`""` is the whole submission."""
    submission = grade.submission.id
    with st.expander("Comments for the student"):
        for item, text in grade.review.comments.items():
            if text:
                st.code(f"{item or _WHOLE}: {text}", language=None, wrap_lines=True)
        item = st.selectbox(
            "About", ["", *(one.id for one in grade.rubric.items)], format_func=lambda one: one or _WHOLE
        )
        bank = ["", *(text for _, text in comment_bank(database, chosen.id))]
        kept = st.selectbox("From the comment bank", bank) if len(bank) > 1 else ""
        name = f"{submission}-{item}-{bank.index(kept)}"
        with st.form(f"comment-{submission}", border=False):
            st.text_area("Comment", kept or grade.review.comments.get(item, ""), key=f"comment-{name}")
            st.checkbox("Keep it in the comment bank", key=f"keep-{name}")
            given = _save_comment, database, chosen, submission, item, name
            st.form_submit_button("Save the comment", on_click=decide, args=given)


def _save_comment(database: Database, chosen: Assignment, submission: int, item: str, name: str) -> str:
    text = str(field(f"comment-{name}", ""))
    set_comment(database, submission, item, text, who())
    if field(f"keep-{name}") and text.strip():
        keep_comment(database, chosen.id, item, text, who())
    return "Comment saved."
