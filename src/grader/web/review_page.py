"""Review: the notebook beside the verdicts, and the instructor's decisions."""

import streamlit as st

from grader.grading import Grade, approve_grade
from grader.notebook import read_notebook
from grader.points import plain
from grader.store import Assignment, Database, blob, reopen, reveal, submissions, undo
from grader.web.by_question import by_question
from grader.web.decisions import comments, show_items
from grader.web.notebook_view import notebook_html
from grader.web.records import show_feedback, show_history, show_prompts
from grader.web.session import book, chosen_assignment, note, one_grade, refusals, show_note, who

_HEIGHT_PX = 760


def review_page() -> None:
    show_note()
    database = book()
    if (chosen := chosen_assignment(database)) is None:
        return
    way = st.segmented_control(
        "Review", ["by student", "by question"], default="by student", label_visibility="collapsed"
    )
    if way == "by question":
        by_question(database, chosen)
    elif (pseudonym := _student(database, chosen)) and (grade := one_grade(database, chosen, pseudonym)):
        _one(database, chosen, grade)
    elif pseudonym:
        st.info("This submission is not graded yet: see the page Submissions.")


def _student(database: Database, chosen: Assignment) -> str | None:
    names = [one.pseudonym for one in submissions(database, chosen.id)]
    if not names:
        st.info("There are no submissions yet: see the page Submissions.")
        return None
    before = st.session_state.get("student") or st.query_params.get("student", "")
    place = names.index(before) if before in names else 0
    back, select, forward = st.columns([1, 4, 1], vertical_alignment="bottom")
    if back.button("Previous", disabled=not place, width="stretch"):
        place -= 1
    if forward.button("Next", disabled=place == len(names) - 1, width="stretch"):
        place += 1
    name = select.selectbox("Student", names, index=place)
    st.session_state["student"] = st.query_params["student"] = name
    return name


def _one(database: Database, chosen: Assignment, grade: Grade) -> None:
    _head(grade)
    left, right = st.columns(2)
    with left, st.container(height=_HEIGHT_PX):
        notebook = read_notebook(blob(database, grade.submission.blob_sha), "submission")
        evidence = [one for verdict in grade.verdicts for one in verdict.evidence]
        st.html(notebook_html(notebook, [*evidence, *(one for flag in grade.flags for one in flag.evidence)]))
    with right, st.container(height=_HEIGHT_PX):
        _actions(database, grade)
        if told := list(dict.fromkeys(f"{flag.code}: {flag.message}" for flag in grade.flags)):
            st.warning("Flags:")
            st.code("\n".join(told), language=None, wrap_lines=True)
        show_items(database, grade)
        comments(database, chosen, grade)
        show_feedback(grade)
        show_history(database, grade)
        show_prompts(database, grade)
        _reveal(database, grade)


def _head(grade: Grade) -> None:
    score = grade.score
    open_part = f", {plain(score.pending)} open" if score.pending else ""
    machine = f"; the machine gave {plain(grade.machine.total)}" if score.total != grade.machine.total else ""
    st.subheader(f"{plain(score.total)} of {plain(score.maximum)} points{open_part}: {grade.state}{machine}")


def _actions(database: Database, grade: Grade) -> None:
    first, second, third = st.columns(3)
    submission = grade.submission.id
    with refusals():
        # A click on a grade that a worker changed meanwhile is a click on a button that is gone.
        key = f"approve-{submission}-{grade.content}"
        if first.button("Approve", key=key, type="primary", disabled=grade.approved, width="stretch"):
            approve_grade(database, grade, who())
            _done("Approved.")
        if second.button("Reopen", disabled=grade.review.approval is None, width="stretch"):
            reopen(database, submission, who(), "")
            _done("Open again.")
        if third.button("Undo", width="stretch"):
            taken = undo(database, submission, who())
            _done(f"Taken back: {taken.action} {taken.item}".rstrip())


def _done(text: str) -> None:
    note(text)
    st.rerun()


def _reveal(database: Database, grade: Grade) -> None:
    with st.expander("Who is it?"):
        with st.form("reveal"):
            why = st.text_input("Why you look (it is logged)")
            if not st.form_submit_button("Reveal"):
                return
        with refusals():
            found = reveal(database, [grade.submission.id], who(), why)[grade.submission.id]
            st.text(", ".join(part for part in (found.name, found.key, found.email) if part))
