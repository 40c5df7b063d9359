"""Results: a row for each student. Columns sort by a click."""

from typing import Any

import streamlit as st

from grader.grading import Grade, approve_all
from grader.points import plain
from grader.store import Database
from grader.web.session import all_grades, book, chosen_assignment, decide, show_note, who


def results_page() -> None:
    show_note()
    database = book()
    if (chosen := chosen_assignment(database)) is None or not (found := all_grades(database, chosen)):
        return
    shown = _filtered(found)
    _figures(found)
    picked = st.dataframe(
        [result_row(one) for one in shown],
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        height=min(600, 38 + 35 * len(shown)),
        column_config=_columns(found),
    )
    st.caption("A click on a head sorts; a click on the box before a row chooses the student for Review.")
    for place in picked.selection.rows if shown else ():
        st.session_state["student"] = shown[place].submission.pseudonym
        st.text(f"{shown[place].submission.pseudonym} is open on the page Review.")
    _approve(database, found)


def _columns(found: list[Grade]) -> dict[str, Any]:
    points = f"points of {plain(found[0].score.maximum)}"
    return {
        "points": st.column_config.NumberColumn(points, width=90),
        "percent": st.column_config.ProgressColumn(min_value=0, max_value=100, format="%.0f %%", width=100),
        "open": st.column_config.NumberColumn("open", width=50),
        "letter": st.column_config.TextColumn(width=50),
        "flags": st.column_config.TextColumn(width=230),
    }


def _filtered(found: list[Grade]) -> list[Grade]:
    first, second, third = st.columns(3)
    states = first.multiselect("State", sorted({one.state for one in found}))
    codes = second.multiselect("Flag", sorted({flag.code for one in found for flag in one.flags}))
    text = third.text_input("Student contains")
    return [
        one
        for one in found
        if (not states or one.state in states)
        and (not codes or {flag.code for flag in one.flags} & set(codes))
        and text.strip().lower() in one.submission.pseudonym
    ]


def _figures(found: list[Grade]) -> None:
    counts = [
        ("Graded", len(found)),
        ("Approved", sum(one.approved for one in found)),
        ("With open items", sum(one.score.needs_review for one in found)),
        ("With flags", sum(bool(one.flags) for one in found)),
    ]
    for column, (label, count) in zip(st.columns(len(counts)), counts, strict=True):
        column.metric(label, count)


def result_row(grade: Grade) -> dict[str, Any]:
    score = grade.score
    return {
        "student": grade.submission.pseudonym,
        "points": float(score.total),
        "percent": float(score.percent),
        "open": float(score.pending),
        "letter": "" if score.needs_review else score.letter,
        "state": grade.state,
        "flags": ", ".join(sorted({flag.code for flag in grade.flags})),
    }


def _approve(database: Database, found: list[Grade]) -> None:
    st.button("Approve all without open items and flags", on_click=decide, args=(_approve_all, database, found))


def _approve_all(database: Database, found: list[Grade]) -> str:
    """As the page showed them: one that changed meanwhile is not approved by this."""
    done = approve_all(database, found, who())
    return f"{done.approved} approved; {done.left_open} have open items or flags: look at each of them."
