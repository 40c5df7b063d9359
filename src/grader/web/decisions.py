"""Points and comments of the instructor, item by item."""

import streamlit as st

from grader.grading import Grade, for_graders, override
from grader.points import plain
from grader.scoring import Component
from grader.store import Assignment, Database, comment_bank, keep_comment, set_comment
from grader.web.session import note, refusals, who

_SIGNS = {"earned": "✓", "partial": "◐", "not_earned": "✗", "needs_review": "?"}
_WHOLE = "the whole work"


def show_items(database: Database, grade: Grade) -> None:
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
                _override(database, grade, one)


def _label(item: str) -> str:
    return item.replace("_", r"\_").replace("*", r"\*")


def _show_one(one: Component) -> None:
    st.text(one.title)
    st.text(one.reason)
    quotes = [
        f"cell {place.cell + 1}: {place.quote}" for place in one.evidence if place.quote and place.cell is not None
    ]
    if quotes:
        st.code("\n".join(quotes)[:2000], language=None, wrap_lines=True)


def _override(database: Database, grade: Grade, one: Component) -> None:
    with st.form(f"points-{grade.submission.id}-{one.id}", border=False):
        first, second = st.columns([1, 3])
        points = first.text_input("Points", plain(one.points), key=f"p-{grade.submission.id}-{one.id}")
        why = second.text_input("Reason", key=f"w-{grade.submission.id}-{one.id}")
        left, right = st.columns(2)
        given = left.form_submit_button("Set points", width="stretch")
        back = right.form_submit_button("Machine's points", disabled=one.id not in grade.review.points, width="stretch")
    if not given and not back:
        return
    with refusals():
        override(database, grade, one.id, None if back else points.strip(), who(), why)
        note(f"{one.id}: the machine's points again." if back else f"{one.id}: {points} points.")
        st.rerun()


def comments(database: Database, chosen: Assignment, grade: Grade) -> None:
    """`""` is the whole submission."""
    with st.expander("Comments for the student"):
        for item, text in grade.review.comments.items():
            if text:
                st.code(f"{item or _WHOLE}: {text}", language=None, wrap_lines=True)
        item = st.selectbox(
            "About", ["", *(one.id for one in grade.rubric.items)], format_func=lambda one: one or _WHOLE
        )
        bank = [text for _, text in comment_bank(database, chosen.id)]
        kept = st.selectbox("From the comment bank", ["", *bank]) if bank else ""
        with st.form(f"comment-{grade.submission.id}", border=False):
            text = st.text_area("Comment", kept or grade.review.comments.get(item, ""))
            keep = st.checkbox("Keep it in the comment bank")
            if not st.form_submit_button("Save the comment"):
                return
        with refusals():
            set_comment(database, grade.submission.id, item, text, who())
            if keep and text.strip():
                keep_comment(database, chosen.id, item, text, who())
            note("Comment saved.")
            st.rerun()
